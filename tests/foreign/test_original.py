"""Checkpoints of the original PERSIA, read row by row."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._foreign import original
from persia._foreign.original import MARKER, read_original
from persia._rpc.messages import OptimizerSettings
from persia.errors import CheckpointError, ConfigError, DimMismatch
from persia.tables import Table
from tests.support.original_files import OldRow, shard_file, write_dump
from tests.support.profiles import tries
from tests.support.services import make_servers, make_worker

# As its adult-income example has it: ``shared`` is group 0, ``item`` group 1, ``stack`` 2.
CONFIG: dict[str, Any] = {
    "feature_index_prefix_bit": 12,
    "slots_config": {
        "item": {"dim": 3, "embedding_summation": True, "sqrt_scaling": False},
        "user": {"dim": 4},
        "seller": {"dim": 4},
        "stack": {"dim": 4, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 9}},
    },
    "feature_groups": {"shared": ["user", "seller"]},
}
USER, ITEM = 1 << 52, 2 << 52


def row(sign: int, dim: int = 4, words: int = 4) -> OldRow:
    values = np.random.default_rng(sign % 1000).normal(size=dim + words).astype(np.float32)
    return OldRow(sign, values[:dim], values[dim:])


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Two servers of two shards each: 40 users and 20 items."""
    users = [row(USER + x) for x in range(40)]
    items = [row(ITEM + x, 3, 3) for x in range(20)]
    rows = [*users, *items]
    write_dump(tmp_path / "dump", [[rows[0::4], rows[1::4]], [rows[2::4], rows[3::4]]])
    return tmp_path / "dump"


