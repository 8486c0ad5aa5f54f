"""Processes of a job: started in any order, ended by the job, a signal or a failure."""

from __future__ import annotations

import os
import re
import signal

import pytest

from persia._cli.run import UNWIND_S
from persia._cli.scripts import _ANNOUNCE_ON_SIGNAL_S
from tests.e2e.support import PATIENT, WITHOUT_TORCHRUN, Job, processes_with, wait_until_gone
from tests.support.processes import SERVERS

# The one is Compose's and Kubernetes', the other a terminal's; the way through is the same.
SIGNALS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]

TALKS = """
from persia._rpc.zmq_transport import ZmqTransport
from persia._cluster.connect import connect_embedding_workers
transport = ZmqTransport()
for worker in connect_embedding_workers(transport):
    print("rows", worker.get_embedding_size())
    worker.close()
transport.close()
"""
SLEEPS = """
import signal
class Ctx:
    def __enter__(self):
        pass
    def __exit__(self, kind, error, trace):
        print("unwound by", kind.__name__, error, flush=True)
with Ctx():
    print("running", flush=True)  # not before: a signal would come too early
    signal.pause()
"""
FAILS = """
def train():
    raise ValueError("no such column")
train()
"""
WAITS = """
from persia.ctx import DataCtx
def send():
    with DataCtx():
        pass
send()
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [SERVERS[::-1], SERVERS])
def test_processes_start_in_any_order(job: Job, order: tuple[str, str]) -> None:
    job.launcher = ("-c", PATIENT)
    trainer = job.launch("nn-worker", job.script("train.py", TALKS))
    loader = job.launch("data-loader", job.script("load.py", "print('sent')"))
    loader.wait_for("sent")
    servers = []
    for role in order:
        server = job.start_replica(role)
        server.wait_for("listens at" if role == "embedding-worker" else "serves at")
        servers.append(server)
    assert [process.wait() for process in (trainer, loader, *servers)] == [0, 0, 0, 0]


@pytest.mark.parametrize(("text", "status"), [(TALKS, 0), ("raise SystemExit(7)", 7)])
def test_w72_servers_end_with_the_job_and_its_status(job: Job, text: str, status: int) -> None:
    job.launcher = ("-c", PATIENT)
    servers = job.start_servers()
    loader = job.launch("data-loader", job.script("load.py", "print('sent')"))
    loader.wait_for("has ended, waits for the job to end")
    trainer = job.launch("nn-worker", job.script("train.py", text))
    assert [process.wait() for process in (trainer, *servers, loader)] == [status] * 4
    assert ("rows [0]" in trainer.printed()) is (text == TALKS)


def test_roles_that_are_signalled_at_the_end_of_a_job_have_its_status(job: Job) -> None:
    """As under honcho, which signals the others when the first process has exited."""
    job.launcher = ("-c", PATIENT)
    others = job.start_servers()
    others.append(job.launch("data-loader", job.script("load.py", "print('sent')")))
    others[-1].wait_for("has ended, waits for the job to end")
    assert job.launch("nn-worker", job.script("train.py", TALKS)).wait() == 0
    for process in others:
        process.send_signal(signal.SIGTERM)
    assert [process.wait() for process in others] == [0, 0, 0]
    assert "after SIGTERM" not in others[-1].printed()


def test_the_traceback_of_a_failed_script_is_printed_last(job: Job) -> None:
    job.launcher = ("-c", PATIENT)
    servers = job.start_servers()
    servers[1].wait_for("serves at")
    trainer = job.launch("nn-worker", job.script("train.py", FAILS))
    assert trainer.wait() == 1
    path = job.place / "train.py"
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


def test_an_error_for_the_user_ends_with_its_message_and_the_users_frames(job: Job) -> None:
    script = job.script("load.py", WAITS)
    loader = job.launch("data-loader", script, PERSIA_RPC_TIMEOUT="0.2")
    assert loader.wait() == 1
    printed = re.sub(r"\n *[\^~]+(?=\n)", "", loader.printed())
    _, _, last = printed.rpartition("Traceback (most recent call last):\n")
    assert f'  File "{script}", line 6, in <module>\n    send()\n' in last
    assert "\npersia.errors.ServiceUnavailable: no embedding-worker answers: " in last
    assert last.endswith("; waited 0.2 s\n")


def test_a_loader_that_hears_of_the_end_says_nothing(job: Job) -> None:
    job.launcher = ("-c", PATIENT)
    servers = job.start_servers()
    heard = job.place / "heard"
    os.mkfifo(heard)
    text = (
        "import pathlib\nfrom persia.errors import JobFinished\n"
        "print('sends', flush=True)\n"
        f"pathlib.Path({str(heard)!r}).read_bytes()\n"
        "raise JobFinished('the job has ended')\n"
    )
    loader = job.launch("data-loader", job.script("load.py", text))
    loader.wait_for("sends")
    trainer = job.launch("nn-worker", job.script("train.py", "raise SystemExit(3)"))
    assert trainer.wait() == 3
    heard.write_bytes(b"")  # it goes on
    assert [process.wait() for process in (loader, *servers)] == [3, 3, 3]
    assert "Traceback" not in loader.printed()


def test_a_job_that_is_asked_to_end_has_done_so_before_honcho_kills() -> None:
    assert UNWIND_S + _ANNOUNCE_ON_SIGNAL_S < 4.0  # of 5, and that is all it waits for


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_trainer_ends_the_job(job: Job, number: signal.Signals) -> None:
    job.launcher = ("-c", PATIENT)
    servers = job.start_servers()
    servers[1].wait_for("serves at")
    trainer = job.launch("nn-worker", job.script("train.py", SLEEPS))
    trainer.wait_for("running")
    trainer.send_signal(number)
    status = 128 + number
    assert trainer.wait() == status
    kind = {signal.SIGTERM: "SystemExit", signal.SIGINT: "KeyboardInterrupt"}[number]
    assert f"unwound by {kind}" in trainer.printed()
    assert [server.wait() for server in servers] == [status] * 2


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("role", [*SERVERS, "data-loader"])
def test_a_signal_ends_each_role(job: Job, role: str, number: signal.Signals) -> None:
    if role == "data-loader":
        process = job.launch(role, job.script("load.py", SLEEPS))
        process.wait_for("running")
    else:
        process = job.start_replica(role)
        process.wait_for("at ipc://")
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert "Traceback" not in process.printed()
    if role != "data-loader":
        assert f"stops after {number.name}" in process.printed()
        assert "stopped: 0 calls served, 0 unfinished" in process.printed()


@pytest.mark.slow
def test_a_script_that_does_not_unwind_is_killed_in_time(job: Job) -> None:
    text = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS
    trainer = job.launch("nn-worker", job.script("train.py", text))
    trainer.wait_for("running")
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait() == 143
    assert "unwound" not in trainer.printed()
    assert not processes_with(str(job.place))


# The launcher, which gives nothing any time but what writes a checkpoint.
IMPATIENT = PATIENT.replace("cli()", "scripts.UNWIND_S = 0; cli()")
SAVES = """
import signal, sys, torch
from persia.ctx import TrainCtx
from persia.embedding.optim import SGD
model = torch.nn.Linear(4, 1)
with TrainCtx(
    model=model,
    embedding_optimizer=SGD(lr=0.1),
    dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    checkpoint_folder=sys.argv[1],
):
    print("running", flush=True)
    signal.pause()
