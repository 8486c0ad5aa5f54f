"""The public names of serving."""

from __future__ import annotations

from persia import serving


def test_names_are_there() -> None:
    assert all(hasattr(serving, name) for name in serving.__all__)
