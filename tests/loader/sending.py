"""What the tests of a data-loader share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from persia._loader.sender import BatchSender
from tests.support.streams import (
    FakeRank,
    send,
)

MakeFeeder = Callable[..., BatchSender]


def send_all(feeder: BatchSender, num_batches: int) -> None:
    for number in range(num_batches):
        send(feeder, number)
    feeder.finish()


class TellingRank(FakeRank):
    """Says what has not ended."""

    def open_stream(self, opening: Any) -> Any:
        with self.changed:
            state = super().open_stream(opening)
            return replace(state, unfinished=(*self.waiting, *self.taken))
