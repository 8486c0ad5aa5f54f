"""A server that goes on from what another process left, or says why it does not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from persia._core.store.store import EmbeddingStore
from persia._rpc.messages import (
    LookupRequest,
    TableGradients,
    TableSigns,
    UpdateReply,
    UpdateRequest,
)
from persia._server import state_file
from persia._server.row_settings import ServerSettings
from persia._server.service import ParameterServer
from persia._server.state_file import StateFile, path_of, remove_stale
from persia.config import EmbeddingSchema, ParameterServerConfig
from persia.errors import CheckpointError, ConfigError, StoreError
from tests.support.profiles import tries
from tests.support.saving import committed, dump, load, verified
from tests.support.services import ADAGRAD, SETTINGS, SGD, make_worker
from tests.support.services import settings as other_settings

CONFIG: dict[str, Any] = {
    "slots_config": {
        "plain": {"dim": 4},
        "counted": {"dim": 4},
    },
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


def begun(directory: Path) -> ParameterServer:
    server = serve(open_file(directory))
    server.configure(SETTINGS)
    server.register_optimizer(ADAGRAD)
    server.lookup(LookupRequest(0, True, (TableSigns(0, SIGNS),)))
    return server


def kill(server: ParameterServer) -> None:
    """End it as SIGKILL does: nothing is written, and the lock goes."""
    assert server.state_file is not None
    server.state_file.close()


def update(server: ParameterServer, number: int) -> UpdateReply:
    gradients = np.full((len(SIGNS), 4), 1.0 + number, np.float32)
    return server.update(
        UpdateRequest((5, number), (TableGradients(0, SIGNS, None, gradients),))
    )


def rows(server: ParameterServer) -> bytes:
    (entries,) = server.read_embedding((TableSigns(0, SIGNS),))
    assert entries.states is not None
    return entries.signs.tobytes() + entries.values.tobytes() + entries.states.tobytes()


def test_w17_rows_settings_and_applied_updates_are_there_again(directory: Path) -> None:
    first = begun(directory)
    assert update(first, 0) == UpdateReply(0, False)
    assert update(first, 7) == UpdateReply(0, False)
    before = rows(first)
    kill(first)
    second = serve(open_file(directory))
    assert second.ready_for_serving()
    assert rows(second) == before
    assert second.stats()["recovered_rows"] == len(SIGNS)
    second.configure(SETTINGS)
    second.register_optimizer(ADAGRAD)
    assert update(second, 7) == UpdateReply(0, True)
    assert rows(second) == before
    assert update(second, 8) == UpdateReply(0, False)
    with pytest.raises(ConfigError, match="seed: expected 7"):
        second.configure(other_settings(seed=8))
    kill(second)
    third = serve(open_file(directory))
    assert update(third, 8).repeated
    assert update(third, 0).repeated


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
    second.lookup(LookupRequest(0, True, (TableSigns(0, SIGNS),)))
    assert second.get_embedding_size() == len(SIGNS)
    kill(second)


def test_two_servers_do_not_share_a_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_full_tmpfs_makes_the_file_void_and_training_goes_on(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = begun(directory)
    before = rows(server)
    state = server.state_file
    assert state is not None
    state.array(4096, 1)[0] = 1  # what the core does where it gets no memory
    with caplog.at_level(logging.ERROR):
        server.lookup(LookupRequest(1, True, (TableSigns(0, SIGNS),)))
    (line,) = [record.message for record in caplog.records]
    assert "IF IT IS KILLED, ALL ROWS ARE LOST" in line
    assert not state.path.exists()
    assert rows(server) == before
    assert update(server, 3) == UpdateReply(0, False)
    kill(server)


def test_rows_of_another_config_are_not_taken_up(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill(begun(directory))
    with caplog.at_level(logging.ERROR):
        server = serve(open_file(directory), capacity=2000)
    assert "capacity: expected 2000, got 1000" in caplog.text
    assert "CANNOT BE USED" in caplog.text
    assert server.get_embedding_size() == 0
    server.configure(SETTINGS)
    server.register_optimizer(SGD)
    server.lookup(LookupRequest(0, True, (TableSigns(0, SIGNS),)))
    assert update(server, 1) == UpdateReply(0, False)
    kill(server)


def test_counts_classes_and_steps_go_on(directory: Path) -> None:
    schema = EmbeddingSchema.load(CONFIG)
    (table,) = [t.number for t in schema.tables if "counted" in schema.groups_of(t.number)]
    signs = np.arange(40, dtype=np.uint64) | np.uint64(
        (1 + list(schema.groups).index("counted")) << 56
    )
    ask = [LookupRequest(number, True, (TableSigns(table, signs),)) for number in range(3)]
    first = serve(open_file(directory), schema, admission_sketch_bytes=1 << 20)
    first.configure(SETTINGS)
    first.register_optimizer(SGD)
    first.lookup(ask[0])
    assert first.get_embedding_size() == 0  # an appearance is not enough
    kill(first)
    second = serve(open_file(directory), schema, admission_sketch_bytes=1 << 20)
    second.lookup(ask[0])  # sent again: no other appearance
    assert second.get_embedding_size() == 0
    second.lookup(ask[1])
    assert second.get_embedding_size() == len(signs)
    kill(second)


def test_rows_of_many_chunks(directory: Path) -> None:
    schema = EmbeddingSchema.load({"slots_config": {"wide": {"dim": 4096}}})
    signs = np.arange(800, dtype=np.uint64) | np.uint64(1 << 56)
    state = StateFile(path_of(directory, "test"), 1)
    first = serve(state, schema, num_hashmap_internal_shards=1)
    first.configure(SETTINGS)
    first.register_optimizer(SGD)
    (before,) = first.lookup(LookupRequest(0, True, (TableSigns(0, signs),))).tables
    assert not state.is_void
    kill(first)
    second = serve(
        StateFile(path_of(directory, "test"), 1), schema, num_hashmap_internal_shards=1
    )
    (after,) = second.lookup(LookupRequest(1, False, (TableSigns(0, signs),))).tables
    np.testing.assert_array_equal(before.rows, after.rows)
    kill(second)


def test_a_server_killed_in_a_load_knows_that_it_has_half(
    tmp_path: Path, directory: Path
) -> None:
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
        second.lookup(LookupRequest(2, True, (TableSigns(0, SIGNS),)))
    with pytest.raises(CheckpointError, match="rows are missing"):
        update(second, 2)
    load(make_worker([second], second._schema), tmp_path)
    kill(second)
    third = serve(open_file(directory))
    assert rows(third) == before
    assert not update(third, 2).repeated
    kill(third)


def test_rows_that_memory_is_too_small_for_are_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(directory)
    before = rows(first)
    kill(first)

    def attach(*_: Any, **__: Any) -> EmbeddingStore:
        raise MemoryError("shard 1: no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ServerSettings, "_new_store", attach)
        with pytest.raises(StoreError, match="The file is kept"):
            serve(open_file(directory))
    second = serve(open_file(directory))
    assert rows(second) == before
    kill(second)


# --- hostile and broken files ---------------------------------------------------------------


def spoil(change: Callable[[int], None], directory: Path) -> str:
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


def test_files_that_are_not_ours_are_not_taken_up(directory: Path) -> None:
    def cut(size: int) -> Callable[[int], None]:
        return lambda file: os.ftruncate(file, size)

    def put(place: int, what: bytes) -> Callable[[int], None]:
        def change(file: int) -> None:
            os.pwrite(file, what, place)

        return change

    def many(*changes: Callable[[int], None]) -> Callable[[int], None]:
        def change(file: int) -> None:
            for one in changes:
                one(file)

        return change

    kill(begun(directory))
    other = StateFile(path_of(directory, "test"), SHARDS + 1)
    assert other.problem == "num_hashmap_internal_shards: expected 3, got 2"
    other.remove()
    other.close()
    assert spoil(cut(20), directory) == "it is not a state file"
    assert "its length" in spoil(cut(1 << 30), directory)
    assert spoil(put(0, b"GARBAGE"), directory) == "it is not a state file"
    assert spoil(put(16, b"\x63"), directory) == "layout: expected 1, got 99"
    assert spoil(put(4096, b"\1"), directory).startswith("it had run out of memory")
    both = many(*(put(place + 40, b"!!") for place in state_file._NOTES))
    assert spoil(both, directory) == "neither of its notes is whole"


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


def test_a_job_does_not_find_the_file_of_another(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ParameterServerConfig(state_dir=str(directory), memory_limit="1MiB")

    def opened(address: str) -> StateFile:
        state = state_file.open_state(config, address, 0, 1)
        assert state is not None
        return state

    files = [opened("tcp://127.0.0.1:1"), opened("tcp://127.0.0.1:2")]
    monkeypatch.setenv("PERSIA_RUN_ID", "tuesday")
    files.append(opened("tcp://127.0.0.1:1"))
    assert len({file.path for file in files}) == 3
    files[2].close()
    assert opened("tcp://127.0.0.1:1").path == files[2].path


def test_files_of_jobs_that_have_ended_are_removed(directory: Path) -> None:
    names = {}
    for name, parent in (("ended", ("x", 1, 2)), ("runs", ("x", 3, 4)), ("unknown", None)):
        state = StateFile(path_of(directory, name), SHARDS, parent)
        state.note(facts={})
        names[name] = state.path
        state.close()
    held = StateFile(path_of(directory, "held"), SHARDS, ("x", 1, 2))
    held.note(facts={})
    removed = remove_stale(directory, lambda parent: parent != ("x", 1, 2))
    assert removed == [names["ended"]]


def test_without_room_it_is_done_without(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ParameterServerConfig(state_dir=str(directory), memory_limit=1 << 62)
    missing = ParameterServerConfig(state_dir=str(directory / "nothing"))
    off = ParameterServerConfig(state_dir=str(directory), keep_state=False)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        assert state_file.open_state(off, "a", 0, 1) is None
        assert not caplog.records
        patch.setattr(state_file, "_MIN_FREE_BYTES", 1 << 61)
        assert state_file.open_state(config, "a", 0, 1) is None
        assert "MB free, expected at least" in caplog.text
        assert state_file.open_state(missing, "a", 0, 1) is None
        assert "No such file" in caplog.text


def test_a_record_of_updates_needs_memory(directory: Path) -> None:
    state = open_file(directory)
    state.make_void()
    with pytest.raises(StoreError, match="no memory"):
        ParameterServer(
            SCHEMA, ParameterServerConfig(num_hashmap_internal_shards=SHARDS), state_file=state
        )


def full(directory: Path) -> ParameterServerConfig:
    """Settings that a file system without room for another file would refuse."""
    return ParameterServerConfig(state_dir=str(directory), memory_limit=1 << 62)


def left_behind(config: ParameterServerConfig, address: str) -> Path:
    """Return the file of a process that was killed."""
    state = state_file.open_state(config, address, 0, 1)
    assert state is not None
    state.note(facts={"who": "first"})
    state.close()
    return state.path


def found_again(config: ParameterServerConfig, address: str) -> bool:
    state = state_file.open_state(config, address, 0, 1)
    assert state is not None
    state.close()
    return "facts" in state.notes


def test_rows_that_fill_the_file_system_are_found_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(full(directory), "a")
    monkeypatch.setattr(state_file, "_MIN_FREE_BYTES", 1 << 61)  # they took the room
    assert found_again(full(directory), "a")


def test_a_named_run_outlives_what_started_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_RUN_ID", "tuesday")
    monkeypatch.setattr(state_file, "_is_running", lambda parent: False)
    left_behind(full(directory), "a")
    assert found_again(full(directory), "a")


def test_what_ended_jobs_left_goes_though_it_fills_the_file_system(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = left_behind(full(directory), "another")
    monkeypatch.setattr(state_file, "_is_running", lambda parent: False)
    monkeypatch.setattr(state_file, "_MIN_FREE_BYTES", 1 << 61)
    assert state_file.open_state(full(directory), "a", 0, 1) is None
    assert not old.exists()
