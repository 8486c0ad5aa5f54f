"""A server that goes on from what another process left, or says why it does not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from persia._core.kernels import native
from persia._rpc.messages import (
    LookupRequest,
    OptimizerSettings,
    TableGradients,
    TableSigns,
    UpdateReport,
    UpdateRequest,
)
from persia._server import state_file
from persia._server.row_settings import ServerSettings
from persia._server.service import ParameterServer
from persia._server.state_file import StateFile, path_of, remove_stale
from persia.config import EmbeddingSchema, ParameterServerConfig
from persia.errors import (
    CheckpointError,
    ConfigError,
    ExtensionError,
    KernelError,
    RowsReplaced,
    StoreError,
)
from tests.support import kernels
from tests.support.fixtures import Log, Monkey
from tests.support.profiles import tries
from tests.support.saving import committed, dump, load, verified
from tests.support.services import ADAGRAD, make_worker
from tests.support.services import settings as other_settings

CONFIG: dict[str, Any] = {
    "slots_config": {"plain": {"dim": 4}, "counted": {"dim": 4}},
    "group_settings": {
        "counted": {
            "admission": {"policy": "count", "threshold": 2},
            "eviction": {"policy": "lfu", "ttl_steps": 1000},
        }
    },
}
SCHEMA = EmbeddingSchema.load({"slots_config": {"plain": {"dim": 4}}})
SHARDS = 2
SIGNS = np.arange(300, dtype=np.uint64) | np.uint64(1 << 56)


def open_file(directory: Path) -> StateFile:
    return StateFile(path_of(directory, "test"), SHARDS)


def serve(state: StateFile, schema: EmbeddingSchema = SCHEMA, **config: Any) -> ParameterServer:
    values: dict[str, Any] = {"capacity": 1000, "num_hashmap_internal_shards": SHARDS}
    return ParameterServer(schema, ParameterServerConfig(**values | config), state_file=state)


def configured(server: ParameterServer, seed: int = 7) -> ParameterServer:
    """The server, which now has settings."""
    server.configure(other_settings(seed=seed))
    server.register_optimizer(ADAGRAD)
    return server


def look(server: ParameterServer, number: int = 0) -> None:
    server.lookup(LookupRequest(number, True, (TableSigns(0, SIGNS),)))


def begun(directory: Path) -> ParameterServer:
    server = configured(serve(open_file(directory)))
    look(server)
    return server


def kill(server: ParameterServer) -> None:
    """End it as SIGKILL does: nothing is written, and the lock goes."""
    if server._incremental is not None:
        server._incremental._state = None
        server._incremental._release()
    assert server.state_file is not None
    server.state_file.close()


def update(server: ParameterServer, number: int, load_id: int | None = None) -> UpdateReport:
    gradients = np.full((len(SIGNS), 4), 1.0 + number, np.float32)
    part = TableGradients(0, SIGNS, None, gradients)
    return server.update(UpdateRequest((5, number), (part,), load_id=load_id))


def rows(server: ParameterServer) -> bytes:
    (entries,) = server.read_embedding((TableSigns(0, SIGNS),))
    assert entries.states is not None
    return entries.signs.tobytes() + entries.values.tobytes() + entries.states.tobytes()


def test_w17_rows_settings_and_applied_updates_are_there_again(directory: Path) -> None:
    first = begun(directory)
    assert update(first, 0) == UpdateReport()
    assert update(first, 7) == UpdateReport()
    before = rows(first)
    kill(first)
    second = serve(open_file(directory))
    assert second.ready_for_serving()
    assert rows(second) == before
    assert second.stats()["recovered_rows"] == len(SIGNS)
    configured(second)
    assert update(second, 7) == UpdateReport(repeated=True)
    assert rows(second) == before
    assert update(second, 8) == UpdateReport()
    with pytest.raises(ConfigError, match="seed: expected 7"):
        second.configure(other_settings(seed=8))
    kill(second)
    third = serve(open_file(directory))
    assert update(third, 8).repeated
    assert update(third, 0).repeated


def test_rows_whose_library_is_not_here_are_there_again(
    directory: Path, tmp_path: Path, monkeypatch: Monkey
) -> None:
    trained = ParameterServer(SCHEMA, ParameterServerConfig(capacity=1000))
    trained.configure(other_settings(seed=7))
    adagrad = OptimizerSettings(kernels.load("adagrad"), {"lr": 0.1})
    trained.register_optimizer(adagrad)
    look(trained)
    update(trained, 0)
    dump(make_worker([trained], SCHEMA), tmp_path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(native, "_libraries", {})
        first = serve(open_file(directory))
        load(make_worker([first], SCHEMA), tmp_path)
        kill(first)
        second = serve(open_file(directory))
        assert rows(second) == rows(trained)
        with pytest.raises(ExtensionError, match="an update: the library of native:adagrad"):
            update(second, 1)
        kill(second)
    third = serve(open_file(directory))
    third.register_optimizer(adagrad)
    update(third, 2)
    update(trained, 2)
    assert rows(third) == rows(trained)


def test_what_was_cleared_stays_so(directory: Path) -> None:
    first = begun(directory)
    update(first, 1)
    first.clear_embeddings()
    first.configure(other_settings(seed=9))
    kill(first)
    second = serve(open_file(directory))
    assert second.get_embedding_size() == 0
    assert update(second, 1).repeated
    second.configure(other_settings(seed=9))
    look(second)
    assert second.get_embedding_size() == len(SIGNS)


def test_two_servers_do_not_share_a_file(directory: Path, monkeypatch: Monkey) -> None:
    server = begun(directory)
    monkeypatch.setattr(state_file, "_LOCK_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match="another process has it"):
        open_file(directory)
    kill(server)


def test_a_file_that_others_may_read_is_refused(directory: Path) -> None:
    path = path_of(directory, "test")
    path.touch(mode=0o600)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644"):
        open_file(directory)


def test_in_a_full_tmpfs_training_goes_on(directory: Path, caplog: Log) -> None:
    server = begun(directory)
    before = rows(server)
    state = server.state_file
    assert state is not None
    state.array(4096, 1)[0] = 1  # what the core does where it gets no memory
    with caplog.at_level(logging.ERROR):
        look(server, 1)
    (line,) = [record.message for record in caplog.records]
    assert "IF IT IS KILLED, ALL ROWS ARE LOST" in line
    assert not state.path.exists()
    assert rows(server) == before
    assert update(server, 3) == UpdateReport()


def test_rows_of_another_config_are_not_taken_up(directory: Path, caplog: Log) -> None:
    kill(begun(directory))
    with caplog.at_level(logging.ERROR):
        server = serve(open_file(directory), capacity=2000)
    assert "capacity: expected 2000, got 1000" in caplog.text
    assert "CANNOT BE USED" in caplog.text
    assert server.get_embedding_size() == 0
    look(configured(server))
    assert update(server, 1) == UpdateReport()


def test_counts_classes_and_steps_go_on(directory: Path) -> None:
    schema = EmbeddingSchema.load(CONFIG)
    (table,) = [t.number for t in schema.tables if "counted" in schema.groups_of(t.number)]
    signs = np.arange(40, dtype=np.uint64) | np.uint64(
        (1 + list(schema.groups).index("counted")) << 56
    )
    ask = [LookupRequest(number, True, (TableSigns(table, signs),)) for number in range(3)]
    first = serve(open_file(directory), schema, admission_sketch_bytes=1 << 20)
    configured(first).lookup(ask[0])
    assert first.get_embedding_size() == 0  # an appearance is not enough
    kill(first)
    second = serve(open_file(directory), schema, admission_sketch_bytes=1 << 20)
    second.lookup(ask[0])  # sent again: no other appearance
    assert second.get_embedding_size() == 0
    second.lookup(ask[1])
    assert second.get_embedding_size() == len(signs)


def test_rows_of_many_chunks(directory: Path) -> None:
    schema = EmbeddingSchema.load({"slots_config": {"wide": {"dim": 4096}}})
    first = configured(serve(open_file(directory), schema))
    (before,) = first.lookup(LookupRequest(0, True, (TableSigns(0, SIGNS),))).tables
    kill(first)
    second = serve(open_file(directory), schema)
    (after,) = second.lookup(LookupRequest(1, False, (TableSigns(0, SIGNS),))).tables
    np.testing.assert_array_equal(before.rows, after.rows)


def test_a_server_killed_in_a_load_knows_it_has_half(tmp_path: Path, directory: Path) -> None:
    first = begun(directory)
    update(first, 1)
    before = rows(first)
    worker = make_worker([first], first._schema)
    dump(worker, tmp_path)
    committed(first, verified(first, tmp_path))
    kill(first)  # before finish, which says that all servers have theirs
    second = serve(open_file(directory))
    assert second.ready_for_serving()  # to be loaded again
    with pytest.raises(CheckpointError, match="rows are missing"):
        look(second, 2)
    with pytest.raises(CheckpointError, match="rows are missing"):
        update(second, 2)
    load(make_worker([second], second._schema), tmp_path)
    kill(second)
    third = serve(open_file(directory))
    assert rows(third) == before
    reply = third.lookup(LookupRequest(3, True, (TableSigns(0, SIGNS),)))
    assert reply.load_id
    with pytest.raises(RowsReplaced):  # of rows that were looked up before any load
        update(third, 2, load_id=0)
    assert not update(third, 2, load_id=reply.load_id).repeated


def test_a_load_of_some_features_is_known_after_a_kill(tmp_path: Path, directory: Path) -> None:
    first = begun(directory)
    worker = make_worker([first], first._schema)
    dump(worker, tmp_path)
    load(worker, tmp_path, "plain")
    kill(first)
    second = serve(open_file(directory))
    with pytest.raises(RowsReplaced):
        update(second, 2, load_id=0)
    reply = second.lookup(LookupRequest(3, True, (TableSigns(0, SIGNS),)))
    assert not update(second, 2, load_id=reply.load_id).repeated


def test_a_server_that_lost_its_rows_takes_updates_of_rows_that_a_load_had_brought(
    tmp_path: Path, directory: Path
) -> None:
    """Training goes on, and they are counted as missing."""
    first = begun(directory)
    worker = make_worker([first], first._schema)
    dump(worker, tmp_path)
    load(worker, tmp_path)
    reply = first.lookup(LookupRequest(3, True, (TableSigns(0, SIGNS),)))
    (tmp_path / "elsewhere").mkdir()
    second = configured(serve(open_file(tmp_path / "elsewhere")))
    assert update(second, 2, load_id=reply.load_id).num_missing == len(SIGNS)


def test_rows_that_have_no_room_are_kept(directory: Path, monkeypatch: Monkey) -> None:
    state = open_file(directory)
    state.make_void()  # a record of updates needs memory, too
    with pytest.raises(StoreError, match="no memory"):
        serve(state)
    first = begun(directory)
    before = rows(first)
    kill(first)
    with monkeypatch.context() as patch:
        attach = Mock(side_effect=MemoryError("shard 1: no memory"))
        patch.setattr(ServerSettings, "_new_store", attach)
        with pytest.raises(StoreError, match="The file is kept"):
            serve(open_file(directory))
    second = serve(open_file(directory))
    assert rows(second) == before


# --- hostile and broken files ---------------------------------------------------------------


def spoil(change: Callable[[int], object], directory: Path) -> str:
    """Let ``change`` have the file of a killed server; returns why it is not taken up."""
    kill(begun(directory))
    path = path_of(directory, "test")
    descriptor = os.open(path, os.O_RDWR)
    change(descriptor)
    os.close(descriptor)
    try:
        state = open_file(directory)
        why = state.problem or ""
        server = serve(state.renewed() if why else state)
        # Other numbers may say that rows are gone, as they are after an eviction.
        assert server.get_embedding_size() <= len(SIGNS)
        if server._settings.state is not None:
            server._settings.state.store.check()
        kill(server)
    finally:
        path.unlink(missing_ok=True)  # a failure leaves it locked
    return why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file: os.ftruncate(file, 20), "it is not a state file"),
        (lambda file: os.ftruncate(file, 1 << 30), "its length"),
        (lambda file: os.pwrite(file, b"GARBAGE", 0), "it is not a state file"),
        (lambda file: os.pwrite(file, b"\x63", 16), "layout: expected 1, got 99"),
        (lambda file: os.pwrite(file, b"\1", 4096), "it had run out of memory"),
        (
            lambda file: [os.pwrite(file, b"!!", place + 40) for place in state_file._NOTES],
            "neither of its notes is whole",
        ),
    ],
)
def test_files_of_others_are_refused(
    directory: Path, change: Callable[[int], object], why: str
) -> None:
    assert why in spoil(change, directory)
    kill(begun(directory))
    other = StateFile(path_of(directory, "test"), SHARDS + 1)
    assert other.problem == "num_hashmap_internal_shards: expected 3, got 2"
    other.remove()
    other.close()


@tries(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_number_in_a_file_is_believed(directory: Path, data: st.DataObject) -> None:
    """Whatever stands in a shard's part: rows of a store that is whole, or none; no crash."""
    where = st.sampled_from(
        [
            *range(0, 128, 8),  # counts, clocks, the journal: see kept.pxd
            248,  # policies
            1272,
            1280,  # parts
            7416,
            7424,
            7432,  # formats
            8440,
            8448,  # chunks
            0x200000,
            0x200008,
            0x200010,
            0x200020,  # segments
            *range(1 << 36, (1 << 36) + 128, 8),  # rows
        ]
    )
    changes = data.draw(
        st.lists(st.tuples(where, st.integers(0, (1 << 64) - 1)), min_size=1, max_size=3)
    )

    def change(file: int) -> None:
        for place, value in changes:
            os.pwrite(file, value.to_bytes(8, "little"), (1 << 32) + place)

    spoil(change, directory)


