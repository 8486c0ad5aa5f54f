"""Contexts over the real servers in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia._cluster.embedded import build_embedding_worker
from persia._core.base import cpu
from persia.config import EmbeddingSchema, GlobalConfig
from persia.ctx import EmbeddingCtx, InferCtx, PreprocessMode, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.errors import ConfigError, DataError, DataTypeError, ServiceUnavailable
from tests.training import conftest
from tests.training.conftest import LOCKSTEP, MakeCtx, Net, embeddings_of, step, train
from tests.training.fakes import DIM, NUM_IDS, SpyWorker, make_batch

SLOTS: dict[str, Any] = {
    "feature_index_prefix_bit": 8,
    "slots_config": {
        "user": {"dim": DIM},
        "tags": {"dim": DIM, "pooling": "sum"},
        "means": {"dim": DIM, "pooling": "mean"},
        "seq": {"dim": DIM, "embedding_summation": False, "sample_fixed_size": 3},
        "jag": {"dim": DIM, "pooling": "jagged"},
    },
}
NAMES = tuple(SLOTS["slots_config"])


def batch_of(number: int) -> PersiaBatch:
    return make_batch(number, 32, NAMES)


def new_ctx(**options: Any) -> TrainCtx:
    optimizer = Adagrad(lr=0.1, initial_accumulator_value=1e-8)
    slots = {"embedding_optimizer": optimizer, "embedding_config": SLOTS}
    return conftest.new_ctx(Net(len(NAMES)), **slots, **options)


def values_of(ctx: TrainCtx) -> list[bytes]:
    """All trained values, by way of an evaluation."""
    everyone = [np.array([number], np.uint64) for number in range(NUM_IDS)]
    batch = PersiaBatch([IDTypeFeature(name, everyone) for name in NAMES], requires_grad=False)
    with eval_ctx(model=ctx.model, embedding_worker=ctx.embedding_worker) as reader:
        got = reader.get_embedding_from_data(batch)
    return [
        (item if isinstance(item, torch.Tensor) else item.values).numpy().tobytes()
        for item in got.embedding_tensors
    ]


def test_runs_and_numbers_of_servers_and_threads_are_bit_equal() -> None:
    batches = [batch_of(number) for number in range(12)]
    results = []
    for servers, threads in ((1, 1), (1, 1), (2, 1), (4, 2)):
        config = {"embedded_config": {"num_servers": servers, "num_threads": threads}}
        with new_ctx(global_config=config) as ctx:
            losses = train(ctx, batches, **LOCKSTEP)
        sizes = ctx.get_embedding_size()
        assert len(sizes) == servers
        results.append((losses, values_of(ctx), sum(sizes)))
    assert all(result == results[0] for result in results[1:])


def test_configs_are_those_given_or_those_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, named, servers = (tmp_path / name for name in ("here.yml", "slots.yml", "global.yml"))
    here.write_text("slots_config:\n  user:\n    dim: 4\n")
    named.write_text("slots_config:\n  user:\n    dim: 8\n")
    servers.write_text("embedded_config:\n  num_servers: 3\n")
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(named))
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(servers))
    slots = {"slots_config": {"user": {"dim": 4}}}
    read: list[Any] = [EmbeddingConfig(schema=source) for source in (here, slots)]
    for source in (here, str(here), slots, *read, None):
        with eval_ctx(embedding_config=source) as ctx:
            batch = ctx.get_embedding_from_data(make_batch(0, names=("user",)))
            assert embeddings_of(batch)[0].shape == (4, 8 if source is None else 4)
            assert ctx.get_embedding_size() == [0, 0, 0]
    with eval_ctx(embedding_config=slots, global_config={}) as ctx:
        assert ctx.get_embedding_size() == [0]


def test_unknown_feature_is_named_and_changes_nothing() -> None:
    ids = [IDTypeFeatureWithSingleID("unknown", np.array([1], np.uint64))]
    batch = PersiaBatch(ids, labels=[Label(np.zeros((1, 1), np.float32))])
    with new_ctx() as ctx:
        with pytest.raises(DataError, match="unknown"):
            list(DataLoader([batch_of(0), batch], reproducible=True))
        assert ctx.stats()["staleness"] == 0


def test_w43_a_serving_context_can_be_entered_alone() -> None:
    with InferCtx(model=Net(1), embedding_config=SLOTS) as ctx:
        ctx.wait_for_serving()
        assert ctx.get_embedding_size() == [0]
        output, labels = ctx.forward(ctx.get_embedding_from_data(make_batch(0, names=["user"])))
        assert output.shape == (4, 1)
        assert labels is None


def test_rows_outlive_the_with_block() -> None:
    with new_ctx() as ctx:
        train(ctx, [batch_of(number) for number in range(3)])
    before = values_of(ctx)
    assert sum(ctx.get_embedding_size()) > 0
    with ctx:
        assert values_of(ctx) == before


def test_the_environment_sets_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu.selected()
    try:
        for name in cpu.available():
            monkeypatch.setenv("PERSIA_ISA", name)
            build_embedding_worker(EmbeddingSchema.load(SLOTS), GlobalConfig.load(None)).close()
            assert cpu.selected() == name
    finally:
        cpu.select(before)


def test_evaluation_between_steps_changes_no_training_bit(make_ctx: MakeCtx) -> None:
    runs = []
    for evaluates in (False, True):
        fake = SpyWorker()
        with make_ctx(embedding_worker=fake) as ctx:
            data = [make_batch(number) for number in range(12)]
            for batch in DataLoader(data, **LOCKSTEP):
                step(ctx, batch)
                if evaluates:
                    ctx.get_embedding_from_data(make_batch(9, requires_grad=False))
                    with eval_ctx(model=ctx.model) as inner:
                        for other in DataLoader([make_batch(99)], embedding_staleness=1):
                            inner.forward(other)
        runs.append({key: row.tobytes() for key, row in fake.rows.items()})
        # Admission by probability draws by batch id.
        assert fake.of("lookup") == [number for _, number in fake.update_ids] == [*range(12)]
    assert runs[0] == runs[1]


def test_forward_needs_a_model(worker: SpyWorker) -> None:
    with EmbeddingCtx(PreprocessMode.EVAL, embedding_worker=worker) as ctx:
        batch = ctx.get_embedding_from_data(make_batch(0))
        ctx.prepare_features(batch)
        with pytest.raises(ConfigError, match="needs model="):
            ctx.forward(batch)


def test_a_batch_without_embeddings_is_refused_by_its_type(ctx: TrainCtx) -> None:
    with pytest.raises(DataTypeError, match="got PersiaBatch"):
        ctx.forward(make_batch())  # type: ignore[arg-type]


def test_own_addresses_beat_those_of_the_context_around(
    ctx: TrainCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
    with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/0"):
        InferCtx(["ipc:///nowhere/0"]).__enter__()


class Dropping(Net):
    """A ``Net`` whose output passes dropout and BatchNorm, as given."""

    def __init__(self, p: float = 0.5, *, has_norm: bool = True) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(p)
        self.norm = torch.nn.BatchNorm1d(1) if has_norm else torch.nn.Identity()

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.drop(super().forward(dense, embeddings)))
        return output


@pytest.mark.parametrize("by_outer", [False, True])
def test_a_model_in_training_mode_in_an_evaluation_is_warned_of_once(
    ctx: TrainCtx, caplog: pytest.LogCaptureFixture, by_outer: bool
) -> None:
    ctx.model = model = Dropping()
    batch = make_batch(0, requires_grad=False)
    ctx.forward(ctx.get_embedding_from_data(make_batch(0)))
    ctx.forward(ctx.get_embedding_from_data(batch))  # may train the dense net alone
    assert "training mode" not in caplog.text
    for _ in range(2):  # as after each of two epochs
        with eval_ctx(model=model) as evaluation:
            for _ in range(2):
                found = evaluation.get_embedding_from_data(batch)
                (ctx if by_outer else evaluation).forward(found)
    (line,) = [line for line in caplog.messages if "training mode" in line]
    assert "(drop, norm): call model.eval() before, and model.train() after" in line


@pytest.mark.parametrize(
    "model", [Net(), Dropping(0.0, has_norm=False), Dropping().eval(), lambda dense, rows: 0]
)
def test_a_model_that_acts_as_in_evaluation_is_not_warned_of(
    ctx: TrainCtx, caplog: pytest.LogCaptureFixture, model: Any
) -> None:
    with eval_ctx(model=model) as evaluation:
        evaluation.forward(evaluation.get_embedding_from_data(make_batch(0)))
    assert "training mode" not in caplog.text


def test_a_request_is_no_batch_yet(ctx: TrainCtx) -> None:
    request: Any = {"user": [1, 2]}
    message = r"expected a PersiaBatch, got dict; persia\.readers\.Columns\(...\)\.batch"
    with InferCtx(model=ctx.model) as infer, pytest.raises(DataTypeError, match=message):
        infer.get_embedding_from_data(request)
