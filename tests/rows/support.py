"""Rows of training servers, as the rows that are served."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from persia._core.base.hashing import mix64_array, owners
from persia._rows.live_rows import LiveRows
from persia._rpc.messages import TableSigns
from persia._server.service import ParameterServer
from tests.support.saving import FEATURES
from tests.support.services import SCHEMA, sign

Signs = NDArray[np.uint64]


def signs_by_table() -> dict[int, Signs]:
    """Signs of every row that ``saving.train`` may have made."""
    found: dict[int, set[int]] = {}
    for name in FEATURES:
        slot = SCHEMA.slots[name]
        found.setdefault(slot.table, set()).update(sign(name, x) for x in range(2000))
    return {table: np.array(sorted(signs), np.uint64) for table, signs in found.items()}


SIGNS = signs_by_table()


def trained_rows(servers: list[ParameterServer]) -> dict[int, bytes]:
    """Values of every row, without state, by sign."""
    found: dict[int, bytes] = {}
    for server in servers:
        for table, signs in SIGNS.items():
            mine = signs
            if len(servers) > 1:
                owner = owners(len(servers))[mix64_array(signs) >> np.uint64(50)]
                mine = signs[owner == server.replica_index]
            (entries,) = server.read_embedding([TableSigns(table, mine)])
            found |= {
                s: v.tobytes()
                for s, v in zip(entries.signs.tolist(), entries.values, strict=True)
            }
    return found


def served_rows(rows: LiveRows) -> dict[int, bytes]:
    """The same of rows that are served."""
    found: dict[int, bytes] = {}
    with rows.view() as view:
        for table, signs in SIGNS.items():
            dim = SCHEMA.tables[table].dim
            out, states = (
                np.empty((len(signs), dim), np.float32),
                np.empty(len(signs), np.uint8),
            )
            missing = view.lookup(table, signs, out, states)
            there = states == 1
            assert missing == len(signs) - there.sum()
            assert not out[~there].any()
            found |= {
                s: v.tobytes() for s, v in zip(signs[there].tolist(), out[there], strict=True)
            }
    return found
