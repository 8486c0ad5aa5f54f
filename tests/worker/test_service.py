"""The embedding-worker over real servers: calls that fail half way, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from persia._rpc import messages
from persia._rpc.messages import (
    BatchGradients,
    SlotGradient,
)
from persia.errors import (
    DataError,
    DataTypeError,
    NotConfigured,
    ServiceUnavailable,
)
from tests.support.services import (
    ADAM,
    SETTINGS,
    SGD,
    features,
    gradient,
    make_servers,
    make_worker,
    settings,
)
from tests.worker.cluster import embeddings, faulty_cluster


def test_both_roles_answer_their_protocols() -> None:
    server: messages.ParameterServer = make_servers()[0]  # mypy is the test
    worker: messages.EmbeddingWorker = make_worker([server])
    assert worker.get_embedding_size() == [server.get_embedding_size()]


def test_an_update_id_used_before_is_reported_and_changes_nothing() -> None:
    with faulty_cluster() as (worker, servers):
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
