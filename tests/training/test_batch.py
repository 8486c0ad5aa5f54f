"""What the model receives for each kind of feature, and where its gradients go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from persia._training.batch import Jagged, PersiaTrainingBatch
from persia.ctx import PreprocessMode, _prepare_feature, eval_ctx
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    PersiaBatch,
)

from .conftest import MakeCtx, Net, step
from .fakes import DIM, FIXED, FakeWorker, initial_row, make_batch, u64


def embeddings_of(batch: PersiaTrainingBatch) -> list[torch.Tensor]:
    assert all(isinstance(tensor, torch.Tensor) for tensor in batch.embedding_tensors)
    return [tensor for tensor in batch.embedding_tensors if isinstance(tensor, torch.Tensor)]


def lists_batch(name: str, lists: list[np.ndarray[Any, Any]], **options: Any) -> PersiaBatch:
    label = Label(np.zeros((len(lists), 1), np.float32))
    return PersiaBatch([IDTypeFeature(name, lists)], labels=[label], **options)


def rows_of(name: str, *numbers: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([initial_row(name, number, DIM) for number in numbers]))


def test_tensors_come_in_the_order_of_the_batch(make_ctx: MakeCtx) -> None:
    names = ("jag", "user", "seq", "tags")
    with make_ctx() as ctx:
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


def test_pooled_values_are_the_workers(make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(lists_batch("tags", [u64(3, 5, 3), u64(), u64(5)]))
    (tags,) = embeddings_of(batch)
    three, five = rows_of("tags", 3, 5)
    assert torch.equal(tags.detach(), torch.stack([three + five + three, 0 * three, five]))


def test_raw_is_padded_truncated_and_masked(make_ctx: MakeCtx) -> None:
    lists = [u64(7, 8), u64(), u64(8, 7, 8, 9)]
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(lists_batch("seq", lists))
    (raw,) = embeddings_of(batch)
    seven, eight = rows_of("seq", 7, 8)
    zero = torch.zeros(DIM)
    assert raw.detach()[:, :, DIM].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    wanted = [[seven, eight, zero], [zero, zero, zero], [eight, seven, eight]]
    assert torch.equal(
        raw.detach()[:, :, :DIM], torch.stack([torch.stack(row) for row in wanted])
    )


@pytest.mark.parametrize("size", [1, 4])
def test_w36_raw_feature_without_any_id(
    worker: FakeWorker, make_ctx: MakeCtx, size: int
) -> None:
    with make_ctx(model=Net(1, num_dense=0)) as ctx:
        batch = ctx.get_embedding_from_data(lists_batch("seq", [u64()] * size))
        (raw,) = embeddings_of(batch)
        assert torch.equal(raw.detach(), torch.zeros(size, FIXED, DIM + 1))
        step(ctx, batch)
        assert ctx.get_embedding_size() == [0]
    (slot,) = worker.gradients[0].gradients
    assert slot.gradient is not None
    assert slot.gradient.shape == (0, DIM)


def test_jagged_feature_without_any_id(worker: FakeWorker, make_ctx: MakeCtx) -> None:
    with make_ctx(model=Net(1, num_dense=0)) as ctx:
        batch = ctx.get_embedding_from_data(lists_batch("jag", [u64()] * 3))
        step(ctx, batch)
    (slot,) = worker.gradients[0].gradients
    assert slot.gradient is not None
    assert slot.gradient.shape == (0, DIM)


@pytest.mark.parametrize("name", ["seq", "jag", "tags"])
def test_gradients_are_summed_per_distinct_id(
    worker: FakeWorker, make_ctx: MakeCtx, name: str
) -> None:
    lists = [u64(4, 9), u64(9), u64(), u64(9, 4)]
    weights = torch.arange(4 * FIXED * DIM, dtype=torch.float32).view(4, FIXED, DIM)
    rows = rows_of(name, 4, 9).requires_grad_()
    places = [[0, 1], [1], [], [1, 0]]  # of the lists in rows
    want = sum(
        (weights[sample, place] * rows[row]).sum()
        for sample, row_numbers in enumerate(places)
        for place, row in enumerate(row_numbers)
    )
    assert isinstance(want, torch.Tensor)
    want.backward()  # type: ignore[no-untyped-call]
    if name == "tags":  # a sum has one weight per sample
        rows.grad = None
        counts = torch.tensor([[1.0, 1], [0, 1], [0, 0], [1, 1]])
        ((counts @ rows) * weights[:, 0]).sum().backward()  # type: ignore[no-untyped-call]
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(lists_batch(name, lists))
        _, (embedding,), _ = ctx.prepare_features(batch)
        if isinstance(embedding, Jagged):
            flat = torch.cat([weights[s, : len(p)] for s, p in enumerate(places)])
            loss = (embedding.values * flat).sum()
        elif name == "seq":
            loss = (embedding[:, :, :DIM] * weights).sum()
        else:
            loss = (embedding * weights[:, 0]).sum()
        ctx.backward(loss)
        ctx.get_embedding_size()
    (slot,) = worker.gradients[0].gradients
    assert rows.grad is not None
    assert slot.gradient is not None
    if name == "tags":
        assert torch.equal(torch.from_numpy(slot.gradient), weights[:, 0])
    else:
        assert torch.equal(torch.from_numpy(slot.gradient), rows.grad)
    trained = rows.detach() - 0.5 * rows.grad
    for number, row in zip((4, 9), trained, strict=True):
        assert torch.equal(torch.from_numpy(worker.rows[name, number]), row)


@pytest.mark.parametrize("mode", list(PreprocessMode))
def test_modes(worker: FakeWorker, make_ctx: MakeCtx, mode: PreprocessMode) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(make_batch(1))
        dense, embeddings, labels = _prepare_feature(batch, mode)
    assert dense is batch.non_id_type_tensors
    assert embeddings is batch.embedding_tensors
    assert labels is (None if mode is PreprocessMode.INFERENCE else batch.labels)


def test_batch_without_labels_has_none(make_ctx: MakeCtx) -> None:
    batch = PersiaBatch([IDTypeFeatureWithSingleID("user", u64(1))], requires_grad=False)
    with make_ctx() as ctx:
        assert ctx.get_embedding_from_data(batch).labels is None


def test_evaluation_has_no_leaves(worker: FakeWorker, make_ctx: MakeCtx) -> None:
    names = ("jag", "user", "seq")
    with make_ctx() as ctx, eval_ctx(model=ctx.model) as inner:
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


def test_a_batch_can_be_forwarded_twice_in_one_loss(
    worker: FakeWorker, make_ctx: MakeCtx
) -> None:
    with make_ctx(num_features=2) as ctx:
        batch = ctx.get_embedding_from_data(make_batch(1, names=("user", "seq")))
        once, _ = ctx.forward(batch)
        twice, _ = ctx.forward(batch)
        once.sum().backward()
        ctx.backward(twice.sum())
    assert worker.of("update") == [0]


def test_bytes_make_the_same_batch(make_ctx: MakeCtx) -> None:
    batch = make_batch(5, meta=b"five")
    with make_ctx() as ctx:
        direct = ctx.get_embedding_from_data(batch)
        through = ctx.get_embedding_from_bytes(batch.to_bytes())
    assert through.meta == b"five"
    assert through.labels is not None
    assert direct.labels is not None
    for one, other in zip(
        [*direct.non_id_type_tensors, *embeddings_of(direct), *direct.labels],
        [*through.non_id_type_tensors, *embeddings_of(through), *through.labels],
        strict=True,
    ):
        assert torch.equal(one, other)
