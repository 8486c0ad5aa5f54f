"""How rank 0 brings every rank to the end of a step, for a checkpoint that it alone asks for.

    rank 0                                 every other rank, in a thread of its own
    ask/n = step ------------------------> wait until its updates up to the step are in;
                                           later ones wait
    collect <----------------------------- state/rank/n = how far its data is, and more
    servers begin their cut
    go/n --------------------------------> updates go on

The user's threads of the others are not asked: they stand in the dense model's all-reduce of
the next step, or come there soon. The words pass through the store by which the ranks met; a
rank that leaves says so there, with its last state, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from persia.errors import ServiceTimeout, ServiceUnavailable
from persia.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from persia._training.resume import Plain

_logger = get_logger("persia.checkpoints")

# Seconds between two looks whether rank 0 asks, or the others have answered.
_LOOK_S = 0.02
# Contexts are entered in the same order on all ranks.
_numbers = itertools.count()


class Holds(Protocol):
    """The backward pipeline; ``persia._training.backward`` implements it."""

    def hold(self, step: int, timeout_s: float) -> bool:
        """Keep updates of later steps back; whether those up to this one are in in time."""

    def go_on(self) -> None:
        """Let them go again."""


class Store(Protocol):
    """Keys and values that every rank sees; those of torch.distributed are such."""

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set the value of a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, which is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


def to_bytes(state: Plain) -> bytes:
    """Return what ``from_bytes`` reads: plain values and tensors."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Plain:
    """Return what ``to_bytes`` was given."""
    state: Plain = torch.load(io.BytesIO(data), weights_only=True)
    return state


class StepBarrier:
    """One rank's part; all ranks make theirs, in the same order.

    Args:
        world_size: Number of ranks.
        rank: This one.
        engine: What sends its updates.
        state: Returns what of this rank belongs into a checkpoint.
        timeout_s: Seconds that the ranks have to reach the step, and rank 0 to go on.
        store: By which the ranks met.
        number: Of this among the contexts that the ranks have entered.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        engine: Holds,
        state: Callable[[], Plain],
        timeout_s: float,
        store: Store,
        number: int,
    ) -> None:
        self._world_size = world_size
        self._rank = rank
        self._engine = engine
        self._state = state
        self._timeout_s = timeout_s
        self._prefix = f"persia/halts/{number}"
        self._store = store
        self._next = 0  # of rank 0's calls
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if rank:
            self._thread = threading.Thread(
                target=self._follow, name="persia-halts", daemon=True
            )
            self._thread.start()

    @classmethod
    def join(
        cls,
        world_size: int,
        rank: int,
        engine: Holds,
        state: Callable[[], Plain],
        timeout_s: float,
    ) -> StepBarrier | None:
        """Return this rank's part, or None where the ranks have not met."""
        if not dist.is_initialized():
            return None
        store: Any = dist.distributed_c10d._get_default_store()
        return cls(world_size, rank, engine, state, timeout_s, store, next(_numbers))

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    # --- rank 0 -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[list[Plain]]:
        """Hold every other rank at the end of a step, and yield their states, by rank from 1.

        Raises:
            ServiceTimeout: If some do not get there; names them.
            ServiceUnavailable: If the ranks cannot hear each other.
        """
        number, self._next = self._next, self._next + 1
        try:
            self._store.set(self._key("ask", number), str(step))
            try:
                yield [self._answer(number, step, states) for states in self._wait(number)]
            finally:
                self._store.set(self._key("go", number), "")
        except RuntimeError as exc:
            if isinstance(exc, dist.DistError):
                raise ServiceUnavailable(
                    f"the ranks cannot hear each other for a checkpoint at step {step}: {exc}",
                    role="nn-worker",
                ) from exc
            raise

    def _wait(self, number: int) -> list[tuple[int, str]]:
        """Return by rank the key of its answer."""
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
                raise self._late(missing)
            self._closed.wait(_LOOK_S)

    def _answer(self, number: int, step: int, found: tuple[int, str]) -> Plain:
        rank, key = found
        data = self._store.get(key)
        if not data:
            raise self._late([rank])
        return from_bytes(data)

    def _late(self, missing: list[int]) -> ServiceTimeout:
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

    def _follow(self) -> None:
        try:
            for number in itertools.count():
                if not self._sees(self._key("ask", number)):
                    return
                self._serve(number)
        except BaseException as exc:
            # Rank 0 learns by its deadline; what breaks the store ends training anyway.
            _logger.warning("rank %d takes part in no more checkpoints: %r", self._rank, exc)

    def _sees(self, key: str, deadline: float | None = None) -> bool:
        """Wait for a key; False if this rank leaves first, or the deadline passes."""
        while not self._store.check([key]):
            if self._closed.wait(_LOOK_S):
                return False
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True

    def _serve(self, number: int) -> None:
        step = int(self._store.get(self._key("ask", number)))
        is_there = self._engine.hold(step, self._timeout_s)
        try:
            data = to_bytes(self._state()) if is_there else b""
            self._store.set(self._key("state", self._rank, number), data)
            deadline = time.monotonic() + self._timeout_s
            if not self._sees(self._key("go", number), deadline) and not self._closed.is_set():
                _logger.warning(
                    "rank %d goes on after %g s, though rank 0 did not say that the checkpoint "
                    "at step %d has begun",
                    self._rank,
                    self._timeout_s,
                    step,
                )
        finally:
            self._engine.go_on()

    def close(self) -> None:
        """Leave; called once this rank's updates are in."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(RuntimeError):  # who hears it is gone
                self._store.set(self._key("left", self._rank), to_bytes(self._state()))
