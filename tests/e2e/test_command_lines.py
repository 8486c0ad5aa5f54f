"""persia-launcher in processes of its own: mistakes, scripts and their arguments."""

from __future__ import annotations

import os

import pytest

from tests.e2e.support import Job
from tests.support.processes import Cluster

SHOWS = """
import sys
import persia.launcher, persia.helper
from persia import env
print('got', sys.argv[1:])
print('from', sys.path[0], __name__, __file__)
print('as', env.get_replica_index(), env.get_replica_size(), env.get_mode())
print('torch', 'torch' in sys.modules)
raise SystemExit(4)
"""


def test_mistakes_are_one_line_and_status_2(job: Job) -> None:
    job.launcher = Cluster.launcher  # which starts torchrun: not here
    del job.variables["PERSIA_EMBEDDING_CONFIG"]
    bad = job.script("bad.yml", "slots_config: {feature: {dime: 4}}\n")
    config = ["--embedding-config", bad]
    good = str(job.place / "slots.yml")
    script = job.script("script.py", "print('started')\n")
    mistakes = {
        ("embedding-worker",): "give --embedding-config or set PERSIA_EMBEDDING_CONFIG",
        ("embedding-worker", "--embedding-config", "none.yml"): "none.yml",
        ("embedding-parameter-server", *config): "dime",
        ("embedding-parameter-server", *config, "--replica-index", "3"): "0..0 for --replica-s",
        ("nn-worker",): "expected a script: name it, or set PERSIA_NN_WORKER_ENTRY",
        ("nn-worker", "none.py"): "expected a Python script at none.py, found none",
        ("nn-worker", bad, "--nnodes", "2"): "expected MASTER_ADDR to name the host of node 0",
        ("data-loader", bad, "--replica-index", "1"): "--replica-index must be in 0..0",
        ("embedding-worker", *config[:1], good): "lists 2 addresses, but --replica-size is 1",
        ("nn-worker", script): "PERSIA_EMBEDDING_WORKERS: ",
        ("data-loader", script): "PERSIA_EMBEDDING_WORKERS: ",
    }
    changes = {
        good: {"PERSIA_EMBEDDING_WORKERS": "127.0.0.1:1,127.0.0.1:2"},
        script: {"PERSIA_EMBEDDING_WORKERS": "127.0.0.1"},
    }
    started = {words: job.launch(*words, **changes.get(words[-1], {})) for words in mistakes}
    for words, text in mistakes.items():
        assert started[words].wait() == 2
        (line,) = started[words].printed().splitlines()
        assert text in line
        assert f" ERROR {words[0]}" in line


def test_an_address_in_use_is_named(job: Job) -> None:
    job.start_replica("embedding-parameter-server").wait_for("serves at")
    second = job.launch("embedding-parameter-server")
    assert second.wait() == 2
    assert "cannot listen at ipc://" in second.printed()


def test_a_script_finds_what_python_would_give_it_and_its_number(job: Job) -> None:
    script = job.script("load.py", SHOWS)
    words = (script, "--lr", "a b")
    replica = ("--replica-index=1", "--replica-size=3")
    loader = job.launch("data-loader", *replica, *words, PERSIA_LAUNCHER_VERBOSE="1", RANK="7")
    assert loader.wait() == 4
    _, command, *rest = loader.printed().splitlines()
    assert command.startswith("execute command: ")
    assert command.endswith(f"-m persia._cli.run script {script} --lr 'a b'")
    assert "got ['--lr', 'a b']" in rest
    assert f"from {job.place} __main__ {script}" in rest
    assert "as 1 3 services" in rest
    assert "torch False" in rest  # which data-loaders and servers never load


@pytest.mark.slow
def test_ranks_by_torchrun_and_the_traceback_of_the_first_that_fails(job: Job) -> None:
    text = (
        "import pathlib, signal\n"
        "from persia import env\n"
        "print('rank', env.get_rank(), env.get_local_rank(), env.get_world_size(),\n"
        "      env.get_mode(), flush=True)\n"
        "pipe = pathlib.Path(__file__).parent / 'pipe'\n"
        "if env.get_rank() == 1:\n"
        "    pipe.read_bytes()\n"  # until the other one has begun
        "    raise ValueError('rank 1 is lost')\n"
        "pipe.write_bytes(b'')\n"
        "signal.pause()\n"
    )
    os.mkfifo(job.place / "pipe")
    script = job.script("train.py", text)
    job.launcher = Cluster.launcher
    trainer = job.launch("nn-worker", script, "--nproc-per-node=2")
    assert trainer.wait() == 1
    printed = trainer.printed()
    assert "rank 0 0 2 services\n" in printed
    assert "rank 1 1 2 services\n" in printed
    assert printed.endswith("ValueError: rank 1 is lost\n")
