"""Threads that share the work of one call."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Crew:
    """Runs the parts of a call at the same time; several callers may share one.

    Args:
        num_threads: Threads of a call, the caller's own included.
        name: Prefix of the names of the others.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._pool = ThreadPoolExecutor(num_threads - 1, thread_name_prefix=name)

    def run(self, call: Callable[[T], None], parts: Sequence[T]) -> None:
        """Call ``call`` with each part and return when all have ended.

        Raises:
            BaseException: What the first part that failed raised, once all have ended.
        """
        if self._pool is None or len(parts) < 2:
            for part in parts:
                call(part)
            return
        # In copies of this context, for the deadline of the call served here.
        others = [
            self._pool.submit(contextvars.copy_context().run, call, part) for part in parts[1:]
        ]
        try:
            call(parts[0])
        finally:
            # Nobody returns while another still writes to arrays of this call.
            failures = [other.exception() for other in others]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Stop the threads; ``run`` must not be called afterwards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def shares(weights: Sequence[int], count: int) -> list[list[int]]:
    """Deal places out so that ``count`` shares weigh about the same; none is empty.

    Heaviest first, each to the lightest share so far (Graham 1969): at most 4/3 of the best.
    """
    dealt: list[list[int]] = [[] for _ in range(count)]
    total = [0] * count
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        lightest = total.index(min(total))
        dealt[lightest].append(place)
        # Never 0, so that places without weight spread as well.
        total[lightest] += weights[place] + 1
    return [places for places in dealt if places]
