"""``persia._core.ids.text_ids`` against its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia._core.ids.text_ids import hash_texts, parse_hex
from persia.errors import DataError, DataTypeError
from tests.reference import ids as model

# Those of docs/readers.md: ids in checkpoints and in serving depend on them.
VECTORS = {
    b"": 0xE220A8397B1DCDAF,  # mix64(0)
    b"red": 0x0E56F8D37693659A,
    b"blue sky": 0x16D8C7EE6F8C6032,
    b"a longer text": 0xF66FB4434266E58F,
}
TEXTS = st.lists(st.binary(max_size=20), max_size=30)
DIGITS = st.text("0123456789abcdefABCDEF", min_size=1, max_size=16)
NUMBERS = st.lists(DIGITS.map(str.encode), max_size=30)


def arrays(texts: list[bytes], before: int = 0) -> tuple[Any, Any]:
    """As Arrow has them, with ``before`` bytes of other texts in front."""
    data = np.frombuffer(b"x" * before + b"".join(texts) + b"behind", np.uint8)
    lengths = np.array([before, *(len(text) for text in texts)], np.int64)
    return data, np.cumsum(lengths)


@given(TEXTS, st.integers(0, 3))
@example([b"\0" * n for n in range(18)], 1)
def test_hashes(texts: list[bytes], before: int) -> None:
    got = hash_texts(*arrays(texts, before))
    assert got.dtype == np.uint64
    assert got.tolist() == [model.hash_text(text) for text in texts]


def test_published_vectors() -> None:
    assert (
        dict(zip(VECTORS, hash_texts(*arrays(list(VECTORS))).tolist(), strict=True)) == VECTORS
    )


@given(TEXTS | NUMBERS, st.integers(0, 3))
@example([b"1", b"", b"2"], 0)
@example([b"f" * 16, b"1" * 17], 0)
@example([b"0x1"], 0)
@example([b"g"], 0)
@example([b"@"], 0)
def test_numbers_and_the_first_text_that_is_none(texts: list[bytes], before: int) -> None:
    want = [model.parse_hex(text) for text in texts]
    numbers, place = parse_hex(*arrays(texts, before))
    assert place == next((i for i, each in enumerate(want) if each is None), len(texts))
    assert numbers[:place].tolist() == want[:place]


@pytest.mark.parametrize("function", [hash_texts, parse_hex])
def test_what_does_not_fit_is_refused(function: Any) -> None:
    data = np.zeros(4, np.uint8)
    for offsets in ([], [0, 5], [0, 3, 2], [-1, 2]):
        with pytest.raises(DataError, match="ascending within 4 bytes"):
            function(data, np.array(offsets, np.int64))
    with pytest.raises(DataTypeError, match="texts"):
        function(np.zeros(4), np.zeros(1, np.int64))
    with pytest.raises(DataTypeError, match="offsets"):
        function(data, np.zeros(1, np.int32))
