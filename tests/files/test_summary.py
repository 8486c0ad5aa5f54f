"""Rows of a checkpoint in numbers, and the difference of two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from persia._files.catalog import chain
from persia._files.storage import LocalStorage
from persia._files.summary import compare, groups_and_ids, summarise, values_of
from persia.errors import CheckpointError
from tests.files.support import SCHEMA, block, dump, row

if TYPE_CHECKING:
    from pathlib import Path

USER, ITEM = 1 << 56, 2 << 56


def test_signs_are_of_groups_and_ids() -> None:
    numbers, ids = groups_and_ids(SCHEMA, np.array([USER + 5, ITEM + 6], np.uint64))
    assert (numbers.tolist(), ids.tolist()) == ([0, 1], [5, 6])
    for sign in (5, 4 << 56):
        with pytest.raises(CheckpointError, match="is of no group"):
            groups_and_ids(SCHEMA, np.array([USER, sign], np.uint64))


def test_a_summary_counts_rows_by_group(storage: LocalStorage) -> None:
    rows = {sign: row(sign, seed) for seed, sign in enumerate((USER, USER + 1, ITEM + 2))}
    rows[USER + 1].values[0, 0] = np.nan
    dump(storage, rows)
    found = summarise(storage, chain(storage))
    rows_by_group = {name: group.rows for name, group in found.items()}
    assert rows_by_group == {"user": 2, "item": 1, "tag": 0}
    assert (found["user"].not_finite, found["item"].not_finite) == (1, 0)
    norm = float(np.linalg.norm(rows[USER].values.astype(np.float64)))
    assert found["user"].norm_mean == found["user"].norm_max == norm
    assert found["user"].biggest == [(norm, 0)]


def test_two_byte_floats_are_widened() -> None:
    rows = block([1], dtype="bfloat16")
    rows.values[:] = 0x3F80
    assert values_of(rows).tolist() == [[1.0] * 4]


def test_rows_are_compared_bit_by_bit(tmp_path: Path) -> None:
    before, after = LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")
    dump(before, {USER + n: row(USER + n, 1) for n in range(3)})
    dump(after, {USER + n: row(USER + n, 1 + n) for n in (0, 1, 3)})
    group = compare((before, chain(before)), (after, chain(after)))["user"]
    counts = (group.only_before, group.only_after, group.changed, group.equal)
    assert counts == (1, 1, 1, 1)
    assert group.largest > 0
