"""Hostile requests, frames and bundles at one ``persia-launcher serve``, for minutes.

    python -m tests.serving.proofs.hostile [--minutes 10] [--seed 1]

Attackers run side by side: schemathesis by the protocol's OpenAPI file (of PERSIA_DATA_DIR),
mutated JSON, binary and gRPC messages, raw sockets, and bundles that are put into the
repository. Meanwhile a client asks a good model; each answer has to be right and in time. What
the server may not do is counted:

    end, or answer 500; forget what it answered for before
    grow: resident memory, open files and threads, once warm and with all attackers gone
    open a file of a folder beside its repository: the kernel reports each that is (inotify)
    unpickle, or start a process: an audit hook in the server writes down each that is
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import yaml
from numpy.typing import NDArray

from persia import env
from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.torchserve import SERVICE as TORCHSERVE
from tests.serving.models import arrays, make_ctx, train
from tests.serving.proofs.hostile_bundles import BUNDLES, WHOLE
from tests.serving.proofs.support import START_S, Lines, ServeProcess, binary_body
from tests.support.processes import ROOT
from tests.support.waiting import until

GOOD, TOKEN = "good", "asks for the index"
INFER = f"/v2/models/{GOOD}/infer"
# Of the good client: a bound for a machine that does much else.
MOST_ANSWER_S = 5.0
MOST_ROUNDING = 1e-6  # of a score
MOST_GROWN_BYTES, MOST_MORE_FILES, MOST_MORE_THREADS = 64 << 20, 8, 2
QUIET_S = 60.0  # for connections and threads to end
# Bundles that may be whole by chance: what was changed is not always what counts.
MAY_SERVE = frozenset(("a_changed_manifest", "a_corrupt_archive", "spoiled_rows"))

HOOK = """
import os, sys

def hook(event, given, place=os.environ["PERSIA_HOSTILE_AUDIT"]):
    if event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork",
                 "subprocess.Popen", "os.mkdir"):
        if event != "os.mkdir" or os.path.basename(str(given[0])) == "made":
            # No file is opened here: that would be an event, too.
            os.write(FILE, f"{event} {given!r:.200}\\n".encode())

