"""The table of served rows: against its model, its errors, its bounds, its threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from persia._core.base import cpu
from persia._core.base.halves import narrow
from persia._core.table.row_table import DTYPES, RowTable, pack_int8
from persia.errors import ConfigError, DataError, DataTypeError
from tests.reference.hashing import unmix64
from tests.reference.row_table import ReferenceRowTable, packed_int8, read_as
from tests.support.processes import run
from tests.support.profiles import tries

Floats = NDArray[np.float32]
DIMS = (3, 16, 3)
ABSENT, PRESENT, DELETED = 0, 1, 2

# Few signs, so that they meet; of some, the hashes begin in one bucket and have one tag.
CROWD = [unmix64(hash_ << 40 | 7) for hash_ in range(40)]
SIGNS = st.lists(
    st.one_of(st.integers(0, 60), st.sampled_from(CROWD), st.just(2**64 - 1)), max_size=40
)


def u64(signs: Any) -> NDArray[np.uint64]:
    return np.array(signs, np.uint64)


def looked_up(
    table: RowTable | ReferenceRowTable, number: int, signs: NDArray[np.uint64]
) -> tuple[bytes, bytes, int]:
    """Rows and states, in bits, and how many are missing."""
    rows = np.full((len(signs), DIMS[number]), 9, np.float32)
    states = np.full(len(signs), 9, np.uint8)
    missing = table.lookup(number, signs, rows, states)
    return rows.tobytes(), states.tobytes(), missing


def contents(table: RowTable | ReferenceRowTable, number: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for signs, rows in table.blocks(number, 7):
        assert 1 <= len(signs) == len(rows) <= 7
        for sign, row in zip(signs.tolist(), rows, strict=True):
            assert sign not in found
            found[sign] = row.tobytes()
    return found


class TableMachine(RuleBasedStateMachine):
    """Two tables that merge, against two models."""

    @initialize(dtype=st.sampled_from(DTYPES))
    def begin(self, dtype: str) -> None:
        self.tables = [RowTable(DIMS, dtype), RowTable(DIMS, dtype)]
        self.models = [ReferenceRowTable(DIMS, dtype), ReferenceRowTable(DIMS, dtype)]
        self.seed = 0

    @rule(which=st.integers(0, 1), number=st.integers(0, 2), signs=SIGNS)
    def write(self, which: int, number: int, signs: list[int]) -> None:
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        rows = rng.normal(size=(len(signs), DIMS[number])).astype(np.float32)
        self.tables[which].write(number, u64(signs), rows)
        self.models[which].write(number, u64(signs), rows)

    @rule(which=st.integers(0, 1), signs=SIGNS)
    def delete(self, which: int, signs: list[int]) -> None:
        got = self.tables[which].delete(u64(signs))
        assert got == self.models[which].delete(u64(signs))

    @rule(which=st.integers(0, 1), signs=SIGNS)
    def mark_deleted(self, which: int, signs: list[int]) -> None:
        self.tables[which].mark_deleted(u64(signs))
        self.models[which].mark_deleted(u64(signs))

    @rule(which=st.integers(0, 1), count=st.integers(0, 5000))
    def reserve(self, which: int, count: int) -> None:
        self.tables[which].reserve(count)

    @rule(step=st.integers(1, 3000), keep=st.booleans())
    def merge(self, step: int, keep: bool) -> None:
        base, overlay = self.tables
        start = base.merge(overlay, 0, step, keep_deleted=keep)
        while start:
            start = base.merge(overlay, start, step, keep_deleted=keep)
        assert self.models[0].merge(self.models[1], 0, 1 << 20, keep_deleted=keep) == 0

    @rule(which=st.integers(0, 1), number=st.integers(0, 2), signs=SIGNS)
    def lookup(self, which: int, number: int, signs: list[int]) -> None:
        got = looked_up(self.tables[which], number, u64(signs))
        assert got == looked_up(self.models[which], number, u64(signs))

    @invariant()
    def holds_the_same(self) -> None:
        for table, model in zip(
            getattr(self, "tables", ()), getattr(self, "models", ()), strict=True
        ):
            assert (len(table), table.num_deleted) == (len(model), model.num_deleted)
            assert sorted(table.deleted_signs()) == sorted(model.deleted_signs())
            for number in range(len(DIMS)):
                assert contents(table, number) == contents(model, number)
                assert sorted(table.signs(number)) == sorted(model.signs(number))


TestTable = TableMachine.TestCase
TestTable.settings = tries(100, stateful_step_count=25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_it_grows_and_uses_freed_rows_again(dtype: str, num_threads: int) -> None:
    rng = np.random.default_rng(5)
    table = RowTable([16], dtype, num_threads=num_threads)
    signs = np.unique(rng.integers(0, 1 << 40, 50_000).astype(np.uint64))[:49_000]
    rng.shuffle(signs)
    rows = rng.normal(size=(len(signs), 16)).astype(np.float32)
    for first in range(0, len(signs), 7000):
        table.write(0, signs[first : first + 7000], rows[first : first + 7000])
    out, states = np.empty_like(rows), np.empty(len(signs), np.uint8)
    assert table.lookup(0, signs, out, states) == 0
    assert (states == PRESENT).all()
    some = rng.choice(len(signs), 50)
    for place in some:
        assert out[place].tobytes() == read_as(dtype, rows[place]).tobytes()
    filled = table.num_bytes
    for _ in range(10):
        table.write(0, signs, rows[::-1])
        assert table.delete(signs[::2]) == len(signs) // 2
        table.write(0, signs[::2], rows[::2])
    assert len(table) == len(signs)
    # Beside the rows, what one call replaced may wait for its readers: none, here.
    assert table.num_bytes < 1.1 * filled
    assert table.lookup(0, signs + np.uint64(1 << 41), out, states) == len(signs)
    assert not out.any()
    assert not states.any()


@pytest.mark.parametrize("size", [0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 2047, 2048, 2049])
def test_lookups_of_every_size(size: int) -> None:
    table = RowTable([2], num_threads=2)
    signs = np.arange(size, dtype=np.uint64)
    rows = np.stack([signs, signs], 1).astype(np.float32) + 1
    table.write(0, signs, rows)
    out = np.empty((size + 3, 2), np.float32)
    states = np.empty(size + 3, np.uint8)
    asked = np.concatenate([signs, u64([2**50, 2**51, 2**52])])
    assert table.lookup(0, asked, out, states) == 3
    np.testing.assert_array_equal(out, np.concatenate([rows, np.zeros((3, 2))]))
    np.testing.assert_array_equal(states, [1] * size + [0] * 3)


def test_a_row_of_int8_takes_a_third_of_the_bytes_of_training() -> None:
    table = RowTable([16], "int8")
    signs = np.arange(200_000, dtype=np.uint64)
    table.write(0, signs, np.ones((len(signs), 16), np.float32))
    # 157 with Adagrad's state in f32, as the store counts them with their index and order.
    assert table.num_bytes <= 0.335 * 157 * len(signs)


SPECIAL = st.floats(width=32, allow_nan=True, allow_infinity=True)
SMALL = st.floats(-1, 1, width=32)


@pytest.mark.parametrize("dtype", DTYPES)
@given(row=st.one_of(st.lists(SMALL, min_size=1, max_size=40), st.lists(SPECIAL, min_size=1)))
def test_rows_read_as_the_model_says(dtype: str, row: list[float]) -> None:
    values = np.array([row], np.float32)
    table = RowTable([values.shape[1]], dtype)
    table.write(0, u64([5]), values)
    expected = read_as(dtype, values[0])
    out = np.empty_like(values)
    try:
        for level in cpu.available():
            cpu.select(level)
            assert table.lookup(0, u64([5]), out) == 0
            assert out[0].tobytes() == expected.tobytes()
    finally:
        cpu.select(None)


@given(st.lists(st.one_of(SMALL, SPECIAL), min_size=1, max_size=40))
def test_int8_is_packed_as_the_model_says_and_is_near(row: list[float]) -> None:
    values = np.array([row], np.float32)
    scales, offsets, steps = pack_int8(values)
    scale, offset, expected = packed_int8(values[0])
    assert (scales[0], offsets[0]) == (scale, offset)
    np.testing.assert_array_equal(steps[0], expected)
    if np.isfinite(values).all() and np.abs(values).max() < 60_000:
        read = read_as("int8", values[0]).astype(np.float64)
        step = float(scales.view(np.float16)[0])
        assert np.abs(read - values[0]).max() <= 0.501 * step + 1e-6 * np.abs(values).max()


def test_halves_are_rounded_as_the_store_rounds() -> None:
    values = np.random.default_rng(2).normal(size=(64, 16)).astype(np.float32)
    for dtype in ("float16", "bfloat16"):
        table = RowTable([16], dtype)
        table.write(0, np.arange(64, dtype=np.uint64), values)
        out = np.empty_like(values)
        table.lookup(0, np.arange(64, dtype=np.uint64), out)
        np.testing.assert_array_equal(narrow(out.ravel(), dtype), narrow(values.ravel(), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_changes_no_bit(dtype: str) -> None:
    rng = np.random.default_rng(8)
    base, overlay = RowTable([5], dtype), RowTable([5], dtype)
    signs = np.arange(3000, dtype=np.uint64)
    base.write(0, signs, rng.normal(size=(3000, 5)).astype(np.float32))
    overlay.write(0, signs[:1500], rng.normal(size=(1500, 5)).astype(np.float32) + 100)
    overlay.mark_deleted(signs[1400:1600])
    expected, out = np.empty((1400, 5), np.float32), np.empty((1400, 5), np.float32)
    overlay.lookup(0, signs[:1400], expected)
    start, rounds = base.merge(overlay, 0, 500), 1
    while start:
        start, rounds = base.merge(overlay, start, 500), rounds + 1
    assert rounds > 3
    assert base.lookup(0, signs[:1400], out) == 0
    assert out.tobytes() == expected.tobytes()
    assert len(base) == 2800
    assert base.num_deleted == 0


class Torn(Exception):
    """A reader saw half a row, or none."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_readers_see_whole_rows_while_one_writes(dtype: str) -> None:
    num_rows, dim, rounds = 4000, 33, 30
    table = RowTable([dim], dtype)
    signs = np.arange(num_rows, dtype=np.uint64)
    others = signs + np.uint64(num_rows)
    table.write(0, signs, np.zeros((num_rows, dim), np.float32))
    done = threading.Event()
    begun = threading.Barrier(3)

    def write() -> None:
        begun.wait(30)
        try:
            for value in range(1, rounds + 1):
                rows = np.full((num_rows, dim), value, np.float32)
                table.write(0, signs, rows)
                table.write(0, others, -rows)  # the index grows, and shrinks
                table.delete(others[::2])
                table.mark_deleted(others[1::2])
        finally:
            done.set()

    def read(seed: int) -> int:
        rng = np.random.default_rng(seed)
        rows = np.empty((num_rows, dim), np.float32)
        states = np.empty(num_rows, np.uint8)
        last = np.zeros(num_rows, np.float32)
        begun.wait(30)
        turns = 0
        while not done.is_set() or turns < 3:
            turns += 1
            if table.lookup(0, signs, rows, states) or not (states == PRESENT).all():
                raise Torn("a sign that was always there was not found")
            if (rows != rows[:, :1]).any() or (rows[:, 0] < last).any():
                raise Torn("a row of two writes, or one that went back")
            last = rows[:, 0].copy()
            asked = rng.permutation(others)
            table.lookup(0, asked, rows, states)
            if (rows != rows[:, :1]).any() or (rows[:, 0] > 0).any():
                raise Torn("a row of another sign")
            if rows[states != PRESENT].any():
                raise Torn("a row that is not there")
            for found, values in table.blocks(0):
                if (values != values[:, :1]).any():
                    raise Torn("a row of two writes in a block")
                if ((values[:, 0] < 0) != (found >= num_rows)).any():
                    raise Torn("a row of another sign in a block")
        return turns

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, seed) for seed in (1, 2)]
        pool.submit(write).result(timeout=120)
        for reader in readers:
            assert reader.result(timeout=120) >= 3
    rows = np.empty((num_rows, dim), np.float32)
    assert table.lookup(0, signs, rows) == 0
    assert (rows == rows[0, 0]).all()
    assert table.num_deleted == num_rows // 2


