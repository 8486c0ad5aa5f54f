"""What was trained, as floors and what is above them, over passes, data-loaders and ranks."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persia._rpc.messages import StreamOpening
from persia._training.checkpoint import serialized
from persia._training.loader_streams import LoaderStream
from persia._training.progress import (
    Plain,
    Progress,
    Watermark,
    count_done,
    merge,
    of_one_pass,
    to_position,
)
from persia.errors import CheckpointError
from tests.support.fixtures import Log


@given(st.permutations(list(range(12))), st.integers(0, 12), st.integers(1, 4))
def test_a_series_knows_what_is_done(order: list[int], count: int, step: int) -> None:
    series = Watermark(0, step)
    done = {place * step for place in order[:count]}
    for place in done:
        series.mark_done(place)
        series.mark_done(place)
    assert {*range(0, series.floor, step), *series.above} == done
    assert series.floor not in series.above
    assert count_done(to_position("dataset", 0, {0: series})) == (
        series.floor + len(series.above) if step > 1 else count
    )


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sets(st.integers(0, 40)),
    st.data(),
)
def test_ranks_together_know_what_is_done_of_every_data_loader(
    num_loaders: int, world_size: int, new_size: int, done: set[int], data: st.DataObject
) -> None:
    def streams(size: int, position: Plain | None) -> list[list[LoaderStream]]:
        def stream(loader: int, rank: int) -> LoaderStream:
            opening, name = StreamOpening(loader, num_loaders, 7, loader), str(loader)
            at = position or {"floors": {}, "above": {}}
            resumed = at["floors"].get(name, 0), at["above"].get(name, [])
            return LoaderStream(opening, rank, size, resumed)

        return [[stream(loader, rank) for loader in range(num_loaders)] for rank in range(size)]

    ranks = streams(world_size, None)
    for batch_id in data.draw(st.permutations(sorted(done))):
        ranks[batch_id % world_size][batch_id % num_loaders].trained.mark_done(batch_id)
    positions = [
        to_position(
            "stream",
            num_loaders,
            {s.loader: s.trained for s in of_rank if s.next_batch_id is not None},
        )
        for of_rank in ranks
    ]
    merged = merge(list(positions))
    assert merged is not None
    assert count_done(merged) == len(done)
    # Whatever the number of ranks afterwards, exactly the others are asked for.
    asked = set()
    for of_rank in streams(new_size, merged):
        for stream in of_rank:
            if stream.next_batch_id is not None:
                asked |= {*range(stream.next_batch_id, 60, stream.step)} - stream.left_out
    assert asked == set(range(60)) - done


def of_dataset(floor: int) -> Plain:
    return to_position("dataset", 0, {0: Watermark(floor)})


def of_two_ranks(floor: int) -> Plain:
    return to_position("stream", 1, {0: Watermark(floor, 2)})


def test_ranks_that_have_found_the_end_of_a_pass_have_done_all_of_it() -> None:
    def done(*ranks: Progress) -> int:
        passes, positions = of_one_pass([rank.snapshot() for rank in ranks])
        merged = merge(positions)
        assert (passes, merged is None) == (0, False)
        return count_done(merged or {})

    # Ten batches of one data-loader, five each: 0, 2, .. 8 and 1, 3, .. 9.
    first, second = Progress(), Progress()
    of_first, of_second = partial(of_two_ranks, 10), partial(of_two_ranks, 11)
    first.begin(of_first)
    second.begin(of_second)
    assert done(first, second) == 10
    second.end(of_second, of_second())
    assert done(first, second) == 10
    second.begin(partial(of_two_ranks, 1))  # nothing of the next pass is done
    assert done(first, second) == 10
    first.end(of_first, of_first())
    second = Progress()
    second.begin(of_second)
    assert done(first, second) == 10


def test_passes_are_counted_as_they_end_or_are_left() -> None:
    progress, first = Progress(), partial(of_dataset, 3)
    progress.begin(first)
    progress.begin(first)
    assert progress.snapshot()["passes"] == 0
    progress.end(first)
    progress.end(first)
    progress.begin(partial(of_dataset, 1))
    assert progress.snapshot()["passes"] == 1
    progress.begin(partial(of_dataset, 0))
    assert progress.snapshot()["passes"] == 2


def test_between_two_epochs_the_position_is_the_beginning_of_the_next() -> None:
    end = to_position("stream", 1, {0: Watermark(5)})
    following = {**end, "epoch": 1, "begins": {"0": 5}}
    progress, source = Progress(), partial(of_two_ranks, 3)
    progress.begin(source)
    progress.end(source, end, following)
    there = progress.snapshot()
    assert (there["passes"], there["position"], there["before"]) == (1, following, end)
    assert progress.resumed("stream") is None  # this process has its streams
    resumed = Progress()
    resumed.resume(there["passes"], there["position"], there["next_number"])
    assert resumed.resumed("stream") == following
    assert (resumed.where().passes, resumed.where().batches) == (1, 0)
    progress.begin(partial(of_two_ranks, 4))
    assert progress.snapshot()["position"] == of_two_ranks(4)


def test_a_position_is_kept_until_a_pass_takes_it_over() -> None:
    progress, source = Progress(), partial(of_dataset, 5)
    progress.begin(source)
    progress.mark_done(8, None, 16)
    there = torch.load(io.BytesIO(serialized(progress.snapshot())), weights_only=True)
    resumed = Progress()
    resumed.resume(there["passes"], there["position"], there["next_number"], there["size"])
    assert resumed.snapshot() == progress.snapshot()
    assert (resumed.where().passes, resumed.where().batches) == (0, 5)
    with pytest.raises(CheckpointError, match="pass over a dataset"):
        resumed.resumed("stream")
    assert resumed.resumed("dataset") == there["position"]
    resumed.end(source)  # another's
    resumed.begin(source)
    assert resumed.resumed("dataset") is None


@pytest.mark.parametrize(
    ("sizes", "warns"),
    [
        ([16, 16], False),
        ([7], False),  # the last batch of the pass
        ([7, 16], False),  # updates end in any order
        ([32], True),
        ([8, 8], True),
    ],
)
def test_batches_of_another_size_after_a_resume_are_warned_of(
    sizes: list[int], warns: bool, caplog: Log
) -> None:
    progress = Progress()
    progress.begin(partial(of_dataset, 5))
    for number, size in enumerate([16, 16, 3]):
        progress.mark_done(number, None, size)
    there = progress.snapshot()
    assert there["size"] == 16
    resumed = Progress()
    resumed.resume(there["passes"], there["position"], there["next_number"], there["size"])
    for number, size in enumerate([*sizes, *sizes], 3):
        if number == 3 + len(sizes):
            resumed.end(partial(of_dataset, 5), is_empty=True)  # the next pass may have any
        resumed.mark_done(number, None, size)
    assert caplog.text.count("those before the checkpoint had 16") == warns