# --- which file -----------------------------------------------------------------------------


def opened(directory: Path, address: str, memory_limit: int = 1 << 20) -> StateFile | None:
    config = ParameterServerConfig(state_dir=str(directory), memory_limit=memory_limit)
    return state_file.open_state(config, address, 0, 1)


def test_a_job_does_not_find_the_file_of_another(directory: Path, monkeypatch: Monkey) -> None:
    files = [opened(directory, address) for address in ("tcp://a:1", "tcp://a:2")]
    monkeypatch.setenv("PERSIA_RUN_ID", "tuesday")
    named = opened(directory, "tcp://a:1")
    assert named is not None
    assert len({file.path for file in (*files, named) if file is not None}) == 3
    named.close()
    again = opened(directory, "tcp://a:1")
    assert again is not None
    assert again.path == named.path


def test_files_of_jobs_that_have_ended_are_removed(
    directory: Path, monkeypatch: Monkey
) -> None:
    paths = {}
    for name, parent in (("ended", ("x", 1, 2)), ("runs", ("x", 3, 4)), ("unknown", None)):
        state = StateFile(path_of(directory, name), SHARDS, parent)
        state.note(facts={})
        paths[name] = state.path
        state.close()
    held = StateFile(path_of(directory, "held"), SHARDS, ("x", 1, 2))
    held.note(facts={})
    monkeypatch.setattr(state_file, "_is_running", lambda parent: parent != ("x", 1, 2))
    remove_stale(directory)
    assert [name for name, path in paths.items() if not path.exists()] == ["ended"]
    assert held.path.exists()


