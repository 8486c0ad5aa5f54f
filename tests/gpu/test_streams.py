"""Copies to and from a device, on streams: nothing is read before it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from persia._rpc.messages import JaggedOutput, PooledOutput, RawOutput, SlotOutput
from persia._training.backward import BackwardPipeline
from persia._training.batch import DeviceTransfer, Jagged, PersiaTrainingBatch
from persia._training.dense_step import reader
from persia._training.inflight import InFlightBatch, InFlightTracker, Leaf
from persia.embedding.data import Label, NonIDTypeFeature, PersiaBatch
from tests.training.fakes import DIM, make_batch

from .fake_cuda import FakeCuda, FakeEvent, Race, fake_cuda

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch, DEVICE.index) as made:
        yield made


def in_thread(cuda: FakeCuda, call: Callable[[], object], name: str) -> None:
    """Run in a thread of that name, as a pipeline's do; the mode is each thread's own."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with cuda:
                call()
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=run, name=name)
    cuda.order(cuda.host, name)  # as a queue between them does
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    cuda.order(name, cuda.host)
    for failure in failures:
        raise failure


def outputs() -> list[SlotOutput]:
    rng = np.random.default_rng(0)
    rows = rng.random((4, DIM), np.float32)
    index = np.array([1, 0, 3, 2], np.int64)
    return [
        PooledOutput("user", rng.random((2, DIM), np.float32)),
        RawOutput("seq", rows, index, 2),
        JaggedOutput("jag", rows, index, np.array([0, 1, 4], np.int64)),
    ]


def data() -> PersiaBatch:
    one = np.ones((2, 1), np.float32)
    features = make_batch(0, size=2, names=("user", "seq", "jag")).features
    return PersiaBatch(features, [NonIDTypeFeature(one)], [Label(one)])  # type: ignore[arg-type]


def staged(cuda: FakeCuda, transfer: DeviceTransfer, *, trains: bool = True) -> Any:
    """What the dataset's thread and a forward worker make of a batch."""
    made: list[PersiaTrainingBatch] = []
    in_thread(cuda, lambda: made.append(transfer.copy(data())), "persia-dataset")
    if trains:
        made[0].ticket = InFlightBatch()
    in_thread(cuda, lambda: transfer.stage(made[0], outputs()), "persia-forward-0")
    return made[0]


def test_a_batch_is_on_the_device_before_the_model_reads_it(cuda: FakeCuda) -> None:
    transfer = DeviceTransfer(DEVICE)
    batch = staged(cuda, transfer)
    with cuda:
        transfer.finish(batch)
        pooled, raw, jagged = batch.embedding_tensors
        for tensor in (pooled, raw, jagged.values, *batch.non_id_type_tensors, *batch.labels):
            assert tensor.is_cuda
            _ = tensor + 1  # as the model would
    cuda.check_freed()
    copies = [name for name, what in cuda.log if what == "copy to device"]
    assert copies == ["stream 1"] * 4  # floats, indices, dense, labels
    on_cpu = DeviceTransfer(torch.device("cpu"))
    wanted = on_cpu.copy(data())
    wanted.ticket = InFlightBatch()
    on_cpu.stage(wanted, outputs())
    for own, want in zip(batch.embedding_tensors, wanted.embedding_tensors, strict=True):
        parts: Any = zip(own, want, strict=True) if isinstance(own, Jagged) else [(own, want)]
        assert all(torch.equal(one, other) for one, other in parts)


