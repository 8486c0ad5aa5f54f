"""Latency of one user x 100 candidates, beside the same Predictor in a real Triton.

    python -m tests.serving.proofs.latency [--rows 10000000] [--rounds 40] [--judge]

A DLRM of 26 id features and 13 dense values, rows of dim 16 in the serving process; one client,
turns of 50 requests interleaved over all contenders. HTTP bodies are binary and the same bytes
for both servers, and so are gRPC's messages.

What is the server's own is all of a request, as its client waits for it, but the lookup and the
forward of that same request, which the server's statistics count (``compute_infer``): sockets,
parsing, features, the queue, threads, writing. It is the mean of a few requests, and of such
means the median. Beside it stands a request without the medians of lookup and forward in this
process, where each is repeated alone with its caches warm: what cold caches cost a request's
lookup and forward counts there as the server's.

``bare HTTP`` is what uvicorn takes to read the same bodies and to answer as many bytes without
a look at them, ``bare gRPC`` the same of grpc.aio, and ``decode`` is reading a body's tensors
and making id features of them; ``lookup, then forward`` has both in turn.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from persia._serving.oip import http_codec
from persia._serving.oip.plans import PlanCache, RequestPlan
from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.oip.tensors import RequestLimits
from persia._serving.triton import write_triton
from persia.ctx import TrainCtx
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from persia.serving import Predictor
from tests.benchmarks.local.dlrm import DLRM, NUM_DENSE, NUM_FEATURES, SLOTS
from tests.serving.conformance.triton_host import python_path, triton_server, why_no_triton
from tests.serving.proofs.support import (
    CANDIDATES,
    START_S,
    Lines,
    ServeProcess,
    binary_body,
    percentile,
)
from tests.support.waiting import until

MODEL, BATCH, A_TURN, NUM_REQUESTS = "dlrm", 16_384, 50, 64
NUM_WARM, A_MEAN = 2, 10  # turns that are not counted; requests of a mean
NAMES = tuple(SLOTS)
USER_FEATURES = NAMES[:10]  # one id for all candidates
Inputs = dict[str, NDArray[Any]]
Ask = Callable[[int], None]


def export(models: Path, num_rows: int) -> None:
    """Train every row once and export the model."""
    torch.manual_seed(0)
    net, rng = DLRM(), np.random.default_rng(0)
    schema = {"feature_index_prefix_bit": 8, "slots_config": SLOTS}
    with TrainCtx(
        Adagrad(lr=0.1),
        torch.optim.SGD(net.parameters(), lr=0.01),
        model=net,
        embedding_config=schema,
        mixed_precision=False,
    ) as ctx:
        for first in range(0, num_rows // NUM_FEATURES, BATCH):
            ids = np.arange(first, first + BATCH, dtype=np.uint64)
            batch = PersiaBatch(
                [IDTypeFeatureWithSingleID(name, ids) for name in NAMES],
                [NonIDTypeFeature(rng.random((BATCH, NUM_DENSE), np.float32), "dense")],
                [Label(np.ones((BATCH, 1), np.float32))],
            )
            output, _ = ctx.forward(ctx.get_embedding_from_data(batch))
            ctx.backward(output.mean())
        ctx.export(models / MODEL)


def requests(num_rows: int) -> list[Inputs]:
    """Ids by a power law, one user in each request; all of one rank, as Triton wants it."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(NUM_REQUESTS):
        given: Inputs = {}
        for name in NAMES:
            size = 1 if name in USER_FEATURES else CANDIDATES
            ranks = num_rows // NUM_FEATURES * rng.random((size, 1)) ** 3
            given[name] = ranks.astype(np.int64)
        given["dense"] = rng.random((CANDIDATES, NUM_DENSE), np.float32)
        made.append(given)
    return made


def statistics(port: int) -> dict[str, dict[str, int]]:
    """Return counts and nanoseconds by stage, as the server counts them."""
    place = f"http://127.0.0.1:{port}/v2/models/{MODEL}/stats"
    with urllib.request.urlopen(place, timeout=30) as reply:
        (found,) = json.load(reply)["model_stats"]
    stages: dict[str, dict[str, int]] = found["inference_stats"]
    return stages


