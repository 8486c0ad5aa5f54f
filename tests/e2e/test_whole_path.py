"""Worker and servers against the plain Python job, bit by bit, for any number of servers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._rpc.messages import BatchGradients, LookupResult, PooledOutput, SlotGradient
from persia.config import EmbeddingSchema
from tests.reference.worker import ReferenceJob, Samples, Weights, distinct
from tests.support.profiles import tries
from tests.support.services import (
    ADAGRAD,
    ADAM,
    SCHEMA,
    SETTINGS,
    SGD,
    features,
    gradient,
    hashed,
    make_servers,
    make_worker,
    read_rows,
    value,
)
from tests.worker.cluster import WIDE


@st.composite
def batches(draw: st.DrawFn) -> list[dict[str, Samples]]:
    """A few batches of some features each, in any order, with few distinct ids."""
    ids = st.one_of(st.integers(0, 9), st.integers(WIDE, WIDE + 3))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.permutations(sorted(SCHEMA.slots)))[: draw(st.integers(1, 11))]
        size = draw(st.integers(0, 4))
        samples = st.lists(st.lists(ids, max_size=5), min_size=size, max_size=size)
        found.append({name: draw(samples) for name in names})
    return found


def check(result: LookupResult, wanted: dict[str, Any]) -> None:
    for output in result.outputs:
        # The index of pooled vectors says which are alike, for the wire.
        is_pooled = isinstance(output, PooledOutput)
        fields = ("values",) if is_pooled else ("rows", "index", "offsets")
        found = [getattr(output, name) for name in fields if hasattr(output, name)]
        for want, got in zip(wanted[output.name], found, strict=True):
            assert want.dtype == got.dtype
            np.testing.assert_array_equal(want, got)


def draw_gradients(
    job: ReferenceJob, batch: dict[str, Samples], rng: np.random.Generator
) -> dict[str, NDArray[np.float32] | None]:
    """Mostly finite gradients: some rows have a NaN or Inf, some slots have none."""
    found: dict[str, NDArray[np.float32] | None] = {}
    for name, samples in batch.items():
        slot = SCHEMA.slots[name]
        num_rows = len(samples)
        if slot.pooling in ("raw", "jagged"):
            num_rows = len(distinct(job.kept(name, samples)))
        grad = rng.normal(size=(num_rows, slot.dim)).astype(np.float32)
        for row in np.flatnonzero(rng.random(num_rows) < 0.15):
            grad[row, rng.integers(slot.dim)] = rng.choice([np.nan, np.inf, -np.inf, 3e38])
        found[name] = None if rng.random() < 0.1 else grad
    return found


def draw_weights(batch: dict[str, Samples], rng: np.random.Generator) -> Weights:
    """Weights for some of the features that are summed; 0 and negative ones, too."""
    return {
        name: [
            rng.integers(-2, 4, len(sample)).astype(np.float32) / np.float32(3)
            for sample in samples
        ]
        for name, samples in batch.items()
        if SCHEMA.slots[name].pooling == "sum" and rng.random() < 0.5
    }


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ADAM], ids=lambda o: o.name)
@tries(40)
@given(steps=batches(), seed=st.integers(0, 2**32 - 1))
@example(steps=[{"sum": [[0, WIDE]], "max": [[WIDE, 0]]}], seed=0)
def test_one_two_and_four_servers_are_the_plain_python_job(
    optimizer: Any, steps: list[dict[str, Samples]], seed: int
) -> None:
    assert_the_plain_python_job(SCHEMA, optimizer, steps, seed)


@tries(20)
@given(steps=batches(), seed=st.integers(0, 2**32 - 1))
def test_ids_with_a_hash_of_the_users_are_the_plain_python_job(
    steps: list[dict[str, Samples]], seed: int
) -> None:
    assert_the_plain_python_job(hashed(), ADAGRAD, steps, seed)


def assert_the_plain_python_job(
    schema: EmbeddingSchema, optimizer: Any, steps: list[dict[str, Samples]], seed: int
) -> None:
    job, rng = ReferenceJob(schema, SETTINGS, optimizer), np.random.default_rng(seed)
    clusters = [make_servers(n, schema, optimizer=optimizer) for n in (1, 2, 4)]
    with contextlib.ExitStack() as stack:
        workers = [
            make_worker(servers, schema, num_pooling_threads=num_threads)
            for servers, num_threads in zip(clusters, (1, 3, 2), strict=True)
        ]
        for worker in workers:
            stack.callback(worker.close)
        for number, batch in enumerate(steps):
            weights = draw_weights(batch, rng)
            wanted = job.lookup(batch, is_training=True, weights=weights)
            grads = draw_gradients(job, batch, rng)
            report = job.update(batch, grads, weights)
            signs: dict[int, list[int]] = {}
            for name, samples in batch.items():
                slot = schema.slots[name]
                for x in distinct(job.kept(name, samples)):
                    signs.setdefault(slot.table, []).extend(job.signs_of(slot, x))
            signs = {table: sorted(set(of_table)) for table, of_table in signs.items()}
            for servers, worker in zip(clusters, workers, strict=True):
                result = worker.lookup_direct(features(batch, number, weights=weights))
                assert [output.name for output in result.outputs] == list(batch)
                check(result, wanted)
                # A slot that has no gradient may be there without one.
                there = [name for name in grads if grads[name] is not None or number % 2]
                slots = tuple(SlotGradient(name, grads[name]) for name in there)
                applied = worker.update(BatchGradients(result.ref or 0, (0, number), slots))
                assert applied.nan_samples == report.nan_samples
                assert sum(applied.nan_rows.values()) == report.nan_rows
                assert applied.num_missing == 0
                assert {*applied.skipped} == {name for name in grads if grads[name] is None}
                rows = read_rows(servers, signs)
                for sign, row in rows.items():
                    assert row.tobytes() == job.rows[sign].tobytes(), hex(sign)
                assert sum(worker.get_embedding_size()) == len(job.rows)


@tries(30)
@given(steps=batches())
def test_evaluation_finds_rows_and_inserts_none(steps: list[dict[str, Samples]]) -> None:
    job = ReferenceJob(SCHEMA, SETTINGS, SGD)
    servers = make_servers(2)
    worker = make_worker(servers)
    for number, batch in enumerate(steps):
        wanted = job.lookup(batch, is_training=False)
        result = worker.lookup_direct(features(batch, number, requires_grad=False))
        assert result.ref is None
        check(result, wanted)
        assert sum(worker.get_embedding_size()) == len(job.rows)
        job.lookup(batch, is_training=True)
        ref = worker.register(features(batch, number))
        worker.lookup(ref, is_training=True)
        worker.release(ref)
    assert worker.stats()["in_flight"] == 0
    worker.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_scale_of_the_loss_is_taken_back(dtype: Any) -> None:
    ends = []
    for scale, given_dtype in ((1.0, np.float32), (1024.0, dtype)):
        servers = make_servers()
        worker = make_worker(servers)
        result = worker.lookup_direct(features({"sum": [[1, 2], [2]], "raw": [[3], [3, 4]]}))
        grads = {"sum": np.full((2, 4), 0.25 * scale, given_dtype)}
        grads["raw"] = np.full((2, 8), 0.5 * scale, given_dtype)
        worker.update(replace(gradient(result, by_name=grads), scale=scale))
        ids = (("sum", 1), ("sum", 2), ("raw", 3), ("raw", 4))
        ends.append(np.concatenate([value(servers, name, x) for name, x in ids]))
    np.testing.assert_array_equal(ends[0], ends[1])
