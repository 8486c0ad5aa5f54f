"""Train examples/adult_income on a Ray cluster, each process in an actor.

    ray start --head                       # or the address of a cluster that runs
    python examples/ray/adult.py --servers 4 --workers 2 --trainers 2 --ranks 1

Ray chooses the nodes and passes addresses and keys on; the processes are those of
persia-launcher, and talk to each other as they do everywhere. Every node has persia, a checkout
at the same path and PERSIA_DATA_DIR, or gets them by a runtime environment. What fails is
started again, but a trainer: then all end.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]  # of `make ray`

SCRIPTS = Path(__file__).resolve().parents[1] / "adult_income"
CONFIG = SCRIPTS / "config"
MOST_STARTS, END_S = 5, 60.0
PUBLIC_KEYS = ("server.public", "control.public", "data.public")
LISTENING_KEYS = ("server.secret", "control.secret", *PUBLIC_KEYS)
KEYS = {"data-loader": ("data.secret", "server.public")}  # the others listen


@ray.remote(max_concurrency=2)  # it can be stopped while it runs
class Process:
    """One process of a job, on the node that Ray has chosen."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._keys = keys
        self._child: subprocess.Popen[bytes] | None = None

    def address(self, ports: int = 1) -> tuple[str, int]:
        """Return the node's address, and the first of some ports in a row that are free."""
        for first in range(20_000 + os.getpid() % 10_000, 60_000, ports):
            found = [socket.socket() for _ in range(ports)]
            try:
                for number, one in enumerate(found):
                    one.bind(("", first + number))
                return ray.util.get_node_ip_address(), first
            except OSError:
                continue  # another one has it
            finally:
                for one in found:
                    one.close()
        raise OSError("no port is free")

    def run(self, words: list[str], variables: dict[str, str]) -> int:
        """Run persia-launcher; returns its exit status."""
        command = [sys.executable, "-m", "persia.launcher", *words]
        with tempfile.TemporaryDirectory(prefix="persia-keys-") as folder:  # its owner's alone
            for name, text in self._keys.items():
                (Path(folder) / name).write_bytes(text)
            given = {"PERSIA_KEYS": folder, "PERSIA_LISTEN_HOST": "0.0.0.0"}
            given |= {"PERSIA_METRICS_PORT": "0"}
            self._child = subprocess.Popen(command, env={**os.environ, **given, **variables})
            return self._child.wait()

    def stop(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)


def make_keys() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "keys"
        command = [sys.executable, "-m", "persia.launcher", "keys", str(folder)]
        subprocess.run(command, check=True)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def train(counts: dict[str, int], ranks: int) -> int:
    """Run a job with this number of processes of each role; returns its exit status."""
    keys = make_keys()
    # Processors are counted for ranks only: all of a job have to run, or none gets on.
    actors = {
        role: [
            Process.options(  # type: ignore[attr-defined]
                num_cpus=ranks if role == "nn-worker" else 0, scheduling_strategy="SPREAD"
            ).remote({name: keys[name] for name in KEYS.get(role, LISTENING_KEYS)})
            for _ in range(count)
        ]
        for role, count in counts.items()
    }
    ports = {"nn-worker": ranks + 1}  # of its ranks, and where torch's ranks meet
    places = {
        role: ray.get([one.address.remote(ports.get(role, 1)) for one in several])
        for role, several in actors.items()
    }
    lists = {
        role: ",".join(f"{host}:{port}" for host, port in several)
        for role, several in places.items()
    }
    master, first = places["nn-worker"][0]
    shared = {
        "PERSIA_EMBEDDING_PARAMETER_SERVERS": lists["embedding-parameter-server"],
        "PERSIA_EMBEDDING_WORKERS": lists["embedding-worker"],
        "PERSIA_NN_WORKERS": lists["nn-worker"],
        "PERSIA_GLOBAL_CONFIG": str(CONFIG / "global_config.yml"),
        "PERSIA_EMBEDDING_CONFIG": str(CONFIG / "embedding_config.yml"),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(first + ranks),
    }
    words = {
        "nn-worker": ["--nproc-per-node", str(ranks), str(SCRIPTS / "train.py")],
        "data-loader": [str(SCRIPTS / "data_loader.py")],
    }

    def start(role: str, number: int) -> Any:
        index = {"REPLICA_INDEX": str(number), "REPLICA_SIZE": str(counts[role])}
        if role == "nn-worker":
            index = {"PET_NNODES": str(counts[role]), "PET_NODE_RANK": str(number)}
        given = [role, *words.get(role, [])]
        return actors[role][number].run.remote(given, {**shared, **index})

    running = {start(role, n): (role, n, 1) for role in counts for n in range(counts[role])}
    try:
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            role, number, starts = running.pop(done)
            status = ray.get(done)
            if status and (role == "nn-worker" or starts == MOST_STARTS):
                print(f"{role} {number} ended with status {status}", flush=True)
                return int(status)
            if status:
                running[start(role, number)] = (role, number, starts + 1)
        return 0
    finally:  # also of Ctrl-C: actors that Ray kills leave their keys behind
        stops = [one.stop.remote() for several in actors.values() for one in several]
        ray.wait([*running, *stops], num_returns=len(running) + len(stops), timeout=END_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for option, default in (("servers", 2), ("workers", 1), ("trainers", 1), ("ranks", 1)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    roles = {"embedding-parameter-server": options.servers, "embedding-worker": options.workers}
    roles |= {"data-loader": 1, "nn-worker": options.trainers}
    ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=True)
    sys.exit(train(roles, options.ranks))
