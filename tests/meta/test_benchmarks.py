"""What the product is held against computes what the formula says; and what a verdict is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.benchmarks.ceiling import EPS, Table, described
from tests.benchmarks.defaults import Cell, Pair, Results, regrets
from tests.benchmarks.instructions import Part, compare, per_id
from tests.benchmarks.interleaved import Series, ratio
from tests.benchmarks.native import compiler
from tests.benchmarks.workload import ACCUMULATOR, DIM, LR, Batch, Ids

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="no C compiler here: the benchmarks' ceiling is not built"
)
NUM_SAMPLES = 300
STRANGER = 2**56 - 2  # an id that is not held


def drawn(rng: np.random.Generator, num_ids: list[int]) -> Batch:
    """Return a batch of a feature for each entry; 0 says one id a sample. Many ids repeat."""
    features = []
    for number, mean in enumerate(num_ids):
        lengths = (
            np.ones(NUM_SAMPLES, np.int64) if mean == 0 else rng.poisson(mean, NUM_SAMPLES)
        )
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = rng.integers(0, 10 + 200 * number, offsets[-1])
        values = np.where(rng.random(len(rows)) < 0.02, STRANGER, rows * 2**40).astype(
            np.uint64
        )
        features.append(Ids(values, rows, None if mean == 0 else offsets))
    gradient = rng.normal(0, 1, (len(features), NUM_SAMPLES, DIM)).astype(np.float32)
    return Batch(features, np.zeros(0, np.int64), np.zeros(0, np.int64), gradient)


Rows = dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.float64]]]


def expected(rows: Rows, batch: Batch) -> NDArray[np.float64]:
    """Look up, and then update, the same in float64 and dictionaries."""
    out = np.zeros(batch.gradient.shape)
    sums: dict[tuple[int, int], Any] = {}
    for number, feature in enumerate(batch.features):
        lengths = 1 if feature.offsets is None else np.diff(feature.offsets)
        samples = np.repeat(np.arange(NUM_SAMPLES), lengths)
        for sample, id_ in zip(samples, feature.values.tolist(), strict=True):
            if (number, id_) in rows:
                out[number, sample] += rows[number, id_][0]
                gradient = batch.gradient[number, sample].astype(np.float64)
                sums[number, id_] = sums.get((number, id_), 0) + gradient
    for key, gradient in sums.items():
        weight, state = rows[key]
        state += gradient**2
        weight -= LR * gradient / (np.sqrt(state) + EPS)
    return out


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ceiling_equals_the_formula(num_threads: int) -> None:
    rng = np.random.default_rng(0)
    # The last feature is most of the batch, so two threads share it.
    batches = [drawn(rng, [0, 2, 0, 12]) for _ in range(3)]
    table, rows = Table(2000, num_threads), Rows()
    for number in range(4):
        ids = np.arange(10 + 200 * number, dtype=np.uint64) * np.uint64(2**40)
        table.fill(number, ids)
        for id_ in ids.tolist():
            weight, state = np.array(table.row(number, id_), np.float64)
            np.testing.assert_array_equal(state, np.float32(ACCUMULATOR))
            rows[number, id_] = weight, state
    assert len(table) == len(rows)
    assert table.row(0, STRANGER) is None

    out = np.empty((4, NUM_SAMPLES, DIM), np.float32)
    for batch in batches:
        features, want = described(batch.features), expected(rows, batch)
        for is_training in (False, True):
            out.fill(np.nan)
            table.lookup(features, NUM_SAMPLES, is_training, out)
            np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-6)
        table.update(batch.gradient)
    for (number, id_), row in rows.items():
        own = table.row(number, id_)
        assert own is not None
        np.testing.assert_allclose(own, np.array(row), rtol=1e-4, atol=1e-6)
    table.close()


@pytest.mark.parametrize(("count", "is_good"), [(900, True), (1029, True), (1031, False)])
def test_more_instructions_than_committed_fail(count: int, is_good: bool) -> None:
    assert compare({"a part": 500, "a new part": 1}, {"a part": 500})
    assert (
        compare({"a part": 500, "another": count}, {"a part": 500, "another": 1000}) == is_good
    )


def test_misses_are_of_reads_and_writes_and_per_id(capsys: pytest.CaptureFixture[str]) -> None:
    events = {"Ir": 2040, "D1mr": 20, "D1mw": 10, "DLmr": 5, "DLmw": 2}
    events |= {"Bc": 100, "Bcm": 4, "Bi": 20, "Bim": 2}
    per_id("avx2", {"a part": Part(10, events)})
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == "| a part | 204 | 3.00 | 0.70 | 12.00 | 0.60 |"


def test_a_ratio_is_taken_pair_by_pair() -> None:
    """Both slow down together, which rates show and their ratio does not."""
    own = Series([2.0, 4.0, 20.0, 8.0], [])
    found = ratio(own, Series([1.0, 2.0, 5.0, 4.0], []))
    assert (found.low, found.median, found.high) == (2.0, 2.0, 4.0)


def test_what_a_pair_of_optimizers_loses_is_to_the_best_of_each_cell(tmp_path: Any) -> None:
    cells = [Cell("adult", 128, "mlp"), Cell("avazu", 1024, "dlrm")]
    pairs = [Pair("Adagrad 0.1", dense) for dense in ("Adam 0.001", "Adam 0.01")]
    lines = [
        ["adult 128 mlp, Adagrad 0.1, Adam 0.001, seed 0", 0.5],
        ["adult 128 mlp, Adagrad 0.1, Adam 0.001, seed 1", 0.75],
        ["adult 128 mlp, Adagrad 0.1, Adam 0.01, seed 0", 0.875],
        ["adult 128 mlp, Adagrad 0.1, Adam 0.01, seed 1", 0.875],
        ["avazu 1024 dlrm, Adagrad 0.1, Adam 0.001, seed 0", 0.75],
        ["avazu 1024 dlrm, Adagrad 0.1, Adam 0.001, seed 1", 0.75],
        ["avazu 1024 dlrm, Adagrad 0.1, Adam 0.01, seed 0", 0.5],
        ["avazu 1024 dlrm, Adagrad 0.1, Adam 0.01, seed 1", 0.5],
    ]
    path = tmp_path / "results"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    results = Results(path)
    results.fill(cells, pairs, 2)  # all is there
    assert list(regrets(results, cells, pairs, 2)) == [
        (pairs[0], {cells[0]: 2500.0, cells[1]: 0.0}, 1.5),
        (pairs[1], {cells[0]: 0.0, cells[1]: 2500.0}, 1.5),
    ]
