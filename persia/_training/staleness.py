"""How many batches may be between lookup and acknowledged update: as few as cost no time.

With ``k`` permits the lookup of batch ``t`` begins when the update of batch ``t - k`` is
acknowledged, so its rows are there an update and a lookup after that batch's backward. The loop
asks for them ``k - 1`` steps after it:

    late  =  update + lookup - (k - 1) * step        rows wait for the loop where it is below 0

So what lookups and updates take is read off where it matters, at the loop, and so is what
another number of permits would change: each one begins a lookup a step earlier, if it was the
permit that the batch waited for. The controller begins with one permit, as the first updates
matter most. Then it

- lowers the number where rows wait, as far as next to no batch would come late;
- raises it by one where the loop would wait less. If its steps do not become shorter by a part
  of that, it takes the permit back: there servers, or a processor that all share, give no more.
  Where a good part of a step is at stake, waits that become shorter are enough if steps do not
  become clearly longer, as these vary by more than one permit saves. Such a trial is repeated
  now and then, and so is one of a permit less.

A pure object: times are given to it, and one thread at a time calls it.
"""

from __future__ import annotations

from math import inf
from statistics import fmean, median
from typing import NamedTuple

# Most permits: the bound that "auto" promises.
MOST = 10
# Steps between two decisions: of the first ones, in which the number may rise to ``MOST``, and
# of later ones, where single slow steps must not decide.
WINDOW, LONG_WINDOW = 16, 64
NUM_SHORT = 12
# Shares of a step: what a permit more must save to be tried, what one less may cost.
LEAST_GAIN, MOST_COST = 0.006, 0.003
# Share of it by which steps have to become shorter. Small: where a processor is shared, one
# permit saves less than steps vary, and if it is taken back it is not soon tried again.
KEPT_GAIN = 0.1
# Share of a step above which waits decide, as they vary less: a permit that is to save more is
# kept if half of that is saved and steps are longer by less than it. One whose absence is to
# cost more is given up for a trial only if the last ones all failed.
LARGE = 0.05
# Windows until the next trial, after one that was taken back: doubled up to the second.
REST, LONGEST_REST = 1, 32


class _Trial(NamedTuple):
    """A number of permits that is tried."""

    permits: int  # before it
    longest_step: float  # seconds with which it is kept
    longest_waits: float = inf  # seconds, as well

    def is_kept(self, step: float, waits: float) -> bool:
        return step <= self.longest_step and waits <= self.longest_waits


class PermitController:
    """Chooses ``permits``, from 1 to ``most``, from how late rows come to the loop."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.permits = 1
        self._num_windows = 0
        self._skip = 0  # batches that were looked up under another number
        # Of the steps of this window, in seconds; see ``note``.
        self._busy: list[float] = []
        self._late: list[float] = []
        self._held: list[float] = []
        self._trial: _Trial | None = None
        self._goes_up = True  # the next trial does
        self._rest = 0  # windows until then
        self._next_rest = REST

    def note(self, busy_s: float, late_s: float, held_s: float) -> None:
        """Note a batch as the loop receives it.

        Args:
            busy_s: Seconds that the loop had the batch before.
            late_s: Seconds from its request to its rows; below 0 they waited for it.
            held_s: Seconds that the batch was there and had no permit. What it waited for
                otherwise, such as its dataset, no permit brings earlier.
        """
        if self._skip:
            self._skip -= 1
            return
        self._busy.append(busy_s)
        self._late.append(late_s)
        self._held.append(held_s)
        least = WINDOW if self._num_windows < NUM_SHORT else LONG_WINDOW
        # Waits come in bursts, one of each ``permits`` batches: all windows have whole ones.
        if len(self._busy) >= least and len(self._busy) % self.permits == 0:
            self._num_windows += 1
            self._decide()
            self._busy, self._late, self._held = [], [], []

    def _decide(self) -> None:
        waits = fmean(max(late, 0.0) for late in self._late)
        # A pause of the loop, as for an evaluation, says nothing of a step; a wait does.
        step = median(self._busy) + waits
        trial, self._trial = self._trial, None
        if trial is not None and not trial.is_kept(step, waits):
            self._goes_up = not self._goes_up
            self._rest, self._next_rest = (
                self._next_rest,
                min(2 * self._next_rest, LONGEST_REST),
            )
            self._set(trial.permits)
            return
        if trial is not None:
            self._rest, self._next_rest = 0, REST
        self._rest = max(self._rest - 1, 0)
        fewer = self._num_spare(step, waits)
        if fewer:
            self._set(self.permits - fewer)
            self._goes_up, self._rest = True, 0
        elif not self._rest:
            self._begin_trial(step, waits)

    def _num_spare(self, step: float, waits: float) -> int:
        """Return how many permits less would cost next to nothing."""
        for fewer in range(self.permits - 1, 0, -1):
            if self._cost(fewer, step, waits) <= MOST_COST * step:
                return fewer
        return 0

    def _cost(self, fewer: int, step: float, waits: float) -> float:
        """Return seconds by which the loop would wait longer with ``fewer`` permits less."""
        return fmean(max(late + fewer * step, 0.0) for late in self._late) - waits

    def _begin_trial(self, step: float, waits: float) -> None:
        # As many batches more in the same time, if the loop is fast enough for them.
        most = step / (self.permits + 1)
        late_held = zip(self._late, self._held, strict=True)
        then = fmean(max(late - min(step - most, held), 0.0) for late, held in late_held)
        gain = min(waits - then, most)
        if gain <= LEAST_GAIN * step:
            return
        is_large = gain > LARGE * step
        if self.permits in (1, self.most):
            self._goes_up = self.permits == 1
        elif self._next_rest < LONGEST_REST and (
            is_large or self._cost(1, step, waits) > LARGE * step
        ):
            self._goes_up = True
        if not self._goes_up:
            self._trial = _Trial(self.permits, step)
        elif is_large:
            self._trial = _Trial(self.permits, (1 + LARGE) * step, waits - gain / 2)
        else:
            self._trial = _Trial(self.permits, step - KEPT_GAIN * gain)
        self._set(self.permits + (1 if self._goes_up else -1))

    def _set(self, permits: int) -> None:
        if permits != self.permits:
            self.permits = permits
            self._skip = permits + 1
