"""Rows of checkpoints and packets in tables."""

from __future__ import annotations

import numpy as np
import pytest

from persia._core.table.row_table import RowTable
from persia._rows.row_reader import RowReader
from persia.errors import ConfigError
from tests.rows.log_machine import SCHEMA

PREFIX = {name: np.uint64(SCHEMA.slots[name].prefix) for name in ("user", "item")}
DIMS = [table.dim for table in SCHEMA.tables]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_rows_of_kept_groups_are_copied_where_there_are_none(dtype: str) -> None:
    group = SCHEMA.slots["item"].group
    reader = RowReader(SCHEMA, dtype, None, [group], 1)
    base, overlay, table = (RowTable(DIMS, dtype) for _ in range(3))
    number = SCHEMA.slots["item"].table
    kept = PREFIX["item"] + np.arange(1, 5, dtype=np.uint64)
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    base.write(number, kept, values)
    base.write(number, PREFIX["user"] + np.arange(1, 5, dtype=np.uint64), values)
    overlay.write(number, kept[:1], values[:1] + 1)
    table.write(number, kept[3:], values[3:] + 2)
    assert reader.keep_rows(table, (overlay, base)) == 3
    found = np.empty((4, 4), np.float32)
    assert table.lookup(number, kept, found) == 0
    wanted = np.concatenate([values[:1] + 1, values[1:3], values[3:] + 2])
    np.testing.assert_allclose(found, wanted, atol=0.1)
    assert len(table) == 4


def test_kept_groups_are_of_the_config() -> None:
    with pytest.raises(ConfigError, match="expected feature groups"):
        RowReader(SCHEMA, "float32", None, ["none"], 1)
    table = RowTable(DIMS)
    assert RowReader(SCHEMA, "float32", None, [], 1).keep_rows(table, (table,)) == 0
