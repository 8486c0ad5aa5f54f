"""Ids of texts are the same wherever they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persia.readers
from persia.embedding.text_ids import hash_text
from persia.errors import DataError, DataTypeError
from persia.readers import Columns, TableReader
from tests.reference import ids as model
from tests.support.processes import run


@given(st.lists(st.text() | st.binary(), max_size=5))
def test_as_the_model(texts: list[Any]) -> None:
    want = [
        model.hash_text(text if isinstance(text, bytes) else text.encode()) % (1 << 56)
        for text in texts
    ]
    got = hash_text(texts)
    assert got.dtype == np.uint64
    assert got.tolist() == want
    for text, one in zip(texts, want, strict=True):
        assert hash_text(text) == one
        assert hash_text(text).dtype == np.uint64


def test_as_the_readers() -> None:
    texts = ["red", "", "blue sky", "Ωμέγα"]
    (batch,) = TableReader(
        pa.table({"x": texts}), Columns(["x"], requires_grad=False), 9, shard=(0, 1)
    )
    want = batch.features[0].distinct.tolist()
    kinds: list[Any] = [
        texts,
        tuple(texts),
        [text.encode() for text in texts],
        np.array(texts),
        np.array(texts, object),
        pd.Series(texts),
        pd.Series(texts, dtype="category"),
        pa.array(texts),
        pa.chunked_array([texts[:1], texts[1:]]),
    ]
    for kind in kinds:
        assert hash_text(kind).tolist() == want
    assert persia.readers.hash_text is hash_text


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (["a", None], DataTypeError, "text 1: expected a str or bytes, got None; leave out"),
        ([b"a", "b", 7], DataTypeError, "text 2: expected a str or bytes, got 7"),
        (pd.Series(["a", float("nan")]), DataTypeError, "text 1: .* got nan"),
        (7, DataTypeError, "text 0: expected a str or bytes, got 7"),
        (None, DataTypeError, "text 0: expected a str or bytes, got None"),
        (["\ud800"], DataError, "text 0: expected text of Unicode, got: .*surrogates"),
    ],
)
def test_what_is_no_text_is_named(texts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hash_text(texts)


def test_it_needs_neither_pyarrow_nor_torch() -> None:
    ran = run(
        "-c",
        "import sys\n"
        "sys.modules['pyarrow'] = sys.modules['torch'] = None\n"
        "from persia.embedding.text_ids import hash_text\n"
        "assert hash_text('red') == 0x56F8D37693659A\n",
    )
    assert ran.returncode == 0, ran.stderr