class Served:
    """Asks a server, and notes which milliseconds of requests are the server's own.

    Args:
        ask: Sends a request.
        port: For HTTP, where the statistics are.
    """

    def __init__(self, ask: Ask, port: int) -> None:
        self._ask, self._port = ask, port
        self.own: list[float] = []  # means of ``A_MEAN`` requests
        self.inner: list[float] = []  # alike, of lookup and forward

    def __call__(self, number: int) -> None:
        self._ask(number)

    def begin(self) -> None:
        """Begin a mean: no other request is under way."""
        self._before = statistics(self._port)["compute_infer"]

    def end(self, took: list[float]) -> None:
        """End a mean of requests that took these milliseconds."""
        before, found = self._before, self._before

        def is_counted() -> bool:  # which comes after the answer
            nonlocal found
            found = statistics(self._port)["compute_infer"]
            return found["count"] - before["count"] >= len(took)

        until(is_counted, START_S)
        assert found["count"] - before["count"] == len(took)
        self.inner.append((found["ns"] - before["ns"]) / len(took) / 1e6)
        self.own.append(sum(took) / len(took) - self.inner[-1])


def over_http(stack: ExitStack, port: int, given: list[Inputs]) -> Ask:
    """Ask by a bare socket: a client's own time is not the server's."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    messages = []
    for one in given:
        body, headers = binary_body(one)
        lines = [f"POST /v2/models/{MODEL}/infer HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        messages.append(head.encode() + body)

    def ask(number: int) -> None:
        connection.sendall(messages[number % NUM_REQUESTS])
        reply, missing = b"", 1
        while missing > 0:
            reply += connection.recv(1 << 16)
            head, _, body = reply.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)\r?\n", head + b"\n")
            missing = int(length[1]) - len(body) if length else 1
        assert head.startswith(b"HTTP/1.1 200"), reply[:500]
        assert len(body) >= 4 * CANDIDATES

    return ask


_BARE_HTTP = """
import sys
import uvicorn

async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})

ANSWER = bytes(int(sys.argv[2]))
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off")
"""


_BARE_GRPC = """
import asyncio
import sys
import grpc
import uvloop

async def answer(_, context):
    await context.read()
    return ANSWER

async def main():
    service, method = "inference.GRPCInferenceService", "ModelInfer"
    methods = {method: grpc.stream_unary_rpc_method_handler(answer)}
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler(service, methods)])
    server.add_insecure_port("127.0.0.1:" + sys.argv[1])
    await server.start()
    await server.wait_for_termination()

ANSWER = bytes.fromhex(sys.argv[2])
uvloop.run(main())
"""


def start_bare(stack: ExitStack, program: str, answer: str) -> int:
    """Start a server with nothing behind it; return its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", program, str(port), answer])
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)

    def is_open() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    until(is_open, START_S)
    return port


def over_bare_http(stack: ExitStack, given: list[Inputs]) -> Ask:
    """Ask uvicorn with nothing behind it for answers of about the size of a real one."""
    return over_http(stack, start_bare(stack, _BARE_HTTP, str(4 * CANDIDATES + 200)), given)


def over_bare_grpc(stack: ExitStack, given: list[Inputs]) -> Ask:
    """Ask grpc.aio with nothing behind it for an answer like a real one."""
    answer = pb.ModelInferResponse(model_name=MODEL, model_version="1")
    answer.outputs.add(name="output", datatype="FP32", shape=(CANDIDATES, 1))
    answer.raw_output_contents.append(bytes(4 * CANDIDATES))
    port = start_bare(stack, _BARE_GRPC, answer.SerializeToString().hex())
    return over_grpc(stack, f"127.0.0.1:{port}", given)


def over_grpc(stack: ExitStack, address: str, given: list[Inputs]) -> Ask:
    """Ask by messages that are made already."""
    channel = stack.enter_context(grpc.insecure_channel(address))
    infer: Any = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        pb.ModelInferRequest.SerializeToString,
        pb.ModelInferResponse.FromString,
    )
    messages = []
    for one in given:
        message = pb.ModelInferRequest(model_name=MODEL)
        for name, array in one.items():
            datatype = "INT64" if array.dtype == np.int64 else "FP32"
            message.inputs.add(name=name, datatype=datatype, shape=array.shape)
            message.raw_input_contents.append(array.tobytes())
        messages.append(message)

    def ask(number: int) -> None:
        reply = infer(messages[number % NUM_REQUESTS], timeout=30)
        assert len(reply.raw_output_contents[0]) == 4 * CANDIDATES

    return ask


