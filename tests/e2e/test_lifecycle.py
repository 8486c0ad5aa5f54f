"""Processes of a job: started in any order, ended by the job, a signal or a failure."""

from __future__ import annotations

import re
import signal
import sys
import time

import pytest

from tests.e2e.support import PATIENCE_S, SERVERS, Job, Process, processes_with, short_directory

DONE = "print('trained')\n"
TALKS = """
from persia._rpc.zmq_transport import ZmqTransport
from persia._services.addresses import connect_embedding_workers
transport = ZmqTransport()
for worker in connect_embedding_workers(transport):
    print("rows", worker.get_embedding_size())
    worker.close()
transport.close()
"""
SLEEPS = """
import signal, time
class Ctx:
    def __enter__(self):
        print("running", flush=True)
    def __exit__(self, kind, error, trace):
        print("unwound by", kind.__name__, error, flush=True)
with Ctx():
    time.sleep(600)
"""
FAILS = """
def train():
    raise ValueError("no such column")
train()
"""


def test_a_job_ends_with_its_script_and_nobody_is_signalled(job: Job) -> None:
    servers = job.start_servers()
    loader = job.start("data-loader", job.script("load.py", "print('sent')"))
    assert job.status(job.script("train.py", TALKS)) == 0
    assert [process.wait() for process in (*servers, loader)] == [0, 0, 0]
    assert "rows [0]" in job.processes[-1].printed()
    assert "has ended, waits for the job to end" in loader.printed()


@pytest.mark.parametrize(
    "order", [SERVERS[::-1], pytest.param(SERVERS, marks=pytest.mark.slow)]
)
def test_processes_start_in_any_order(job: Job, order: tuple[str, str]) -> None:
    trainer = job.start("nn-worker", job.script("train.py", TALKS))
    loader = job.start("data-loader", job.script("load.py", "print('sent')"))
    loader.wait_for("sent")
    servers = []
    for role in order:
        server = job.start_server(role)
        server.wait_for("listens at" if role == "embedding-worker" else "serves at")
        servers.append(server)
    assert [process.wait() for process in (trainer, loader, *servers)] == [0, 0, 0, 0]


def test_w72_servers_end_with_the_job_and_its_status(job: Job) -> None:
    servers = job.start_servers()
    loader = job.start("data-loader", job.script("load.py", "print('sent')"))
    loader.wait_for("waits for the job to end")
    assert job.status(job.script("train.py", "raise SystemExit(7)")) == 7
    assert [process.wait() for process in (*servers, loader)] == [7, 7, 7]


def test_the_traceback_of_a_failed_script_is_printed_last(job: Job) -> None:
    servers = job.start_servers()
    servers[1].wait_for("serves at")
    trainer = job.start("nn-worker", job.script("train.py", FAILS))
    assert trainer.wait() == 1
    path = job.directory / "train.py"
    traceback = (
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 4, in <module>\n    train()\n'
        f'  File "{path}", line 3, in train\n    raise ValueError("no such column")\n'
        "ValueError: no such column\n"
    )
    printed = re.sub(r"\n *[\^~]+(?=\n)", "", trainer.printed())
    assert printed.endswith(traceback)
    assert printed.count(traceback) == 2  # when it was raised, and last
    at_the_end = [server.printed() for server in servers]
    assert [server.wait() for server in servers] == [1, 1]
    assert [server.printed() for server in servers] == at_the_end
    assert all("the job has ended with status 1" in text for text in at_the_end)


def test_a_failed_data_loader_ends_at_once(job: Job) -> None:
    loader = job.start("data-loader", job.script("load.py", FAILS))
    assert loader.wait() == 1
    assert loader.printed().endswith("ValueError: no such column\n")


