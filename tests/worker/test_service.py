"""The embedding-worker over real servers: refs, retries, what is left out, refusals."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.signs import hash_stack
from persia._rpc import messages
from persia._rpc.messages import (
    BatchGradients,
    IDFeatures,
    JaggedOutput,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    PooledOutput,
    RawOutput,
    SlotGradient,
    TableEntries,
    TableRows,
    TableSigns,
    UpdateReply,
    UpdateRequest,
)
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema
from persia.errors import (
    ConfigError,
    DataError,
    DataTypeError,
    DimMismatch,
    NotConfigured,
    ProtocolError,
    ServiceBusy,
    ServiceUnavailable,
    StoreError,
    UnknownRef,
)
from tests.support.services import (
    ADAGRAD,
    ADAM,
    CONFIG,
    SCHEMA,
    SETTINGS,
    SGD,
    features,
    gradient,
    make_servers,
    make_worker,
    settings,
    sign,
    value,
)

WIDE = 2**56  # the first id that does not fit 64 - 8 bits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Faulty:
    """A server whose next calls fail, before or after they took effect."""

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        self.fail_before: list[str] = []
        self.fail_after: list[str] = []
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.server, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.fail_before:
                self.fail_before.remove(name)
                raise ServiceUnavailable(f"{name} was not heard")
            result = found(*arguments)
            if name in self.fail_after:
                self.fail_after.remove(name)
                raise ServiceUnavailable(f"the answer to {name} was lost")
            return result

        return call


@contextlib.contextmanager
def cluster(
    num_servers: int = 2, *, optimizer: OptimizerSettings = SGD, **more: Any
) -> Iterator[tuple[EmbeddingWorker, list[Faulty]]]:
    faulty = [Faulty(server) for server in make_servers(num_servers, optimizer=optimizer)]
    with contextlib.closing(make_worker(faulty, **more)) as worker:
        yield worker, faulty


def embeddings(servers: list[Faulty], name: str, ids: list[int]) -> list[Any]:
    plain = [server.server for server in servers]
    return [value(plain, name, x).tolist() for x in ids]


def test_both_roles_answer_their_protocols() -> None:
    server: messages.ParameterServer = make_servers()[0]  # mypy is the test
    worker: messages.EmbeddingWorker = make_worker([server])
    assert worker.get_embedding_size() == [server.get_embedding_size()]


# --- the set of servers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda two, three: [], "expected at least one"),
        (lambda two, three: two[:1], "0 is one of 2, expected one of 1"),
        (lambda two, three: [two[0], two[0]], r"0 of 2 was given twice; missing: \[1\]"),
        (lambda two, three: [*two, three[2]], "is one of 2, expected one of 3"),
    ],
)
def test_the_set_of_servers_must_be_whole(pick: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_worker(pick(make_servers(2), make_servers(3)))


def test_servers_may_come_in_any_order() -> None:
    servers = make_servers(3)
    with contextlib.closing(make_worker(servers[::-1])) as worker:
        worker.lookup_direct(features({"sum": [list(range(50))]}))
        sizes = [server.get_embedding_size() for server in servers]
        assert worker.get_embedding_size() == sizes
        assert all(sizes)


def test_w07_servers_that_number_groups_otherwise_are_refused() -> None:
    other = copy.deepcopy(CONFIG)
    other["slots_config"] = {"new": {"dim": 4}} | other["slots_config"]
    with pytest.raises(ConfigError, match="server 0 of 1 has another embedding config"):
        make_worker(make_servers(1, EmbeddingSchema.load(other)))


# --- outputs --------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_batch_and_own_their_memory() -> None:
    with cluster(1) as (worker, _):
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
    with cluster(2) as (worker, servers):
        result = worker.lookup_direct(features({"stack_raw": [[1, 2], [3]]}))
        (output,) = result.outputs
        assert isinstance(output, RawOutput)
        plain = [server.server for server in servers]
        buckets = hash_stack(np.array([1, 2, 3], np.uint64), 2, 3).reshape(3, 2)
        for d in range(3):
            first, second = (value(plain, "stack_raw", int(x)) for x in buckets[d])
            np.testing.assert_array_equal(output.rows[d + 1], first + second)


def test_w35_many_ids_in_few_buckets_stay_in_range() -> None:
    ids = list(range(100))
    with cluster(2) as (worker, _):
        result = worker.lookup_direct(features({"stack_raw": [ids[i : i + 3] for i in ids]}))
        (output,) = result.outputs
        assert isinstance(output, RawOutput)
        assert output.rows.shape == (101, 8)
        assert output.index.max() == 100
        worker.update(gradient(result))
        assert sum(worker.get_embedding_size()) <= 2 * 3


@pytest.mark.parametrize("name", sorted(SCHEMA.slots))
def test_w36_a_feature_without_any_id_has_zero_rows(name: str) -> None:
    with cluster(2) as (worker, servers):
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
        # W-62: nobody is asked for nothing.
        names = [name for server in servers for name, _ in server.calls]
        assert "lookup" not in names
        assert "update" not in names


def test_a_batch_without_features_is_legal() -> None:
    with cluster() as (worker, _):
        result = worker.lookup_direct(IDFeatures((), 0, True))
        assert result.outputs == ()
        worker.update(gradient(result))


def test_raw_ids_beyond_the_fixed_size_are_not_even_looked_up() -> None:
    with cluster(1) as (worker, _):
        worker.lookup_direct(features({"raw": [[1, 2, 3, 4, 5], [6]]}))
        assert worker.get_embedding_size() == [4]


def test_w62_each_sign_is_asked_for_once_and_only_where_it_lives() -> None:
    with cluster(4) as (worker, servers):
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


@pytest.mark.parametrize("name", ["mean", "sqrt", "max", "raw", "jagged", "stack_mean"])
def test_weights_are_refused_where_nothing_is_summed(name: str) -> None:
    weights = {name: [np.ones(2, np.float32)]}
    with cluster() as (worker, _):
        given = features({name: [[1, 2]]}, weights=weights)
        for call in (worker.register, worker.lookup_direct):
            with pytest.raises(DataError, match=f"'{name}' has weights, which only .* 'sum'"):
                call(given)
        assert worker.stats()["in_flight"] == 0


def test_single_ids_are_the_same_as_samples_of_one() -> None:
    ids = np.array([5, 3, 5, 9], np.uint64)
    results = []
    makes: list[Callable[[str], FeatureBatch]] = [
        lambda name: FeatureBatch.from_single(name, ids),
        lambda name: FeatureBatch.from_csr(name, ids, np.arange(5, dtype=np.int64)),
    ]
    for make in makes:
        with cluster(2) as (worker, servers):
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


# --- steps ----------------------------------------------------------------------------------


def test_w29_a_row_of_two_slots_takes_one_step() -> None:
    with cluster(1, optimizer=ADAM) as (worker, servers):
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


def test_w29_ids_that_masking_folds_together_take_one_step() -> None:
    with cluster(1, optimizer=ADAM) as (worker, servers):
        result = worker.lookup_direct(features({"mean": [[7], [WIDE + 7]]}))
        assert worker.get_embedding_size() == [1]
        one, two = result.outputs[0].values  # type: ignore[union-attr]
        np.testing.assert_array_equal(one, two)
        worker.update(gradient(result))
        updates = [arguments[0] for name, arguments in servers[0].calls if name == "update"]
        assert [part.signs.tolist() for part in updates[0].tables] == [[sign("mean", 7)]]
        np.testing.assert_array_equal(updates[0].tables[0].gradients, np.full((1, 4), 2.0))


@pytest.mark.parametrize("missing", range(4))
def test_w01_a_row_gone_before_the_update_loses_only_its_own_gradient(missing: int) -> None:
    ids = [10, 11, 12, 13]
    with cluster(2) as (worker, servers):
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
@pytest.mark.parametrize("name", ["sum", "max", "mean", "sqrt", "jagged", "raw", "stack_mean"])
def test_w03_w04_rows_of_the_gradient_that_are_not_finite_are_left_out_one_by_one(
    name: str, dtype: Any, bad: float
) -> None:
    dim = SCHEMA.slots[name].dim
    full = {name: [[1], [2], [3]]}
    ends = []
    for batch in (full, {name: [[1], [3]]}):  # one bad row, or the same without its sample
        with cluster(2, optimizer=ADAGRAD) as (worker, _):
            worker.release(worker.lookup_direct(features(full)).ref or 0)
            result = worker.lookup_direct(features(batch))
            grads = np.ones((len(batch[name]), dim), dtype)
            if batch is full:
                grads[1, dim - 1] = bad
            report = worker.update(gradient(result, by_name={name: grads}))
            assert report.nan_samples == ({name: 1} if batch is full else {})
            assert report.nan_rows == {}
            assert worker.stats().get(f"nan_samples.{name}", 0) == (batch is full)
            (after,) = worker.lookup_direct(features(full, requires_grad=False)).outputs
            ends.append(after.values if isinstance(after, PooledOutput) else after.rows)
    np.testing.assert_array_equal(ends[0], ends[1])


def test_w03_a_row_without_a_finite_contribution_takes_no_step() -> None:
    with cluster(2, optimizer=ADAM) as (worker, servers):
        result = worker.lookup_direct(features({"mean": [[1, 2], [2, 3], []]}))
        before = embeddings(servers, "mean", [1])
        grads = np.ones((3, 4), np.float32)
        grads[0, 0] = np.inf
        grads[2, 0] = np.nan  # reaches no id, so nothing is left out
        assert worker.update(gradient(result, by_name={"mean": grads})).nan_samples == {
            "mean": 1
        }
        assert embeddings(servers, "mean", [1]) == before
        moved = [a for server in servers for n, a in server.calls if n == "update"]
        signs = [s for (request,) in moved for part in request.tables for s in part.signs]
        assert sorted(signs) == [sign("mean", 2), sign("mean", 3)]


def test_w03_a_sum_that_overflows_is_left_out_and_counted() -> None:
    huge = np.full((2, 4), 3e38, np.float32)
    with cluster(2, optimizer=ADAGRAD) as (worker, servers):
        result = worker.lookup_direct(features({"max": [[9], [9]], "sum": [[1, 2], [2]]}))
        before = embeddings(servers, "sum", [2])
        report = worker.update(gradient(result, by_name={"sum": huge}))
        assert report.nan_samples == {}
        assert report.nan_rows == {"sum": 1} or report.nan_rows == {"max": 1}
        assert embeddings(servers, "sum", [2]) == before
        assert worker.stats()["updates"] == 1


def test_slots_without_a_gradient_are_skipped_and_take_no_step() -> None:
    with cluster(2, optimizer=ADAM) as (worker, servers):
        result = worker.lookup_direct(
            features({"sum": [[1, 2]], "max": [[2, 3]], "mean": [[4]], "raw": [[5]]})
        )
        before = [embeddings(servers, "sum", [1]), embeddings(servers, "mean", [4])]
        report = worker.update(
            BatchGradients(
                result.ref or 0,
                (0, 0),
                (
                    SlotGradient("max", np.ones((1, 4), np.float32)),
                    SlotGradient("sum", None),
                    SlotGradient("raw", np.ones((1, 8), np.float32)),
                ),
            )
        )
        assert report.skipped == ("sum", "mean")
        assert [embeddings(servers, "sum", [1]), embeddings(servers, "mean", [4])] == before
        assert worker.stats()["skipped_slots"] == 2


# --- refs -----------------------------------------------------------------------------------


def test_a_ref_lives_from_registration_to_its_acknowledged_gradient() -> None:
    with cluster() as (worker, _):
        ref = worker.register(features({"sum": [[1, 2]]}))
        first, second = worker.lookup(ref, True), worker.lookup(ref, True)
        assert first.ref == second.ref == ref
        np.testing.assert_array_equal(
            first.outputs[0].values,  # type: ignore[union-attr]
            second.outputs[0].values,  # type: ignore[union-attr]
        )
        assert worker.lookup(ref, False).ref is None
        worker.update(gradient(second))
        with pytest.raises(UnknownRef, match=f"ref {ref}"):
            worker.lookup(ref, True)
        assert worker.stats()["in_flight"] == 0


def test_w13_the_same_batch_registered_again_has_the_same_ref() -> None:
    with cluster() as (worker, _):
        batch = {"sum": [[1, 2], []], "raw": [[3], [4]]}
        ref = worker.register(features(batch, 5))
        assert worker.register(features(batch, 5)) == ref
        others = [
            features(batch, 6),
            features(batch, 5, requires_grad=False),
            features({"sum": [[1, 2], []]}, 5),
            features({"sum": [[1], [2]], "raw": [[3], [4]]}, 5),
            features({"sum": [[2, 1], []], "raw": [[3], [4]]}, 5),
            features({"sum": [[1, 2], []], "raw": [[3], [5]]}, 5),
        ]
        refs = [worker.register(other) for other in others]
        assert len({ref, *refs}) == 7
        assert worker.stats()["registered"] == 7
        assert worker.stats()["registered_again"] == 1


def test_w13_single_ids_and_samples_of_ids_are_told_apart() -> None:
    ids = np.array([1, 2], np.uint64)
    one = FeatureBatch.from_single("sum", ids)
    two = FeatureBatch.from_csr("sum", ids, np.array([0, 2, 2]))
    with cluster() as (worker, _):
        refs = [worker.register(IDFeatures((batch,), 0, True)) for batch in (one, two)]
        assert refs[0] != refs[1]


def test_w13_other_weights_make_another_batch() -> None:
    batch = {"sum": [[1, 2], []]}
    ones, twos = ([np.full(len(x), w, np.float32) for x in batch["sum"]] for w in (1, 2))
    made = [features(batch), *(features(batch, weights={"sum": w}) for w in (ones, twos))]
    with cluster() as (worker, _):
        refs = [worker.register(one) for one in made]
        assert len(set(refs)) == 3
        assert worker.register(made[-1]) == refs[-1]


def test_w13_an_acknowledged_update_is_answered_again() -> None:
    with cluster() as (worker, servers):
        result = worker.lookup_direct(features({"sum": [[1]]}))
        report = worker.update(gradient(result, (0, 4)))
        after = embeddings(servers, "sum", [1])
        again = worker.update(gradient(result, (0, 4)))
        assert (again.num_missing, again.repeated) == (report.num_missing, True)
        assert not report.repeated
        assert embeddings(servers, "sum", [1]) == after
        with pytest.raises(UnknownRef):
            worker.update(gradient(result, (0, 5)))


def test_an_update_id_used_before_is_reported_and_changes_nothing() -> None:
    with cluster() as (worker, servers):
        batch = features({"sum": [[1]]})
        worker.update(gradient(worker.lookup_direct(batch), (0, 4)))
        after = embeddings(servers, "sum", [1])
        assert worker.update(gradient(worker.lookup_direct(batch), (0, 4))).repeated
        assert embeddings(servers, "sum", [1]) == after
        assert worker.stats()["repeated_updates"] == 1


@pytest.mark.parametrize("when", ["fail_before", "fail_after"])
@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_w11_an_update_that_failed_on_one_server_is_called_again(
    when: str, broken: int
) -> None:
    ids = list(range(40))
    with cluster(4, optimizer=ADAM) as (worker, servers), cluster(1, optimizer=ADAM) as twin:
        batch = features({"sum": [ids, ids[::2]], "stack": [ids[:9], []]})
        result = worker.lookup_direct(batch)
        getattr(servers[broken], when).append("update")
        with pytest.raises(ServiceUnavailable):
            worker.update(gradient(result))
        assert worker.stats()["in_flight"] == 1
        assert worker.stats()["failed_updates"] == 1
        with pytest.raises(DataError, match=r"expected update id \(0, 0\) again"):
            worker.update(gradient(result, (0, 1)))
        worker.update(gradient(result))
        assert worker.stats()["in_flight"] == 0
        num_updates = [[n for n, _ in s.calls].count("update") for s in servers]
        assert num_updates == [1 + (i == broken) for i in range(4)]
        want = twin[0].lookup_direct(batch)
        twin[0].update(gradient(want))
        assert embeddings(servers, "sum", ids) == embeddings(twin[1], "sum", ids)


def test_w13_a_failed_lookup_keeps_the_ref_and_draws_the_same() -> None:
    with cluster(2) as (worker, servers):
        worker.configure(settings(admit_probability=0.5))
        ref = worker.register(features({"sum": [list(range(64))]}))
        servers[1].fail_after.append("lookup")
        with pytest.raises(ServiceUnavailable):
            worker.lookup(ref, True)
        rows = sum(worker.get_embedding_size())
        worker.lookup(ref, True)
        assert sum(worker.get_embedding_size()) == rows


def test_w25_a_direct_lookup_that_failed_leaves_nothing_in_flight() -> None:
    with cluster(2) as (worker, servers):
        servers[0].fail_before.append("lookup")
        with pytest.raises(ServiceUnavailable):
            worker.lookup_direct(features({"sum": [list(range(9))]}))
        assert worker.stats()["in_flight"] == 0
        worker.lookup_direct(features({"sum": [[1]]}, requires_grad=False))
        assert worker.stats()["in_flight"] == 0


def test_a_released_ref_is_gone_and_may_be_released_again() -> None:
    with cluster() as (worker, _):
        ref = worker.register(features({"sum": [[1]]}))
        worker.release(ref)
        worker.release(ref)
        worker.release(12345)
        assert worker.stats()["released"] == 1
        for call in (
            lambda: worker.lookup(ref, True),
            lambda: worker.update(BatchGradients(ref, (0, 0), ())),
        ):
            with pytest.raises(UnknownRef, match="register the batch again"):
                call()
        assert worker.register(features({"sum": [[1]]})) != ref


def test_w46_what_nobody_uses_expires_by_its_own_age() -> None:
    clock = Clock()
    with cluster(clock=clock, buffered_data_expired_sec=10) as (worker, _):
        refs = [worker.register(features({"sum": [[x]]}, x)) for x in range(3)]
        clock.now += 6
        result = worker.lookup(refs[0], True)  # used, so it stays
        clock.now += 3.9
        assert worker.stats()["in_flight"] == 3
        clock.now += 0.1
        assert worker.stats()["in_flight"] == 1
        assert worker.stats()["expired"] == 2
        with pytest.raises(UnknownRef, match=r"unused for 10 s"):
            worker.lookup(refs[1], True)
        worker.update(gradient(result))
        # A batch looked up, whose gradient never came, goes as well.
        worker.lookup_direct(features({"sum": [[1]]}))
        clock.now += 10
        worker.register(features({"sum": [[1]]}, 9))
        assert worker.stats()["in_flight"] == 1
        assert worker.stats()["expired"] == 3


def test_w46_the_buffer_is_bounded_and_a_full_one_changes_nothing() -> None:
    with cluster(forward_buffer_size=2) as (worker, _):
        first = worker.register(features({"sum": [[1]]}, 1))
        worker.register(features({"sum": [[2]]}, 2))
        for call in (worker.register, worker.lookup_direct):
            with pytest.raises(ServiceBusy, match="forward_buffer_size = 2"):
                call(features({"sum": [[3]]}, 3))
        assert worker.register(features({"sum": [[1]]}, 1)) == first
        worker.lookup_direct(features({"sum": [[3]]}, requires_grad=False))
        assert sum(worker.get_embedding_size()) == 0
        assert worker.stats()["refused_busy"] == 2
        worker.release(first)
        worker.register(features({"sum": [[3]]}, 3))


def test_a_ref_of_another_incarnation_is_unknown() -> None:
    servers = make_servers()
    refs = [make_worker(servers).register(features({"sum": [[1]]})) for _ in range(3)]
    assert len(set(refs)) == 3
    with pytest.raises(UnknownRef):
        make_worker(servers).lookup(refs[0], True)


def test_a_repeated_update_waits_for_the_first() -> None:
    servers = make_servers()
    started, may_end = threading.Event(), threading.Event()

    class Slow(Faulty):
        def update(self, request: UpdateRequest) -> UpdateReply:
            started.set()
            assert may_end.wait(10)
            self.calls.append(("update", (request,)))
            return self.server.update(request)

    slow = Slow(servers[0])
    worker = make_worker([slow])
    result = worker.lookup_direct(features({"sum": [[1]]}))
    reports = []
    threads = [
        threading.Thread(target=lambda: reports.append(worker.update(gradient(result))))
        for _ in range(2)
    ]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert sorted(report.repeated for report in reports) == [False, True]
    assert [name for name, _ in slow.calls].count("update") == 1


def test_another_update_of_a_ref_that_waits_for_the_first_is_refused() -> None:
    started, may_end = threading.Event(), threading.Event()

    class Slow(Faulty):
        def update(self, request: UpdateRequest) -> UpdateReply:
            started.set()
            assert may_end.wait(10)
            return self.server.update(request)

    worker = make_worker([Slow(make_servers()[0])])
    result = worker.lookup_direct(features({"sum": [[1]]}))
    ends: list[object] = []

    def call(number: int) -> None:
        try:
            ends.append(worker.update(gradient(result, (0, number))).repeated)
        except UnknownRef as error:
            ends.append(type(error))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert sorted(ends, key=str) == [UnknownRef, False]


def test_w49_no_lock_is_held_while_a_server_is_asked() -> None:
    asked, may_end = threading.Event(), threading.Event()

    class Slow(Faulty):
        def lookup(self, request: LookupRequest) -> LookupReply:
            if request.batch_id == 0:
                asked.set()
                assert may_end.wait(10)
            return self.server.lookup(request)

    worker = make_worker([Slow(make_servers()[0])])
    slow = threading.Thread(target=lambda: worker.lookup_direct(features({"sum": [[1]]}, 0)))
    slow.start()
    assert asked.wait(10)
    # In a thread, so that a lock would be a failure and no hang.
    others = threading.Thread(
        target=lambda: worker.update(
            gradient(worker.lookup_direct(features({"sum": [[1]]}, 1)), (0, 1))
        )
    )
    others.start()
    others.join(5)
    assert not others.is_alive()
    assert worker.stats()["updates"] == 1
    may_end.set()
    slow.join(10)


# --- ids that do not fit --------------------------------------------------------------------


def test_ids_beyond_the_index_bits_are_counted_with_one_warning_a_feature(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with cluster() as (worker, _), caplog.at_level(logging.WARNING):
        batch = {"sum": [[1, WIDE], [2**64 - 1]], "max": [[WIDE - 1], []]}
        batch["stack"] = [[2**64 - 1], []]
        ref = worker.register(features(batch, 0))
        worker.lookup(ref, True)
        worker.lookup_direct(features(batch, 1))
        worker.lookup_direct(features({"mean": [[WIDE]]}, requires_grad=False))
        stats = worker.stats()
        masked = {name: stats[name] for name in stats if name.startswith("masked_ids")}
        assert masked == {"masked_ids.sum": 4, "masked_ids.mean": 1}
        warned = [
            r.getMessage() for r in caplog.records if "more than 56 bits" in r.getMessage()
        ]
        assert len(warned) == 2
        assert warned[0].startswith("feature 'sum': 2 ids")


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


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            features({"summ": [[1]]}),
            "'summ' is not in the embedding config; did you mean 'sum'",
        ),
        (
            IDFeatures(2 * features({"sum": [[1]]}).features, 0, True),
            "'sum' comes twice in one batch",
        ),
        (
            features({"sum": [[1]], "max": [[1], [2]]}),
            "'max' has 2 samples, expected 1 as in feature 'sum'",
        ),
    ],
)
def test_w22_bad_batches_are_refused_before_anything_has_changed(
    batch: IDFeatures, message: str
) -> None:
    with cluster() as (worker, _):
        for call in (worker.register, worker.lookup_direct):
            with pytest.raises(DataError, match=message):
                call(batch)
        assert worker.stats()["in_flight"] == 0
        assert sum(worker.get_embedding_size()) == 0


GOOD = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("grads", "scale", "error", "message"),
    [
        ([("summ", GOOD)], 1.0, DataError, "'summ' is not in the batch .* mean 'sum'"),
        ([("mean", GOOD)], 1.0, DataError, "'mean' is not in the batch of this ref"),
        ([("sum", GOOD), ("sum", GOOD)], 1.0, DataError, "'sum' comes twice"),
        ([("sum", GOOD[:1])], 1.0, DataError, r"'sum' \(sum\): .* \[2, 4\], got \[1, 4\]"),
        ([("sum", GOOD[:, :3])], 1.0, DataError, r"\[2, 4\], got \[2, 3\]"),
        (
            [("raw", np.ones((4, 8), np.float32))],
            1.0,
            DataError,
            r"'raw' .*\[3, 8\], got \[4, 8\]",
        ),
        ([("sum", GOOD.astype(np.float64))], 1.0, DataTypeError, "'sum': .* got float64"),
        ([("sum", [[1.0]])], 1.0, DataTypeError, "got list"),
        ([("sum", GOOD)], 0.0, DataError, "scale .* got 0.0"),
        ([("sum", GOOD)], -1.0, DataError, "scale .* got -1.0"),
        ([("sum", GOOD)], np.nan, DataError, "scale .* got nan"),
        ([("sum", GOOD)], np.inf, DataError, "scale .* got inf"),
        ([("sum", GOOD)], 1e-40, DataError, "scale .* got 1e-40"),
    ],
)
def test_w16_bad_gradients_are_refused_before_anything_has_changed(
    grads: list[tuple[str, Any]], scale: float, error: type[Exception], message: str
) -> None:
    with cluster() as (worker, servers):
        batch = features({"sum": [[1], [2]], "raw": [[1, 2], [3]]})
        result = worker.lookup_direct(batch)
        before = embeddings(servers, "sum", [1, 2])
        good = SlotGradient("raw", np.ones((3, 8), np.float32))
        slots = [SlotGradient(*item) for item in grads]
        if grads[0][0] != "raw":
            slots.append(good)
        with pytest.raises(error, match=message):
            worker.update(BatchGradients(result.ref or 0, (0, 0), tuple(slots), scale))
        assert embeddings(servers, "sum", [1, 2]) == before
        assert not worker.update(gradient(result)).repeated


def test_gradients_before_a_training_lookup_are_refused() -> None:
    with cluster() as (worker, _):
        ref = worker.register(features({"sum": [[1]]}))
        worker.lookup(ref, False)
        with pytest.raises(DataError, match=f"ref {ref}: expected a training lookup"):
            worker.update(BatchGradients(ref, (0, 0), ()))


def test_an_unconfigured_cluster_trains_nothing_and_evaluates_to_zeros() -> None:
    worker = make_worker(make_servers(1, hyper=None, optimizer=None))
    assert not worker.ready_for_serving()
    with pytest.raises(NotConfigured):
        worker.lookup_direct(features({"sum": [[1]]}))
    result = worker.lookup_direct(features({"sum": [[1]]}, requires_grad=False))
    np.testing.assert_array_equal(
        result.outputs[0].values,  # type: ignore[union-attr]
        np.zeros((1, 4)),
    )
    worker.configure(SETTINGS)
    worker.register_optimizer(SGD)
    assert worker.ready_for_serving()
    worker.lookup_direct(features({"sum": [[1]]}))


def test_w15_settings_reach_every_server_before_the_call_returns() -> None:
    servers = [Faulty(s) for s in make_servers(3, hyper=None, optimizer=None)]
    with contextlib.closing(make_worker(servers)) as worker:
        servers[1].fail_before.append("configure")
        with pytest.raises(ServiceUnavailable):
            worker.configure(SETTINGS)
        worker.configure(SETTINGS)
        worker.register_optimizer(ADAM)
        assert all(server.server.ready_for_serving() for server in servers)


def test_rows_of_the_wrong_shape_from_a_server_are_refused_by_name() -> None:
    class Wrong(Faulty):
        def lookup(self, request: LookupRequest) -> LookupReply:
            parts = tuple(
                TableRows(part.table, np.zeros((len(part.signs), 3), np.float32), None)
                for part in request.tables
            )
            return LookupReply(parts)

    worker = make_worker([Wrong(make_servers()[0])])
    with pytest.raises(ProtocolError, match=r"expected rows \[1, 4\] of table 0") as caught:
        worker.lookup_direct(features({"sum": [[1]]}))
    assert caught.value.replica == 0


# --- rows from outside ----------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 2, 50])
def test_w33_any_number_of_rows_is_written_to_any_number_of_servers(num_rows: int) -> None:
    with cluster(4) as (worker, servers):
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
        ({"values": np.zeros((1, 5), np.float32)}, DimMismatch, "got 5"),
        ({"signs": np.array([1], np.int64)}, DataTypeError, "uint64"),
        ({"table": 77}, StoreError, "got 77"),
    ],
)
def test_bad_rows_are_refused(change: Any, error: type[Exception], message: str) -> None:
    good = {
        "table": SCHEMA.slots["mean"].table,
        "signs": np.array([sign("mean", 1)], np.uint64),
        "values": np.zeros((1, 4), np.float32),
        "states": None,
    }
    with cluster() as (worker, _):
        with pytest.raises(error, match=message):
            worker.set_embedding([TableEntries(**(good | change))])
        assert sum(worker.get_embedding_size()) == 0
