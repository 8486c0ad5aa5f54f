"""Builds the stack and runs it: the same bits, failures, and faults while it trains.

    python3 -m tests.compose             # needs Docker with Compose, and nothing else
    python3 -m tests.compose failure     # one of them
    steps: build memory bits project serve keys failure chaos resumed
    MINUTES=20 SEED=7 python3 -m tests.compose build chaos
    KILLS=20 SEED=7 python3 -m tests.compose build resumed

Containers, networks and volumes are those of a project of its own, and are gone afterwards.
COMPOSE_TEST names the project and its images, where two run at a time.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.compose.chaos import CRASH, LOOK_S, Chaos
from tests.faults.kills import (
    FILES,
    PACE_S,
    end_in,
    judge,
    kill_again_and_again,
    steps_for,
)

ROOT = Path(__file__).parents[2]
PROJECT = os.environ.get("COMPOSE_TEST", "persia-test")
IMAGE = os.environ.get("COMPOSE_TEST", "persia")
NETWORK = f"{PROJECT}_cluster"
COUNTS = "./tests/compose/counts"
KEYS, RESUME = "compose/keys.yml", "compose/resume.yml"
# Seconds. A machine of two busy cores needs a fifth of them.
BUILD_S, RUN_S, STEP_S = 1200.0, 300.0, 120.0
# What a batch may come to instead of being trained, in the nn-worker's stats.
LOSSES = ("failed", "abandoned", "incomplete", "unused")


def compose(*words: str, overlay: bool = False, also: Sequence[str] = ()) -> list[str]:
    files = ["compose.yaml", *(["tests/compose/script.yml"] if overlay else []), *also]
    options = [option for name in files for option in ("-f", name)]
    return ["docker", "compose", "-p", PROJECT, *options, *words]


def run(
    words: Sequence[str], timeout_s: float = STEP_S, check: bool = True, **changes: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "COMPOSE_PROFILES": "train", "IMAGE": IMAGE, **changes},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        sys.exit(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout[-6000:]}")
    return done


def down() -> None:
    # Of both profiles: services of one that is not active would stay.
    words = compose("down", "--volumes", "--timeout", "5", "--remove-orphans", also=[RESUME])
    run(words, check=False, COMPOSE_PROFILES="train,serve")


def expect(what: str, want: object, got: object, text: str = "") -> None:
    if want != got:
        sys.exit(f"{what}: expected {want}, got {got}\n{text[-6000:]}")


def last(text: str, mark: str) -> str:
    """Return what stands behind ``mark`` in the last line that has it."""
    lines = [line for line in text.splitlines() if mark in line]
    if not lines:
        sys.exit(f"no line with {mark!r} in\n{text[-6000:]}")
    return lines[-1].partition(mark)[2]


# --- steps ----------------------------------------------------------------------------------


def build() -> None:
    run(compose("build", overlay=True), BUILD_S, COMPOSE_PROFILES="train,serve")
    for image in (f"{IMAGE}:server", f"{IMAGE}:nn-worker", f"{IMAGE}:serving"):
        size = run(["docker", "image", "inspect", "-f", "{{.Size}}", image]).stdout
        print(f"{image}: {int(size) / 1e6:.0f} MB")


def report_of(text: str) -> dict[str, float]:
    report: dict[str, float] = json.loads('{"seed"' + last(text, '{"seed"'))
    return {name: report[name] for name in ("auc", "loss", "rows")}


def bits() -> None:
    """`docker compose up` ends with 0, and its model is embedded mode's, bit by bit."""
    start = time.monotonic()
    up = run(compose("up", "--no-build", overlay=True), RUN_S, REPRODUCIBLE="1")
    cluster = report_of(up.stdout)
    took = time.monotonic() - start
    statuses = run(compose("ps", "-a", "--format", "{{.ExitCode}}")).stdout.split()
    expect("exit statuses", ["0"] * 8, statuses, up.stdout)
    expect("AUC, loss and rows of embedded mode and the cluster", embedded(), cluster)
    print(f"test AUC {cluster['auc']:.6f} in the cluster and in one process, {took:.0f} s")


