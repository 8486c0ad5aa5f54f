"""The dtypes of the wire: fixed names, little-endian, and no object arrays."""

from __future__ import annotations

import numpy as np
import pytest

from persia._rpc.dtypes import DTYPES, NAMES


def test_names_and_dtypes_are_each_others_inverse() -> None:
    assert {name: NAMES[dtype] for name, dtype in DTYPES.items()} == {n: n for n in DTYPES}
    assert {dtype.str for dtype in NAMES} == set(DTYPES)


@pytest.mark.parametrize("dtype", ["|O", ">u8", "<c8", "|S4", "<M8[s]"])
def test_other_dtypes_have_no_name(dtype: str) -> None:
    assert dtype not in DTYPES
    assert np.dtype(dtype) not in NAMES
