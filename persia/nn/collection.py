"""``EmbeddingCollection``: the features of a model, looked up in one call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from persia import ops
from persia._modules.rows import ModuleRows
from persia._modules.tables import ModuleTable, declare
from persia.errors import ConfigError, DataError
from persia.nn.base import RowModule
from persia.nn.modules import MODES, bags, no_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from persia.embedding import InitialValues
    from persia.tables import Table


class EmbeddingCollection(RowModule):
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
        modes = [mode if isinstance(mode, str) else mode[name] for name in self.features]
        for one in modes:
            if one not in MODES:
                raise ConfigError(f"mode: expected one of {', '.join(MODES)}, got {one!r}")
        self.modes = modes
        declared = []
        for feature, given in tables.items():
            name, dim = given if isinstance(given, tuple) else (feature, given)
            declared.append(declare(name, dim, initialization))
        self._take(declared)

    def _take(self, tables: Sequence[ModuleTable]) -> None:
        super()._take(tables)
        for place, table in enumerate(tables):
            self.register_parameter(f"anchor_{place}", table.anchor)
        self.dims = [table.dim for table in tables]
        self.keys = [table.key for table in tables]

    @property
    def tables(self) -> dict[str, Table]:
        """The rows by id of each feature, where they are now."""
        rows = (ModuleRows(table) for table in self._tables)
        return dict(zip(self.features, rows, strict=True))

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
        for name, one in zip(self.features, given, strict=True):
            if isinstance(one, torch.Tensor) and one.dim() == 1:
                one = one.unsqueeze(1)
            pair = one if isinstance(one, tuple) else (one, None)
            if not isinstance(pair[0], torch.Tensor):
                raise no_tensor(name, pair[0])
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
        # Installed, as its other type was given.
        keyed: Any = importlib.import_module("torchrec").KeyedTensor

        return keyed(list(self.features), self.dims, torch.cat(vectors, 1))

    def _look_up(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> list[torch.Tensor]:
        anchors: list[Any] = list(self._parameters.values())
        trains = self.training and any(anchor.requires_grad for anchor in anchors)
        if trains and weights is None:
            apart = ops.look_up_apart(anchors, ids, offsets, self.keys, self.modes)
            if apart is not None:
                return list(apart)
        flat = ops.look_up(
            self.version,
            anchors,
            ids,
            offsets,
            weights,
            self.keys,
            self.modes,
            self.dims,
            None,
            trains,
            trains and torch.is_grad_enabled(),
        )
        num_samples = flat.numel() // sum(self.dims)
        parts = torch.split(flat, [num_samples * dim for dim in self.dims])
        return [part.view(num_samples, dim) for part, dim in zip(parts, self.dims, strict=True)]
