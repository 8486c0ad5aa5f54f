"""What is known of the streams of data-loaders: their ids, and who has sent nothing."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest

from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening
from persia._training.loader_streams import LoaderStream
from persia._training.progress import BEGINNING, Watermark, to_position
from persia._training.queues import Finished
from persia._training.receiver import BatchReceiver
from persia.errors import DataError
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize("num_loaders", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_each_id_is_of_one_stream_and_of_one_rank(num_loaders: int, world_size: int) -> None:
    streams = {
        (loader, rank): LoaderStream(StreamOpening(loader, num_loaders, 7, 0), rank, world_size)
        for loader in range(num_loaders)
        for rank in range(world_size)
    }
    of = {(batch_id % num_loaders, batch_id % world_size) for batch_id in range(36)}
    for (loader, rank), stream in streams.items():
        mine = [x for x in range(36) if (x % num_loaders, x % world_size) == (loader, rank)]
        assert [x for x in range(-36, 36) if stream.is_mine(x)] == mine
        for first in range(24):
            found = next((x for x in mine if x >= first), None)
            assert stream.at_or_after(first) == found
        assert (stream.next_batch_id is not None) == ((loader, rank) in of)


def test_a_run_goes_on_at_its_position_whatever_a_data_loader_has_left() -> None:
    position = {"kind": "stream", "num_loaders": 2, "floors": {"0": 4, "1": 3}, "above": {}}
    for resumed, first in ((position, 4), (BEGINNING, 0), (None, 8)):
        receiver = BatchReceiver(0, 1, 4, PATIENCE_S, resumed=resumed)
        assert receiver.position() is None or resumed is position
        state = receiver.open_stream(StreamOpening(0, 2, 7, 8))
        assert (state.next_batch_id, state.is_resumed) == (first, resumed is not None)


def test_a_run_that_goes_on_leaves_no_batch_out() -> None:
    before = to_position("stream", 1, {0: Watermark(2, 1, {3})})
    receiver = BatchReceiver(0, 1, 4, PATIENCE_S, resumed=before)
    receiver.open_stream(StreamOpening(0, 1, 7, 0))
    receiver.deliver((0, 7), receiver_batch(2))
    with pytest.raises(DataError, match="batch 4 of data-loader 0: expected 3, as this run"):
        receiver.deliver((0, 7), receiver_batch(4))
    for batch_id in (3, 4):  # batch 3 is trained
        receiver.deliver((0, 7), receiver_batch(batch_id))
    receiver.begin_pass()
    taken = [receiver.take(True, lambda: False)[1].batch_id for _ in range(2)]
    assert taken == [2, 4]


def test_a_wait_names_data_loaders() -> None:
    now = 0.0
    receiver = BatchReceiver(0, 1, 4, PATIENCE_S, lambda: now)
    assert receiver.describe_wait() == "a data-loader to connect; none has"
    receiver.open_stream(StreamOpening(1, 3, 7, 1))
    assert receiver.describe_wait() == "data-loader 0, 2 of 3 to connect"
    for loader in (0, 2):
        receiver.open_stream(StreamOpening(loader, 3, 7, loader))
    now = 100.0
    receiver.deliver((2, 7), receiver_batch(2))
    now = 101.0
    text = receiver.describe_wait()
    assert "data-loader 1 of 3, which has not been heard for 101 s" in text
    assert "data-loader 2" not in text


def receiver_batch(batch_id: int) -> StreamedBatch:
    return StreamedBatch(batch_id, 1, True, RemoteRef(0, 1), (), (), None)


def made_receiver(rank: int, world_size: int, *sent: int) -> BatchReceiver:
    """A receiver whose data-loaders have sent these numbers of batches, over all ranks."""
    receiver = BatchReceiver(rank, world_size, 99, 1.0)
    receiver.begin_pass()
    for loader, count in enumerate(sent):
        receiver.open_stream(StreamOpening(loader, len(sent), 7, loader))
        ids = range(loader, loader + count * len(sent), len(sent))
        for batch_id in ids:
            if batch_id % world_size == rank:
                receiver.deliver((loader, 7), receiver_batch(batch_id))
        receiver.end_stream((loader, 7), ids.stop, "", 0)
    return receiver


@pytest.mark.parametrize(
    ("rank", "world_size", "sent", "who"),
    [
        (0, 1, (3, 2), ""),
        (0, 1, (3, 0), "data-loader 1 of 2 sent"),
        (0, 1, (0, 0, 0), "data-loader 0, 1, 2 of 3 sent"),
        (1, 2, (2,), ""),
        (1, 2, (1,), "rank 1 of 2 had"),  # the only batch was rank 0's
        (0, 2, (0, 4), "data-loader 0 of 2 sent"),
    ],
)
def test_data_loaders_without_a_batch_are_named(
    rank: int, world_size: int, sent: tuple[int, ...], who: str
) -> None:
    assert made_receiver(rank, world_size, *sent).describe_missing() == who


def send_epochs(receiver: BatchReceiver, first: int, num_loaders: int, *epochs: int) -> None:
    """Send one batch for each rank in each of these epochs, from an id on, and end."""
    loader, world_size = first % num_loaders, receiver.replica_size
    at = iter(range(first, 1000, num_loaders))
    for epoch in epochs:
        for batch_id in itertools.islice(at, world_size):
            if batch_id % world_size == receiver.replica_index:
                batch = replace(receiver_batch(batch_id), epoch=epoch)
                receiver.deliver((loader, 7), batch)
    receiver.end_stream((loader, 7), next(at), "", epochs[-1])


def missing_of(receiver: BatchReceiver, num_passes: int) -> list[str]:
    """Read whole passes; what each was without."""
    found = []
    for _ in range(num_passes):
        receiver.begin_pass()
        with contextlib.suppress(Finished):
            while True:
                receiver.take(False, lambda: False)
        found.append(receiver.describe_missing())
        receiver.end_pass()
    return found


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_data_loaders_without_a_batch_of_an_epoch_are_named(rank: int, world_size: int) -> None:
    """Of several ranks each knows only which epoch of a data-loader was the last."""
    receiver = BatchReceiver(rank, world_size, 99, 1.0)
    for loader in range(3):
        receiver.open_stream(StreamOpening(loader, 3, 7, loader))
    send_epochs(receiver, 0, 3, 0, 2)  # without epoch 1, and it ends before the others do
    for loader in (1, 2):
        send_epochs(receiver, loader, 3, 0, 1, 2, 3)
    who = "data-loader 0 of 3 sent"
    assert missing_of(receiver, 4) == ["", who if world_size == 1 else "", "", who]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_a_process_before_this_one_has_trained_is_not_missed(is_resumed: bool) -> None:
    """All of loader 1's in epoch 1: by a run before, or by a rank that was restarted alone."""
    trained = to_position(
        "stream", 2, {0: Watermark(4, 2), 1: Watermark(5, 2)}, 1, {"0": 2, "1": 3}
    )
    receiver = BatchReceiver(0, 1, 99, 1.0, resumed=trained if is_resumed else None)
    for loader in range(2):
        beginning = (loader, 0) if is_resumed else (4 + loader, 1)
        receiver.open_stream(StreamOpening(loader, 2, 7, *beginning))
    send_epochs(receiver, 4, 2, 1, 2, 3)
    send_epochs(receiver, 5, 2, 2)
    assert missing_of(receiver, 3) == ["", "", "data-loader 1 of 2 sent"]
