"""Loads: any number of servers to any other, and loads that fail half way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._core.kernels import native as kernel_libraries
from persia._files import catalog
from persia._files.parts import read_part, take
from persia._files.storage import LocalStorage
from persia._rpc.messages import (
    HyperParameters,
    InitializationSettings,
    LoadRequest,
    LookupRequest,
    OptimizerSettings,
    PooledOutput,
    TableEntries,
    WriteRequest,
)
from persia._server import restore
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, ParameterServerConfig
from persia.errors import (
    CheckpointError,
    ConfigError,
    ExtensionError,
    PersiaError,
    RowsReplaced,
    ServiceBusy,
)
from tests.support import kernels
from tests.support.fixtures import Monkey
from tests.support.saving import (
    Slow,
    Trained,
    add_part,
    assert_alike,
    committed,
    dump,
    held_load,
    is_in,
    load,
    rows_of,
    train,
    verified,
)
from tests.support.services import (
    ADAGRAD,
    ADAM,
    CONFIG,
    SCHEMA,
    SETTINGS,
    features,
    gradient,
    hashed,
    make_servers,
    make_worker,
    read_rows,
    settings,
    sign,
)
from tests.support.waiting import until


@pytest.mark.parametrize(("count", "num_threads"), [(1, 64), (2, 1), (3, 1)])
def test_w19_w33_reshard(dumped: Trained, tmp_path: Path, count: int, num_threads: int) -> None:
    options: dict[str, Any] = {"replica_size": count, "num_checkpoint_threads": num_threads}
    config = ParameterServerConfig(memory_limit=0)
    fresh = [ParameterServer(SCHEMA, config, replica_index=n, **options) for n in range(count)]
    other = make_worker(fresh)
    assert load(other, tmp_path) == []
    assert_alike(dumped, (other, fresh), 3, 3)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_adagrad_of_a_user_has_the_bytes_of_the_built_in(tmp_path: Path, count: int) -> None:
    """Trained, evicted, dumped, loaded by other servers, trained on; changes as well."""
    options = {"lr": 0.1, "initial_accumulator_value": 1e-8}
    native = OptimizerSettings(kernels.load("adagrad"), options)
    built_in, ours = (
        (make_worker(servers), servers)
        for servers in (make_servers(count, optimizer=one) for one in (ADAGRAD, native))
    )
    assert_alike(built_in, ours, 0, 3)
    dump(ours[0], tmp_path)
    fresh = make_servers(3, optimizer=native)
    other = make_worker(fresh)
    assert load(other, tmp_path) == []
    assert_alike(built_in, (other, fresh), 3, 2)
    refused = make_worker(make_servers(1, optimizer=ADAGRAD))
    with pytest.raises(CheckpointError, match=r"optimizer of .* is native:adagrad:\w{64} in "):
        load(refused, tmp_path)


def test_without_its_library_rows_are_evaluated_and_dumped_and_not_trained(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    adagrad = OptimizerSettings(
        kernels.load("adagrad"), {"lr": 0.1, "initial_accumulator_value": 1e-8}
    )
    servers = make_servers(2, optimizer=adagrad)
    worker = make_worker(servers)
    train(worker, 0, 3)
    dump(worker, tmp_path / "a")
    ids = features({"sum": [[1, 2], [3]]}, requires_grad=False)
    (wanted,) = worker.lookup_direct(ids).outputs
    fresh = make_servers(1, hyper=None, optimizer=None)
    other = make_worker(fresh)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kernel_libraries, "_libraries", {})
        assert load(other, tmp_path / "a") == []
        (found,) = other.lookup_direct(ids).outputs
        assert found.values.tobytes() == wanted.values.tobytes()  # type: ignore[union-attr]
        with pytest.raises(ExtensionError, match=r"lookup: the library of native:adagrad:\w+"):
            train(other, 3, 1)
        signs = np.array([sign("sum", 1)], np.uint64)
        zeros = np.zeros((1, 4), np.float32)
        entries = TableEntries(SCHEMA.slots["sum"].table, signs, zeros, None)
        with pytest.raises(ExtensionError, match="writing rows: the library of native:adagrad"):
            fresh[0].set_embedding((entries,))
        with pytest.raises(ExtensionError, match=r"expected adagrad\.so with sha256"):
            other.register_optimizer(adagrad)
        assert rows_of(fresh) == rows_of(servers)
        dump(other, tmp_path / "b")
    third = make_servers(3, optimizer=adagrad)
    assert load(make_worker(third), tmp_path / "b") == []
    assert rows_of(third) == rows_of(servers)
    other.register_optimizer(adagrad)
    assert_alike((worker, servers), (other, fresh), 3, 2)


def by_library(*flags: str) -> HyperParameters:
    """Settings of rows that begin by a kernel with the formula of uniform."""
    bounds = {"lower": -1.0, "upper": 1.0}
    return settings(
        initialization=InitializationSettings(kernels.load("initial", *flags), bounds)
    )


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_by_a_kernel_are_those_of_uniform(tmp_path: Path, count: int) -> None:
    """Trained, dumped, loaded by other servers, trained on; another library is refused."""
    built_in, ours = (
        (make_worker(servers), servers)
        for servers in (make_servers(count), make_servers(count, hyper=by_library()))
    )
    assert_alike(built_in, ours, 0, 3)
    dump(ours[0], tmp_path)
    fresh = make_servers(3, hyper=by_library())
    other = make_worker(fresh)
    assert load(other, tmp_path) == []
    assert_alike(built_in, (other, fresh), 3, 2)
    others = {"a built-in one": SETTINGS, "native:initial:": by_library("-DTAG=4")}
    for now, hyper in others.items():
        refused = make_servers(1, hyper=hyper)
        message = rf"initialization of feature '\w+' is native:initial:\w{{64}} in .* and {now}"
        with pytest.raises(CheckpointError, match=message):
            load(make_worker(refused), tmp_path)
        assert refused[0].get_embedding_size() == 0
    # Its slots have an initialization of their own.
    load(make_worker(make_servers(1)), tmp_path, "constant")


def test_rows_by_hashes_of_ids_are_found_after_a_load_and_others_are_refused(
    tmp_path: Path,
) -> None:
    schema = hashed()
    one = make_worker(make_servers(2, schema), schema)
    batch = {"sum": [[5, 6], [7]], "mean": [[8], [9]], "stack": [[1], [2]]}
    for number in range(3):
        one.update(gradient(one.lookup_direct(features(batch, number)), (0, number)))
    dump(one, tmp_path)
    wanted = one.lookup_direct(features(batch, requires_grad=False)).outputs
    for count in (1, 3):
        other = make_worker(make_servers(count, schema), schema)
        assert load(other, tmp_path) == []
        found = other.lookup_direct(features(batch, requires_grad=False)).outputs
        assert [x.values.tobytes() for x in found] == [x.values.tobytes() for x in wanted]  # type: ignore[union-attr]
    for now, another in (("none", SCHEMA), ("native:hash:", hashed("-DTAG=1"))):
        servers = make_servers(1, another)
        message = rf"id_hash of feature group '\w+' is native:hash:\w{{64}} in .* and {now}"
        with pytest.raises(CheckpointError, match=message):
            load(make_worker(servers, another), tmp_path)
        assert servers[0].get_embedding_size() == 0
    with pytest.raises(ConfigError, match="embedding config"):
        make_worker(make_servers(1, SCHEMA), schema)


def test_a_kernel_for_rows_that_began_by_uniform_is_refused(tmp_path: Path) -> None:
    worker = make_worker(make_servers(1))
    train(worker, 0, 1)
    dump(worker, tmp_path)
    refused = make_worker(make_servers(1, hyper=by_library()))
    with pytest.raises(CheckpointError, match="a built-in one in the checkpoint and native:"):
        load(refused, tmp_path)


def test_classes_of_a_scorer_come_back_with_their_rows(tmp_path: Path) -> None:
    """Rows are evicted after a load as they would have been without one."""
    policy = kernels.load("scorer")
    names = ("shared", "sqrt", "stacks", "raw")
    groups = {name: {"eviction": {"policy": policy}} for name in names}
    schema = EmbeddingSchema.load({**CONFIG, "group_settings": groups})
    small: dict[str, Any] = {"capacity": 220, "num_hashmap_internal_shards": 1}
    one, other = (make_servers(1, schema, **small) for _ in range(2))
    workers = [make_worker(servers, schema) for servers in (one, other)]
    train(workers[0], 0, 2)
    dump(workers[0], tmp_path)
    assert load(workers[1], tmp_path) == []
    for worker in workers:
        train(worker, 2, 3)
    evicted = [servers[0].stats()["evicted_native"] for servers in (one, other)]
    assert evicted[0] == evicted[1] > 0
    assert rows_of(other, schema) == rows_of(one, schema)


def test_adagrad_of_a_user_evicts_and_writes_changes_as_the_built_in(tmp_path: Path) -> None:
    options = {"lr": 0.1, "initial_accumulator_value": 1e-8}
    native = OptimizerSettings(kernels.load("adagrad"), options)
    found = []
    for number, optimizer in enumerate((ADAGRAD, native)):
        folder = tmp_path / str(number)
        changes: dict[str, Any] = {
            "enable_incremental_update": True,
            "incremental_dir": str(folder),
            "capacity": 100,
            "num_hashmap_internal_shards": 1,
        }
        (server,) = make_servers(1, optimizer=optimizer, **changes)
        worker = make_worker([server])
        for step in range(3):
            train(worker, step, 1)
            server.flush_changes()
        assert server.stats()["evicted"] > 0
        storage = LocalStorage(folder / "s0")
        parts = [part for one in catalog.chain(storage) for part in one.parts]
        found.append(
            (rows_of([server]), [read_part(storage, part).states.tolist() for part in parts])
        )
        server.close()
    assert found[0] == found[1]


def test_a_load_by_feature_keeps_all_others(dumped: Trained, tmp_path: Path) -> None:
    worker, servers = dumped
    before = rows_of(servers)
    train(worker, 3, 3)
    after = rows_of(servers)
    load(worker, tmp_path, "sqrt")
    prefix, bits = SCHEMA.slots["sqrt"].prefix, 64 - SCHEMA.prefix_bits
    expected = {k: v for k, v in before.items() if k >> bits == prefix >> bits}
    expected |= {k: v for k, v in after.items() if k >> bits != prefix >> bits}
    assert rows_of(servers) == expected
    with pytest.raises(CheckpointError, match="no_such"):
        load(worker, tmp_path, "no_such")
    assert rows_of(servers) == expected


def test_w31_a_step_that_is_over_goes_on_no_more(dumped: Trained, tmp_path: Path) -> None:
    _, (server, _) = dumped
    for number in range(3):
        request = LoadRequest(number, "verify", str(tmp_path), "", None)
        # The step is begun by the call itself, so its answer already is of it.
        assert server.load(request).state == "verifying"
        until(partial(is_in, server, request, "verified"))
        assert server.load(request).state == "verified"


def test_steps_of_a_load_out_of_order_are_refused(dumped: Trained, tmp_path: Path) -> None:
    _, (server, _) = dumped
    with pytest.raises(CheckpointError, match="verified"):
        server.load(LoadRequest(5, "commit", str(tmp_path), "", None))
    with pytest.raises(CheckpointError, match="no snapshot"):
        server.cut_status(77)
    with pytest.raises(CheckpointError, match="no snapshot"):
        server.write_cut(WriteRequest(77, str(tmp_path), "00000001-00000000"))
    server.end_cut(77, True)  # nothing: it has ended


def test_w33_a_checkpoint_without_rows(tmp_path: Path) -> None:
    worker = make_worker(make_servers(3))
    dump(worker, tmp_path)
    train(worker, 0, 1)
    load(worker, tmp_path)
    assert worker.get_embedding_size() == [0, 0, 0]


def test_groups_are_found_by_names_of_features(dumped: Trained, tmp_path: Path) -> None:
    _, servers = dumped
    # All but one feature, in another order: other numbers of groups and tables.
    order = [name for name in reversed(CONFIG["slots_config"]) if name != "raw"]
    groups = {"stacks": ["stack", "stack_mean"], "shared": ["sum", "max", "jagged"]}
    slots = {name: CONFIG["slots_config"][name] for name in order}
    schema = EmbeddingSchema.load(CONFIG | {"slots_config": slots, "feature_groups": groups})
    fresh = make_servers(3, schema, optimizer=ADAGRAD)
    notes = load(make_worker(fresh, schema), tmp_path)
    assert any("raw" in note for note in notes)
    for name in ("sum", "stack_mean", "sqrt"):
        slot, theirs = schema.slots[name], SCHEMA.slots[name]
        ids = range(2000)
        new = read_rows(fresh, {slot.table: [sign(name, x, schema) for x in ids]})
        old = read_rows(servers, {theirs.table: [sign(name, x) for x in ids]})
        assert {k ^ slot.prefix: v.tobytes() for k, v in new.items()} == {
            k ^ theirs.prefix: v.tobytes() for k, v in old.items()
        }


def damage(folder: Path) -> str:
    path = sorted(folder.rglob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return path.name


def add_strange_sign(folder: Path) -> str:
    def strange(block: Any) -> Any:
        return replace(take(block, np.arange(1)), signs=np.zeros(1, np.uint64))

    _, table = add_part(folder, "strange", strange)
    return f"strange/.*sign 0x0+ is of no group of {table}"


def add_row_again(folder: Path) -> str:
    twice, _ = add_part(folder, "twice", lambda block: take(block, np.arange(1)))
    return f"signs: {twice.signs[0]} comes twice"


@pytest.mark.parametrize("spoil", [damage, add_strange_sign, add_row_again])
def test_what_is_wrong_with_files_is_found_before_anything_changes(
    dumped: Trained, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    worker, servers = dumped
    train(worker, 3, 1)
    before = rows_of(servers)
    with pytest.raises(PersiaError, match=spoil(tmp_path)):
        load(worker, tmp_path)
    assert rows_of(servers) == before
    train(worker, 4, 1)


def test_counts_of_ids_not_admitted_yet_are_kept(tmp_path: Path) -> None:
    admission = {"sqrt": {"admission": {"policy": "count", "threshold": 3}}}
    schema = EmbeddingSchema.load(CONFIG | {"group_settings": admission})

    def appear(worker: EmbeddingWorker, number: int) -> None:
        result = worker.lookup_direct(features({"sqrt": [[1, 2]]}, number))
        worker.update(gradient(result, (1, number)))

    servers = make_servers(2, schema, capacity=1000)  # the sketch has counters for 1000 ids
    worker = make_worker(servers, schema)
    appear(worker, 0)
    appear(worker, 1)
    dump(worker, tmp_path)
    fresh = make_servers(2, schema, capacity=1000)
    other = make_worker(fresh, schema)
    load(other, tmp_path)
    assert sum(other.get_embedding_size()) == 0
    appear(other, 2)
    assert sum(other.get_embedding_size()) == 2


def test_w17_servers_that_lost_all_may_load(dumped: Trained, tmp_path: Path) -> None:
    fresh = make_servers(3, hyper=None, optimizer=None)  # not configured
    other = make_worker(fresh)
    assert not other.ready_for_serving()
    load(other, tmp_path)
    assert other.ready_for_serving()
    assert_alike(dumped, (other, fresh), 3, 2)
    fresh = make_servers(1, hyper=settings(seed=8), optimizer=ADAGRAD)
    assert any("seed" in note for note in load(make_worker(fresh), tmp_path))


def test_a_load_that_is_dropped_half_way_is_not_followed_by_another_beside_it(
    dumped: Trained, tmp_path: Path, monkeypatch: Monkey
) -> None:
    worker, servers = dumped
    before = rows_of(servers)
    slow = Slow(monkeypatch)
    first = verified(servers[0], tmp_path)
    servers[0].load(replace(first, step="commit"))
    assert slow.is_there.wait(60)
    servers[0].load(replace(first, step="drop"))  # another server could not load
    assert not servers[0].ready_for_serving()
    with pytest.raises(CheckpointError, match="another load"):
        servers[0].load(replace(first, load_id=2))
    slow.may_go.set()
    until(servers[0].ready_for_serving)
    load(worker, tmp_path)
    assert rows_of(servers) == before


def test_no_training_in_a_load(dumped: Trained, tmp_path: Path, monkeypatch: Monkey) -> None:
    worker, servers = dumped
    request = features({"sum": [[1, 2]]}, 9)
    with held_load(worker, tmp_path, monkeypatch):
        for refused in (
            partial(worker.lookup_direct, request),
            worker.clear_embeddings,
            partial(servers[0].lookup, LookupRequest(3, True, ())),
            partial(dump, worker, tmp_path),
        ):
            with pytest.raises(CheckpointError, match="a load is replacing its rows"):
                refused()
    before = rows_of(servers)
    load(make_worker(fresh := make_servers(1, optimizer=ADAGRAD)), tmp_path)
    assert rows_of(fresh) == before
    worker.update(gradient(worker.lookup_direct(request), (1, 9)))
    assert rows_of(servers) != before


def test_a_retry_after_a_load_is_applied_once(trained: Trained, tmp_path: Path) -> None:
    """Updates of a client that a server has applied stay applied: no row says which."""
    worker, servers = trained
    result = worker.lookup_direct(features({"sum": [[1, 2]]}, 9))
    worker.update(gradient(result, (1, 9)))
    dump(worker, tmp_path)
    load(worker, tmp_path)
    before = rows_of(servers)
    assert worker.update(gradient(result, (1, 9))).repeated
    assert rows_of(servers) == before


def test_an_update_of_rows_that_were_looked_up_before_a_load_is_refused(
    dumped: Trained, tmp_path: Path
) -> None:
    """As one of a trainer that has died, which an embedding-worker sends again."""
    worker, servers = dumped
    before = rows_of(servers)
    result = worker.lookup_direct(features({"sum": [[x] for x in range(1, 60)]}, 9))
    load(make_worker(servers), tmp_path)
    for _ in range(2):
        with pytest.raises(RowsReplaced, match="update 9 of client 0x1 is of rows that a"):
            worker.update(gradient(result, (1, 9)))
    assert rows_of(servers) == before
    assert [server.stats()["replaced_updates"] for server in servers] == [2, 2]
    worker.update(gradient(worker.lookup_direct(features({"sum": [[1, 2]]}, 9)), (2, 9)))
    assert rows_of(servers) != before


def test_a_load_of_some_features_refuses_late_updates_of_their_rows_alone(
    dumped: Trained, tmp_path: Path
) -> None:
    worker, servers = dumped
    ids = [[x] for x in range(1, 60)]
    late = [worker.lookup_direct(features({"sqrt": ids}, number)) for number in (9, 10)]
    others = [worker.lookup_direct(features({"sum": ids}, number)) for number in (11, 12)]
    load(make_worker(servers), tmp_path, "sqrt")
    before = rows_of(servers)
    with pytest.raises(RowsReplaced, match="update 9 of client 0x1 is of rows that a"):
        worker.update(gradient(late[0], (1, 9)))
    assert rows_of(servers) == before
    worker.update(gradient(others[0], (1, 11)))
    assert rows_of(servers) != before
    load(make_worker(servers), tmp_path, "sum")  # another one, which sqrt does not share
    before = rows_of(servers)
    for one, number in ((late[1], 10), (others[1], 12)):
        with pytest.raises(RowsReplaced):
            worker.update(gradient(one, (1, number)))
    assert rows_of(servers) == before
    worker.update(gradient(worker.lookup_direct(features({"sqrt": ids}, 13)), (1, 13)))
    assert rows_of(servers) != before


def test_loads_wait_for_requests(dumped: Trained, tmp_path: Path, monkeypatch: Monkey) -> None:
    worker, servers = dumped
    saved = rows_of(servers)
    train(worker, 3, 1)
    monkeypatch.setattr(restore, "_IDLE_TIMEOUT_S", 0.01)
    with (
        servers[1]._loads.whole_rows,
        pytest.raises(CheckpointError, match=r"1 requests to parameter server 1 .* 0.01 s"),
    ):
        load(worker, tmp_path)

    # Server 0 has its rows of the checkpoint, as soon as it is done, and server 1 those of now:
    # no such training.
    def is_refused() -> bool:
        with pytest.raises(CheckpointError) as refused:
            train(worker, 4, 1)
        return "not finished on every server; load again" in str(refused.value)

    until(is_refused)
    monkeypatch.undo()
    load(worker, tmp_path)
    assert rows_of(servers) == saved
    train(worker, 4, 1)


def test_a_load_that_is_given_up_drops_no_row(dumped: Trained, tmp_path: Path) -> None:
    worker, servers = dumped
    before = rows_of(servers)
    request = verified(servers[0], tmp_path)
    commit = replace(request, step="commit")
    with servers[0]._loads.whole_rows:
        assert servers[0].load(commit).state == "loading"
        servers[0].load(replace(request, step="drop"))
    until(partial(is_in, servers[0], commit, "failed"))
    assert rows_of(servers) == before
    train(worker, 3, 1)


def test_a_trainer_that_dies_leaves_no_mixture(dumped: Trained, tmp_path: Path) -> None:
    worker, servers = dumped
    before = rows_of(servers)
    for server in servers:
        request = verified(server, tmp_path)
    committed(servers[0], request)
    # Here it dies. Server 0 cannot know what the other one has.
    with pytest.raises(CheckpointError, match="parameter server 0: rows are missing"):
        train(worker, 3, 1)
    with pytest.raises(CheckpointError, match="rows are missing"):
        dump(worker, tmp_path)
    with pytest.raises(CheckpointError, match="'finish' of load 1: expected one that it has"):
        servers[1].load(replace(request, step="finish"))
    load(worker, tmp_path, "sqrt")  # a part of the rows is not all that is missing
    with pytest.raises(CheckpointError, match="rows are missing"):
        train(worker, 3, 1)
    load(worker, tmp_path)
    assert rows_of(servers) == before
    train(worker, 3, 1)


def test_missing_rows_of_features_are_named(dumped: Trained, tmp_path: Path) -> None:
    worker, servers = dumped
    committed(servers[0], verified(servers[0], tmp_path, "sqrt", "raw"))
    with pytest.raises(CheckpointError, match="rows of raw, sqrt are missing"):
        train(worker, 3, 1)
    load(worker, tmp_path, "raw")
    with pytest.raises(CheckpointError, match="rows of sqrt are missing"):
        train(worker, 3, 1)
    worker.clear_embeddings()
    train(worker, 3, 1)


def test_more_rows_than_there_is_room_for_are_refused(dumped: Trained, tmp_path: Path) -> None:
    worker, _ = dumped
    count = sum(worker.get_embedding_size())
    (small,) = make_servers(1, optimizer=ADAGRAD, capacity=count - 1)
    other = make_worker([small])
    train(other, 0, 1)
    before = other.get_embedding_size()
    with pytest.raises((CheckpointError, ConfigError), match=rf"at least {count}, .* than 1 s"):
        load(other, tmp_path)
    assert other.get_embedding_size() == before
    train(other, 1, 1)
    exact = make_servers(1, optimizer=ADAGRAD, capacity=count, num_hashmap_internal_shards=8)
    notes = load(make_worker(exact), tmp_path)
    lost = count - sum(server.get_embedding_size() for server in exact)
    assert lost > 0  # in shards with more than their share
    assert [note for note in notes if f"{lost} rows did not fit" in note]


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"servers": {"hyper_parameters": [["seed"]], "optimizer": {}}},
        {"servers": {"hyper_parameters": "x", "optimizer": None}},
    ],
)
def test_any_extras_in_a_manifest(
    dumped: Trained, tmp_path: Path, extras: dict[str, Any]
) -> None:
    """Servers that have settings need none of it; others say that it is not there."""
    _, servers = dumped
    storage = LocalStorage(tmp_path)
    catalog.publish(storage, replace(catalog.load(storage), extras=extras))
    fresh = make_servers(1, optimizer=ADAGRAD)
    load(make_worker(fresh), tmp_path)
    assert rows_of(fresh) == rows_of(servers)
    with pytest.raises(CheckpointError, match=r"extras\.servers: expected hyper_parameters"):
        restore.settings_of(LoadRequest(1, "verify", str(tmp_path), "", None))


def test_another_use_of_the_same_rows_is_noted(tmp_path: Path) -> None:
    def slots(raw: dict[str, Any], **pooling: str) -> EmbeddingSchema:
        config = {name: {"dim": 4, "pooling": each} for name, each in pooling.items()}
        config["raw"] = {"dim": 4, "pooling": "raw", **raw}
        return EmbeddingSchema.load({"slots_config": config})

    before = slots({"sample_fixed_size": 10}, user="sum", item="sum", new="raw", same="mean")
    worker = make_worker(make_servers(1, before), before)
    worker.lookup_direct(features({"user": [[1]]}))
    dump(worker, tmp_path)
    after = slots({"padding": "front"}, user="mean", item="mean", new="jagged", same="mean")
    end = "here, for features {}: the model receives other values of the same rows"
    notes = [
        "padding is back in the checkpoint and front " + end.format("'raw'"),
        "pooling is raw in the checkpoint and jagged " + end.format("'new'"),
        "pooling is sum in the checkpoint and mean " + end.format("'user', 'item'"),
    ]
    assert load(make_worker(make_servers(1, after), after), tmp_path) == notes
    some = load(make_worker(make_servers(1, after), after), tmp_path, "item")
    assert [note for note in some if "other values" in note] == [
        "pooling is sum in the checkpoint and mean " + end.format("'item'")
    ]
    assert not load(make_worker(make_servers(1, before), before), tmp_path)


def test_a_store_that_was_replaced_takes_no_rows(dumped: Trained, tmp_path: Path) -> None:
    worker, _ = dumped
    (server,) = make_servers(1, optimizer=ADAGRAD)
    commit = replace(verified(server, tmp_path), step="commit")
    server.register_optimizer(ADAM)
    until(partial(is_in, server, commit, "failed"))
    assert "another seed or optimizer" in server.load(commit).error
    assert server.get_embedding_size() == 0
    # From commit on it is the other way round: who would replace the store is refused.
    commit = replace(verified(server, tmp_path, number=2), step="commit")
    with server._loads.whole_rows:
        assert server.load(commit).state == "loading"
        with pytest.raises(CheckpointError, match="a load is replacing its rows"):
            server.configure(settings(seed=8))
        with pytest.raises(CheckpointError, match="a load is replacing its rows"):
            server.register_optimizer(ADAGRAD)
        server.register_optimizer(replace(ADAM, options={"lr": 0.2}))  # the same state
    until(partial(is_in, server, commit, "loaded"))
    server.load(replace(commit, step="finish"))
    assert server.get_embedding_size() == sum(worker.get_embedding_size())


def test_evaluation_during_a_load_is_refused_and_never_zeros(
    dumped: Trained, tmp_path: Path, monkeypatch: Monkey
) -> None:
    worker, _ = dumped
    request = features({"sum": [[1, 2]]}, 9, requires_grad=False)
    (before,) = worker.lookup_direct(request).outputs
    assert isinstance(before, PooledOutput)
    refused = pytest.raises(ServiceBusy, match="a load is replacing its rows; ask again")
    with held_load(worker, tmp_path, monkeypatch), refused:
        worker.lookup_direct(request)
    (after,) = worker.lookup_direct(request).outputs
    assert isinstance(after, PooledOutput)
    assert before.values.any()
    assert (before.values == after.values).all()


def test_evaluation_waits_for_the_servers_that_load_later(
    dumped: Trained, tmp_path: Path
) -> None:
    """What one server has loaded and another one has not are not rows of one moment."""
    worker, servers = dumped
    request = features({"sum": [[x] for x in range(1, 50)]}, 9, requires_grad=False)
    loads = [verified(server, tmp_path) for server in servers]
    committed(servers[0], loads[0])
    with pytest.raises(ServiceBusy):
        worker.lookup_direct(request)
    committed(servers[1], loads[1])
    for server, load_request in zip(servers, loads, strict=True):
        server.load(replace(load_request, step="finish"))
    worker.lookup_direct(request)