class LookUp:
    """Looks up features as a request has them: their ids are numbered by the lookup.

    Args:
        scores: Whether the net is called with the vectors, right behind the lookup.
    """

    def __init__(self, predictor: Predictor, given: list[Inputs], *, scores: bool) -> None:
        self._predictor, self._given, self._scores = predictor, given, scores

    def prepare(self) -> None:
        """Make the features of a turn."""
        self._decoded = [self._predictor._decode(one) for one in self._given]

    def __call__(self, number: int) -> None:
        predictor, lookup = self._predictor, self._predictor._lookup
        assert lookup is not None
        features, arrays, size = self._decoded[number % NUM_REQUESTS]
        if not self._scores:
            lookup(features)
            return
        with torch.inference_mode():
            dense = [torch.from_numpy(one) for one in arrays]
            predictor._program(*predictor._with_embeddings(dense, features, size, lookup))


def in_process(stack: ExitStack, bundle: Path, given: list[Inputs]) -> dict[str, Ask]:
    """Return the Predictor, its two parts, and the reading of a body before them."""
    predictor = stack.enter_context(closing(Predictor(bundle)))
    found: Any = predictor._program
    with torch.inference_mode():
        tensors = [
            torch.rand(CANDIDATES, NUM_DENSE),
            *(torch.rand(CANDIDATES, 16) for _ in NAMES),
        ]

    def forward(number: int) -> None:
        with torch.inference_mode():
            found(*tensors)

    def ask(number: int) -> None:
        predictor(given[number % NUM_REQUESTS])

    bodies = []
    for one in given:
        body, headers = binary_body(one)
        bodies.append((body, headers[http_codec.HEADER_LENGTH]))
    limits = RequestLimits()
    plans: PlanCache[RequestPlan] = PlanCache()

    def read(number: int) -> None:
        body, length = bodies[number % NUM_REQUESTS]
        predictor._decode(http_codec.decode(body, length, None, limits, plans).inputs)

    return {
        "Predictor": ask,
        "lookup": LookUp(predictor, given, scores=False),
        "forward": forward,
        "lookup, then forward": LookUp(predictor, given, scores=True),
        "decode": read,
    }


def measure(contenders: dict[str, Ask], rounds: int) -> dict[str, NDArray[np.float64]]:
    """Return the milliseconds of each request of each contender."""
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    names, rng = list(contenders), np.random.default_rng(2)
    for turn in range(-NUM_WARM, rounds):
        for name in rng.permutation(names).tolist():
            ask = contenders[name]
            if isinstance(ask, LookUp):
                ask.prepare()
            took: list[float] = []
            for number in range(A_TURN):
                if isinstance(ask, Served) and number % A_MEAN == 0:
                    ask.begin()
                began = time.perf_counter()
                ask(turn * A_TURN + number)
                took.append(1e3 * (time.perf_counter() - began))
                if isinstance(ask, Served) and len(took) % A_MEAN == 0:
                    ask.end(took[-A_MEAN:])
            if turn >= 0:
                spent[name] += took
    return {name: np.array(one) for name, one in spent.items()}


def capacity(
    stack: ExitStack, port: int, given: list[Inputs], seconds: float
) -> tuple[float, NDArray[np.float64]]:
    """Return requests a second of four clients that never pause, then times at half of it.

    Times at half of the capacity are from the moment at which a request was to be sent.
    """
    asks = [over_http(stack, port, given) for _ in range(4)]
    counts, late = [0] * len(asks), [[] for _ in asks]  # type: ignore[var-annotated]

    def run(each: Callable[[int, float], None]) -> None:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=each, args=(one, end)) for one in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def flat_out(one: int, end: float) -> None:
        while time.monotonic() < end:
            asks[one](counts[one])
            counts[one] += 1

    run(flat_out)
    rate = sum(counts) / seconds
    pause = len(asks) / (rate / 2)
    pacing = threading.Event()  # never set: the rate of requests is what is measured

    def at_half(one: int, end: float) -> None:
        due = time.monotonic() + pause * one / len(asks)
        while due < end:
            pacing.wait(max(0.0, due - time.monotonic()))
            asks[one](len(late[one]))
            late[one].append(1e3 * (time.monotonic() - due))
            due += pause

    run(at_half)
    return rate, np.array([one for some in late for one in some])


