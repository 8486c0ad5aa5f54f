"""Admission by count."""

from __future__ import annotations

import pytest

from tests.core.policies import new_store, train


@pytest.mark.parametrize("threshold", [2, 3, 7, 255])
def test_an_id_is_admitted_at_its_nth_appearance(threshold: int) -> None:
    store = new_store(1000, sketch_bytes=1 << 20)
    for turn in range(1, threshold + 1):
        assert train(store, [5, 6], turn, admit_at=threshold)[1:] == (
            (2, 0) if turn == threshold else (0, 2)
        )
        # The same request again, because its reply was lost.
        assert train(store, [5, 6], turn, admit_at=threshold, repeated=True)[2] == (
            0 if turn == threshold else 2
        )


def test_ids_that_come_once_are_seldom_admitted_and_are_forgotten() -> None:
    store = new_store(100_000, sketch_bytes=1 << 14)
    inserted = [
        train(store, range(first, first + 1000), first, admit_at=2)[1]
        for first in range(10_000, 40_000, 1000)
    ]
    assert sum(inserted[5:]) / 25_000 < 0.02
    # 256 lines are halved once in 2048 appearances, so ids that come less often never get in.
    refused = [
        train(store, [1, *range(first, first + 5000)], first, admit_at=3)[0][0].any()
        for first in range(50_000, 100_000, 5000)
    ]
    assert not any(refused)


def test_the_sketch_counts_towards_the_memory() -> None:
    plain, counting = new_store(1000), new_store(1000, sketch_bytes=1 << 20)
    assert counting.stats()["bytes"] - plain.stats()["bytes"] == 1 << 20
    train(counting, [5], 1, admit_at=2)
    counting.clear()
    assert train(counting, [5], 2, admit_at=2)[2] == 1
    assert counting.stats()["bytes"] - new_store(1000).stats()["bytes"] < (1 << 20) + (1 << 16)
