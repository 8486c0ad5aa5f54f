"""``Embedding`` and ``EmbeddingBag``: layouts, padding and weights as torch's have them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia.errors import ConfigError, DataError, DataTypeError

ROWS, DIM = 30, 5


def a_pair(**options: object) -> tuple[persia.nn.EmbeddingBag, nn.EmbeddingBag]:
    theirs = nn.EmbeddingBag(ROWS, DIM, **options)  # type: ignore[arg-type]
    ours = persia.nn.EmbeddingBag(ROWS, DIM, **options)  # type: ignore[arg-type]
    ours.weight.copy_(theirs.weight)
    return ours, theirs


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_bags_of_every_layout_equal_torchs(mode: str, padding_idx: int | None) -> None:
    ours, theirs = a_pair(mode=mode, padding_idx=padding_idx)
    matrix = torch.randint(ROWS, (7, 4))
    matrix[0] = 3
    matrix[1, 1] = ROWS - 1
    assert torch.allclose(ours(matrix), theirs(matrix), atol=1e-6)
    offsets = torch.tensor([0, 3, 3, 20])
    flat = matrix.reshape(-1)
    assert torch.allclose(ours(flat, offsets), theirs(flat, offsets), atol=1e-6)
    ours.include_last_offset = theirs.include_last_offset = True
    ends = torch.tensor([0, 3, 3, 20, 28])
    assert torch.allclose(ours(flat, ends), theirs(flat, ends), atol=1e-6)
    nested = torch.nested.nested_tensor_from_jagged(flat, ends)
    assert torch.allclose(ours(nested), theirs(flat, ends), atol=1e-6)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_weights_of_a_bag_have_gradients(padding_idx: int | None) -> None:
    ours, theirs = a_pair(mode="sum", padding_idx=padding_idx)
    ids = torch.randint(ROWS, (6, 4))
    ids[2, 1] = 3
    both = [torch.rand(6, 4, requires_grad=True)]
    both.append(both[0].detach().clone().requires_grad_())
    factor = torch.rand(6, DIM)
    for module, weights in zip((ours, theirs), both, strict=True):
        (module(ids, per_sample_weights=weights) * factor).sum().backward()
    assert both[0].grad is not None
    assert both[1].grad is not None
    assert torch.allclose(both[0].grad, both[1].grad, atol=1e-5)


def test_an_embedding_takes_any_shape_and_keeps_its_padding_row() -> None:
    theirs = nn.Embedding(ROWS, DIM, padding_idx=0)
    with torch.no_grad():
        theirs.weight[0] = 7.0  # as an initialization of all weights leaves it
    ours = persia.nn.Embedding(ROWS, DIM, padding_idx=0)
    ours.weight.data.copy_(theirs.weight)
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(ours), lr=1.0)
    for shape in ((4,), (2, 3), (2, 3, 2), ()):
        ids = torch.randint(ROWS, shape)
        assert torch.allclose(ours(ids), theirs(ids))
    ids = torch.tensor([[0, 1], [2, 0]])
    ours(ids).sum().backward()
    optimizer.step()
    assert ours(torch.tensor(0)).tolist() == [7.0] * DIM
    assert torch.allclose(ours(torch.tensor(1)), theirs(torch.tensor(1)) - 1.0)
    nested = torch.nested.nested_tensor_from_jagged(
        torch.tensor([4, 5, 6]), torch.tensor([0, 1, 3])
    )
    assert torch.equal(ours(nested).values(), ours(torch.tensor([4, 5, 6])))
    sequences = torch.nested.nested_tensor([ids[:1, 0], ids[1]], layout=torch.jagged)
    padded = torch.nested.to_padded_tensor(ours(sequences), 0.0)
    assert padded.shape == (2, 2, DIM)  # to the longest, as torch's


def test_a_padding_row_that_the_weight_trains_is_seen_by_lookups() -> None:
    module = persia.nn.Embedding(4, 2, padding_idx=0)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    assert module(torch.tensor([0])).tolist() == [[0.0, 0.0]]
    (module.weight @ torch.ones(2)).sum().backward()  # as scores of all items
    optimizer.step()
    assert module(torch.tensor([0])).tolist() == [[-1.0, -1.0]]


def test_one_table_used_for_input_and_for_scores_steps_once() -> None:
    theirs = nn.Embedding(ROWS, DIM)
    ours = persia.nn.Embedding(ROWS, DIM)
    ours.weight.copy_(theirs.weight)
    optimizers = (
        persia.optim.Adagrad(persia.nn.sparse_parameters(ours), lr=0.1),
        torch.optim.Adagrad(theirs.parameters(), lr=0.1),
    )
    for _ in range(5):
        ids, sampled = torch.randint(ROWS, (8,)), torch.randint(ROWS, (10,))
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (module(ids) @ module(sampled).T).logsumexp(1).mean().backward()
            optimizer.step()
        # Rows that torch steps by zero stay; those of a batch move alike.
        met = torch.cat([ids, sampled])
        assert torch.allclose(ours(met), theirs(met), atol=1e-5)


def test_modules_of_one_name_share_rows_and_anchor() -> None:
    one, two = persia.nn.EmbeddingBag("shared", 3), persia.nn.Embedding("shared", 3)
    assert one.anchor is two.anchor
    assert len(persia.nn.sparse_parameters(nn.ModuleList([one, two]))) == 1
    assert torch.equal(one(torch.tensor([[5]])), two(torch.tensor([5])))


def test_a_name_with_another_dim_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    one = persia.nn.Embedding("redone", 3)
    before = one(torch.tensor([1])).detach()
    with caplog.at_level(logging.WARNING):
        two = persia.nn.Embedding("redone", 4)
    assert "begins again without rows, with dim 4" in caplog.text
    assert two(torch.tensor([1])).shape == (1, 4)
    assert torch.equal(one(torch.tensor([1])), before)


def test_evaluation_makes_no_rows() -> None:
    module = persia.nn.Embedding("evaluated", 3).eval()
    assert module(torch.tensor([1])).tolist() == [[0.0] * 3]
    module.train()
    assert module(torch.tensor([1])).abs().sum() > 0
    assert module.eval()(torch.tensor([1])).abs().sum() > 0
    with torch.no_grad():  # as an activation checkpoint runs its first forward
        assert module.train()(torch.tensor([2])).abs().sum() > 0


def test_half_and_double_models_get_their_dtype() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        module = persia.nn.Embedding(None, 3).to(dtype)
        optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
        out = module(torch.tensor([1]))
        assert out.dtype is dtype
        out.sum().backward()
        optimizer.step()
        moved = out.detach().float() - module(torch.tensor([1])).detach().float()
        assert torch.allclose(moved, torch.ones(1, 3), atol=2e-2)


def test_an_empty_batch_gives_none() -> None:
    module = persia.nn.EmbeddingBag("empty", 3)
    assert module(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 3)
    out = module(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    assert out.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: persia.nn.Embedding("x"), r"expected a name and a dim, as Embedding\('user'"),
        (lambda: persia.nn.Embedding(5, 3, max_norm=1.0), "weight_bound"),
        (lambda: persia.nn.Embedding("x", 0), "embedding_dim must be in"),
        (lambda: persia.nn.EmbeddingBag("x", 3, mode="last"), "expected one of sum, mean, max"),
        (lambda: persia.nn.Embedding("x", 3).weight, "has no fixed number of rows"),
    ],
)
def test_what_cannot_be_used_is_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_bad_bags_are_refused() -> None:
    module = persia.nn.EmbeddingBag("bad", 3)
    with pytest.raises(DataError, match=r"expected \[B, L\]"):
        module(torch.tensor([1, 2]))
    with pytest.raises(DataError, match="mode 'sum', got 'mean'"):
        module(torch.tensor([[1]]), per_sample_weights=torch.ones(1, 1))
    with pytest.raises(DataError, match="offsets"):
        module(torch.tensor([1, 2]), torch.tensor([0, 9]))


@pytest.mark.parametrize("ids", [None, torch.tensor([7, 1 << 40])])
def test_pretrained_rows_are_left_alone_unless_they_are_to_train(
    ids: torch.Tensor | None,
) -> None:
    asked = torch.tensor([0, 1]) if ids is None else ids
    for freeze in (True, False):
        module = persia.nn.Embedding.from_pretrained(torch.ones(2, 3), freeze, ids=ids)
        assert torch.equal(module(asked), torch.ones(2, 3))
        head = nn.Linear(3, 1)
        optimizer = persia.optim.SGD([*module.parameters(), *head.parameters()], lr=1.0)
        head(module(asked)).sum().backward()
        optimizer.step()
        moved = not torch.equal(module(asked), torch.ones(2, 3))
        assert moved is not freeze
    frozen = persia.nn.Embedding.from_pretrained(torch.ones(2, 3), ids=ids)
    assert not frozen(torch.tensor([99])).any()
    assert len(frozen.table) == 2
    with pytest.raises(DataError, match=r"ids: expected \[2\], one a row, got \[1\]"):
        persia.nn.Embedding.from_pretrained(torch.ones(2, 3), ids=asked[:1])


def test_nested_vectors_pad_to_the_longest_sequence() -> None:
    module = persia.nn.Embedding("padded", 4)
    parts = [torch.arange(3), torch.arange(5), torch.arange(2)]
    vectors = module(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert torch.nested.to_padded_tensor(vectors, 0.0).shape == (3, 5, 4)


def test_ids_that_are_no_tensor_of_integers_say_what_to_write() -> None:
    ids = np.arange(3)
    one, bag = persia.nn.Embedding("wrong ids", 2), persia.nn.EmbeddingBag("wrong ids", 2)
    several: Any = persia.nn.EmbeddingCollection({"wrong ids": 2})
    calls: list[Any] = [one, bag, lambda given: several({"wrong ids": given})]
    for call in calls:
        with pytest.raises(
            DataTypeError, match=r"'wrong ids'.* numpy\.ndarray; write torch\.from_numpy\(ids\)"
        ):
            call(ids)
        with pytest.raises(DataTypeError, match=r"list; write torch\.tensor\(ids\)"):
            call([1, 2])
    with pytest.raises(DataTypeError, match=r"table 'wrong ids': .*write ids\.long\(\)"):
        one(torch.ones(3))


def test_negative_ids_say_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        persia.nn.Embedding("negative ids", 2)(torch.tensor([1, -1]))
    (text,) = caplog.messages
    assert "1 of negative ids" in text
    assert "write padding_idx=0 and ids.clamp(min=0)" in text
