"""What rows have of a change log, by numbers and histories."""

from __future__ import annotations

from typing import Any

import pytest

from persia._files.catalog import Chain
from persia._files.log_position import LogPosition, history_of, joined, reached_by
from persia._files.storage import LocalStorage
from persia.errors import CheckpointError
from tests.files.support import manifest

A, B, C = "aaaa", "bbbb", "cccc"


def checkpoint(position: LogPosition) -> Any:
    return manifest(
        "00000009-00000000", None, parts=(), extras={"change_log": position.to_json("x")}
    )


def packet(number: int, history: str, **reached: int) -> Any:
    extras = {"log": {"history": history, "reached": reached}}
    return manifest(f"{number:08}-00000000", None, parts=(), extras=extras)


def test_a_position_is_read_as_it_was_written() -> None:
    for position in (
        LogPosition(),
        LogPosition({0: 4, 1: 7}),
        LogPosition({0: 4, 1: 7}, {0: A, 1: B}, {C: 3}),
    ):
        assert LogPosition.of(checkpoint(position)) == position
    assert history_of(packet(3, A, bbbb=2)) == (A, {B: 2})
    assert history_of(manifest("00000003-00000000", None, parts=())) == ("", {})


@pytest.mark.parametrize(
    "saved",
    [
        {"packets": {"x": 1}},
        {"packets": [1]},
        {"packets": {"0": 1}, "histories": {"1": A}},
        {"packets": {"0": 1}, "histories": {"0": A}, "reached": {"b": "x"}},
    ],
)
def test_what_is_no_position_is_an_error(saved: Any) -> None:
    made = manifest("00000009-00000000", None, parts=(), extras={"change_log": saved})
    with pytest.raises(CheckpointError, match=r"extras\.change_log"):
        LogPosition.of(made)
    made = manifest("00000009-00000000", None, parts=(), extras={"log": saved})
    with pytest.raises(CheckpointError, match=r"extras\.log"):
        history_of(made)


def test_rows_are_in_a_history_or_were_loaded() -> None:
    position = LogPosition({0: 4, 1: 7}, {0: A, 1: B})
    assert position.is_in(A, 4, {})  # server 1 answers for its own
    assert not position.is_in(A, 3, {})
    assert not position.is_in(C, 99, {})  # whatever its number is
    assert not position.is_in(C, 99, {A: 4})
    assert not position.is_in(C, 99, {A: 4, B: 6})
    assert position.is_in(C, 1, {A: 4, B: 7})


def test_what_loads_have_reached_is_handed_on() -> None:
    storage = LocalStorage("unused")
    first = Chain(storage, [checkpoint(LogPosition({0: 4}, {0: A}, {B: 2}))])
    assert reached_by([first]) == {A: 4, B: 2}
    own = [Chain(storage, [packet(5, A)], 0), Chain(storage, [packet(6, B, cccc=1)], 1)]
    assert reached_by(own) == {A: 5, B: 6, C: 1}
    assert (
        reached_by([Chain(storage, [manifest("00000001-00000000", None, parts=())], 0)]) == {}
    )
    assert joined({A: 5, B: 1}, {A: 3, C: 2}) == {A: 5, B: 1, C: 2}
    many = joined({str(n): n for n in range(999)}, {"0": 0})
    assert len(many) == 256
    assert many["0"] == 0
