"""What a server does with the settings of groups: optimizers, admission, eviction."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.kernels.optim import RowOptimizer
from persia._rpc.messages import (
    InitializationSettings,
    LearningRate,
    LookupRequest,
    OptimizerSettings,
    PooledOutput,
    TableEntries,
    TableGradients,
    TableSigns,
    UpdateRequest,
)
from persia._server.service import ParameterServer
from persia.config import EmbeddingSchema, ParameterServerConfig, tables_at_rate
from persia.errors import (
    ConfigError,
    DimMismatch,
    ExtensionError,
    KernelError,
    PersiaError,
    StoreError,
)
from tests.reference import optim as model
from tests.support import kernels
from tests.support.services import (
    ADAGRAD,
    ADAM,
    SETTINGS,
    SGD,
    features,
    gradient,
    make_servers,
    make_worker,
)

DIM = 4
GROUPS: dict[str, Any] = {
    "lazy": {"optimizer": {"lr": 0.25}},
    "own": {"optimizer": {"name": "ftrl", "lr": 0.5, "l1": 0.1}},
    "plain": {"optimizer": {}},
}


def schema_with(groups: dict[str, Any] | None = None) -> EmbeddingSchema:
    names = ("a", "b", "lazy", "own", "plain")
    slots = {name: {"dim": DIM} for name in names}
    return EmbeddingSchema.load(
        {"slots_config": slots, "group_settings": GROUPS if groups is None else groups}
    )


SCHEMA = schema_with()
TABLES = {name: slot.table for name, slot in SCHEMA.slots.items()}
GRADS = np.linspace(-1, 1, 3 * DIM, dtype=np.float32).reshape(3, DIM)


def signs_of(name: str) -> NDArray[np.uint64]:
    return np.array([SCHEMA.slots[name].prefix | number for number in (1, 2, 3)], np.uint64)


def look(server: ParameterServer, *names: str) -> None:
    tables = tuple(TableSigns(TABLES[name], signs_of(name)) for name in names)
    server.lookup(LookupRequest(0, True, tables))


def rows(server: ParameterServer, name: str) -> TableEntries:
    (entries,) = server.read_embedding([TableSigns(TABLES[name], signs_of(name))])
    return entries


def update(server: ParameterServer, number: int, rates: dict[str, float | None]) -> None:
    parts = tuple(
        TableGradients(TABLES[name], signs_of(name), None, GRADS, lr)
        for name, lr in rates.items()
    )
    server.update(UpdateRequest((1, number), parts))


@pytest.mark.parametrize("registered", [SGD, ADAM, ADAGRAD], ids=lambda o: o.name)
def test_each_table_steps_by_its_own_optimizer_and_rate(registered: OptimizerSettings) -> None:
    (server,) = make_servers(schema=SCHEMA, optimizer=registered)
    complete = RowOptimizer(registered.name, **registered.options).options
    names = ("a", "lazy", "own", "plain")
    look(server, *names)
    held = {name: rows(server, name).values for name in names}
    schedule: list[dict[str, float | None]] = [
        dict.fromkeys(names),
        {"a": 0.125, "lazy": None, "own": 0.0625, "plain": 0.75},
        {"a": 0.125, "plain": None},
    ]
    for number, rates in enumerate(schedule):
        update(server, number, rates)
    for name in names:
        settings = complete | ({"lr": 0.25} if name == "lazy" else {})
        kind = registered.name
        if name == "own":
            settings, kind = RowOptimizer("ftrl", lr=0.5, l1=0.1).options, "ftrl"
        after = rows(server, name)
        for place in range(3):
            values: NDArray[np.float32] = held[name][place]
            state = model.new_state(kind, settings, DIM)
            for rates in schedule:
                if name in rates:
                    lr = settings["lr"] if rates[name] is None else rates[name]
                    options: Any = settings | {"lr": lr}
                    values, state = model.step(kind, options, 10, values, state, GRADS[place])
            np.testing.assert_array_equal(after.values[place], values)
            assert after.states is not None
            assert after.states[place].tolist() == state.view(np.uint32).tolist()


def test_a_restarted_server_steps_at_the_rate_of_the_update() -> None:
    """A rate that cannot be used changes nothing, and does not use up the id."""
    ends = []
    for again in (False, True):
        (server,) = make_servers(schema=SCHEMA)
        update(server, 0, {"a": 0.125})
        if again:
            (server,) = make_servers(schema=SCHEMA)
        look(server, "a", "lazy")
        for lr in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="sgd: lr must be"):
                update(server, 1, {"a": 0.5, "lazy": lr})
        update(server, 1, {"a": 0.125})
        ends.append(rows(server, "a").values)
    np.testing.assert_array_equal(ends[0], ends[1])


def test_states_of_rows_are_of_the_tables_optimizer() -> None:
    (server,) = make_servers(schema=SCHEMA, optimizer=ADAM)
    values, states = np.ones((3, DIM), np.float32), np.ones((3, 2 * DIM), np.uint32)
    entries = TableEntries(TABLES["own"], signs_of("own"), values, states)
    server.set_embedding([entries])
    np.testing.assert_array_equal(rows(server, "own").states, states)
    with pytest.raises(DimMismatch, match="expected states of ftrl of dim 8, got 9"):
        server.set_embedding([replace(entries, states=np.ones((3, 9), np.uint32))])


def test_another_optimizer_is_refused_for_what_it_means_to_a_table() -> None:
    only_own = {name: {"optimizer": {"name": "lion"}} for name in TABLES}
    schema = schema_with(only_own)
    (server,) = make_servers(schema=schema, optimizer=SGD)
    server.lookup(LookupRequest(0, True, (TableSigns(0, signs_of("a")),)))
    server.register_optimizer(ADAM)  # every table has its own: no row changes its meaning
    (server,) = make_servers(schema=SCHEMA, optimizer=ADAGRAD)
    look(server, "own")
    with pytest.raises(ConfigError, match=r"optimizer adam keeps 9 words .* 4 of adagrad"):
        server.register_optimizer(ADAM)
    schema = schema_with({"b": {"optimizer": {"beta1": 0.5}}})
    (server,) = make_servers(schema=schema, optimizer=ADAM)
    with pytest.raises(ConfigError, match=r"group_settings\.b\.optimizer: sgd has no option"):
        server.register_optimizer(SGD)


def test_the_tables_that_a_rate_is_for() -> None:
    assert tables_at_rate(SCHEMA, None) == (TABLES["a"], TABLES["plain"])
    for name in ("lazy", "own", "plain"):
        assert tables_at_rate(SCHEMA, name) == (TABLES[name],)
    with pytest.raises(ConfigError, match="'a' steps at one learning rate with 'b'; "):
        tables_at_rate(SCHEMA, "a")
    with pytest.raises(ConfigError, match="unknown group 'lzy', did you mean 'lazy'"):
        tables_at_rate(SCHEMA, "lzy")
    assert tables_at_rate(schema_with({"b": {"optimizer": {}}}), "b") == (1,)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_rates_reach_the_rows_of_their_tables(num_servers: int) -> None:
    servers = make_servers(num_servers, SCHEMA, hyper=SETTINGS, optimizer=SGD)
    with closing(make_worker(list(servers), SCHEMA)) as worker:
        assert worker.tables_at_rate("own") == (TABLES["own"],)
        given = features({"a": [[1], [2]], "plain": [[1], [2]]})
        before = worker.lookup(worker.register(given), True)
        rates = (LearningRate(TABLES["plain"], 0.125),)
        worker.update(replace(gradient(before), learning_rates=rates))
        after = worker.lookup_direct(replace(given, requires_grad=False))
    for old, new, lr in zip(before.outputs, after.outputs, (0.5, 0.125), strict=True):
        step = np.float32(lr) * np.ones((2, DIM), np.float32)
        np.testing.assert_array_equal(new.values, old.values - step)  # type: ignore[union-attr]


# --- admission and eviction -----------------------------------------------------------------


class Server:
    """One server with slots a and b, a clock of the test's, and ids for signs."""

    def __init__(self, capacity: int = 1000, **settings: Any) -> None:
        self.schema = EmbeddingSchema.load(
            {"slots_config": {name: {"dim": DIM} for name in "ab"}, "group_settings": settings}
        )
        self.now = 100.0
        self.batch_id = 0
        self.server = ParameterServer(
            self.schema,
            ParameterServerConfig(capacity=capacity, num_hashmap_internal_shards=1),
            clock=lambda: self.now,
        )
        self.server.configure(SETTINGS)
        self.server.register_optimizer(SGD)

    def signs(self, slot: str, ids: Any) -> NDArray[np.uint64]:
        return np.array([self.schema.slots[slot].prefix | int(x) for x in ids], np.uint64)

    def held(self, slot: str, ids: Any, batch_id: int | None = None) -> list[bool]:
        """Whether evaluation finds each id, or a training lookup of that number."""
        part = TableSigns(self.schema.slots[slot].table, self.signs(slot, ids))
        request = LookupRequest(batch_id or 0, batch_id is not None, (part,))
        return [bool(row.any()) for row in self.server.lookup(request).tables[0].rows]

    def train(self, slot: str, ids: Any, batch_id: int | None = None) -> list[bool]:
        """Whether each id was admitted."""
        self.batch_id += 1
        return self.held(slot, ids, self.batch_id if batch_id is None else batch_id)


