"""A PERSIA bundle on every host of the suite: its scores are, bit by bit, a Predictor's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from persia._serving.triton import write_triton
from persia._serving.versions import ModelRepository
from persia.serving import Predictor
from tests.serving.conformance.clients import CLIENTS, Client, PlainClient, Refused
from tests.serving.conformance.triton_host import (
    Host,
    python_path,
    triton_server,
    why_no_triton,
)
from tests.serving.models import arrays, batch_of, make_ctx, train
from tests.serving.oip.serving_models import serving
from tests.support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "models" / "clicks"
    with make_ctx() as ctx:
        train(ctx, np.random.default_rng(0))
        ctx.export(folder)
    return folder / "1"


@pytest.fixture(scope="module")
def predictor(bundle: Path) -> Iterator[Predictor]:
    one = Predictor(bundle)
    yield one
    one.close()


@pytest.fixture(scope="module", params=["persia", "triton"])
def host(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    bundle: Path,
    predictor: Predictor,
) -> Iterator[Host]:
    with ExitStack() as stack:
        if request.param == "persia":
            models = stack.enter_context(
                ModelRepository(bundle.parents[1], load=lambda folder: Predictor(folder))
            )
            models.wait_ready(PATIENCE_S)
            running = stack.enter_context(serving(cast("Any", models)))
            yield Host("persia", running.http, running.grpc)
            return
        if why := why_no_triton():
            pytest.skip(why)
        folder = tmp_path_factory.mktemp("triton")
        write_triton(
            folder / "models",
            predictor.metadata(),
            python_path=python_path(),
            bundle=bundle,
        )
        yield stack.enter_context(
            triton_server(folder / "models", folder / "log", predictor.model.name)
        )


@pytest.fixture(params=[*CLIENTS])
def client(request: pytest.FixtureRequest, host: Host) -> Iterator[Client]:
    one = CLIENTS[request.param](host)
    yield one
    one.close()


def padded(size: int) -> Arrays:
    """A request with tables [B, L] of ids, and a weight for each id of one feature."""
    given = arrays(np.random.default_rng(size), size)
    del given["tags.values"], given["tags.offsets"]
    given["tags"] = np.arange(size * 3).reshape(size, 3) % 7
    given["tags.pad"] = np.array([0])
    return given


def with_columns(given: Arrays) -> Arrays:
    """Return the request with single ids [B, 1]: Triton takes a tensor of one rank only."""
    return given | {name: given[name].reshape(-1, 1) for name in ("user", "hs")}


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("is_binary", [True, False])
def test_ragged(client: Client, predictor: Predictor, size: int, is_binary: bool) -> None:
    given = with_columns(arrays(np.random.default_rng(size), size))
    found = client.infer("clicks", given, binary=is_binary)
    assert (found.model, found.version) == ("clicks", "1")
    assert np.array_equal(found.outputs["output"], predictor(given)["output"])


def test_padded(client: Client, predictor: Predictor) -> None:
    given = with_columns(padded(5))
    found = client.infer("clicks", given).outputs["output"]
    assert np.array_equal(found, predictor(given)["output"])


def test_one_user_beside_candidates(client: Client, predictor: Predictor) -> None:
    given = with_columns(arrays(np.random.default_rng(4), 6))
    given["user"] = given["user"][:1]
    found = client.infer("clicks", given).outputs["output"]
    assert np.array_equal(found, predictor(given)["output"])
    assert len(found) == 6


def test_a_whole_batch(client: Client, predictor: Predictor) -> None:
    if isinstance(client, PlainClient):
        pytest.skip("JSON holds no bytes that are no text")
    given = arrays(np.random.default_rng(9), 17)
    sent = {"batch": np.array([batch_of(given).to_bytes()], np.object_)}
    found = client.infer("clicks", sent).outputs["output"]
    assert np.array_equal(found, predictor(given)["output"])


def test_what_is_missing_or_wrong(client: Client) -> None:
    given = with_columns(arrays(np.random.default_rng(1), 3))
    for changed in (
        {name: values for name, values in given.items() if name != "user"},
        {name: values for name, values in given.items() if name != "dense"},
        given | {"user": given["user"][:2]},
        given | {"user": np.arange(6).reshape(3, 2)},  # two ids of one user
        given | {"tags.offsets": given["tags.offsets"][::-1].copy()},
    ):
        with pytest.raises(Refused) as refused:
            client.infer("clicks", changed)
        assert refused.value.status == "INVALID_ARGUMENT", refused.value


def test_metadata(client: Client, predictor: Predictor) -> None:
    about = client.model_metadata("clicks")
    declared = {one["name"]: (one["datatype"], one["shape"]) for one in about["inputs"]}
    for one in predictor.metadata()["inputs"]:
        assert declared[one["name"]] == (one["datatype"], one["shape"])
