"""Rows by id, as a script has them: against a dictionary, embedded and over servers."""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from persia._core.base.hashing import owners
from persia._foreign.source import IDBlock
from persia._rpc.messages import OptimizerSettings
from persia._rpc.methods import embedding_worker
from persia._rpc.stubs import RemoteEmbeddingWorker, RemoteParameterServer
from persia._rpc.worker_pool import EmbeddingWorkers
from persia.config import schema_fingerprint
from persia.ctx import InferCtx, eval_ctx
from persia.errors import (
    ConfigError,
    DataError,
    DataTypeError,
    DimMismatch,
    NotConfigured,
    StoreError,
)
from persia.tables import IDSource, Table, read_numpy, read_parquet
from tests.reference.hashing import bucket
from tests.rpc.support import Wire
from tests.support.contexts import a_batch, train, trained
from tests.support.fixtures import Log
from tests.support.profiles import tries
from tests.support.services import (
    SCHEMA,
    features,
    gradient,
    make_servers,
    make_worker,
    settings,
)

DIM = 4
CAPACITY = 40  # of each server, in one shard, so that the oldest row goes first
LR, EPS, INITIAL = np.float32(0.1), np.float32(1e-10), np.float32(1e-8)
ADAGRAD_STEP = {"lr": 0.1, "initial_accumulator_value": 1e-8, "eps": 1e-10}
Row = tuple[np.ndarray, np.ndarray]  # values and state


@contextlib.contextmanager
def remote(worker: Any, directory: Path) -> Iterator[EmbeddingWorkers]:
    """The embedding-worker at a socket, as an nn-worker sees it."""
    fingerprint = schema_fingerprint(worker.schema)
    with contextlib.closing(Wire("ipc", directory)) as wire:
        server = wire.serve(
            worker,
            role=embedding_worker(),
            replica_index=0,
            replica_size=1,
            schema_fingerprint=fingerprint,
        )
        workers = EmbeddingWorkers(
            wire.transport,
            lambda on_restart: [RemoteEmbeddingWorker.connect(wire.transport, server.address)],
        )
        with contextlib.closing(workers):
            yield workers


# --- against a dictionary --------------------------------------------------------------------

IDS = st.lists(st.integers(0, 60), min_size=1, max_size=25, unique=True)