def test_an_id_is_admitted_at_its_third_batch_and_a_repeated_lookup_counts_once() -> None:
    server = Server(a={"admission": {"policy": "count", "threshold": 3}})
    assert server.train("b", [1, 2]) == [True, True]
    assert server.train("a", [1, 2], batch_id=7) == [False, False]
    assert server.train("a", [1, 2], batch_id=7) == [False, False]
    assert server.train("a", [1]) == [False]
    assert server.train("a", [1, 2], batch_id=9) == [True, False]
    assert server.train("a", [1, 2], batch_id=9) == [True, False]
    # The batch's number alone does not make it a repetition.
    assert server.train("a", [2], batch_id=9) == [True]
    assert server.server.stats()["refused"] == 7


def test_rows_expire_by_seconds_also_those_that_were_written() -> None:
    server = Server(a={"eviction": {"ttl_seconds": 16}})
    table, rows = server.schema.slots["a"].table, np.ones((1, DIM), np.float32)
    server.server.set_embedding([TableEntries(table, server.signs("a", [1]), rows, None)])
    server.train("a", [2])
    server.train("b", [1])
    server.now += 10
    server.train("a", [2])
    server.now += 5.999
    assert server.held("a", [1, 2]) == [True, True]
    server.now += 1.001
    assert server.held("a", [1, 2]) == [False, True]
    assert server.held("b", [1]) == [True]
    # Evaluation drops nothing; the next training lookup does.
    assert server.server.get_embedding_size() == 3
    server.train("b", [1])
    assert server.server.get_embedding_size() == 2
    assert server.server.stats()["expired"] == 1


