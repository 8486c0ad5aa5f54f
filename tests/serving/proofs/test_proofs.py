"""Short runs of the proofs: what is counted has to hold; times are not judged."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from persia.ctx import InferCtx
from tests.serving.proofs import fresh, hostile, int8, kills, switch
from tests.serving.proofs.support import Lines
from tests.serving.proofs.trainer import DIM, FEATURES
from tests.support.processes import Process


@pytest.mark.slow
def test_no_answer_is_mixed_while_versions_and_rows_change(tmp_path: Path) -> None:
    assert switch.run(tmp_path, 1500, 8000, 100.0, 20_000, judges=False) == 0


@pytest.mark.slow
def test_every_update_becomes_visible(tmp_path: Path) -> None:
    assert fresh.run(tmp_path, 6, 0.5, judges=False) == 0


@pytest.mark.slow
def test_rows_of_int8_keep_the_auc_and_save_memory(tmp_path: Path) -> None:
    assert int8.run(tmp_path, 12_000, 200_000) == 0


@pytest.mark.slow
def test_no_kill_makes_a_row_zero(tmp_path: Path) -> None:
    assert kills.run(tmp_path, 4, 1, judges=False) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_hostile_input_harms_nothing(tmp_path: Path) -> None:
    assert hostile.run(tmp_path, 10.0, 1) == 0


def _answer(steps: float, cut: float) -> Any:
    """Return what a server of rows of these steps answers for three samples."""
    values = np.full((3, 1 + len(FEATURES)), DIM * steps, np.float32)
    values[:, 0] = cut
    return values


def _status_of(ask: Any) -> int:
    """Return what the proof of kills ends with, were all answers to one client these."""
    client = kills.Asking("planted", ask)
    try:
        client.await_more(3)
    finally:
        client.stop()
    lines = Lines("planted", judges_times=True)
    kills.report(lines, {"planted": client})
    return lines.end()


@pytest.mark.parametrize("is_of_one_moment", [True, False])
def test_one_row_of_zeros_among_right_ones_fails_the_proof_of_kills(
    is_of_one_moment: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    values = _answer(5, 4)
    assert _status_of(lambda: kills.judge(2, values, 4, is_of_one_moment)) == 0
    values[1, 3] = 0.0
    assert kills.judge(2, values, 4, is_of_one_moment) == (
        True,
        "version 2: rows of steps [0.0, 5.0]",
    )
    assert _status_of(lambda: kills.judge(2, values, 4, is_of_one_moment)) == 1
    assert "with a vector of zeros" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, 0), 3.0),  # weights of another version
        ((2, 1), DIM * 5.5),  # a row that was half written
        ((2, 1), np.nan),
        ((2, 1), DIM * 6.0),  # rows of two steps
        ((slice(None), slice(1, None)), DIM * 3.0),  # rows before the version's own
    ],
)
def test_an_answer_of_no_version_and_moment_fails_the_proof_of_kills(
    place: Any, value: float
) -> None:
    values = _answer(5, 4)
    values[place] = value
    has_zeros, fault = kills.judge(2, values, 4, is_of_one_moment=True)
    assert not has_zeros
    assert fault
    assert _status_of(lambda: (has_zeros, fault)) == 1


def test_a_vector_of_zeros_of_a_worker_fails_the_proof_of_kills() -> None:
    rows = [torch.full((4, DIM), 7.0) for _ in FEATURES]
    found = SimpleNamespace(embedding_tensors=rows)
    ctx = cast("InferCtx", SimpleNamespace(get_embedding_from_data=lambda batch: found))
    assert _status_of(kills.OverWorkers(ctx)) == 0
    rows[-1][2] = 0.0
    assert _status_of(kills.OverWorkers(ctx)) == 1


def test_open_files_are_listed_while_some_are_closed(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        f"kept = open({str(tmp_path / 'kept')!r}, 'w')\n"
        "print('begun', flush=True)\n"
        "while os.getppid() != 1:\n"
        "    for one in [os.open(os.devnull, os.O_RDONLY) for _ in range(200)]:\n"
        "        os.close(one)\n"
    )
    process = Process([sys.executable, "-c", code], {}, tmp_path / "log")
    try:
        process.wait_for("begun")
        for _ in range(50):
            assert str(tmp_path / "kept") in hostile.open_files(process.pid)
    finally:
        process.kill()
        process.wait()
