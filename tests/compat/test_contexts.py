"""The loops of 2021 train as today's does, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia.compat.backend import get_backend
from persia.compat.data import Dataloader
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.errors import ConfigError, DataError, ServiceError
from tests.support.processes import ROOT, run
from tests.training.conftest import LOCKSTEP, Net, batches, new_ctx, step, train
from tests.training.fakes import DIM, SpyWorker, make_batch

SLOTS = {"slots_config": {"user": {"dim": DIM}, "tags": {"dim": DIM}}}
LOSS = torch.nn.functional.binary_cross_entropy_with_logits


def all_batches() -> list[PersiaBatch]:
    return batches(12, size=16)


def old_ctx(**given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return TrainCtx(
            sparse_optimizer=Adagrad(lr=0.1),  # type: ignore[call-arg]
            emb_initialization=(-0.1, 0.1),
            embedding_config=SLOTS,
            device_id=-1,
            **given,
        )


TODAY: dict[str, Any] = {
    "embedding_optimizer": Adagrad(lr=0.1),
    "embedding_config": EmbeddingConfig((-0.1, 0.1), schema=SLOTS),
}


def today() -> list[float]:
    with new_ctx(Net(), **TODAY) as ctx:
        return train(ctx, all_batches(), **LOCKSTEP)


@pytest.mark.parametrize("scale", [1.0, 1024.0])  # a power of two rounds nothing
def test_july_equals_today(scale: float) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with old_ctx() as ctx:
        for number, batch in enumerate(DataLoader(all_batches(), **LOCKSTEP)):
            (dense, embeddings), target = ctx.prepare_features(batch)
            loss = LOSS(model([dense], embeddings), target)
            optimizer.zero_grad()
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
            if number:
                assert ctx.on_after_backward(scale, number)
            else:
                with pytest.warns(DeprecationWarning, match="on_after_backward.*ctx.backward"):
                    assert ctx.on_after_backward(scale, number)
            optimizer.step()
            losses.append(loss.item())
    stats = ctx.stats()  # of all updates: leaving waits for them
    assert losses == today()
    assert (stats["batches"], stats["abandoned"], ctx.update_times) == (12, 0, 12)


def test_august_equals_today(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with old_ctx(dense_optimizer=optimizer) as ctx:
        for batch in DataLoader(all_batches(), **LOCKSTEP):
            dense, sparse, target = ctx.prepare_features(batch)
            losses.append(ctx.backward(LOSS(model([dense], sparse), target)).item())
        ctx.dump_checkpoint(tmp_path, model, optimizer)
        rows = ctx.get_embedding_size()
    assert losses == today()
    other = Net()
    torch.nn.init.zeros_(other.layer.weight)
    with old_ctx(dense_optimizer=torch.optim.SGD(other.parameters(), lr=0.1)) as ctx:
        ctx.load_checkpoint(tmp_path, other)
        assert ctx.get_embedding_size() == rows
    assert torch.equal(other.layer.weight, model.layer.weight)


def test_november_equals_today() -> None:
    loader = Dataloader(all_batches(), 10, True, 60_000, **LOCKSTEP)
    with pytest.warns(DeprecationWarning, match="DDPOption"):
        ctx = new_ctx(Net(), **TODAY, torch_distributed_port=23456)
    with ctx:
        losses = [step(ctx, batch).item() for batch in loader]
    assert losses == today()


def test_w02_each_step_is_checked_and_what_is_not_finite_is_not_sent() -> None:
    # The original looked at the first step only, and sent the gradients all the same.
    model = Net()
    finite = []
    with old_ctx() as ctx, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for number, batch in enumerate(DataLoader(all_batches(), **LOCKSTEP)):
            (dense, embeddings), target = ctx.prepare_features(batch)
            loss = LOSS(model([dense], embeddings), target)
            scaled = loss * (float("inf") if number == 7 else 2.0)
            scaled.backward()  # type: ignore[no-untyped-call]
            finite.append(ctx.on_after_backward(2.0, number))
    stats = ctx.stats()
    assert [number for number, is_finite in enumerate(finite) if not is_finite] == [7]
    assert (stats["batches"], stats["skipped"]) == (11, 1)


def test_what_these_contexts_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"is_training=False.*eval_ctx\(\)"):
        old_ctx(is_training=False)
    with old_ctx() as ctx:
        two = [Label(np.zeros((1, 1), np.float32))] * 2
        ids = IDTypeFeatureWithSingleID("user", np.array([7], np.uint64))
        batch = ctx.get_embedding_from_data(PersiaBatch([ids], labels=two))
        with pytest.raises(DataError, match="expected one label in batch 0, got 2"):
            ctx.prepare_features(batch)
        _, target = ctx.prepare_features(batch, is_training=False)
        assert target is None
        with pytest.raises(ConfigError, match="needs model="):
            ctx.forward(batch)
    with pytest.raises(ConfigError, match="inside `with TrainCtx"):
        ctx.on_after_backward(1.0, 0)
    monkeypatch.setattr("persia.env.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="expected one rank, got 2; give it model="):
        old_ctx()


def test_the_backend_speaks_for_the_context(tmp_path: Path) -> None:
    backend = get_backend()
    backend.close()  # nothing was sent
    assert hasattr(backend, "load_embedding")
    with pytest.raises(ConfigError, match="got none"):
        backend.wait_servers_ready()
    with eval_ctx(embedding_worker=SpyWorker()):
        backend.wait_servers_ready()  # no optimizer to wait for
    with old_ctx() as ctx:
        with pytest.warns(DeprecationWarning, match=r"ctx\.backend"):
            assert ctx.backend is backend
        backend.set_configuration(-0.5, 0.5, enable_weight_bound=False)
        assert ctx.embedding_config == EmbeddingConfig((-0.5, 0.5), weight_bound=0)
        backend.register_optimizer(Adagrad(lr=0.2))
        backend.wait_servers_ready()
        ctx.get_embedding_from_data(make_batch(0))
        rows = ctx.get_embedding_size()
        backend.dump_embedding(str(tmp_path))
        backend.wait_for_dump_embedding()
        ctx.clear_embeddings()
        backend.load_embedding(str(tmp_path))
        backend.wait_for_load_embedding()
        assert ctx.get_embedding_size() == rows


FAILS = """
import warnings
warnings.simplefilter("ignore")
import numpy as np
from persia.backend import init_backend
from persia.prelude import PyPersiaBatchData