class TableMachine(RuleBasedStateMachine):
    """What a table says is what a dictionary of rows says, which an LRU bounds."""

    @initialize(num_servers=st.integers(1, 3))
    def start(self, num_servers: int) -> None:
        optimizer = OptimizerSettings("adagrad", ADAGRAD_STEP)
        servers = make_servers(
            num_servers,
            hyper=settings(weight_bound=0.0),
            optimizer=optimizer,
            capacity=CAPACITY,
        )
        self.stack = contextlib.ExitStack()
        self.worker = self.connect(servers)
        self.table = Table(self.worker, "sum")
        self.table._call_rows = 8  # so that arrays go in several calls
        self.other = Table(self.worker, "max")  # of the same group
        self.owner: list[int] = owners(num_servers).tolist()
        self.rows: list[OrderedDict[int, Row]] = [OrderedDict() for _ in range(num_servers)]
        self.number = 0

    def connect(self, servers: list[Any]) -> Any:
        return self.stack.enter_context(contextlib.closing(make_worker(servers)))

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()

    # --- the model ---------------------------------------------------------------------------

    def mine(self, x: int) -> OrderedDict[int, Row]:
        prefix = SCHEMA.slots["sum"].prefix
        return self.rows[self.owner[bucket(x | prefix)]]

    def row(self, x: int) -> Row | None:
        return self.mine(x).get(x)

    def use(self, x: int, row: Row) -> None:
        self.mine(x)[x] = row
        self.mine(x).move_to_end(x)

    def evict(self) -> None:
        for rows in self.rows:
            while len(rows) > CAPACITY:
                rows.popitem(last=False)

    def expected(self, ids: list[int]) -> np.ndarray:
        none = np.zeros(DIM, np.float32)
        rows = [self.row(x) for x in ids]
        return np.array([none if row is None else row[0] for row in rows], np.float32)

    # --- rules -------------------------------------------------------------------------------

    @rule(ids=IDS, seed=st.integers(0, 99), is_other=st.booleans())
    def write(self, ids: list[int], seed: int, is_other: bool) -> None:
        values = np.random.default_rng(seed).normal(size=(len(ids), DIM)).astype(np.float32)
        table = self.other if is_other else self.table
        table.write(ids, values)
        size = table._call_rows
        for start in range(0, len(ids), size):
            for x, value in zip(ids[start : start + size], values[start:], strict=False):
                row = self.row(x)
                state = np.full(DIM, INITIAL) if row is None else row[1]
                self.use(x, (value, state))
            self.evict()

    @rule(ids=IDS)
    def copy_whole_rows(self, ids: list[int]) -> None:
        found, values, states = self.table.read_with_state(ids)
        assert found.tolist() == [self.row(x) is not None for x in ids]
        assert values.tobytes() == self.expected(ids).tobytes()
        for x, state in zip(ids, states.view(np.float32), strict=True):
            row = self.row(x)
            assert np.array_equal(state, np.zeros(DIM) if row is None else row[1])
        there = [x for x in ids if self.row(x) is not None]
        places = [place for place, x in enumerate(ids) if self.row(x) is not None]
        self.other.write(there, values[places], states[places])
        for x in there:
            self.use(x, self.mine(x)[x])

    @rule(ids=IDS, step=st.floats(-2, 2, width=32))
    def train(self, ids: list[int], step: float) -> None:
        self.number += 1
        result = self.worker.lookup_direct(features({"sum": [[x] for x in ids]}, self.number))
        (output,) = result.outputs
        for x, value in zip(ids, output.values, strict=True):
            row = self.row(x)
            self.use(x, (value, np.full(DIM, INITIAL)) if row is None else row)
            assert self.mine(x)[x][0].tobytes() == value.tobytes()
        self.evict()
        steps = np.full((len(ids), DIM), step, np.float32)
        self.worker.update(gradient(result, (1, self.number), {"sum": steps}))
        for x, g in zip(ids, steps, strict=True):
            row = self.row(x)
            if row is not None:  # or it was evicted, by this batch
                state = row[1] + g * g
                self.mine(x)[x] = (row[0] - LR * g / (np.sqrt(state) + EPS), state)

    @rule(ids=st.lists(st.integers(0, 60), max_size=25))
    def delete(self, ids: list[int]) -> None:
        num_rows = sum(self.row(x) is not None for x in set(ids))
        assert self.other.delete(ids) == num_rows
        for x in ids:
            self.mine(x).pop(x, None)

    @rule(ids=st.lists(st.integers(0, 200), max_size=30))
    def read(self, ids: list[int]) -> None:
        is_there = [self.row(x) is not None for x in ids]
        assert self.table.read(ids).tobytes() == self.expected(ids).tobytes()
        assert self.table.contains(ids).tolist() == is_there
        if all(is_there):
            self.table.read(ids, missing="raise")
        else:
            count = is_there.count(False)
            with pytest.raises(DataError, match=rf"{count} of {len(ids)} ids have no row"):
                self.table.read(ids, missing="raise")

    @rule(x=st.integers(100, 200))
    def initial_values_are_what_training_begins_with(self, x: int) -> None:
        if self.row(x) is None:
            initial = self.table.read([x], missing="initial")
            self.train([x], 0.0)
            if self.row(x) is not None:
                assert self.table.read([x]).tobytes() == initial.tobytes()

    @rule(size=st.integers(1, 50))
    def walk(self, size: int) -> None:
        found: dict[int, np.ndarray] = {}
        for ids, vectors in self.table.blocks(size):
            assert 1 <= len(ids) <= size
            assert not found.keys() & set(ids.tolist())
            found.update(zip(ids.tolist(), vectors, strict=True))
        wanted = {x: row[0] for rows in self.rows for x, row in rows.items()}
        assert found.keys() == wanted.keys()
        for x, value in wanted.items():
            assert found[x].tobytes() == value.tobytes()

    @invariant()
    def counts_are_the_same(self) -> None:
        if hasattr(self, "rows"):
            assert len(self.table) == sum(map(len, self.rows))


class RemoteMachine(TableMachine):
    """The same with each server and the embedding-worker at a socket of its own."""

    def connect(self, servers: list[Any]) -> Any:
        directory = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        wire = self.stack.enter_context(contextlib.closing(Wire("ipc", directory)))
        stubs = [wire.remote(RemoteParameterServer, server) for server in servers]
        worker = self.stack.enter_context(contextlib.closing(make_worker(stubs)))
        own = directory / "worker"
        own.mkdir()
        return self.stack.enter_context(remote(worker, own))


TestTable = TableMachine.TestCase
TestTable.settings = tries(40, stateful_step_count=20, deadline=None)
TestRemoteTable = RemoteMachine.TestCase
TestRemoteTable.settings = tries(20, stateful_step_count=15, deadline=None)


# --- what is refused -------------------------------------------------------------------------


@pytest.fixture
def table() -> Iterator[Table]:
    worker = make_worker(make_servers(2, optimizer=OptimizerSettings("adagrad", ADAGRAD_STEP)))
    with contextlib.closing(worker):
        yield Table(worker, "sum")