def test_rows_expire_by_steps_of_which_a_repeated_lookup_is_none() -> None:
    server = Server(a={"eviction": {"ttl_steps": 2}})
    server.train("a", [1])
    server.train("b", [1], batch_id=5)
    server.train("b", [1], batch_id=5)
    assert server.held("a", [1]) == [True]
    server.train("b", [1])
    assert server.held("a", [1]) == [False]


def test_a_group_by_frequency_keeps_what_is_used_often() -> None:
    server = Server(64, a={"eviction": {"policy": "lfu"}})
    for _ in range(20):
        server.train("a", range(32))
    for first in range(100, 1000, 50):
        server.train("a", range(first, first + 50))
    assert all(server.held("a", range(32)))
    assert server.server.stats()["evicted_lfu"] == 900 + 32 - 64


def test_a_group_by_a_scorer_keeps_what_is_used_often() -> None:
    server = Server(64, a={"eviction": {"policy": kernels.load("scorer")}})
    for _ in range(20):
        server.train("a", range(32))
    for first in range(100, 1000, 50):
        server.train("a", range(first, first + 50))
    assert all(server.held("a", range(32)))
    assert server.server.stats()["evicted_native"] == 900 + 32 - 64


def test_a_scorer_that_is_not_there_is_an_error_of_the_settings() -> None:
    with pytest.raises(ExtensionError, match=r"expected absent\.so with sha256 0000"):
        Server(64, a={"eviction": {"policy": "native:absent:" + "0" * 64}})
    with pytest.raises(ConfigError, match="expected a library with a scorer"):
        Server(64, a={"eviction": {"policy": kernels.load("adagrad")}})