FILE = os.open(os.environ["PERSIA_HOSTILE_AUDIT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.addaudithook(hook)
"""


class Opened:
    """The kernel's list of files below a folder that any process opens."""

    _IN_OPEN = 0x20

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0, os.strerror(ctypes.get_errno())
        self._names: dict[int, Path] = {}
        for path in [folder, *(one for one in folder.rglob("*") if one.is_dir())]:
            watch = libc.inotify_add_watch(
                self._descriptor, str(path).encode(), ctypes.c_uint32(self._IN_OPEN)
            )
            assert watch >= 0, os.strerror(ctypes.get_errno())
            self._names[watch] = path

    def read(self) -> list[str]:
        """Return what was opened since the last time."""
        found = []
        with suppress(BlockingIOError):
            while data := os.read(self._descriptor, 1 << 16):
                place = 0
                while place < len(data):
                    watch, _, _, length = struct.unpack_from("iIII", data, place)
                    name = data[place + 16 : place + 16 + length].rstrip(b"\0").decode()
                    found.append(str(self._names[watch] / name))
                    place += 16 + length
        return found

    def close(self) -> None:
        os.close(self._descriptor)


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process are; it may open and close some meanwhile."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a connection that has just been closed
            found.append(str(one.readlink()))
    return found


class Target:
    """The server, and what is known of it; ``schema_s`` bounds a run of schemathesis."""

    def __init__(
        self, folder: Path, server: ServeProcess, torchserve_port: int, schema_s: int
    ) -> None:
        self.folder, self.server, self.schema_s = folder, server, schema_s
        self.torchserve_port = torchserve_port
        self.url = f"http://127.0.0.1:{server.http_port}"
        rng = np.random.default_rng(0)
        self.requests = [binary_body(arrays(rng, size)) for size in (1, 3, 8)]
        self.plain = [_as_json(arrays(rng, size)) for size in (1, 4)]

    def measure(self) -> dict[str, int]:
        """Return resident bytes, open files and threads."""
        proc = Path(f"/proc/{self.server.process.pid}")
        return {
            "memory": self.server.memory(),
            "files": len(list((proc / "fd").iterdir())),
            "threads": len(list((proc / "task").iterdir())),
        }

    def settle(self, bound: dict[str, int] | None = None) -> dict[str, int]:
        """Wait until files and threads are within a bound, or no more in two looks."""
        end, before = time.monotonic() + QUIET_S, self.measure()
        pause = threading.Event()  # never set
        while time.monotonic() < end:
            pause.wait(1.0)  # long enough for a thread or a connection to end
            now = self.measure()
            if bound is None and now["files"] >= before["files"]:
                return now
            if bound is not None and all(now[name] <= bound[name] for name in bound):
                return now
            before = now
        return before


def _as_json(inputs: dict[str, Any]) -> dict[str, Any]:
    kinds = {"i": "INT64", "f": "FP32"}
    return {
        "inputs": [
            {
                "name": name,
                "shape": [*one.shape],
                "datatype": kinds[one.dtype.kind],
                "data": one.tolist(),
            }
            for name, one in inputs.items()
        ]
    }


class Attack:
    """An attacker: a thread that repeats something until it is stopped, and its findings."""

    name = ""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.rng = target, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"attack-{self.name}")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.end.set()
        self._thread.join(120)
        if self._thread.is_alive():
            self.faults.append(f"{self.name} hangs")

    def _run(self) -> None:
        try:
            while not self.end.is_set():
                self.once()
        except Exception as error:
            self.faults.append(f"{self.name}: {error!r}")

    def once(self) -> None:
        """Do it once."""
        raise NotImplementedError

    def take(self, status: int, text: str) -> None:
        """Count an answer; 500 is a fault."""
        self.counts[str(status)] += 1
        if status == 500 or status > 504:
            self.faults.append(f"{self.name}: {status} {text:.200}")


_STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, 2**63, 2**64, -(2**70), "", "a", "\ud800", "9" * 5000),
    *([], {}, [[]], [None], {"a": []}, [[[[[[[[[1]]]]]]]]], "FP32", "BYTES", "INT64"),
)


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one part of it replaced, dropped or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice([*value])
        kind = rng.random()
        if kind < 0.1:
            return {key: one for key, one in value.items() if key != name}
        if kind < 0.2:
            return {**value, str(rng.choice(_STRANGE)): rng.choice(_STRANGE)}
        return {**value, name: mutate(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place, kind = rng.randrange(len(value)), rng.random()
        if kind < 0.1:
            return value[:place]
        if kind < 0.2:
            return value + value[: place + 1]
        return [*value[:place], mutate(value[place], rng), *value[place + 1 :]]
    return rng.choice(_STRANGE)


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Return bytes of which some are changed, cut off or repeated."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(found) + 1)
        kind = rng.randrange(4)
        if kind == 0 and found:
            found[place % len(found)] = rng.randrange(256)
        elif kind == 1:
            found[place:place] = rng.randbytes(rng.randrange(9))
        elif kind == 2:
            del found[place : place + rng.randrange(9)]
        else:
            del found[place:]
    return bytes(found)


class JsonAttack(Attack):
    """Requests over HTTP whose JSON, binary data, headers or paths are wrong."""

    name = "http"

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._http = httpx.Client(base_url=target.url, timeout=30.0)

    def once(self) -> None:
        rng = self.rng
        headers = {}
        if rng.random() < 0.5:
            asked = rng.choice(self.target.plain)
            for _ in range(rng.randrange(1, 4)):
                asked = mutate(asked, rng)
            body = json.dumps(asked).encode()
            if rng.random() < 0.2:
                body = spoil(body, rng)
        else:
            body, given = rng.choice(self.target.requests)
            headers = dict(given)
            size = int(headers["Inference-Header-Content-Length"])
            if rng.random() < 0.4:
                head = json.dumps(mutate(json.loads(body[:size]), rng)).encode()
                body, size = head + body[size:], len(head)
            elif rng.random() < 0.5:
                size = rng.choice([0, 1, size - 1, size + 1, len(body), 10**9, 10**30])
            else:
                body = spoil(body, rng)
            headers["Inference-Header-Content-Length"] = str(size)
        if rng.random() < 0.1:
            headers["Content-Encoding"] = rng.choice(["gzip", "deflate", "br", "identity"])
        if rng.random() < 0.1:
            headers["X-Request-Timeout-Ms"] = rng.choice(["0", "1", "-1", "9" * 40, "a"])
        path = INFER
        if rng.random() < 0.05:
            path = rng.choice(
                [
                    *("/v2/models/%2e%2e/infer", "/v2/models//infer", "/v2/models/a%00b/infer"),
                    *(f"/v2/models/{GOOD}/versions/../infer", f"/v2/models/{'a' * 5000}/infer"),
                    f"/v2/models/{GOOD}/versions/{'9' * 400}/infer",
                ]
            )
        found = self._http.post(path, content=body, headers=headers)
        self.take(found.status_code, found.text)
        self.end.wait(0.004)

    def stop(self) -> None:
        super().stop()
        self._http.close()


class SocketAttack(Attack):
    """Bytes at the ports: no HTTP, half of it, very much of it, very slowly."""

    name = "sockets"

    def once(self) -> None:
        rng, server = self.rng, self.target.server
        ports = [server.http_port, server.grpc_port, self.target.torchserve_port]
        body, _ = rng.choice(self.target.requests)
        head = (
            f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        chunked = (
            f"POST {INFER} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        sent = rng.choice(
            [
                rng.randbytes(rng.randrange(2000)),
                head + body[: rng.randrange(len(body))],
                head[: rng.randrange(len(head))],
                b"GET /v2 HTTP/1.1\r\nHost: a\r\nA: " + b"a" * (1 << 20) + b"\r\n\r\n",
                b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
                chunked + b"ffffffffffffffff\r\n" + body,
                chunked + b"-5\r\n" + body,
                chunked + b"5\r\nabcde\r\n" * 100,
                head.replace(b"Content-Length: ", b"Content-Length: -"),
                head.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n") + body,
                (head + body) * 20,
                http2 + rng.randbytes(rng.randrange(200)),
                http2
                + struct.pack(">I", 0xFFFFFF)[1:]
                + b"\x01\x04\0\0\0\x01"
                + b"\x82" * 9000,
                b"\x16\x03\x01" + rng.randbytes(300),
            ]
        )
        with (
            suppress(OSError),
            socket.create_connection(
                ("127.0.0.1", rng.choice(ports)), timeout=2.0
            ) as connection,
        ):
            self.counts["connections"] += 1
            if rng.random() < 0.2:  # as slowly as it can
                for number in range(min(30, len(sent))):
                    connection.send(sent[number : number + 1])
                    self.end.wait(0.02)
            else:
                connection.sendall(sent)
            if rng.random() < 0.5:
                connection.settimeout(0.2)
                connection.recv(1 << 16)
            if rng.random() < 0.3:  # gone without a word
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.end.wait(0.01)


class GrpcAttack(Attack):
    """Messages to all methods that are none, or whose tensors are of other sizes."""

    name = "grpc"
    _METHODS = (
        *("ModelInfer", "ModelMetadata", "ModelReady", "ModelStatistics", "RepositoryIndex"),
        *("RepositoryModelLoad", "RepositoryModelUnload", "ServerMetadata", "None"),
    )

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        host = "127.0.0.1"
        self._channel = grpc.insecure_channel(f"{host}:{target.server.grpc_port}")
        self._other = grpc.insecure_channel(f"{host}:{target.torchserve_port}")

    def message(self) -> Any:
        """Return a request of which a part is wrong."""
        rng = self.rng
        asked = pb.ModelInferRequest(model_name=GOOD)
        for name, array in arrays(np.random.default_rng(rng.randrange(99)), 3).items():
            kind = "FP32" if array.dtype.kind == "f" else "INT64"
            asked.inputs.add(name=name, datatype=kind, shape=array.shape)
            asked.raw_input_contents.append(array.tobytes())
        one = rng.choice(asked.inputs)
        place = rng.randrange(len(asked.raw_input_contents))
        raw = asked.raw_input_contents[place]
        what = rng.randrange(8)
        if what == 0:
            asked.raw_input_contents[place] = spoil(raw, rng)
        elif what == 1:
            del asked.raw_input_contents[place]
        elif what == 2:
            one.shape[:] = [rng.choice([-1, 0, 1, 1 << 40, 1 << 62]) for _ in range(3)]
        elif what == 3:
            one.datatype = rng.choice(["FP64", "BYTES", "BOOL", "", "\0", "BF16", "UINT8"])
        elif what == 4:
            one.contents.int64_contents.extend([1, 2, 3])
        elif what == 5:
            one.name = rng.choice(["", "x" * 10_000, "user.values", "batch"])
        elif what == 6:
            asked.parameters["timeout"].int64_param = rng.choice([-1, 1, 1 << 62])
        else:
            one.parameters["pad"].int64_param = -1
        return asked

    def once(self) -> None:
        rng = self.rng
        data = self.message().SerializeToString() if rng.random() < 0.8 else b""
        if rng.random() < 0.4:
            data = spoil(data, rng)
        elif not data:
            data = rng.randbytes(rng.randrange(300))
        service, channel = "inference.GRPCInferenceService", self._channel
        method = rng.choice(self._METHODS) if rng.random() < 0.4 else "ModelInfer"
        if rng.random() < 0.2:
            service, channel, method = TORCHSERVE, self._other, "Predictions"
        call = channel.unary_unary(f"/{service}/{method}")
        try:
            call(data, timeout=30.0)
            self.counts["OK"] += 1
        except grpc.RpcError as error:
            name = error.code().name
            self.counts[name] += 1
            if name in ("INTERNAL", "UNKNOWN", "DATA_LOSS"):
                self.faults.append(f"grpc {method}: {name} {error.details():.200}")
        self.end.wait(0.004)

    def stop(self) -> None:
        super().stop()
        self._channel.close()
        self._other.close()


class BundleAttack(Attack):
    """Bundles that are put beside the good model, some at a time, and taken away."""

    name = "bundles"
    at_once = 7

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._models, self._outside = target.folder / "models", target.folder / "outside"
        self._good = target.folder / "pristine" / "1"
        self._number = 0
        self._left: list[str] = []
        self._http = httpx.Client(base_url=target.url, timeout=60.0)

    @property
    def is_round(self) -> bool:
        """Whether every kind has been there as often as any other."""
        return not self._left

    def states(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of the worst version of each model."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        found: dict[str, tuple[str, str]] = {}
        for one in self._http.post("/v2/repository/index", headers=headers).json():
            state = one["state"], one["reason"]
            if found.get(one["name"], ("READY",))[0] == "READY":
                found[one["name"]] = state
        return found

    def once(self) -> None:
        if not self._left:
            self._left = self.rng.sample([*BUNDLES], len(BUNDLES))
        placed: dict[str, str] = {}
        for kind in self._left[: self.at_once]:
            self._number += 1
            name = f"bad-{self._number}"
            self._place(name, kind)
            placed[name] = kind
        del self._left[: self.at_once]
        looks, states = 0, self.states()

        def has_looked() -> bool:
            nonlocal looks, states
            looks, states = looks + 1, self.states()
            is_loading = any(states.get(one, ("",))[0] == "LOADING" for one in placed)
            return looks >= 5 and not is_loading

        # A few looks at all of the folders: one that is not listed is none of a model.
        try:
            until(has_looked, QUIET_S, look_s=0.2)
        except AssertionError:
            self.faults.append(f"loading for ever: {placed}")
        for name, kind in placed.items():
            state, reason = states.get(name, ("not listed", ""))
            self.counts[state] += 1
            if (state == "READY") != (kind == WHOLE) and kind not in MAY_SERVE:
                self.faults.append(f"{kind}: {state} {reason}")
            path = self._models / name
            aside = self.target.folder / f"gone-{name}"
            path.rename(aside)
            shutil.rmtree(aside)

    def _place(self, name: str, kind: str) -> None:
        """Copy the good bundle aside, spoil it and move it to its place."""
        aside = self.target.folder / f"new-{name}"
        folder = aside / "1"
        shutil.copytree(self._good, folder)
        about = folder / "persia-model.json"
        about.write_text(about.read_text().replace(f'"name": "{GOOD}"', f'"name": "{name}"'))
        BUNDLES[kind](folder, self._outside, self.rng)
        aside.rename(self._models / name)

    def stop(self) -> None:
        super().stop()
        self._http.close()


class SchemaAttack(Attack):
    """schemathesis, by the OpenAPI file of the protocol, run after run."""

    name = "schemathesis"

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._path = target.folder / "openapi.yaml"
        self._number = 0

    @staticmethod
    def why_not() -> str:
        """Say why it cannot run; empty where it can."""
        folder = env.data_dir()
        if folder is None or not (folder / "open-inference-protocol").is_dir():
            return "PERSIA_DATA_DIR names no data"
        try:
            import schemathesis  # noqa: F401
        except ImportError:
            return "schemathesis is not installed"
        return ""

    def _write(self) -> None:
        folder = env.data_dir()
        assert folder is not None
        text = (folder / "open-inference-protocol" / "open_inference_rest.yaml").read_text()
        schema = yaml.safe_load(text.replace("${", "{"))
        for path, about in schema["paths"].items():
            for one in about.get("parameters", ()):
                # One model and version that are there, and any other text.
                known = GOOD if one["name"] == "MODEL_NAME" else "1"
                one["schema"] = {
                    "anyOf": [{"enum": [known]}, {"type": "string", "minLength": 1}]
                }
            assert path.count("{") == len(about.get("parameters", ()))
        self._path.write_text(yaml.safe_dump(schema))

    def once(self) -> None:
        self._write()
        self._number += 1
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(self._path)),
            *("--url", self.target.url, "--checks", "not_a_server_error", "--no-color"),
            *("--max-examples", "30", "--phases", "coverage,fuzzing"),
            *("--max-time", str(self.target.schema_s)),
            *("--seed", str(self.rng.randrange(1 << 30)), "--suppress-health-check", "all"),
            *("--generation-database", "none", "--warnings", "off", "--continue-on-failure"),
            # It is not ready, and says 503, while a bundle cannot be loaded.
            *("--exclude-path", "/v2/health/ready"),
        ]
        place = self.target.folder / "schemathesis"
        place.mkdir(exist_ok=True)
        with (place / f"log-{self._number}").open("w+") as log:
            ran = subprocess.run(
                command, cwd=place, stdout=log, stderr=log, timeout=100, check=False
            )
            log.seek(0)
            text = log.read()
        self.counts["runs"] += 1
        if ran.returncode:
            self.faults.append(f"schemathesis ended with {ran.returncode}: {text[-1500:]}")


class GoodClient(Attack):
    """Asks what it asked before; each answer has to be the same and in time.

    Among samples of another request, with which it may be joined, torch rounds a score's last
    bits differently.
    """

    name = "good"

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._http = httpx.Client(base_url=target.url, timeout=60.0)
        self._expected = [self._ask(one) for one in target.requests]
        self.longest_s = 0.0

    def _ask(self, request: tuple[bytes, dict[str, str]]) -> tuple[bytes, NDArray[np.float32]]:
        """Return what an answer says of its scores, and these."""
        found = self._http.post(INFER, content=request[0], headers=request[1])
        assert found.status_code == 200, found.text
        size = int(found.headers["Inference-Header-Content-Length"])
        return found.content[:size], np.frombuffer(found.content[size:], np.float32)

    def once(self) -> None:
        began = time.monotonic()
        which = self.rng.randrange(len(self._expected))
        head, scores = self._expected[which]
        try:
            new_head, new_scores = self._ask(self.target.requests[which])
        except (AssertionError, httpx.HTTPError) as error:
            self.faults.append(f"good: {error!r:.300}")
            new_head, new_scores = head, scores
        took = time.monotonic() - began
        self.longest_s = max(self.longest_s, took)
        self.counts["answers"] += 1
        if new_head != head or not np.allclose(new_scores, scores, rtol=0, atol=MOST_ROUNDING):
            self.faults.append(
                f"good: another answer: {new_head!r} {new_scores.tolist()}, expected {head!r} "
                f"{scores.tolist()}"
            )
        elif not np.array_equal(new_scores, scores):
            self.counts["rounded differently"] += 1
        if took > MOST_ANSWER_S:
            self.faults.append(f"good: an answer after {took:.1f} s")
        self.end.wait(0.02)

    def stop(self) -> None:
        super().stop()
        self._http.close()


ATTACKS: tuple[type[Attack], ...] = (JsonAttack, SocketAttack, GrpcAttack, BundleAttack)


def prepare(folder: Path, stack: ExitStack, seconds: float) -> tuple[Target, Opened, Path]:
    """Export a model, put a copy of it outside, and serve it."""
    with make_ctx() as ctx:
        train(ctx, np.random.default_rng(0), 4)
        ctx.export(folder / "models" / GOOD)
    shutil.copytree(folder / "models" / GOOD, folder / "pristine")
    outside = folder / "outside"
    shutil.copytree(folder / "pristine" / "1", outside / "good")
    (outside / "secret").write_text('{"version": 1, "secret": true}')
    (folder / "token").write_text(TOKEN)
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    audit = folder / "audit"
    server = ServeProcess(
        folder,
        *("--control-token-file", str(folder / "token"), "--torchserve-port", "0"),
        *("--body-timeout", "2", "--rows-within", str(folder / "models"), "--threads", "2"),
        variables={
            "PYTHONPATH": f"{folder / 'hook'}{os.pathsep}{ROOT}",
            "PERSIA_HOSTILE_AUDIT": str(audit),
        },
    )
    stack.callback(server.stop)
    server.wait()
    check_hook(folder, server)
    port = re.search(r"TorchServe's at \S+:(\d+)", server.printed())
    assert port is not None, server.printed()
    opened = Opened(outside)
    stack.enter_context(closing(opened))
    (outside / "secret").read_bytes()
    assert opened.read() == [str(outside / "secret")], "no file that is opened is reported"
    # Less than the attack: what runs when it ends is waited for.
    schema_s = min(10, max(1, int(seconds / 4)))
    return Target(folder, server, int(port[1]), schema_s), opened, audit


def check_hook(folder: Path, server: ServeProcess) -> None:
    """Be sure that the server has the hook, and that it sees what is unpickled."""
    audit = folder / "audit"
    files = open_files(server.process.pid)
    assert str(audit) in files, files
    code = "import pickle; pickle.loads(b'cbuiltins\\nlen\\n.')"
    variables = {"PYTHONPATH": str(folder / "hook"), "PERSIA_HOSTILE_AUDIT": str(audit)}
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True)
    assert "pickle.find_class" in audit.read_text()


def attack(target: Target, seconds: float, seed: int) -> list[Attack]:
    """Run every attacker for some seconds, and until each bundle was there once."""
    kinds = [*ATTACKS, GoodClient]
    if not SchemaAttack.why_not():
        kinds.append(SchemaAttack)
    attackers = [kind(target, seed + number) for number, kind in enumerate(kinds)]
    for one in attackers:
        one.start()
    try:
        target_end = time.monotonic() + seconds
        bundles = next(one for one in attackers if isinstance(one, BundleAttack))

        def is_over() -> bool:
            if target.server.process.poll() is not None or bundles.faults:
                return True
            return time.monotonic() > target_end and bundles.counts.total() >= len(BUNDLES)

        until(is_over, seconds + START_S, look_s=0.1)
    finally:
        for one in attackers:
            one.end.set()
        for one in attackers:
            one.stop()
    return attackers


def report(lines: Lines, target: Target, attackers: list[Attack]) -> bool:
    """Show what attackers found; returns whether the server still runs."""
    for one in attackers:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(one.counts.items()))
        lines.show(f"{one.name}", counts, "some", holds=bool(one.counts))
        lines.show_none(f"{one.name}: faults", one.faults)
        if isinstance(one, GoodClient):
            text = f"at most {MOST_ANSWER_S:g} s"
            holds = one.longest_s <= MOST_ANSWER_S
            lines.show("good: the longest answer", f"{one.longest_s:.2f} s", text, holds=holds)
    status = target.server.process.poll()
    lines.show("the server, after them", f"status {status}", "None", holds=status is None)
    if status is not None:
        print(target.server.printed()[-3000:])
    return status is None


