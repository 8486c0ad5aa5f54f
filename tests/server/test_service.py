"""The parameter server called directly: settings, requests, refusals."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.base.hashing import owners, route
from persia._rpc.messages import (
    InitializationSettings,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    TableEntries,
    TableGradients,
    TableSigns,
    UpdateRequest,
)
from persia._server.service import ParameterServer
from persia.config import EmbeddingSchema, ParameterServerConfig
from persia.errors import ConfigError, DataTypeError, DimMismatch, NotConfigured, StoreError
from tests.support.processes import run
from tests.support.services import ADAGRAD, ADAM, SCHEMA, SETTINGS, SGD, make_servers, settings
from tests.support.streams import Background

TABLE = SCHEMA.slots["mean"].table
DIM = SCHEMA.slots["mean"].dim
PREFIX = SCHEMA.slots["mean"].prefix
UNKNOWN = InitializationSettings("unifrom")


def signs(*ids: int) -> NDArray[np.uint64]:
    return np.array([PREFIX | x for x in ids], np.uint64)


def look(
    server: ParameterServer, *ids: int, is_training: bool = True, batch_id: int = 0
) -> LookupReply:
    return server.lookup(
        LookupRequest(batch_id, is_training, (TableSigns(TABLE, signs(*ids)),))
    )


def update(
    server: ParameterServer, number: int, gradients: Any, *ids: int, client: int = 0
) -> Any:
    part = TableGradients(TABLE, signs(*ids), None, np.asarray(gradients, np.float32))
    return server.update(UpdateRequest((client, number), (part,)))


def entries(server: ParameterServer, *ids: int) -> TableEntries:
    return server.read_embedding([TableSigns(TABLE, signs(*ids))])[0]


def ones(count: int) -> NDArray[np.float32]:
    return np.ones((count, DIM), np.float32)


# --- settings -------------------------------------------------------------------------------


def test_training_needs_settings_and_an_optimizer_and_evaluation_neither() -> None:
    (server,) = make_servers(hyper=None, optimizer=None)
    arrivals: list[tuple[str, Callable[[], None]]] = [
        ("configure", lambda: server.configure(SETTINGS)),
        ("register_optimizer", lambda: server.register_optimizer(SGD)),
    ]
    for missing, arrive in arrivals:
        for call in (
            lambda: look(server, 1),
            lambda: update(server, 0, ones(1), 1),
            lambda: server.set_embedding([]),
            lambda: server.read_embedding([]),
        ):
            with pytest.raises(NotConfigured, match=f"before {missing}"):
                call()
        assert not server.ready_for_serving()
        reply = look(server, 1, 2, is_training=False)
        np.testing.assert_array_equal(reply.tables[0].rows, np.zeros((2, DIM)))
        assert reply.tables[0].hints is None
        assert server.get_embedding_size() == 0
        server.clear_embeddings()
        arrive()
    assert server.ready_for_serving()
    assert server.stats()["missing"] == 4
    look(server, 1)
    assert server.get_embedding_size() == 1


def test_a_tables_own_settings_come_before_the_global_ones() -> None:
    schema = EmbeddingSchema.load(
        {
            "slots_config": {
                "plain": {"dim": 2},
                "zero": {"dim": 2, "initialization": {"method": "zeros"}},
                "never": {"dim": 2, "admit_probability": 0.0},
            }
        }
    )
    hyper = settings(initialization=InitializationSettings("constant", {"value": 2.0}))
    (server,) = make_servers(1, schema, hyper=hyper)
    request = tuple(
        TableSigns(slot.table, np.array([slot.prefix | 5], np.uint64))
        for slot in schema.slots.values()
    )
    reply = server.lookup(LookupRequest(0, True, request))
    assert [part.rows.tolist() for part in reply.tables] == [[[2, 2]], [[0, 0]], [[0, 0]]]
    assert server.get_embedding_size() == 2
    assert server.stats()["refused"] == 1


def test_w15_the_same_settings_again_change_nothing() -> None:
    ends = []
    for again in (False, True):
        (server,) = make_servers(optimizer=ADAM)
        for number in range(5):
            look(server, 1, 2, batch_id=number)
            update(server, number, ones(2) * (number + 1), 1, 2)
            if again:
                server.configure(SETTINGS)
                server.register_optimizer(ADAM)
        ends.append(entries(server, 1, 2))
    np.testing.assert_array_equal(ends[0].values, ends[1].values)
    np.testing.assert_array_equal(ends[0].states, ends[1].states)
    assert ends[0].states is not None
    assert ends[0].states[:, -1].tolist() == [5, 5]  # Adam's steps, counted per row


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SGD, ADAM),
        (ADAM, ADAGRAD),
        # The same width, with another meaning.
        (ADAGRAD, OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9})),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_another_optimizer_is_refused(old: OptimizerSettings, new: OptimizerSettings) -> None:
    (server,) = make_servers(optimizer=old)
    server.register_optimizer(new)
    server.register_optimizer(old)
    look(server, 1)
    held = entries(server, 1)
    with pytest.raises(ConfigError, match=f"optimizer {new.name} keeps .*clear_embeddings"):
        server.register_optimizer(new)
    np.testing.assert_array_equal(entries(server, 1).states, held.states)
    server.clear_embeddings()
    server.register_optimizer(new)
    look(server, 1)
    update(server, 0, ones(1), 1)


def test_a_lookup_under_way_leaves_no_row_of_the_optimizer_before() -> None:
    is_armed, was_read, may_go_on = (threading.Event() for _ in range(3))

    def clock() -> float:
        """Read between a lookup's settings and its rows."""
        if is_armed.is_set():
            was_read.set()
            assert may_go_on.wait(60)
        return 0.0

    server = ParameterServer(SCHEMA, ParameterServerConfig(), clock=clock)
    server.configure(settings())
    server.register_optimizer(ADAGRAD)
    is_armed.set()
    lookup = Background(lambda: look(server, 1))
    assert was_read.wait(60)
    is_armed.clear()
    # The same width, with another meaning.
    server.register_optimizer(OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9}))
    may_go_on.set()
    lookup.result()
    assert server.get_embedding_size() == 0
    look(server, 1)
    assert np.asarray(entries(server, 1).states).tolist() == [[0, 0, 0, 0]]


