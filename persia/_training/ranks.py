"""What the ranks of one job tell each other besides gradients: one small number at a time.

    loader's thread      agree     is there a next batch on every rank?
    backward worker      in_turn   rank 0 pushes its update, then rank 1, ...
    training thread      any       is a gradient not finite on some rank?

Each has a gloo group of its own, so that none waits for another: a rank whose loader is a step
ahead may not be what holds an update back. On one group all ranks make the same calls in the
same order, so it is used from one thread at a time.

A round gathers one code of every rank. A rank that goes says so in its next round
(``close``), which is how the others learn of it at once though its process lives on; a
process that ends breaks the connection; one that hangs runs into the group's timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from persia.errors import (
    ConfigError,
    InternalError,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)
from persia.logger import get_logger

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_logger = get_logger("persia.ranks")

# As long as torch itself lets gloo wait: one rank may evaluate or write a file meanwhile.
DEFAULT_TIMEOUT_S = 1800.0
# How long a rank that goes waits until the others have heard of it.
LEAVE_S = 10.0
# gloo's deadline and ours are read from two clocks.
_CLOCKS_AGREE = 0.99

_LEFT = -(2**62)  # no code of a caller's
_FINE, _FAILED = 0, 1


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gone(message: str, rank: int | None = None) -> ServiceUnavailable:
    return ServiceUnavailable(message, role="nn-worker", replica=rank)


class RankGroup:
    """One gloo group: every rank says a code, every rank hears all of them."""

    def __init__(self, world_size: int, rank: int, timeout_s: float) -> None:
        self._world_size = world_size
        self._rank = rank
        self._timeout_s = timeout_s
        # None for one rank, and once closed.
        self._group: dist.ProcessGroup | None = None
        self._is_over = world_size == 1
        self._lock = threading.Lock()  # held over a round, which therefore never overlaps one
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def _says(self, what: str) -> str:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return f"rank {self._rank} of {self._world_size} {what} for {_named(others)}"

    def meet(self, code: int, purpose: str) -> list[int]:
        """Return the codes of all ranks, by rank.

        Raises:
            ServiceTimeout: If some rank does not come in time.
            ServiceUnavailable: If a rank has left, or its connection broke.
        """
        if self._world_size == 1:
            return [code]
        with self._lock:
            codes = self._round(code, purpose)
        gone = [rank for rank, other in enumerate(codes) if other == _LEFT]
        if gone:
            raise _gone(
                f"{self._says('waited')} {purpose}, but the job was left by {_named(gone)}",
                gone[0],
            )
        return codes

    def _round(self, code: int, purpose: str) -> list[int]:
        if self._is_over:
            raise _gone(f"{self._says('cannot wait')} {purpose}: the ranks have parted already")
        codes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world_size)]
        begin = time.monotonic()
        try:
            dist.all_gather(codes, torch.tensor([code]), group=self._group)
        except RuntimeError as exc:
            self._is_over = True
            waited_s = time.monotonic() - begin
            waited = f"{self._says(f'waited {waited_s:.1f} s')} {purpose}"
            if waited_s >= self._timeout_s * _CLOCKS_AGREE:
                raise ServiceTimeout(f"{waited}, and not all came", role="nn-worker") from exc
            raise _gone(
                f"{waited}, and a connection broke: a rank has ended or given up; its own "
                "output says why"
            ) from exc
        heard = [int(other) for other in codes]
        self._is_over = _LEFT in heard
        return heard

    def leave(self) -> None:
        """Tell the others, unless one of them has told this rank, and free the group."""
        with self._lock:
            if not self._is_over:
                try:
                    self._round(_LEFT, "to part")
                except ServiceError as exc:
                    _logger.debug("%s", exc)  # whoever has gone needs no farewell
                self._is_over = True
            group, self._group = self._group, None
            # The default group may have been destroyed before, and all others with it.
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


class Ranks:
    """The ranks of one job, as long as they train together.

    All ranks build it, and every further one, in the same order; ``torch.distributed`` is
    set up before. With one rank nothing is sent and no process group is needed.

    Args:
        world_size: Number of ranks.
        rank: This one.
        timeout_s: Seconds that a rank may be late by, in any call.

    Raises:
        ConfigError: If there is no process group of this size.
    """

    def __init__(
        self, world_size: int, rank: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank: expected one in 0..{world_size - 1}, got {rank}")
        if world_size > 1:
            if not dist.is_initialized():
                raise ConfigError(
                    f"expected a process group of {world_size} ranks, got none: set "
                    "torch.distributed up before"
                )
            if (dist.get_world_size(), dist.get_rank()) != (world_size, rank):
                raise ConfigError(
                    f"expected a process group where this is rank {rank} of {world_size}, "
                    f"got one where it is rank {dist.get_rank()} of {dist.get_world_size()}"
                )
        self.world_size = world_size
        self.rank = rank
        self._batches = RankGroup(world_size, rank, timeout_s)
        self._updates = RankGroup(world_size, rank, timeout_s)
        self._steps = RankGroup(world_size, rank, timeout_s)

    def agree(self, code: int) -> list[int]:
        """Return every rank's code, by rank. For the loader's thread.

        The code is the caller's: whether there is a batch, in which pass. A pass that ends
        early on one rank says so by a code too, or its next pass would meet this one.

        Raises:
            ServiceTimeout: If some rank does not come in time.
            ServiceUnavailable: If a rank has gone.
        """
        if code == _LEFT:
            raise InternalError(f"the code {code} means that a rank has gone")
        return self._batches.meet(code, "to agree on the next batch")

    def in_turn(self, action: Callable[[], T]) -> T:
        """Run the action after the lower ranks' and before the higher ranks'.

        It returns when all have run, on every rank. For the backward worker.

        Raises:
            BaseException: What the action raised, after every rank has had its turn.
            ServiceError: If it failed on another rank; ``replica`` is that rank.
            ServiceTimeout: If some rank does not come in time.
            ServiceUnavailable: If a rank has gone.
        """
        results: list[T] = []
        failure: BaseException | None = None
        failed: list[int] = []
        for turn in range(self.world_size):
            code = _FINE
            if turn == self.rank:
                try:
                    results.append(action())
                except BaseException as exc:  # raised below, when the others have had theirs
                    failure, code = exc, _FAILED
            try:
                codes = self._updates.meet(code, f"to end rank {turn}'s turn to update")
            except ServiceError:
                if failure is not None:
                    break  # this rank's own exception says more
                raise
            if codes[turn] == _FAILED:
                failed.append(turn)
        if failure is not None:
            raise failure
        if failed:
            raise ServiceError(
                f"the turn to update of {_named(failed)} of {self.world_size} failed, and rank "
                f"{self.rank}'s was done; the output there says why",
                role="nn-worker",
                replica=failed[0],
            )
        return results[0]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. For the training thread.

        Raises:
            ServiceTimeout: If some rank does not come in time.
            ServiceUnavailable: If a rank has gone.
        """
        return any(self._steps.meet(int(flag), "to end the step"))

    def close(self) -> None:
        """Tell the other ranks that this one goes, and free the groups.

        Returns within ``LEAVE_S`` seconds. A rank that is still in a round of ours then keeps
        its group until the process ends.
        """
        circles = (self._batches, self._updates, self._steps)
        deadline = time.monotonic() + LEAVE_S
        # In threads: a rank that hangs may not keep this one from leaving.
        leaving = [
            threading.Thread(target=circle.leave, name="persia-leave-ranks", daemon=True)
            for circle in circles
        ]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join(max(deadline - time.monotonic(), 0.0))
        late = sum(thread.is_alive() for thread in leaving)
        if late:
            _logger.warning(
                "rank %d left though other ranks did not hear of it in %g s (%d of 3 groups)",
                self.rank,
                LEAVE_S,
                late,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
