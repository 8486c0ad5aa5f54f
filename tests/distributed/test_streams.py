"""Two ranks by torchrun over two data-loaders, two embedding-workers and two servers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from persia.data import DataLoader
from tests.distributed.batches import make_batch
from tests.distributed.conftest import Results, run_job
from tests.distributed.net import make_ctx, rows
from tests.distributed.scripts.phases_loader import COUNTS

pytestmark = pytest.mark.slow  # one job of two ranks, half a minute

PHASES = ("even", "uneven", "even", "joined", "epochs", "failing")


@pytest.fixture(scope="module")
def results() -> Results:
    """Run every phase in one job."""
    return run_job(2, *PHASES)[0]


def of(results: Results, phase: str) -> Results:
    """Return the runs of a phase, each by rank."""
    return [run for run in results if run[0]["phase"] == phase]


def test_two_runs_have_the_same_bits(results: Results) -> None:
    one, two = of(results, "even")
    for rank in range(2):
        for key in ("ids", "order", "losses", "rows", "parameters"):
            assert one[rank][key] == two[rank][key]
    assert one[0]["order"] == one[1]["order"]  # though their data-loaders have others
    assert one[0]["rows"] == one[1]["rows"]
    assert one[0]["parameters"] == one[1]["parameters"]
    assert [len(run["ids"]) for run in one] == [40, 40]


def test_two_ranks_do_what_one_does_with_both_batches(results: Results) -> None:
    one, _ = of(results, "even")
    is_reversed = one[0]["order"][0] == ["tags", "user"]
    batches = [
        make_batch(2 * number, 2 * number + 1, is_reversed=is_reversed) for number in range(40)
    ]
    losses = []
    with make_ctx() as ctx:
        for batch in DataLoader(batches, reproducible=True, embedding_staleness=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            losses.append(ctx.backward(torch.nn.functional.mse_loss(output, labels[0])).item())
        held = rows(ctx)
    both = np.mean([one[0]["losses"], one[1]["losses"]], axis=0)
    np.testing.assert_allclose(both, losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one[0]["rows"], held, rtol=0, atol=1e-5)


def test_an_incomplete_round_is_dropped_and_counted(results: Results) -> None:
    (run,) = of(results, "uneven")
    more, fewer = COUNTS["uneven"]
    assert [len(rank["ids"]) for rank in run] == [fewer, fewer]
    assert [rank["stats"]["batches"] for rank in run] == [fewer, fewer]
    dropped = [rank["stats"]["incomplete"] for rank in run]
    assert dropped == [more - fewer, 0]


def test_or_of_an_epoch(results: Results) -> None:
    (run,) = of(results, "epochs")
    # Two of rank 0's first epoch are dropped, and two of its second.
    assert [rank["ids"] for rank in run] == [[0, 2, 4, 6, 12, 14], [1, 3, 5, 7, 9, 11]]
    assert [rank["stats"]["incomplete"] for rank in run] == [4, 0]


def test_or_trained_alone(results: Results) -> None:
    (run,) = of(results, "joined")
    assert [len(rank["ids"]) for rank in run] == list(COUNTS["joined"])
    assert run[0]["rows"] == run[1]["rows"]


def test_the_failure_of_a_data_loader_is_everyones(results: Results) -> None:
    (run,) = of(results, "failing")
    # Both learn it; the one that meets it first announces its own failure to the other.
    failures = [rank["failure"] for rank in run]
    named = [text for text in failures if "data-loader 1 failed" in text]
    assert named
    assert all("RuntimeError: no such file" in text for text in named)
    assert all(text in named or re.search(r"rank [01] failed", text) for text in failures)
