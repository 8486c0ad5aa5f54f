"""``persia-launcher serve`` in processes of its own."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from click.testing import CliRunner
from tritonclient.utils import np_to_triton_dtype

from persia._cli.serve import ServeOptions, _loader, run_serve
from persia._serving import predictor
from persia._serving.versions import ModelRepository
from persia.ctx import TrainCtx, eval_ctx
from persia.errors import ConfigError
from persia.launcher import cli
from tests.serving.models import arrays, batch_of, make_ctx, train
from tests.serving.oip.serving_models import rows
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S, until

LOADER = "--loader=tests.cli.serve_models:load"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models/echo/1").mkdir(parents=True)
    return tmp_path / "models"


@contextlib.contextmanager
def launched(
    models: Path, *words: str, loader: str | None = LOADER
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    command = [sys.executable, "-m", "persia.launcher", "serve", str(models)]
    command += [loader] if loader else []
    command += ["--http-port=0", "--grpc-port=0", *words]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            found = None
            said: list[str] = []
            while found is None:
                line = process.stdout.readline()
                assert line, "".join(said)
                said.append(line)
                found = re.search(r"serving at (http://\S+), gRPC at (\S+)", line)
            yield process, found[1], found[2]
        finally:
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=PATIENCE_S)
            print("".join(said), rest)


def await_ready(url: str) -> None:
    ready = f"{url}/v2/health/ready"
    until(lambda: httpx.get(ready, timeout=PATIENCE_S).status_code == 200)


def test_serves_new_versions_and_ends_well(models: Path) -> None:
    with launched(models, "--poll=0.05") as (process, url, grpc):
        await_ready(url)
        with triton.InferenceServerClient(grpc) as client:
            asked = triton.InferInput("x", [3, 4], "FP32").set_data_from_numpy(rows())
            found = client.infer("echo", [asked])
            assert np.array_equal(found.as_numpy("x"), rows())
            assert found.get_response().model_version == "1"
            (models / "echo/2").mkdir()
            until(lambda: client.infer("echo", [asked]).get_response().model_version == "2")
    assert process.returncode == 0


@pytest.mark.slow
def test_scores_of_a_bundle_are_those_of_evaluation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with make_ctx() as ctx:
        train(ctx, rng)
        ctx.export(tmp_path / "models/clicks")
        asked = [
            arrays(np.random.default_rng(n), size) for n, size in ((1, 3), (2, 17), (3, 8))
        ]
        want = [scores(ctx, one) for one in asked]
    seen = []
    with launched(tmp_path / "models", loader=None) as (_, url, grpc):
        await_ready(url)
        for module, place in ((triton_http, url.partition("//")[2]), (triton, grpc)):
            with module.InferenceServerClient(place) as client:
                for one in asked:
                    inputs = [
                        module.InferInput(
                            name, [*values.shape], np_to_triton_dtype(values.dtype)
                        ).set_data_from_numpy(values)
                        for name, values in one.items()
                    ]
                    seen.append(client.infer("clicks", inputs).as_numpy("output"))
        for one in asked:
            body = {
                "inputs": [
                    {
                        "name": name,
                        "shape": [*values.shape],
                        "datatype": np_to_triton_dtype(values.dtype),
                        "data": values.ravel().tolist(),
                    }
                    for name, values in one.items()
                ]
            }
            answer = httpx.post(
                f"{url}/v2/models/clicks/infer", json=body, timeout=PATIENCE_S
            ).json()
            data = answer["outputs"][0]["data"]
            seen.append(np.array(data, np.float32).reshape(-1, 1))
    for found, expected in zip(seen, [*want, *want, *want], strict=True):
        assert np.array_equal(found, expected)


def scores(ctx: TrainCtx, given: dict[str, Any]) -> Any:
    assert ctx.model is not None
    ctx.model.eval()
    with eval_ctx(model=ctx.model) as reader, torch.no_grad():
        output, _ = reader.forward(reader.get_embedding_from_data(batch_of(given)))
    return output.numpy()


def test_several_processes_serve_one_port(models: Path) -> None:
    with launched(models, "--workers=2") as (process, url, _):
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
        seen = set()

        def ask() -> bool:
            answer = httpx.post(f"{url}/v2/models/echo/infer", json=body)
            if answer.status_code == 200:
                seen.add(answer.json()["outputs"][1]["data"][0])
            return len(seen) == 2

        def try_to_ask() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return ask()
            return False

        until(try_to_ask)
        assert process.pid not in seen
    assert process.returncode == 0


def options(models: Path, **changes: object) -> ServeOptions:
    command = cli.commands["serve"]
    # Without its group the command would keep other names of --help for tests that follow.
    parent = click.Context(cli, **cli.context_settings)
    context = command.make_context("serve", [str(models)], parent=parent)
    values = {**context.params, **changes}
    return ServeOptions(
        values.pop("repository"), values.pop("worker"), values.pop("workers"), values
    )


def test_defaults_and_help(models: Path) -> None:
    server = options(models).server()
    assert (server.host, server.http_port, server.grpc_port) == ("127.0.0.1", 8080, 9000)
    assert options(models, no_grpc=True).server().grpc_port is None
    assert server.torchserve_port is None
    assert options(models, max_connections=9).server().max_connections == 9
    assert options(models, threads=3).service().num_threads == 3
    text = CliRunner().invoke(cli, ["serve", "--help"]).output
    assert "8080" in text
    assert "--worker " not in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"host": "0.0.0.0"}, "token"),
        ({"host": "0.0.0.0", "torchserve_port": 7070, "no_grpc": True}, "token"),
        ({"tls_cert": Path("a.pem")}, "together"),
        ({"tls_cert": Path("no.pem"), "tls_key": Path("no.pem")}, "PEM"),
    ],
)
def test_refused_settings(
    models: Path, changes: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERSIA_LISTEN_WITHOUT_KEYS", raising=False)
    with pytest.raises(ConfigError, match=text):
        options(models, **changes).server()


@pytest.mark.parametrize("name", ["nowhere:load", "os:nothing", "os:sep", ""])
def test_loaders_that_are_none(models: Path, name: str) -> None:
    made = options(models, loader=name)
    with pytest.raises(ConfigError, match="--loader"):
        run_serve(models, worker=None, workers=1, **made.values)


@pytest.mark.parametrize(
    ("given", "places"),
    [(None, None), ("", []), (" , ", []), ("/a, s3://b/c,", ["/a", "s3://b/c"])],
)
def test_places_for_rows_are_listed_with_commas(
    given: str | None, places: list[str] | None, monkeypatch: Monkey
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(predictor, "Predictor", lambda folder, **options: seen.update(options))
    values = dict.fromkeys(("loader", "rows", "row_dtype", "follow_interval", "allow_native"))
    _loader(values | {"rows_within": given})(Path("1"))
    assert seen["rows_within"] == places


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder"):
        run_serve(tmp_path / "none", worker=None, workers=1)


def test_the_folder_of_one_model_is_refused_and_its_repository_named(tmp_path: Path) -> None:
    (tmp_path / "clicks/3").mkdir(parents=True)
    (tmp_path / "clicks/3/persia-model.json").write_text("{}")
    given = options(tmp_path / "clicks")
    with pytest.raises(ConfigError, match=f"serve {tmp_path} with --model clicks"):
        run_serve(given.repository, worker=None, workers=1, **given.values)


@pytest.mark.parametrize("name", ["http_port", "grpc_port", "torchserve_port"])
def test_a_port_that_is_taken_is_found_before_a_model_is_read(
    models: Path, name: str, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(ModelRepository, "start", Mock(side_effect=AssertionError("too early")))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = {"http_port": 0, "grpc_port": 0, "torchserve_port": 0}
        given = options(models, **(free | {name: port}))
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            run_serve(given.repository, worker=None, workers=1, **given.values)