@functools.cache
def embedded() -> dict[str, float]:
    """Return what embedded mode makes of the same data."""
    data = os.environ.get("PERSIA_DATA_DIR") or f"{PROJECT}_data"
    alone = run(
        [
            *("docker", "run", "--rm", "--init", "--network", "none", "--read-only"),
            *("--tmpfs", "/tmp", "-v", f"{ROOT}/examples/adult_income:/workspace:ro"),
            *("-v", f"{data}:/data:ro", "-e", "PERSIA_DATA_DIR=/data", "-e", "REPRODUCIBLE=1"),
            *("-e", "OMP_NUM_THREADS=1", f"{IMAGE}:nn-worker", "python", "train.py", "--json"),
        ],
        RUN_S,
    )
    return report_of(alone.stdout)


def project() -> None:
    """What `persia-launcher init` writes trains in containers as it is."""
    with tempfile.TemporaryDirectory() as place:
        made = f"{place}/project"
        write = ["docker", "run", "--rm", "--network", "none", "-v", f"{place}:{place}"]
        write += ["--user", str(os.getuid()), f"{IMAGE}:server"]
        run([*write, "persia-launcher", "init", made])
        words = ["docker", "compose", "-p", PROJECT, "-f", f"{made}/compose.yaml"]
        words += ["-f", f"{ROOT}/tests/compose/script.yml"]
        how = {"PERSIA_SOURCE": str(ROOT), "PWD": made, "NN_ARGUMENT": "--"}
        up = run([*words, "up", "--no-build"], RUN_S, True, **how)
        ended = run([*words, "ps", "-a", "--format", "{{.ExitCode}}"], STEP_S, True, **how)
        expect("exit statuses", {"0"}, set(ended.stdout.split()), up.stdout)
        auc = float(re.findall(r"AUC (\d\.\d+)", up.stdout)[-1])
        expect("an AUC above 0.7", True, auc > 0.7, up.stdout)
    print(f"a new project: AUC {auc:.4f}, all containers end with 0")


# --- serving ----------------------------------------------------------------------------------

# The first version comes before the new item does, which is after 0.4 of the log.
SERVE = {"COMPOSE_PROFILES": "serve", "SERVING_SECONDS": "45", "PUBLISH_EVERY": "15"}
for _name in ("SERVE_HTTP", "SERVE_GRPC", "SERVE_ROWS_HTTP", "SERVE_ROWS_GRPC"):
    SERVE[f"{_name}_PORT"] = "0"  # any that is free
NEW_ITEM = 987_654_321_987  # of examples/serving/click_log.py
# User 7 with an item that the log has from the beginning, and one that comes with time.
REQUEST = {
    "inputs": [
        {"name": "user", "datatype": "INT64", "shape": [1], "data": [7]},
        {"name": "item", "datatype": "INT64", "shape": [2], "data": [1, NEW_ITEM]},
        {"name": "seen_items", "datatype": "INT64", "shape": [1, 2], "data": [2, 3]},
        {"name": "hour", "datatype": "FP32", "shape": [1, 1], "data": [0.5]},
    ]
}


def scores(service: str) -> tuple[str, list[float]]:
    """Return the version that answers, and its scores; no version while none is ready."""
    place = run(compose("port", service, "8080"), STEP_S, True, **SERVE).stdout.strip()
    url = f"http://{place}/v2/models/clicks/infer"
    request = urllib.request.Request(url, json.dumps(REQUEST).encode())
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            answer = json.load(reply)
    except (OSError, http.client.HTTPException):  # an error status too
        return "", []
    return answer["model_version"], answer["outputs"][0]["data"]


