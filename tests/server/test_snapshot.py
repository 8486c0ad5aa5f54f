"""Dump and load by the servers: any number to any other, failures told, lookups not held up."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._core.store.snapshot import Cut
from persia._files import catalog
from persia._files.part_writer import PartWriter
from persia._files.parts import take
from persia._files.storage import LocalStorage
from persia._rpc.messages import CutRequest, LoadRequest, OptimizerSettings, WriteRequest
from persia._server import snapshot, throttle
from persia._server.incremental import IncrementalWriter
from persia._server.service import ParameterServer
from persia._training.checkpoint import CheckpointWriter
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, ParameterServerConfig
from persia.errors import CheckpointError, NotConfigured, PersiaError
from tests.support.saving import (
    Slow,
    Trained,
    add_part,
    assert_alike,
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
    CONFIG,
    SCHEMA,
    features,
    gradient,
    make_servers,
    make_worker,
    read_rows,
    settings,
    sign,
)
from tests.support.waiting import until


@pytest.mark.parametrize("count", [1, 2, 3])
def test_w19_rows_move_to_any_number_of_servers(
    trained: Trained, tmp_path: Path, count: int
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    fresh = make_servers(count, optimizer=ADAGRAD)
    other = make_worker(fresh)
    assert load(other, tmp_path) == []
    assert_alike((worker, servers), (other, fresh), 3, 3)


def test_w19_a_second_dump_takes_the_place_of_the_first(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    train(worker, 3, 1)
    dump(worker, tmp_path)
    assert len(catalog.ids(LocalStorage(tmp_path))) == 1
    dump(worker, tmp_path, keep_last=2)
    assert len(catalog.ids(LocalStorage(tmp_path))) == 2
    fresh = make_servers(optimizer=ADAGRAD)
    load(make_worker(fresh), tmp_path)
    assert rows_of(fresh) == rows_of(servers)


def test_w19_a_load_replaces_what_was_held(trained: Trained, tmp_path: Path) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    before = rows_of(servers)
    train(worker, 3, 3)
    assert rows_of(servers).keys() > before.keys()
    load(worker, tmp_path)
    assert rows_of(servers) == before


def test_a_load_by_feature_keeps_all_others(trained: Trained, tmp_path: Path) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
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


def test_the_cut_is_of_its_moment_though_training_goes_on(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    before = rows_of(servers)
    saver = CheckpointWriter(worker)
    frozen = saver.begin(3, dict)
    train(worker, 3, 3)
    saver.finish(frozen, str(tmp_path), 1, blocking=True)
    load(worker, tmp_path)
    assert rows_of(servers) == before


def test_w63_lookups_and_updates_go_on_while_rows_are_written(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, servers = trained
    before = rows_of(servers)
    may_write = threading.Event()
    real = PartWriter.add

    def add(*arguments: Any) -> None:
        assert may_write.wait(60)
        real(*arguments)

    monkeypatch.setattr(PartWriter, "add", add)
    saver = CheckpointWriter(worker)
    saver.finish(saver.begin(3, dict), str(tmp_path), 1, blocking=False)
    train(worker, 3, 3)  # nothing can be written before this has ended
    may_write.set()
    saver.wait()
    load(worker, tmp_path)
    assert rows_of(servers) == before


def test_w32_a_failure_is_told_and_the_next_dump_succeeds(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, servers = trained
    dump(worker, tmp_path / "there")
    real = PartWriter.finish

    def fails(writer: Any) -> Any:
        if writer._server == 1:
            raise OSError(28, "No space left on device")
        return real(writer)

    monkeypatch.setattr(PartWriter, "finish", fails)
    with pytest.raises(CheckpointError, match=r"server 1 .*No space left"):
        dump(worker, tmp_path / "there")
    assert len(catalog.ids(LocalStorage(tmp_path / "there"))) == 1
    saver = CheckpointWriter(worker)
    saver.finish(saver.begin(3, dict), str(tmp_path / "other"), 1, blocking=False)
    with pytest.raises(CheckpointError, match="No space left"):
        saver.wait()
    monkeypatch.undo()
    dump(worker, tmp_path / "other")
    load(worker, tmp_path / "other")
    assert rows_of(servers)


def test_w31_a_step_that_is_over_is_never_seen_to_go_on(
    trained: Trained, tmp_path: Path
) -> None:
    worker, (server, _) = trained
    dump(worker, tmp_path)
    for number in range(3):
        request = LoadRequest(number, "verify", str(tmp_path), "", None)
        # The step is begun by the call itself, so its answer already is of it.
        assert server.load(request).state == "verifying"
        until(partial(is_in, server, request, "verified"))
        assert server.load(request).state == "verified"


def test_steps_of_a_load_that_do_not_follow_are_refused(
    trained: Trained, tmp_path: Path
) -> None:
    worker, (server, _) = trained
    dump(worker, tmp_path)
    with pytest.raises(CheckpointError, match="verified"):
        server.load(LoadRequest(5, "commit", str(tmp_path), "", None))
    with pytest.raises(CheckpointError, match="no cut"):
        server.cut_status(77)
    with pytest.raises(CheckpointError, match="no cut"):
        server.write_cut(WriteRequest(77, str(tmp_path), "00000001-00000000"))
    server.end_cut(77, True)  # nothing: it has ended


def test_w33_a_checkpoint_without_rows(tmp_path: Path) -> None:
    servers = make_servers(3)
    worker = make_worker(servers)
    dump(worker, tmp_path)
    train(worker, 0, 1)
    load(worker, tmp_path)
    assert worker.get_embedding_size() == [0, 0, 0]


def test_w33_more_threads_than_files(trained: Trained, tmp_path: Path) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    config = ParameterServerConfig(memory_limit=0)
    fresh = [ParameterServer(SCHEMA, config, num_checkpoint_threads=64)]
    load(make_worker(fresh), tmp_path)
    assert rows_of(fresh) == rows_of(servers)


def test_nothing_is_dumped_before_it_is_configured(tmp_path: Path) -> None:
    worker = make_worker(make_servers(1, hyper=None, optimizer=None))
    with pytest.raises(NotConfigured, match="checkpoint"):
        dump(worker, tmp_path)


def test_begin_cut_again_is_the_same_cut(trained: Trained) -> None:
    _, (server, _) = trained
    assert server.begin_cut(CutRequest(9, None)) == server.begin_cut(CutRequest(9, None))
    server.end_cut(9, False)


def test_copies_have_room_before_a_cut_is_written(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "room_for_copies", lambda cut: 1 << 40)
    _, (server, *_) = trained
    server.begin_cut(CutRequest(9, None))
    (cut,) = server._cuts._cuts.values()
    assert cut.cut.side_bytes == 1 << 40
    server.end_cut(9, False)


@pytest.mark.parametrize("fails", ["room", "about"])
def test_a_cut_that_cannot_be_told_of_is_closed(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    begun: list[Cut] = []

    def give_room(cut: Cut) -> None:
        begun.append(cut)
        if fails == "room":
            raise MemoryError

    def about(held: snapshot.ServerState) -> str:
        raise MemoryError

    _, (server, *_) = trained
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "give_room", give_room)
        patch.setattr(snapshot.ServerState, "about", about)
        with pytest.raises(MemoryError):
            server.begin_cut(CutRequest(9, None))
    assert [cut.is_closed for cut in begun] == [True]
    server.begin_cut(CutRequest(9, None))
    server.end_cut(9, False)


def test_another_optimizer_begins_its_state_anew_and_says_so(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    fresh = make_servers(2, optimizer=ADAM)
    notes = load(make_worker(fresh), tmp_path)
    assert any("adagrad" in note and "adam" in note for note in notes)
    old, new = rows_of(servers), rows_of(fresh)
    assert old.keys() == new.keys()
    dim = 4 * 4
    assert all(new[k][:dim] == old[k][:dim] for k in old)


def renamed(order: list[str], **changes: Any) -> EmbeddingSchema:
    slots = {name: CONFIG["slots_config"][name] for name in order}
    return EmbeddingSchema.load(CONFIG | {"slots_config": slots} | changes)


def test_groups_are_found_by_the_names_of_their_features(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    # All but one feature, in another order: other numbers of groups and tables.
    order = [name for name in reversed(CONFIG["slots_config"]) if name != "raw"]
    groups = {"stacks": ["stack", "stack_mean"], "shared": ["sum", "max", "jagged"]}
    schema = renamed(order, feature_groups=groups)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sqrt": {"dim": 16, "pooling": "sqrt"}}, "dim of feature group 'sqrt' is 8 .* 16"),
        (
            {"stack_raw": CONFIG["slots_config"]["stack_max"]},
            "hash stack .* of feature group 'stack_raw'",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_difference(
    trained: Trained, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    worker, _ = trained
    dump(worker, tmp_path)
    schema = EmbeddingSchema.load(CONFIG | {"slots_config": CONFIG["slots_config"] | changes})
    fresh = make_servers(1, schema, optimizer=ADAGRAD)
    other = make_worker(fresh, schema)
    with pytest.raises(CheckpointError, match=message):
        load(other, tmp_path)


def test_a_damaged_file_is_found_before_anything_changes(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    train(worker, 3, 1)
    before = rows_of(servers)
    damaged = sorted(tmp_path.rglob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(PersiaError, match=damaged.name):
        load(worker, tmp_path)
    assert rows_of(servers) == before


def test_a_sign_of_no_group_is_found_before_anything_changes(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)

    def strange(block: Any) -> Any:
        return replace(take(block, np.arange(1)), signs=np.zeros(1, np.uint64))

    _, table = add_part(tmp_path, "strange", strange)
    before = rows_of(servers)
    with pytest.raises(CheckpointError, match=f"strange/.*sign 0x0+ is of no group of {table}"):
        load(worker, tmp_path)
    assert rows_of(servers) == before


def test_counts_of_ids_not_admitted_yet_are_kept(tmp_path: Path) -> None:
    config = CONFIG | {
        "group_settings": {"sqrt": {"admission": {"policy": "count", "threshold": 3}}}
    }
    schema = EmbeddingSchema.load(config)

    def appear(worker: EmbeddingWorker, number: int) -> None:
        result = worker.lookup_direct(features({"sqrt": [[1, 2]]}, number))
        worker.update(gradient(result, (1, number)))

    servers = make_servers(2, schema, capacity=1000)  # there are counters for so many ids
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


def test_the_seed_of_the_rows_is_told_apart(trained: Trained, tmp_path: Path) -> None:
    worker, _ = trained
    dump(worker, tmp_path)
    fresh = make_servers(1, hyper=settings(seed=8), optimizer=ADAGRAD)
    notes = load(make_worker(fresh), tmp_path)
    assert any("seed" in note for note in notes)
    assert np.all(np.array(make_worker(fresh).get_embedding_size()) > 0)


def test_changes_are_written_as_training_goes_on(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path, 2, buffer_size=200)
    worker = make_worker(servers)
    kinds = []
    for number in range(6):
        train(worker, number, 1)
        for server in servers:
            server.flush_changes()
        kinds.append(catalog.load(str(tmp_path / "s0")).kind)
    for server in servers:
        server.close()
    assert kinds[:2] == ["full", "delta"]
    assert "full" in kinds[2:]  # once the deltas are as large as the first was
    # What is left is the last full one and what leads to the one before it.
    assert len(catalog.ids(str(tmp_path / "s0"))) < 6
    loader, fresh = load_changes(tmp_path, servers)
    for manifest in catalog.ids(str(tmp_path / "s1")):
        (tmp_path / "s1" / f"{manifest}.json").unlink()
    with pytest.raises(CheckpointError, match="s1 is missing"):
        loader.verify("", str(tmp_path), None)
    assert rows_of(fresh) == rows_of(servers)


def test_packets_can_be_read_whatever_became_of_the_one_before(tmp_path: Path) -> None:
    (server,) = servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    server.flush_changes()
    # Another learning rate is another schema, so no delta.
    server.register_optimizer(OptimizerSettings(ADAGRAD.name, {**ADAGRAD.options, "lr": 1.0}))
    train(worker, 1, 1)
    server.flush_changes()
    assert len(catalog.chain(str(tmp_path / "s0"))) == 1
    # What a packet that failed had is written in the end, though nothing comes after it.
    train(worker, 2, 1)
    (tmp_path / "s0").rename(tmp_path / "kept")
    (tmp_path / "s0").write_text("not a folder")
    with pytest.raises(CheckpointError):
        server.flush_changes()
    (tmp_path / "s0").unlink()
    (tmp_path / "kept").rename(tmp_path / "s0")
    server.close()
    load_changes(tmp_path, servers)


def test_copies_have_room_before_a_packet_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    (server,) = servers = writing_changes(tmp_path)
    write = IncrementalWriter._write

    def note(*arguments: Any) -> None:
        rooms.append(arguments[-1].side_bytes)
        write(*arguments)

    monkeypatch.setattr(IncrementalWriter, "_write", note)
    for number in range(2):  # all rows, and changes
        with monkeypatch.context() as patch:
            patch.setattr(throttle, "room_for_copies", lambda cut, copied=0: 1 << 40)
            train(make_worker(servers), number, 1)
            server.flush_changes()
    assert rooms == [1 << 40] * 2

    def fails(cut: Cut) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:  # no cut is left that nobody reads
        patch.setattr(throttle, "room_for_copies", fails)
        train(make_worker(servers), 2, 1)
        with pytest.raises(MemoryError):
            server.flush_changes()
    server.close()
    load_changes(tmp_path, servers)


def has_more(folder: Path, number: int) -> bool:
    return len(catalog.ids(folder)) > number


def test_packets_come_by_themselves(tmp_path: Path) -> None:
    (server,) = servers = writing_changes(tmp_path, buffer_size=100)
    worker = make_worker(servers)
    for number in range(3):
        train(worker, number, 1)
        until(partial(has_more, tmp_path / "s0", number))
    server.close()
    load_changes(tmp_path, servers)


def test_w17_servers_that_lost_all_are_whole_after_a_load(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    fresh = make_servers(3, hyper=None, optimizer=None)  # nobody has configured them
    other = make_worker(fresh)
    assert not other.ready_for_serving()
    load(other, tmp_path)
    assert other.ready_for_serving()
    assert_alike((worker, servers), (other, fresh), 3, 2)


def test_w19_servers_of_inference_load_by_themselves_and_reshard(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    fresh = make_servers(5, hyper=None, optimizer=None)
    for server in fresh:
        server.load_checkpoint(str(tmp_path))
    assert all(server.ready_for_serving() for server in fresh)
    assert rows_of(fresh) == rows_of(servers)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        make_servers(1, hyper=None, optimizer=None)[0].load_checkpoint(str(tmp_path / "x"))


def test_half_a_load_is_not_dumped(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    before = rows_of(servers)
    with (
        held_load(worker, tmp_path, monkeypatch),
        pytest.raises(CheckpointError, match="a load is replacing"),
    ):
        dump(worker, tmp_path)
    fresh = make_servers(1, optimizer=ADAGRAD)
    load(make_worker(fresh), tmp_path)
    assert rows_of(fresh) == before == rows_of(servers)


def test_a_load_that_is_dropped_half_way_is_not_followed_by_another_beside_it(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    before = rows_of(servers)
    slow = Slow(monkeypatch)
    url = str(tmp_path)
    first = LoadRequest(1, "verify", url, "", None)
    until(lambda: is_in(servers[0], first, "verified"))
    servers[0].load(replace(first, step="commit"))
    assert slow.is_there.wait(60)
    servers[0].load(replace(first, step="drop"))  # another server could not load
    assert not servers[0].ready_for_serving()
    with pytest.raises(CheckpointError, match="another load"):
        servers[0].load(LoadRequest(2, "verify", url, "", None))
    slow.may_go.set()
    until(servers[0].ready_for_serving)
    load(worker, tmp_path)
    assert rows_of(servers) == before
