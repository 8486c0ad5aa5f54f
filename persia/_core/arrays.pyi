"""Checks of NumPy arrays, for the other modules of the core; nothing for Python."""

from typing import Final

NAMES: Final[dict[str, str]]
