"""What the model receives for each kind of feature: dtypes, ownership of memory, devices, and
where its gradients go.
"""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
import torch

from persia._rpc.messages import PooledOutput
from persia._training.batch import DeviceTransfer, Jagged, NamedList, PersiaTrainingBatch
from persia.ctx import TrainCtx, eval_ctx
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

from .conftest import LOCKSTEP, MakeCtx, Net, batches, embeddings_of, step, train
from .fakes import DIM, FIXED, SpyWorker, make_batch, u64

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tensors_of(batch: PersiaTrainingBatch) -> list[torch.Tensor]:
    """All that a model and its loss are given."""
    tensors = [*batch.non_id_type_tensors, *(batch.labels or [])]
    for item in batch.embedding_tensors:
        tensors += item if isinstance(item, Jagged) else [item]
    return tensors


def test_tensors_come_in_the_order_of_the_batch(ctx: TrainCtx) -> None:
    names = ("jag", "user", "seq", "tags")
    batch = ctx.get_embedding_from_data(make_batch(3, size=5, names=names))
    assert batch.feature_names == names
    jagged, user, raw, tags = batch.embedding_tensors
    assert isinstance(jagged, Jagged)
    assert isinstance(user, torch.Tensor)
    assert isinstance(raw, torch.Tensor)
    assert isinstance(tags, torch.Tensor)
    assert user.shape == tags.shape == (5, DIM)
    assert raw.shape == (5, FIXED, DIM + 1)
    assert jagged.offsets.shape == (6,)
    assert jagged.values.shape == (jagged.offsets[-1], DIM)
    for tensor in (user, raw, tags, jagged.values):
        assert tensor.dtype is torch.float32
        assert tensor.requires_grad
    assert user.is_leaf
    assert jagged.values.is_leaf
    assert [leaf.name for leaf in batch.leaves] == list(names)


def test_lists_and_pairs_taken_for_a_tensor_say_what_they_are() -> None:
    one = torch.ones(2, 1)
    named = NamedList([one], ["click"])
    with pytest.raises(AttributeError, match=r"'size': .* a list of 1; .* labels\[0\]"):
        torch.nn.functional.binary_cross_entropy_with_logits(one, named)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"'mean': .*Jagged.* \.values and \.offsets"):
        Jagged(one, one).mean()  # type: ignore[attr-defined]
    for each in (copy.copy(named), copy.deepcopy(named), pickle.loads(pickle.dumps(named))):
        assert not hasattr(each, "mean")
        assert each.names == ("click",)
        assert torch.equal(each["click"], one)
    for pair in (copy.deepcopy(Jagged(one, one)), pickle.loads(pickle.dumps(Jagged(one, one)))):
        assert not hasattr(pair, "mean")
        assert torch.equal(pair.offsets, one)


@pytest.mark.parametrize(("name", "size"), [("seq", 1), ("seq", 4), ("jag", 3)])
def test_w36_no_id_at_all(worker: SpyWorker, make_ctx: MakeCtx, name: str, size: int) -> None:
    label = Label(np.zeros((size, 1), np.float32))
    empty = PersiaBatch([IDTypeFeature(name, [u64()] * size)], labels=[label])
    with make_ctx(model=Net(1, num_dense=0)) as ctx:
        batch = ctx.get_embedding_from_data(empty)
        if name == "seq":
            (raw,) = embeddings_of(batch)
            assert torch.equal(raw.detach(), torch.zeros(size, FIXED, DIM + 1))
        step(ctx, batch)
        assert ctx.get_embedding_size() == [0]
    (slot,) = worker.gradients[0].gradients
    assert slot.gradient is not None
    assert slot.gradient.shape == (0, DIM)


def test_batch_without_labels_has_none(ctx: TrainCtx) -> None:
    batch = PersiaBatch([IDTypeFeatureWithSingleID("user", u64(1))], requires_grad=False)
    assert ctx.get_embedding_from_data(batch).labels is None


def test_evaluation_has_no_leaves(worker: SpyWorker, ctx: TrainCtx) -> None:
    names = ("jag", "user", "seq")
    with eval_ctx(model=ctx.model) as inner:
        batch = inner.get_embedding_from_data(make_batch(1, names=names))
        assert batch.leaves == []
        assert batch.ticket is None
        jagged, user, raw = batch.embedding_tensors
        assert isinstance(jagged, Jagged)
        for tensor in (jagged.values, user, raw):
            assert isinstance(tensor, torch.Tensor)
            assert not tensor.requires_grad
            assert not tensor.any() or tensor is raw  # nothing is stored, nothing inserted
    assert worker.rows == {}
    assert worker.refs == {}


