"""What is left of the original's native names."""

from __future__ import annotations

import numpy as np
import pytest

from persia import prelude
from persia.embedding.optim import SGD
from persia.errors import DataTypeError


def test_check_pyarray_dtype_valid() -> None:
    prelude.check_pyarray_dtype_valid(np.zeros(2, np.int8), np.int8)
    prelude.check_pyarray_dtype_valid(np.zeros(2, bool), np.dtype("bool"), "x")
    with pytest.raises(DataTypeError, match="'x': expected dtype float32, got float64"):
        prelude.check_pyarray_dtype_valid(np.zeros(2), np.float32, "x")
    with pytest.raises(DataTypeError, match=r"'x': expected a dtype of bool.*, got complex128"):
        prelude.check_pyarray_dtype_valid(np.zeros(2, complex), complex, "x")


def test_other_names() -> None:
    assert isinstance(SGD(0.1), prelude.OptimizerBase)
    assert prelude.is_cuda_feature_available() in (True, False)
