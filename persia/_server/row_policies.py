"""Eviction and admission as a parameter server applies them, table by table.

The config names policies by group; the store numbers the distinct ones. Here is the table
between the two, the time that the store is told, and the memory of what was asked lately: a
lookup that is repeated, because its reply was lost, is neither another appearance of its ids
nor another step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persia._rpc.messages import Signs
from persia.config import ParameterServerConfig, Table

# Lookups that may come between one and its repetition. A client repeats only what is in flight.
REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class RowPolicies:
    """What the store is built with, and what a request to a table says."""

    kinds: tuple[tuple[str, str | None, int], ...]
    """Distinct eviction policies beside plain LRU, from number 1 on."""

    sketch_bytes: int
    """For admission by count; 0 where no table has it."""

    numbers: tuple[int, ...]
    """Eviction policy, by table."""

    admit_at: tuple[int, ...]
    """Appearance at which an id is admitted, by table; 1 where it is not by count."""

    probabilities: tuple[float, ...]
    """Chance of admission, by table; 1.0 where it is by count."""

    @property
    def need_steps(self) -> bool:
        """Whether it matters how many steps there were, or which were repeated."""
        return self.sketch_bytes > 0 or any(clock == "steps" for _, clock, _ in self.kinds)

    @staticmethod
    def of(
        tables: Sequence[Table], settings: ParameterServerConfig, admit_probability: float
    ) -> RowPolicies:
        """Read the tables' settings; ``admit_probability`` is for those without their own."""
        kinds: list[tuple[str, str | None, int]] = [("lru", None, 0)]
        numbers, admit_at, probabilities = [], [], []
        for table in tables:
            eviction, admission = table.settings.eviction, table.settings.admission
            kind = kinds[0] if eviction is None else eviction.kind()
            if kind not in kinds:
                kinds.append(kind)
            numbers.append(kinds.index(kind))
            threshold, probability = 1, table.admit_probability
            if admission is not None:
                threshold = admission.threshold or 1
                probability = 1.0 if admission.probability is None else admission.probability
            admit_at.append(threshold)
            probabilities.append(admit_probability if probability is None else probability)
        return RowPolicies(
            tuple(kinds[1:]),
            settings.sketch_bytes() if max(admit_at, default=1) > 1 else 0,
            tuple(numbers),
            tuple(admit_at),
            tuple(probabilities),
        )


class TrainingClock:
    """The time of one server, and which training lookups it had lately.

    Args:
        clock: Seconds that never go back; ``time.monotonic`` outside of tests.
        kept: ``[REMEMBERED, 3]`` numbers that outlive the process, with what is in them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        kept: NDArray[np.uint64] | None = None,
    ) -> None:
        self._clock = clock
        self._kept = kept
        self._lock = threading.Lock()  # guards the two below
        self._steps = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)
        self._next = 0  # of ``kept``
        if kept is not None:
            self._recent.extend(
                (number, digest) for number, digest, is_set in kept.tolist() if is_set
            )

    def now(self) -> tuple[int, int]:
        """Return milliseconds and steps."""
        return int(self._clock() * 1000), self._steps

    def resume(self, steps: int) -> None:
        """Go on from so many steps."""
        with self._lock:
            self._steps = max(self._steps, steps)

    def forget(self) -> None:
        """Take no lookup for a repetition of one before now: ids may come again in earnest."""
        with self._lock:
            self._recent.clear()
            if self._kept is not None:
                self._kept[:] = 0

    def begin_step(self, batch_id: int, signs: Sequence[Signs]) -> bool:
        """Count a training lookup as a step; True if it only repeats a recent one."""
        # The signs too: another run over the data may give equal numbers to other batches.
        digest = 0
        for asked in signs:
            digest ^= int(np.bitwise_xor.reduce(asked, initial=np.uint64(0)))
        with self._lock:
            if (batch_id, digest) in self._recent:
                return True
            self._recent.append((batch_id, digest))
            self._steps += 1
            if self._kept is not None:
                self._kept[self._next % REMEMBERED] = (batch_id, digest, 1)
                self._next += 1
        return False