def test_a_missing_wait_is_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would not show of a fake that orders everything."""
    transfer = DeviceTransfer(DEVICE)
    batch = staged(cuda, transfer)
    monkeypatch.setattr("tests.gpu.fake_cuda.FakeStream.wait_event", lambda *_: None)
    with cuda, pytest.raises(Race, match="on default of MainThread reads what stream 1 wr"):
        transfer.finish(batch)


def test_a_missing_record_stream_is_found(cuda: FakeCuda) -> None:
    transfer = DeviceTransfer(DEVICE)
    batch = staged(cuda, transfer)
    upload = batch.upload
    batch.upload = upload._replace(storages=upload.storages[1:])  # without the floats
    with cuda:
        transfer.finish(batch)
    with pytest.raises(Race, match="not recorded"):
        cuda.check_freed()


def test_one_embedding_changed_in_place_leaves_the_others_alone(cuda: FakeCuda) -> None:
    """All are parts of one buffer, and autograd counts the changes of what it saved."""
    transfer = DeviceTransfer(DEVICE)
    arrays = [np.ones((2, DIM), np.float32), np.ones((2, DIM), np.float32)]
    with cuda, cuda.use_device(DEVICE):
        _, (changed, saved) = transfer._pack(arrays, torch.float32)
    loss = (saved.requires_grad_() ** 2).sum()
    changed.zero_()
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(saved.grad, torch.full((2, DIM), 2.0))  # type: ignore[arg-type]


def gradients(cuda: FakeCuda) -> InFlightBatch:
    """Gradients as a backward on this thread's stream leaves them; three raw, two distinct."""
    pooled = cuda.add(torch.full((2, DIM), 1.0), on_device=True)
    raw = cuda.add(torch.full((3, DIM), 2.0), on_device=True)
    index = cuda.add(torch.tensor([1, 1, 0]), on_device=True)
    return InFlightBatch(
        gradients=[
            (Leaf("user", pooled), pooled),
            (Leaf("absent", pooled), None),
            (Leaf("seq", raw, index, 2, has_padding=True), raw),
        ]
    )


def test_gradients_reach_the_host_before_a_worker_reads_them(cuda: FakeCuda) -> None:
    stream: Any = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    with cuda:
        ticket = gradients(cuda)
        ticket.pack()
        flat = ticket._flat
        assert flat is not None
        ticket.start_copy(stream)
    assert ticket._flat is None
    event: Any = ticket.event
    assert isinstance(event, FakeEvent)
    assert event.blocking  # or waiting workers keep the cores busy
    slots: list[Any] = []
    in_thread(cuda, lambda: slots.extend(ticket.slots()), "persia-backward-0")
    cuda.check_freed()
    by_name = {slot.name: slot.gradient for slot in slots}
    assert by_name["absent"] is None
    assert by_name["user"].tolist() == [[1.0] * DIM] * 2
    assert by_name["seq"].tolist() == [[4.0] * DIM]  # two of id 1; the padding has none
    assert [name for name, what in cuda.log if what == "copy to host"] == [stream.name]


def test_gradients_read_too_early_are_found(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Any = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    with cuda:
        ticket = gradients(cuda)
        ticket.pack()
        ticket.start_copy(stream)
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None)
    with pytest.raises(Race, match="numpy on persia-backward-0 reads what stream 1 writes"):
        in_thread(cuda, ticket.slots, "persia-backward-0")


def test_a_copy_beside_the_backward_is_found(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Any = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    monkeypatch.setattr("tests.gpu.fake_cuda.FakeStream.wait_stream", lambda *_: None)
    with cuda:
        ticket = gradients(cuda)
        ticket.pack()
        cuda.clocks[stream.name] = {stream.name: 0}
        # The kernels behind ``_flat`` were started by this thread and may not have run.
        with pytest.raises(Race, match="copy to host on stream 1 reads what default"):
            ticket.start_copy(stream)


def test_a_pipeline_of_a_device_has_one_stream_of_its_own(cuda: FakeCuda) -> None:
    worker: Any = None
    engine = BackwardPipeline(
        worker, InFlightTracker(worker), client=1, num_workers=1, capacity=1, device=DEVICE
    )
    assert engine._stream is not None
    assert cuda._num_streams == 1


def test_a_loss_is_read_behind_its_step_from_any_thread(cuda: FakeCuda) -> None:
    with cuda:
        own: Any = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            loss = cuda.add(torch.ones(()), on_device=True)
            read = reader(loss)
    found: list[tuple[float, str]] = []

    def scrape() -> None:
        found.append((read(), cuda.current_stream().name))

    in_thread(cuda, scrape, "persia-metrics")
    assert found == [(1.0, "default of persia-metrics")]
    assert ("stream 1", "item") in cuda.log
    with pytest.raises(Race, match="item on default of persia-metrics"):
        in_thread(cuda, loss.item, "persia-metrics")
    assert reader(torch.tensor(2.0))() == 2.0
