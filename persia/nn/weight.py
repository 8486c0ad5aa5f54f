"""``weight`` of a module whose rows are not in it: looked up when it is used.

What reads it as a tensor (``emb.weight @ x``) gets the rows of ids 0 to num_embeddings - 1,
with gradients. What changes it in place (``torch.nn.init.normal_(emb.weight)``,
``emb.weight.data[0].zero_()``) writes rows. Shape, dtype and device cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from persia._core.ids.joined_features import PER_ID
from persia._modules.homes import read_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

# These set every value, so that nothing need be read before.
_OVERWRITES = frozenset(
    (
        *("normal_", "uniform_", "zero_", "fill_", "copy_", "constant_", "zeros_", "ones_"),
        *("xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_"),
        *("exponential_", "cauchy_", "log_normal_"),
    )
)
_SHAPE_ONLY = frozenset(
    (
        *("size", "dim", "numel", "nelement", "element_size", "ndimension", "stride"),
        *("is_floating_point", "is_complex", "__len__", "__hash__", "type", "get_device"),
        *("is_contiguous", "__get__.shape", "__get__.dtype", "__get__.device", "__get__.ndim"),
        *("__get__.layout", "__get__.is_sparse", "__get__.is_cuda", "__get__.requires_grad"),
        *("__get__.is_leaf", "__get__.grad", "__get__.names", "__get__.is_nested"),
        *("__get__.is_quantized", "__get__.is_meta", "__get__.is_cpu", "__get__.itemsize"),
        *("__get__.nbytes", "__get__.grad_fn", "__get__._version"),
    )
)


class TableWeight(torch.Tensor):
    """Rows of a table as a tensor that is looked up at its first use; see the module."""

    _module: Any  # a ``TableModule``, whose file imports this one
    _ids: range
    _is_row: bool  # of one id, without the first dimension

    @staticmethod
    def __new__(
        cls: type[TableWeight],
        module: Any,
        ids: range,
        *,
        is_row: bool = False,
        has_gradient: bool = True,
    ) -> TableWeight:
        """Stand for the rows of ``ids``, f32 [n, dim], or [dim] of one."""
        dim, anchor = module.embedding_dim, module.anchor
        shape = (dim,) if is_row else (len(ids), dim)
        weight = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=anchor.dtype,
            device=anchor.device,
            requires_grad=anchor.requires_grad and has_gradient,
        )
        weight._module, weight._ids, weight._is_row = module, ids, is_row
        assert_type: TableWeight = weight
        return assert_type

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TableWeight({self._module.table_name!r}, {list(self.shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what a function of torch means for rows that are elsewhere."""
        given = dict(kwargs or {})
        name = _name_of(func)
        weight = next((one for one in (*args, *given.values()) if isinstance(one, cls)), None)
        if name in _SHAPE_ONLY or (weight is None and name.startswith("__get__")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if weight is not None and name in ("__get__.data", "detach"):
            return cls(weight._module, weight._ids, is_row=weight._is_row, has_gradient=False)
        if weight is not None and name in ("requires_grad_", "__set__.requires_grad"):
            weight._module.anchor.requires_grad_(
                args[1] if len(args) > 1 else given.get("requires_grad", True)
            )
            return weight
        if name == "__getitem__" and args[0] is weight and weight is not None:
            picked = weight._pick(args[1])
            if picked is not None:
                return picked
        if func is torch.nn.functional.embedding and args[1] is weight is not None:
            vectors = weight._embedded(args[0], **given)
            if vectors is not None:
                return vectors
        if weight is not None and _is_in_place(name):
            weight._change(func, name, args, given)
            return weight
        plain_args, plain_given = tree_map(_looked_up, (tuple(args), given))
        return func(*plain_args, **plain_given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is of another kind
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look up below autograd, where nothing was looked up above it."""
        plain_args, plain_given = tree_map(_looked_up, (tuple(args), dict(kwargs or {})))
        return func(*plain_args, **plain_given)

    def _embedded(
        self,
        ids: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        **_: Any,
    ) -> torch.Tensor | None:
        """Return the vectors of ids, of which any has a row; None where torch is to do it."""
        module, count = self._module, self._module.num_embeddings
        if self._ids != range(count) or max_norm is not None or scale_grad_by_freq:
            return None
        padding = padding_idx
        if padding is not None and padding < 0:
            padding += count
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
            vectors = module._vectors(ids.reshape(-1), None, None, PER_ID, padding)
        found: torch.Tensor = vectors.view(*ids.shape, module.embedding_dim)
        return found

    def _pick(self, index: Any) -> TableWeight | None:
        """Return the rows that an index of the first dimension picks, or None of another."""
        if self._is_row or isinstance(index, bool | tuple):
            return None
        has_gradient = self.requires_grad
        if isinstance(index, int):
            one = self._ids[index]
            ids = range(one, one + 1)
            return TableWeight(self._module, ids, is_row=True, has_gradient=has_gradient)
        if isinstance(index, slice):
            return TableWeight(self._module, self._ids[index], has_gradient=has_gradient)
        return None

    def _change(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], given: Mapping[str, Any]
    ) -> None:
        """Run a function that changes its argument on the rows, and write them."""
        table = self._module._tables[0]
        ids = _array(self._ids)
        if name in _OVERWRITES:
            plain = torch.empty(self.shape)
        else:
            plain = torch.from_numpy(read_rows(table, ids).copy()).view(self.shape)

        def put(one: Any) -> Any:
            return plain if one is self else _looked_up(one)

        plain_args, plain_given = tree_map(put, (tuple(args), dict(given)))
        with torch.no_grad():
            func(*plain_args, **plain_given)
        write_rows(table, ids, plain.view(len(ids), table.dim).numpy())


def _array(ids: range) -> NDArray[np.uint64]:
    return np.arange(ids.start, ids.stop, ids.step, dtype=np.uint64)


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return f"{name}.{getattr(getattr(func, '__self__', None), '__name__', '')}"
    return name


def _is_in_place(name: str) -> bool:
    if name in ("__setitem__", "__set__.data"):
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name[3:-2] in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")
    return name.endswith("_") and not name.endswith("__")


def _looked_up(one: Any) -> Any:
    """Return the vectors of a weight, with gradients where they are on; others as they are."""
    if not isinstance(one, TableWeight):
        return one
    module = one._module
    if one.requires_grad:
        vectors = module.rows(torch.from_numpy(_array(one._ids).view(np.int64)))
    else:
        found = read_rows(module._tables[0], _array(one._ids))
        vectors = torch.from_numpy(found.copy()).to(module.anchor.device, module.anchor.dtype)
    return vectors[0] if one._is_row else vectors
