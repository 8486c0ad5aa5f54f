"""Which updates a server has applied, so that a repeated call changes nothing.

An update id is (client, number). A client's numbers grow with its batches, with gaps where
a batch had no gradient, and may arrive out of order by as much as its staleness bound:

    numbers   0 ........... floor | floor + 1 ................ highest
              forgotten           | outcome kept, applied or not

Invariants, true between calls:

    I1  A number above the floor was applied if and only if its outcome is kept.
    I2  At most ``2 * window`` outcomes are kept per client.

At or below the floor nobody knows any more, so such a number is refused with an error:
neither applied twice nor dropped in silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from persia.errors import StoreError

if TYPE_CHECKING:
    from persia._server.update_record import UpdateRecord

# Far more than any staleness bound in use; an outcome takes about 100 bytes.
WINDOW = 4096


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

    Args:
        window: Outcomes kept of each client, at least.
        record: Where they outlive the process; it begins with those that are there.
    """

    def __init__(self, window: int = WINDOW, record: UpdateRecord | None = None) -> None:
        self._window = window
        self._record = record
        self._clients: dict[int, _Client] = {}
        if record is not None:
            self._clients = {
                name: _Client(floor, outcomes) for name, floor, outcomes in record.outcomes()
            }
        self._ended = threading.Condition()  # guards the clients; notified when one ends

    def run(self, update_id: tuple[int, int], apply: Callable[[], int]) -> tuple[int, bool]:
        """Call ``apply`` unless this id has been applied.

        Args:
            update_id: Client and number.
            apply: Applies the update, already validated, and returns its count of signs
                without a row.

        Returns:
            The count that the first call got, and whether this one was a repetition.

        Raises:
            StoreError: If the number is so old that a repetition cannot be told from a
                first call; or if the first call raised: it may have changed rows, so that
                running it once more could step them twice.
            BaseException: What ``apply`` raised.
        """
        name, number = update_id
        with self._ended:
            client = self._clients.setdefault(name, _Client())
            while number in client.running:
                self._ended.wait()
            outcome = client.outcomes.get(number)
            if outcome is None:
                if number <= client.floor:
                    raise StoreError(
                        f"update {number} of client {name} is not above {client.floor}: that "
                        f"far back (window {self._window}) a repetition cannot be told from "
                        f"a first call; give each batch of a client a greater number"
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
            with self._ended:
                client.running.discard(number)
                if outcome is not None:
                    client.outcomes[number] = outcome
                    self._forget(client)
                    if self._record is not None:
                        self._record.commit(update_id, outcome, client.floor)
                self._ended.notify_all()
        return outcome, False

    def _forget(self, client: _Client) -> None:
        """Raise the floor once twice the window is kept: amortised, a sort per window."""
        if len(client.outcomes) <= 2 * self._window:
            return
        old = sorted(client.outcomes)[: -self._window]
        for number in old:
            del client.outcomes[number]
        client.floor = max(client.floor, old[-1])
