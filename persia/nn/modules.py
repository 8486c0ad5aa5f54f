"""``Embedding``, ``EmbeddingBag`` and ``EmbeddingCollection``.

A module keeps three things: the table's anchor, a parameter that carries autograd; a version,
a buffer that changes with the rows; and the table's name. Rows are not in it.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from persia import ops
from persia._modules.lookups import PER_ID
from persia._modules.tables import ModuleTable, declare, declare_new
from persia.errors import CheckpointError, ConfigError, DataError
from persia.nn.weight import TableWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from persia.embedding import InitialValues

_MODES = ("sum", "mean", "max")
_numbers = itertools.count(1)  # of tables without a name


class TableModule(nn.Module):
    """A module that looks up in one table; base of ``Embedding`` and ``EmbeddingBag``."""

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
        is_new: bool,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        if isinstance(table, str) and name is not None:
            raise ConfigError(f"{kind}: expected one name, got {table!r} and {name!r}")
        for option, value in refused.items():
            if value:
                raise ConfigError(f"{kind}: {option} {_INSTEAD[option]}")
        if embedding_dim is None:
            raise ConfigError(f"{kind}: expected a name and a dim, as {kind}('user', 16)")
        name = table if isinstance(table, str) else name
        self.num_embeddings = None if isinstance(table, str) else table
        self.embedding_dim = embedding_dim
        if padding_idx is not None and padding_idx < 0 and self.num_embeddings is not None:
            padding_idx += self.num_embeddings
        self.padding_idx = padding_idx
        if name is None:
            name, is_new = f"embedding_{next(_numbers)}", True
        make = declare_new if is_new else declare
        self._take(make(name, embedding_dim, initialization))

    def _take(self, table: ModuleTable) -> None:
        """Look up in this table from now on."""
        self._table = table
        self.anchor = table.anchor
        self.register_buffer("version", torch.tensor(table.version), persistent=False)
        table.add_reader(self)

    @property
    def table(self) -> str:
        """The name of its table."""
        return self._table.name

    @property
    def weight(self) -> Any:
        """The rows of ids 0 to ``num_embeddings`` - 1, looked up when they are used.

        Raises:
            ConfigError: If ``num_embeddings`` is None.
        """
        if self.num_embeddings is None:
            raise ConfigError(
                f"table {self.table!r} has no fixed number of rows, so it has no weight; write "
                f"{type(self).__name__}({self.table!r}, {self.embedding_dim}, "
                "num_embeddings=...) to say which there are, or call the module with ids"
            )
        ids = torch.arange(self.num_embeddings)
        if torch.compiler.is_compiling():
            return self.rows(ids)
        return TableWeight(self, ids)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [N, dim] of ids [N], the padding id's with a gradient as well."""
        return self._vectors(ids, None, None, PER_ID, None)

    def _vectors(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        mode: str,
        padding: int | None,
    ) -> torch.Tensor:
        """Return [B, dim] of ids [N] in B samples, or of B ids where there are no offsets."""
        trains = self.training and self.anchor.requires_grad
        flat, _ = ops.lookup(
            self.version,
            [self.anchor],
            *(ids, offsets, weights),
            [self._table.key],
            [mode],
            [self.embedding_dim],
            padding,
            trains,
            trains and torch.is_grad_enabled(),
        )
        return flat.view(-1, self.embedding_dim)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        *,
        table: str | None = None,
        **options: Any,
    ) -> Self:
        """Return a module whose rows 0, 1, ... are those of ``embeddings`` f32 [n, dim].

        A frozen one sends no updates, and an id without a row has zeros.
        """
        if embeddings.dim() != 2:
            raise DataError(f"embeddings: expected [n, dim], got {list(embeddings.shape)}")
        count, dim = embeddings.shape
        module = cls(count if table is None else table, dim, **options)
        module.num_embeddings = count
        module.weight.copy_(embeddings)
        module.anchor.requires_grad_(not freeze)
        return module

    # --- copies and files -------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a module over the same rows: rows are not copied."""
        self._table.warn_of_copy()
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        for name, value in self.__dict__.items():
            if not name.startswith("_"):
                copied.__dict__[name] = copy.deepcopy(value, memo)
        copied._take(self._table)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle has: the table's name and dim, and no rows."""
        state = dict(self.__dict__)
        del state["_table"], state["_parameters"], state["_buffers"]
        return {**state, "table": self.get_extra_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the table of this name, or declare it."""
        reference = state.pop("table")
        frozen = reference.get("is_frozen", False)
        self.__dict__.update(state, _parameters={}, _buffers={})
        super().__setstate__(self.__dict__)
        self._take(declare(reference["name"], reference["dim"]))
        if frozen:
            self.anchor.requires_grad_(False)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the reference that a state dict has in place of rows."""
        return {
            "name": self._table.name,
            "dim": self.embedding_dim,
            "is_frozen": not self.anchor.requires_grad,
        }

    def set_extra_state(self, state: Any) -> None:
        """Check that a state dict is of the same table."""
        given = state["name"], state["dim"]
        if given != (self._table.name, self.embedding_dim):
            raise CheckpointError(
                f"the state dict is of table {given[0]!r} with dim {given[1]}, and the module "
                f"looks up in {self._table.name!r} with dim {self.embedding_dim}"
            )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Add the reference and nothing else."""
        destination[f"{prefix}_extra_state"] = self.get_extra_state()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take a reference, or rows that torch's module of this name has saved."""
        reference = state_dict.pop(f"{prefix}_extra_state", None)
        weight = state_dict.pop(f"{prefix}weight", None)
        if weight is not None:
            if weight.dim() != 2 or weight.shape[1] != self.embedding_dim:
                error_msgs.append(
                    f"{prefix}weight: expected [n, {self.embedding_dim}], got "
                    f"{list(weight.shape)}"
                )
                return
            TableWeight(self, torch.arange(len(weight))).copy_(weight)
        elif reference is None:
            missing_keys.append(f"{prefix}_extra_state")
        else:
            try:
                self.set_extra_state(reference)
            except CheckpointError as exc:
                error_msgs.append(str(exc))

    def extra_repr(self) -> str:
        """Return what torch prints of it."""
        size = "" if self.num_embeddings is None else f"{self.num_embeddings}, "
        return f"{self._table.name!r}, {size}{self.embedding_dim}"


_INSTEAD = {
    "max_norm": "has no meaning here; bound values by persia.optim's weight_bound",
    "scale_grad_by_freq": "is not supported; an Adagrad optimizer does what it is for",
}


class Embedding(TableModule):
    """Vectors of ids, as ``torch.nn.Embedding``, from a table without a fixed number of rows.

    Args:
        table: Its name; modules of one name share their rows. A number, or None, gives it a
            name of its own, and is what ``num_embeddings`` is: nothing is bounded by it.
        embedding_dim: Values of a vector.
        padding_idx: An id whose vector is not trained by lookups.
        initialization: What the values of a new row are drawn from; ``Normal(0, 1)`` as torch.
        name: The table's name, where the first argument is a number.
        is_new: Whether the name gets a number behind it if there is a table of that name.

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
        is_new: bool = False,
    ) -> None:
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        given = num_embeddings if table is None else table
        super().__init__(
            given, embedding_dim, padding_idx, name, initialization, refused, is_new
        )
        if isinstance(table, str):
            self.num_embeddings = num_embeddings

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name of the argument
        """Return the vectors of ids of any shape: that shape, and the dim behind it.

        Ids in a nested tensor give a nested tensor.
        """
        if input.is_nested:
            vectors = self._of_ids(input.values())
            return torch.nested.nested_tensor_from_jagged(vectors, input.offsets())
        return self._of_ids(input.reshape(-1)).view(*input.shape, self.embedding_dim)

    def _of_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self._vectors(ids, None, None, PER_ID, self.padding_idx)


class EmbeddingBag(TableModule):
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
        is_new: bool = False,
    ) -> None:
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        given = num_embeddings if table is None else table
        super().__init__(
            given, embedding_dim, padding_idx, name, initialization, refused, is_new
        )
        if isinstance(table, str):
            self.num_embeddings = num_embeddings
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
        return self._vectors(ids, edges, weights, self.mode, self.padding_idx)


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
            table.add_reader(self)
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
            None,
            trains,
            trains and torch.is_grad_enabled(),
        )
        num_samples = flat.numel() // sum(self.dims)
        parts = flat.split([num_samples * dim for dim in self.dims])
        return [part.view(num_samples, dim) for part, dim in zip(parts, self.dims, strict=True)]