def test_without_room_it_is_done_without(
    directory: Path, monkeypatch: Monkey, caplog: Log
) -> None:
    off = ParameterServerConfig(state_dir=str(directory), keep_state=False)
    monkeypatch.setattr(state_file, "_MIN_FREE_BYTES", 1 << 61)
    with caplog.at_level(logging.WARNING):
        assert state_file.open_state(off, "a", 0, 1) is None
        assert not caplog.records
        assert opened(directory, "a", 1 << 62) is None
        assert "MB free, expected at least" in caplog.text
        assert opened(directory / "nothing", "a") is None
        assert "No such file" in caplog.text


@pytest.mark.parametrize("run_id", ["", "tuesday"])
def test_files_that_ended_jobs_left(directory: Path, monkeypatch: Monkey, run_id: str) -> None:
    """A process goes on from its own; that of ended jobs goes, if none has a name."""
    if run_id:
        monkeypatch.setenv("PERSIA_RUN_ID", run_id)
    old = opened(directory, "another")
    assert old is not None
    old.note(facts={"who": "first"})
    old.close()
    monkeypatch.setattr(state_file, "_MIN_FREE_BYTES", 1 << 61)
    for is_running in (True, False):
        monkeypatch.setattr(state_file, "_is_running", lambda parent, it=is_running: it)
        is_found = is_running or bool(run_id)
        again = opened(directory, "another" if is_found else "a", 1 << 62)
        assert (again is not None) is old.path.exists() is is_found
        if again is not None:
            assert "facts" in again.notes
            again.close()


