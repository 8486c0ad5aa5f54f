"""Numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from persia._metrics.format import byte_size, count, percent, plain, seconds, short


@pytest.mark.parametrize(
    ("form", "value", "want"),
    [
        (short, 9999, "9999"),
        (short, 12345, "12.3k"),
        (short, 2.5e6, "2.5M"),
        (short, -3e9, "-3.0G"),
        (short, 0.123, "0.12"),
        (short, math.inf, "inf"),
        (plain, 0.693147, "0.6931"),
        (byte_size, 1023, "1023 B"),
        (byte_size, 3 << 19, "1.5 MiB"),
        (byte_size, 1 << 60, "1048576.0 TiB"),
        (percent, 0.25, "25 %"),
        (seconds, 0.0123, "12 ms"),
        (seconds, 1.5, "1.50 s"),
        *((form, None, "-") for form in (short, plain, byte_size, percent, seconds)),
    ],
)
def test_numbers(form: Callable[[float | None], str], value: float | None, want: str) -> None:
    assert form(value) == want


def test_counts() -> None:
    assert (count(1, "file"), count(1200, "row")) == ("1 file", "1,200 rows")
