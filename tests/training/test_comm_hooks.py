"""The 8-bit codes in which gradients travel; tests/distributed runs the algorithms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from persia._training.comm_hooks import BLOCK, decode, encode


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=3 * BLOCK))
@example([float(torch.finfo(torch.float32).tiny)])
def test_codes_are_within_half_a_step(values: list[float]) -> None:
    given_values = torch.tensor(values, dtype=torch.float32)
    decoded = decode(encode(given_values), len(values))
    assert decoded.shape == given_values.shape
    for start in range(0, len(values), BLOCK):
        block = given_values[start : start + BLOCK]
        # The last block is filled up with zeros, which count.
        low, high = block.min().clamp(max=0), block.max().clamp(min=0)
        step = (high - low) / 255
        error = (decoded[start : start + BLOCK] - block).abs().max()
        # Half a step, and what float32 adds to sums of this size. Below its smallest normal
        # number it may give zero.
        tiny = torch.finfo(torch.float32).tiny
        assert error <= step * 0.501 + block.abs().max() * 1e-6 + tiny


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    values = torch.ones(BLOCK * 2)
    values[3] = value
    decoded = decode(encode(values), len(values))
    assert not decoded[:BLOCK].isfinite().any()
    assert decoded[BLOCK:].tolist() == [1.0] * BLOCK


def test_codes_cost_a_quarter() -> None:
    assert encode(torch.zeros(BLOCK * 10)).numel() < 0.26 * BLOCK * 10 * 4
