"""Rows by id: they are those of a feature's batches, on whichever server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from persia._rpc.messages import (
    FeatureScan,
    FoundRows,
    IDRows,
    IDsRequest,
    JaggedOutput,
    PooledOutput,
    RowPiece,
    TableInfo,
)
from persia._rpc.stubs import RemoteParameterServer
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema
from persia.errors import ConfigError, DataError, DimMismatch, ProtocolError, ServiceUnavailable
from tests.support.services import (
    ADAGRAD,
    CONFIG,
    features,
    gradient,
    hashed,
    make_servers,
    make_worker,
)
from tests.worker.cluster import WIDE, faulty_cluster


def u64(*ids: int) -> Any:
    return np.array(ids, np.uint64)


def read(
    worker: EmbeddingWorker, name: str, *ids: int, states: bool = False, initial: bool = False
) -> FoundRows:
    return worker.read_rows(IDsRequest(name, u64(*ids), states, initial))


def train(worker: EmbeddingWorker, name: str, *ids: int, number: int = 0) -> None:
    result = worker.lookup_direct(features({name: [[x] for x in ids]}, number))
    worker.update(gradient(result, (0, number)))


def evaluated(worker: EmbeddingWorker, name: str, *ids: int) -> Any:
    batch = features({name: [[x] for x in ids]}, requires_grad=False)
    (output,) = worker.lookup_direct(batch).outputs
    if isinstance(output, PooledOutput):
        return output.values
    assert isinstance(output, JaggedOutput)
    return output.rows[output.index]


@pytest.fixture(params=[1, 3])
def worker(request: pytest.FixtureRequest) -> EmbeddingWorker:
    return make_worker(make_servers(request.param, optimizer=ADAGRAD))


@pytest.mark.parametrize("name", ["sum", "jagged", "mean", "sqrt", "stack", "stack_mean"])
def test_a_read_has_the_bits_that_an_evaluation_has(worker: EmbeddingWorker, name: str) -> None:
    train(worker, name, 1, 2, 3)
    train(worker, name, 2, 3, 4, number=1)
    ids = (4, 1, 1, 77, 2)
    found = read(worker, name, *ids)
    assert found.values.tobytes() == evaluated(worker, name, *ids).tobytes()
    if not name.startswith("stack"):
        assert found.found.tolist() == [1, 1, 1, 0, 1]


def test_features_of_a_group_share_what_is_written(worker: EmbeddingWorker) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    worker.write_rows(IDRows("sum", u64(5, 6), rows, None))
    for name in ("sum", "max", "jagged"):
        assert read(worker, name, 5, 6).values.tobytes() == rows.tobytes()
        assert sum(worker.count_rows(name)) == 2
    assert read(worker, "mean", 5, 6).found.tolist() == [0, 0]
    assert worker.delete_rows("max", u64(6, 7)) == 1
    assert read(worker, "sum", 5, 6).found.tolist() == [1, 0]
    info = worker.table_info("max")
    assert info == TableInfo(
        feature="max",
        group="shared",
        features=("sum", "max", "jagged"),
        dim=4,
        dtype="float32",
        index_bits=56,
        strict_ids=False,
        hash_stack_rounds=0,
        num_servers=info.num_servers,
    )


def test_a_write_keeps_the_state_or_replaces_it(worker: EmbeddingWorker) -> None:
    train(worker, "sum", 1, 2)
    before = read(worker, "sum", 1, 2, states=True)
    assert before.states is not None
    ones = np.ones((3, 4), np.float32)
    worker.write_rows(IDRows("sum", u64(1, 2, 3), ones, None))
    after = read(worker, "sum", 1, 2, 3, states=True)
    assert after.states is not None
    assert after.values.tobytes() == ones.tobytes()
    assert after.states[:2].tobytes() == before.states.tobytes()
    worker.write_rows(IDRows("sum", u64(3), ones[:1], after.states[:1]))
    (state,) = read(worker, "sum", 3, states=True).states  # type: ignore[misc]
    assert state.tobytes() == after.states[0].tobytes()


def test_a_hash_stack_is_only_read(worker: EmbeddingWorker) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: worker.write_rows(IDRows("stack", u64(1), np.ones((1, 4), np.float32), None)),
        lambda: worker.delete_rows("stack", u64(1)),
        lambda: worker.scan_rows(FeatureScan("stack", 0, 0, 5, False)),
        lambda: read(worker, "stack", 1, states=True),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"rows of their own to .*stack"):
            call()
    train(worker, "stack", 1)
    assert sum(worker.count_rows("stack")) == 2
    assert read(worker, "stack", 1).found.tolist() == [1]


def test_rows_of_hashed_ids_are_found_by_their_ids() -> None:
    schema = hashed()
    worker = make_worker(make_servers(2, schema), schema)
    train(worker, "sum", 4, 8)
    # Ids 4 and 5 have one hash, and so one row.
    assert read(worker, "sum", 4, 5, 6, 8).found.tolist() == [1, 1, 0, 1]
    assert (
        read(worker, "sum", 5, 8).values.tobytes() == evaluated(worker, "sum", 4, 9).tobytes()
    )
    ones = np.ones((1, 4), np.float32)
    worker.write_rows(IDRows("max", u64(6), ones, None))
    assert read(worker, "sum", 7).values.tobytes() == ones.tobytes()
    with pytest.raises(
        DataError, match="expected each id once in a write, got 2 ids of 1 rows"
    ):
        worker.write_rows(IDRows("sum", u64(6, 7), np.ones((2, 4), np.float32), None))
    assert worker.delete_rows("sum", u64(5)) == 1
    assert read(worker, "sum", 4, 8).found.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="got rows of the hashes of native:hash:"):
        worker.scan_rows(FeatureScan("sum", 0, 0, 5, False))


def test_initial_values_of_a_hash_stack_are_summed(worker: EmbeddingWorker) -> None:
    initial = read(worker, "stack", 1, 2, initial=True).values
    worker.lookup_direct(features({"stack": [[1], [2]]}))  # inserts, and steps nothing
    assert evaluated(worker, "stack", 1, 2).tobytes() == initial.tobytes()


def test_ids_that_do_not_fit_are_cut_and_counted(worker: EmbeddingWorker) -> None:
    worker.write_rows(IDRows("sum", u64(WIDE + 5), np.ones((1, 4), np.float32), None))
    assert read(worker, "sum", 5, 3 * WIDE + 5).found.tolist() == [1, 1]
    assert worker.stats()["masked_ids.sum"] == 2
    rows = IDRows("sum", u64(5, WIDE + 5), np.ones((2, 4), np.float32), None)
    with pytest.raises(DataError, match="expected each id once in a write, got 2 ids of 1"):
        worker.write_rows(rows)
    strict = make_worker(make_servers(), EmbeddingSchema.load(CONFIG | {"strict_ids": True}))
    for call in (
        lambda: read(strict, "sum", 5, WIDE),
        lambda: strict.delete_rows("sum", u64(WIDE)),
    ):
        with pytest.raises(DataError, match=f"id {WIDE} needs 57 bits"):
            call()


def test_unknown_features_and_other_shapes_are_refused(worker: EmbeddingWorker) -> None:
    with pytest.raises(DataError, match="'sun' is not in the embedding config, did you mean"):
        worker.table_info("sun")
    for shape in ((2, 4), (1, 5)):
        with pytest.raises(DimMismatch, match=r"expected values of shape \[1, 4\], got"):
            worker.write_rows(IDRows("sum", u64(1), np.ones(shape, np.float32), None))
    with pytest.raises(DataError, match="expected a server in"):
        worker.scan_rows(FeatureScan("sum", 3, 0, 5, False))
    assert read(worker, "sum", states=True).values.shape == (0, 4)


def test_a_walk_has_all_rows_of_the_group_on_all_servers(worker: EmbeddingWorker) -> None:
    train(worker, "sum", *range(50))
    train(worker, "mean", *range(80))
    found: list[int] = []
    for server in range(worker.table_info("sum").num_servers):
        cursor: int | None = 0
        while cursor is not None:
            piece = worker.scan_rows(FeatureScan("max", server, cursor, 7, True))
            found += [int(sign) & 0xFF for sign in piece.signs]
            assert piece.states is not None
            assert piece.states.shape == (len(piece.signs), 4)
            cursor = piece.cursor
    assert sorted(found) == list(range(50))
    assert sum(worker.count_rows("max")) == 50


@pytest.mark.parametrize("method", ["read_rows", "delete_rows", "set_embedding"])
def test_what_a_server_raises_is_raised(method: str) -> None:
    ones = np.ones((9, 4), np.float32)
    with faulty_cluster() as (worker, (_, other)):
        calls: dict[str, Callable[[], Any]] = {
            "read_rows": lambda: read(worker, "sum", *range(9)),
            "delete_rows": lambda: worker.delete_rows("sum", u64(*range(9))),
            "set_embedding": lambda: worker.write_rows(
                IDRows("sum", u64(*range(9)), ones, None)
            ),
        }
        other.fail_before.append(method)
        with pytest.raises(ServiceUnavailable, match=f"{method} was not heard"):
            calls[method]()
        calls[method]()


class Liar(RemoteParameterServer):
    """A server of another process that answers with rows of another dim."""

    def __init__(self, server: Any) -> None:
        self.server = server
        setattr(self, "client", self)  # noqa: B010

    replica_index, replica_size = 0, 1

    @property
    def schema_fingerprint(self) -> str:
        return str(self.server.schema_fingerprint)

    def begin(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self.server, method)(*arguments)
        wrong = np.zeros((2, 3), np.float32)
        assert isinstance(answer, FoundRows | RowPiece)
        self.answer = replace(answer, values=wrong)
        return self

    def result(self) -> Any:
        return self.answer

    def cancel(self) -> None:
        pass


def test_replies_of_other_shapes_are_refused() -> None:
    liar: Any = Liar
    worker = make_worker([liar(make_servers()[0])])
    for call in (
        lambda: read(worker, "sum", 1, 2),
        lambda: worker.scan_rows(FeatureScan("sum", 0, 0, 5, False)),
    ):
        with pytest.raises(ProtocolError, match=r"parameter-server 0: expected .*dim 4, got"):
            call()
