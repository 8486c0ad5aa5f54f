"""Gradients corrected for late rows: beside the model, off, tried again, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._rpc.messages import TableSigns
from persia.errors import ServiceUnavailable
from tests.reference.worker import ReferenceJob
from tests.support.profiles import tries
from tests.support.services import (
    CONFIG,
    SCHEMA,
    SGD,
    features,
    gradient,
    make_servers,
    make_worker,
    read_rows,
    settings,
)
from tests.worker.cluster import Faulty

NAMES = list(CONFIG["slots_config"])
IDS = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=3, max_size=3)
BATCHES = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, IDS)).filter(bool)


def drawn(batch: Any, seed: int, job: ReferenceJob, size: float) -> dict[str, Any]:
    """Gradients of a batch's outputs, by feature."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (values, *index) in job.lookup(batch, False).items():
        num_rows = len(values) - (SCHEMA.slots[name].pooling == "raw")
        shape = (num_rows if index else 3, SCHEMA.slots[name].dim)
        found[name] = rng.normal(0, size, shape).astype(np.float32)
    return found


@tries(60)
@given(
    one=BATCHES,
    other=BATCHES,
    seed=st.integers(0, 99),
    strength=st.sampled_from([0.5, 1.0, 3.0]),
    num_servers=st.sampled_from([1, 3]),
    size=st.sampled_from([0.01, 0.3, 3.0]),
)
def test_a_late_update_is_the_models(
    one: Any, other: Any, seed: int, strength: float, num_servers: int, size: float
) -> None:
    """Both batches are looked up before one of them steps the rows of both."""
    job = ReferenceJob(SCHEMA, settings(), SGD)
    servers = make_servers(num_servers)
    worker = make_worker(servers, delay_compensation=strength)
    results = [worker.lookup_direct(features(batch, n)) for n, batch in enumerate((one, other))]
    for batch in (one, other):
        job.lookup(batch, True)
    seen = {sign: row.copy() for sign, row in job.rows.items()}
    for number, (batch, result) in enumerate(zip((one, other), results, strict=True)):
        given_ = drawn(batch, seed + number, job, size)
        worker.update(gradient(result, (1, number), given_))
        kept = {name: job.kept(name, samples) for name, samples in batch.items()}
        job.update(batch, job.compensated(kept, given_, seen, strength), seen=seen)
    worker.close()
    by_table: dict[int, list[int]] = {}
    for name in NAMES:
        slot = SCHEMA.slots[name]
        for x in range(5):
            signs = [sign for sign in job.signs_of(slot, x) if sign in job.rows]
            by_table.setdefault(slot.table, []).extend(signs)
    found = read_rows(servers, {table: list(set(signs)) for table, signs in by_table.items()})
    assert found.keys() == job.rows.keys()
    for sign, row in found.items():
        np.testing.assert_allclose(row, job.rows[sign], rtol=1e-4, atol=1e-5 * max(size, 1))


BATCH: dict[str, Any] = {"sum": [[1, 2], [2]], "mean": [[3], [3, 4]]}


def late_rows(**options: Any) -> list[bytes]:
    """Rows after two updates of one batch, which was looked up twice before both."""
    servers = make_servers(2)
    worker = make_worker(servers, **options)
    results = [worker.lookup_direct(features(BATCH, number)) for number in range(2)]
    for number, result in enumerate(results):
        ones = {name: np.full((2, 4), 0.1, np.float32) for name in BATCH}
        worker.update(gradient(result, (1, number), ones))
    (after,) = [worker.lookup_direct(features(BATCH, 2, requires_grad=False))]
    num_lookups = sum(server.stats()["lookups"] for server in servers)
    assert ("persia_delay_compensation_seconds" in worker.timings.read()) is bool(options)
    worker.close()
    rows = [output.values.tobytes() for output in after.outputs]  # type: ignore[union-attr]
    return [*rows, bytes([num_lookups])]


def test_off_it_is_not_there_and_on_it_costs_a_lookup_for_each_update() -> None:
    off = late_rows()
    assert off == late_rows()
    weak, strong = (late_rows(delay_compensation=x) for x in (1e-30, 1.0))
    assert weak[:2] == off[:2] != strong[:2]
    assert weak[2][0] == strong[2][0] > off[2][0]


def test_where_nothing_was_missed_gradients_stay_as_they_are() -> None:
    found = []
    for strength in (0.0, 2.0):
        worker = make_worker(make_servers(1), delay_compensation=strength)
        for number in range(3):
            result = worker.lookup_direct(features(BATCH, number))
            worker.update(gradient(result, (1, number)))
        (one, _) = worker.lookup_direct(features(BATCH, 9, requires_grad=False)).outputs
        found.append(one.values.tobytes())  # type: ignore[union-attr]
        worker.close()
    assert found[0] == found[1]