def serve() -> None:
    """The profile `serve` trains, publishes and answers, and a change of rows is seen."""
    run(compose("up", "--detach", "--no-build", overlay=True), STEP_S, True, **SERVE)
    # By service, its last answer; and by version, the new item's scores.
    answers: dict[str, tuple[str, list[float]]] = {}
    seen: dict[str, dict[str, list[float]]] = {"serve": {}, "serve_rows": {}}
    trainer = ["docker", "inspect", "-f", "{{.State.Status}} {{.State.ExitCode}}"]
    trainer.append(container("trainer", 1))
    deadline, state = time.monotonic() + RUN_S, ""
    while not state.startswith("exited") or len({str(one) for one in answers.values()}) != 1:
        if time.monotonic() > deadline:
            logs = run(compose("logs", "--tail", "30"), STEP_S, False, **SERVE).stdout
            sys.exit(f"trainer {state}; last answers {answers}:\n{logs}")
        threading.Event().wait(0.3)
        state = run(trainer).stdout.strip()
        if state.startswith("exited"):
            logs = run(["docker", "logs", container("trainer", 1)]).stdout
            expect("the trainer's end", "exited 0", state, logs)
        for service, by_version in seen.items():
            version, found = scores(service)
            if by_version:
                expect(f"{service} has answered, and does", True, bool(version))
            if version:
                answers[service] = version, found
                by_version.setdefault(version, [found[1]]).append(found[1])
    # The dense net of a version is one: what moves its scores are rows.
    moved = {
        service: max(max(found) - min(found) for found in by_version.values())
        for service, by_version in seen.items()
    }
    expect("a change of rows under one version", True, min(moved.values()) > 0.01, str(seen))
    print(f"scores of one version moved by {moved} as rows did; in the end both are the same")


# --- with keys ------------------------------------------------------------------------------

ROLES = {"embedding_parameter_server": 3, "embedding_worker": 2, "nn_worker": 1}
PORTS = {"embedding_parameter_server": 8888, "embedding_worker": 8887, "nn_worker": 23457}
METRICS_PORT = 9400  # of compose/.docker.env


# Without a key: a place is refused if its connection ends before the handshake does.
STRANGER = """
import sys, zmq
for where in sys.argv[1:]:
    peer = zmq.Context().socket(zmq.DEALER)
    peer.linger = 0
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    peer.connect("tcp://" + where)
    event = monitor.poll(10000) and int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    print(where, "refused" if event == zmq.EVENT_DISCONNECTED else "not refused")
"""


