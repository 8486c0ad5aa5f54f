"""A job in a cluster, seen from here: kubectl forwards ports of its pods to this machine.

kubectl and no client of our own, since it logs in as its user does at any cluster. One process
of it forwards to one pod; pods that are started later are not seen.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia import env
from persia._cli.checks import error
from persia._cli.doctor import Report, compare
from persia._cli.top import DEADLINE_S, ScrapeTarget, run_top
from persia._k8s.plan import JOB_LABEL, KINDS, LOADER, METRICS_PORT, ROLE_LABEL
from persia.errors import ConfigError
from persia.utils import sleep

Object = Mapping[str, Any]

# Seconds: of a call of kubectl, and until it forwards.
_CALL_S, _FORWARD_S, _LOOK_S = 60.0, 30.0, 0.05
_LOCAL = "127.0.0.1"
_FORWARDS = re.compile(rf"Forwarding from {re.escape(_LOCAL)}:(\d+) -> (\d+)")


def run_kubectl(*words: str) -> Any:
    """Return what kubectl prints as JSON; ConfigError with its last line if it fails."""
    try:
        ran = subprocess.run(
            ["kubectl", *words, "--output=json"],
            capture_output=True,
            text=True,
            timeout=_CALL_S,
            check=False,
        )
    except FileNotFoundError as exc:
        raise ConfigError("expected kubectl in PATH, found none") from exc
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"kubectl {words[0]}: no answer within {_CALL_S:g} s") from exc
    if ran.returncode:
        why = ran.stderr.strip() or f"exit status {ran.returncode}"
        raise ConfigError(f"kubectl {words[0]}: {why.splitlines()[-1]}")
    return json.loads(ran.stdout)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a job and, of the ports of its pod, the one for metrics or for calls."""

    role: str
    index: int
    pod: str
    port: int


def processes_of(pod: Object, port: str) -> Iterator[Process]:
    """Yield the processes of a pod: ranks of an nn-worker are one port apart.

    Args:
        pod: As the API has it.
        port: What its ports are called: ``metrics`` or ``rpc``.
    """
    meta, spec = pod["metadata"], pod["spec"]
    # Of a host's name, such as job-embedding-ps-0-3, the last number is the pod's.
    number = int(spec["hostname"].rpartition("-")[2])
    ports = [
        one["containerPort"]
        for one in spec["containers"][0].get("ports", ())
        if one["name"].partition("-")[0] == port
    ]
    for rank, where in enumerate(ports):
        index = number * len(ports) + rank
        yield Process(meta["labels"][ROLE_LABEL], index, meta["name"], where)


def pods_of(job: str, options: Sequence[str]) -> dict[str, list[Object]]:
    """Return the pods of a job by phase; ConfigError if it has none."""
    found = run_kubectl("get", "pods", f"--selector={JOB_LABEL}={job}", *options)["items"]
    if not found:
        raise ConfigError(f"expected pods of a job {job} (label {JOB_LABEL}), found none")
    by_phase: dict[str, list[Object]] = {"Running": []}
    for one in found:
        by_phase.setdefault(one["status"]["phase"], []).append(one)
    return by_phase


@contextmanager
def forwarded(
    processes: Sequence[Process], options: Sequence[str]
) -> Iterator[dict[Process, int]]:
    """Forward to processes; yields the port of this machine that leads to each.

    Raises:
        ConfigError: If kubectl does not forward to one of them.
    """
    pods: dict[str, set[int]] = {}
    for one in processes:
        pods.setdefault(one.pod, set()).add(one.port)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = {}
        for pod, ports in pods.items():
            words = ["kubectl", "port-forward", f"--address={_LOCAL}", *options, f"pod/{pod}"]
            log = stack.enter_context((folder / pod).open("wb"))
            started[pod] = subprocess.Popen(
                [*words, *(f":{port}" for port in ports)], stdout=log, stderr=log
            )
            stack.callback(started[pod].wait)
            stack.callback(started[pod].kill)
        deadline = time.monotonic() + _FORWARD_S
        local = {
            pod: _local_ports(process, folder / pod, pods[pod], deadline)
            for pod, process in started.items()
        }
        yield {one: local[one.pod][one.port] for one in processes}


def _local_ports(
    process: subprocess.Popen[bytes], log: Path, wanted: set[int], deadline: float
) -> dict[int, int]:
    """Return where kubectl listens, by port of the pod, once it does."""
    while True:
        has_ended = process.poll() is not None or time.monotonic() > deadline
        text = log.read_text(encoding="utf-8", errors="replace")
        found = {int(of): int(here) for here, of in _FORWARDS.findall(text)}
        if wanted <= found.keys():
            return found
        if has_ended:
            why = text.strip() or f"not within {_FORWARD_S:g} s"
            raise ConfigError(f"kubectl port-forward {log.name}: {why.splitlines()[-1]}")
        sleep(_LOOK_S)


def top_of_job(job: str, options: Sequence[str], *, interval_s: float, is_once: bool) -> int:
    """Show a job's metrics; returns the exit status."""
    running = pods_of(job, options)["Running"]
    processes = [one for pod in running for one in processes_of(pod, "metrics")]
    with forwarded(processes, options) as at:
        targets = [
            ScrapeTarget(one.role, one.index, _LOCAL, port, has_next=False)
            for one, port in at.items()
        ]
        with env.changed(**{env.run_id.name: None}):  # of this shell, and not of the job
            return run_top(
                targets, interval_s=interval_s, deadline_s=DEADLINE_S, is_once=is_once
            )


@contextmanager
def keys_of(pods: Sequence[Object], options: Sequence[str]) -> Iterator[Path | None]:
    """Yield a folder with the keys of a data-loader, from the job's Secret, while it lasts.

    None where the pods have no keys, or from elsewhere.
    """
    names = {
        volume["secret"]["secretName"]
        for pod in pods
        for volume in pod["spec"].get("volumes", ())
        if volume["name"] == "persia-keys"
    }
    if not names:
        yield None
        return
    data = run_kubectl("get", "secret", min(names), *options)["data"]
    with tempfile.TemporaryDirectory(prefix="persia-keys-") as folder:  # its owner's alone
        for name in LOADER.keys:
            (Path(folder) / name).write_bytes(base64.b64decode(data[name]))
        yield Path(folder)


def doctor_of_job(job: str, options: Sequence[str], embedding_config: Path | None) -> Report:
    """Compare a job's servers with what is here, and name pods that do not run."""
    pods = pods_of(job, options)
    calls = [one for pod in pods["Running"] for one in processes_of(pod, "rpc")]
    with keys_of(pods["Running"], options) as keys, forwarded(calls, options) as at:
        changes: dict[str, object] = {env.metrics_port.name: METRICS_PORT}
        for kind in KINDS:
            if kind.variable:
                ports = [port for one, port in at.items() if one.role == kind.role]
                changes[kind.variable] = ",".join(f"{_LOCAL}:{port}" for port in ports) or None
        if keys is not None:
            changes[env.keys_directory.name] = keys
        with env.changed(**changes):
            report = compare(embedding_config)
    away = [
        error("pods", f"{name} is {phase}", f"kubectl describe pod {name}")
        for phase, several in pods.items()
        if phase not in ("Running", "Succeeded")
        for name in (pod["metadata"]["name"] for pod in several)
    ]
    return Report([*away, *report.findings], [])
