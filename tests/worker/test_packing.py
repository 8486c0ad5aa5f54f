"""Features to plans, ids to signs, what servers are asked for, and what is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from persia._core.ids import cardinality
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import IDFeatures, LookupRequest, TableEntries
from persia._worker.packing import UNSEEN_AFTER, BatchPlanner
from persia.config import EmbeddingSchema
from persia.errors import (
    ConfigError,
    DataError,
    DataTypeError,
    ExtensionError,
    KernelError,
    StoreError,
)
from tests.support import kernels
from tests.support.fixtures import Log
from tests.support.services import (
    ADAM,
    CONFIG,
    SCHEMA,
    features,
    gradient,
    hashed,
    make_servers,
    make_worker,
    sign,
)
from tests.worker.cluster import WIDE, embeddings, faulty_cluster


def test_a_plan_is_made_once_and_only_so_many_are_kept() -> None:
    planner = BatchPlanner(SCHEMA)
    assert planner.plan(("sum", "max")) is planner.plan(("sum", "max"))
    planner.MAX_PLANS = 1
    assert planner.plan(("max", "sum")).names == ("max", "sum")
    assert planner.plan(("max", "sum")) is not planner.plan(("max", "sum"))


def test_slots_that_no_batch_has_are_warned_of_once(caplog: Log) -> None:
    slots = {name: {"dim": 4} for name in ("user", "item", "city")}
    planner = BatchPlanner(EmbeddingSchema.load({"slots_config": slots}))
    planner.plan(("user",))
    planner.plan(("item",))  # of another data-loader
    for _ in range(2 * UNSEEN_AFTER):
        planner.plan(("user",))
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"such as 'city', came in none of the first {UNSEEN_AFTER} batches" in line


def test_ids_that_raw_leaves_out_are_warned_of_once_unless_on_purpose(caplog: Log) -> None:
    raw = {"dim": 4, "pooling": "raw"}
    slots = {"seen": raw, "other": raw, "sized": {**raw, "sample_fixed_size": 2}}
    slots["front"] = {**raw, "padding": "front"}
    schema = EmbeddingSchema.load({"slots_config": slots})
    worker = make_worker(make_servers(1, schema), schema)
    long = list(range(13))
    worker.lookup_direct(features({"seen": [long[:10]], "sized": [long], "front": [long]}))
    assert not caplog.messages
    for _ in range(2):
        worker.lookup_direct(features({"seen": [[1], long], "other": [[1], []]}))
        worker.lookup_direct(features({"seen": [[*long, 13]]}, requires_grad=False))
    (line,) = caplog.messages
    assert "'seen': a sample has 13 ids, of which the first 10 are used" in line
    assert "sample_fixed_size: 13 to use all of them, or padding: front" in line


def test_w62_each_sign_is_asked_for_once_and_only_where_it_lives() -> None:
    with faulty_cluster(4) as (worker, servers):
        batch = {"sum": [[1, 2, 2]], "max": [[2, 3]], "jagged": [[1, 3]]}
        worker.lookup_direct(features(batch))
        asked = []
        for server in servers:
            for name, arguments in server.calls:
                if name == "lookup":
                    (request,) = arguments
                    assert isinstance(request, LookupRequest)
                    assert all(len(part.signs) for part in request.tables)
                    asked += [s for part in request.tables for s in part.signs.tolist()]
        assert sorted(asked) == [sign("sum", x) for x in (1, 2, 3)]


def test_single_ids_are_the_same_as_samples_of_one() -> None:
    ids = np.array([5, 3, 5, 9], np.uint64)
    results = []
    makes: list[Callable[[str], FeatureBatch]] = [
        lambda name: FeatureBatch.from_single(name, ids),
        lambda name: FeatureBatch.from_csr(name, ids, np.arange(5, dtype=np.int64)),
    ]
    for make in makes:
        with faulty_cluster(2) as (worker, servers):
            parts = tuple(make(name) for name in ("sum", "max", "raw", "jagged"))
            result = worker.lookup_direct(IDFeatures(parts, 0, True))
            nan = np.ones((4, 4), np.float32)
            nan[1, 1] = np.nan
            worker.update(gradient(result, by_name={"sum": nan}))
            ends = [embeddings(servers, name, [5, 9]) for name in ("sum", "raw")]
            results.append((result.outputs, ends))
    for one, two in zip(results[0][0], results[1][0], strict=True):
        for name in ("values", "rows", "index", "offsets"):
            if hasattr(one, name):
                np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert results[0][1] == results[1][1]


def test_w29_ids_that_masking_folds_together_take_one_step() -> None:
    with faulty_cluster(1, optimizer=ADAM) as (worker, servers):
        result = worker.lookup_direct(features({"mean": [[7], [WIDE + 7]]}))
        assert worker.get_embedding_size() == [1]
        one, two = result.outputs[0].values  # type: ignore[union-attr]
        np.testing.assert_array_equal(one, two)
        worker.update(gradient(result))
        updates = [arguments[0] for name, arguments in servers[0].calls if name == "update"]
        assert [part.signs.tolist() for part in updates[0].tables] == [[sign("mean", 7)]]
        np.testing.assert_array_equal(updates[0].tables[0].gradients, np.full((1, 4), 2.0))


def test_an_id_that_a_hash_fails_for_is_refused_with_its_batch() -> None:
    schema = hashed()
    worker = make_worker(make_servers(1, schema), schema)
    batch = features({"max": [[1]], "sum": [[1, 13]]})
    for call in (worker.register, worker.lookup_direct):
        with pytest.raises(KernelError, match=r"feature .sum.: hash native:hash:.* error 7"):
            call(batch)
    assert (worker.get_embedding_size(), worker.stats()["in_flight"]) == ([0], 0)


def test_a_library_for_ids_that_cannot_be_used_is_an_error_of_the_worker() -> None:
    for name, error, message in (
        (kernels.load("adagrad"), ConfigError, "expected a library with a hash"),
        ("native:absent:" + "0" * 64, ExtensionError, r"expected absent\.so with sha256 0000"),
    ):
        schema = EmbeddingSchema.load({"slots_config": {"a": {"dim": 4, "id_hash": name}}})
        with pytest.raises(error, match=message):
            make_worker(make_servers(1, schema), schema)


def test_hashes_of_ids_may_be_wider_than_signs_have_room_for() -> None:
    slots = {"a": {"dim": 4, "id_hash": kernels.load("hash")}}
    schema = EmbeddingSchema.load({"slots_config": slots, "strict_ids": True})
    worker = make_worker(make_servers(1, schema), schema)
    worker.lookup_direct(features({"a": [[WIDE, 2**64 - 1]]}))
    assert worker.get_embedding_size() == [2]


def test_strict_ids_refuse_them_before_anything_has_changed() -> None:
    schema = EmbeddingSchema.load(CONFIG | {"strict_ids": True})
    worker = make_worker(make_servers(1, schema), schema)
    batch = features({"max": [[1]], "sum": [[1, WIDE + 5]], "stack": [[WIDE]]})
    for call in (worker.register, worker.lookup_direct):
        with pytest.raises(DataError, match=f"'sum': id {WIDE + 5} needs 57 bits, .* 56"):
            call(batch)
    assert worker.get_embedding_size() == [0]
    assert worker.stats()["in_flight"] == 0
    worker.lookup_direct(features({"sum": [[WIDE - 1]], "stack": [[WIDE]]}))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (features({"summ": [[1]]}), "'summ' is not in the embedding config"),
        (IDFeatures(2 * features({"sum": [[1]]}).features, 0, True), "'sum' comes twice"),
        (features({"sum": [[1]], "max": [[1], [2]]}), "'max' has 2 samples, expected 1 as in"),
        *(  # weights where nothing is summed
            (
                features({name: [[1, 2]]}, weights={name: [np.ones(2, np.float32)]}),
                f"'{name}' has weights, which only .* 'sum'",
            )
            for name in ("mean", "sqrt", "max", "raw", "jagged", "stack_mean")
        ),
    ],
)
def test_w22_bad_batches_change_nothing(batch: IDFeatures, message: str) -> None:
    with faulty_cluster() as (worker, _):
        for call in (worker.register, worker.lookup_direct):
            with pytest.raises(DataError, match=message):
                call(batch)
        assert worker.stats()["in_flight"] == 0
        assert sum(worker.get_embedding_size()) == 0


@pytest.mark.parametrize("num_rows", [0, 1, 2, 50])
def test_w33_any_number_of_rows_is_written_to_any_number_of_servers(num_rows: int) -> None:
    with faulty_cluster(4) as (worker, servers):
        ids = list(range(num_rows))
        signs = np.array([sign("mean", x) for x in ids], np.uint64)
        rows = np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4)
        table = SCHEMA.slots["mean"].table
        worker.set_embedding([TableEntries(table, signs, rows, None)])
        assert sum(worker.get_embedding_size()) == num_rows
        assert embeddings(servers, "mean", ids) == rows.tolist()
        worker.clear_embeddings()
        assert worker.get_embedding_size() == [0] * 4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": np.zeros((2, 4), np.float32)}, StoreError, r"as signs, 1, got \[1, 2\]"),
        ({"signs": np.array([1], np.int64)}, DataTypeError, "uint64"),
    ],
)
def test_bad_rows_are_refused(change: Any, error: type[Exception], message: str) -> None:
    good = {
        "table": SCHEMA.slots["mean"].table,
        "signs": np.array([sign("mean", 1)], np.uint64),
        "values": np.zeros((1, 4), np.float32),
        "states": None,
    }
    with faulty_cluster() as (worker, _):
        with pytest.raises(error, match=message):
            worker.set_embedding([TableEntries(**(good | change))])
        assert sum(worker.get_embedding_size()) == 0


def test_a_batch_counts_once_however_often_it_is_asked_for() -> None:
    with faulty_cluster() as (worker, _):
        for number in (50, 51, 51):
            batch = {"sum": [[1], [2], [1], [number]], "raw": [[9, 9], [], [number], []]}
            worker.register(features(batch, number))
        found = {one.name: one for one in worker.feature_stats()}
    one, other = found["sum"], found["raw"]
    assert (one.dim, one.num_samples, one.num_empty, one.num_ids) == (4, 8, 0, 8)
    assert (other.dim, other.num_samples, other.num_empty, other.num_ids) == (8, 8, 4, 6)
    assert round(cardinality.estimate(one.registers)) == 4
    assert round(cardinality.estimate(other.registers)) == 3
    both = np.maximum(one.registers, other.registers)
    assert round(cardinality.estimate(both)) == 5


def test_ids_beyond_the_index_bits_are_counted_with_one_warning(caplog: Log) -> None:
    with faulty_cluster() as (worker, _), caplog.at_level(logging.WARNING):
        batch = {"sum": [[1, WIDE], [2**64 - 1]], "max": [[WIDE - 1], []]}
        batch["stack"] = [[2**64 - 1], []]
        worker.lookup_direct(features({"sum": [[1]]}, requires_grad=False))  # none is beyond
        ref = worker.register(features(batch, 0))
        worker.lookup(ref, True)
        worker.lookup_direct(features(batch, 1))
        worker.lookup_direct(features({"mean": [[WIDE]]}, requires_grad=False))
        stats = worker.stats()
        masked = {name: stats[name] for name in stats if name.startswith("masked_ids")}
        assert masked == {"masked_ids.sum": 4, "masked_ids.mean": 1}
        warned = [text for text in caplog.messages if "more than 56 bits" in text]
        assert len(warned) == 1
        assert "share rows: 2 of sum; later ones, of any feature, are only counted" in warned[0]
