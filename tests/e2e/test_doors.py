"""The ports of a running job: only those of docs/security.md, and none reveals anything.

/proc/<pid>/fd, /proc/net/tcp --> ports of each process --stranger--> a greeting at most
"""

from __future__ import annotations

import contextlib
import json
import re
import socket as sockets
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from persia import env
from persia._cli import health
from persia._cluster.connect import connect_embedding_workers, connect_parameter_servers
from persia._rpc.zmq_transport import ZmqTransport
from persia.errors import NotAllowed
from tests.examples.conftest import LOADER
from tests.rpc.support import raw_peer
from tests.support.processes import SERVERS, Cluster, _children, run
from tests.support.role_keys import keys_of_roles
from tests.support.services import SETTINGS
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LISTENS = "0A"
# What each process logs of the one port that is no socket of ours.
METRICS = re.compile(r"metrics at http://\S+:(\d+)/metrics")
GREETING_BYTES = 64  # of ZMTP
REFUSALS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def ports_of(process: int) -> set[int]:
    """Return where a process and its children listen."""
    own, found = set(), set()
    for pid in (process, *_children(process)):
        with contextlib.suppress(OSError):  # it may end meanwhile
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(str(path.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def answer_to(host: str, port: int, content: bytes) -> bytes:
    """Return all that a stranger hears."""
    got = b""
    with sockets.create_connection((host, port), timeout=PATIENCE_S) as stranger:
        with contextlib.suppress(OSError):  # it may have hung up
            stranger.sendall(content)
            stranger.shutdown(sockets.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while part := stranger.recv(1 << 16):
                got += part
    return got


def knock(host: str, port: int) -> None:
    """Be no ZeroMQ, a browser, and a ZeroMQ without a key."""
    for content in (bytes(range(256)), b"\xff" * 64, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        got = answer_to(host, port, content)
        assert len(got) <= GREETING_BYTES, got
        for word in (b"PERSIA", b"persia", b"embedding", b"HTTP"):
            assert word not in got
    with (
        raw_peer(f"tcp://{host}:{port}") as peer,
        contextlib.closing(peer.socket.get_monitor_socket(REFUSALS)) as monitor,
    ):
        peer.call(1, "hello")
        assert monitor.poll(int(PATIENCE_S * 1000))
        assert not peer.socket.poll(0)
        peer.socket.disable_monitor()


def documented_wire(cluster: Cluster, role: str) -> set[int]:
    return {int(one.rpartition(":")[2]) for one in cluster.addresses.get(role, [])}


def documented(cluster: Cluster, name: str, role: str) -> set[int]:
    """Return the ports that docs/security.md gives a process."""
    metrics = {int(port) for port in METRICS.findall(cluster.log(name))}
    return metrics | documented_wire(cluster, role)


def check_ports(cluster: Cluster, name: str, role: str) -> None:
    host = cluster.variables["PERSIA_LISTEN_HOST"]
    ports = ports_of(cluster.processes[name].pid)
    assert ports == documented(cluster, name, role)
    wire = ports & documented_wire(cluster, role)
    for port in wire:
        knock(host, port)
    for port in ports - wire:
        answer_to("127.0.0.1", port, bytes(range(256)))
        healthy = answer_to("127.0.0.1", port, b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 " in healthy  # what else it answers: tests/metrics/test_endpoint.py


def test_w71_only_documented_ports_are_open_and_tell_nothing(tmp_path: Path) -> None:
    keys = keys_of_roles(tmp_path)
    slots = {"slots_config": {"a": {"dim": 4}}}
    with Cluster(slots, transport="tcp") as cluster:
        for role in SERVERS:
            variables = cluster.variables | {"PERSIA_KEYS": str(keys[role])}
            cluster.start_replica(role, 0, **variables).wait_for("serves at")
            with env.changed(**variables):
                health.check(role, PATIENCE_S)
        for role in SERVERS:
            check_ports(cluster, f"{role}-0", role)
        for role, connect in (
            ("data-loader", connect_parameter_servers),
            ("data-loader", connect_embedding_workers),
            ("nn-worker", connect_embedding_workers),
        ):
            variables = cluster.variables | {"PERSIA_KEYS": str(keys[role])}
            with env.changed(**variables), contextlib.closing(ZmqTransport()) as transport:
                (server,) = connect(transport)
                if role == "nn-worker":
                    # By the embedding-worker to the parameter server.
                    server.configure(SETTINGS)
                else:
                    with pytest.raises(NotAllowed, match="needs the control key"):
                        server.configure(SETTINGS)
                server.close()


SAY = ("--json", "--quiet")
TORCH_S = 120.0  # on a busy machine it takes long to load


@pytest.mark.slow
@pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR names no data")
def test_training_with_keys_is_bit_equal(tmp_path: Path) -> None:
    """adult_income, each role with its own keys: AUC, loss and rows of embedded mode."""
    keys = keys_of_roles(tmp_path)
    script = LOADER.parent / "train.py"
    config = LOADER.parent / "config" / "embedding_config.yml"
    with Cluster(
        config, transport="tcp", num_servers=2, environment={"REPRODUCIBLE": "1"}
    ) as cluster:
        alone = {name: "" for name in cluster.variables if name.startswith("PERSIA_")}
        environment = cluster.environment | alone
        embedded = run(sys.executable, script, *SAY, env=environment, timeout_s=2 * TORCH_S)
        assert embedded.returncode == 0, embedded.stderr
        for role, number in ((SERVERS[0], 0), (SERVERS[0], 1), (SERVERS[1], 0)):
            cluster.start_replica(role, number, PERSIA_KEYS=str(keys[role]))
        words = (str(script), *SAY)
        cluster.start_trainer(*words, PERSIA_KEYS=str(keys["nn-worker"]))
        cluster.variables["PERSIA_KEYS"] = str(keys["data-loader"])
        (address,) = documented_wire(cluster, "nn-worker")
        pid = cluster.processes["nn-worker"].pid
        until(lambda: address in ports_of(pid), TORCH_S, look_s=0.05, details=cluster.logs)
        knock(cluster.variables["PERSIA_LISTEN_HOST"], address)
        # torchrun's and the process group's, which the page says are PyTorch's.
        print(ports_of(pid) - documented(cluster, "nn-worker", "nn-worker"))
        cluster.start_loaders(LOADER, 1)
        statuses = cluster.wait(TORCH_S)
        assert set(statuses.values()) == {0}, statuses
        (line,) = re.findall(r"\{.*\}", cluster.log("nn-worker"))
    report: dict[str, Any] = json.loads(line)
    one = json.loads(embedded.stdout)
    for name in ("auc", "loss", "rows"):
        assert one[name] == report[name]