@pytest.mark.parametrize("block_rows", [1, 7, 1 << 16])
@pytest.mark.parametrize(("feature", "optimizer"), [("user", None), ("seller", "adagrad")])
def test_each_row_is_read_with_its_state(
    dump: Path, feature: str, optimizer: str | None, block_rows: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(original, "BLOCK_ROWS", block_rows)
    source = read_original(dump, CONFIG, feature, optimizer)
    assert source.dim == 4
    found = {}
    for ids, vectors, states in source.blocks():
        assert len(ids) <= block_rows
        assert (states is None) == (optimizer is None)
        for place, x in enumerate(ids.tolist()):
            found[x] = vectors[place], None if states is None else states[place]
    assert found.keys() == set(range(40))
    for x, (vector, state) in found.items():
        old = row(USER + x)
        assert vector.tobytes() == old.values.tobytes()
        assert state is None or state.tobytes() == old.state.tobytes()
    assert source.notes == (() if optimizer else ("the state of the optimizer begins again",))


def test_rows_come_into_a_table_and_go_on_training(dump: Path) -> None:
    adagrad = OptimizerSettings("adagrad", {"lr": 0.1})
    with contextlib.closing(make_worker(make_servers(2, optimizer=adagrad))) as worker:
        table = Table(worker, "sum")
        assert table.load(read_original(dump, CONFIG, "user", "adagrad")) == 40
        found, vectors, states = table.read_with_state(np.arange(40))
        assert found.all()
        for x in range(40):
            old = row(USER + x)
            assert vectors[x].tobytes() == old.values.tobytes()
            assert states[x].tobytes() == old.state.tobytes()
        with pytest.raises(DimMismatch, match="expected vectors of dim 4, got 3"):
            table.load(read_original(dump, CONFIG, "item"))


@pytest.mark.parametrize(
    ("name", "words"), [("sgd", 0), ("adagrad", 4), ("rowwise_adagrad", 1)]
)
def test_the_state_is_as_wide_as_the_optimizer_says(
    name: str, words: int, tmp_path: Path
) -> None:
    write_dump(tmp_path / "dump", [[[row(USER + 1, 4, words)]]])
    (block,) = read_original(tmp_path / "dump", CONFIG, "user", name).blocks()
    assert (0 if block.states is None else block.states.shape[1]) == words
    (block,) = read_original(tmp_path / "dump", CONFIG, "user").blocks()
    assert block.states is None
    wrong = "adagrad" if name == "sgd" else "sgd"
    with pytest.raises(DimMismatch, match=f"id 1: expected 4 values .* and {words} of"):
        list(read_original(tmp_path / "dump", CONFIG, "user", wrong).blocks())


@tries(100, deadline=None)
@given(st.lists(st.integers(0, 2**52 - 1), unique=True, max_size=12), st.integers(0, 99))
def test_the_order_of_use_is_kept_wherever_rows_stand(ids: list[int], seed: int) -> None:
    content = shard_file([row(USER + x) for x in ids], len(ids) + 3, seed)
    file = original._Bytes(Path("shard"), content)
    blocks = list(original._read_nodes(file, 1, 52, (1 << 52) - 1, 4, 4))
    assert [x for block in blocks for x in block.ids.tolist()] == ids


# --- what is no dump -------------------------------------------------------------------------


def test_other_features_and_optimizers_are_refused(dump: Path) -> None:
    for feature, text in (("usr", "did you mean 'user'"), ("stack", "original's hash")):
        with pytest.raises(ConfigError, match=text):
            read_original(dump, CONFIG, feature)
    with pytest.raises(ConfigError, match=r"expected one of sgd, .* got 'adam'"):
        read_original(dump, CONFIG, "user", "adam")


Change = Callable[[Path], Any]
MISSING: list[tuple[Change, str]] = [
    (lambda f: (f / MARKER).unlink(), f"dump/{MARKER}: expected the file that ends a dump"),
    (lambda f: (f / "s1" / MARKER).unlink(), f"s1/{MARKER}: expected the file that ends"),
    (
        lambda f: (f / "s1/replica_1_shard_0.emb").unlink(),
        "shard_0.emb: expected a file of",
    ),
    (lambda f: (f / MARKER).write_text("num_shards: many"), "num_shards: expected a number"),
    (
        lambda f: (f / MARKER).write_text(""),
        "num_shards: expected a number from 1 on",
    ),
]


@pytest.mark.parametrize(("change", "text"), MISSING)
def test_a_dump_that_is_not_whole_is_refused(dump: Path, change: Change, text: str) -> None:
    change(dump)
    with pytest.raises(CheckpointError, match=text):
        read_original(dump, CONFIG, "user")


def damaged(at: int, form: str, *values: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        new = bytearray(content)
        struct.pack_into(form, new, at, *values)
        return bytes(new)

    return change


DAMAGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda content: b"", "it is empty"),
    (lambda content: content[:20], "it ends at byte 20"),
    (lambda content: content[:-1], "nodes end at byte|it ends at byte"),
    (lambda content: content + b"0", "nodes end at byte"),
    (damaged(0, "<Q", 99), "says that it has 99 rows"),
    (damaged(8, "<I", 999), "order of use leads to node 999"),
    (damaged(8, "<I", 0), "order of use has 0 rows"),
    (damaged(24, "<I", 0xFFFFFFFF), "says that it has 4294967295 nodes"),
]


@pytest.mark.parametrize(("change", "text"), DAMAGES)
def test_a_damaged_file_is_refused(
    dump: Path, change: Callable[[bytes], bytes], text: str
) -> None:
    path = dump / "s0" / "replica_0_shard_0.emb"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"replica_0_shard_0.emb: not a whole.*({text})"):
        list(read_original(dump, CONFIG, "user").blocks())


def test_an_order_of_use_that_goes_round_ends(tmp_path: Path) -> None:
    content = bytearray(shard_file([row(USER + 1)], 1))
    struct.pack_into("<I", content, 28, 1)  # its next one is itself
    file = original._Bytes(tmp_path, bytes(content))
    with pytest.raises(CheckpointError, match="order of use leads to node 1"):
        list(original._read_nodes(file, 1, 52, (1 << 52) - 1, 4, None))