def late_step(names: tuple[str, ...], strength: float, *, is_by_id: bool) -> Any:
    """Rows after two updates, both looked up before, and how many updates were corrected."""
    servers = make_servers(2)
    worker = make_worker(servers, delay_compensation=strength)
    batch = {name: [[1, 2], [2]] for name in names}
    for number, result in enumerate(
        [worker.lookup_direct(features(batch, number)) for number in range(2)]
    ):
        given_ = gradient(result, (1, number))
        worker.update(replace(given_, is_by_id=is_by_id))
    outputs = worker.lookup_direct(features(batch, 2, requires_grad=False)).outputs
    rows = [getattr(one, "rows", getattr(one, "values", None)) for one in outputs]
    num_corrected = worker.stats().get("compensated_updates", 0)
    worker.close()
    return [np.asarray(one).tobytes() for one in rows], num_corrected


def test_gradients_by_id_are_not_taken_for_those_of_samples() -> None:
    off, _ = late_step(("sum", "mean"), 0.0, is_by_id=True)
    assert late_step(("sum", "mean"), 1.0, is_by_id=True) == (off, 0)
    on, num_corrected = late_step(("sum", "mean"), 1.0, is_by_id=False)
    assert (on == off, num_corrected) == (False, 2)


def test_features_without_a_gradient_of_a_sample_cost_no_further_lookup() -> None:
    off, _ = late_step(("raw", "jagged"), 0.0, is_by_id=False)
    assert late_step(("raw", "jagged"), 1.0, is_by_id=False) == (off, 0)


def step_of(num_ranks: int) -> Any:
    """What the late update of one of several ranks moves rows by, times their number."""
    servers = make_servers(1)
    worker = make_worker(servers, delay_compensation=1.0)
    results = [worker.lookup_direct(features(BATCH, number)) for number in range(2)]
    tenths = {name: np.full((2, 4), 0.1, np.float32) for name in BATCH}
    worker.update(gradient(results[0], (1, 0), tenths))
    found = []
    for number in range(2):
        if number:
            own = gradient(results[1], (1, 1), tenths)
            worker.update(replace(own, scale=float(num_ranks), num_averaged=num_ranks))
        outputs = worker.lookup_direct(features(BATCH, 2, requires_grad=False)).outputs
        found.append(np.concatenate([one.values for one in outputs]))  # type: ignore[union-attr]
    worker.close()
    return (found[1] - found[0]) * num_ranks


def test_each_of_several_ranks_is_corrected_by_its_own_loss() -> None:
    alone = step_of(1)
    assert alone.any()
    np.testing.assert_allclose(step_of(2), alone, rtol=1e-4)
    np.testing.assert_allclose(step_of(8), alone, rtol=1e-3)


def test_a_sample_with_a_gradient_that_is_not_finite_keeps_its_others() -> None:
    worker = make_worker(make_servers(1), delay_compensation=1.0)
    results = [worker.lookup_direct(features(BATCH, number)) for number in range(2)]
    worker.update(gradient(results[0], (1, 0)))
    bad = np.ones((2, 4), np.float32)
    bad[0, 1] = np.nan
    report = worker.update(gradient(results[1], (1, 1), {"sum": bad}))
    assert dict(report.nan_samples) == {"sum": 1}
    worker.close()


def test_a_row_that_is_gone_has_not_moved() -> None:
    servers = make_servers(1)
    worker = make_worker(servers, delay_compensation=1.0)
    result = worker.lookup_direct(features({"sum": [[1, 2]]}))
    slot = SCHEMA.slots["sum"]
    signs = np.array([1 | slot.prefix], np.uint64)
    servers[0].delete_rows(TableSigns(slot.table, signs))
    before = read_rows(servers, {slot.table: [2 | slot.prefix]})
    report = worker.update(gradient(result, (1, 0), {"sum": np.ones((1, 4), np.float32)}))
    after = read_rows(servers, {slot.table: [2 | slot.prefix]})
    assert report.num_missing == 1
    (sign,) = after
    np.testing.assert_allclose(before[sign] - after[sign], 0.5, atol=1e-6)
    worker.close()


@pytest.mark.parametrize("when", ["fail_before", "fail_after"])
def test_an_update_that_is_tried_again_makes_the_same_steps(when: str) -> None:
    """The servers that have applied it would show other movement the second time."""
    found = []
    for fails in (False, True):
        servers = [Faulty(server) for server in make_servers(2)]
        worker = make_worker(servers, delay_compensation=1.0)
        batch = {"sum": [list(range(8)), [1, 3]]}
        results = [worker.lookup_direct(features(batch, number)) for number in range(2)]
        tenths = {"sum": np.full((2, 4), 0.1, np.float32)}
        worker.update(gradient(results[0], (1, 0), tenths))
        if fails:
            getattr(servers[1], when).append("update")
            with pytest.raises(ServiceUnavailable):
                worker.update(gradient(results[1], (1, 1), tenths))
        worker.update(gradient(results[1], (1, 1), tenths))
        (one,) = worker.lookup_direct(features(batch, 9, requires_grad=False)).outputs
        found.append(one.values.tobytes())  # type: ignore[union-attr]
        worker.close()
    assert found[0] == found[1]
