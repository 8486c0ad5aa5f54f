"""``Embedding``, ``EmbeddingBag`` and ``EmbeddingCollection``.

A module keeps three things: the table's anchor, a parameter that carries autograd; a version,
a buffer that changes with the rows; and the table's name. Rows are not in it.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from persia import ops
from persia._modules.homes import home_of
from persia._modules.tables import ModuleTable, declare, declare_new, find
from persia.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from persia.embedding import InitialValues

logger = logging.getLogger("persia.nn")

_MODES = ("sum", "mean", "max")
_numbers = itertools.count(1)  # of tables without a name


class _TableModule(nn.Module):
    """A module that looks up in one table."""

    version: torch.Tensor
    anchor: nn.Parameter

    def __init__(
        self,
        table: str | int | None,
        embedding_dim: int | None,
        padding_idx: int | None,
        name: str | None,
        initialization: InitialValues | None,
        refused: Mapping[str, object],
    ) -> None:
        super().__init__()
        num_embeddings: int | None
        if isinstance(table, str):
            if name is not None:
                raise ConfigError(f"table: expected one name, got {table!r} and {name!r}")
            name, num_embeddings = table, None
        else:
            num_embeddings = table
        for option, value in refused.items():
            if value:
                raise ConfigError(f"{type(self).__name__}: {option} {_INSTEAD[option]}")
        if embedding_dim is None:
            raise ConfigError(
                f"{type(self).__name__}: expected embedding_dim, as "
                f"{type(self).__name__}('user', 16)"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings
        self.padding_idx = padding_idx
        if name is None:
            found = declare_new(f"embedding_{next(_numbers)}", embedding_dim, initialization)
        else:
            found = declare(name, embedding_dim, initialization)
        self._take(found)

    def _take(self, table: ModuleTable) -> None:
        """Look up in this table from now on."""
        self._table = table
        self.anchor = table.anchor
        self.register_buffer("version", torch.tensor(table.version), persistent=False)
        table.versions.add(self)

    @property
    def table(self) -> str:
        """The name of its table."""
        return self._table.name

    def _vectors(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        mode: str,
    ) -> torch.Tensor:
        """Return [B, dim] of ids [N] in B samples, or of B ids where there are no offsets."""
        has_gradient = torch.is_grad_enabled() and self.anchor.requires_grad
        flat, _ = ops.lookup(
            self.version,
            [self.anchor],
            ids,
            offsets,
            weights,
            [self._table.key],
            [mode],
            [self.embedding_dim],
            self.training and self.anchor.requires_grad,
            has_gradient and self.training,
        )
        return flat.view(-1, self.embedding_dim)

    # --- copies and files -------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a module over the same rows: rows are not copied."""
        logger.warning(
            "table %r: a copy of its module reads and trains the same rows (persia.nn.save "
            "keeps rows as they are now)",
            self._table.name,
        )
        return self._copied(self.__dict__)

    def _copied(self, state: Mapping[str, Any]) -> Self:
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        plain = {
            name: one
            for name, one in state.items()
            if not name.startswith("_") and name not in nn.Module().__dict__
        }
        copied.__dict__.update(plain)
        copied.training = self.training
        copied._take(self._table)
        return copied

    def extra_repr(self) -> str:
        """Return what torch prints of it."""
        size = "" if self.num_embeddings is None else f"{self.num_embeddings}, "
        return f"{self._table.name!r}, {size}{self.embedding_dim}"


_INSTEAD = {
    "max_norm": "has no meaning here; bound values by persia.optim's weight_bound",
    "scale_grad_by_freq": "is not supported; an Adagrad optimizer does what it is for",
}