def test_another_seed_is_refused_while_rows_are_held() -> None:
    (server,) = make_servers()
    server.configure(settings(seed=8))
    first = look(server, 1).tables[0].rows
    with pytest.raises(ConfigError, match=r"seed: expected 8, .* got 9; 1 rows are held"):
        server.configure(settings(seed=9))
    np.testing.assert_array_equal(look(server, 1).tables[0].rows, first)
    server.clear_embeddings()
    server.configure(settings(seed=9))
    assert (look(server, 1).tables[0].rows != first).all()


def test_settings_may_change_for_rows_to_come() -> None:
    (server,) = make_servers()
    look(server, 1)
    server.configure(settings(admit_probability=0.0, weight_bound=0.25))
    look(server, 1, 2)
    assert server.get_embedding_size() == 1
    update(server, 0, ones(1) * 100, 1)
    np.testing.assert_array_equal(entries(server, 1).values, -0.25 * ones(1))
    server.register_optimizer(OptimizerSettings("sgd", {"lr": 0.0}))
    update(server, 1, -ones(1), 1)
    np.testing.assert_array_equal(entries(server, 1).values, -0.25 * ones(1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.configure(settings(admit_probability=1.5)), "admit_probability"),
        (lambda s: s.configure(settings(initialization=UNKNOWN)), "unifrom"),
        (lambda s: s.register_optimizer(OptimizerSettings("adma", {})), "adma"),
        (lambda s: s.register_optimizer(OptimizerSettings("adam", {"beta": 1.0})), "beta"),
    ],
)
@pytest.mark.parametrize("is_configured", [False, True])
def test_bad_settings_are_refused(call: Any, message: str, is_configured: bool) -> None:
    more: dict[str, Any] = {} if is_configured else {"hyper": None, "optimizer": None}
    (server,) = make_servers(**more)
    with pytest.raises(ConfigError, match=message):
        call(server)
    assert server.ready_for_serving() is is_configured
    with pytest.raises(ConfigError, match=r"0\.\.replica_size - 1 = 1, got 2"):
        ParameterServer(SCHEMA, ParameterServerConfig(), replica_index=2, replica_size=2)


