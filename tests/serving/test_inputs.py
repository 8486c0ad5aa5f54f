"""One sample beside many, and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from persia._serving import inputs
from persia._serving.bundle import ServedFeature, ServedTensor
from persia._serving.inputs import InputDecoder
from persia.errors import DataError

DECODER = InputDecoder(
    [ServedFeature("a", "pooled", 4), ServedFeature("b", "pooled", 4, optional=True)],
    [ServedTensor("x", "float32", (1,))],
)


def test_one_sample_is_repeated_and_its_ids_are_not() -> None:
    (a, b), (x,), size = DECODER(
        {"a": np.array([[5, 6, 0]]), "a.pad": np.array(0), "x": np.arange(3)}
    )
    assert (size, a.batch_size, a.num_distinct, a.num_ids) == (3, 3, 2, 6)
    assert (b.batch_size, b.num_ids) == (3, 0)
    assert x.dtype == np.float32
    assert x.shape == (3, 1)


def test_sizes_that_differ_are_refused() -> None:
    with pytest.raises(DataError, match="expected 2 samples as in 'a', got 3"):
        DECODER({"a": np.arange(2), "x": np.ones(3)})


def test_few_bytes_do_not_ask_for_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_IDS", 100)
    monkeypatch.setattr(inputs, "MAX_FLOATS", 3000)
    history: Any = np.arange(20)[None]
    DECODER({"a": history, "x": np.ones(5)})
    with pytest.raises(DataError, match="'a': expected at most 100 ids for 6 samples, got 120"):
        DECODER({"a": history, "x": np.ones(6)})
    # 4 of each feature and 1 of x, whatever is repeated.
    monkeypatch.setattr(inputs, "MAX_IDS", 1000)
    DECODER({"a": np.arange(1), "x": np.ones(333)})
    with pytest.raises(DataError, match="at most 3000 numbers in vectors, got 3006 of 334"):
        DECODER({"a": np.arange(1), "x": np.ones(334)})
    wide = InputDecoder(
        [ServedFeature("r", "raw", 7), ServedFeature("j", "jagged", 2)], [], {"r": 100}
    )
    many = {"j.values": np.arange(50), "j.offsets": np.array([0, 50, 50, 50])}
    wide({"r": np.arange(3), **many})
    with pytest.raises(DataError, match="got 3208 of 4"):
        wide({"r": np.arange(4), "j.values": np.arange(4), "j.offsets": np.arange(5)})
