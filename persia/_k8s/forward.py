"""A job in a cluster, seen from here: kubectl forwards ports of its pods to this machine.

kubectl and no client of our own, since it logs in as its user does at any cluster. One process
of it forwards to one pod; pods that are started later are not seen.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

from persia import env
from persia._cli.checks import Finding, error
from persia._cli.doctor import Report, compare
from persia._cli.top import DEADLINE_S, ScrapeTarget, run_top
from persia._k8s.plan import JOB_LABEL, KINDS, LOADER, ROLE_LABEL
from persia.errors import ConfigError

Object = Mapping[str, Any]

# Seconds: of a call of kubectl, and until it forwards.
_CALL_S, _FORWARD_S = 60.0, 30.0
_LOCAL = "127.0.0.1"
_FORWARDS = re.compile(rf"Forwarding from {re.escape(_LOCAL)}:(\d+) -> (\d+)")


# Kills and removes what this process must not leave: kubectl, and keys. The lock is held while
# these come to be and while they go, so that a signal finds all of them.
_left = ExitStack()
_changing = Lock()
_LOCK_S = 5.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# Of a terminal: the screen that was there before, and a cursor.
_RESTORED = b"\x1b[?1049l\x1b[?25h"


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP end this process wherever it is, without kubectl or keys left.

    A thread does it, and not an exception that a handler raises: in a destructor Python drops
    that; while a socket is made it leaves one open, and closing libzmq's context waits for it.
    """
    source, target = os.pipe()
    os.set_blocking(target, False)
    signal.set_wakeup_fd(target)
    for number in _ENDING:
        signal.signal(number, lambda *_: None)  # so that its number is written to the pipe
    Thread(target=_end_at_signal, args=(source,), name="persia-signals", daemon=True).start()


def _end_at_signal(source: int) -> None:
    number = 0
    while number not in _ENDING:  # SIGINT is also written, and ends the main thread
        number = os.read(source, 1)[0]
    # The main thread needs it to end by itself, and may hold it where the kernel lets it hang.
    _changing.acquire(timeout=_LOCK_S)
    try:
        terminal, silence = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):  # threads may yet write of connections that break
            os.dup2(silence, output)
        _left.close()
        with suppress(OSError):  # last: a terminal that is stopped (Ctrl-S) takes nothing
            if os.isatty(terminal):
                os.write(terminal, _RESTORED)
    finally:
        os._exit(128 + number)


@contextmanager
def _nothing_left() -> Iterator[None]:
    try:
        yield
    finally:
        with _changing:
            _left.close()


def _start(words: Sequence[str], stderr: int) -> subprocess.Popen[bytes]:
    with _changing:
        try:
            kubectl = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr)
        except FileNotFoundError as exc:
            raise ConfigError("expected kubectl in PATH, found none") from exc
        _left.callback(kubectl.wait)
        _left.callback(kubectl.kill)
    return kubectl


