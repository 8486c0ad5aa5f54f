"""The original's handler for TorchServe: an InferCtx that nothing enters.

What TorchServe calls, and in which order: ``initialize`` once, then for each request
``preprocess``, ``inference`` and ``postprocess``, which its base class chains in ``handle``.
"""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.ctx import InferCtx, TrainCtx, eval_ctx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import ConfigError
from persia.service import get_embedding_worker_services
from tests.e2e.support import new_job
from tests.e2e.test_serving import SLOTS, Difference, batch_of
from tests.support.fixtures import Monkey
from tests.support.processes import Cluster


class BaseHandler:
    """Of ``ts.torch_handler.base_handler``, what a handler inherits."""

    model: Any = None
    context: Any = None

    def handle(self, data: Any, context: Any) -> Any:
        self.context = context
        found = self.inference(self.preprocess(data))  # type: ignore[attr-defined]
        return self.postprocess(found)  # type: ignore[attr-defined]


# As a user has it: names of the original only.
HANDLER = """
import os
import torch
from ts.torch_handler.base_handler import BaseHandler

from persia.ctx import InferCtx
from persia.service import get_embedding_worker_services

class PersiaHandler(BaseHandler):
    def initialize(self, context):
        folder = context.system_properties["model_dir"]
        name = context.manifest["model"]["serializedFile"]
        self.model = torch.jit.load(os.path.join(folder, name)).eval()
        self.persia_context = InferCtx(get_embedding_worker_services(), device_id=-1)
        self.persia_context.wait_for_serving()

    def preprocess(self, data):
        batch = data[0].get("batch")
        batch = self.persia_context.get_embedding_from_bytes(bytes(batch), -1)
        return self.persia_context.prepare_features(batch)

    def inference(self, data):
        non_id_type_tensors, id_type_embedding_tensors, _ = data
        with torch.no_grad():
            return self.model(non_id_type_tensors, id_type_embedding_tensors)

    def postprocess(self, data):
        return torch.reshape(data, [-1]).tolist()
"""


class Scored(Difference):
    """One that TorchScript takes."""

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        return (embeddings[0] - embeddings[1]).sum(1, keepdim=True) * self.scale


def train(folder: Path, batch: PersiaBatch) -> list[float]:
    """Train, dump with the scripted model, and return what evaluation answers."""
    model = Scored()
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.5, 0.5), schema=SLOTS),
    ) as ctx:
        ctx.backward(ctx.forward(ctx.get_embedding_from_data(batch))[0].sum())
        ctx.dump_checkpoint(folder, with_jit_model=True)
        with eval_ctx(model=model) as evaluation, torch.no_grad():
            scores: torch.Tensor = evaluation.forward(
                evaluation.get_embedding_from_data(batch)
            )[0]
    values: list[float] = scores.reshape(-1).tolist()
    return values


def serving_job(folder: Path) -> Cluster:
    infer = {"servers": ["unused:1"], "embedding_checkpoint": str(folder)}
    return new_job({"common_config": {"job_type": "Infer", "infer_config": infer}}, SLOTS)


@pytest.fixture
def handler_class(monkeypatch: Monkey) -> Any:
    base: Any = types.ModuleType("ts.torch_handler.base_handler")
    base.BaseHandler = BaseHandler
    for name in ("ts", "ts.torch_handler"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    names: dict[str, Any] = {}
    exec(compile(HANDLER, "serve_handler.py", "exec"), names)
    return names["PersiaHandler"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_originals_handler_answers_what_evaluation_does(
    tmp_path: Path, no_job: None, handler_class: Any, monkeypatch: Monkey
) -> None:
    batch = batch_of("user", "item")
    want = train(tmp_path, batch)
    with serving_job(tmp_path) as job:
        job.start_servers()
        (address,) = job.addresses["embedding-worker"]
        monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", address)
        assert get_embedding_worker_services() == [address]
        handler = handler_class()
        about = {"system_properties": {"model_dir": str(tmp_path)}}
        manifest = {"model": {"serializedFile": "jit_dense.pt"}}
        handler.initialize(types.SimpleNamespace(**about, manifest=manifest))
        for _ in range(2):
            assert handler.handle([{"batch": bytearray(batch.to_bytes())}], None) == want
        handler.persia_context.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_context_that_is_not_entered_connects_closes_and_is_entered(
    tmp_path: Path, no_job: None
) -> None:
    batch = batch_of("user", "item")
    want = train(tmp_path, batch)
    with pytest.raises(ConfigError, match="has no embeddings yet"):
        InferCtx().wait_for_serving()
    with pytest.raises(ConfigError, match="timeout_s: expected seconds"):
        InferCtx(["unused:1"], timeout_s=0.0)
    with serving_job(tmp_path) as job:
        job.start_servers()
        ctx = InferCtx(job.addresses["embedding-worker"], model=Scored())
        ctx.load_torch_state_dict(ctx.model, tmp_path / "dense.pt")
        ctx.close()  # of nothing
        for _ in range(2):
            ctx.wait_for_serving()
            found = ctx.get_embedding_from_bytes(batch.to_bytes())
            scores = ctx.forward(found)[0].detach().reshape(-1).tolist()
            assert scores == want
            ctx.close()
        ctx.wait_for_serving()
        with ctx:
            assert sum(ctx.get_embedding_size()) == 16
        assert ctx._session is None
        ctx.wait_for_serving()
        connection = ctx._connected().connection
        del ctx, found
        gc.collect()  # it may be in a cycle
        worker: Any = connection.worker
        assert worker._closed.wait(20.0)  # with the context that has it
