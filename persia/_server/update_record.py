"""Which updates are under way or applied, in the state file.

    slots    256 x | in use | client | number | first tag |    under way, or cut short by a kill
    clients  1024 x | client | floor + 1 | applied so far | order |
    rings    1024 x 8192 x | number | outcome |                 the last that each client had

An update takes a slot, and in each shard the core notes, under the slot's tags, how far its
part has come. It is applied once its outcome stands in the client's ring and is counted there;
only then is it acknowledged, and the slot is free. A process that finds a slot in use gives the
same slot to the same update if it comes again: the core goes on where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from persia._server.state_file import UPDATES, StateFile
from persia.errors import InternalError, StoreError

_NUM_SLOTS = 256
_NUM_CLIENTS = 1024
_RING = 8192  # twice the ledger's window
_CLIENTS = UPDATES + (1 << 20)
_RINGS = UPDATES + (8 << 20)
_PAGE = 4096
_PER_PAGE = _PAGE // 16
_FAILED = 1 << 63
_MASK = (1 << 64) - 1
# Far from every tag that another process may have given.
_TAGS_APART = 1 << 32


class UpdateRecord:
    """The record of one server; any thread may call it.

    Args:
        file: Its state file, of this process or of one that was killed.
    """

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._slots = file.array(UPDATES, _NUM_SLOTS, 4)
        self._clients = file.array(_CLIENTS, _NUM_CLIENTS, 4)
        self._rings = file.array(_RINGS, _NUM_CLIENTS, _RING, 2)
        file.back(UPDATES, self._slots.nbytes)
        file.back(_CLIENTS, self._clients.nbytes)
        if file.is_void:
            raise StoreError(f"{file.path}: no memory for the record of updates")
        self._cut_short: dict[tuple[int, int], int] = {}
        self._places: dict[int, int] = {}
        self._under_way: dict[tuple[int, int], int] = {}
        self._next_tag = 1
        self._next_order = 1
        self._free = list(range(_NUM_SLOTS))
        if file.why_not is None:
            self._read()
        else:
            self._slots[:] = 0
            self._clients[:] = 0

    def _read(self) -> None:
        applied = set()
        for place in range(_NUM_CLIENTS):
            name, _, count, order = map(int, self._clients[place])
            if order == 0:
                continue
            self._places[name] = place
            self._next_order = max(self._next_order, order + 1)
            kept = self._rings[place, : min(count, _RING), 0]
            applied |= {(name, int(number)) for number in kept}
        for slot in range(_NUM_SLOTS):
            in_use, name, number, tag = map(int, self._slots[slot])
            self._next_tag = max(self._next_tag, tag + _TAGS_APART)
            if in_use and (name, number) in applied:
                self._slots[slot, 0] = 0
            elif in_use:
                self._cut_short[name, number] = slot
                self._free.remove(slot)

    @property
    def cut_short(self) -> list[tuple[int, int]]:
        """Updates that a kill cut short and that have not come again."""
        return list(self._cut_short)

    def outcomes(self) -> Iterator[tuple[int, int, dict[int, int | str]]]:
        """Return client, floor and outcomes by number, of every client."""
        for name, place in self._places.items():
            floor = int(self._clients[place, 1]) - 1
            ring = self._rings[place, : min(int(self._clients[place, 2]), _RING)]
            yield (
                name,
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
                self._slots[slot, 1:] = (*key, tag)
                self._slots[slot, 0] = 1
            self._under_way[key] = slot
            return slot + 1, int(self._slots[slot, 3])

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._cut_short:
            raise InternalError(f"more than {_NUM_SLOTS} updates at the same time")
        # Nobody came to finish the oldest of them.
        slot = self._cut_short.pop(next(iter(self._cut_short)))
        self._slots[slot, 0] = 0
        return slot

    def commit(self, update_id: tuple[int, int], outcome: int | str, floor: int) -> None:
        """The update is applied, and what its client asks below the floor is forgotten."""
        name, number = update_id[0] & _MASK, update_id[1] & _MASK
        with self._lock:
            slot = self._under_way.pop((name, number), None)
            if slot is None:
                return
            place = self._place_of(name)
            count = int(self._clients[place, 2])
            if count < _RING and count % _PER_PAGE == 0:
                self._file.back(_RINGS + (place * _RING + count) * 16, _PAGE)
            if not self._file.is_void:
                code = _FAILED if isinstance(outcome, str) else outcome
                self._rings[place, count % _RING] = (number, code)
                self._clients[place, 2] = count + 1
                self._clients[place, 1] = floor + 1
                self._slots[slot, 0] = 0
            self._free.append(slot)

    def _place_of(self, name: int) -> int:
        place = self._places.get(name)
        if place is None:
            place = len(self._places)
            if place == _NUM_CLIENTS:
                # The one that began first has ended long ago.
                orders = {known: self._clients[at, 3] for known, at in self._places.items()}
                place = self._places.pop(min(orders, key=orders.__getitem__))
                self._clients[place, 3] = 0
            self._places[name] = place
            self._clients[place, :3] = (name, 0, 0)
            self._clients[place, 3] = self._next_order
            self._next_order += 1
        return place