def test_a_change_log_goes_on_with_its_history(directory: Path, tmp_path: Path) -> None:
    """What a checkpoint was promised is kept by the process that recovers the rows."""
    logging_changes: dict[str, Any] = {
        "enable_incremental_update": True,
        "incremental_dir": str(tmp_path),
    }

    def promise(server: ParameterServer) -> Any:
        assert server._incremental is not None
        return server._incremental.begin_wait(server._state_to_save)["change_log"]

    first = configured(serve(open_file(directory), **logging_changes))
    look(first)
    before = promise(first)
    assert first._incremental is not None
    first._incremental.note_loaded({"before": 3})
    kill(first)
    second = serve(open_file(directory), **logging_changes)
    after = promise(second)
    assert after["history"] == before["history"]
    assert after["reached"] == {"before": 3}
    assert after["packet"] >= before["packet"]
    kill(second)
    empty = configured(serve(StateFile(path_of(directory, "other"), SHARDS), **logging_changes))
    assert promise(empty)["history"] != before["history"]
    kill(empty)


@pytest.mark.parametrize("gradient", [100.0, 200.0])
def test_rows_that_a_kernel_fails_for_are_put_back_from_the_journal(
    directory: Path, gradient: float
) -> None:
    server = serve(open_file(directory))
    server.configure(other_settings())
    server.register_optimizer(OptimizerSettings(kernels.load("faulty"), {"lr": 0.5}))
    parts = (TableSigns(0, SIGNS),)
    server.lookup(LookupRequest(0, True, parts))
    (before,) = server.read_embedding(parts)
    gradients = np.ones((len(SIGNS), 4), np.float32)
    failed = np.isin(np.arange(len(SIGNS)), (5, 150, 299))
    gradients[failed, 0] = gradient
    update = UpdateRequest((0, 0), (TableGradients(0, SIGNS, None, gradients),))
    with pytest.raises(KernelError, match="3 rows are as they were"):
        server.update(update)
    (after,) = server.read_embedding(parts)
    assert before.states is not None
    assert after.states is not None
    np.testing.assert_array_equal(after.values[failed], before.values[failed])
    np.testing.assert_array_equal(after.states[failed], before.states[failed])
    np.testing.assert_array_equal(after.values[~failed], before.values[~failed] - 0.5)
