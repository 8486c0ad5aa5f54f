"""What is in flight between a lookup and its step, against a plain dictionary of rows."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import persia.nn
import persia.optim
from persia import env
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.joined_features import PER_ID
from persia._modules import lookups
from persia._modules.homes import home_of
from persia._modules.lookups import LookedUpFeature, OpenLookup
from persia._training.backward import BackwardPipeline
from persia._training.inflight import InFlightBatch
from tests.support.profiles import tries

IDS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
# Ids of one forward, and whether it is followed by a backward, a step, or both.
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), st.booleans()
    ),
    min_size=1,
    max_size=8,
)


@tries(60)
@given(STEPS)
def test_rows_are_those_of_a_dictionary(steps: list[tuple[list[int], bool, bool]]) -> None:
    module = persia.nn.Embedding(6, 2)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0)
    rows = dict.fromkeys(range(6), 0.0)
    gradients: dict[int, float] = {}
    for ids, has_backward, has_step in steps:
        out = module(torch.tensor(ids))
        assert out[:, 0].tolist() == [rows[one] for one in ids]
        if has_backward:
            out.sum().backward()
            for one in ids:
                gradients[one] = gradients.get(one, 0.0) + 1.0
        if has_step:
            optimizer.step()
            optimizer.zero_grad()
            for one, gradient in gradients.items():
                rows[one] -= gradient
            gradients.clear()
    found = module(torch.arange(6))[:, 0].detach().numpy()
    assert np.array_equal(found, np.array([rows[number] for number in range(6)]))


def test_a_dropped_graph_ends_its_lookup() -> None:
    module = persia.nn.Embedding(6, 2)
    persia.optim.SGD(module.parameters(), lr=1.0)
    out = module(torch.tensor([1]))
    tracker = home_of(module._tables[0]).tracker
    assert tracker.stats()["staleness"] == 1
    del out
    gc.collect()
    module.eval()(torch.tensor([1]))
    assert tracker.stats()["staleness"] == 0


def test_two_backwards_through_one_graph_are_both_stepped_once() -> None:
    module = persia.nn.Embedding(6, 2)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0)
    out = module(torch.tensor([1])).sum()
    out.backward(retain_graph=True)
    out.backward()
    optimizer.step()
    assert module(torch.tensor([1])).tolist() == [[-2.0, -2.0]]
    assert home_of(module._tables[0]).tracker.stats()["batches"] == 1


# Samples without ids come first, between others, and last.
EDGES = {"one each": None, "bags": np.array([0, 0, 3, 3, 4, 6, 6])}


@pytest.mark.parametrize("form", EDGES)
@pytest.mark.parametrize("mode", ["sum", "weighted", "mean", "max", PER_ID])
def test_a_device_computes_what_the_host_does(mode: str, form: str) -> None:
    """What runs where vectors are on a GPU, here on the CPU, against the core's kernels."""
    rng = np.random.default_rng(0)
    values = np.array([3, 9, 3, 4, 9, 5], np.uint64)
    edges = EDGES[form]
    offsets = np.arange(len(values) + 1) if edges is None else edges
    weights = rng.random(len(values), np.float32) if mode == "weighted" else None
    ids = FeatureBatch.from_csr("on a device", values, offsets, weights)
    table = persia.nn.Embedding("on a device", 4)._tables[0]
    rows = rng.random((ids.num_distinct, 4), np.float32)
    rows.flags.writeable = False  # as those are that came in a message
    own = "sum" if weights is not None else mode
    feature = LookedUpFeature(table, own, ids, rows)
    pooled = lookups.pool([feature])
    found = lookups.pool_on_device(OpenLookup([feature]), torch.device("cpu"))
    assert np.allclose(found.numpy(), pooled, rtol=1e-6)
    gradient = rng.random((ids.batch_size, 4), np.float32)
    (sums,), (norm,) = lookups.sum_parts([feature], [gradient])
    assert norm.item() == pytest.approx(torch.linalg.vector_norm(sums).item())
    on_device = lookups._sum_on_device(feature, torch.from_numpy(gradient))
    assert torch.allclose(on_device, sums, rtol=1e-6)
    if weights is not None:
        by_id = lookups.weight_gradient(feature, torch.from_numpy(gradient))
        samples = np.repeat(np.arange(ids.batch_size), np.diff(offsets))
        expected = (rows[ids.inverse] * gradient[samples]).sum(1)
        assert np.allclose(by_id.numpy(), expected, rtol=1e-6)


def test_a_table_that_moved_between_lookup_and_step_is_stepped_where_it_is() -> None:
    """One lookup was of two tables, and another optimizer took one of them since."""
    model = persia.nn.EmbeddingCollection({"b": ("moving b", 2), "a": ("moving a", 2)})
    ids = {name: torch.arange(4)[:, None] for name in ("b", "a")}
    b, a = list(model.parameters())
    optimizer = persia.optim.SGD([b, a], lr=1.0)
    before = {name: one.detach().clone() for name, one in model(ids).items()}
    sum(one.sum() for one in model(ids).values()).backward()
    persia.optim.Adagrad([a], lr=1.0)
    optimizer.step()
    for name, one in model.eval()(ids).items():
        assert torch.allclose(one, before[name] - 1)


def test_an_update_says_of_how_many_ranks_its_gradient_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is divided by their number, and delay compensation multiplies by it."""
    module = persia.nn.Embedding("of two ranks", 2)
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0)
    ids = torch.arange(4)
    before = module(ids).detach().clone()
    sent: list[InFlightBatch] = []
    submit = BackwardPipeline.submit

    def seen(self: BackwardPipeline, updates: Sequence[InFlightBatch], *rest: Any) -> None:
        sent.extend(updates)
        submit(self, updates, *rest)

    monkeypatch.setattr(BackwardPipeline, "submit", seen)
    monkeypatch.setattr(env, "get_world_size", lambda: 2)
    module(ids).sum().backward()
    optimizer.step()
    assert torch.allclose(module.eval()(ids), before - 0.5)
    assert [(one.scale, one.num_averaged) for one in sent] == [(2.0, 2)]
