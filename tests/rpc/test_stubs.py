"""Both Protocols through a stub give the same bits as the plain object, on every transport."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import (
    EmbeddingWorker,
    FeatureScan,
    IDFeatures,
    IDRows,
    IDsRequest,
    InitializationSettings,
    LearningRate,
    LookupRequest,
    OptimizerSettings,
    ParameterServer,
    PooledOutput,
    RowsRequest,
    TableEntries,
    TableGradients,
    TableSigns,
    UpdateRequest,
    WireDtypes,
)
from persia._rpc.methods import embedding_worker, parameter_server
from persia._rpc.stubs import RemoteEmbeddingWorker, RemoteParameterServer
from persia.config import EmbeddingSchema
from persia.errors import ConfigError, PersiaError, ProtocolError, UnknownRef
from tests.reference.halves import held
from tests.rpc.support import Wire, same
from tests.support.services import (
    ADAM,
    CONFIG,
    SCHEMA,
    SETTINGS,
    Samples,
    features,
    gradient,
    make_servers,
    make_worker,
    settings,
    sign,
    value,
)

BATCH = {name: [[1, 2, 2], [], [3, 1]] for name in CONFIG["slots_config"]}
SINGLE = {name: [[1], [2], [1]] for name in CONFIG["slots_config"]}


def outcome(service: Any, method: str, *arguments: Any) -> Any:
    """What a call returned, or class and text of what it raised."""
    try:
        return getattr(service, method)(*arguments)
    except PersiaError as error:
        return type(error), str(error)


def ask_server(server: ParameterServer) -> list[Any]:
    """Every method, with what it may be asked and some of what it may not."""
    pooled = SCHEMA.slots["sum"]
    signs = np.array([sign("sum", n) for n in (3, 1, 2)], np.uint64)
    ask = (TableSigns(pooled.table, signs),)
    training, evaluation = LookupRequest(1, True, ask), LookupRequest(1, False, ask)
    found: list[Any] = [server.replica_index, server.replica_size, server.schema_fingerprint]
    calls: list[tuple[Any, ...]] = [
        ("ready_for_serving",),
        ("lookup", training),  # NotConfigured
        ("configure", SETTINGS),
        ("register_optimizer", ADAM),
        ("ready_for_serving",),
        ("lookup", evaluation),
        ("lookup", training),
    ]
    found += [outcome(server, *call) for call in calls]
    ones = np.ones((3, pooled.dim), np.float32)
    hints = found[-1].tables[0].hints
    update = UpdateRequest((7, 1), (TableGradients(pooled.table, signs, hints, ones, 0.5),))
    values = np.full((3, pooled.dim), 0.25, np.float32)
    calls = [
        ("update", update),
        ("update", update),  # repeated
        ("lookup", evaluation),
        ("read_embedding", ask),
        ("get_embedding_size",),
        ("lookup", LookupRequest(1, True, (TableSigns(99, signs),))),
        ("set_embedding", [TableEntries(pooled.table, signs, values, None)]),
        ("read_embedding", ask),
        ("set_embedding", [TableEntries(0, signs[:1], values, None)]),
        ("set_embedding", [TableEntries(pooled.table, signs, values, None, True)]),
        ("read_rows", RowsRequest(pooled.table, signs, True, True)),
        ("read_rows", RowsRequest(pooled.table, signs[:0], False, False)),
        ("read_rows", RowsRequest(99, signs, False, False)),
        ("count_rows", pooled.table, pooled.prefix),
        ("delete_rows", TableSigns(pooled.table, signs[:2])),
        ("count_rows", pooled.table, pooled.prefix),
        ("stats",),
        ("clear_embeddings",),
        ("get_embedding_size",),
        ("lookup", evaluation),
    ]
    return [*found, *(outcome(server, *call) for call in calls)]


def ask_worker(worker: EmbeddingWorker) -> list[Any]:
    ask = partial(outcome, worker)
    found: list[Any] = [
        ask("ready_for_serving"),
        ask("configure", SETTINGS),
        ask("register_optimizer", ADAM),
        ask("ready_for_serving"),
        ask("tables_at_rate", None),
        ask("tables_at_rate", "unknown"),
    ]
    batches: list[dict[str, Samples]] = [BATCH, SINGLE, {"sum": []}, BATCH]
    for number, batch in enumerate(batches):
        given = features(batch, number)
        ref = worker.register(given)
        assert worker.register(given) == ref
        result = worker.lookup(ref, True)
        assert result.ref == ref
        found.append(result.outputs)
        rates = (LearningRate(0, 0.5**number),)
        grads = replace(gradient(result, (5, number)), learning_rates=rates)
        found += [worker.update(grads), worker.update(grads)]
    evaluated = features(BATCH, 9, requires_grad=False)
    found += [
        ask("lookup_direct", evaluated),
        ask("lookup_direct", features({"unknown": [[1]]})),
        ask("get_embedding_size"),
    ]
    direct = worker.lookup_direct(features(BATCH, 10))
    found.append(direct.outputs)
    assert direct.ref is not None
    worker.release(direct.ref)
    with pytest.raises(UnknownRef, match=f"ref {direct.ref}"):
        worker.lookup(direct.ref, True)
    slot = SCHEMA.slots["sum"]
    signs = np.array([sign("sum", n) for n in range(8)], np.uint64)
    entries = [TableEntries(slot.table, signs, np.ones((8, slot.dim), np.float32), None)]
    return [
        *found,
        ask("set_embedding", entries),
        ask("lookup_direct", evaluated),
        ask("table_info", "sum"),
        ask("table_info", "unknown"),
        ask("read_rows", IDsRequest("sum", signs, True, False)),
        ask("read_rows", IDsRequest("stack", signs, False, True)),
        ask("write_rows", IDRows("max", signs[:3], np.full((3, 4), 2, np.float32), None)),
        ask("write_rows", IDRows("max", signs[:3], np.full((3, 5), 2, np.float32), None)),
        ask("count_rows", "sum"),
        ask("delete_rows", "sum", signs[:5]),
        ask("count_rows", "sum"),
        replace(worker.scan_rows(FeatureScan("sum", 0, 0, 9, True)), generation=0),
        ask("stats"),
        ask("server_stats"),
        ask("clear_embeddings"),
        ask("get_embedding_size"),
    ]


def first_difference(wanted: list[Any], got: list[Any]) -> Any:
    pairs = zip(wanted, got, strict=True)
    return next(((n, a, b) for n, (a, b) in enumerate(pairs) if not same(a, b)), None)


def test_parameter_server_through_the_wire(wire: Wire) -> None:
    plain, served = (make_servers(1, hyper=None, optimizer=None)[0] for _ in range(2))
    found = ask_server(wire.remote(RemoteParameterServer, served))
    assert first_difference(ask_server(plain), found) is None


@pytest.mark.parametrize("num_servers", [1, 3])
def test_embedding_worker_through_the_wire(wire: Wire, num_servers: int) -> None:
    plain, served = (make_servers(num_servers, hyper=None, optimizer=None) for _ in range(2))
    with contextlib.closing(make_worker(plain)) as worker:
        wanted = ask_worker(worker)
    remotes = [wire.remote(RemoteParameterServer, one) for one in served]
    with contextlib.closing(make_worker(remotes)) as worker:
        found = ask_worker(wire.remote(RemoteEmbeddingWorker, worker))
    assert first_difference(wanted, found) is None


def test_arrays_that_arrive_are_the_receivers_own(wire: Wire) -> None:
    """T2: writing into what came back changes no row."""
    server = wire.remote(RemoteParameterServer, make_servers(1)[0])
    ask = (TableSigns(SCHEMA.slots["sum"].table, np.array([sign("sum", 1)], np.uint64)),)
    rows = server.lookup(LookupRequest(1, True, ask)).tables[0].rows
    before = rows.copy()
    rows[:] = 7.0
    again = server.lookup(LookupRequest(1, False, ask)).tables[0].rows
    np.testing.assert_array_equal(again, before)


# --- floats of two bytes ------------------------------------------------------------------

BFLOAT16 = WireDtypes("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    "dtypes", [WireDtypes("bfloat16", "float32"), WireDtypes("float32", "float16")], ids=str
)
def test_callers_follow_what_a_server_says_in_hello(ipc_wire: Wire, dtypes: WireDtypes) -> None:
    """A row that was 0 is what its gradient arrives as, and arrives as the dtype has it."""
    hyper = settings(initialization=InitializationSettings("zeros"))
    (server,) = make_servers(1, hyper=hyper, optimizer=OptimizerSettings("sgd", {"lr": 1.0}))
    served = ipc_wire.serve(server, role=parameter_server(), wire=dtypes)
    client = ipc_wire.client(served, role=parameter_server())
    remote = RemoteParameterServer.of(client, client.hello())
    assert client.wire == dtypes
    remote.check_wire(dtypes)
    with pytest.raises(ConfigError, match="row_dtype: bfloat16, gradient_dtype: bfloat16"):
        remote.check_wire(BFLOAT16)
    worker = make_worker([remote])
    result = worker.lookup_direct(features({"sum": [[1]]}))
    thirds = np.full((1, 4), -1 / 3, np.float32)
    worker.update(gradient(result, (1, 1), {"sum": thirds}))
    kept = -held(dtypes.gradients, thirds[0])
    assert (value([server], "sum", 1) == kept).all()
    (output,) = worker.lookup_direct(features({"sum": [[1]]}, requires_grad=False)).outputs
    assert isinstance(output, PooledOutput)
    assert (output.values[0] == held(dtypes.rows, kept)).all()
    worker.close()


def test_a_dtype_that_is_not_known_here_is_refused_at_once(ipc_wire: Wire) -> None:
    for dtypes in (WireDtypes("float8", "float32"), WireDtypes("float32", "int8")):
        served = ipc_wire.serve(None, role=parameter_server(), wire=dtypes)
        with pytest.raises(ProtocolError, match="rows and gradients as float32, float16, bfl"):
            ipc_wire.client(served, role=parameter_server()).hello()


def bytes_by_hop(wire: Wire, dtypes: WireDtypes, dim: int) -> tuple[int, int, int]:
    """Bytes between trainer and embedding-worker, and between that and two servers; rows."""
    schema = EmbeddingSchema.load({"slots_config": {f"f{n}": {"dim": dim} for n in range(8)}})
    remotes = []
    for server in make_servers(2, schema):
        served = wire.serve(server, role=parameter_server(), wire=dtypes)
        client = wire.client(served, role=parameter_server(), replica=None)
        remotes.append(RemoteParameterServer.of(client, client.hello()))
    worker = make_worker(remotes, schema)
    served = wire.serve(worker, role=embedding_worker(), wire=dtypes)
    client = wire.client(served, role=embedding_worker())
    trainer = RemoteEmbeddingWorker.of(client, client.hello())
    rng = np.random.default_rng(3)
    num_rows = 0
    for number in range(4):
        ids = [(rng.zipf(1.3, 1024) % 100_000).astype(np.uint64) for _ in schema.slots]
        num_rows += sum(len(np.unique(values)) for values in ids)
        batches = zip(schema.slots, ids, strict=True)
        single = tuple(FeatureBatch.from_single(name, values) for name, values in batches)
        result = trainer.lookup_direct(IDFeatures(single, number, True))
        trainer.update(gradient(result, (1, number)))
    between = [sum(remote.client.traffic()) for remote in remotes]
    worker.close()
    return sum(client.traffic()), sum(between), num_rows


@pytest.mark.parametrize("dim", [16, 32])
def test_bytes_of_two_hops_are_about_half_in_bfloat16(wire: Wire, dim: int) -> None:
    """A sample's ids and the signs of rows stay as they are; a sign is sent once a batch."""
    wide, short = bytes_by_hop(wire, WireDtypes(), dim), bytes_by_hop(wire, BFLOAT16, dim)
    for before, after in zip(wide[:2], short[:2], strict=True):
        assert 0.5 < after / before <= 0.55
    *_, between, num_rows = wide
    assert between < 1.02 * num_rows * (8 + 2 * 4 * dim)