def test_a_loader_that_hears_of_the_end_says_nothing(job: Job) -> None:
    servers = job.start_servers()
    heard = job.directory / "heard"
    text = (
        "import pathlib, time\nfrom persia.errors import JobFinished\n"
        "print('sends', flush=True)\n"
        f"while not pathlib.Path({str(heard)!r}).exists(): time.sleep(0.01)\n"
        "raise JobFinished('the job has ended')\n"
    )
    loader = job.start("data-loader", job.script("load.py", text))
    loader.wait_for("sends")
    assert job.status(job.script("train.py", "raise SystemExit(3)")) == 3
    heard.touch()
    assert [process.wait() for process in (loader, *servers)] == [3, 3, 3]
    assert "Traceback" not in loader.printed()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_trainer_unwinds_the_script_and_ends_the_job(
    job: Job, number: signal.Signals
) -> None:
    servers = job.start_servers()
    servers[1].wait_for("serves at")
    trainer = job.start("nn-worker", job.script("train.py", SLEEPS))
    trainer.wait_for("running")
    began = time.monotonic()
    trainer.signal(number)
    status = 128 + number
    assert trainer.wait() == status
    assert time.monotonic() - began < 4.0  # honcho kills after 5
    kind = {signal.SIGTERM: "SystemExit", signal.SIGINT: "KeyboardInterrupt"}[number]
    assert f"unwound by {kind}" in trainer.printed()
    assert [server.wait() for server in servers] == [status] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", [*SERVERS, "data-loader"])
def test_a_signal_ends_each_role(job: Job, role: str, number: signal.Signals) -> None:
    if role == "data-loader":
        process = job.start(role, job.script("load.py", SLEEPS))
        process.wait_for("running")
    else:
        process = job.start_server(role)
        process.wait_for("at ipc://")
    process.signal(number)
    assert process.wait() == 128 + number
    assert "Traceback" not in process.printed()
    if role != "data-loader":
        assert f"stops after {number.name}" in process.printed()
        assert "stopped: 0 calls served, 0 unfinished" in process.printed()


@pytest.mark.slow
def test_a_script_that_does_not_unwind_is_killed_in_time(job: Job) -> None:
    text = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS
    trainer = job.start("nn-worker", job.script("train.py", text))
    trainer.wait_for("running")
    began = time.monotonic()
    trainer.signal(signal.SIGTERM)
    assert trainer.wait() == 143
    assert time.monotonic() - began < 5.0
    assert not processes_with(str(job.directory))


def test_a_script_whose_launcher_is_killed_ends(job: Job) -> None:
    trainer = job.start("nn-worker", job.script("train.py", SLEEPS))
    trainer.wait_for("running")
    trainer.signal(signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + PATIENCE_S
    while processes_with(str(job.directory)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "unwound by SystemExit 143" in trainer.printed()


@pytest.mark.slow
def test_a_missing_server_is_named_within_seconds_by_whoever_waits(job: Job) -> None:
    worker = job.start_server("embedding-worker")
    trainer = job.start("nn-worker", job.script("train.py", TALKS), PERSIA_RPC_TIMEOUT="4")
    missing = "no embedding-parameter-server answers: no connection to ipc://"
    worker.wait_for(f"waiting: {missing}")
    # The worker answers in the servers' stead, so that the script's error names the culprit.
    assert trainer.wait() == 1
    assert f"the embedding-worker waits: {missing}" in trainer.printed().splitlines()[-1]


def test_w53_a_worker_without_servers_gives_up_at_its_deadline(job: Job) -> None:
    worker = job.start_server("embedding-worker", PERSIA_RPC_TIMEOUT="0.5")
    assert worker.wait() == 1
    last = worker.printed().splitlines()[-1]
    assert "no embedding-parameter-server answers" in last
    assert last.endswith("waited 0.5 s")


@pytest.mark.slow
def test_two_jobs_on_one_machine_do_not_disturb_each_other(job: Job) -> None:
    with short_directory() as directory:
        other = Job(directory)
        others = other.start_servers()
        servers = job.start_servers()
        others[1].wait_for("serves at")
        assert job.status(job.script("train.py", FAILS)) == 1
        assert [server.wait() for server in servers] == [1, 1]
        assert [server.popen.poll() for server in others] == [None, None]
        assert other.status(other.script("train.py", TALKS)) == 0
        assert [server.wait() for server in others] == [0, 0]
        other.close()


def test_a_thread_that_fails_ends_a_server(job: Job) -> None:
    text = (
        "import threading\n"
        "from persia._services import process\n"
        "from persia.launcher import cli\n"
        "def fail(): raise ValueError('lost my mind')\n"
        "start = process._Serving._watch_job\n"
        "process._Serving._watch_job = lambda self: fail()\n"
        "cli()\n"
    )
    words = [sys.executable, "-c", text, "embedding-parameter-server"]
    server = Process(words, job.directory / "server.log", job.environment)
    job.processes.append(server)
    assert server.wait() == 1
    assert server.printed().endswith("ValueError: lost my mind\n")
