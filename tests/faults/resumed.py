"""A training that is killed again and again, and must end as if nothing had happened.

    python -m tests.faults.resumed KILLS [SEED]

In embedded mode a loop starts the script again; with servers torchrun starts both ranks, and
the data-loaders begin again by themselves. SIGKILL and SIGTERM in turn come at seeded steps, at
any moment in them. Losses of every step, also of those that are made twice, rows and dense net
have to be those of an undisturbed run, bit by bit.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.distributed.batches import SLOTS
from tests.faults.kills import SIGNALS
from tests.support.processes import ROOT, Cluster, run

SCRIPT = Path(__file__).parent / "scripts" / "resumed.py"
LOADER = SCRIPT.with_name("resumed_loader.py")
# Exit status of a trainer after SIGTERM, and of one after SIGKILL as subprocess has it.
TERMINATED, KILLED = 143, -9
_MOST_DELAY_S = 0.01
# Seconds that ranks may take to start and to make their steps until the next kill.
_START_S = 60.0
# Seconds to end after SIGTERM; a third of them for the step, if one comes.
_GRACE = {"PERSIA_GRACE_PERIOD": "6"}

Kill = tuple[int, str, float]


def draw_kills(count: int, steps: int, seed: int) -> list[Kill]:
    """Return kills at ascending steps, each after at least one step more."""
    rng = random.Random(seed)
    at = sorted(rng.sample(range(2, steps), count))
    return [
        (step, SIGNALS[number % 2], rng.uniform(0, _MOST_DELAY_S))
        for number, step in enumerate(at)
    ]


def found_in(folder: Path, num_ranks: int) -> dict[str, Any]:
    """Return what ranks had at their end, and their losses: the same where a step repeats."""
    found: dict[str, Any] = {}
    for rank in range(num_ranks):
        losses: dict[int, str] = {}
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, _, loss = line.partition(" ")
            assert losses.setdefault(int(step), loss) == loss, (rank, step, loss, losses)
        end = json.loads((folder / f"end-{rank}.json").read_text())
        found[f"rank {rank}"] = {**end, "losses": losses}
    return found


def run_embedded(folder: Path, steps: int, kills: list[Kill]) -> dict[str, Any]:
    """Run the script as often as it is killed, and once more."""
    variables = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    variables |= {"PERSIA_RESUME_FROM": str(folder / "ckpt"), "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONPATH": str(ROOT), **_GRACE}
    folder.mkdir()
    for _, name, _ in kills:
        ended = run(SCRIPT_OPTION, SCRIPT, folder, steps, json.dumps(kills), env=variables)
        expected = KILLED if name == "SIGKILL" else TERMINATED
        assert ended.returncode == expected, (name, ended.returncode, ended.stderr)
    ended = run(SCRIPT_OPTION, SCRIPT, folder, steps, json.dumps(kills), env=variables)
    assert ended.returncode == 0, ended.stderr
    return found_in(folder, 1)


SCRIPT_OPTION = "-u"  # with an option first ``run`` takes this Python


def run_services(
    folder: Path, steps: int, kills: list[Kill], *, num_ranks: int = 2
) -> dict[str, Any]:
    """Run the job once; torchrun starts the ranks again as often as one is killed."""
    folder.mkdir()
    variables = {"PERSIA_RESUME_FROM": str(folder / "ckpt"), **_GRACE}
    variables["NUM_BATCHES"] = str(steps * num_ranks)  # the data-loaders'
    with Cluster(
        SLOTS, num_servers=2, num_workers=2, num_ranks=num_ranks, environment=variables
    ) as cluster:
        cluster.start_servers()
        cluster.start_loaders(LOADER, 2)
        words = ("--nproc-per-node", str(num_ranks), "--max-restarts", str(len(kills)))
        arguments = (str(SCRIPT), str(folder), str(steps), json.dumps(kills))
        cluster.start_trainer(*words, *arguments)
        failed = {
            name for name, status in cluster.wait(_START_S * (2 + len(kills))).items() if status
        }
        assert not failed, cluster.logs()
        return found_in(folder, num_ranks)


def judge(folder: Path, count: int, seed: int, steps: int) -> None:
    """Compare disturbed runs with undisturbed ones, embedded and with servers."""
    for name, start in (("embedded", run_embedded), ("services", run_services)):
        kills = draw_kills(count, steps, seed)
        whole = start(folder / f"{name}-whole", steps, [])
        disturbed = start(folder / f"{name}-killed", steps, kills)
        assert disturbed == whole, name
        assert whole["rank 0"]["steps"] == steps
        print(f"{name}: {count} kills at {[at for at, _, _ in kills]}: bit-equal", flush=True)


if __name__ == "__main__":
    number, draw = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory(prefix="persia-") as place:
        judge(Path(place), number, draw, steps=4 * number)