# --- rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", range(4))
def test_w01_a_missing_sign_skips_exactly_its_own_gradient(missing: int) -> None:
    (server,) = make_servers()
    held = [x for x in range(4) if x != missing]
    look(server, *held)
    before = entries(server, *held).values
    reply = update(server, 0, ones(4) * np.arange(1, 5)[:, None], 0, 1, 2, 3)
    assert reply.num_missing == 1
    steps = 0.5 * (np.array(held, np.float32) + 1)[:, None]
    np.testing.assert_array_equal(entries(server, *held).values, before - steps)
    assert server.stats()["update_missing"] == 1


def test_w01_signs_that_were_not_admitted_skip_exactly_theirs() -> None:
    (server,) = make_servers(hyper=settings(admit_probability=0.5))
    ids = list(range(64))
    reply = look(server, *ids)
    held = entries(server, *ids)
    assert 0 < len(held.signs) < 64
    part = TableGradients(TABLE, signs(*ids), reply.tables[0].hints, ones(64))
    answer = server.update(UpdateRequest((0, 0), (part,)))
    assert answer.num_missing == 64 - len(held.signs)
    np.testing.assert_array_equal(entries(server, *ids).values, held.values - 0.5)


def test_w27_admission_draws_the_same_for_the_same_batch() -> None:
    admitted = []
    for batch_id in (3, 3, 4):
        (server,) = make_servers(hyper=settings(admit_probability=0.5))
        look(server, *range(64), batch_id=batch_id)
        again = server.get_embedding_size()
        look(server, *range(64), batch_id=batch_id)
        assert server.get_embedding_size() == again
        admitted.append(entries(server, *range(64)).signs.tolist())
    assert admitted[0] == admitted[1] != admitted[2]


def test_w26_evictions_are_counted_and_the_least_recently_used_goes() -> None:
    (server,) = make_servers(capacity=3)
    look(server, 1, 2, 3)
    look(server, 1)
    update(server, 0, ones(1), 2)  # an update is no use
    look(server, 3, is_training=False)  # nor is an evaluation
    look(server, 4, 5)
    assert entries(server, 1, 2, 3, 4, 5).signs.tolist() == signs(1, 4, 5).tolist()
    assert server.stats()["evicted"] == 2
    assert server.stats()["rows"] == 3


def test_w13_an_update_is_applied_once() -> None:
    (server,) = make_servers()
    look(server, 1)
    before = entries(server, 1).values
    assert update(server, 0, ones(2), 1, 2).num_missing == 1
    again = update(server, 0, ones(2), 1, 2)
    assert (again.num_missing, again.repeated) == (1, True)
    assert not update(server, 0, ones(1), 1, client=1).repeated
    np.testing.assert_array_equal(entries(server, 1).values, before - 1.0)
    stats = server.stats()
    assert (stats["updates"], stats["repeated_updates"], stats["update_missing"]) == (2, 1, 1)


def test_rows_are_written_and_read_whole() -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    values = ones(2) * [[1.0], [2.0]]
    server.set_embedding([TableEntries(TABLE, signs(1, 2), values.astype(np.float32), None)])
    read = entries(server, 2, 3, 1)
    assert read.signs.tolist() == signs(2, 1).tolist()
    np.testing.assert_array_equal(read.values, values[::-1])
    assert read.states is not None
    np.testing.assert_array_equal(read.states.view(np.float32), np.float32(1e-8) * ones(2))
    states = read.states + 1
    server.set_embedding([TableEntries(TABLE, signs(2, 1), read.values, states)])
    np.testing.assert_array_equal(entries(server, 2, 1).states, states)
    turned = np.arange(2 * DIM, dtype=np.float32).reshape(DIM, 2).T  # of another layout
    server.set_embedding([TableEntries(TABLE, signs(1, 2), turned, None)])
    np.testing.assert_array_equal(entries(server, 1, 2).values, turned)
    server.clear_embeddings()
    assert server.get_embedding_size() == 0


