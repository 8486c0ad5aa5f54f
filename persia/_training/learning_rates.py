"""The learning rates that the user sets, as every update from then on carries them.

A rate belongs to the gradients that were computed under it and travels with them: so an update
that is late, repeated, or sent to a restarted server still steps at its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia._core.kernels.optim import checked
from persia._rpc.messages import LearningRate

if TYPE_CHECKING:
    from persia._rpc.messages import EmbeddingWorker


class LearningRates:
    """Rates by table. Only the user's thread calls it."""

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker
        self._tables: dict[str | None, tuple[int, ...]] = {}  # by group, once requested
        self._by_group: dict[str | None, float] = {}
        self.current: tuple[LearningRate, ...] = ()  # what the next update carries

    def set(self, lr: float, group: str | None) -> None:
        """Set the rate of one group, or of all that have none of their own.

        Raises:
            ConfigError: If the rate cannot be used, the group is unknown, or it shares its
                table with others.
        """
        rate = float(checked("set_lr", "lr", lr, 0.0))
        if self._by_group.get(group) == rate:
            return
        if group not in self._tables:
            self._tables[group] = self._worker.tables_at_rate(group)
        self._by_group[group] = rate
        rates = dict.fromkeys(self._tables.get(None, ()), self._by_group.get(None, 0.0))
        for name, own in self._by_group.items():
            if name is not None:
                rates.update(dict.fromkeys(self._tables[name], own))
        self.current = tuple(LearningRate(*rate) for rate in sorted(rates.items()))

    def forget(self) -> None:
        """Let the registered optimizer's rates hold again."""
        self._by_group.clear()
        self.current = ()