def report_growth(lines: Lines, warm: dict[str, int], last: dict[str, int]) -> None:
    for name, most, unit in (
        ("memory", MOST_GROWN_BYTES, 1 << 20),
        ("files", MOST_MORE_FILES, 1),
        ("threads", MOST_MORE_THREADS, 1),
    ):
        grown = last[name] - warm[name]
        measured = f"{warm[name] // unit}, {last[name] // unit}"
        bound = f"at most {most // unit} more"
        lines.show(f"{name}: warm, at the end", measured, bound, holds=grown <= most)


def run(folder: Path, seconds: float, seed: int) -> int:
    """Attack in a folder; returns the status to exit with."""
    lines = Lines(f"hostile input for {seconds:g} s, seed {seed}", judges_times=True)
    with ExitStack() as stack:
        target, opened, audit = prepare(folder, stack, seconds)
        if why := SchemaAttack.why_not():
            print(f"  schemathesis is left out: {why}")
        audited = len(audit.read_text().splitlines())  # while it started
        opened.read()
        if not report(lines, target, attack(target, max(5.0, 0.2 * seconds), seed)):
            return lines.end()
        warm = target.settle()
        if not report(lines, target, attack(target, seconds, seed + 100)):
            return lines.end()
        bound = {
            "files": warm["files"] + MOST_MORE_FILES,
            "threads": warm["threads"] + MOST_MORE_THREADS,
        }
        last = target.settle(bound)
        report_growth(lines, warm, last)
        lines.show_none("files opened beside the repository", opened.read())
        done = audit.read_text().splitlines()[audited:]
        lines.show_none("unpickled, or started as a process", done)
        made = [str(folder / "outside" / "made")] * (folder / "outside" / "made").exists()
        lines.show_none("made by a bundle", made)
        target.server.process.send_signal(signal.SIGTERM)
        status = target.server.process.wait(60)
        lines.show("status of the server at its end", str(status), "0", holds=status == 0)
        # Lines that torch itself writes begin otherwise.
        errors = re.findall(r"(?ms)^Traceback .*?\n(?=\S)[^\n]*", target.server.printed())
        lines.show_none("errors of its own in the log", errors)
    return lines.end()


def main() -> int:
    """Attack in a folder that is removed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder that stays, with the server's log")
    given = parser.parse_args()
    if given.keep:
        return run(given.keep, 60 * given.minutes, given.seed)
    with tempfile.TemporaryDirectory(prefix="persia-hostile-") as name:
        return run(Path(name), 60 * given.minutes, given.seed)


if __name__ == "__main__":
    raise SystemExit(main())
