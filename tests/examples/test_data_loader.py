"""The data-loader's script of adult_income."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.loading import EXAMPLES, load
from tests.meta.test_layers import WITHOUT_TORCH

ROOT = Path(__file__).resolve().parents[2]


def test_it_loads_without_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "data_loader"],
        cwd=EXAMPLES / "adult_income",
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("size", [1, 2, 3])
def test_loaders_share_the_batches_in_the_order_of_the_file(size: int) -> None:
    train = load("adult_income")
    income = train.Income(
        np.arange(5 * 300, dtype=np.float32).reshape(300, 5),
        np.arange(8 * 300, dtype=np.uint64).reshape(300, 8),
        np.zeros((300, 1), np.float32),
    )
    shares: list[list[Any]] = [
        list(train.batches(income, requires_grad=True, index=index, size=size))
        for index in range(size)
    ]
    together = [shares[number % size][number // size] for number in range(3)]
    dense = [batch.non_id_type_features[0].data for batch in together]
    assert [len(one) for one in dense] == [128, 128, 44]
    assert np.array_equal(np.concatenate(dense), income.continuous)
    assert sum(map(len, shares)) == 3