def test_a_batch_may_be_forwarded_twice(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(make_batch(1, names=("user", "seq")))
        once, _ = ctx.forward(batch)
        twice, _ = ctx.forward(batch)
        once.sum().backward()
        ctx.backward(twice.sum())
    assert worker.of("update") == [0]


def test_bytes_make_the_same_batch(ctx: TrainCtx) -> None:
    batch = make_batch(5, meta=b"five")
    direct = ctx.get_embedding_from_data(batch)
    through = ctx.get_embedding_from_bytes(batch.to_bytes())
    assert through.meta == b"five"
    assert through.labels is not None
    for one, other in zip(tensors_of(direct), tensors_of(through), strict=True):
        assert torch.equal(one, other)


# --- copies to tensors ----------------------------------------------------------------------


def test_dense_and_labels_keep_their_dtype(ctx: TrainCtx) -> None:
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
    got = ctx.get_embedding_from_data(batch)
    dtypes = [torch.bool, torch.int8, torch.float64, torch.int64, torch.float32]
    assert got.labels is not None
    for tensors in (got.non_id_type_tensors, got.labels):
        assert [tensor.dtype for tensor in tensors] == dtypes
        for tensor, array in zip(tensors, arrays, strict=True):
            assert np.array_equal(tensor.numpy(), array)


def test_w37_tensors_outlive_their_batch(ctx: TrainCtx) -> None:
    batch = ctx.get_embedding_from_data(make_batch(1))
    (dense,), embeddings, labels = ctx.prepare_features(batch)
    kept = [dense, *embeddings, *(labels or [])]
    before = [each.detach().clone() for each in kept if isinstance(each, torch.Tensor)]
    ctx.current_batch = None
    del batch
    gc.collect()
    for number in range(20):
        ctx.get_embedding_from_data(make_batch(number))
    for tensor, its_copy in zip(kept, before, strict=True):
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor.detach(), its_copy)


def test_w37_received_bytes_are_copied_and_own_arrays_are_not() -> None:
    features = make_batch(0, size=2, names=("user",))
    transfer = DeviceTransfer(torch.device("cpu"))
    received = np.ones((2, DIM), np.float32)
    received.flags.writeable = False
    fresh = np.ones((2, DIM), np.float32)
    for values, is_shared in ((received, False), (fresh, True)):
        batch = transfer.copy(features)
        transfer.stage(batch, [PooledOutput("user", values)])
        (tensor,) = embeddings_of(batch)
        assert np.shares_memory(tensor.numpy(), values) is is_shared
        tensor += 1  # and it can be written to
    assert received.sum() == 2 * DIM


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)
def test_w38_an_output_of_more_than_256_mib_moves_whole(device: str) -> None:
    """The original's pools ended there, and kept a power of two of bytes for every size."""
    values = np.zeros(((256 << 20) // (4 * DIM) + 1, DIM), np.float32)
    values[-1] = 7.0
    transfer = DeviceTransfer(torch.device(device))
    ids = IDTypeFeatureWithSingleID("user", u64(0))
    batch = transfer.copy(PersiaBatch([ids], requires_grad=False))
    transfer.stage(batch, [PooledOutput("user", values)])
    transfer.finish(batch)
    (moved,) = embeddings_of(batch)
    assert moved.shape == values.shape
    assert moved[-1].tolist() == [7.0] * DIM
    assert moved.device.type == device
    if device == "cuda":
        assert moved.untyped_storage().nbytes() == values.nbytes


@needs_cuda
@pytest.mark.cuda
def test_cuda_gives_what_the_cpu_gives(ctx: TrainCtx) -> None:
    names = ("jag", "user", "seq", "tags")
    wanted = ctx.get_embedding_from_data(make_batch(3, names=names))
    got = ctx.get_embedding_from_data(make_batch(3, names=names), device_id=0)
    for one, other in zip(tensors_of(wanted), tensors_of(got), strict=True):
        assert other.device.type == "cuda"
        assert torch.equal(one, other.cpu())


@needs_cuda
@pytest.mark.cuda
def test_cuda_trains_what_the_cpu_trains(make_ctx: MakeCtx) -> None:
    results = []
    for device_id in (None, 0):
        fake = SpyWorker()
        model = Net(2) if device_id is None else Net(2).cuda(device_id)
        options = {"device_id": device_id, "mixed_precision": False}
        with make_ctx(model=model, embedding_worker=fake, **options) as ctx:
            losses = train(ctx, batches(20), **LOCKSTEP)
        results.append((losses, fake.rows))
    (losses, rows), (cuda_losses, cuda_rows) = results
    # The devices sum in different orders.
    assert np.allclose(losses, cuda_losses, rtol=1e-5)
    for key, row in rows.items():
        assert np.allclose(row, cuda_rows[key], atol=1e-6)
