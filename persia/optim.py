"""Optimizers of rows as ``torch.optim`` has them: they step the tables of ``persia.nn``.

Each has the options and formulas of the class of its name in ``persia.embedding.optim``. There is
one parameter group per table, so that learning rates and schedules are set as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from persia import env
from persia._core.kernels.optim import number
from persia._modules.homes import attach_optimizer
from persia._modules.lookups import TableStep, drop_gradients, note_accumulated, step
from persia._modules.tables import ModuleTable, of_anchor
from persia.embedding import optim as of_rows
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Lion",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SparseAdam",
    "TableOptimizer",
]


class TableOptimizer(torch.optim.Optimizer):
    """Base of the optimizers of rows.

    Args:
        params: ``persia.nn.sparse_parameters(model)``, or parameters of a model.
        options: Those of the class of this name in ``persia.embedding.optim``.
        max_row_norm: Scale the gradient of each row down to this norm.
        max_norm: Scale the gradient of each table down to this norm.
        weight_bound: Keep every value of a row within this after a step; 0 for no bound.
        fused: Step at the end of each backward; ``step`` does nothing then.
    """

    rows: ClassVar[type[of_rows.Optimizer]]

    def __init__(
        self,
        params: Iterable[Any],
        *,
        max_row_norm: float | None = None,
        max_norm: float | None = None,
        weight_bound: float = 0.0,
        fused: bool = False,
        **options: Any,
    ) -> None:
        settings = self.rows(**options)
        for name, value in (("max_row_norm", max_row_norm), ("max_norm", max_norm)):
            if value is not None and number(type(self).__name__, name, value) <= 0:
                raise ConfigError(f"{type(self).__name__}: {name} must be above 0, got {value}")
        defaults = {
            **{
                name: getattr(settings, name)
                for name in settings.settings().options
                if hasattr(settings, name)
            },
            "max_row_norm": max_row_norm,
            "max_norm": max_norm,
            "weight_bound": weight_bound,
        }
        self.is_fused = fused
        self._options = {name: value for name, value in vars(settings).items()}
        super().__init__(_groups(params, type(self).__name__), {**defaults, **self._options})
        self._attach()

    def _attach(self) -> None:
        """Have the tables of all groups stepped by this optimizer."""
        by_options: dict[str, tuple[of_rows.Optimizer, float, list[ModuleTable]]] = {}
        for group in self.param_groups:
            options = {name: group[name] for name in self._options}
            settings = self.rows(**_accepted(self.rows, options))
            key = repr((settings, group["weight_bound"]))
            entry = by_options.setdefault(key, (settings, group["weight_bound"], []))
            entry[2].append(_table_of(group))
        for settings, bound, tables in by_options.values():
            attach_optimizer(tables, settings.settings(), bound)
        for group in self.param_groups:
            table = _table_of(group)
            table.anchor.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, anchor: torch.Tensor) -> None:
        table = of_anchor(anchor)
        if table is None:
            return
        note_accumulated(table)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every row that has a gradient, once; return what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = []
        for group in self.param_groups:
            table = _table_of(group)
            if table.anchor.grad is None:
                drop_gradients(table)
            elif table.anchor.requires_grad:
                steps.append(
                    TableStep(
                        table, float(group["lr"]), group["max_row_norm"], group["max_norm"]
                    )
                )
        step(steps, float(env.get_world_size() or 1))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of rows."""
        super().zero_grad(set_to_none=set_to_none)
        for group in self.param_groups:
            drop_gradients(_table_of(group))


def _accepted(rows: type[of_rows.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    return options


def _table_of(group: dict[str, Any]) -> ModuleTable:
    table = of_anchor(group["params"][0])
    if table is None:
        raise ConfigError("a parameter group of persia.optim has no table")
    return table


def _groups(params: Iterable[Any], optimizer: str) -> list[dict[str, Any]]:
    """Return one group per table."""
    found: list[dict[str, Any]] = []
    for given in params:
        group = given if isinstance(given, dict) else {"params": [given]}
        parameters = group["params"]
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            table = of_anchor(parameter)
            if table is None:
                raise ConfigError(
                    f"persia.optim.{optimizer}: expected parameters that stand for tables, got "
                    f"one of shape {list(parameter.shape)}; write persia.nn.sparse_parameters("
                    "model) here, and persia.nn.dense_parameters(model) for torch's optimizer"
                )
            found.append({**group, "params": [parameter], "table": table.name})
    return found


class SGD(TableOptimizer):
    """Stochastic gradient descent; see ``persia.embedding.optim.SGD``."""

    rows = of_rows.SGD


class Adagrad(TableOptimizer):
    """Adagrad; see ``persia.embedding.optim.Adagrad``."""

    rows = of_rows.Adagrad


class Adam(TableOptimizer):
    """Adam; see ``persia.embedding.optim.Adam``."""

    rows = of_rows.Adam


class SparseAdam(Adam):
    """Adam by the name that torch has for the one that steps the rows of a batch only."""


class RMSprop(TableOptimizer):
    """RMSprop; see ``persia.embedding.optim.RMSprop``."""

    rows = of_rows.RMSprop


class FTRL(TableOptimizer):
    """FTRL-Proximal; see ``persia.embedding.optim.FTRL``."""

    rows = of_rows.FTRL


class Lion(TableOptimizer):
    """Lion; see ``persia.embedding.optim.Lion``."""

    rows = of_rows.Lion


class RowwiseAdagrad(TableOptimizer):
    """Adagrad with one sum per row; see ``persia.embedding.optim.RowwiseAdagrad``."""

    rows = of_rows.RowwiseAdagrad


class RowwiseAdam(TableOptimizer):
    """Adam with one second moment per row; see ``persia.embedding.optim.RowwiseAdam``."""

    rows = of_rows.RowwiseAdam
