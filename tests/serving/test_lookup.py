"""What an id without a row is, by the policy of its feature."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from persia._files import catalog
from persia._files.storage import LocalStorage
from persia._rpc.methods import parameter_server
from persia._rpc.server import serve
from persia._rpc.zmq_transport import ZmqTransport
from persia._server.read_only import ReadOnlyParameterServer
from persia._serving.bundle import Missing, ServedFeature, ServedRows
from persia._serving.lookup import RowLookup
from persia._serving.remote_rows import RowServers
from persia.config import InferConfig
from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import ConfigError, ServiceBusy
from persia.serving import Predictor
from tests.serving.models import PATIENT
from tests.support.saving import FEATURES, IDS, dump, train
from tests.support.services import ADAGRAD, SCHEMA, features, make_servers, make_worker
from tests.support.waiting import PATIENCE_S

SLOTS = {
    "feature_index_prefix_bit": 8,
    "slots_config": {name: {"dim": 4} for name in ("zeros", "initial", "mean")},
}
NAMES = ("zeros", "initial", "mean")


class Show(torch.nn.Module):
    """Returns what it is given, and a sum with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, dense: object, embeddings: object) -> dict[str, torch.Tensor]:
        return {name: embeddings[name] * self.weight for name in NAMES}  # type: ignore[index]


def batch(ids: list[int], trains: bool = True) -> PersiaBatch:
    one = np.array(ids, np.uint64)
    labels = [Label(np.ones((len(ids), 1), np.float32))] if trains else None
    return PersiaBatch(
        [IDTypeFeatureWithSingleID(name, one) for name in NAMES],
        labels=labels,
        requires_grad=trains,
    )


def test_each_feature_has_its_policy(tmp_path: Path) -> None:
    net = Show()
    ctx = TrainCtx(
        SGD(lr=0.1),
        torch.optim.SGD(net.parameters(), lr=0.0),
        model=net,
        embedding_config=SLOTS,
        mixed_precision=False,
    )
    with ctx:
        output, _ = ctx.forward(ctx.get_embedding_from_data(batch([1, 2, 3])))
        ctx.backward(sum(one.sum() for one in output.values()))
        version = ctx.export(
            tmp_path / "net", missing={name: name for name in NAMES if name != "zeros"}
        )
        with pytest.raises(ConfigError, match="expected features of the model"):
            ctx.export(tmp_path / "net", missing={"other": "mean"})
        predictor = Predictor(tmp_path / "net" / str(version))
        found = predictor({name: np.array([1, 77]) for name in NAMES})
        # What training begins the id with, and the rows it has.
        new = ctx.get_embedding_from_data(batch([1, 77, 2, 3])).embedding_tensors
    rows = {name: new[name].detach().numpy() for name in NAMES}  # type: ignore[union-attr]
    assert all(np.array_equal(found[name][0], rows[name][0]) for name in NAMES)
    assert not found["zeros"][1].any()
    assert np.array_equal(found["initial"][1], rows["initial"][1])
    assert np.allclose(found["mean"][1], rows["mean"][[0, 2, 3]].mean(axis=0), atol=1e-6)
    assert predictor.stats()["missing"] == dict.fromkeys(NAMES, 1)
    predictor.close()


@contextmanager
def row_servers(
    folder: Path, place: Path
) -> Iterator[tuple[list[ReadOnlyParameterServer], list[list[str]]]]:
    """Two servers with the rows of the newest checkpoint, and their addresses."""
    config = InferConfig(str(folder))
    servers = [
        ReadOnlyParameterServer(SCHEMA, config, replica_index=index, replica_size=2)
        for index in range(2)
    ]
    addresses = [[f"ipc://{place}/rows-{index}"] for index in range(2)]
    with closing(ZmqTransport()) as transport:
        ends = []
        for server, (address,) in zip(servers, addresses, strict=True):
            server.rows.load()
            ends.append(serve(transport, address, parameter_server(), server))
        yield servers, addresses
        for end in ends:
            end.stop(PATIENCE_S)


def open_rows(folder: Path, missing: Missing = "zeros", **options: Any) -> RowLookup:
    """The rows of the newest checkpoint."""
    identity = cast("str", catalog.latest(LocalStorage(folder)))
    served = [
        ServedFeature(name, "pooled", SCHEMA.slots[name].dim, missing) for name in FEATURES
    ]
    return RowLookup(SCHEMA, served, str(folder), ServedRows(str(folder), identity), **options)


def outputs_of(rows: RowLookup, offset: int = 0) -> list[bytes]:
    batch = {name: [[x + offset for x in sample] for sample in IDS[name]] for name in FEATURES}
    found: Any = rows(features(batch).features)
    return [(one.values if hasattr(one, "values") else one.rows).tobytes() for one in found]


@pytest.mark.parametrize("cache_ttl_ms", [0.0, 1e6])
def test_rows_in_servers_are_of_the_checkpoint_of_the_net(
    tmp_path: Path, cache_ttl_ms: float
) -> None:
    worker = make_worker(make_servers(2, optimizer=ADAGRAD))
    folder = tmp_path / "rows"
    train(worker, 0, 3)
    dump(worker, folder, keep_last=2)
    with closing(open_rows(folder)) as here:
        old = outputs_of(here)
    with row_servers(folder, tmp_path) as (servers, addresses):
        settings = RowServers(addresses, cache_ttl_ms, **PATIENT)
        with closing(open_rows(folder, servers=settings)) as rows:
            assert outputs_of(rows) == outputs_of(rows) == old
            train(worker, 3, 3)
            dump(worker, folder, keep_last=2)
            with closing(open_rows(folder)) as here:
                new = outputs_of(here)
            assert new != old
            # The servers are behind: the version is not ready, and the one before goes on.
            for server in servers:
                with pytest.raises(ServiceBusy, match="expected rows of checkpoint"):
                    open_rows(folder, servers=settings)
                assert outputs_of(rows) == old
                server.rows.poll()
            with closing(open_rows(folder, servers=settings)) as newer:
                for _ in range(3):
                    assert outputs_of(newer) == new
                    assert outputs_of(rows) == old
            assert bool(rows.stats().get("cache_hits")) == bool(cache_ttl_ms)


@pytest.mark.parametrize("missing", ["zeros", "initial", "mean"])
def test_ids_without_a_row_in_servers_have_their_policy(
    tmp_path: Path, missing: Missing
) -> None:
    worker = make_worker(make_servers(2, optimizer=ADAGRAD))
    folder = tmp_path / "rows"
    train(worker, 0, 3)
    dump(worker, folder)
    with (
        row_servers(folder, tmp_path) as (_, addresses),
        closing(open_rows(folder, missing)) as here,
        closing(
            open_rows(folder, missing, servers=RowServers(addresses, 1e6, **PATIENT))
        ) as there,
    ):
        for offset in (0, 100_000, 0):
            assert outputs_of(there, offset) == outputs_of(here, offset)
        assert there.stats()["missing"] == here.stats()["missing"]
        assert sum(there.stats()["missing"].values()) > 0
