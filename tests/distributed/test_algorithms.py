"""Bagua's algorithms on torch's means: two ranks converge, and end equal where that is said."""

from __future__ import annotations

from typing import Any

import pytest

from persia._training.comm_hooks import ALGORITHMS
from tests.distributed.conftest import Launch


@pytest.fixture(scope="module")
def found(launch: Launch) -> Any:
    return launch("algorithms.py")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_converge(found: Any, name: str) -> None:
    assert found[name]["first"] > 0.5
    assert found[name]["last"] < 0.02


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "qadam"])
def test_ranks_stay_equal_where_gradients_are_averaged(found: Any, name: str) -> None:
    assert (found[name]["apart_at_average"], found[name]["apart_after"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized", "async"])
def test_ranks_are_equal_after_an_average_of_parameters(found: Any, name: str) -> None:
    assert found[name]["apart_at_average"] == 0.0
    assert found[name]["apart_after"] > 0.0


def test_a_gradient_over_two_forward_passes_is_one_ranks(found: Any) -> None:
    assert found["kept_batches"] < 1e-6


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad"])
def test_a_rank_with_fewer_batches(found: Any, name: str) -> None:
    uneven = found["uneven"][name]
    # Adam's moments too, or the next pass would take the ranks apart.
    assert (uneven["apart"], uneven["moments_apart"]) == (0.0, 0.0)
    if name == "gradient_allreduce":
        assert uneven["from_one_rank"] < 1e-5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_w67_files_know_nothing_of_the_wrapper(found: Any, name: str) -> None:
    assert found[name]["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert found[name]["same_optimizer"]