def contend(stack: ExitStack, folder: Path, given: list[Inputs]) -> tuple[dict[str, Ask], int]:
    """Start all servers; return how each is asked, and the port of ours."""
    server = ServeProcess(folder, "--threads", "1")
    stack.callback(server.stop)
    server.wait()
    bundle = folder / "models" / MODEL / "1"
    contenders = in_process(stack, bundle, given)
    contenders["HTTP"] = Served(over_http(stack, server.http_port, given), server.http_port)
    contenders["bare HTTP"] = over_bare_http(stack, given)
    by_grpc = over_grpc(stack, f"127.0.0.1:{server.grpc_port}", given)
    contenders["gRPC"] = Served(by_grpc, server.http_port)
    contenders["bare gRPC"] = over_bare_grpc(stack, given)
    why = why_no_triton()
    if why:
        print(f"no Triton beside it: {why}")
    else:
        with closing(Predictor(bundle)) as predictor:
            write_triton(
                folder / "triton",
                predictor.metadata(),
                python_path=python_path(),
                bundle=bundle,
            )
        host = stack.enter_context(triton_server(folder / "triton", folder / "log", MODEL))
        contenders["Triton HTTP"] = over_http(stack, int(host.http.split(":")[1]), given)
        contenders["Triton gRPC"] = over_grpc(stack, host.grpc, given)
    return contenders, server.http_port


def report_stages(lines: Lines, port: int) -> None:
    """Print the mean times of the server's own statistics, of both protocols together."""
    means = {
        name: one["ns"] / max(one["count"], 1) / 1e6 for name, one in statistics(port).items()
    }
    for name, what in (
        ("queue", "until a thread has it"),
        ("compute_input", "reading it, features"),
        ("compute_infer", "lookup, forward"),
        ("compute_output", "writing the answer"),
    ):
        lines.show(f"in the server: {what}", f"mean {means[name]:.3f} ms")


def report_own(lines: Lines, contenders: dict[str, Ask]) -> None:
    """Judge what is the server's own of a request."""
    for name, bound in (("HTTP", 0.4), ("gRPC", 0.6)):
        asked = contenders[name]
        assert isinstance(asked, Served)
        own, inner = (
            float(np.median(one[NUM_WARM * A_TURN // A_MEAN :]))
            for one in (asked.own, asked.inner)
        )
        lines.show_time(f"{name}, the server's own", own, "ms", bound)
        lines.show(f"{name}, its lookup and forward", f"{inner:.3f} ms")


def report(lines: Lines, found: dict[str, NDArray[np.float64]]) -> None:
    middle = {name: percentile(times, 50) for name, times in found.items()}
    for name, times in found.items():
        p99 = percentile(times, 99)
        lines.show(name, f"p50 {middle[name]:.3f} ms, p99 {p99:.3f}")
    inner = middle["lookup"] + middle["forward"]
    lines.show_time("HTTP p50", middle["HTTP"], "ms", 1.5)
    lines.show_time("HTTP p99", percentile(found["HTTP"], 99), "ms", 3.0)
    for way in ("HTTP", "gRPC"):
        rest = middle[way] - inner
        lines.show(f"{way} p50 without lookup and forward alone", f"{rest:.3f} ms")
    both = middle["lookup, then forward"]
    for what, value in (
        ("both in turn, as a request has them", both - inner),
        ("features made, and all else of a Predictor", middle["Predictor"] - both),
        ("HTTP, the queue and two threads", middle["HTTP"] - middle["Predictor"]),
        ("gRPC, the queue and three threads", middle["gRPC"] - middle["Predictor"]),
    ):
        lines.show(f"of that: {what}", f"{value:.3f} ms")
    for way, bound in (("HTTP", 1.0), ("gRPC", 1.2)):
        if f"Triton {way}" in middle:
            ratio = middle[way] / middle[f"Triton {way}"]
            lines.show_time(f"{way} p50 / Triton's", ratio, "", bound)


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--judge", action="store_true", help="exit 1 for a time too long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = Lines(f"latency, {options.rows} rows", options.judge)
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        export(folder / "models", options.rows)
        given = requests(options.rows)
        contenders, port = contend(stack, folder, given)
        report(lines, measure(contenders, options.rounds))
        report_own(lines, contenders)
        report_stages(lines, port)
        rate, late = capacity(stack, port, given, options.seconds)
        lines.show("capacity", f"{rate * CANDIDATES:.0f} candidates/s")
        p50, p99 = percentile(late, 50), percentile(late, 99)
        lines.show("at half of it", f"p50 {p50:.3f} ms, p99 {p99:.3f}")
    return lines.end()


if __name__ == "__main__":
    raise SystemExit(main())
