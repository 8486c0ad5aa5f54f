"""The sketch of distinct ids: its registers, its estimate, and that a union is a maximum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core.base.threads import ThreadPool
from persia._core.ids import cardinality
from persia.errors import DataError, DataTypeError
from tests.reference.hashing import unmix64
from tests.reference.ids import registers_of

IDS = st.lists(st.integers(0, 2**64 - 1), max_size=60)
THREADS = ThreadPool(2)
STANDARD_ERROR = 1.04 / np.sqrt(cardinality.NUM_REGISTERS)


def sketch(*batches: np.ndarray) -> np.ndarray:
    registers = np.zeros(cardinality.NUM_REGISTERS, np.uint8)
    for ids in batches:
        cardinality.add([registers], [ids], THREADS)
    return registers


@given(IDS, IDS)
def test_registers_are_the_models_and_a_union_is_their_maximum(
    first: list[int], second: list[int]
) -> None:
    one, other = np.array(first, np.uint64), np.array(second, np.uint64)
    assert sketch(one, other).tolist() == registers_of(first + second)
    union = np.maximum(sketch(one), sketch(other))
    assert np.array_equal(sketch(one, other), union)
    assert np.array_equal(sketch(one, other, one[::-1].copy()), union)


def test_sketches_of_many_features_are_those_of_each() -> None:
    arrays = [np.arange(size, dtype=np.uint64) * np.uint64(31) for size in (0, 3, 40_000, 600)]
    sketches = [np.zeros(cardinality.NUM_REGISTERS, np.uint8) for _ in arrays]
    for _ in range(2):  # the same ids again change nothing
        cardinality.add(sketches, arrays, THREADS)
        for own, ids in zip(sketches, arrays, strict=True):
            assert np.array_equal(own, sketch(ids))


@pytest.mark.parametrize("register", [0, 1, 4095])
@pytest.mark.parametrize(("low", "rank"), [(0, 53), (1 << 51, 52), (1, 1), (2**52 - 1, 1)])
def test_the_highest_and_the_lowest_rank(register: int, low: int, rank: int) -> None:
    one = unmix64(register << 52 | low)
    registers = sketch(np.array([one], np.uint64))
    assert registers.tolist() == registers_of([one])
    assert registers[register] == rank
    assert registers.sum() == rank


@pytest.mark.parametrize("number", [0, 1, 10, 1_000, 5_000, 20_000, 100_000, 3_000_000])
def test_the_estimate_is_within_three_standard_errors(number: int) -> None:
    ids = np.arange(number, dtype=np.uint64) * np.uint64(977)
    got = cardinality.estimate(sketch(ids))
    assert abs(got - number) <= 3 * STANDARD_ERROR * number
    if number <= 10:
        assert round(got) == number


def test_the_standard_error_is_what_it_is_said_to_be() -> None:
    rng = np.random.default_rng(7)
    errors = [
        cardinality.estimate(sketch(rng.integers(0, 2**63, 30_000).astype(np.uint64))) / 30_000
        - 1
        for _ in range(100)
    ]
    assert abs(np.mean(errors)) < 3 * STANDARD_ERROR / np.sqrt(len(errors))
    assert 0.8 * STANDARD_ERROR < np.std(errors) < 1.2 * STANDARD_ERROR


def test_what_does_not_fit_is_refused() -> None:
    ids = np.zeros(1, np.uint64)
    with pytest.raises(DataError, match="expected 4096 writeable registers, got 7"):
        cardinality.add([np.zeros(7, np.uint8)], [ids], THREADS)
    frozen = np.zeros(cardinality.NUM_REGISTERS, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(DataError, match="writeable"):
        cardinality.add([frozen], [ids], THREADS)
    with pytest.raises(DataTypeError, match="ids"):
        cardinality.add([sketch()], [np.zeros(1)], THREADS)  # type: ignore[list-item]
