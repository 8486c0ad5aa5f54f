"""The dtypes that cross the wire, by the names that stand for them in a header."""

from __future__ import annotations

from typing import Any

import numpy as np

# A closed list: np.dtype() on a peer's string would accept object arrays, whose bytes are
# pointers.
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("|b1", "|i1", "|u1"),
        *("<i2", "<i4", "<i8", "<u2", "<u4", "<u8"),
        *("<f2", "<f4", "<f8"),
    )
}

# dtype.str builds its text at each access, which takes far longer than this lookup. Only native
# little-endian dtypes are keys: the arrays of these can be sent as they are.
NAMES = {dtype: name for name, dtype in DTYPES.items()}
