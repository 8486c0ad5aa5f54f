"""Chains are read, verified and rewritten row by row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import pytest

from persia._files import parts
from persia._files.catalog import publish
from persia._files.parts import filter_owned, read_part, write_file
from persia._files.rows import rewrite, verify
from persia._files.rows import rows_of as rows_of_chain
from persia._files.storage import LocalStorage
from persia.errors import CheckpointError
from tests.files.support import block, dump, loaded, parts_of, row
from tests.support.fixtures import Monkey


@pytest.mark.parametrize("signs", [[7], [50, 51, 50]])
def test_a_row_that_comes_twice_is_found(storage: LocalStorage, signs: list[int]) -> None:
    manifest = dump(storage, {s: row(s, 1) for s in range(40)}, num_servers=1)
    parts = (*manifest.parts, *parts_of(storage, block(signs), f"{manifest.id}/again"))
    verify(storage)
    publish(storage, dataclasses.replace(manifest, parts=parts))
    with pytest.raises(CheckpointError, match=f"{manifest.id}.* {signs[0]} comes twice"):
        verify(storage)


@pytest.mark.parametrize(("base", "delta"), [(1, 3), (3, 1)])
def test_a_chain_is_rewritten_whole(storage: LocalStorage, base: int, delta: int) -> None:
    spread = [(n << 60) + n for n in range(16)]
    first = dump(storage, {s: row(s, 1) for s in spread}, num_servers=base)
    dump(storage, {s: row(s, 2) for s in spread[:4]}, base=first.id, num_servers=delta)
    before = loaded(storage)
    manifest = rewrite(storage, storage)
    assert loaded(storage, manifest.id) == before
    for part in manifest.parts:
        held = read_part(storage, part)
        assert len(filter_owned(held, part.server, delta)) == len(held)


def test_rows_of_a_chain_are_the_same_in_pieces(
    storage: LocalStorage, monkeypatch: Monkey
) -> None:
    base = dump(storage, {s: row(s, 1) for s in range(40)}, num_servers=1)
    delta = dump(storage, {s: row(s, 2) for s in range(7, 50, 3)}, base=base.id, num_servers=1)
    last = dump(storage, {s: row(s, 3) for s in range(9)}, base=delta.id, num_servers=1)
    found = []
    for size in (3, 1000):
        monkeypatch.setattr(parts, "_PIECE_ROWS", size)
        blocks = [rows for _, rows in rows_of_chain(storage, [base, delta, last])]
        if size == 3:
            assert max(map(len, blocks[1:])) == 3  # of the deltas before the last
        signs = [sign for rows in blocks for sign in rows.signs.tolist()]
        assert len(set(signs)) == len(signs) == 44
        values = {
            sign: value.tobytes()
            for rows in blocks
            for sign, value in zip(rows.signs, rows.values, strict=True)
        }
        found.append(sorted((int(sign), value) for sign, value in values.items()))
    assert found[0] == found[1]


def test_counts_do_not_go_to_another_number_of_servers(storage: LocalStorage) -> None:
    first = dump(storage, {1: row(1, 1)}, num_servers=2)
    names = ["dense.pt", "sketch-0.safetensors", "sketch-1.safetensors"]
    files = {name: write_file(storage, f"{first.id}/{name}.x", [b"x"]) for name in names}
    publish(storage, dataclasses.replace(first, files=files))
    assert sorted(rewrite(storage, storage).files) == names
    assert list(rewrite(storage, storage, num_servers=3).files) == ["dense.pt"]


def test_what_changed_later_goes_later_when_chains_are_joined(storage: LocalStorage) -> None:
    base = dump(storage, {s: row(s, 1) for s in range(10)}, num_servers=1)
    dump(storage, {s: row(s, 2) for s in range(5)}, base=base.id, num_servers=1)
    manifest = rewrite(storage, storage)
    assert manifest.kind == "full"
    (rows,) = (rows for _, rows in rows_of_chain(storage, [manifest]))
    order = dict(zip(rows.signs.tolist(), rows.orders.tolist(), strict=True))
    assert max(order[s] for s in range(5, 10)) < min(order[s] for s in range(5))


def test_a_rewrite_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: Monkey) -> None:
    source = LocalStorage(tmp_path / "from")
    dump(source, {sign: row(sign, 1) for sign in range(5)})
    full = Mock(side_effect=CheckpointError("No space left on device"))
    monkeypatch.setattr("persia._files.rows.publish", full)
    with pytest.raises(CheckpointError, match="No space"):
        rewrite(source, LocalStorage(tmp_path / "to"))
    assert list((tmp_path / "to").iterdir()) == []
