"""Refs of an embedding-worker over real servers: repeated calls, expiry, bounds."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from persia._rpc.messages import (
    BatchGradients,
    UpdateReply,
    UpdateRequest,
)
from persia.errors import (
    ServiceBusy,
    UnknownRef,
)
from tests.support.services import (
    features,
    gradient,
    make_servers,
    make_worker,
)
from tests.worker.cluster import Clock, Faulty, embeddings, faulty_cluster


def test_a_ref_lives_from_registration_to_its_acknowledged_gradient() -> None:
    with faulty_cluster() as (worker, _):
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
    with faulty_cluster() as (worker, _):
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


def test_w46_what_nobody_uses_expires_by_its_own_age() -> None:
    clock = Clock()
    with faulty_cluster(clock=clock, buffered_data_expired_sec=10) as (worker, _):
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