def test_a_kernel_that_fails_for_a_row_leaves_the_others_of_all_tables_stepped() -> None:
    (server,) = make_servers(
        1, schema_with({}), optimizer=OptimizerSettings(kernels.load("faulty"), {"lr": 0.5})
    )
    signs = np.concatenate([signs_of("a"), signs_of("b")])
    parts = (TableSigns(0, signs),)
    server.lookup(LookupRequest(0, True, parts))
    (before,) = server.read_embedding(parts)
    gradients = np.ones((len(signs), DIM), np.float32)
    gradients[1, 0] = 100.0
    update = UpdateRequest((0, 0), (TableGradients(0, signs, None, gradients),))
    with pytest.raises(KernelError, match=f"{int(signs[1]):#018x}"):
        server.update(update)
    (after,) = server.read_embedding(parts)
    failed = np.arange(len(signs)) == 1
    np.testing.assert_array_equal(after.values[failed], before.values[failed])
    np.testing.assert_array_equal(after.values[~failed], before.values[~failed] - 0.5)
    with pytest.raises(StoreError, match="failed half way and is not run again"):
        server.update(update)


def test_a_kernel_that_fails_in_one_table_lets_the_others_step() -> None:
    (server,) = make_servers(
        1, SCHEMA, optimizer=OptimizerSettings(kernels.load("faulty"), {"lr": 0.5})
    )
    names = ("a", "own")
    parts = tuple(TableSigns(TABLES[name], signs_of(name)) for name in names)
    server.lookup(LookupRequest(0, True, parts))
    before = server.read_embedding(parts)
    bad, good = np.full((3, DIM), 200, np.float32), np.ones((3, DIM), np.float32)
    steps = [
        TableGradients(part.table, part.signs, None, gradients)
        for part, gradients in zip(parts, (bad, good), strict=True)
    ]
    with pytest.raises(KernelError, match=r"returned the error 7, .*; 3 rows"):
        server.update(UpdateRequest((0, 0), tuple(steps)))
    after = server.read_embedding(parts)
    np.testing.assert_array_equal(after[0].values, before[0].values)
    assert (after[1].values != before[1].values).all()


def by_library(**options: float) -> EmbeddingSchema:
    """A schema of which one slot begins by a library."""
    own = {"method": kernels.load("initial"), **options}
    slots = {"a": {"dim": DIM}, "b": {"dim": DIM, "initialization": own}}
    return EmbeddingSchema.load({"slots_config": slots})


def test_a_slot_has_initial_values_of_its_own_library() -> None:
    schema = by_library(lower=0.5, upper=1.0)
    worker = make_worker(make_servers(1, schema), schema)
    batch = {name: [[1], [2], [3]] for name in ("a", "b")}
    outputs = worker.lookup_direct(features(batch)).outputs
    plain, own = (output.values for output in outputs if isinstance(output, PooledOutput))
    assert plain.min() < 0.5 <= own.min()


def test_a_row_without_values_fails_the_lookup_and_no_other() -> None:
    schema = by_library(error_at=2)
    (server,) = make_servers(1, schema)
    worker = make_worker([server], schema)
    with pytest.raises(PersiaError, match=r"returned the error 7, the row of sign 0x0\w+2"):
        worker.lookup_direct(features({"a": [[1]], "b": [[2]]}))
    worker.lookup_direct(features({"a": [[1]], "b": [[3]]}, 1))
    assert server.get_embedding_size() == 2


def test_a_library_that_is_not_there_or_has_no_such_parameter_is_refused() -> None:
    (server,) = make_servers(1, hyper=None)
    absent = InitializationSettings("native:absent:" + "0" * 64)
    with pytest.raises(ExtensionError, match=r"expected absent\.so with sha256 0000"):
        server.configure(replace(SETTINGS, initialization=absent))
    with pytest.raises(ConfigError, match="has no option 'scale'"):
        make_servers(1, by_library(scale=1.0))