ONES = np.ones((2, DIM), np.float32)
BAD_WRITES = [
    ([1, 1], ONES, DataError, "expected each id once, got 1 2 times$"),
    ([1, (1 << 56) + 1], ONES, DataError, "once, got 1 2 times, as 1 and .* when cut"),
    ([1], ONES, DataError, "expected a vector for each of 1 ids, got 2"),
    ([1.5, 2.0], ONES, DataTypeError, r"expected ids as integers \[n\], got float64 \[2\]"),
    ([[1, 2]], ONES, DataTypeError, r"expected ids as integers \[n\], got int64 \[1, 2\]"),
    ([1, 2], ONES[:, :3], DimMismatch, r"expected vectors \[n, 4\], got \[2, 3\]"),
    ([1, 2], ONES[0], DimMismatch, r"expected vectors \[n, 4\], got \[4\]"),
    ([1, 2], ONES.astype(int), DataTypeError, "expected vectors of floats, got int64"),
    (
        [1, 2],
        ONES * [[1], [np.nan]],
        DataError,
        "finite .*nan.* for id 2, in 1 of 2",
    ),
    ([1, 2], ONES.astype(float) * 1e300, DataError, "finite values, got .*1e.300.* for id 1"),
    ([1, 2], [[1.0], [1.0, 2.0]], DataTypeError, "expected an array, got list"),
]


@pytest.mark.parametrize(("ids", "vectors", "error", "text"), BAD_WRITES)
def test_a_bad_write_changes_nothing(
    table: Table, ids: Any, vectors: Any, error: type[Exception], text: str
) -> None:
    table.write([1, 2], 2 * ONES)
    with pytest.raises(error, match=text):
        table.write(ids, vectors)
    assert (table.read([1, 2]) == 2).all()
    assert len(table) == 2


def test_states_must_be_what_was_read(table: Table) -> None:
    for states in (np.zeros((2, 4), np.float32), np.zeros((1, 4), np.uint32)):
        with pytest.raises(DataTypeError, match=r"expected states as uint32 \[2, words\]"):
            table.write([1, 2], ONES, states)
    with pytest.raises(DimMismatch, match="expected states of adagrad of dim 4, got 3"):
        table.write([1, 2], ONES, np.zeros((2, 3), np.uint32))
    assert len(table) == 0


def test_other_words_are_refused(table: Table) -> None:
    with pytest.raises(ConfigError, match="missing: expected one of zeros, initial, raise"):
        table.read([1], missing="none")
    for size in (0, True, 1.5):
        with pytest.raises(ConfigError, match="size: expected at least 1 row"):
            next(table.blocks(size))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="did you mean 'sum'"):
        Table(table._worker, "sun")


# --- what is taken ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [3, 5],
        (3, 5),
        np.array([3, 5], np.int32),
        np.array([3, 0, 5], np.uint64)[::2],
        torch.tensor([3, 5]),
        torch.tensor([3, 5], dtype=torch.int32),
    ],
    ids=str,
)
def test_ids_and_vectors_of_any_kind_are_taken(table: Table, ids: Any) -> None:
    for vectors in (
        ONES,
        ONES.tolist(),
        ONES.astype(np.float16),
        np.asfortranarray(ONES.astype(np.float64)),
        torch.ones(2, DIM, requires_grad=True),
        torch.ones(2, DIM, dtype=torch.bfloat16),
    ):
        table.write(ids, vectors)
        assert table.read(ids).tobytes() == ONES.tobytes()
        assert table.delete(ids) == 2


def test_signed_ids_keep_their_bits_and_no_ids_are_none(table: Table) -> None:
    table.write(np.array([-5]), ONES[:1])
    assert table.contains(np.array([2**64 - 5], np.uint64)).all()
    assert [ids.tolist() for ids, _ in table.blocks()] == [[2**56 - 5]]
    none: Any
    for none in ([], np.empty(0, np.uint64), torch.empty(0)):
        assert table.read(none).shape == (0, DIM)
        assert table.delete(none) == 0
        table.write(none, np.empty((0, DIM), np.float32))
    assert [array.shape for array in table.read_with_state([])] == [(0,), (0, DIM), (0, 0)]


def test_a_table_without_rows_is_true_and_says_what_it_is(table: Table) -> None:
    assert len(table) == 0
    assert table
    assert list(table) == []
    assert repr(table) == "Table('sum', dim=4, group='shared')"
    assert (table.name, table.group) == ("sum", "shared")
    assert table.features == ("sum", "max", "jagged")


def test_an_optimizer_without_state_has_none() -> None:
    with contextlib.closing(make_worker(make_servers())) as worker:
        table = Table(worker, "sum")
        table.write([1], ONES[:1])
        found, _, states = table.read_with_state([1, 2])
        assert (found.tolist(), states.shape) == ([True, False], (2, 0))


