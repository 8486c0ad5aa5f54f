"""Models of persia.nn over two servers of their own processes, by one rank and by two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia.serving import Predictor
from tests.distributed.conftest import SCRIPTS
from tests.support.processes import Cluster, run
from tests.support.twins import DIM, OF_MODES, OF_WAYS, ROWS, Twins, batches, twins

pytestmark = pytest.mark.slow  # jobs whose processes load torch

SLOTS = {
    "slots_config": {
        "user": {"dim": DIM, "pooling": "jagged"},
        "item": {"dim": DIM, "pooling": "jagged"},
        "late": {"dim": 2, "pooling": "jagged"},
    }
}
NUM_STEPS = 200


def train_torchs(both: Twins, steps: int) -> list[float]:
    """Train the model of torch's modules; return its losses."""
    losses = []
    for users, items, labels in batches(steps):
        both.torch_optimizer.zero_grad()
        loss = ((both.torchs(users, items) - labels) ** 2).mean()
        loss.backward()
        both.torch_optimizer.step()
        losses.append(loss.item())
    return losses


def run_script(
    directory: Path, optimizer: str, steps: int, *more: str, num_ranks: int = 1
) -> dict[str, Any]:
    """Train over two servers; return what the script found."""
    output = directory / "found.pt"
    words = [str(SCRIPTS / "modules.py"), optimizer, str(steps), str(output), *more]
    with Cluster(SLOTS, num_servers=2, num_ranks=num_ranks) as cluster:
        cluster.start_servers()
        if num_ranks > 1:
            ranks = ("--nproc-per-node", str(num_ranks))
            process = cluster.start("nn-worker", "nn-worker", *ranks, *words)
            assert process.wait(240.0) == 0, process.printed()
        else:
            ran = run(sys.executable, *words, env=cluster.environment, timeout_s=240.0)
            assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = torch.load(output, weights_only=True)
    return found


def train_one_process(both: Twins, steps: int) -> list[float]:
    """Train ours, eager, in a store of this process; return its losses."""
    losses = []
    for users, items, labels in batches(steps):
        both.our_optimizer.zero_grad()
        loss = ((both.ours(users, items) - labels) ** 2).mean()
        loss.backward()
        both.our_optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal_torchs(found: dict[str, Any], both: Twins) -> None:
    for name in ("user", "item", "top"):
        theirs = getattr(both.torchs, name).weight.detach()
        assert (found[name] - theirs).abs().max() < 1e-5, name


def assert_goes_on(found: dict[str, Any], tolerance: float) -> None:
    """What the script did after its checkpoint, it did again after that was loaded."""
    for name in ("user", "item", "top"):
        assert torch.equal(found["loaded"][name], found[name])
        assert not torch.equal(found["after"][name], found[name])
        difference = (found["again"][name] - found["after"][name]).abs().max()
        assert difference <= tolerance


def test_over_servers_200_steps_equal_torchs_and_those_of_one_process(tmp_path: Path) -> None:
    found = run_script(tmp_path, "adagrad", NUM_STEPS, str(tmp_path / "saved"))
    both = twins("adagrad")
    assert found["losses"] == pytest.approx(train_torchs(both, NUM_STEPS), abs=1e-5)
    assert_equal_torchs(found, both)
    alone = train_one_process(twins("adagrad"), NUM_STEPS)
    assert found["losses"] == pytest.approx(alone, abs=1e-6)
    assert_goes_on(found, 0.0)
    assert_rows_by_id(found)
    # Without an optimizer nothing is trained, and nothing that was written is lost.
    assert "NotConfigured" in found["refused"]
    assert "persia.optim" in found["refused"]
    assert found["late"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_over_servers_200_steps_of_every_way_equal_torchs(kind: str, optimizer: str) -> None:
    """Of a bag whose ids have weights, and eager also of each pooling."""
    cases = OF_WAYS if kind == "compiled" else OF_WAYS | OF_MODES
    slots = {"dim": DIM, "pooling": "jagged"}
    tables = [f"{case}.{table}" for case in cases for table in ("user", "item")]
    with Cluster({"slots_config": dict.fromkeys(tables, slots)}, num_servers=2) as cluster:
        cluster.start_servers()
        words = sys.executable, str(SCRIPTS / "alike.py"), optimizer, kind
        ran = run(*words, env=cluster.environment, timeout_s=300.0)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == list(cases)


def assert_rows_by_id(found: dict[str, Any]) -> None:
    assert torch.equal(found["read"], found["again"]["user"])
    assert found["before"] == ROWS
    assert found["written"].tolist() == [[1.0] * DIM] * 2
    assert found["deleted"] == 2
    assert found["ids"] == [0, 1, 2, *range(5, ROWS), 1 << 40]


def test_two_ranks_train_as_one_does_on_the_joined_batch(tmp_path: Path) -> None:
    found = run_script(tmp_path, "sgd", 40, str(tmp_path / "saved"), num_ranks=2)
    both = twins("sgd")
    train_torchs(both, 40)
    assert_equal_torchs(found, both)
    # Sums of two ranks' updates are rounded in the order in which they come.
    assert_goes_on(found, 1e-5)
    # One version, which rank 0 has written, has what both ranks have trained.
    assert found["numbers"] == [1, 0]
    predictor = Predictor(tmp_path / "saved-versions" / "net" / "1")
    ids = np.arange(ROWS)
    answer = predictor({"users": ids[:, None], "items": ids})["output"]
    assert np.abs(answer - found["scores"].numpy()).max() < 1e-6
    predictor.close()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_optimizers_with_state_step_over_servers_as_in_one_process(
    optimizer: str, tmp_path: Path
) -> None:
    """Where every row is met, they equal torch's: tests/test_optim.py."""
    found = run_script(tmp_path, optimizer, NUM_STEPS, str(tmp_path / "saved"))
    both = twins(optimizer)
    alone = train_one_process(both, NUM_STEPS)
    assert found["losses"] == pytest.approx(alone, abs=1e-6)
    for name in ("user", "item"):
        rows = getattr(both.ours, name).table.read(range(ROWS))
        assert (found["loaded"][name] - torch.from_numpy(rows)).abs().max() < 1e-6
    assert_goes_on(found, 0.0)  # its state is in the checkpoint


@pytest.mark.parametrize("how", ["prefetch", "compiled", "compiled,prefetch"])
def test_lookups_ahead_and_compiled_models_equal_the_plain_one_over_servers(
    how: str, tmp_path: Path
) -> None:
    found = run_script(tmp_path, "adagrad", 60, f"--{how}")
    both = twins("adagrad")
    assert found["losses"] == pytest.approx(train_torchs(both, 60), abs=1e-5)
    assert_equal_torchs(found, both)
    if "prefetch" in how:
        assert found["ahead"] > 0.8 * 2 * 60  # of two modules' lookups
