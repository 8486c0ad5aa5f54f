"""The embedding-worker over real servers: refs, calls that fail half way, and refusals."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import BatchGradients, FeatureOrder, IDFeatures, SlotGradient
from persia.errors import DataError, DataTypeError, ServiceBusy, ServiceUnavailable, UnknownRef
from tests.support.services import ADAM, features, gradient, make_servers, make_worker, settings
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S
from tests.worker.cluster import Slow, embeddings, faulty_cluster


def test_a_ref_lives_from_registration_to_its_acknowledged_gradient() -> None:
    with faulty_cluster() as (worker, _):
        ref = worker.register(features({"sum": [[1, 2]]}))
        first, second = worker.lookup(ref, True), worker.lookup(ref, True)
        assert first.ref == second.ref == ref
        one, two = (found.outputs[0].values for found in (first, second))  # type: ignore[union-attr]
        np.testing.assert_array_equal(one, two)
        assert worker.lookup(ref, False).ref is None
        worker.update(gradient(second))
        with pytest.raises(UnknownRef, match=f"ref {ref}"):
            worker.lookup(ref, True)
        assert worker.stats()["in_flight"] == 0


def test_w13_the_same_batch_registered_again_has_the_same_ref() -> None:
    with faulty_cluster() as (worker, _):
        batch = {"sum": [[1, 2], []], "raw": [[3], [4]]}
        ref = worker.register(features(batch, 5))
        assert worker.register(features(batch, 5)) == ref
        ones, twos = ([np.full(len(x), w, np.float32) for x in batch["sum"]] for w in (1, 2))
        ids = np.array([1, 2], np.uint64)
        others = [
            features(batch, 6),
            features(batch, 5, requires_grad=False),
            features(batch, 5, weights={"sum": ones}),
            features(batch, 5, weights={"sum": twos}),
            IDFeatures((FeatureBatch.from_single("sum", ids),), 5, True),
            features({"sum": [[1, 2], []]}, 5),
            features({"sum": [[1], [2]], "raw": [[3], [4]]}, 5),
            features({"sum": [[2, 1], []], "raw": [[3], [4]]}, 5),
            features({"sum": [[1, 2], []], "raw": [[3], [5]]}, 5),
            # Each sample's id on a server of its own, and then the other way round.
            *(features({"mean": [[one], [two]]}, 5) for one, two in ((1, 2), (2, 1))),
        ]
        refs = [worker.register(other) for other in others]
        assert len({ref, *refs}) == worker.stats()["registered"] == 12
        assert worker.stats()["registered_again"] == 1


def test_w13_an_acknowledged_update_is_answered_again() -> None:
    with faulty_cluster() as (worker, servers):
        result = worker.lookup_direct(features({"sum": [[1]]}))
        report = worker.update(gradient(result, (0, 4)))
        after = embeddings(servers, "sum", [1])
        again = worker.update(gradient(result, (0, 4)))
        assert (again.num_missing, again.repeated) == (report.num_missing, True)
        assert not report.repeated
        assert embeddings(servers, "sum", [1]) == after
        with pytest.raises(UnknownRef):
            worker.update(gradient(result, (0, 5)))


def test_a_released_ref_is_gone_and_may_be_released_again() -> None:
    with faulty_cluster() as (worker, _):
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


def test_w46_what_is_not_used_expires_by_its_own_age() -> None:
    now = 1000.0
    with faulty_cluster(clock=lambda: now, buffered_data_expired_sec=10) as (worker, _):
        refs = [worker.register(features({"sum": [[x]]}, x)) for x in range(3)]
        now += 6
        result = worker.lookup(refs[0], True)  # used, so it stays
        now += 3.9
        assert worker.stats()["in_flight"] == 3
        now += 0.1
        assert worker.stats()["in_flight"] == 1
        assert worker.stats()["expired"] == 2
        with pytest.raises(UnknownRef, match=r"unused for 10 s"):
            worker.lookup(refs[1], True)
        worker.update(gradient(result))
        # A batch looked up, whose gradient never came, goes as well.
        worker.lookup_direct(features({"sum": [[1]]}))
        now += 10
        worker.register(features({"sum": [[1]]}, 9))
        assert worker.stats()["in_flight"] == 1
        assert worker.stats()["expired"] == 3


def test_w46_the_buffer_is_bounded_and_a_full_one_changes_nothing() -> None:
    with faulty_cluster(forward_buffer_size=2) as (worker, _):
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


@pytest.mark.parametrize("other", [0, 1])
def test_an_update_waits_for_the_one_before_of_its_ref(other: int) -> None:
    """The same one is answered again, another is refused."""
    slow = Slow("update")
    worker = make_worker([slow])
    result = worker.lookup_direct(features({"sum": [[1]]}))
    first = Background(lambda: worker.update(gradient(result, (0, 0))))
    assert slow.started.wait(PATIENCE_S)
    second = Background(lambda: worker.update(gradient(result, (0, other))))
    slow.may_end.set()
    assert not first.result().repeated
    if other == 0:
        assert second.result().repeated
    else:
        with pytest.raises(UnknownRef):
            second.result()
    assert [name for name, _ in slow.calls].count("update") == 1


# --- failures and refusals ------------------------------------------------------------------


@pytest.mark.parametrize("when", ["fail_before", "fail_after"])
@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_w11_an_update_failed_on_one_server_is_called_again(when: str, broken: int) -> None:
    ids = list(range(40))
    with (
        faulty_cluster(4, optimizer=ADAM) as (worker, servers),
        faulty_cluster(1, optimizer=ADAM) as twin,
    ):
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
    with faulty_cluster(2) as (worker, servers):
        worker.configure(settings(admit_probability=0.5))
        ref = worker.register(features({"sum": [list(range(64))]}))
        servers[1].fail_after.append("lookup")
        with pytest.raises(ServiceUnavailable):
            worker.lookup(ref, True)
        rows = sum(worker.get_embedding_size())
        worker.lookup(ref, True)
        assert sum(worker.get_embedding_size()) == rows


def test_w25_a_direct_lookup_that_failed_leaves_nothing_in_flight() -> None:
    with faulty_cluster(2) as (worker, servers):
        servers[0].fail_before.append("lookup")
        with pytest.raises(ServiceUnavailable):
            worker.lookup_direct(features({"sum": [list(range(9))]}))
        assert worker.stats()["in_flight"] == 0
        worker.lookup_direct(features({"sum": [[1]]}, requires_grad=False))
        assert worker.stats()["in_flight"] == 0


GOOD = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("grads", "scale", "error", "message"),
    [
        ([("summ", GOOD)], 1.0, DataError, "'summ' is not in the batch of this ref"),
        ([("sum", GOOD), ("sum", GOOD)], 1.0, DataError, "'sum' comes twice"),
        ([("sum", GOOD[:1])], 1.0, DataError, r"'sum' \(sum\): .* \[2, 4\], got \[1, 4\]"),
        ([("sum", GOOD[:, :3])], 1.0, DataError, r"\[2, 4\], got \[2, 3\]"),
        ([("raw", np.ones((4, 8), np.float32))], 1.0, DataError, r"'raw' .*\[3, 8\]"),
        ([("sum", GOOD.astype(np.float64))], 1.0, DataTypeError, "'sum': .* got float64"),
        ([("sum", [[1.0]])], 1.0, DataTypeError, "got list"),
        *(
            ([("sum", GOOD)], scale, DataError, f"scale .* got {scale}")
            for scale in (0.0, -1.0, np.nan, np.inf, 1e-40)
        ),
    ],
)
def test_w16_bad_gradients_are_refused_before_anything_has_changed(
    grads: list[tuple[str, Any]], scale: float, error: type[Exception], message: str
) -> None:
    with faulty_cluster() as (worker, servers):
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
    with faulty_cluster() as (worker, _):
        ref = worker.register(features({"sum": [[1]]}))
        worker.lookup(ref, False)
        with pytest.raises(DataError, match=f"ref {ref}: expected a training lookup"):
            worker.update(BatchGradients(ref, (0, 0), ()))


def test_an_update_id_used_before_is_reported_and_changes_nothing() -> None:
    with faulty_cluster() as (worker, servers):
        batch = features({"sum": [[1]]})
        worker.update(gradient(worker.lookup_direct(batch), (0, 4)))
        after = embeddings(servers, "sum", [1])
        assert worker.update(gradient(worker.lookup_direct(batch), (0, 4))).repeated
        assert embeddings(servers, "sum", [1]) == after
        assert worker.stats()["repeated_updates"] == 1


def test_two_ranks_that_replace_an_order_at_once_get_one() -> None:
    both = threading.Barrier(2)

    class Compared(FeatureOrder):
        """Each comparison with it waits for another one, which a lock keeps away."""

        def __eq__(self, other: object) -> bool:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return self is other

        __hash__ = None  # type: ignore[assignment]

    with faulty_cluster() as (worker, _), ThreadPoolExecutor(2) as threads:
        old = Compared((), (), ())
        worker.fix_feature_order(old, None)
        orders = [FeatureOrder((name,), (), ()) for name in "ab"]
        found = list(threads.map(lambda order: worker.fix_feature_order(order, old), orders))
        assert found[0] == found[1] == worker.feature_order()
        assert found[0] in orders