def _ask(*words: str) -> Any:
    """Return what kubectl prints as JSON; ConfigError with its last line if it fails."""
    with _start(("kubectl", *words, "--output=json"), subprocess.PIPE) as kubectl:
        try:
            said, complaint = kubectl.communicate(timeout=_CALL_S)
        except subprocess.TimeoutExpired as exc:
            kubectl.kill()
            raise ConfigError(f"kubectl {words[0]}: no answer within {_CALL_S:g} s") from exc
    if kubectl.returncode:
        why = complaint.decode(errors="replace").strip()
        why = why or f"exit status {kubectl.returncode}"
        raise ConfigError(f"kubectl {words[0]}: {why.splitlines()[-1]}")
    return json.loads(said)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a job and, of the ports of its pod, the one for metrics or for calls."""

    role: str
    index: int
    pod: str
    port: int

    def __str__(self) -> str:
        return f"{self.role} {self.index} in pod {self.pod}"


def pods_of(job: str, options: Sequence[str]) -> dict[str, Object]:
    """Return the pods of a job by host name, of each the newest; ConfigError if it has none.

    One that has failed stays as long as its Job, which may have replaced it.
    """
    found = _ask("get", "pods", f"--selector={JOB_LABEL}={job}", *options)["items"]
    found.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
    pods = {pod["spec"]["hostname"]: pod for pod in found if _variables(pod)}
    if not pods:
        raise ConfigError(f"expected pods of a job {job} (label {JOB_LABEL}), found none")
    return pods


def _container(pod: Object) -> Object:
    """Return the container of PERSIA, beside which there may be others; empty if none is."""
    several: Sequence[Object] = pod["spec"]["containers"]
    run_id = env.run_id.name
    own = (one for one in several if run_id in (of["name"] for of in one.get("env", ())))
    return next(own, {})


def _variables(pod: Object) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in _container(pod).get("env", ())}


def processes_of(pods: Iterable[Object], port: str) -> Iterator[Process]:
    """Yield the processes of pods that run: ranks of an nn-worker are one port apart.

    Args:
        pods: As the API has them.
        port: What their ports are called: ``metrics`` or ``rpc``.
    """
    for pod in (one for one in pods if one["status"]["phase"] == "Running"):
        meta = pod["metadata"]
        # Of a host's name, such as job-embedding-ps-0-3, the last number is the pod's.
        number = int(pod["spec"]["hostname"].rpartition("-")[2])
        ports = [
            one["containerPort"]
            for one in _container(pod).get("ports", ())
            if one.get("name", "").partition("-")[0] == port
        ]
        for rank, where in enumerate(ports):
            index = number * len(ports) + rank
            yield Process(meta["labels"][ROLE_LABEL], index, meta["name"], where)


def _forward(processes: Iterable[Process], options: Sequence[str]) -> dict[Process, int | str]:
    """Forward to processes; returns the port here that leads to each, or why none."""
    pods: dict[str, list[Process]] = {}
    for one in processes:
        pods.setdefault(one.pod, []).append(one)
    answers: dict[str, Future[dict[int, int] | str]] = {pod: Future() for pod in pods}
    for pod, several in pods.items():
        words = ["kubectl", "port-forward", f"--address={_LOCAL}", *options, f"pod/{pod}"]
        words += [f":{one.port}" for one in several]
        said = _start(words, subprocess.STDOUT).stdout
        Thread(target=_read, args=(said, len(several), answers[pod]), daemon=True).start()
    known, _ = wait(answers.values(), _FORWARD_S)
    at: dict[Process, int | str] = {}
    for pod, several in pods.items():
        answer = answers[pod]
        found = answer.result() if answer in known else f"not within {_FORWARD_S:g} s"
        at |= {one: found if isinstance(found, str) else found[one.port] for one in several}
    return at


def _read(said: IO[bytes], num_ports: int, answer: Future[dict[int, int] | str]) -> None:
    """Note where kubectl listens, by port of the pod; or why it has ended.

    Reads on: kubectl writes a line for each connection, and waits if they are not read.
    """
    found: dict[int, int] = {}
    text = "kubectl has ended"
    with said:
        for line in said:
            text = line.decode(errors="replace").strip()
            found |= {int(of): int(here) for here, of in _FORWARDS.findall(text)}
            if len(found) == num_ports and not answer.done():
                answer.set_result(found)
    if not answer.done():
        answer.set_result(text)


def top_of_job(job: str, options: Sequence[str], *, interval_s: float, is_once: bool) -> int:
    """Show a job's metrics; returns the exit status."""
    # The run of this shell is not the job's.
    with _nothing_left(), env.changed(**{env.run_id.name: None}):
        targets = []
        processes = processes_of(pods_of(job, options).values(), "metrics")
        for one, port in _forward(processes, options).items():
            if isinstance(port, str):
                print(f"{one}: {port}", file=sys.stderr)
                port = 0  # where nothing answers
            targets.append(ScrapeTarget(one.role, one.index, _LOCAL, port, has_next=False))
        todo = f"kubectl get pods --selector={JOB_LABEL}={job} shows its pods"
        return run_top(
            targets, interval_s=interval_s, deadline_s=DEADLINE_S, is_once=is_once, todo=todo
        )


def doctor_of_job(job: str, options: Sequence[str], embedding_config: Path | None) -> Report:
    """Compare a job's servers with what is here, and name pods that do not run."""
    with _nothing_left():
        pods = pods_of(job, options)
        findings = list(_missing(job, pods))
        servers = []
        with env.changed(**{env.keys_directory.name: _keys(pods.values(), options)}):
            for one, port in _forward(processes_of(pods.values(), "rpc"), options).items():
                if isinstance(port, str):
                    todo = f"kubectl describe pod {one.pod}"
                    findings.append(error("pods", f"{one}: {port}", todo))
                else:
                    servers.append((one.role, str(one), f"tcp://{_LOCAL}:{port}"))
            return Report([*findings, *compare(servers, embedding_config)], [])


def _keys(pods: Collection[Object], options: Sequence[str]) -> Path | None:
    """Return a folder with the keys of a data-loader from the job's Secret.

    That of this shell where pods have keys from elsewhere, and None where they have none.
    """
    for volume in (one for pod in pods for one in pod["spec"].get("volumes", ())):
        if volume["name"] == "persia-keys":
            secret = volume["secret"]["secretName"]
            data = _ask("get", "secret", secret, *options)["data"]
            with _changing:
                kept = tempfile.TemporaryDirectory(prefix="persia-keys-")  # its owner's alone
                folder = Path(_left.enter_context(kept))
                for name in LOADER.keys:
                    (folder / name).write_bytes(base64.b64decode(data[name]))
            return folder
    has_keys = any(env.keys_directory.name in _variables(pod) for pod in pods)
    return env.keys_directory() if has_keys else None


def _missing(job: str, pods: Mapping[str, Object]) -> Iterator[Finding]:
    """Yield an error for each pod that does not run, or is in a list of addresses alone."""
    hosts: set[str] = set()
    for pod in pods.values():
        name, phase = pod["metadata"]["name"], pod["status"]["phase"]
        if phase not in ("Running", "Succeeded"):
            yield error("pods", f"{name} is {phase}", f"kubectl describe pod {name}")
        if phase in ("Running", "Pending"):
            lists = [_variables(pod).get(kind.variable, "") for kind in KINDS]
            hosts |= {one.partition(".")[0] for text in lists for one in env.addresses_of(text)}
    for host in sorted(hosts - pods.keys()):
        if host.startswith(f"{job}-"):
            yield error("pods", f"{host} has no pod", f"kubectl describe job {host}")
