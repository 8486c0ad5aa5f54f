"""Copies to tensors: dtypes, ownership of memory, devices."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from persia._rpc.messages import (
    LookupResult,
    PooledOutput,
)
from persia._training.batch import Jagged, PersiaTrainingBatch
from persia._training.transfer import DeviceTransfer
from persia.ctx import TrainCtx
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

from .conftest import MakeCtx, Net, step
from .fakes import DIM, FakeWorker, make_batch, u64


def embeddings_of(batch: PersiaTrainingBatch) -> list[torch.Tensor]:
    assert all(isinstance(tensor, torch.Tensor) for tensor in batch.embedding_tensors)
    return [tensor for tensor in batch.embedding_tensors if isinstance(tensor, torch.Tensor)]


def test_float64_is_named_once(make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture) -> None:
    age = NonIDTypeFeature(np.zeros((1, 1)), name="age")
    height = NonIDTypeFeature(np.zeros((1, 1), np.float32), name="height")
    ids = IDTypeFeatureWithSingleID("user", u64(1))
    batch = PersiaBatch([ids], [age, height], [Label(np.zeros((1, 1)))])
    with make_ctx() as ctx:
        for _ in range(2):
            dense, *_ = ctx.get_embedding_from_data(batch).non_id_type_tensors
            assert dense.dtype is torch.float64
    said = [message.partition(",")[0] for message in caplog.messages if "float64" in message]
    assert said == ["dense feature 'age' is float64", "label 'label_anonymous' is float64"]


def test_dense_and_labels_keep_their_dtype(make_ctx: MakeCtx) -> None:
    # W-21: the original turned bool into uint8.
    arrays = [
        np.array([[True], [False]]),
        np.array([[1], [2]], np.int8),
        np.array([[1.5], [2]], np.float64),
        np.array([[1], [2]], np.int64),
        np.zeros((2, 3, 4), np.float32)[:, ::-1],
    ]
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("user", u64(1, 2))],
        [NonIDTypeFeature(array) for array in arrays],
        [Label(array) for array in arrays],
    )
    with make_ctx() as ctx:
        got = ctx.get_embedding_from_data(batch)
    dtypes = [torch.bool, torch.int8, torch.float64, torch.int64, torch.float32]
    assert got.labels is not None
    for tensors in (got.non_id_type_tensors, got.labels):
        assert [tensor.dtype for tensor in tensors] == dtypes
        for tensor, array in zip(tensors, arrays, strict=True):
            assert np.array_equal(tensor.numpy(), array)


def test_w37_tensors_outlive_their_batch(make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(make_batch(1))
        (dense,), embeddings, labels = ctx.prepare_features(batch)
        kept = [dense, *embeddings, *(labels or [])]
        before = [
            tensor.detach().clone() for tensor in kept if isinstance(tensor, torch.Tensor)
        ]
        ctx.current_batch = None
        del batch
        gc.collect()
        for number in range(20):
            ctx.get_embedding_from_data(make_batch(number))
        for tensor, copy in zip(kept, before, strict=True):
            assert isinstance(tensor, torch.Tensor)
            assert torch.equal(tensor.detach(), copy)


def test_w37_received_bytes_are_copied_and_own_arrays_are_not() -> None:
    features = make_batch(0, size=2, names=("user",))
    transfer = DeviceTransfer(torch.device("cpu"))
    received = np.ones((2, DIM), np.float32)
    received.flags.writeable = False
    fresh = np.ones((2, DIM), np.float32)
    for values, is_shared in ((received, False), (fresh, True)):
        host = transfer.copy(features)
        result = LookupResult((PooledOutput("user", values),), None)
        batch = transfer.finish(transfer.stage(host, result, None))
        (tensor,) = embeddings_of(batch)
        assert np.shares_memory(tensor.numpy(), values) is is_shared
        tensor += 1  # and it can be written to
    assert received.sum() == 2 * DIM


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_w38_an_output_of_more_than_256_mib_moves_whole(device: str) -> None:
    """The original's pools ended there, and kept a power of two of bytes for every size."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    values = np.zeros(((256 << 20) // (4 * DIM) + 1, DIM), np.float32)
    values[-1] = 7.0
    result = LookupResult((PooledOutput("user", values),), None)
    transfer = DeviceTransfer(torch.device(device))
    ids = IDTypeFeatureWithSingleID("user", u64(0))
    host = transfer.copy(PersiaBatch([ids], requires_grad=False))
    batch = transfer.finish(transfer.stage(host, result, None))
    (moved,) = embeddings_of(batch)
    assert moved.shape == values.shape
    assert moved[-1].tolist() == [7.0] * DIM
    assert moved.device.type == device
    if device == "cuda":
        assert moved.untyped_storage().nbytes() == values.nbytes


@pytest.mark.cuda
def test_cuda_gives_what_the_cpu_gives(worker: FakeWorker, make_ctx: MakeCtx) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    names = ("jag", "user", "seq", "tags")
    with make_ctx() as ctx:
        wanted = ctx.get_embedding_from_data(make_batch(3, names=names))
        got = ctx.get_embedding_from_data(make_batch(3, names=names), device_id=0)
    for one, other in zip(wanted.embedding_tensors, got.embedding_tensors, strict=True):
        pair = [
            (item.values, item.offsets) if isinstance(item, Jagged) else (item,)
            for item in (one, other)
        ]
        for left, right in zip(*pair, strict=True):
            assert right.device.type == "cuda"
            assert torch.equal(left, right.cpu())
    for one, other in zip(
        [*wanted.non_id_type_tensors, *(wanted.labels or [])],
        [*got.non_id_type_tensors, *(got.labels or [])],
        strict=True,
    ):
        assert other.device.type == "cuda"
        assert torch.equal(one, other.cpu())


@pytest.mark.cuda
def test_cuda_trains_what_the_cpu_trains(make_ctx: MakeCtx) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from persia.data import DataLoader
    from persia.embedding.optim import SGD

    results = []
    for device_id in (None, 0):
        fake = FakeWorker()
        model = Net(2)
        if device_id is not None:
            model.cuda(device_id)
        with TrainCtx(
            SGD(lr=0.5),
            torch.optim.SGD(model.parameters(), lr=0.1),
            model=model,
            device_id=device_id,
            mixed_precision=False,
            embedding_worker=fake,
        ) as ctx:
            batches = [make_batch(number) for number in range(20)]
            loader = DataLoader(batches, reproducible=True, embedding_staleness=1)
            losses = [step(ctx, batch).item() for batch in loader]
        results.append((losses, fake.rows))
    (losses, rows), (cuda_losses, cuda_rows) = results
    # The devices sum in different orders.
    assert np.allclose(losses, cuda_losses, rtol=1e-5)
    for key, row in rows.items():
        assert np.allclose(row, cuda_rows[key], atol=1e-6)