def listening(name: str) -> set[int]:
    """Return the ports at which a container listens; Docker's name server is its own."""
    tables = run(["docker", "exec", name, "cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    fields = [line.split() for line in tables.splitlines()]
    ends = [one[1].split(":") for one in fields if len(one) > 3 and one[3] == "0A"]
    return {int(port, 16) for host, port in ends if host != "0B00007F"}


def check_doors() -> None:
    """Only documented ports listen, and a container without a key is refused there.

    What else a stranger hears: tests/e2e/test_doors.py.
    """
    deadline = time.monotonic() + STEP_S
    for role, count in ROLES.items():
        for name in (container(role, number + 1) for number in range(count)):
            while PORTS[role] not in listening(name):
                if time.monotonic() > deadline:
                    sys.exit(f"{name} does not listen:\n{run(compose('logs')).stdout[-6000:]}")
                threading.Event().wait(0.2)
            others = listening(name) - {PORTS[role], METRICS_PORT}
            if role != "nn_worker":  # the others are PyTorch's
                expect(f"ports of {name} that docs/security.md does not name", set(), others)
    places = [f"{role}:{port}" for role, port in PORTS.items()]
    stranger = ["docker", "run", "--rm", "--network", NETWORK, f"{IMAGE}:server", "python"]
    said = run([*stranger, "-c", STRANGER, *places]).stdout
    expect("strangers", [f"{place} refused" for place in places], said.splitlines())


@contextlib.contextmanager
def made_keys() -> Iterator[str]:
    """A directory with keys, made in a container, whose user owns them."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        make = ["docker", "run", "--rm", "--network", "none", "-v", f"{place}:/keys"]
        run([*make, f"{IMAGE}:server", "persia-launcher", "keys", "/keys"])
        yield place


def keys() -> None:
    """With keys: the same bits, only documented ports, and strangers are refused."""
    with made_keys() as place:
        up = compose("up", "--detach", "--no-build", overlay=True, also=[KEYS])
        how = {"KEYS": place, "REPRODUCIBLE": "1"}
        run([*up, *ROLES], STEP_S, True, **how)
        check_doors()
        # Not before: without a data-loader nothing is over too soon.
        run(up, STEP_S, True, **how)
        trainer = container("nn_worker", 1)
        status = run(["docker", "wait", trainer], RUN_S).stdout.strip()
        said = run(["docker", "logs", trainer]).stdout
        expect("exit status", "0", status, said)
    expect("AUC, loss and rows with keys", embedded(), report_of(said))
    print(f"test AUC {embedded()['auc']:.6f} with keys too, and no port but documented ones")


def failure() -> None:
    """A script that fails ends the job, and nothing is started again."""
    done = run(
        compose("up", "--no-build", overlay=True),
        RUN_S,
        WORKSPACE=COUNTS,
        NN_SCRIPT="/workspace/fail.py",
    )
    expect("containers that run", [], run(compose("ps", "-q")).stdout.split(), done.stdout)
    ended = run(compose("ps", "-a", "--format", "{{.Service}} {{.ExitCode}}")).stdout
    failed = [one for one in ended.splitlines() if not one.endswith(" 0")]
    expect("services that did not end with 0", ["nn_worker 7"], failed, done.stdout)
    down()
    done = run(
        compose("up", "--no-build", "--exit-code-from", "nn_worker", overlay=True),
        RUN_S,
        check=False,
        NN_ARGUMENT="--no-such-option",
    )
    # The nn-worker's own, though it is stopped as soon as any other container has ended.
    expect("status of up --exit-code-from nn_worker", 2, done.returncode, done.stdout)
    print("failing script: ends with its status, nothing is started again")


def memory() -> None:
    """A server takes the limit of its container for what there is."""
    program = "from persia.config import resolve_memory_limit as limit; print(limit(None))"
    words = ["docker", "run", "--rm", "--memory", "256m", f"{IMAGE}:server"]
    limit = int(run([*words, "python", "-c", program]).stdout)
    expect("memory_limit in a container of 256 MiB", int((256 << 20) * 0.7), limit)
    print(f"memory_limit in a container of 256 MiB: {limit >> 20} MiB")


class Training:
    """A job that trains; its nn-worker says how far it is."""

    def __init__(self) -> None:
        # Compose's own `logs` puts control characters before lines.
        follow = ["docker", "logs", "--follow", container("nn_worker", 1)]
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.progress = 0  # batches, as last said
        self.process = subprocess.Popen(
            follow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                if line.startswith("progress "):
                    self.progress = int(line.removeprefix("progress "))
                self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, mark: str, at_least: int = 0) -> str:
        """Return what stands behind the mark, a number of at least so much if that is said."""
        deadline = time.monotonic() + RUN_S
        said: list[str] = []
        with contextlib.suppress(queue.Empty):
            while (line := self.lines.get(timeout=deadline - time.monotonic())) is not None:
                said.append(line)
                if line.startswith(mark):
                    rest = line.removeprefix(mark)
                    if not at_least or int(rest) >= at_least:
                        return rest
        logs = run(compose("logs", "--tail", "40"), check=False).stdout
        sys.exit(f"the trainer never said {mark!r} {at_least}:\n{''.join(said[-20:])}\n{logs}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.thread.join()


@contextlib.contextmanager
def training(*also: str, **changes: str) -> Iterator[Training]:
    """A job that trains, with these files of Compose."""
    up = compose("up", "--detach", "--no-build", overlay=True, also=also)
    run(up, STEP_S, True, **changes)
    job = Training()
    try:
        yield job
    except BaseException:
        print(run(compose("ps", "-a"), check=False).stdout)
        for name in containers():
            print(f"--- {name}, started again {restarts(name)} times")
            print(run(["docker", "logs", "--tail", "40", name], check=False).stdout)
        raise
    finally:
        job.close()
        down()


def container(service: str, number: int) -> str:
    return f"{PROJECT}-{service}-{number}"


def restarts(name: str) -> int:
    return int(run(["docker", "inspect", "-f", "{{.RestartCount}}", name]).stdout)


def containers() -> list[str]:
    """Return the names of the roles' containers, those that have ended too."""
    found = run(compose("ps", "-a", "--format", "{{.Name}}")).stdout.split()
    return sorted(name for name in found if not name.endswith("-data-1"))


def who_waits(seconds: float, *, is_running: bool = False) -> str:
    """Return the last lines of the last seconds in which a role says what it misses.

    Of all containers, or of those that run.
    """
    lines = []
    for name in containers():
        state = run(["docker", "inspect", "-f", "{{.State.Status}}", name]).stdout.strip()
        if is_running and state != "running":
            continue
        since = ["docker", "logs", "--since", f"{seconds:.0f}s", name]
        lines_of = run(since, check=False).stdout.splitlines()
        lines_of = [line for line in lines_of if re.search("wait|WARNING|ERROR", line)]
        lines += [f"    {name}, {state}", *(f"        {line:.300}" for line in lines_of[-3:])]
    return "\n".join(lines)


def await_end(patience_s: float) -> None:
    """Wait for all containers to end, each with 0."""
    deadline = time.monotonic() + patience_s
    while run(compose("ps", "-q")).stdout.split():
        if time.monotonic() > deadline:
            late = f"containers that have not ended in {patience_s:.0f} s"
            sys.exit(f"{late}:\n{who_waits(patience_s, is_running=True)}")
        threading.Event().wait(0.5)
    status = run(compose("ps", "-a", "--format", "{{.Name}}={{.ExitCode}}")).stdout.split()
    expect("exit statuses", [], [one for one in status if not one.endswith("=0")])


def check_end(job: Training, count: int) -> dict[str, int]:
    books: dict[str, int] = json.loads(job.wait_for("books "))
    await_end(STEP_S)
    lost = {name: books.get(name, 0) for name in LOSSES}
    expect("batches trained", (count, dict.fromkeys(lost, 0)), (books["batches"], lost))
    expect("ids that were not trained once for each occurrence", 0, books["wrong_ids"])
    return books


def loaders_books(number: int) -> Counter[str]:
    """Return the counts with which data-loaders ended."""
    books: Counter[str] = Counter()
    for one in range(1, number + 1):
        text = run(["docker", "logs", container("data_loader", one)]).stdout
        books.update(json.loads('{"' + last(text, 'loader {"')))
    return books


def starts(service: str, number: int) -> int:
    """Return how often a server or embedding-worker was started, and came to listen."""
    text = run(["docker", "logs", container(service, number)]).stdout
    return text.count({"embedding_worker": "listens at tcp:"}.get(service, "serves at tcp:"))


def chaos() -> None:
    """With keys, two faults at a time at random moments: what is sent is trained, once.

    Only what is killed dies, but for data-loaders: one that has passed a batch over whose
    ids are lost then is restarted.
    """
    window_s = 60 * float(os.environ.get("MINUTES", "1"))
    seed = int(os.environ.get("SEED", "1"))
    count = int(window_s * 20)
    replicas = {"data_loader": 2, "embedding_worker": 3, "embedding_parameter_server": 3}
    scale = {f"{role.upper()}_REPLICAS": str(number) for role, number in replicas.items()}
    of_job = {"WORKSPACE": COUNTS, "NN_ARGUMENT": "--"}
    spread = {"NUM_BATCHES": str(count), "SPREAD_S": str(window_s)}
    with (
        made_keys() as place,
        training(KEYS, KEYS=place, **of_job, **scale, **spread) as job,
    ):
        job.wait_for("progress ", 25)
        top = compose("exec", "-T", "nn_worker", "persia-launcher", "top", "--once")
        deadline, frame = time.monotonic() + STEP_S, ""
        while "9 of 9 processes answer" not in frame:
            expect("what `top` shows in time", True, time.monotonic() < deadline, frame)
            frame = run([*top, "data_loader:9400"]).stdout
        everybody = {**replicas, "nn_worker": 1}
        faults = Chaos(
            run, container, NETWORK, everybody, lambda: job.progress, who_waits, seed
        )
        # Behind the last fault there is something left to train, for less than RUN_S.
        faults.go_on_for(max(window_s * 0.9, window_s - RUN_S / 2))
        books = check_end(job, count)
        expect("a fault a minute at least", True, faults.counts.total() >= window_s / 60)
        for role in ("embedding_worker", "embedding_parameter_server"):
            for number in range(1, replicas[role] + 1):
                most, began = 1 + faults.deaths[role, number], starts(role, number)
                what = f"{container(role, number)} began {began} times, of 1 to {most}"
                expect(what, True, 1 <= began <= most)
        sent = loaders_books(replicas["data_loader"])
        # One that a restarted loader only registers again is neither sent nor dropped by it.
        known = sent["sent"] + sent["dropped"]
        between = known <= count <= known + sent["registered_again"]
        expect(f"{count} batches sent, or known to be", True, between, str(sent))
        expect("batches lost or kept", (0, 0), (sent["lost"], sent["kept"]))
    print(f"seed {seed}: {faults}: {count} batches, each trained once; {books}, loaders {sent}")


# --- a trainer that is killed ---------------------------------------------------------------


def resumed() -> None:
    """A trainer that is killed KILLS=20 times ends with the net and rows of one that is not.

    Docker starts it again after SIGKILL to its processes, as after a lack of memory, by the
    policy of compose/resume.yml. With SIGNALS=SIGKILL,SIGTERM it is stopped in turn, and
    started by hand, which is not the policy's.
    """
    count, seed = int(os.environ.get("KILLS", "20")), int(os.environ.get("SEED", "1"))
    steps = int(os.environ.get("NUM_BATCHES", steps_for(count)))
    whole = end_after(0, seed, steps)
    print(f"seed {seed}: {judge(end_after(count, seed, steps), whole, count, steps)}")


def end_after(count: int, seed: int, steps: int) -> dict[str, object]:
    """Train with a number of kills; returns what the trainer had at its end."""
    trainer = container("nn_worker", 1)
    state = ["docker", "inspect", "-f", "{{.State.Running}} {{.State.StartedAt}}", trainer]

    def running() -> dict[str, str]:
        is_running, began = run(state).stdout.split()
        log = ["docker", "logs", "--tail", "50", "--since", began, trainer]
        return {began: run(log).stdout} if is_running == "true" else {}

    def kill(_: str, signal: str) -> None:
        if signal == "SIGKILL":
            run(["docker", "exec", "--detach", trainer, *CRASH])
        else:
            run(["docker", "stop", trainer])
            run(["docker", "start", trainer])

    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        for name, source in FILES.items():
            (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, Path(place) / name)
        of_job = {"WORKSPACE": place, "NN_ARGUMENT": "--", "DATA_LOADER_REPLICAS": "2"}
        pace = {"NUM_BATCHES": str(steps), "PACE_S": str(PACE_S if count else 0)}
        with training(RESUME, **of_job, **pace):
            signals = os.environ.get("SIGNALS", "SIGKILL").split(",")
            kill_again_and_again(count, seed, signals, running, kill, lambda: who_waits(LOOK_S))
            await_end(RUN_S + steps * PACE_S)
            return end_in(run(["docker", "logs", trainer]).stdout)


STEPS = {
    one.__name__: one
    for one in (build, memory, bits, project, serve, keys, failure, chaos, resumed)
}


def main() -> None:
    wanted = sys.argv[1:] or list(STEPS)
    unknown = sorted(set(wanted) - STEPS.keys())
    if unknown:
        sys.exit(f"expected some of {', '.join(STEPS)}, got {', '.join(unknown)}")
    down()
    try:
        for name in wanted:
            start = time.monotonic()
            STEPS[name]()
            print(f"{name}: ok, {time.monotonic() - start:.0f} s", flush=True)
            down()
    finally:
        down()


if __name__ == "__main__":
    main()