backend = init_backend()
for _ in range(3):
    batch = PyPersiaBatchData()
    batch.add_id_type_feature_with_single_id(np.arange(4, dtype=np.uint64), "user")
    batch.add_dense([np.zeros((4, 2), np.float32)])
    batch.add_target(np.zeros((4, 1), np.float32))
    backend.send_data(batch)
raise KeyError("no such column")
"""


def test_a_script_that_fails_does_not_end_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing surrounds the sending, so it is the end of the process that must not be taken
    # for the end of the data.
    script = tmp_path / "data_loader.py"
    script.write_text(FAILS)
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = DataLoader(StreamingDataset(4), timeout_ms=30_000)
    seen = 0
    raised = pytest.raises(ServiceError, match=r"(?s)failed.*no such column")
    with raised, old_ctx() as ctx:
        for batch in source:
            ctx.prepare_features(batch)
            seen += 1
    assert seen == 3


@pytest.mark.parametrize("end", ["raise KeyError('x')", "import sys; sys.exit(3)"])
def test_the_launcher_leaves_word_of_a_failure(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    say = "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n"
    script.write_text(say + end)
    ran = run("-m", "persia._cli.run", "script", script)
    assert ran.stdout.strip() in ("KeyError('x')", "SystemExit(3)"), ran.stderr
