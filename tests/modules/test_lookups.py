"""What is in flight between a lookup and its step, against a plain dictionary of rows."""

from __future__ import annotations

import gc

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import persia.nn
import persia.optim
from persia._modules.homes import home_of
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
