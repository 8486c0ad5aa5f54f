"""Bagua's algorithms on torch's means: two ranks converge, and end equal where that is said."""

from __future__ import annotations

from typing import Any

import pytest

from persia._training.comm_hooks import ALGORITHMS
from tests.distributed.conftest import launch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch("algorithms.py", tmp_path_factory.mktemp("ranks"))


# Where gradients are averaged; elsewhere parameters are, now and then.
STAY_EQUAL = {"gradient_allreduce", "bytegrad", "qadam"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_w67_ranks_converge_and_files_know_nothing_of_the_wrapper(
    found: Any, name: str
) -> None:
    ours = found[name]
    assert ours["first"] > 0.5
    assert ours["last"] < 0.02
    assert ours["apart_at_average"] == 0.0
    assert (ours["apart_after"] == 0.0) is (name in STAY_EQUAL)
    assert ours["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert ours["same_optimizer"]


def test_a_gradient_over_two_forward_passes_is_one_ranks(found: Any) -> None:
    assert found["kept_batches"] < 1e-6


def test_clipped_is_the_mean_over_ranks(found: Any) -> None:
    assert found["clipped"]["norm"] == pytest.approx(0.125, rel=1e-3)
    assert found["clipped"]["from_one_rank"] < 1e-6


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad"])
def test_a_rank_with_fewer_batches(found: Any, name: str) -> None:
    uneven = found["uneven"][name]
    # Adam's moments too, or the next pass would take the ranks apart.
    assert (uneven["apart"], uneven["moments_apart"]) == (0.0, 0.0)
    if name == "gradient_allreduce":
        assert uneven["from_one_rank"] < 1e-5
