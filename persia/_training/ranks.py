"""What the ranks of one job exchange besides gradients.

``Ranks`` gathers one small number of every rank at a time:

    loader's thread      agree     is there a next batch on every rank?
    backward worker      in_turn   rank 0 sends its update, then rank 1, ...
    training thread      any       is a gradient not finite on some rank?

Each has a gloo group of its own, so that none waits for another: a rank whose loader is a step
ahead may not be what holds an update back. On one group all ranks make the same calls in the
same order, from one thread at a time. A rank that leaves says so in its next round; a process
that ends breaks the connection; one that hangs runs into the group's timeout.

``StepBarrier`` brings every rank to the end of a step, for a checkpoint of rank 0:

    rank 0                                 every other rank, in a thread of its own
    ask/n = step ------------------------> wait until its updates up to the step are applied;
                                           later ones wait
    collect <----------------------------- state/rank/n = how far its data is, and more
    servers begin their cut
    go/n --------------------------------> send updates again

The user's threads of the other ranks take no part: they are in the dense model's all-reduce of
the next step, or will be soon. The keys are in the store by which the ranks met; a rank that
leaves says so there, with its last state, so that rank 0 does not wait for it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from persia._training.checkpoint import serialized
from persia._training.queues import join
from persia.errors import (
    ConfigError,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)
from persia.logger import get_logger

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from persia._training.progress import Plain

T = TypeVar("T")

_logger = get_logger("persia.ranks")

# As long as torch itself lets gloo wait: one rank may evaluate or write a file meanwhile.
DEFAULT_TIMEOUT_S = 1800.0
# Longest wait of a rank that leaves until the others know.
LEAVE_S = 10.0
# gloo's deadline and ours are read from two clocks.
_CLOCKS_AGREE = 0.99

_LEFT = -(2**62)  # no code of a caller's
_FINE, _FAILED = 0, 1
# Seconds between two looks whether rank 0 asks for a checkpoint, or the others have answered.
_LOOK_S = 0.02
# Contexts are entered in the same order on all ranks, so their barriers have equal numbers.
_numbers = itertools.count()


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gone(message: str, rank: int | None = None) -> ServiceUnavailable:
    return ServiceUnavailable(message, role="nn-worker", replica=rank)


class RankGroup:
    """One gloo group: every rank gives a code and receives all of them."""

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
        """Return the codes of all ranks, by rank, or raise a ServiceError."""
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
        """Announce it to the others, unless one has left before, and free the group."""
        with self._lock:
            if not self._is_over:
                try:
                    self._round(_LEFT, "to part")
                except ServiceError as exc:
                    _logger.debug("%s", exc)  # the others have gone already
                self._is_over = True
            group, self._group = self._group, None
            # The default group may have been destroyed before, and all others with it.
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


class Ranks:
    """The ranks of one job, as long as they train together.

    All ranks build it, and every further one, in the same order; ``torch.distributed`` is
    set up before, or it is a ConfigError. With one rank nothing is sent. Each call raises a
    ServiceTimeout if some rank is late by ``timeout_s``, and ServiceUnavailable if one has
    gone.
    """

    def __init__(
        self, world_size: int, rank: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if world_size > 1:
            here = "none"
            if dist.is_initialized():
                here = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            if here != f"rank {rank} of {world_size}":
                raise ConfigError(
                    f"expected a process group where this is rank {rank} of {world_size}, got "
                    f"{here}"
                )
        self.world_size = world_size
        self.rank = rank
        self._batches = RankGroup(world_size, rank, timeout_s)
        self._updates = RankGroup(world_size, rank, timeout_s)
        self._steps = RankGroup(world_size, rank, timeout_s)

    def agree(self, code: int) -> list[int]:
        """Return every rank's code, by rank. For the loader's thread.

        A pass that ends early on one rank says so by a code too, or its next pass would meet
        this one.
        """
        return self._batches.meet(code, "to agree on the next batch")

    def in_turn(self, action: Callable[[], T]) -> T:
        """Run the action after the lower ranks' and before the higher ranks'.

        It returns when all have run, on every rank. For the backward worker.

        Raises:
            BaseException: What the action raised, after every rank has had its turn.
            ServiceError: If it failed on another rank; ``replica`` is that rank.
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

    def from_first(self, number: int) -> int:
        """Return what rank 0 gives, of 0 to 2^63 - 1. For the training thread."""
        return self._steps.meet(number, "for what rank 0 has found")[0]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. For the training thread."""
        return any(self._steps.meet(int(flag), "to end the step"))

    def close(self) -> None:
        """Announce to the other ranks that this one leaves, and free the groups.

        Returns within ``LEAVE_S`` seconds. A rank that is still in a round of ours then keeps
        its group until the process ends.
        """
        # In threads: a rank that hangs may not keep this one from leaving.
        leaving = [
            threading.Thread(target=group.leave, name="persia-leave-ranks", daemon=True)
            for group in (self._batches, self._updates, self._steps)
        ]
        for thread in leaving:
            thread.start()
        late = len(join(leaving, LEAVE_S))
        if late:
            _logger.warning(
                "rank %d left though other ranks did not hear of it in %g s (%d of 3 groups)",
                self.rank,
                LEAVE_S,
                late,
            )


class StepBarrier:
    """One rank's part; all ranks make theirs, in the same order.

    ``hold`` and ``resume`` are ``BackwardPipeline``'s; ``state`` returns what of this rank
    belongs into a checkpoint. The ranks have ``timeout_s`` to reach the step, and rank 0 has as
    long to begin its cut. ``store`` is the one by which the ranks met, torch's if not given.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        hold: Callable[[int, float], bool],
        resume: Callable[[], None],
        state: Callable[[], Plain],
        timeout_s: float,
        store: Any = None,  # a torch.distributed.Store, whose stub allows no bytes
    ) -> None:
        self._world_size = world_size
        self._rank = rank
        self._hold = hold
        self._resume = resume
        self._state = state
        self._timeout_s = timeout_s
        self._prefix = "persia/halts/0"
        self._store = store
        if store is None:
            self._prefix = f"persia/halts/{next(_numbers)}"
            self._store = dist.distributed_c10d._get_default_store()
        self._next = 0  # of rank 0's calls
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if rank:
            self._thread = threading.Thread(
                target=self._take_part, name="persia-step-barrier", daemon=True
            )
            self._thread.start()

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    # --- rank 0 -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold_at(self, step: int) -> Iterator[list[Plain]]:
        """Hold every other rank at the end of a step, and yield their states, by rank from 1.

        Raises:
            ServiceTimeout: If some do not get there; names them.
            ServiceUnavailable: If the ranks cannot hear each other.
        """
        number, self._next = self._next, self._next + 1
        try:
            self._store.set(self._key("ask", number), str(step))
            try:
                yield [self._read_state(*found) for found in self._wait_for_states(number)]
            finally:
                self._store.set(self._key("go", number), "")
        except RuntimeError as exc:
            if isinstance(exc, dist.DistError):
                raise ServiceUnavailable(
                    f"the ranks cannot reach each other for a checkpoint at step {step}: {exc}",
                    role="nn-worker",
                ) from exc
            raise

    def _wait_for_states(self, number: int) -> list[tuple[int, str]]:
        """Return by rank the key of its state."""
        deadline = time.monotonic() + self._timeout_s
        found: dict[int, str] = {}
        while True:
            for rank in range(1, self._world_size):
                keys = (self._key("state", rank, number), self._key("left", rank))
                for key in keys:
                    if rank not in found and self._store.check([key]):
                        found[rank] = key
            if len(found) == self._world_size - 1:
                return [(rank, found[rank]) for rank in sorted(found)]
            if time.monotonic() > deadline:
                missing = [r for r in range(1, self._world_size) if r not in found]
                raise self._timeout(missing)
            self._closed.wait(_LOOK_S)

    def _read_state(self, rank: int, key: str) -> Plain:
        data = self._store.get(key)
        if not data:
            raise self._timeout([rank])
        state: Plain = torch.load(io.BytesIO(data), weights_only=True)
        return state

    def _timeout(self, missing: list[int]) -> ServiceTimeout:
        names = ", ".join(map(str, missing))
        return ServiceTimeout(
            f"a checkpoint waited {self._timeout_s:g} s for the updates of rank {names} of "
            f"{self._world_size}: expected each rank to come to the end of rank 0's step; all "
            "make the same steps, and rank 0 dumps between two of them",
            role="nn-worker",
            replica=missing[0],
            method="dump_checkpoint",
        )

    # --- the other ranks --------------------------------------------------------------------

    def _take_part(self) -> None:
        try:
            for number in itertools.count():
                if not self._wait_for(self._key("ask", number)):
                    return
                self._serve(number)
        except BaseException as exc:
            # Rank 0 learns by its deadline; what breaks the store ends training anyway.
            _logger.warning("rank %d stops taking part in checkpoints: %r", self._rank, exc)

    def _wait_for(self, key: str, deadline: float | None = None) -> bool:
        """Wait for a key; False if this rank leaves first, or the deadline passes."""
        while not self._store.check([key]):
            if self._closed.wait(_LOOK_S):
                return False
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True

    def _serve(self, number: int) -> None:
        step = int(self._store.get(self._key("ask", number)))
        is_applied = self._hold(step, self._timeout_s)
        try:
            data = serialized(self._state()) if is_applied else b""
            self._store.set(self._key("state", self._rank, number), data)
            deadline = time.monotonic() + self._timeout_s
            may_go = self._wait_for(self._key("go", number), deadline)
            if not may_go and not self._closed.is_set():
                _logger.warning(
                    "rank %d resumes after %g s, though rank 0 did not say that the checkpoint "
                    "at step %d has begun",
                    self._rank,
                    self._timeout_s,
                    step,
                )
        finally:
            self._resume()

    def close(self) -> None:
        """Leave; called once this rank's updates are applied."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(RuntimeError):  # rank 0 has gone before
                self._store.set(self._key("left", self._rank), serialized(self._state()))


@contextlib.contextmanager
def uneven_steps(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Let this rank make more or fewer steps than others; all ranks enter it.

    The body is the steps of a pass, without other collectives than DDP's. If it raises, or its
    generator is closed, the ranks part as they would without.

    A rank that has no batch left takes part in what DDP sends for the others' steps, with
    gradients of zero, and ends with the same dense net. Gradients are divided by the number of
    all ranks, and so are those of the embeddings under "mean". DDP covers the net only: the
    optimizer of a rank that has missed steps has older moments, which would take the ranks
    apart in the next pass, so it gets those of the rank with most steps.
    """
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    counting = optimizer.register_step_post_hook(count)
    try:
        with Join([model]):
            yield
    finally:
        counting.remove()
    group = model.process_group
    of_ranks: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, steps, group=group)
    most = max(of_ranks)
    if min(of_ranks) == most:
        return
    source = of_ranks.index(most)
    is_source = dist.get_rank(group) == source
    sent = [serialized(optimizer.state_dict()) if is_source else b""]
    dist.broadcast_object_list(sent, group=group, src=dist.get_global_rank(group, source))
    if steps < most:
        # By way of the CPU: the source's device need not be here.
        state = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state)