def test_readers_while_the_table_grows() -> None:
    # The list of chunks is replaced each time it is full, and a reader may find the number of a
    # row in a chunk that the list it read before does not have.
    num_rows = 33 * 1024
    signs = np.arange(num_rows, dtype=np.uint64)
    values = np.repeat(signs.astype(np.float32)[:, None], 4, 1)
    asked, expected = signs[-2048:], values[-2048:]

    def read(table: RowTable, grown: threading.Event) -> None:
        rows = np.empty((len(asked), 4), np.float32)
        states = np.empty(len(asked), np.uint8)
        while not grown.is_set():
            table.lookup(0, asked, rows, states)
            found = states == PRESENT
            if (rows[found] != expected[found]).any():
                raise Torn("a row of another sign")

    with ThreadPoolExecutor(2) as pool:
        for _ in range(100):
            table, grown = RowTable([4]), threading.Event()
            readers = [pool.submit(read, table, grown) for _ in range(2)]
            try:
                table.write(0, signs, values)
            finally:
                grown.set()
            for reader in readers:
                reader.result(timeout=60)


def test_a_second_writer_waits() -> None:
    table = RowTable([4])
    parts = [np.arange(i * 20_000, (i + 1) * 20_000, dtype=np.uint64) for i in range(4)]

    def write(signs: NDArray[np.uint64]) -> None:
        rows = np.repeat(signs.astype(np.float32)[:, None], 4, 1)
        table.write(0, signs, rows)
        table.delete(signs[::3])
        table.write(0, signs, rows)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, parts, timeout=60))
    signs = np.concatenate(parts)
    out = np.empty((len(signs), 4), np.float32)
    assert table.lookup(0, signs, out) == 0
    np.testing.assert_array_equal(out, np.repeat(signs.astype(np.float32)[:, None], 4, 1))


