"""Outputs of a lookup, and steps by what gradients sum up to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.ids.signs import hash_stack
from persia._rpc.messages import (
    BatchGradients,
    IDFeatures,
    JaggedOutput,
    PooledOutput,
    RawOutput,
    SlotGradient,
    TableEntries,
    TableSigns,
)
from persia._worker.pooling import shares
from persia.config import EmbeddingSchema
from tests.support.services import (
    ADAGRAD,
    ADAM,
    SCHEMA,
    features,
    gradient,
    make_servers,
    make_worker,
    sign,
    value,
)
from tests.worker.cluster import embeddings, faulty_cluster


def test_outputs_come_in_the_order_of_the_batch_and_own_their_memory() -> None:
    with faulty_cluster(1) as (worker, _):
        names = ["stack_raw", "mean", "jagged", "sqrt", "sum"]
        batch = features({name: [[1, 2], [2]] for name in names})
        result = worker.lookup_direct(batch)
        assert [output.name for output in result.outputs] == names
        kinds = [RawOutput, PooledOutput, JaggedOutput, PooledOutput, PooledOutput]
        assert [type(output) for output in result.outputs] == kinds
        pooled = [output for output in result.outputs if isinstance(output, PooledOutput)]
        before = [output.values.copy() for output in pooled]
        pooled[0].values[:] = 99.0
        worker.lookup(result.ref or 0, True)
        for output, values in zip(pooled[1:], before[1:], strict=True):
            np.testing.assert_array_equal(output.values, values)
        again = worker.lookup_direct(batch).outputs[1]
        assert isinstance(again, PooledOutput)
        np.testing.assert_array_equal(again.values, before[0])


def test_w12_raw_vectors_of_a_hash_stack_are_sums_of_their_rounds() -> None:
    with faulty_cluster(2) as (worker, servers):
        result = worker.lookup_direct(features({"stack_raw": [[1, 2], [3]]}))
        (output,) = result.outputs
        assert isinstance(output, RawOutput)
        plain = [server.server for server in servers]
        buckets = hash_stack(np.array([1, 2, 3], np.uint64), 2, 3).reshape(3, 2)
        for d in range(3):
            first, second = (value(plain, "stack_raw", int(x)) for x in buckets[d])
            np.testing.assert_array_equal(output.rows[d + 1], first + second)


@pytest.mark.parametrize(
    ("padding", "ids"),
    [
        ("back", [[1, 2, 3], [0, 0, 0], [7, 0, 0], [1, 1, 9]]),
        ("front", [[3, 4, 5], [0, 0, 0], [0, 0, 7], [1, 1, 9]]),
    ],
)
def test_padding_says_where_zeros_are_and_which_ids_are_cut(
    padding: str, ids: list[list[int]]
) -> None:
    slot = {"dim": 2, "pooling": "raw", "sample_fixed_size": 3, "padding": padding}
    schema = EmbeddingSchema.load({"slots_config": {"items": slot}})
    (server,) = servers = make_servers(1, schema)
    worker = make_worker(servers, schema)
    result = worker.lookup_direct(features({"items": [[1, 2, 3, 4, 5], [], [7], [1, 1, 9]]}))
    (output,) = result.outputs
    assert isinstance(output, RawOutput)
    kept = sorted({id_ for sample in ids for id_ in sample} - {0})
    assert worker.get_embedding_size() == [len(kept)]  # what is cut gets no row
    signs = np.array([sign("items", id_, schema) for id_ in kept], np.uint64)

    def rows() -> dict[int, NDArray[np.float32]]:
        (entries,) = server.read_embedding([TableSigns(0, signs)])
        return {0: np.zeros(2, np.float32), **dict(zip(kept, entries.values, strict=True))}

    before = rows()
    at_places = output.rows[output.index].reshape(4, 3, 2)
    np.testing.assert_array_equal(at_places, [[before[id_] for id_ in one] for one in ids])
    # A gradient for each row; the padding's row 0 has none.
    gradients = np.arange(2.0 * len(kept), dtype=np.float32).reshape(-1, 2)
    worker.update(gradient(result, by_name={"items": gradients}))
    numbers = dict(zip(np.ravel(ids).tolist(), output.index.tolist(), strict=True))
    for id_, row in rows().items():
        step = 0.5 * gradients[numbers[id_] - 1] if id_ else 0
        np.testing.assert_allclose(row, before[id_] - step, rtol=1e-6)


def test_w35_many_ids_in_few_buckets_stay_in_range() -> None:
    ids = list(range(100))
    with faulty_cluster(2) as (worker, _):
        result = worker.lookup_direct(features({"stack_raw": [ids[i : i + 3] for i in ids]}))
        (output,) = result.outputs
        assert isinstance(output, RawOutput)
        assert output.rows.shape == (101, 8)
        assert output.index.max() == 100
        worker.update(gradient(result))
        assert sum(worker.get_embedding_size()) <= 2 * 3


@pytest.mark.parametrize("name", sorted(SCHEMA.slots))
def test_w36_a_feature_without_any_id_has_zero_rows(name: str) -> None:
    with faulty_cluster(2) as (worker, servers):
        result = worker.lookup_direct(features({name: [[], [], []]}))
        (output,) = result.outputs
        dim = SCHEMA.slots[name].dim
        if isinstance(output, PooledOutput):
            np.testing.assert_array_equal(output.values, np.zeros((3, dim)))
        elif isinstance(output, RawOutput):
            np.testing.assert_array_equal(output.rows, np.zeros((1, dim)))
            np.testing.assert_array_equal(output.index, np.zeros(9))
        else:
            assert output.rows.shape == (0, dim)
            assert output.offsets.tolist() == [0, 0, 0, 0]
        report = worker.update(gradient(result))
        assert report.skipped == ()
        assert sum(worker.get_embedding_size()) == 0
        # W-62: no server is asked for no sign.
        names = [name for server in servers for name, _ in server.calls]
        assert "lookup" not in names
        assert "update" not in names


def test_a_batch_without_features_is_legal() -> None:
    with faulty_cluster() as (worker, _):
        result = worker.lookup_direct(IDFeatures((), 0, True))
        assert result.outputs == ()
        worker.update(gradient(result))


def test_w29_a_row_of_two_slots_takes_one_step() -> None:
    with faulty_cluster(1, optimizer=ADAM) as (worker, servers):
        result = worker.lookup_direct(features({"sum": [[1], [1]], "jagged": [[1, 2], []]}))
        worker.update(gradient(result))
        table = SCHEMA.slots["sum"].table
        wanted = TableSigns(table, np.array([sign("sum", 1), sign("sum", 2)], np.uint64))
        (entries,) = servers[0].server.read_embedding([wanted])
        assert entries.states is not None
        assert entries.states[:, -1].tolist() == [1, 1]
        # Adam's first moment is (1 - beta1) times the summed gradient, 1 + 1 + 1 and 1.
        moments = entries.states[:, :4].view(np.float32)
        np.testing.assert_allclose(moments[:, 0], [0.3, 0.1], rtol=1e-6)


@pytest.mark.parametrize("missing", range(4))
def test_w01_a_row_gone_before_the_update_loses_only_its_own_gradient(missing: int) -> None:
    ids = [10, 11, 12, 13]
    with faulty_cluster(2) as (worker, servers):
        result = worker.lookup_direct(features({"mean": [[x] for x in ids]}))
        before = dict(zip(ids, embeddings(servers, "mean", ids), strict=True))
        worker.clear_embeddings()
        held = [x for x in ids if x != ids[missing]]
        table = SCHEMA.slots["mean"].table
        signs = np.array([sign("mean", x) for x in held], np.uint64)
        rows = np.array([before[x] for x in held], np.float32)
        worker.set_embedding([TableEntries(table, signs, rows, None)])
        grads = np.arange(1, 5, dtype=np.float32)[:, None] * np.ones((4, 4), np.float32)
        report = worker.update(gradient(result, by_name={"mean": grads}))
        assert report.num_missing == 1
        steps = [0.5 * grads[ids.index(x)] for x in held]
        np.testing.assert_array_equal(embeddings(servers, "mean", held), rows - steps)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("num_servers", [1, 2])  # with one, rows lie as the ids do
@pytest.mark.parametrize("name", ["sum", "max", "mean", "sqrt", "jagged", "raw", "stack_mean"])
def test_w03_w04_rows_not_finite_are_left_out(
    name: str, num_servers: int, dtype: Any, bad: float
) -> None:
    dim = SCHEMA.slots[name].dim
    full = {name: [[1], [2], [3]]}
    ends = []
    for batch in (full, {name: [[1], [3]]}):  # one bad row, or the same without its sample
        with faulty_cluster(num_servers, optimizer=ADAGRAD) as (worker, _):
            worker.release(worker.lookup_direct(features(full)).ref or 0)
            result = worker.lookup_direct(features(batch))
            grads = np.ones((len(batch[name]), dim), dtype)
            if batch is full:
                grads[1, dim - 1] = bad
            sent = grads.copy()
            report = worker.update(gradient(result, by_name={name: grads}))
            np.testing.assert_array_equal(grads, sent)  # the trainer's memory
            assert report.nan_samples == ({name: 1} if batch is full else {})
            assert report.nan_rows == {}
            assert worker.stats().get(f"nan_samples.{name}", 0) == (batch is full)
            (after,) = worker.lookup_direct(features(full, requires_grad=False)).outputs
            ends.append(after.values if isinstance(after, PooledOutput) else after.rows)
    np.testing.assert_array_equal(ends[0], ends[1])


@pytest.mark.parametrize("bad", [0.0, np.inf])
def test_gradients_that_lie_as_the_rows_do_are_their_sums(bad: float) -> None:
    """Of several features of a table: with the result of the same ones that lie elsewhere."""
    slots = {name: {"dim": 2, "pooling": "jagged"} for name in ("one", "two", "three")}
    schema = EmbeddingSchema.load({"slots_config": slots})
    ids = {"one": [[1, 2], [2]], "two": [[7], []], "three": [[2, 9], [1]]}
    memory = np.arange(12, dtype=np.float32)
    memory[5] += bad
    apart = {}
    begin = 0
    for name, count in (("one", 2), ("two", 1), ("three", 3)):
        apart[name] = memory[begin : begin + 2 * count].reshape(-1, 2)
        begin += 2 * count
    rows = []
    for by_name in (apart, {name: one.copy() for name, one in apart.items()}):
        worker = make_worker(make_servers(1, schema), schema)
        result = worker.lookup_direct(features(ids))
        report = worker.update(gradient(result, by_name=by_name))
        assert report.nan_samples == ({"two": 1} if bad else {})
        outputs = worker.lookup_direct(features(ids, requires_grad=False)).outputs
        rows.append([one.rows for one in outputs if isinstance(one, JaggedOutput)])
    for one, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_w03_a_row_without_a_finite_contribution_takes_no_step() -> None:
    with faulty_cluster(2, optimizer=ADAM) as (worker, servers):
        result = worker.lookup_direct(features({"mean": [[1, 2], [2, 3], []]}))
        before = embeddings(servers, "mean", [1])
        grads = np.ones((3, 4), np.float32)
        grads[0, 0] = np.inf
        grads[2, 0] = np.nan  # reaches no id, so nothing is left out
        report = worker.update(gradient(result, by_name={"mean": grads}))
        assert report.nan_samples == {"mean": 1}
        assert embeddings(servers, "mean", [1]) == before
        moved = [a for server in servers for n, a in server.calls if n == "update"]
        signs = [s for (request,) in moved for part in request.tables for s in part.signs]
        assert sorted(signs) == [sign("mean", 2), sign("mean", 3)]


def test_w03_a_sum_that_overflows_is_left_out_and_counted() -> None:
    huge = np.full((2, 4), 3e38, np.float32)
    with faulty_cluster(2, optimizer=ADAGRAD) as (worker, servers):
        result = worker.lookup_direct(features({"max": [[9], [9]], "sum": [[1, 2], [2]]}))
        before = embeddings(servers, "sum", [2])
        report = worker.update(gradient(result, by_name={"sum": huge}))
        assert report.nan_samples == {}
        assert report.nan_rows == {"sum": 1} or report.nan_rows == {"max": 1}
        assert embeddings(servers, "sum", [2]) == before
        assert worker.stats()["updates"] == 1


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_each_place_is_dealt_once_and_evenly(weights: list[int], count: int) -> None:
    dealt = shares(weights, count)
    assert sorted(place for share in dealt for place in share) == list(range(len(weights)))
    assert len(dealt) == min(count, len(weights))
    totals = [sum(weights[place] + 1 for place in share) for share in dealt]
    if totals:
        assert max(totals) <= sum(totals) / count + max(weights) + 1


def test_slots_without_a_gradient_are_skipped_and_take_no_step() -> None:
    with faulty_cluster(2, optimizer=ADAM) as (worker, servers):
        result = worker.lookup_direct(
            features({"sum": [[1, 2]], "max": [[2, 3]], "mean": [[4]], "raw": [[5]]})
        )
        before = [embeddings(servers, "sum", [1]), embeddings(servers, "mean", [4])]
        given = {"max": np.ones((1, 4), np.float32), "sum": None, "raw": np.ones((1, 8), "f4")}
        slots = tuple(SlotGradient(name, values) for name, values in given.items())
        report = worker.update(BatchGradients(result.ref or 0, (0, 0), slots))
        assert report.skipped == ("sum", "mean")
        assert [embeddings(servers, "sum", [1]), embeddings(servers, "mean", [4])] == before
        assert worker.stats()["skipped_slots"] == 2