class Embedding(_TableModule):
    """Vectors of ids, as ``torch.nn.Embedding``, from a table without a fixed number of rows.

    Args:
        table: Its name; modules of one name share their rows. A number, or None, gives it a
            name of its own, and is what ``num_embeddings`` is: nothing is bounded by it.
        embedding_dim: Values of a vector.
        padding_idx: An id whose vector is not trained by lookups.
        initialization: What the values of a new row are drawn from; ``Normal(0, 1)`` as torch.
        name: The table's name, where the first argument is a number.

    Example:
        >>> user = persia.nn.Embedding("user", 16)  # doctest: +SKIP
        >>> user(torch.tensor([3, 1 << 40])).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        table: str | int | None = None,
        embedding_dim: int | None = None,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        initialization: InitialValues | None = None,
        name: str | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        given = num_embeddings if table is None else table
        super().__init__(given, embedding_dim, padding_idx, name, initialization, refused)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name of the argument
        """Return the vectors of ids of any shape: that shape, and the dim behind it.

        Ids in a nested tensor give a nested tensor.
        """
        if input.is_nested:
            vectors = self._of_ids(input.values())
            return torch.nested.nested_tensor_from_jagged(vectors, input.offsets())
        return self._of_ids(input.reshape(-1)).view(*input.shape, self.embedding_dim)

    def _of_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self._vectors(ids, None, None, "sum")


class EmbeddingBag(_TableModule):
    """Vectors of ids pooled per bag, as ``torch.nn.EmbeddingBag``, from a table of any size.

    Args:
        table: As of ``Embedding``, as are all that are not named here.
        mode: ``"sum"``, ``"mean"`` or ``"max"`` of the vectors of a bag.
        include_last_offset: Whether offsets end with the number of ids.
        padding_idx: An id that counts nothing in any bag.

    Example:
        >>> items = persia.nn.EmbeddingBag("item", 16)  # doctest: +SKIP
        >>> items(torch.tensor([[1, 2], [5, 1 << 40]])).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        table: str | int | None = None,
        embedding_dim: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        initialization: InitialValues | None = None,
        name: str | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        given = num_embeddings if table is None else table
        super().__init__(given, embedding_dim, padding_idx, name, initialization, refused)
        if mode not in _MODES:
            raise ConfigError(f"mode: expected one of {', '.join(_MODES)}, got {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,  # torch's name of the argument
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [B, dim] of ids [B, L], of ids [N] with offsets [B], or of nested ids."""
        weights = per_sample_weights
        if weights is not None and self.mode != "sum":
            raise DataError(
                f"per_sample_weights: expected mode 'sum', got {self.mode!r}; for a mean, "
                "divide the weights"
            )
        ids, edges = bags(input, offsets, include_last_offset=self.include_last_offset)
        if weights is not None:
            weights = weights.values() if weights.is_nested else weights.reshape(-1)
            if weights.numel() != ids.numel():
                raise DataError(
                    f"per_sample_weights: expected one for each of {ids.numel()} ids, got "
                    f"{weights.numel()}"
                )
        if self.padding_idx is not None:
            ids, edges, weights = without(self.padding_idx, ids, edges, weights)
        return self._vectors(ids, edges, weights, self.mode)


def bags(
    ids: torch.Tensor, offsets: torch.Tensor | None, *, include_last_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [N] and offsets [B + 1] of ids [B, L], nested, or with offsets."""
    if ids.is_nested:
        return ids.values(), ids.offsets()
    if ids.dim() == 2:
        if offsets is not None:
            raise DataError("offsets: expected None, as ids are of shape [B, L], got some")
        count, length = ids.shape
        edges = torch.arange(count + 1, device=ids.device, dtype=torch.int64) * length
        return ids.reshape(-1), edges
    if ids.dim() != 1 or offsets is None:
        raise DataError(
            f"ids: expected [B, L], a nested tensor, or [N] with offsets, got {list(ids.shape)}"
            f"{'' if offsets is None else ' with offsets'}"
        )
    if include_last_offset:
        return ids, offsets
    last = offsets.new_full((1,), ids.numel())
    return ids, torch.cat([offsets, last])


def without(
    padding: int, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return bags without an id."""
    keep = ids != padding
    counts = torch.cat([keep.new_zeros(1, dtype=torch.int64), keep.cumsum(0)])
    kept = None if weights is None else weights[keep]
    return ids[keep], counts[offsets], kept


class EmbeddingCollection(nn.Module):
    """Many features looked up in one call, each from its own table or from a shared one.

    Args:
        tables: By feature its dim, or its table's name and dim: ``{"user": 16}`` or
            ``{"clicked": ("item", 16), "item": ("item", 16)}``.
        mode: Pooling of all features, ``"sum"``, ``"mean"`` or ``"max"``, or one by feature.
        initialization: As of ``Embedding``, of all tables.

    A call takes ids by feature, each [B], [B, L], nested, or a pair (ids, offsets [B + 1]), and
    returns the vectors [B, dim] by feature. It also takes ids [B, F] of all features, in their
    order, and returns a list; or TorchRec's KeyedJaggedTensor, and returns a KeyedTensor.
    """

    version: torch.Tensor

    def __init__(
        self,
        tables: Mapping[str, int | tuple[str, int]],
        *,
        mode: str | Mapping[str, str] = "sum",
        initialization: InitialValues | None = None,
    ) -> None:
        super().__init__()
        if not tables:
            raise ConfigError("EmbeddingCollection: expected at least one feature, got none")
        self.features = tuple(tables)
        self._declared: list[ModuleTable] = []
        for feature, given in tables.items():
            name, dim = given if isinstance(given, tuple) else (feature, given)
            self._declared.append(declare(name, dim, initialization))
        modes = [mode if isinstance(mode, str) else mode[name] for name in self.features]
        for one in modes:
            if one not in _MODES:
                raise ConfigError(f"mode: expected one of {', '.join(_MODES)}, got {one!r}")
        self.modes = modes
        self.dims = [table.dim for table in self._declared]
        self.anchors = nn.ParameterList([table.anchor for table in self._declared])
        self.register_buffer("version", torch.tensor(0), persistent=False)
        for table in self._declared:
            table.versions.add(self)
        self._keys = [table.key for table in self._declared]

    def forward(self, features: Any) -> Any:
        """Return the vectors of all features; see the class."""
        if isinstance(features, torch.Tensor):
            return self._look_up(features.t().reshape(-1), None, None)
        if hasattr(features, "keys") and hasattr(features, "offsets"):
            return self._of_jagged(features)
        ids, offsets = self._joined(features)
        return dict(zip(self.features, self._look_up(ids, offsets, None), strict=True))

    def _joined(self, features: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        if set(features) != set(self.features):
            missing = [name for name in self.features if name not in features]
            unknown = [name for name in features if name not in self.features]
            raise DataError(
                f"features: expected {', '.join(self.features)}; missing "
                f"{', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}"
            )
        given = [features[name] for name in self.features]
        if all(isinstance(one, torch.Tensor) and one.dim() == 1 for one in given):
            return torch.cat(given), None
        values, edges, begin = [], [], 0
        for one in given:
            if isinstance(one, torch.Tensor) and one.dim() == 1:
                one = one.unsqueeze(1)
            pair = one if isinstance(one, tuple) else (one, None)
            ids, offsets = bags(*pair, include_last_offset=True)
            values.append(ids)
            edges.append(offsets[:-1] + begin)
            begin += ids.numel()
        edges.append(edges[0].new_full((1,), begin))
        return torch.cat(values), torch.cat(edges)

    def _of_jagged(self, features: Any) -> Any:
        """Look a KeyedJaggedTensor up."""
        keys = list(features.keys())
        if keys != list(self.features):
            features = features.permute([keys.index(name) for name in self.features])
        vectors = self._look_up(
            features.values(), features.offsets(), features.weights_or_none()
        )
        from torchrec import KeyedTensor  # installed, as its other type was given

        return KeyedTensor(list(self.features), self.dims, torch.cat(vectors, 1))

    def _look_up(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> list[torch.Tensor]:
        anchors = list(self.anchors)
        trains = self.training and any(anchor.requires_grad for anchor in anchors)
        flat, _ = ops.lookup(
            self.version,
            anchors,
            ids,
            offsets,
            weights,
            self._keys,
            self.modes,
            self.dims,
            trains,
            trains and torch.is_grad_enabled(),
        )
        num_samples = flat.numel() // sum(self.dims)
        parts = flat.split([num_samples * dim for dim in self.dims])
        return [part.view(num_samples, dim) for part, dim in zip(parts, self.dims, strict=True)]
