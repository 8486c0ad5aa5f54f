"""Dumps and loads that fail half way: nothing is left behind, and nobody trains on a half."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._files import catalog
from persia._files.checkpoint_paths import below
from persia._files.part_writer import PartWriter
from persia._files.parts import read_part, take
from persia._files.storage import LocalStorage
from persia._files.writer_lock import sole_writer
from persia._rpc.messages import LoadRequest, LookupRequest
from persia._server import incremental, loads
from persia._training import checkpoint
from persia._training.checkpoint import CheckpointReader, CheckpointWriter
from persia.errors import CheckpointError, ConfigError
from tests.support.saving import (
    Slow,
    Trained,
    add_part,
    dump,
    held_load,
    is_in,
    load,
    load_changes,
    rows_of,
    train,
    writing_changes,
)
from tests.support.services import (
    ADAGRAD,
    ADAM,
    features,
    gradient,
    make_servers,
    make_worker,
    settings,
)
from tests.support.waiting import until


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def no_more_than(folder: Path, before: list[Path]) -> bool:
    return files_in(folder) == before


# --- dumps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", ["rows", "dense", "manifest"])
def test_a_failed_dump_leaves_no_files(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    worker, _ = trained
    dump(worker, tmp_path)
    before = files_in(tmp_path)

    def then_fails(function: Any) -> Any:
        def fails(*arguments: Any) -> Any:
            found = function(*arguments)
            if fails_at != "rows" or arguments[0]._server == 1:
                raise CheckpointError("No space left on device")
            return found

        return fails

    if fails_at == "rows":
        monkeypatch.setattr(PartWriter, "finish", then_fails(PartWriter.finish))
    elif fails_at == "dense":
        name = "_write_dense"
        monkeypatch.setattr(checkpoint, name, then_fails(checkpoint._write_dense))
    else:  # it is there already when its writer hears of a failure
        monkeypatch.setattr(catalog, "publish", then_fails(catalog.publish))
    saver = CheckpointWriter(worker)
    frozen = saver.begin(3, lambda: {"dense.pt": b"x"})
    with pytest.raises(CheckpointError, match="No space left"):
        saver.finish(frozen, str(tmp_path), 1, blocking=True)
    until(partial(no_more_than, tmp_path, before))
    monkeypatch.undo()
    dump(worker, tmp_path)
    load(worker, tmp_path)


def test_w19_two_jobs_do_not_write_into_one_folder(trained: Trained, tmp_path: Path) -> None:
    worker, _ = trained
    with (
        sole_writer(LocalStorage(tmp_path)),
        pytest.raises(CheckpointError, match="is writing here"),
    ):
        dump(worker, tmp_path)
    dump(worker, tmp_path)  # the cut that was begun was ended


def test_packets_of_two_jobs_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,), (second,) = writing_changes(tmp_path), writing_changes(tmp_path)
    for server in (first, second):
        train(make_worker([server]), 0, 1)
    assert first._incremental is not None
    first._incremental.flush()  # as it does by itself
    with pytest.raises(CheckpointError, match="is writing here"):
        second.flush_changes()
    first.flush_changes()  # the end of its job, though it was not closed
    assert not list(tmp_path.rglob("*.lock"))
    second.flush_changes()
    # One that fails leaves no files; its rows come with the next.
    before = files_in(tmp_path)
    train(make_worker([second]), 1, 1)

    def fails(*_: Any) -> Any:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(catalog, "publish", fails)
    with pytest.raises(CheckpointError, match="No space"):
        second.flush_changes()
    assert files_in(tmp_path) == before
    monkeypatch.undo()
    second.close()
    assert not list(tmp_path.rglob("*.lock"))
    load_changes(tmp_path, [second])


def test_the_end_of_a_server_waits_for_a_packet_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_there, may_go = threading.Event(), threading.Event()

    def stands(*_: Any) -> Any:
        is_there.set()
        assert may_go.wait(60)
        raise CheckpointError("at last")

    monkeypatch.setattr(incremental, "LAST_PACKET_S", 0.01)
    monkeypatch.setattr(incremental, "FLUSH_S", 0.01)
    monkeypatch.setattr(PartWriter, "finish", stands)
    (server,) = writing_changes(tmp_path)
    train(make_worker([server]), 0, 1)
    assert is_there.wait(60)
    server.close()
    assert "this server ends without it" in caplog.text
    may_go.set()
    until(lambda: "at last" in caplog.text)


# --- loads ----------------------------------------------------------------------------------


@pytest.fixture
def loading(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Slow, CheckpointReader]]:
    """A load that has dropped the rows and restored none."""
    worker, _ = trained
    dump(worker, tmp_path)
    with held_load(worker, tmp_path, monkeypatch) as held:
        yield held


def test_training_is_refused_while_a_load_goes_on(
    trained: Trained, loading: tuple[Slow, CheckpointReader]
) -> None:
    worker, servers = trained
    slow, loader = loading
    request = features({"sum": [[1, 2]]}, 9)
    for refused in (
        partial(worker.lookup_direct, request),
        worker.clear_embeddings,
        partial(servers[0].lookup, LookupRequest(3, True, ())),
    ):
        with pytest.raises(CheckpointError, match="a load is replacing its rows"):
            refused()
    slow.may_go.set()
    loader.wait()
    before = rows_of(servers)
    worker.update(gradient(worker.lookup_direct(request), (1, 9)))
    assert rows_of(servers) != before


def test_a_retry_after_a_load_is_applied_once(trained: Trained, tmp_path: Path) -> None:
    """Updates of a client that a server has applied stay applied: its ledger is no row."""
    worker, servers = trained
    result = worker.lookup_direct(features({"sum": [[1, 2]]}, 9))
    worker.update(gradient(result, (1, 9)))
    dump(worker, tmp_path)
    load(worker, tmp_path)
    before = rows_of(servers)
    assert worker.update(gradient(result, (1, 9))).repeated
    assert rows_of(servers) == before


def test_a_load_waits_for_requests(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    train(worker, 3, 1)
    before = rows_of(servers)
    monkeypatch.setattr(loads, "_PATIENCE_S", 0.01)
    with (
        servers[1]._loads.whole_rows(),
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
    assert rows_of(servers).items() <= before.items() or rows_of(servers) != before
    train(worker, 4, 1)


def test_a_load_that_is_given_up_while_it_waits_drops_no_row(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    before = rows_of(servers)
    request = LoadRequest(1, "verify", str(tmp_path), "", None)
    commit = replace(request, step="commit")
    until(partial(is_in, servers[0], request, "verified"))
    with servers[0]._loads.whole_rows():
        assert servers[0].load(commit).state == "loading"
        servers[0].load(replace(request, step="drop"))
    until(partial(is_in, servers[0], commit, "failed"))
    assert rows_of(servers) == before
    train(worker, 3, 1)


def test_a_trainer_that_dies_leaves_no_mixture(trained: Trained, tmp_path: Path) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    before = rows_of(servers)
    request = LoadRequest(1, "verify", str(tmp_path), "", None)
    for server in servers:
        until(partial(is_in, server, request, "verified"))
    until(partial(is_in, servers[0], replace(request, step="commit"), "loaded"))
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


def test_missing_rows_of_features_are_named(trained: Trained, tmp_path: Path) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    request = LoadRequest(1, "verify", str(tmp_path), "", ("sqrt", "raw"))
    until(partial(is_in, servers[0], request, "verified"))
    until(partial(is_in, servers[0], replace(request, step="commit"), "loaded"))
    with pytest.raises(CheckpointError, match="rows of raw, sqrt are missing"):
        train(worker, 3, 1)
    load(worker, tmp_path, "raw")
    with pytest.raises(CheckpointError, match="rows of sqrt are missing"):
        train(worker, 3, 1)
    worker.clear_embeddings()
    train(worker, 3, 1)


def test_more_rows_than_there_is_room_for_are_refused(trained: Trained, tmp_path: Path) -> None:
    worker, _ = trained
    dump(worker, tmp_path)
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
    lost = count - sum(len(server._configured.store) for server in exact if server._configured)
    assert lost > 0  # in shards with more than their share
    assert [note for note in notes if f"{lost} rows did not fit" in note]


def test_a_row_in_two_parts_is_found_before_anything_changes(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    twice, _ = add_part(tmp_path, "twice", lambda block: take(block, np.arange(1)))
    before = rows_of(servers)
    with pytest.raises(CheckpointError, match=f"signs: {twice.signs[0]} comes twice"):
        load(worker, tmp_path)
    assert rows_of(servers) == before
    train(worker, 3, 1)


def test_rows_of_another_server_in_a_packet_are_found_before_anything_changes(
    tmp_path: Path,
) -> None:
    """Else a row would be in the packets of two servers, and which one counts would be luck."""
    servers = writing_changes(tmp_path, 2)
    train(make_worker(servers), 0, 1)
    for server in servers:
        server.flush_changes()
        server.close()
    there, here = (LocalStorage(tmp_path / name) for name in ("s0", "s1"))
    part = catalog.load(there).parts[0]
    manifest = catalog.load(here)
    with PartWriter(here, f"{manifest.id}/twice", server=1) as writer:
        writer.add(part.table, take(read_part(there, part), np.arange(1)))
        parts = (*manifest.parts, *writer.finish())
    catalog.publish(here, replace(manifest, parts=parts))
    fresh = make_servers(1, optimizer=ADAGRAD)
    other = make_worker(fresh)
    train(other, 1, 1)
    before = rows_of(fresh)
    with pytest.raises(CheckpointError, match=r"expected those of server 1 of 2"):
        CheckpointReader(other).verify("", str(tmp_path), None)
    assert rows_of(fresh) == before


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"servers": []},
        {"servers": {"hyper_parameters": [["seed"]], "optimizer": {}}},
        {"servers": {"hyper_parameters": {"initialization": "x"}, "optimizer": {}}},
        {"servers": {"hyper_parameters": "x", "optimizer": None}},
    ],
)
def test_what_servers_were_told_may_be_anything_in_a_file(
    trained: Trained, tmp_path: Path, extras: dict[str, Any]
) -> None:
    """Servers that have settings need none of it; others are told that it is not there."""
    worker, servers = trained
    dump(worker, tmp_path)
    storage = LocalStorage(tmp_path)
    catalog.publish(storage, replace(catalog.load(storage), extras=extras))
    fresh = make_servers(1, optimizer=ADAGRAD)
    load(make_worker(fresh), tmp_path)
    assert rows_of(fresh) == rows_of(servers)
    with pytest.raises(CheckpointError, match=r"extras\.servers: expected hyper_parameters"):
        loads.settings_of(LoadRequest(1, "verify", str(tmp_path), "", None))


def test_a_store_that_was_replaced_since_verify_takes_no_rows(
    trained: Trained, tmp_path: Path
) -> None:
    worker, _ = trained
    dump(worker, tmp_path)
    (server,) = make_servers(1, optimizer=ADAGRAD)
    request = LoadRequest(1, "verify", str(tmp_path), "", None)
    commit = replace(request, step="commit")
    until(partial(is_in, server, request, "verified"))
    server.register_optimizer(ADAM)
    until(partial(is_in, server, commit, "failed"))
    assert "another seed or optimizer" in server.load(commit).error
    assert server.get_embedding_size() == 0
    # From commit on it is the other way round: who would replace the store is refused.
    request, commit = replace(request, load_id=2), replace(commit, load_id=2)
    until(partial(is_in, server, request, "verified"))
    with server._loads.whole_rows():
        assert server.load(commit).state == "loading"
        with pytest.raises(CheckpointError, match="a load is replacing its rows"):
            server.configure(settings(seed=8))
        with pytest.raises(CheckpointError, match="a load is replacing its rows"):
            server.register_optimizer(ADAGRAD)
        server.register_optimizer(replace(ADAM, options={"lr": 0.2}))  # the same state
    until(partial(is_in, server, commit, "loaded"))
    server.load(replace(request, step="finish"))
    assert server.get_embedding_size() == sum(worker.get_embedding_size())


def test_no_packet_is_written_in_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,) = writing_changes(tmp_path / "changes")
    worker = make_worker([server])
    train(worker, 0, 1)
    dump(worker, tmp_path / "full")
    server.flush_changes()
    train(worker, 1, 1)
    with (
        held_load(worker, tmp_path / "full", monkeypatch),
        pytest.raises(CheckpointError, match="a load is replacing"),
    ):
        server.flush_changes()
    server.close()
    url = below(str(tmp_path / "changes"), "s0")
    assert catalog.load(url).kind == "full"  # the changes before the load mean nothing now
    monkeypatch.undo()
    load_changes(tmp_path / "changes", [server])
