from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.base import cpu, halves
from persia.errors import ConfigError, DataError
from tests.core.stores import u64
from tests.reference import halves as model

HALVES = ["float16", "bfloat16"]
ALL_CODES = np.arange(1 << 16, dtype=np.uint16)
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def f32(words: NDArray[np.uint32] | list[int]) -> NDArray[np.float32]:
    return np.array(words, np.uint32).view(np.float32)


def quiet(dtype: str, codes: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """The codes with every NaN a quiet one."""
    infinity, bit = (0x7C00, 0x0200) if dtype == "float16" else (0x7F80, 0x0040)
    return np.where(codes & 0x7FFF > infinity, codes | bit, codes).astype(np.uint16)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_widens_exactly_and_comes_back_as_it_was(dtype: str, level: str) -> None:
    wide = halves.widen(ALL_CODES, dtype)
    # bf16 keeps even a signalling NaN; f16's is made quiet, as the processor does.
    codes = quiet(dtype, ALL_CODES) if dtype == "float16" else ALL_CODES
    assert wide.tobytes() == model.widen(dtype, codes).tobytes()
    infinity = model.FORMATS[dtype].infinity
    for code in (*range(0, infinity, 97), 1, infinity - 1):
        assert Fraction(float(wide[code])) == model.value_of(dtype, code)
    assert (halves.narrow(wide, dtype) == quiet(dtype, ALL_CODES)).all()
    for number in range(3):
        again = halves.round_rows(wide[None], u64([5]), dtype, 1, number)
        assert (again == quiet(dtype, ALL_CODES)).all()


def neighbours(dtype: str) -> NDArray[np.float32]:
    """Each value, the middle to the next, and f32's neighbours of both; both signs."""
    infinity = model.FORMATS[dtype].infinity
    codes = np.unique([*range(0, infinity, 97), *range(4), *range(infinity - 4, infinity)])
    values = halves.widen(codes.astype(np.uint16), dtype)
    following = halves.widen((codes + 1).astype(np.uint16), dtype)
    with np.errstate(over="ignore"):  # beyond the largest
        middle = ((values.astype(np.float64) + following) / 2).astype(np.float32)
    words = np.concatenate([values, middle]).view(np.uint32)
    words = np.concatenate([words - (words > 0), words, words + 1])
    return f32(np.concatenate([words, words | 1 << 31]))


_SPECIAL = """
    00000000 00000001 007FFFFF 00800000 33000000 33000001 477FE000 477FF000 47800000 7F7F0000
    7F7F8000 7F7FFFFF 7F800000 7F800001 7FC00000 7FFFFFFF 80000000 C7800000 FF7FFFFF FF800000
    FFC01234
"""
SPECIAL = f32([int(word, 16) for word in _SPECIAL.split()])


@pytest.mark.parametrize("dtype", HALVES)
def test_ties_go_to_even_and_what_is_too_large_to_the_largest(dtype: str, level: str) -> None:
    values = np.concatenate([neighbours(dtype), SPECIAL])
    wanted = [model.shorten(dtype, value) for value in values]
    assert halves.narrow(values, dtype).tolist() == wanted
    largest = halves.widen(halves.narrow(f32([0x7F7FFFFF, 0xFF7FFFFF]), dtype), dtype)
    assert largest.tolist() == [LARGEST[dtype], -LARGEST[dtype]]


def test_f16_to_nearest_is_numpys(level: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    values = values[np.abs(values) < 65520]
    values = np.concatenate([values, rng.standard_normal(100_000).astype(np.float32) * 1e-5])
    got = halves.narrow(values, "float16")
    assert (got == values.astype(np.float16).view(np.uint16)).all()


@pytest.mark.usefixtures("level")
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    near=st.booleans(),
    sign=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**64 - 1),
    number=st.integers(0, 2**64 - 1),
)
def test_rounding_agrees_with_the_model(
    words: list[int], near: bool, sign: int, seed: int, number: int
) -> None:
    # Of exponents drawn from all, f16 reaches few: bring half of the cases near to it.
    values = f32([word & 0x8FFFFFFF | 0x30000000 if near else word for word in words])
    for dtype in HALVES:
        wanted = model.round_row(dtype, values, seed, number, sign)
        rows = halves.round_rows(values[None], u64([sign]), dtype, seed, number)
        assert rows[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_of_what_is_special_agrees_with_the_model(dtype: str, level: str) -> None:
    # Just below half of f16's smallest value, the sum with a draw is rounded itself.
    values = np.concatenate([SPECIAL, np.full(43, f32([0x32FFFFFF])[0])])
    for number in range(40):
        wanted = model.round_row(dtype, values, 1, number, 2)
        got = halves.round_rows(values[None], u64([2]), dtype, 1, number)
        assert got[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", HALVES)
def test_w64_every_variant_gives_the_same_bytes(dtype: str) -> None:
    values = np.concatenate([SPECIAL, neighbours(dtype)])
    for dim in range(1, 71):
        rng = np.random.default_rng(dim)
        rows = rng.choice(values, (9, dim))
        signs = rng.integers(0, 2**64, 9, dtype=np.uint64)
        results = []
        for name in cpu.available():
            cpu.select(name)
            rounded = halves.round_rows(rows, signs, dtype, dim, 3)
            nearest = [halves.narrow(row, dtype).tobytes() for row in rows]
            wide = [halves.widen(row, dtype).tobytes() for row in rounded]
            results.append((rounded.tobytes(), nearest, wide))
        cpu.select(None)
        assert all(other == results[0] for other in results), dim


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [1.0001, -0.01234567, 3e-6, 2.5e-8, 1e-7, 777.77])
def test_rounding_by_chance_has_the_value_as_its_mean(dtype: str, value: float) -> None:
    exact = np.float32(value)
    rows = np.full((4000, 16), exact)
    signs = np.arange(4000, dtype=np.uint64)
    for kind in ("signs", "numbers"):
        if kind == "signs":
            codes = halves.round_rows(rows, signs, dtype, 7, 1)
        else:  # the same row in every update
            one = [halves.round_rows(rows[:1], signs[:1], dtype, 7, n) for n in range(4000)]
            codes = np.concatenate(one)
        got = halves.widen(codes.ravel(), dtype).astype(np.float64)
        low, high = got.min(), got.max()
        assert low < exact < high
        assert len(set(got.tolist())) == 2
        # Of 64,000 draws; the mean is within five of its deviations.
        assert abs(got.mean() - exact) < 5 * 0.5 * (high - low) / np.sqrt(len(codes) * 16)


def test_what_is_no_dtype_of_two_bytes_is_refused() -> None:
    for dtype in ("float32", "f16", "", None):
        with pytest.raises(ConfigError, match=r"expected one of .*float16, bfloat16, got"):
            halves.widen(ALL_CODES, dtype)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="one sign a row, 2, got 1"):
        halves.round_rows(np.zeros((2, 3), np.float32), u64([1]), "float16", 0, 0)
    assert len(halves.widen(ALL_CODES[:0], "float16")) == 0
    assert len(halves.narrow(np.zeros(0, np.float32), "float16")) == 0
