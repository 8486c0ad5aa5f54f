"""Optimizers of rows as ``torch.optim`` has them: they step the tables of ``persia.nn``.

Each has the options and formulas of the class of its name in ``persia.embedding.optim``. There
is one parameter group per table, so that rates and schedules are set as always.

The gradient of a table is collected over backward passes and applied once, at ``step``. What
stands for it among parameters is the table's anchor, whose gradient has its norm: a GradScaler
looks at it and scales it, ``torch.nn.utils.clip_grad_norm_`` counts it and scales it, and the
step scales the rows' gradients as it was scaled.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from persia import env
from persia._core.kernels.optim import number
from persia._modules.homes import attach_optimizer
from persia._modules.lookups import TableStep, note_accumulated, step
from persia._modules.tables import ModuleTable, of_anchor
from persia.embedding import optim as of_rows
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SparseAdam",
    "TableOptimizer",
]


if not TYPE_CHECKING:  # for which an unknown name stays unknown

    def __getattr__(name: str) -> Any:
        found = getattr(torch.optim, name, None)
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
            raise AttributeError(
                f"persia.optim.{name}: there is none for rows, but there are "
                f"{', '.join(__all__[:-1])}; torch's own steps other parameters"
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class TableOptimizer(torch.optim.Optimizer):
    """Base of the optimizers of rows.

    Args:
        params: ``persia.nn.sparse_parameters(model)``; or all parameters of a model, the others
            of which are stepped by the optimizer of torch that has the same name.
        lr: Learning rate; the default is that of the class in ``persia.embedding.optim``.
        max_row_norm: Scale the gradient of each row down to this norm.
        max_norm: Scale the gradient of each table down to this norm.
        weight_bound: Keep each value of a row within this after a step; 0 for no bound.
        fused: Step when a backward has ended; ``step`` then steps other parameters only. So
            gradients are not added up over several backwards, nor clipped by torch.
        foreach: Ignored: torch's word for how it computes, which is not how rows are stepped.
        options: Others of the class of this name in ``persia.embedding.optim``.

    To freeze a table, call ``requires_grad_(False)`` of its module: it then sends nothing.

    Raises:
        ConfigError: If an option cannot be used, or no parameter stands for a table.
    """

    rows: ClassVar[type[of_rows.Optimizer]]
    dense: ClassVar[Callable[..., torch.optim.Optimizer] | None] = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        *,
        max_row_norm: float | None = None,
        max_norm: float | None = None,
        weight_bound: float = 0.0,
        fused: bool = False,
        foreach: bool | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        for option, value in (("max_row_norm", max_row_norm), ("max_norm", max_norm)):
            if value is not None and number(name, option, value) <= 0:
                raise ConfigError(f"{name}: {option} must be above 0, got {value!r}")
        if lr is not None:
            options["lr"] = lr
        settings = self.rows(**options)
        accepted = inspect.signature(self.rows.__init__).parameters
        self._options = {key: value for key, value in vars(settings).items() if key in accepted}
        self.is_fused = fused
        self._num_fused: Counter[ModuleTable] = Counter()  # steps since the last ``step``
        self._inner: torch.optim.Optimizer | None = None  # of parameters that are no tables
        self._is_ready = False
        self._seen: list[Any] = []  # groups, and their parameters, of which these are found
        self._found: dict[ModuleTable, dict[str, Any]] = {}
        groups = _groups(params)
        if not any(isinstance(group.get("table"), str) for group in groups):
            raise ConfigError(
                f"persia.optim.{name}: none of the parameters stands for a table of persia.nn; "
                "give it persia.nn.sparse_parameters(model), after persia.nn.convert(model)"
            )
        defaults = {
            **self._options,
            "max_row_norm": max_row_norm,
            "max_norm": max_norm,
            "weight_bound": number(name, "weight_bound", weight_bound),
        }
        super().__init__(groups, defaults)
        self._is_ready = True
        self._attach(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch's optimizers do: one group per table."""
        if not self._is_ready:
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        for group in _groups([param_group]):
            super().add_param_group(group)
        self._attach(self.param_groups[before:])

    def _attach(self, groups: list[dict[str, Any]]) -> None:
        """Have the tables of groups stepped by this optimizer."""
        alike: dict[str, tuple[of_rows.Optimizer, float, list[ModuleTable]]] = {}
        for group in groups:
            table = _table_of(group)
            if table is None:
                continue
            settings = self.rows(**{name: group[name] for name in self._options})
            key = repr((settings, group["weight_bound"]))
            alike.setdefault(key, (settings, group["weight_bound"], []))[2].append(table)
            table.after_backward = self._step_fused if self.is_fused else note_accumulated
        for settings, bound, tables in alike.values():
            attach_optimizer(tables, settings.settings(), bound)
        self._make_inner()

    def _make_inner(self) -> None:
        """Have the parameters that are no tables stepped by torch's optimizer."""
        own = [group for group in self.param_groups if _table_of(group) is None]
        if not own:
            return
        if self.dense is None:
            raise ConfigError(
                f"persia.optim.{type(self).__name__} steps rows only, as torch has no such "
                "optimizer; give it persia.nn.sparse_parameters(model), and an optimizer of "
                "torch persia.nn.dense_parameters(model)"
            )
        accepted = self.dense([torch.nn.Parameter(torch.zeros(1))]).defaults
        options = {name: value for name, value in self._options.items() if name in accepted}
        plain = [{name: group[name] for name in ("params", *options)} for group in own]
        self._inner = self.dense(plain, **options)
        for group, inner in zip(own, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name not in group})
        self._inner.param_groups = own  # the same, so that a schedule sets both
        self._inner.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every row that has a gradient, once; return what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._inner is not None:
            of_tables = set(map(id, self._tables().values()))
            self._inner.param_groups = [x for x in self.param_groups if id(x) not in of_tables]
            self._inner.state = self.state
            self._inner.step()
        if not self.is_fused:
            self._step_tables(self._tables())
        for table, count in self._num_fused.most_common(1):
            if count > 1:
                table.warn(
                    f"fused=True has stepped its rows {count} times, once for each backward, "
                    "since the step() before: gradients are not added up, nor clipped by "
                    "torch; leave it out if they shall be, as torch's fused= is another thing"
                )
        self._num_fused.clear()
        return loss

    def _tables(self) -> Mapping[ModuleTable, dict[str, Any]]:
        """Return the groups by table, found again where others have taken their places."""
        now = [one for group in self.param_groups for one in (group, group["params"])]
        if len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            found = [(_table_of(group), group) for group in self.param_groups]
            self._found = {table: group for table, group in found if table is not None}
            self._seen = now
        return self._found

    def _step_tables(self, tables: Mapping[ModuleTable, dict[str, Any]]) -> None:
        steps = []
        for table, group in tables.items():
            if table.anchor.grad is None or not table.anchor.requires_grad:
                table.pending.drop()
                continue
            steps.append(
                TableStep(table, float(group["lr"]), group["max_row_norm"], group["max_norm"])
            )
        step(steps, env.get_world_size() or 1)

    def _step_fused(self, table: ModuleTable) -> None:
        note_accumulated(table)
        self._num_fused[table] += 1
        with torch.no_grad():
            self._step_tables({table: self._tables()[table]})
        table.anchor.grad = None
        table.pending.drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of rows, and of other parameters."""
        super().zero_grad(set_to_none=set_to_none)
        for table in self._tables():
            table.pending.drop()


def _table_of(group: dict[str, Any]) -> ModuleTable | None:
    """Return the table of a parameter group, None of one with other parameters."""
    return of_anchor(group["params"][0]) if "table" in group and group["params"] else None


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return one group per table, and one per given group of what is none."""
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    plain: dict[str, Any] = {"params": []}
    for given in params:
        is_group = isinstance(given, dict)
        group = given if is_group else {"params": given}
        parameters = group["params"]
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        rest = {"params": []} if is_group else plain
        for item in parameters:
            parameter = item[1] if isinstance(item, tuple) else item
            table = of_anchor(parameter)
            if table is None:
                rest["params"].append(parameter)
            elif id(parameter) not in seen:
                seen.add(id(parameter))
                found.append({**group, "params": [parameter], "table": table.name})
        if is_group and rest["params"]:
            options = {name: value for name, value in group.items() if name != "table"}
            found.append({**options, "params": rest["params"]})
    if plain["params"]:
        found.append(plain)
    return found


