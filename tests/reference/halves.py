"""Plain model of ``persia._core.base.halves``: one value at a time, as exact fractions.

A finite value is cut to a whole number of quanta and a rest of less than one; what is rounded
up has one quantum more. The code of a positive value is its place in the order of all values,
so that one quantum more is a code higher by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tests.reference.hashing import mix64

WORD = 2**32 - 1
ROUNDING = 0x5B0C4A5713D0F00D


@dataclass(frozen=True)
class Format:
    exponent_bits: int
    fraction_bits: int

    @property
    def smallest(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << self.exponent_bits - 1)

    @property
    def infinity(self) -> int:
        return (1 << self.exponent_bits) - 1 << self.fraction_bits


FORMATS = {"float16": Format(5, 10), "bfloat16": Format(8, 7)}


def power(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def value_of(dtype: str, code: int) -> Fraction:
    """The value of a finite positive code."""
    form = FORMATS[dtype]
    exponent, fraction = divmod(code, 1 << form.fraction_bits)
    if exponent:
        fraction += 1 << form.fraction_bits
    return fraction * power(max(exponent, 1) - 1 + form.smallest - form.fraction_bits)


def _exponent(dtype: str, value: Fraction) -> int:
    smallest = FORMATS[dtype].smallest
    return max(math.frexp(value)[1] - 1, smallest) if value else smallest


def quantum(dtype: str, value: Fraction) -> Fraction:
    """The distance of values around this one."""
    return power(_exponent(dtype, value) - FORMATS[dtype].fraction_bits)


def _cut(dtype: str, value: Fraction) -> tuple[int, Fraction]:
    """The code of the largest value that is not above this one, and the rest in quanta."""
    form = FORMATS[dtype]
    quanta = value / quantum(dtype, value)
    exponent = _exponent(dtype, value) - form.smallest
    return (exponent << form.fraction_bits) + math.floor(quanta), quanta % 1


def shorten(dtype: str, value: np.float32, draw: int | None = None) -> int:
    """The code of ``value``: the nearest one, or by chance if there is a draw of 16 bits."""
    form = FORMATS[dtype]
    bits = int(np.float32(value).view(np.uint32))
    sign = bits >> 31 << 15
    size = bits & 0x7FFFFFFF
    if size > 0x7F800000:
        payload = (size & 0x7FFFFF) >> (23 - form.fraction_bits)
        return sign | form.infinity | payload | 1 << (form.fraction_bits - 1)
    if size == 0x7F800000:
        return sign | form.infinity
    exact = Fraction(float(abs(value)))
    if draw is not None:
        # As many bits as a normal number loses; the sum is an f32 like both of its parts.
        draw_bits = 23 - form.fraction_bits
        part = (draw >> (16 - draw_bits)) * quantum(dtype, exact) / (1 << draw_bits)
        with np.errstate(over="ignore"):
            total = np.float32(abs(value)) + np.float32(float(part))
        code = _cut(dtype, Fraction(float(total)))[0] if np.isfinite(total) else form.infinity
    else:
        code, rest = _cut(dtype, exact)
        code += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and code % 2 == 1)
    return sign | min(code, form.infinity - 1)


def draw(key: int, j: int) -> int:
    return (key + j * 0x9E3779B9 & WORD) >> 16


def row_key(seed: int, number: int, sign: int) -> int:
    return mix64(mix64(mix64(seed ^ ROUNDING) ^ number) ^ mix64(sign))


def round_row(
    dtype: str, row: NDArray[np.float32], seed: int, number: int, sign: int
) -> NDArray[np.uint16]:
    key = row_key(seed, number, sign)
    codes = [shorten(dtype, value, draw(key, j)) for j, value in enumerate(row)]
    return np.array(codes, np.uint16)


def widen(dtype: str, codes: NDArray[np.uint16]) -> NDArray[np.float32]:
    """NumPy's own f16, which leaves a signalling NaN as it is; and the upper half of an f32."""
    if dtype == "float16":
        wide: NDArray[np.float32] = codes.view(np.float16).astype(np.float32)
        return wide
    words = np.zeros((len(codes), 2), np.uint16)
    words[:, 1] = codes
    values: NDArray[np.float32] = words.view(np.float32).reshape(len(codes))
    return values


def held(dtype: str, row: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a row that is written reads as."""
    if dtype == "float32":
        return np.array(row, np.float32)
    return widen(dtype, np.array([shorten(dtype, value) for value in row], np.uint16))
