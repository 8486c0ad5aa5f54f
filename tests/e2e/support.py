"""Jobs of real processes: started by persia-launcher, at sockets of their own."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from persia._cluster.connect import connect_embedding_workers
from persia._rpc.stubs import RemoteEmbeddingWorker
from persia._rpc.zmq_transport import ZmqTransport
from tests.cluster.place import Place
from tests.support.processes import SERVERS, Cluster, Process, opened
from tests.support.services import SETTINGS, SGD
from tests.support.waiting import PATIENCE_S

CONFIG = {"slots_config": {"feature": {"dim": 4}}}

# The launcher, but with Python in torchrun's place: torch takes seconds to load.
WITHOUT_TORCHRUN = (
    "from persia._cli import scripts; scripts.torchrun = lambda *_: []; "
    "from persia.launcher import cli; cli()"
)
# The same, with patience: a job's end reaches a server that has no processor for a while, a
# role that asks about it has its answer, and a script unwinds.
PATIENT = (
    "from persia._cli import scripts; from persia._cluster import process; "
    "scripts.UNWIND_S = scripts._ANNOUNCE_S = scripts._ANNOUNCE_ON_SIGNAL_S = "
    f"scripts.LAST_ASK_S = process.LAST_ASK_S = {PATIENCE_S}; {WITHOUT_TORCHRUN}"
)


class Job(Cluster):
    """One whose processes a test starts one by one, without torchrun."""

    launcher: Sequence[str] = ("-c", WITHOUT_TORCHRUN)

    def script(self, name: str, text: str) -> str:
        path = self.place / name
        path.write_text(text)
        return str(path)

    def launch(self, *words: str, **changes: str) -> Process:
        """Start ``persia-launcher``, under a name that no other process has."""
        return self.start(str(len(self.processes)), *words, **changes)


def new_job(
    settings: dict[str, Any] | None = None, slots: dict[str, Any] = CONFIG, **environment: str
) -> Job:
    """A job of one server and one worker, gone when it is left."""
    environment |= {"PERSIA_RPC_TIMEOUT": str(PATIENCE_S)}
    return Job(slots, settings, environment=environment)


def transport() -> closing[ZmqTransport]:
    return closing(ZmqTransport())


def processes_with(text: str) -> dict[int, str]:
    """The commands of other processes that know this text from their environment, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has just ended, or another process has its number
                if text.encode() in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes()
                    found[int(entry.name)] = line.replace(b"\0", b" ").decode()
    return found


def wait_until_gone(text: str) -> None:
    """Wait until no process knows this text from its environment."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := processes_with(text):
        for ended in opened(pids):
            left = max(0.0, deadline - time.monotonic())
            assert select.select([ended], [], [], left)[0], processes_with(text)
            os.close(ended)


@contextmanager
def configured_worker(job: Job) -> Iterator[RemoteEmbeddingWorker]:
    """The worker of a job, whose servers have been started and have settings."""
    job.start_servers()
    addresses = job.addresses[SERVERS[1]]
    how: dict[str, Any] = {"connect": connect_embedding_workers, "timeout_s": PATIENCE_S}
    with Place(job.place) as place, place.connected(*addresses, **how) as (found,):
        found.configure(SETTINGS)
        found.register_optimizer(SGD)
        yield found