class SGD(TableOptimizer):
    """Stochastic gradient descent; see ``persia.embedding.optim.SGD``."""

    rows = of_rows.SGD
    dense = torch.optim.SGD


class Adagrad(TableOptimizer):
    """Adagrad; see ``persia.embedding.optim.Adagrad``."""

    rows = of_rows.Adagrad
    dense = torch.optim.Adagrad


class Adam(TableOptimizer):
    """Adam; see ``persia.embedding.optim.Adam``."""

    rows = of_rows.Adam
    dense = torch.optim.Adam


class AMSGrad(TableOptimizer):
    """AMSGrad; see ``persia.embedding.optim.AMSGrad``."""

    rows = of_rows.AMSGrad
    dense = functools.partial(torch.optim.Adam, amsgrad=True)


class AdamW(TableOptimizer):
    """Adam with decoupled weight decay; see ``persia.embedding.optim.AdamW``."""

    rows = of_rows.AdamW
    dense = torch.optim.AdamW


class Adadelta(TableOptimizer):
    """Adadelta; see ``persia.embedding.optim.Adadelta``."""

    rows = of_rows.Adadelta
    dense = torch.optim.Adadelta


class LAMB(TableOptimizer):
    """LAMB; see ``persia.embedding.optim.LAMB``."""

    rows = of_rows.LAMB


class SparseAdam(Adam):
    """Adam by the name that torch has for one that steps only rows that a batch has met."""


class RMSprop(TableOptimizer):
    """RMSprop; see ``persia.embedding.optim.RMSprop``."""

    rows = of_rows.RMSprop
    dense = torch.optim.RMSprop


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
