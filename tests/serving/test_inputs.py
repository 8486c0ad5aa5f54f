"""One sample beside many, and padding."""

from __future__ import annotations

import numpy as np
import pytest

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