def test_memory_limit_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    (server,) = make_servers(memory_limit=1 << 20, num_hashmap_internal_shards=1)
    for number in range(300):
        look(server, *range(number * 200, number * 200 + 200))
    stats = server.stats()
    assert stats["memory_limited"] == 1
    assert stats["evicted"] > 0
    messages = [r for r in caplog.records if "memory limit" in r.getMessage()]
    assert len(messages) == 1


def test_capacity_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    (server,) = make_servers(capacity=300, num_hashmap_internal_shards=1)
    for _ in range(70):
        look(server, *range(300))
    assert not caplog.messages  # nothing was evicted
    for number in range(1, 200):
        look(server, *range(number * 200, number * 200 + 200))
    assert server.stats()["evicted"] > 0
    (line,) = caplog.messages
    assert re.search(
        r"parameter server 0: 300 rows reach capacity, 300: rows are evicted, \d+ so far, .* "
        r"write a larger embedding_parameter_server_config: capacity:",
        line,
    )


# --- refusals: typed, naming the thing, nothing changed --------------------------------------

RAW = SCHEMA.slots["raw"]
STRANGE = np.array([RAW.prefix], np.uint64)


def unchanged(server: ParameterServer, error: type[Exception], message: str, call: Any) -> None:
    """The call is refused and leaves rows 1, 2 and 3 as they are, and no other row."""
    look(server, 1, 2, 3)
    before = entries(server, 1, 2, 3)
    with pytest.raises(error, match=message):
        call()
    after = entries(server, 1, 2, 3)
    np.testing.assert_array_equal(after.values, before.values)
    np.testing.assert_array_equal(after.states, before.states)
    assert server.get_embedding_size() == 3
    assert server.stats()["missing"] == 0


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((99,), r"expected a table in 0\.\.\d, got 99"),
        ((-1,), "got -1"),
        ((TABLE, TABLE), f"table {TABLE} comes more than once"),
    ],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_bad_lookups_refused(tables: tuple[int, ...], message: str, is_training: bool) -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    parts = (TableSigns(RAW.table, STRANGE), *(TableSigns(x, signs(1)) for x in tables))
    request = LookupRequest(0, is_training, parts)
    unchanged(server, StoreError, message, partial(server.lookup, request))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"table": 99}, StoreError, "got 99"),
        ({"gradients": ones(1)}, StoreError, "2 rows of gradients, one a sign, got 1"),
        ({"gradients": ones(2)[:, 1:]}, DimMismatch, f"dim {DIM}, got {DIM - 1}"),
        ({"gradients": ones(2)[0]}, DimMismatch, f"dim {DIM}, got vectors"),
        ({"hints": np.zeros(3, np.uint32)}, StoreError, "2 hints, one a sign, got 3"),
    ],
)
def test_w16_bad_updates_change_nothing(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    good = TableGradients(RAW.table, STRANGE, None, np.ones((1, RAW.dim), np.float32))
    values: dict[str, Any] = {"table": TABLE, "signs": signs(1, 2), "gradients": ones(2)}
    request = UpdateRequest(
        (0, 0), (good, TableGradients(**({"hints": None} | values | change)))
    )
    unchanged(server, error, message, partial(server.update, request))
    # A refused update does not use up its id.
    assert not update(server, 0, ones(1), 1).repeated


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"table": 99}, StoreError, "got 99"),
        ({"signs": np.array([5], np.uint64)}, StoreError, "feature bits 0, which no slot"),
        ({"signs": STRANGE}, StoreError, "which no slot of it has"),
        ({"values": ones(2)}, StoreError, "expected 1 rows of values"),
        ({"values": np.ones((1, 9), np.float32)}, DimMismatch, "got 9"),
        ({"states": np.zeros((1, DIM + 1), np.uint32)}, DimMismatch, "states"),
        ({"states": np.zeros((1, DIM), np.float32)}, DataTypeError, "states of .* as uint32"),
        ({"values": ones(1).astype(np.float64)}, DataTypeError, "values as float32.*float64"),
        ({"values": ones(1)[0]}, DimMismatch, f"dim {DIM}, got vectors"),
        ({"values": [1.0]}, DataTypeError, "got list"),
    ],
)
def test_bad_rows_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    values: dict[str, Any] = {"table": TABLE, "signs": signs(1), "values": ones(1)}
    good = TableEntries(TABLE, signs(7), ones(1), None)
    bad = TableEntries(**({"states": None} | values | change))
    unchanged(server, error, message, partial(server.set_embedding, [good, bad]))


