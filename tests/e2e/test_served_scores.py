"""One trained model by every path to its scores, in processes of their own: no bit differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import persia.nn
from persia import env
from persia._serving.remote_rows import RowServers
from persia._serving.triton import write_triton
from persia.ctx import eval_ctx
from persia.serving import Predictor
from tests.nn import test_exporting
from tests.serving.conformance.clients import CLIENTS
from tests.serving.conformance.triton_host import (
    Host,
    python_path,
    triton_server,
    why_no_triton,
)
from tests.serving.models import arrays, batch_of, make_ctx, train
from tests.serving.proofs.support import ServeProcess
from tests.support.processes import Cluster
from tests.support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

SERVER, MODEL = "embedding-parameter-server", "clicks"
SIZES = (1, 2, 7, 64)
# Ids up to here were trained; beyond, ids have no row.
UNKNOWN = 1_000_000

Given = dict[str, Any]
Score = Callable[[Given], NDArray[np.float32]]


class Trained:
    """A folder with the repository ``models``, requests, and what evaluation scores them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bundle = folder, folder / "models" / MODEL / "1"
        self.requests = [arrays(np.random.default_rng(size), size) for size in SIZES]
        unknown = arrays(np.random.default_rng(9), 9)
        unknown["user"] = unknown["user"] + UNKNOWN
        self.requests.append(unknown)
        with make_ctx() as ctx:
            train(ctx, np.random.default_rng(0), 12)
            assert ctx.export(self.bundle.parent) == 1
            ctx.model.eval()
            with eval_ctx(model=ctx.model) as reader, torch.no_grad():
                self.scores = [
                    reader.forward(reader.get_embedding_from_data(batch_of(one)))[0].numpy()
                    for one in self.requests
                ]

    def check(self, score: Score) -> None:
        """Score each request twice: the second time a cache has the rows."""
        for _ in range(2):
            for given, expected in zip(self.requests, self.scores, strict=True):
                found = score(given)
                assert found.dtype == expected.dtype == np.float32
                assert found.tobytes() == expected.tobytes(), f"{len(expected)} samples"

    def check_host(self, host: Host) -> None:
        """Ask with every client, in JSON and in bytes."""
        for make in CLIENTS.values():
            client = make(host)
            try:
                for binary in (False, True):
                    self.check(
                        lambda given, client=client, binary=binary: client.infer(  # type: ignore[misc]
                            MODEL, with_columns(given), binary=binary
                        ).outputs["output"]
                    )
            finally:
                client.close()


def with_columns(given: Given) -> Given:
    """Return the request with single ids [B, 1]: Triton takes a tensor of one rank only."""
    return given | {name: given[name].reshape(-1, 1) for name in ("user", "hs")}


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Have torch compute as ``serve`` does: two threads add in another order than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Trained:
    return Trained(tmp_path_factory.mktemp("served"))


@contextmanager
def served(folder: Path, *words: str) -> Iterator[Host]:
    """Run ``persia-launcher serve`` with these words."""
    process = ServeProcess(folder, *words)
    try:
        process.wait()
        yield Host("persia", f"127.0.0.1:{process.http_port}", f"127.0.0.1:{process.grpc_port}")
    finally:
        process.stop()


@contextmanager
def row_servers(bundle: Path, count: int) -> Iterator[Cluster]:
    """Run servers that have the rows of a bundle, from its own folder."""
    infer = {"embedding_checkpoint": str(bundle / "rows")}
    settings = {"common_config": {"job_type": "Infer", "infer_config": infer}}
    schema = bundle / "embedding_config.yml"
    with Cluster(schema, settings, transport="tcp", num_servers=count) as job:
        for number in range(count):
            job.start_replica(SERVER, number)
        yield job


def test_rows_in_the_process(trained: Trained) -> None:
    with served(trained.folder) as host:
        trained.check_host(host)


def test_workers_behind_the_same_ports(trained: Trained) -> None:
    with served(trained.folder, "--workers", "2") as host:
        trained.check_host(host)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_in_servers(
    trained: Trained, count: int, monkeypatch: pytest.MonkeyPatch, no_job: None
) -> None:
    with row_servers(trained.bundle, count) as job:
        addresses = job.addresses[SERVER]
        monkeypatch.setenv(env.serving_replicas.name, ",".join(addresses))
        for cache_ttl_ms in (0, 600_000):
            words = ("--rows", "servers", "--cache-ttl-ms", str(cache_ttl_ms))
            with served(trained.folder, *words) as host:
                trained.check_host(host)
            settings = RowServers(
                [[one] for one in addresses], cache_ttl_ms, timeout_s=PATIENCE_S
            )
            predictor = Predictor(trained.bundle, row_servers=settings)
            try:
                trained.check(lambda given: predictor(given)["output"])  # noqa: B023
                assert bool(predictor.stats().get("cache_hits")) == bool(cache_ttl_ms)
            finally:
                predictor.close()


def test_a_predictor_of_this_process(trained: Trained) -> None:
    predictor = Predictor(trained.bundle)
    try:
        trained.check(lambda given: predictor(given)["output"])
        assert predictor.stats()["missing"]["user"] > 0
    finally:
        predictor.close()


def test_triton(trained: Trained, tmp_path: Path) -> None:
    if why := why_no_triton():
        pytest.skip(why)
    with ExitStack() as stack:
        predictor = Predictor(trained.bundle)
        stack.callback(predictor.close)
        write_triton(
            tmp_path / "models",
            predictor.metadata(),
            python_path=python_path(),
            bundle=trained.bundle,
        )
        server = triton_server(tmp_path / "models", tmp_path / "log", MODEL)
        trained.check_host(stack.enter_context(server))


def test_a_whole_model_with_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_job: None, one_thread: None
) -> None:
    """Trained in a loop of its own; the server finds no module, and has only the version."""
    net = test_exporting.trained("processes")
    sample = test_exporting.called_with(test_exporting.arrays(9, 6))
    version = persia.nn.export(net, tmp_path / "models" / MODEL, sample)

    def check(host: Host) -> None:
        for name in ("grpc", "plain"):
            client = CLIENTS[name](host)
            try:
                for binary in (False, True):
                    test_exporting.check(
                        net,
                        lambda given, client=client, binary=binary: (
                            client.infer(  # type: ignore[misc]
                                MODEL, given, binary=binary
                            ).outputs
                        ),
                    )
            finally:
                client.close()

    with served(tmp_path) as host:
        check(host)
    with row_servers(tmp_path / "models" / MODEL / str(version), 2) as job:
        monkeypatch.setenv(env.serving_replicas.name, ",".join(job.addresses[SERVER]))
        with served(tmp_path, "--rows", "servers") as host:
            check(host)
