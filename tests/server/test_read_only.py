"""Parameter servers for inference: whole versions, or nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._cluster.process_metrics import of_server
from persia._files import catalog
from persia._files.storage import LocalStorage
from persia._rpc.messages import (
    LoadRequest,
    LookupRequest,
    PooledOutput,
    RowsRequest,
    ScanRequest,
    TableSigns,
)
from persia._server.read_only import ReadOnlyParameterServer
from persia._server.service import ParameterServer
from persia._training.checkpoint import CheckpointReader
from persia.config import InferConfig
from persia.errors import CheckpointError, ConfigError, ServiceBusy, StoreError
from tests.support.saving import FEATURES, IDS, Trained, dump, train, writing_changes
from tests.support.services import (
    ADAGRAD,
    SCHEMA,
    SETTINGS,
    features,
    make_servers,
    make_worker,
    sign,
)
from tests.support.waiting import PATIENCE_S, until


def read_only(url: Path | str, count: int = 1, **config: Any) -> list[ReadOnlyParameterServer]:
    infer = InferConfig(str(url), **({"follow_interval_sec": 0.01} | config))
    return [
        ReadOnlyParameterServer(SCHEMA, infer, replica_index=index, replica_size=count)
        for index in range(count)
    ]


def answers(servers: list[Any]) -> list[bytes]:
    """What a worker answers for evaluation."""
    worker = make_worker(servers)
    try:
        batch = {name: IDS[name] for name in FEATURES}
        result = worker.lookup_direct(features(batch, requires_grad=False))
    finally:
        worker.close()
    return [
        (output.values if isinstance(output, PooledOutput) else output.rows).tobytes()
        for output in result.outputs
    ]


def _have(servers: list[ReadOnlyParameterServer], version: str | None) -> bool:
    return all(one.rows.version == version for one in servers)


def _is_verified(server: ReadOnlyParameterServer, request: LoadRequest) -> bool:
    return server.load(request).state == "verified"


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_those_of_evaluation(dumped: Trained, tmp_path: Path, count: int) -> None:
    _, servers = dumped
    others = read_only(tmp_path, count)
    for one in others:
        assert one.readiness()
        assert not one.ready_for_serving()
        one.start()
        assert one.readiness() is None
        assert one.ready_for_serving()
    assert answers(others) == answers(servers)
    total = sum(one.get_embedding_size() for one in others)
    assert total == sum(one.get_embedding_size() for one in servers)
    stats = others[0].stats()
    assert stats["lookups"] == 1
    assert stats["rows"] == others[0].get_embedding_size()
    table, asked = SCHEMA.slots["sum"].table, [sign("sum", x) for x in (1, 5000)]
    if count == 1:
        (entries,) = others[0].read_embedding([TableSigns(table, np.array(asked, np.uint64))])
        assert entries.signs.tolist() == asked[:1]
        assert entries.states is None
        signs = np.array([*asked, asked[0]], np.uint64)
        found = others[0].read_rows(RowsRequest(table, signs, False, False))
        assert found.found.tolist() == [1, 0, 1]
        assert found.values[[0, 2]].tobytes() == 2 * entries.values.tobytes()
        assert not found.values[1].any()
    for one in others:
        one.close()


def test_before_rows_are_there_lookups_are_refused_and_never_zeros(tmp_path: Path) -> None:
    (server,) = read_only(tmp_path)
    request = LookupRequest(0, False, (TableSigns(0, np.array([1], np.uint64)),))
    with pytest.raises(ServiceBusy, match="rows"):
        server.lookup(request)
    server.start()  # no checkpoint yet
    with pytest.raises(ServiceBusy, match="no checkpoint is here"):
        server.lookup(request)
    source = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(source)
    train(worker, 0, 1)
    dump(worker, tmp_path)
    until(server.ready_for_serving)
    assert answers([server]) == answers(source)
    server.close()


def test_a_newer_checkpoint_is_picked_up_without_a_zero_or_a_mixture(tmp_path: Path) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, tmp_path, keep_last=10)
    whole = [answers(servers)]
    others = read_only(tmp_path, 3)
    for one in others:
        one.start()
    seen: list[list[bytes]] = []
    failures: list[Exception] = []
    is_done = threading.Event()

    def read() -> None:
        front = make_worker(others)
        batch = features({name: IDS[name] for name in FEATURES}, requires_grad=False)
        while not is_done.is_set():
            try:
                found = front.lookup_direct(batch).outputs
            except Exception as exc:
                failures.append(exc)
                return
            seen.append(
                [(x.values if isinstance(x, PooledOutput) else x.rows).tobytes() for x in found]
            )
        front.close()

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 4):
            train(worker, number, 1)
            dump(worker, tmp_path, keep_last=10)
            whole.append(answers(servers))
            newest = catalog.latest(LocalStorage(tmp_path))
            until(partial(_have, others, newest))
    finally:
        is_done.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        for one in others:
            one.close()
    assert not failures
    assert all(found in whole for found in seen)


def test_rows_of_training_are_followed(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path / "log", 2)
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, tmp_path / "checkpoints")
    worker.flush_changes()
    others = read_only(tmp_path / "checkpoints", 3, incremental_dir=str(tmp_path / "log"))
    for one in others:
        one.start()
    for number in range(1, 4):
        train(worker, number, 1)
        worker.flush_changes()
        until(lambda: answers(others) == answers(servers))
    for one in others:
        read = [one for one in of_server(one).read() if one.name == "persia_row_age_seconds"]
        assert [sample.labels for sample in read] == [{"server": "0"}, {"server": "1"}]
        ages = [sample.value for sample in read]
        assert all(isinstance(age, float) and 0.0 <= age < 600.0 for age in ages)
        one.close()
    for server in servers:
        server.close()


def test_a_load_shows_its_rows_when_all_servers_have_them(tmp_path: Path) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, tmp_path / "one")
    before = answers(servers)
    others = read_only(tmp_path / "one", 2)
    for one in others:
        one.start()
    train(worker, 1, 2)
    dump(worker, tmp_path / "two")
    request = LoadRequest(5, "verify", str(tmp_path / "two"), "", None)
    for one in others:
        until(partial(_is_verified, one, request))
        assert one.load(replace(request, step="commit")).state == "loaded"
    assert answers(others) == before
    for one in others:
        for _ in range(2):  # asked again, it is the same
            assert one.load(replace(request, step="finish")).state == "finished"
    assert answers(others) == answers(servers) != before
    with pytest.raises(CheckpointError, match="expected one that it has verified"):
        others[0].load(LoadRequest(6, "commit", str(tmp_path / "two"), "", None))
    with pytest.raises(ConfigError, match="all features"):
        others[0].load(replace(request, load_id=7, features=("sum",)))
    failed = LoadRequest(8, "verify", str(tmp_path / "nothing"), "", None)
    until(lambda: others[0].load(failed).state == "failed")
    assert others[0].load(replace(failed, step="drop")).state == "dropped"
    for one in others:
        one.close()


def test_the_clients_own_load_works(dumped: Trained, tmp_path: Path) -> None:
    others = read_only(tmp_path / "nothing", 2)
    loader = CheckpointReader(make_worker(others))
    loader.verify("", str(tmp_path), None)
    loader.commit(blocking=True)
    assert answers(others) == answers(dumped[1])


def test_what_changes_rows_is_refused(dumped: Trained, tmp_path: Path) -> None:
    (server,) = read_only(tmp_path)
    server.start()
    part = TableSigns(0, np.array([1], np.uint64))
    for refused in (
        lambda: server.lookup(LookupRequest(0, True, (part,))),
        lambda: server.configure(SETTINGS),
        lambda: server.register_optimizer(ADAGRAD),
        lambda: server.set_embedding(()),
        server.clear_embeddings,
        lambda: server.delete_rows(part),
        lambda: server.read_rows(RowsRequest(0, part.signs, True, False)),
        lambda: server.read_rows(RowsRequest(0, part.signs, False, True)),
        lambda: server.scan_rows(ScanRequest(0, 0, 0, 9, False)),
        lambda: server.count_rows(0, 0),
        lambda: server.cut_status(1),
    ):
        with pytest.raises(StoreError, match="is for inference"):
            refused()
    server.end_cut(1, False)
    with pytest.raises(StoreError, match=r"expected a table in 0\.\."):
        server.lookup(LookupRequest(0, False, (TableSigns(99, part.signs),)))
    server.close()


def test_signs_of_another_server_are_refused(dumped: Trained, tmp_path: Path) -> None:
    server = read_only(tmp_path, 2)[0]
    server.start()
    signs = np.arange(1, 100, dtype=np.uint64)
    with pytest.raises(StoreError, match="is not of server 0 of 2"):
        server.lookup(LookupRequest(0, False, (TableSigns(0, signs),)))
    server.close()
    with pytest.raises(ConfigError, match="replica_index"):
        ReadOnlyParameterServer(SCHEMA, InferConfig(str(tmp_path)), replica_index=2)


def test_training_servers_are_another_class() -> None:
    """Both have what ``_cluster`` asks of them."""
    for name in (
        "lookup",
        "stats",
        "limits",
        "checkpointed_at",
        "row_ages",
        "readiness",
        "close",
    ):
        assert hasattr(ParameterServer, name)
        assert hasattr(ReadOnlyParameterServer, name)
