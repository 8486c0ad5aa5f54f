"""Numbers as text for people; ``-`` where a number is not known."""

from __future__ import annotations

import math

UNKNOWN = "-"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def short(value: float | None) -> str:
    """``12345`` -> ``12.3k``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    for letter, from_on, size in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if abs(value) >= from_on:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2g}"


def plain(value: float | None) -> str:
    """``0.693147`` -> ``0.6931``."""
    return UNKNOWN if value is None else f"{value:.4g}"


def byte_size(value: float | None) -> str:
    """``3 << 19`` -> ``1.5 MiB``."""
    if value is None:
        return UNKNOWN
    power = 0
    while value >= 1024 and power < len(_BYTES) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.0f} B" if power == 0 else f"{value:.1f} {_BYTES[power]}"


def percent(part: float | None) -> str:
    """``0.25`` -> ``25 %``."""
    return UNKNOWN if part is None else f"{100 * part:.0f} %"


def seconds(value: float | None) -> str:
    """``0.0123`` -> ``12 ms``."""
    if value is None:
        return UNKNOWN
    return f"{1000 * value:.2g} ms" if value < 0.1 else f"{value:.2f} s"


def count(number: int, what: str) -> str:
    """``2, "file"`` -> ``2 files``."""
    return f"{number:,} {what}" + "s" * (number != 1)
