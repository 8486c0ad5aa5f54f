"""Model of ``persia._core.ids.text_ids``."""

from __future__ import annotations

import string

from tests.reference.hashing import mix64


def hash_text(text: bytes) -> int:
    h = mix64(len(text))
    for begin in range(0, len(text), 8):
        h = mix64(h ^ int.from_bytes(text[begin : begin + 8], "little"))
    return h


def parse_hex(text: bytes) -> int | None:
    """The number, or None if the text spells none."""
    digits = set(string.hexdigits.encode())
    if not 1 <= len(text) <= 16 or not set(text) <= digits:
        return None
    return int(text, 16)