NO_MEMORY = """
import resource
import numpy as np
from persia._core.table.row_table import RowTable

dim = 4096
table = RowTable([dim])
signs = np.arange(512, dtype=np.uint64)
table.write(0, signs, np.ones((512, dim), np.float32))
more = np.full((4096, dim), 2, np.float32)
out, states = np.empty((4096, dim), np.float32), np.empty(4096, np.uint8)
with open("/proc/self/statm", encoding="ascii") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
try:
    table.write(0, np.arange(4096, dtype=np.uint64), more)
except MemoryError as error:
    print("MemoryError", error)
missing = table.lookup(0, np.arange(4096, dtype=np.uint64), out, states)
assert missing == 4096 - len(table)
assert missing
assert (states[:512] == 1).all()
assert all(row[0] in (1, 2) and (row == row[0]).all() for row in out[:512])
assert not any(out[place].any() for place in np.flatnonzero(states == 0))
assert table.delete(signs) == 512
table.write(0, signs[:8], more[:8])
assert table.lookup(0, signs[:8], out[:8]) == 0
print("whole")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_without_memory_it_stays_whole() -> None:
    done = run("-c", NO_MEMORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MemoryError ")
    assert done.stdout.endswith("whole\n")


def wrong_calls() -> list[tuple[str, type[Exception], str, Callable[[RowTable], Any]]]:
    ids = u64([1, 2])
    nothing: Any = None
    numbers: Any = [1, 2]
    rows = np.zeros((2, 16), np.float32)
    states = np.zeros(2, np.uint8)
    fixed = rows.copy()
    fixed.flags.writeable = False
    data, kind = DataError, DataTypeError
    return [
        ("table", data, "0..2, got 3", lambda t: t.write(3, ids, rows)),
        ("negative", data, "0..2, got -1", lambda t: t.lookup(-1, ids, rows)),
        ("i64", kind, "signs: .*uint64", lambda t: t.write(1, ids.astype(np.int64), rows)),
        ("2-D", kind, "signs: .*2 dimensions", lambda t: t.delete(ids[None])),
        ("list", kind, "signs: .*list", lambda t: t.mark_deleted(numbers)),
        ("f64", kind, "rows: .*float32", lambda t: t.write(1, ids, rows.astype("f8"))),
        ("no rows", kind, "rows: .*None", lambda t: t.write(1, ids, nothing)),
        ("flat", kind, "rows: .*2-D", lambda t: t.write(1, ids, rows[0])),
        ("dim", data, "rows: expected dim 3.*got 16", lambda t: t.write(0, ids, rows)),
        ("length", data, "rows.*2, got 1", lambda t: t.write(1, ids, rows[:1])),
        ("out f64", kind, "rows_out", lambda t: t.lookup(1, ids, rows.astype("f8"))),
        ("out None", kind, "rows_out", lambda t: t.lookup(1, ids, nothing)),
        ("read-only", kind, "writable", lambda t: t.lookup(1, ids, fixed)),
        ("strided", kind, "C-contiguous", lambda t: t.lookup(1, ids, rows[:, ::-1])),
        ("out dim", data, "rows_out: expected dim", lambda t: t.lookup(0, ids, rows)),
        ("out length", data, "rows_out", lambda t: t.lookup(1, ids[:1], rows)),
        ("states", data, "state_out", lambda t: t.lookup(1, ids, rows, states[:1])),
        ("state i8", kind, "state_out", lambda t: t.lookup(1, ids, rows, states.view("i1"))),
        ("blocks", data, "max_rows", lambda t: t.blocks(0, 0)),
        ("signs", data, "table", lambda t: t.signs(7)),
        ("merge", data, "merge", lambda t: t.merge(RowTable([1]))),
        ("start", data, "start", lambda t: t.merge(RowTable(DIMS), -1)),
        ("reserve", data, "num_rows", lambda t: t.reserve(-1)),
        ("masked", kind, "masked", lambda t: t.write(1, ids, np.ma.MaskedArray(rows))),
        ("itself", data, "merge", lambda t: t.merge(t)),
    ]


@pytest.mark.parametrize(
    ("error", "words", "call"), [pytest.param(*case[1:], id=case[0]) for case in wrong_calls()]
)
def test_wrong_arguments(
    error: type[Exception], words: str, call: Callable[[RowTable], Any]
) -> None:
    table = RowTable(DIMS)
    with pytest.raises(error, match=words) as raised:
        call(table)
    assert type(raised.value) is error
    assert len(table) == table.num_deleted == 0


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ([], {}),
        ([0], {}),
        ([65537], {}),
        ([4], {"dtype": "int4"}),
        ([4], {"num_threads": 0}),
    ],
)
def test_wrong_settings(dims: list[int], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dims|dtype|num_threads"):
        RowTable(dims, **options)


def test_what_is_not_contiguous_is_copied() -> None:
    table = RowTable([3])
    signs = np.arange(10, dtype=np.uint64)[::2]
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)[::2]
    table.write(0, signs, rows)
    out = np.empty((5, 3), np.float32)
    assert table.lookup(0, signs, out) == 0
    np.testing.assert_array_equal(out, rows)
