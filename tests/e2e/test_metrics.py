"""Metrics of every role, over HTTP, in a job of real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persia._metrics.definitions import LOADER, METRICS, SERVER, TRAINER, WORKER
from tests.metrics.job import BATCH_SIZE, NUM_BATCHES, StandingJob, series, standing_job

pytestmark = pytest.mark.slow  # PyTorch takes seconds to load

NUM = 2 * NUM_BATCHES
ROLE_OF = {
    "data-loader-0": LOADER,
    "embedding-worker-0": WORKER,
    "embedding-parameter-server-0": SERVER,
    "embedding-parameter-server-1": SERVER,
    "nn-worker": TRAINER,
}


@pytest.fixture(scope="module")
def job() -> Iterator[StandingJob]:
    with standing_job(num_servers=2) as standing:
        standing.train_more()  # all that the data-loader sends
        yield standing
        assert set(standing.go_on().values()) == {0}, standing.cluster.logs()


def test_every_role_is_ready_and_healthy(job: StandingJob) -> None:
    assert job.urls.keys() == ROLE_OF.keys()
    for name in ROLE_OF:
        assert job.get(name, "/healthz") == (200, "ok\n")
        assert job.get(name, "/readyz") == (200, "ok\n")
        assert job.get(name, "/")[0] == 404
        assert job.value(name, "persia_ready") == 1
        assert job.value(name, "process_resident_memory_bytes") > 1e7


# Of what this job does not do, or, where it is labelled, has had none of.
UNUSED = {
    "persia_rpc_bad_messages",
    "persia_delay_compensation_seconds",
    "persia_row_age_seconds",
}


def test_w68_every_metric_of_a_role_is_there_and_counts(job: StandingJob) -> None:
    """The original's nn-workers had no metrics, and some of its names were never used."""
    for name, role in ROLE_OF.items():
        _, text = job.get(name, "/metrics")
        found = series(text)
        names = {series_name for series_name, _ in found}
        assert not any(value != value for value in found.values()), "NaN"
        for metric in METRICS.values():
            exists = {metric.series, f"{metric.series}_count"} & names
            if role not in metric.roles:
                assert not exists, f"{name} has {metric.name}"
            elif metric.name not in UNUSED:
                assert exists, f"{name} lacks {metric.name}"
        ours = {key for key in found if key[0].startswith(("persia_", *METRICS))}
        assert all({"role", "replica"} <= dict(labels).keys() for _, labels in ours)


def test_numbers_are_those_of_the_run(job: StandingJob) -> None:
    samples = NUM * BATCH_SIZE
    assert job.value("nn-worker", "persia_trained_samples_total") == samples
    assert job.value("nn-worker", "persia_batches_total", outcome="trained") == NUM
    assert job.value("nn-worker", "persia_steps_total") == NUM
    assert 0 < job.value("nn-worker", "persia_loss") < 2
    assert job.value("nn-worker", "staleness") == 0
    assert job.value("data-loader-0", "persia_loader_batches_total", what="sent") == NUM
    worker = "embedding-worker-0"
    assert job.value(worker, "persia_ids_total", feat="user") == samples + 1
    assert 0 < job.value(worker, "batch_unique_indices_rate", feat="user") <= 1
    assert job.value(worker, "staleness") == 0
    assert job.value(worker, "update_gradient_time_cost_sec_count") == NUM
    sent = job.value(worker, "persia_rpc_call_seconds_count", method="update")
    servers = [name for name in ROLE_OF if ROLE_OF[name] == SERVER]
    served = [job.value(x, "persia_rpc_served_seconds_count", method="update") for x in servers]
    assert sent == sum(served) == 2 * NUM
    misses = sum(job.value(one, "index_miss_count_total") for one in servers)
    rows = sum(job.value(one, "persia_rows") for one in servers)
    assert misses == rows + 1 > 0
    for one in servers:
        assert 0 <= job.value(one, "persia_checkpoint_age_seconds") < 600
        took = job.value(one, "persia_rpc_received_bytes_total", method="update")
        assert took > 8 * 4 * BATCH_SIZE
