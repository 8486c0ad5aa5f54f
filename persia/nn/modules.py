"""``Embedding`` and ``EmbeddingBag``: torch's, over tables without a fixed number of rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from persia import ops
from persia._core.ids.joined_features import PER_ID
from persia._modules import joint
from persia._modules.homes import write_rows
from persia._modules.requests import ids_of
from persia._modules.rows import ModuleRows
from persia._modules.tables import ModuleTable, declare, declare_new
from persia.errors import ConfigError, DataError, DataTypeError
from persia.nn.base import RowModule
from persia.nn.weight import TableWeight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from persia._modules.joint import Joint
    from persia.embedding import InitialValues
    from persia.tables import Table

MODES = ("sum", "mean", "max")
_numbers = itertools.count(1)  # of tables without a name


class TableModule(RowModule):
    """A module that looks up in one table; base of ``Embedding`` and ``EmbeddingBag``."""

    anchor: nn.Parameter

    def __init__(
        self,
        table: str | int | None,
        embedding_dim: int | None,
        padding_idx: int | None,
        name: str | None,
        num_embeddings: int | None,
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
        if isinstance(table, str):
            name = table
        elif table is not None:
            num_embeddings = table
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        if padding_idx is not None and padding_idx < 0 and self.num_embeddings is not None:
            padding_idx += self.num_embeddings
        self.padding_idx = padding_idx
        if name is None:
            name, is_new = f"embedding_{next(_numbers)}", True
        make = declare_new if is_new else declare
        self._take([make(name, embedding_dim, initialization)])

    def _take(self, tables: Sequence[ModuleTable]) -> None:
        super()._take(tables)
        self.anchor = tables[0].anchor

    @property
    def table_name(self) -> str:
        """The name of its table."""
        return self._tables[0].name

    @property
    def table(self) -> Table:
        """Its rows by id, where they are now: to read, write, delete, count and export.

        Raises:
            ConfigError: If the servers have no slot of this name.
        """
        return ModuleRows(self._tables[0])

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse to replace the rows by a matrix, as ``module.weight = ...`` does."""
        if name == "weight":
            raise ConfigError(
                f"table {self.table_name!r}: its weight is rows, which a parameter cannot "
                "replace; write module.weight.data.copy_(values), or module.table.write(ids, "
                "values)"
            )
        super().register_parameter(name, param)

    @property
    def weight(self) -> Any:
        """The rows of ids 0 to ``num_embeddings`` - 1, looked up when they are used.

        Raises:
            ConfigError: If ``num_embeddings`` is None.
        """
        if self.num_embeddings is None:
            raise ConfigError(
                f"table {self.table_name!r} has no fixed number of rows, so it has no weight; "
                f"write {type(self).__name__}({self.table_name!r}, {self.embedding_dim}, "
                "num_embeddings=...) to say which there are, or call the module with ids"
            )
        if torch.compiler.is_compiling():
            return self.rows(torch.arange(self.num_embeddings))
        return TableWeight(self, range(self.num_embeddings))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [N, dim] of ids [N], the padding id's with a gradient as well."""
        return self._vectors(ids, None, None, PER_ID, None)

    def _joint(self) -> Joint | None:
        """Return what its vectors may be in, looked up with those of other modules."""
        if torch.compiler.is_compiling() or not self.training or self.padding_idx is not None:
            return None
        return joint.current()

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
        flat = ops.look_up(
            self.version,
            [self.anchor],
            *(ids, offsets, weights),
            [self._tables[0].key],
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
        ids: torch.Tensor | None = None,
        table: str | None = None,
        **options: Any,
    ) -> Self:
        """Return a module with rows ``embeddings`` f32 [n, dim], of ``ids`` [n] or 0, 1, ...

        A frozen one sends no updates, and an id without a row has zeros.
        """
        if embeddings.dim() != 2:
            raise DataError(f"embeddings: expected [n, dim], got {list(embeddings.shape)}")
        count, dim = embeddings.shape
        if ids is not None and ids.shape != (count,):
            raise DataError(f"ids: expected [{count}], one a row, got {list(ids.shape)}")
        module = cls(table, dim, **options)
        if ids is None:
            module.num_embeddings = count
            module.weight.copy_(embeddings)
        else:
            rows = embeddings.detach().to("cpu", torch.float32).contiguous().numpy()
            write_rows(module._tables[0], ids_of(ids), rows)
        module.anchor.requires_grad_(not freeze)
        return module

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
        weight = state_dict.get(f"{prefix}weight")
        if weight is None:
            super()._load_from_state_dict(
                *(state_dict, prefix, local_metadata, strict),
                *(missing_keys, unexpected_keys, error_msgs),
            )
        elif weight.dim() != 2 or weight.shape[1] != self.embedding_dim:
            error_msgs.append(
                f"{prefix}weight: expected [n, {self.embedding_dim}], got {list(weight.shape)}"
            )
        else:
            TableWeight(self, range(len(weight))).copy_(weight)

    def extra_repr(self) -> str:
        """Return what torch prints of it."""
        size = "" if self.num_embeddings is None else f"{self.num_embeddings}, "
        return f"{self._tables[0].name!r}, {size}{self.embedding_dim}"


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
        super().__init__(
            *(table, embedding_dim, padding_idx, name, num_embeddings),
            *(initialization, refused, is_new),
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name of the argument
        """Return the vectors of ids of any shape: that shape, and the dim behind it.

        Ids in a nested tensor give a nested tensor.
        """
        if not isinstance(input, torch.Tensor):
            raise no_tensor(self.table_name, input)
        if input.is_nested:
            values, edges = parts_of(input)
            return torch.nested.nested_tensor_from_jagged(
                self._of_ids(values), edges, **_lengths_of(input)
            )
        together = self._joint()
        if together is not None:
            found = together.take(self._tables[0], self._parameters["anchor"], input)
            if found is not None:
                return found.view(*input.shape, self.embedding_dim)
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
        super().__init__(
            *(table, embedding_dim, padding_idx, name, num_embeddings),
            *(initialization, refused, is_new),
        )
        if mode not in MODES:
            raise ConfigError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,  # torch's name of the argument
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [B, dim] of ids [B, L], of ids [N] with offsets [B], or of nested ids."""
        if not isinstance(input, torch.Tensor):
            raise no_tensor(self.table_name, input)
        weights = per_sample_weights
        together = self._joint() if weights is None else None
        if together is not None:
            found = together.take(
                self._tables[0],
                self._parameters["anchor"],  # not by attribute, which takes longer
                input,
                offsets,
                is_pooled=True,
                include_last_offset=self.include_last_offset,
            )
            if found is not None:
                return found
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


def no_tensor(table: str, ids: object) -> DataTypeError:
    """Return the error of ids that are no tensor."""
    kind = type(ids)
    write = "torch.from_numpy(ids)" if kind.__module__ == "numpy" else "torch.tensor(ids)"
    return DataTypeError(
        f"table {table!r}: ids: expected a tensor, got {kind.__module__}.{kind.__name__}; "
        f"write {write}"
    )


def parts_of(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and offsets of a nested tensor, whose class torch does not name."""
    if nested.layout is not torch.jagged:
        raise DataError("nested ids: expected layout=torch.jagged")
    return nested.values(), nested.offsets()


def _lengths_of(nested: Any) -> dict[str, Any]:
    """Return the least and greatest length of a nested tensor, where it has them.

    Without them ``to_padded_tensor`` pads to the number of all values.
    """
    if torch.compiler.is_compiling():
        return {}
    names = ("min_seqlen", "max_seqlen")
    return {name: getattr(nested, f"_maybe_{name}", None) for name in names}


def bags(
    ids: torch.Tensor, offsets: torch.Tensor | None, *, include_last_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [N] and offsets [B + 1] of ids [B, L], nested, or with offsets."""
    if ids.is_nested:
        return parts_of(ids)
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
