"""The optimizers of a server: one for each table, which may be at any learning rate.

    registered optimizer --group_settings--> optimizer of a table --rate of an update--> kernel

An update says at which learning rate its rows step, if not at the registered one. So a rate
takes effect with the update that was computed under it, whatever else is on its way, and a
server that was started anew needs not be told.
"""

from __future__ import annotations

from persia._core.kernels.optim import RowOptimizer
from persia._rpc.messages import OptimizerSettings
from persia.config import EmbeddingSchema, Table
from persia.errors import ConfigError


class TableOptimizers:
    """What the registered optimizer means for each table; any thread may call it.

    Args:
        schema: The embedding config.
        registered: The optimizer of all tables that have none of their own.
        weight_bound: Absolute bound on every value after a step; 0 or less is none.

    Raises:
        ConfigError: If an option cannot be used.
    """

    def __init__(
        self, schema: EmbeddingSchema, registered: OptimizerSettings, weight_bound: float
    ) -> None:
        self._schema = schema
        optimizers = []
        for table in schema.tables:
            name, options = registered.name, dict(registered.options)
            own = table.settings.optimizer
            if own is not None:
                name, options = own.resolve(name, options)
            try:
                optimizers.append(RowOptimizer(name, weight_bound, **options))
            except ConfigError as exc:
                if own is None:
                    raise
                (group,) = schema.groups_of(table.number)
                raise ConfigError(f"group_settings.{group}.optimizer: {exc}") from None
        self._optimizers = tuple(optimizers)
        # By table, the last one at another rate: a schedule gives all updates of a step one.
        self._at_rates: dict[int, RowOptimizer] = {}

    def of(self, table: int, lr: float | None = None) -> RowOptimizer:
        """Return the optimizer of a table, at this learning rate if one is given.

        Raises:
            ConfigError: If the rate cannot be used.
        """
        optimizer = self._optimizers[table]
        if lr is None or lr == optimizer.options["lr"]:
            return optimizer
        at_rate = self._at_rates.get(table)
        if at_rate is None or lr != at_rate.options["lr"]:
            at_rate = self._at_rates[table] = optimizer.with_lr(lr)
        return at_rate

    def first_changed(self, old: TableOptimizers) -> Table | None:
        """Return a table whose rows under the old ones are none of these, or None.

        Equal width is not enough: the words of two optimizers mean different things.
        """
        for table in self._schema.tables:
            before, after = old.of(table.number), self.of(table.number)
            words = before.state_words(table.dim)
            if words != after.state_words(table.dim) or (words and before.name != after.name):
                return table
        return None