"""


@pytest.mark.slow
def test_a_trainer_has_time_for_its_last_checkpoint(job: Job) -> None:
    """With a folder in the script, of which its launcher's environment says nothing."""
    servers, folder = job.start_servers(), job.place / "checkpoints"
    job.launcher = ("-c", IMPATIENT)
    trainer = job.launch("nn-worker", job.script("train.py", SAVES), str(folder))
    trainer.wait_for("running")
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait() == 143
    assert len([*folder.glob("*.json")]) == 1, trainer.printed()
    assert "is killed" not in trainer.printed()
    assert [server.wait() for server in servers] == [143] * 2


LIMITED = """
from torch.distributed.launcher.api import LaunchConfig
print("torchrun waits", getattr(LaunchConfig(1, 1, 1), "shutdown_timeout", None))
"""


@pytest.mark.slow
def test_torchrun_waits_for_ranks_as_long_as_its_launcher(job: Job) -> None:
    job.start_servers()
    trainer = job.launch(
        "nn-worker", job.script("train.py", LIMITED), PERSIA_GRACE_PERIOD="49.5"
    )
    assert trainer.wait() == 0
    if "torchrun waits None" in trainer.printed():
        pytest.skip("torch is older, and always waits 30 s")
    assert "torchrun waits 50" in trainer.printed()