@pytest.mark.parametrize("index", [0, 1])
def test_a_sign_of_another_server_is_refused(index: int) -> None:
    server = make_servers(2)[index]
    both = signs(*range(20))
    order, starts = route(both, owners(2), 2)
    mine = both[order[starts[index] : starts[index + 1]]]
    foreign = both[order[starts[1 - index]]]
    server.lookup(LookupRequest(0, True, (TableSigns(TABLE, mine),)))
    mixed = np.append(mine, foreign)
    message = f"{int(foreign):#018x} of table {TABLE} is not of server {index} of 2"
    with pytest.raises(StoreError, match=message):
        server.lookup(LookupRequest(0, True, (TableSigns(TABLE, mixed),)))
    part = TableGradients(TABLE, mixed, None, ones(len(mixed)))
    with pytest.raises(StoreError, match=message):
        server.update(UpdateRequest((0, 0), (part,)))
    assert server.get_embedding_size() == len(mine)


# --- the process -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["training", "evaluation", "update"])
def test_w47_other_python_threads_run_during_a_request(what: str) -> None:
    schema = EmbeddingSchema.load({"slots_config": {"sum": {"dim": 16}}})
    (server,) = make_servers(1, schema)
    many = np.arange(400_000, dtype=np.uint64) | np.uint64(schema.slots["sum"].prefix)
    tables = (TableSigns(0, many),)
    hints = server.lookup(LookupRequest(0, True, tables)).tables[0].hints
    ones = np.ones((len(many), 16), np.float32)
    calls: dict[str, Callable[[int], object]] = {
        "training": lambda number: server.lookup(LookupRequest(number, True, tables)),
        "evaluation": lambda number: server.lookup(LookupRequest(number, False, tables)),
        "update": lambda number: server.update(
            UpdateRequest((0, number), (TableGradients(0, many, hints, ones),))
        ),
    }

    def is_over_before_others_run(number: int) -> bool:
        begun = threading.Event()

        def call() -> None:
            begun.set()
            calls[what](number)

        running = Background(call)
        begun.wait(60)
        was_over = running.is_done.is_set()
        running.result()
        return was_over

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # the thread that has the GIL keeps it until it lets it go
    try:
        # Many times: a busy machine may not give this thread a processor in time.
        assert not all(is_over_before_others_run(number) for number in range(1, 50))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_w60_an_empty_server_of_a_large_capacity_is_small() -> None:
    # VmHWM: ru_maxrss would still hold the peak of the process that forked this one.
    code = """
from pathlib import Path
from tests.support.services import make_servers
(server,) = make_servers(1, capacity=1_000_000_000)
lines = Path("/proc/self/status").read_text().splitlines()
(peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
print(peak, server.stats()["bytes"] // 1024)
"""
    ran = run("-c", code)
    assert ran.returncode == 0, ran.stderr
    process, store = map(int, ran.stdout.split())  # KiB
    assert process < 100 * 1024
    assert store < 1024
