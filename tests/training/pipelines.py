"""A pipeline of lookups, steps and updates in simulated time, as ``ForwardPipeline`` has it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from persia._training.staleness import PermitController

Times = Callable[[random.Random, int], float]  # seconds of one, at a step


def around(mean: float, spread: float = 0.1) -> Times:
    """Times that vary, a few of them several times as long."""
    return lambda rng, step: (
        mean * rng.lognormvariate(0, spread) * (1 + 4 * (rng.random() < 0.002))
    )


@dataclass
class Outcome:
    """What a run was like."""

    seconds: float = 0.0
    missed: list[int] = field(default_factory=list)  # updates, by each lookup
    permits: list[int] = field(default_factory=list)  # at each step

    def lateness(self, since: int) -> float:
        """The mean of updates missed, from one lookup on."""
        return sum(self.missed[since:]) / len(self.missed[since:])


@dataclass
class Machine:
    """How long things take; ``lanes`` are lookups and updates at the same time."""

    step: Times
    lookup: Times
    update: Times
    lanes: int = 10
    source: Times = lambda rng, step: 0.0

    def run(
        self, num: int, controller: PermitController | None, fixed: int = 10, seed: int = 0
    ) -> Outcome:
        """Train some steps under a controller, or with a fixed number of permits."""
        rng = random.Random(seed)
        free = [0.0] * self.lanes  # when each lane is
        acknowledged: list[float] = []  # in order of batches
        ready: list[float] = []
        held: list[float] = []
        outcome = Outcome()
        read, taken = [self.source(rng, 0)], 0.0  # when each batch is there

        def serve(at: float, seconds: float) -> float:
            begin = max(at, heapq.heappop(free))
            heapq.heappush(free, begin + seconds)
            return begin + seconds

        def look_up(until: float) -> None:
            """Begin the lookups that begin before a time."""
            nonlocal taken
            while len(ready) < num:
                number = len(ready)
                permits = fixed if controller is None else controller.permits
                source = max(read[-1], taken)
                begin = source
                if number >= permits:
                    if number - permits >= len(acknowledged):
                        return
                    begin = max(source, sorted(acknowledged)[number - permits])
                if begin > until:
                    return
                held.append(begin - source)
                read.append(read[-1] + self.source(rng, number))
                taken = begin
                outcome.missed.append(number - sum(at <= begin for at in acknowledged))
                ready.append(serve(begin, self.lookup(rng, number)))

        now = busy = 0.0
        for number in range(num):
            asked = now
            look_up(asked)
            if len(ready) <= number:
                look_up(float("inf"))
            now = max(asked, ready[number])
            if controller is not None:
                late = ready[number] - asked
                controller.note(busy, late, held[number])
                outcome.permits.append(controller.permits)
            busy = self.step(rng, number)
            now += busy
            look_up(now)
            acknowledged.append(serve(now, self.update(rng, number)))
        outcome.seconds = now
        return outcome
