"""Running a user's script as nn-worker or data-loader, to the end of the job.

    torchrun --standalone --nproc-per-node 2 -m persia._cli.run script train.py ...

Signals reach the script through this process. A script that does not end within seconds of one
is killed: honcho kills this process 5 s after SIGTERM. A trainer that writes a checkpoint then
has ``PERSIA_GRACE_PERIOD``.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from persia import env
from persia._cli.run import UNWIND_S, Child
from persia._cluster.job import (
    GRACE_S,
    LAST_ASK_S,
    POLL_S,
    Event,
    Events,
    JobMonitor,
    TrainerWatch,
    announce_job_end,
    status_after_job,
    watched_process,
)
from persia._metrics.definitions import LOADER
from persia._metrics.endpoint import Endpoint
from persia._process_exit import RUN, RUN_AGAIN, End
from persia._rpc.zmq_transport import ZmqTransport
from persia.errors import ConfigError, PersiaError, did_you_mean

logger = logging.getLogger(__name__)

# Seconds to announce the end of the job to servers: after the script's own end, after a signal,
# and where a supervisor restarts servers that have failed.
_ANNOUNCE_S, _ANNOUNCE_ON_SIGNAL_S, _ANNOUNCE_SUPERVISED_S = 3.0, 0.5, 20.0
# Seconds within which every data-loader has polled the state of the job.
_POLLED_S = 2 * POLL_S
# Seconds that a data-loader's script gets to end after the job has.
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Script:
    path: Path
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.path.is_file():
            names = (str(one) for one in self.path.parent.glob("*.py"))
            hint = did_you_mean(str(self.path), names)
            raise ConfigError(f"expected a Python script at {self.path}, found none{hint}")

    def words(self) -> list[str]:
        """Arguments of Python, or of torchrun, that run the script."""
        return ["-m", RUN, "script", str(self.path), *self.arguments]


def _watch(child: Child, events: Events) -> None:
    def wait() -> None:
        child.process.wait()
        events.put(Event("ended"))

    threading.Thread(target=wait, name="persia-child", daemon=True).start()


# --- nn-worker ------------------------------------------------------------------------------


def torchrun(
    nproc_per_node: int, node_rank: int, nnodes: int, max_restarts: int = 0
) -> list[str]:
    """Return the arguments of Python that start the ranks of this node."""
    command = ["-m", RUN, "torchrun", f"--nproc-per-node={nproc_per_node}"]
    command.append(f"--max-restarts={max_restarts}")  # also 0, or it reads its variable
    if nnodes == 1:
        return [*command, "--standalone"]
    if not 0 <= node_rank < nnodes:
        raise ConfigError(f"--node-rank must be in 0..{nnodes - 1}, got {node_rank}")
    host, port = env.master_address(), env.master_port()
    if host is None:
        raise ConfigError(
            f"--nnodes {nnodes}: expected MASTER_ADDR to name the host of node 0, where the "
            f"ranks meet, and MASTER_PORT its port if other than 29500"
        )
    command += [f"--nnodes={nnodes}", f"--node-rank={node_rank}", f"--master-addr={host}"]
    return command if port is None else [*command, f"--master-port={port}"]


def run_nn_worker(
    script: Script,
    *,
    nproc_per_node: int = 1,
    node_rank: int = 0,
    nnodes: int = 1,
    max_restarts: int = 0,
) -> int:
    """Run the training script of one node; returns its exit status.

    Ranks that fail are started again ``max_restarts`` times. Node 0 announces the status to
    every server; only that of a success where a supervisor starts this node again, and it goes
    on from a checkpoint. A traceback is printed last.
    """
    command = torchrun(nproc_per_node, node_rank, nnodes, max_restarts)
    resumes, grace_s = env.resume_from() is not None, env.grace_period_s()
    # Of torchrun itself: how long it waits for its ranks when it is stopped, else 30 s.
    limits = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": math.ceil(grace_s)}
    where = f"{nproc_per_node} rank(s) on node {node_rank} of {nnodes}"
    logger.info("runs %s with %s", script.path, where)
    received = 0
    with (
        watched_process() as events,
        closing(Child([*command, *script.words()], **limits)) as child,
    ):
        _watch(child, events)
        event = events.get()
        if event.error is not None:
            raise event.error
        if event.kind == "signal":
            received = event.number
            logger.info("stops after %s", signal.Signals(received).name)
            child.stop(received, grace_s if child.ends_slowly else UNWIND_S)
        end = child.end()
        if received:
            end = End(128 + received)
        logger.info("%s ended with status %d", script.path, end.status)
        is_back = end.status != 0 and resumes and env.is_supervised()
        if node_rank == 0 and not is_back:
            patience_s = _ANNOUNCE_SUPERVISED_S if env.is_supervised() else _ANNOUNCE_S
            patience_s = _ANNOUNCE_ON_SIGNAL_S if received else patience_s
            _announce_end(end.status, patience_s, child.has_participated)
        if end.status and not received and not is_back:
            # Until data-loaders know the end of the job and log nothing more.
            with suppress(queue.Empty):
                while events.get(timeout=_POLLED_S).kind != "signal":
                    pass
    print(end.text, end="", file=sys.stderr, flush=True)
    return end.status


def _announce_end(status: int, timeout_s: float, has_participated: bool) -> None:
    with closing(ZmqTransport()) as transport:
        try:
            silent = announce_job_end(transport, status, timeout_s, has_participated)
        except ConfigError as error:
            # This process exits with the status of the script, not with one of its own.
            logger.error("cannot announce the end of the job to the servers: %s", error)
            return
    if silent and not status:
        logger.warning("the end of the job did not reach %s", ", ".join(silent))


# --- data-loader ----------------------------------------------------------------------------


def run_data_loader(script: Script, *, replica_index: int = 0, replica_size: int = 1) -> int:
    """Run a data-loader's script until the job has ended.

    Returns the job's exit status; the script's own if it failed.
    """
    if not 0 <= replica_index < replica_size:
        expected = f"0..{replica_size - 1} for --replica-size {replica_size}"
        raise ConfigError(f"--replica-index must be in {expected}, got {replica_index}")
    logger.info("runs %s", script.path)
    with ExitStack() as stack:
        events = stack.enter_context(watched_process())
        transport = stack.enter_context(closing(ZmqTransport()))
        changes = {"REPLICA_INDEX": replica_index, "REPLICA_SIZE": replica_size, "RANK": None}

        def on_end(end: int | PersiaError) -> None:
            events.put(Event("job", end) if isinstance(end, int) else Event("job", error=end))

        watcher = f"data-loader {replica_index} {socket.gethostname()}:{os.getpid()}"
        stack.enter_context(closing(JobMonitor(transport, watcher, on_end, replica_index)))
        while True:
            with ExitStack() as of_run:
                child = of_run.enter_context(closing(Child(script.words(), **changes)))
                _watch(child, events)

                def wait_after_script(child: Child = child, of_run: ExitStack = of_run) -> None:
                    # At the port of the script's own endpoint, which ended with it.
                    of_run.callback(Endpoint(LOADER, replica_index, list, str, str).close)
                    if env.resume_from() is not None:
                        watch = TrainerWatch(transport, child.served, events)
                        of_run.enter_context(closing(watch))

                end = _until_job_ends(script, child, events, wait_after_script)
            if end.status != RUN_AGAIN:
                break
            logger.info("runs %s again, for a trainer that was started again", script.path)
    print(end.text, end="", file=sys.stderr, flush=True)
    return end.status


def _late_status(events: Events) -> int | None:
    """Return the status of a job that may have ended; it may be known only later."""
    with suppress(queue.Empty):
        event = events.get(timeout=LAST_ASK_S)
        if event.kind == "job" and event.error is None:
            return event.number
        events.put(event)
    return None


def _until_job_ends(
    script: Script,
    child: Child,
    events: Events,
    on_script_ended: Callable[[], object] = str,
) -> End:
    has_ended = False  # the script, well
    status: int | None = None  # of the job
    lost: BaseException | None = None  # no server answers that knows the end of the job
    deadline: float | None = None
    while True:
        if has_ended and status is not None:
            with suppress(queue.Empty):
                events.get(timeout=GRACE_S)
            return End(status_after_job(status))
        if has_ended and lost is not None:
            # Not before: a running script waits for the same servers, with a better message.
            raise lost
        level = logging.DEBUG if status else logging.INFO  # the process that failed logs last
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = events.get(timeout=left)
        except queue.Empty:
            logger.log(level, "%s still runs after the end of the job: stopped", script.path)
            child.stop(signal.SIGTERM)
            return End(status_after_job(status or 0))
        if event.kind == "failure" and event.error is not None:
            raise event.error
        if event.kind == "signal" and has_ended and status is None:
            # Perhaps the job has ended: honcho signals all others once the trainer is gone.
            late = _late_status(events)
            event = event if late is None else Event("job", late)
        if event.kind == "signal":
            logger.log(level, "stops after %s", signal.Signals(event.number).name)
            child.stop(event.number)
            return End(128 + event.number if status is None else status_after_job(status))
        if event.kind == "ended":
            end = child.end()
            if end.status == RUN_AGAIN and status is None:
                return end
            if end.status and env.is_supervised():
                status = _late_status(events) if status is None else status
                if status is not None:
                    return End(status_after_job(status))
            if end.status and not status:
                logger.info("%s ended with status %d", script.path, end.status)
                return end
            has_ended = True
            on_script_ended()
            if status is None:
                logger.info("%s has ended, waits for the job to end", script.path)
        elif event.kind == "restarted":
            return End(RUN_AGAIN)
        elif event.error is not None:
            lost = event.error
        else:
            # The script learns of it as well, and gets time to end.
            status, deadline = event.number, time.monotonic() + _LEAVE_S
            level = logging.DEBUG if status else logging.INFO
            logger.log(level, "the job has ended with status %d", status)