def test_rows_that_are_replaced_during_a_walk_end_it() -> None:
    servers = make_servers(2)
    with contextlib.closing(make_worker(servers)) as worker:
        table = Table(worker, "sum")
        table.write(np.arange(100), np.ones((100, DIM)))
        blocks = table.blocks(10)
        next(blocks)
        worker.clear_embeddings()
        with pytest.raises(StoreError, match="server 0 were replaced while they were read"):
            list(blocks)


def test_rows_cannot_be_written_before_the_servers_know_the_optimizer() -> None:
    with contextlib.closing(make_worker(make_servers(hyper=None, optimizer=None))) as worker:
        table = Table(worker, "sum")
        calls: list[Callable[[], Any]] = [
            lambda: table.write([1], ONES[:1]),
            lambda: table.delete([1]),
            lambda: table.read_with_state([1]),
        ]
        for call in calls:
            with pytest.raises(NotConfigured):
                call()
        assert not table.read([1]).any()
        assert len(table) == 0


# --- files of others, and for others ---------------------------------------------------------


def test_a_table_goes_into_files_and_comes_back(table: Table, tmp_path: Path) -> None:
    ids = np.arange(100, dtype=np.uint64) * 3 + 2**40
    vectors = np.random.default_rng(0).normal(size=(100, DIM)).astype(np.float32)
    table.write(ids, vectors)
    for name, read in (("x.parquet", read_parquet), ("x.npz", read_numpy)):
        assert table.export(tmp_path / name) == 100
        table.delete(ids)
        assert table.load(read(tmp_path / name)) == len(table) == 100
        assert table.read(ids, missing="raise").tobytes() == vectors.tobytes()


def test_a_load_says_what_does_not_come_with_it(table: Table, caplog: Log) -> None:
    def read() -> Iterator[IDBlock]:
        for number in range(3):  # the last one counts
            yield IDBlock(np.array([7], np.uint64), np.full((1, DIM), number, np.float32))

    assert table.load(IDSource("elsewhere", DIM, None, read, ("no colours",))) == 3
    assert (table.read([7]) == 2).all()
    assert "elsewhere: no colours" in caplog.text


def test_a_source_that_does_not_fit_is_refused(table: Table) -> None:
    with pytest.raises(DimMismatch, match="expected vectors of dim 4, got 3 in arrays"):
        table.load(read_numpy([1], np.ones((1, 3))))
    with pytest.raises(DataError, match="finite values"):
        table.load(read_numpy([1], np.full((1, 4), np.inf)))
    reader = Table(table._worker, "sum", is_read_only=True)
    with pytest.raises(ConfigError, match="load: this context only reads"):
        reader.load(read_numpy([1], np.ones((1, DIM))))
    assert len(table) == 0


def test_an_export_that_fails_leaves_no_file(table: Table, tmp_path: Path) -> None:
    table.write(np.arange(100), np.ones((100, DIM)))
    blocks = table.blocks

    def cut_short(size: int = 10) -> Iterator[Any]:
        found = blocks(size)
        yield next(found)
        table._worker.clear_embeddings()
        yield from found

    table.blocks = cut_short  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="were replaced while they were read"):
        table.export(tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"ends with \.parquet or \.npz"):
        table.export(tmp_path / "x.csv")


# --- contexts --------------------------------------------------------------------------------


def test_a_context_reads_its_own_updates_and_is_read_inside_others() -> None:
    with trained() as ctx:
        table = ctx.table("user")
        assert ctx.table("user") is table
        for number in range(5):
            ids = np.arange(8, dtype=np.uint64)
            output, _ = ctx.forward(ctx.get_embedding_from_data(a_batch(ids)))
            ctx.backward(output)
            # Not one update is under way any more.
            assert (table.read(ids) == -(number + 1.0)).all()
        with eval_ctx() as evaluating:
            assert evaluating.table("user") is table
        with InferCtx() as serving:
            reader = serving.table("user")
            assert (reader.read([1]) == -5).all()
            for call in (lambda: reader.write([1], [[0.0] * 4]), lambda: reader.delete([1])):
                with pytest.raises(ConfigError, match="this context only reads rows"):
                    call()
        with pytest.raises(DataError, match=r"feature 'users' .* did you mean 'user'"):
            ctx.table("users")


def test_what_is_written_and_dropped_is_in_checkpoints(tmp_path: Path) -> None:
    with trained() as ctx:
        table = ctx.table("user")
        train(ctx, 2)
        table.write([1000], ONES[:1])
        table.delete(np.arange(16))
        ctx.dump_embedding(tmp_path)
    with trained() as ctx:
        ctx.load_embedding(tmp_path)
        found = dict(ctx.table("user"))
        assert found.keys() == {*range(16, 32), 1000}
        assert (found[1000] == 1).all()
