"""What a server knows of its requests: which of them only repeat an earlier one.

An update that comes again changes nothing. Its id is (client, number). A client's numbers grow
with its batches, with gaps where a batch had no gradient, and may arrive out of order by as
much as its staleness bound:

    numbers   0 ........... floor | floor + 1 ................ highest
              forgotten           | outcome kept, applied or not

Invariants, true between calls:

    I1  A number above the floor was applied if and only if its outcome is kept.
    I2  At most ``2 * window`` outcomes are kept per client.

At or below the floor it is not known any more, so such a number is refused with an error:
neither applied twice nor dropped in silence.

The same in the state file, with the updates in flight:

    slots    256 x | in use | client | number | first tag |    in flight, or cut short by a kill
    clients  1024 x | client | floor + 1 | applied so far | order |
    rings    1024 x 8192 x | number | outcome |                 the last that each client had

An update takes a slot, and in each shard the core notes, under the slot's tags, how far its
part has come. It is applied once its outcome stands in the client's ring and is counted there;
only then is it acknowledged, and the slot is free. A process that finds a slot in use gives the
same slot to the same update if it comes again: the core goes on where it was.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from persia._rpc.messages import TableSigns
from persia._server.state_file import UPDATES, StateFile
from persia.errors import InternalError, StoreError

# Far more than any staleness bound in use; an outcome takes about 100 bytes.
WINDOW = 4096
# Lookups that may come between one and its repetition. A client repeats only what is in flight.
NUM_RECENT = 64

_NUM_SLOTS = 256
_NUM_CLIENTS = 1024
_RING = 2 * WINDOW
# Offsets and sizes in bytes.
_CLIENTS = UPDATES + (1 << 20)
_RINGS = UPDATES + (8 << 20)
_PAGE = 4096
_OUTCOME = 16
_FAILED = 1 << 63
_MASK = (1 << 64) - 1
# Far from every tag that another process may have given.
_TAGS_APART = 1 << 32


@dataclass(slots=True)
class _Client:
    floor: int = -1
    # What the update returned, or what it raised, as text: the exception itself would keep
    # the request alive, and an update that failed half way is not tried again.
    outcomes: dict[int, int | str] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)


class AppliedUpdates:
    """Runs each update at most once and gives a repeated one its first outcome.

    Any thread may call it; updates with different ids run at the same time.
    """

    def __init__(self, window: int = WINDOW, record: UpdateRecord | None = None) -> None:
        self._window = window
        self._record = record
        self._clients: dict[int, _Client] = {}
        if record is not None:
            self._clients = {
                name: _Client(floor, outcomes) for name, floor, outcomes in record.outcomes()
            }
        self._lock = threading.Lock()  # guards all but the record
        self._ended = threading.Condition(self._lock)  # a call that is waited for has ended
        self._num_waiting = 0

    def run(self, update_id: tuple[int, int], apply: Callable[[], int]) -> tuple[int, bool]:
        """Call ``apply`` unless this id has been applied."""
        name, number = update_id
        with self._lock:
            client = self._clients.get(name)
            if client is None:
                client = self._clients[name] = _Client()
            while number in client.running:
                self._num_waiting += 1
                self._ended.wait()
                self._num_waiting -= 1
            outcome = client.outcomes.get(number)
            if outcome is None:
                if number <= client.floor:
                    raise StoreError(
                        f"update {number} of client {name} is not above {client.floor}: that "
                        f"far back (window {self._window}) it is not known whether it was "
                        f"applied; give each batch of a client a greater number"
                    )
                client.running.add(number)
        if outcome is not None:
            if isinstance(outcome, str):
                raise StoreError(
                    f"update {number} of client {name} failed half way and is not run again: "
                    f"{outcome}"
                )
            return outcome, True
        try:
            outcome = apply()
        except BaseException as error:
            outcome = repr(error)
            raise
        finally:
            with self._lock:
                client.running.discard(number)
                if outcome is not None:
                    client.outcomes[number] = outcome
                    if len(client.outcomes) > 2 * self._window:
                        self._forget_oldest(client)
                    if self._record is not None:
                        self._record.commit(update_id, outcome, client.floor)
                if self._num_waiting:
                    self._ended.notify_all()
        return outcome, False

    def _forget_oldest(self, client: _Client) -> None:
        """Raise the floor; amortised, a sort per window."""
        old = sorted(client.outcomes)[: -self._window]
        for number in old:
            del client.outcomes[number]
        client.floor = max(client.floor, old[-1])


class UpdateRecord:
    """The updates of one server in its state file; any thread may call it."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._slots = file.array(UPDATES, _NUM_SLOTS, 4)
        self._clients = file.array(_CLIENTS, _NUM_CLIENTS, 4)
        self._rings = file.array(_RINGS, _NUM_CLIENTS, _RING, 2)
        file.allocate(UPDATES, self._slots.nbytes)
        file.allocate(_CLIENTS, self._clients.nbytes)
        if file.is_void:
            raise StoreError(f"{file.path}: no memory for the record of updates")
        self._cut_short: dict[tuple[int, int], int] = {}  # slot, by update id
        self._in_flight: dict[tuple[int, int], int] = {}  # the same
        self._places: dict[int, int] = {}  # of clients and rings, by client
        self._next_tag = 1
        self._next_order = 1
        self._free = list(range(_NUM_SLOTS))
        if file.has_state:
            self._read()
        else:
            self._slots[:] = 0
            self._clients[:] = 0

    def _read(self) -> None:
        applied = set()
        for place in range(_NUM_CLIENTS):
            client, _, count, order = map(int, self._clients[place])
            if order == 0:
                continue
            self._places[client] = place
            self._next_order = max(self._next_order, order + 1)
            kept = self._rings[place, : min(count, _RING), 0]
            applied |= {(client, int(number)) for number in kept}
        for slot in range(_NUM_SLOTS):
            in_use, client, number, tag = map(int, self._slots[slot])
            self._next_tag = max(self._next_tag, tag + _TAGS_APART)
            if in_use and (client, number) in applied:
                self._slots[slot, 0] = 0  # killed between the two stores of ``commit``
            elif in_use:
                self._cut_short[client, number] = slot
                self._free.remove(slot)

    @property
    def cut_short(self) -> list[tuple[int, int]]:
        """Updates that a kill cut short and that have not come again."""
        return list(self._cut_short)

    def outcomes(self) -> Iterator[tuple[int, int, dict[int, int | str]]]:
        """Return client, floor and outcomes by number, of every client."""
        for client, place in self._places.items():
            floor = int(self._clients[place, 1]) - 1
            ring = self._rings[place, : min(int(self._clients[place, 2]), _RING)]
            yield (
                client,
                floor,
                {
                    number: "it failed before this server was restarted"
                    if outcome & _FAILED
                    else outcome
                    for number, outcome in ring.tolist()
                    if number > floor
                },
            )

    def begin(self, update_id: tuple[int, int], num_parts: int) -> tuple[int, int]:
        """Return slot and first tag of an update for the core; 0, 0 if nothing is kept."""
        key = (update_id[0] & _MASK, update_id[1] & _MASK)
        with self._lock:
            slot = self._cut_short.pop(key, None)
            if slot is None:
                if self._file.is_void:
                    return 0, 0
                slot = self._take_slot()
                tag, self._next_tag = self._next_tag, self._next_tag + max(1, num_parts)
                # A kill leaves all stores before it: in use is said last.
                self._slots[slot, 1:] = (*key, tag)
                self._slots[slot, 0] = 1
            self._in_flight[key] = slot
            return slot + 1, int(self._slots[slot, 3])

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._cut_short:
            raise InternalError(f"more than {_NUM_SLOTS} updates at the same time")
        # No client came to finish the oldest of them.
        slot = self._cut_short.pop(next(iter(self._cut_short)))
        self._slots[slot, 0] = 0
        return slot

    def commit(self, update_id: tuple[int, int], outcome: int | str, floor: int) -> None:
        """Note that the update is applied, and that below the floor none is known."""
        client, number = update_id[0] & _MASK, update_id[1] & _MASK
        with self._lock:
            slot = self._in_flight.pop((client, number), None)
            if slot is None:
                return
            place = self._place_of(client)
            count = int(self._clients[place, 2])
            if count < _RING and count % (_PAGE // _OUTCOME) == 0:
                self._file.allocate(_RINGS + (place * _RING + count) * _OUTCOME, _PAGE)
            if not self._file.is_void:
                code = _FAILED if isinstance(outcome, str) else outcome
                # In this order: killed in between, the outcome counts and the slot is freed by
                # the next process, or the update is in flight still.
                self._rings[place, count % _RING] = (number, code)
                self._clients[place, 2] = count + 1
                self._clients[place, 1] = floor + 1
                self._slots[slot, 0] = 0
            self._free.append(slot)

    def _place_of(self, client: int) -> int:
        place = self._places.get(client)
        if place is None:
            place = len(self._places)
            if place == _NUM_CLIENTS:
                # Take the place of the one that began first: it has ended long ago.
                orders = {known: self._clients[at, 3] for known, at in self._places.items()}
                place = self._places.pop(min(orders, key=orders.__getitem__))
                self._clients[place, 3] = 0  # in no use, while the next three are half written
            self._places[client] = place
            self._clients[place, :3] = (client, 0, 0)
            self._clients[place, 3] = self._next_order
            self._next_order += 1
        return place


class TrainingClock:
    """The time of one server, and which training lookups it had lately.

    A lookup that is repeated, because its reply was lost, is neither another appearance of its
    ids nor another step.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        saved: NDArray[np.uint64] | None = None,
    ) -> None:
        self._clock = clock
        self._saved = saved
        self._lock = threading.Lock()  # guards all below
        self._steps = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=NUM_RECENT)
        self._next = 0  # of ``saved``
        if saved is not None:
            self._recent.extend(
                (number, digest) for number, digest, is_set in saved.tolist() if is_set
            )

    def now(self) -> tuple[int, int]:
        """Return milliseconds and steps."""
        return int(self._clock() * 1000), self._steps

    def resume(self, steps: int) -> None:
        """Go on from this number of steps."""
        with self._lock:
            self._steps = max(self._steps, steps)

    def forget_recent(self) -> None:
        """Take no lookup for a repetition of one before now: a load brings other rows."""
        with self._lock:
            self._recent.clear()
            if self._saved is not None:
                self._saved[:] = 0

    def begin_step(self, batch_id: int, tables: Sequence[TableSigns]) -> bool:
        """Count a training lookup as a step; True if it only repeats a recent one."""
        # The signs too: another run over the data may give equal numbers to other batches.
        digest = 0
        for part in tables:
            digest ^= int(np.bitwise_xor.reduce(part.signs, initial=np.uint64(0)))
        with self._lock:
            if (batch_id, digest) in self._recent:
                return True
            self._recent.append((batch_id, digest))
            self._steps += 1
            if self._saved is not None:
                self._saved[self._next % NUM_RECENT] = (batch_id, digest, 1)
                self._next += 1
        return False