UNHURRIED = """
import persia._process_exit
persia._process_exit._UNWIND_S = 1e6
"""
FOLLOWS = f"{UNHURRIED}persia._process_exit.end_with_launcher()\n"
# In place of the launcher: a process between it and the script.
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[2:]]))"
UNWINDS = """
import signal, threading, types
import persia._process_exit

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that has had it, and unwinds
persia._process_exit._UNWIND_S = 1e6
waits, is_done = threading.Event(), threading.Event()


class Pause(threading.Event):
    def wait(self, timeout):
        if timeout < 1e6:
            return super().wait(timeout)
        waits.set()
        is_done.wait(60)


persia._process_exit.threading = types.SimpleNamespace(Event=Pause, Thread=threading.Thread)
persia._process_exit.end_with_launcher()
print("running", flush=True)
waits.wait(60)
print("unwound", flush=True)
is_done.set()
threading.Event().wait(60)
"""


@pytest.mark.parametrize(
    ("launcher", "text", "said"),
    [
        (WITHOUT_TORCHRUN, UNHURRIED + SLEEPS, "unwound by SystemExit 143"),
        (WITHOUT_TORCHRUN, UNWINDS, "unwound"),  # it has begun to unwind
        # Though the launcher lives, as ranks whose torchrun was killed.
        (BETWEEN, FOLLOWS + SLEEPS, "running"),
    ],
    ids=["runs", "unwinds", "has another parent"],
)
def test_a_script_ends_with_what_started_it(
    job: Job, launcher: str, text: str, said: str
) -> None:
    job.launcher = ("-c", launcher)
    lives = {"PERSIA_LAUNCHER_PID": str(os.getpid())} if launcher == BETWEEN else {}
    parent = job.launch("nn-worker", job.script("train.py", text), **lives)
    parent.wait_for("running")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(str(job.place))
    assert said in parent.printed()


def test_w53_a_worker_without_servers_gives_up_at_its_deadline(job: Job) -> None:
    worker = job.start_replica("embedding-worker", PERSIA_RPC_TIMEOUT="0.5")
    assert worker.wait() == 1
    last = worker.printed().splitlines()[-1]
    assert "no embedding-parameter-server answers" in last
    assert last.endswith("waited 0.5 s")


def test_a_thread_that_fails_ends_a_server(job: Job) -> None:
    text = (
        "import threading\n"
        "from persia._cluster import process\n"
        "from persia.launcher import cli\n"
        "def fail(): raise ValueError('lost my mind')\n"
        "start = process.ServerProcess._watch_job\n"
        "process.ServerProcess._watch_job = lambda self: fail()\n"
        "cli()\n"
    )
    job.launcher = ("-c", text)
    server = job.launch("embedding-parameter-server")
    assert server.wait() == 1
    assert server.printed().endswith("ValueError: lost my mind\n")
