"""Staleness 1 in embedded mode is plain PyTorch.

The same model, the same initial rows (copied in), the same batches: losses and rows agree to
1e-5 after 200 steps, in every pooling mode. Where PyTorch's optimizer moves rows that a batch
did not meet (momentum, decay, Adam's averages), every batch meets every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from persia import env
from persia._files.writer_lock import JobFolders
from persia._rpc.messages import TableEntries, TableSigns
from persia._training.batch import NamedList, PersiaTrainingBatch
from persia._training.inflight import InFlightBatch
from persia.config import EmbeddingSchema
from persia.ctx import InferCtx, TrainCtx
from persia.ctx.connection import Connection
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    PersiaBatch,
)
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.errors import ConfigError
from tests.support.fixtures import Monkey
from tests.training.conftest import LOCKSTEP, MakeCtx, Net, batches, train
from tests.training.fakes import SpyRanks, SpyWorker, make_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray


STEPS = 200
BATCH = 32
Schedule = torch.optim.lr_scheduler.StepLR
VOCABULARY = 24  # ids of each slot; below BATCH, so that a batch can meet them all
DIM = 8
FIXED = 4  # places of the raw slot; some samples have more ids
POOLINGS = ("sum", "mean", "sqrt", "max", "raw", "jagged")
TOLERANCE = 1e-5


class Model(torch.nn.Module):
    """Reads one slot, in the form its pooling mode has."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.hidden = torch.nn.Linear(DIM, 8)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, dense: Sequence[torch.Tensor], embeddings: Sequence[Any]) -> torch.Tensor:
        return self.head(_vector(self.pooling, embeddings[0]))

    def head(self, vector: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(torch.tanh(self.hidden(vector)))
        return output


def _vector(pooling: str, embedding: Any) -> torch.Tensor:
    """Return [B, DIM]. Places and positions weigh differently, so that a mix-up shows."""
    if pooling == "raw":
        places = torch.arange(1.0, FIXED + 1)[None, :, None]
        weighted: torch.Tensor = embedding[..., :-1] * embedding[..., -1:] / places
        return weighted.sum(1)
    if pooling == "jagged":
        values, offsets = embedding
        lengths = offsets.diff()
        sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        weights = 1.0 / (1 + torch.arange(len(values)) - offsets[sample])
        return torch.zeros(len(lengths), DIM).index_add(0, sample, values * weights[:, None])
    vector: torch.Tensor = embedding
    return vector


@dataclass
class Step:
    """The ids of each sample, the labels, and perhaps a weight for each id."""

    ids: list[NDArray[np.uint64]]
    labels: NDArray[np.float32]
    weights: list[NDArray[np.float32]] | None = None


def _steps(meets_all: bool) -> list[Step]:
    rng = np.random.default_rng(7)
    steps = []
    for _ in range(STEPS):
        ids = [
            rng.integers(0, VOCABULARY, rng.integers(0, 7)).astype(np.uint64)
            for _ in range(BATCH)
        ]
        if meets_all:
            firsts = rng.permutation(BATCH).astype(np.uint64) % VOCABULARY
            both = zip(firsts, ids, strict=True)
            ids = [np.append(first, rest).astype(np.uint64) for first, rest in both]
        steps.append(Step(ids, rng.normal(size=(BATCH, 1)).astype(np.float32)))
    return steps


def _twin_embedding(pooling: str, weight: torch.Tensor, step: Step) -> Any:
    """What PyTorch gives a model where PERSIA gives ``_vector`` its embedding."""
    lengths = torch.tensor([len(sample) for sample in step.ids])
    flat = torch.from_numpy(np.concatenate(step.ids).astype(np.int64))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    if pooling == "jagged":
        return torch.nn.functional.embedding(flat, weight), offsets
    if pooling == "raw":
        index = torch.zeros(BATCH, FIXED, dtype=torch.int64)
        mask = torch.zeros(BATCH, FIXED, 1)
        for i, sample in enumerate(step.ids):
            kept = sample[:FIXED].astype(np.int64)
            index[i, : len(kept)] = torch.from_numpy(kept)
            mask[i, : len(kept)] = 1
        rows = torch.nn.functional.embedding(index, weight) * mask
        return torch.cat([rows, mask], dim=2)
    weights = None if step.weights is None else torch.from_numpy(np.concatenate(step.weights))
    bag = torch.nn.functional.embedding_bag(
        flat,
        weight,
        offsets[:-1],
        mode="sum" if pooling == "sqrt" else pooling,
        per_sample_weights=weights,
    )
    if pooling == "sqrt":
        bag = bag / lengths.clamp(min=1).sqrt()[:, None]
    return bag


def _train_twin(
    model: Model,
    weight: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    steps: list[Step],
    schedule: Schedule | None = None,
) -> list[float]:
    dense = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        vector = _vector(model.pooling, _twin_embedding(model.pooling, weight, step))
        loss = torch.nn.functional.mse_loss(model.head(vector), torch.from_numpy(step.labels))
        optimizer.zero_grad()
        dense.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(optimizer, torch.optim.SparseAdam) and weight.grad is not None:
            weight.grad = torch.sparse_coo_tensor(
                torch.arange(VOCABULARY)[None], weight.grad, weight.shape, check_invariants=True
            )
        optimizer.step()
        dense.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def _train_persia(
    model: Model,
    rows: NDArray[np.float32],
    optimizer: Optimizer,
    steps: list[Step],
    schedule: Schedule | None = None,
    group: str | None = None,
) -> tuple[list[float], NDArray[np.float32]]:
    slot = {"dim": DIM, "pooling": model.pooling, "sample_fixed_size": FIXED}
    own: dict[str, Any] = {} if group is None else {group: {"optimizer": {}}}
    schema = EmbeddingSchema.load({"slots_config": {"slot": slot}, "group_settings": own})
    signs = np.arange(VOCABULARY, dtype=np.uint64) | np.uint64(schema.slots["slot"].prefix)
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=optimizer,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        # No bound: nn.EmbeddingBag has none.
        embedding_config=EmbeddingConfig(weight_bound=0, schema=schema),
    )
    losses = []
    with ctx:
        worker: Any = ctx.embedding_worker
        worker.set_embedding([TableEntries(0, signs, rows, None)])
        given = [
            PersiaBatch(
                [IDTypeFeature("slot", step.ids, step.weights)], labels=[Label(step.labels)]
            )
            for step in steps
        ]
        for batch in DataLoader(given, reproducible=True, embedding_staleness=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
            losses.append(loss.item())
            if schedule is not None:
                schedule.optimizer.step()  # it warns of one that never did
                schedule.step()
                ctx.set_lr(float(schedule.get_last_lr()[0]), group)
    (server,) = worker.servers
    (entries,) = server.read_embedding((TableSigns(0, signs),))
    np.testing.assert_array_equal(entries.signs, signs)
    return losses, entries.values


# Ours, torch's, and the arguments of both. The original's initial accumulator is 1e-2: beside
# it early gradients hardly count.
Pair = tuple[Callable[..., Optimizer], Callable[..., torch.optim.Optimizer], dict[str, float]]
BOTH_ADAGRAD = (Adagrad, torch.optim.Adagrad)
ANY_ROWS: dict[str, Pair] = {
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.5}),
    "adagrad_1e-2": (*BOTH_ADAGRAD, {"lr": 0.05, "initial_accumulator_value": 1e-2}),
    "adagrad_1e-8": (*BOTH_ADAGRAD, {"lr": 0.05, "initial_accumulator_value": 1e-8}),
}
DECAY = {"weight_decay": 1e-2}
ALL_ROWS: dict[str, Pair] = {
    "sgd_momentum": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_momentum_decay": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, **DECAY}),
    "adagrad_decay": (*BOTH_ADAGRAD, {**ANY_ROWS["adagrad_1e-2"][2], **DECAY}),
    # SparseAdam adds eps before it corrects the bias, Adam (and PERSIA) after: so hardly any.
    "sparse_adam": (Adam, torch.optim.SparseAdam, {"lr": 0.01, "eps": 1e-12}),
    "adam": (Adam, torch.optim.Adam, {"lr": 0.01}),
    "adam_decay": (Adam, torch.optim.Adam, {"lr": 0.01, **DECAY}),
}


def _check(
    pooling: str,
    optimizers: Pair,
    steps: list[Step],
    schedule: Callable[[torch.optim.Optimizer], Schedule] | None = None,
    group: str | None = None,
) -> None:
    ours, theirs, arguments = optimizers
    rows = np.random.default_rng(3).uniform(-0.5, 0.5, (VOCABULARY, DIM)).astype(np.float32)
    torch.manual_seed(11)
    model = Model(pooling)
    twin = Model(pooling)
    twin.load_state_dict(model.state_dict())
    weight = torch.from_numpy(rows.copy()).requires_grad_()

    optimizer = theirs([weight], **arguments)
    wanted, mirrored = (
        None if schedule is None else schedule(each)
        for each in (optimizer, theirs([torch.zeros(1)], **arguments))
    )
    want = _train_twin(twin, weight, optimizer, steps, wanted)
    got, got_rows = _train_persia(model, rows, ours(**arguments), steps, mirrored, group)

    want_rows = weight.detach().numpy()
    assert np.abs(want_rows - rows).max() > 0.05, "the rows must have moved to prove anything"
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(got_rows, want_rows, rtol=0, atol=TOLERANCE)


# Pooling and optimizer do not know each other: the fast tier takes each once.
def _pairs(optimizers: Sequence[str], fast: Sequence[str]) -> list[Any]:
    """Each optimizer with each pooling; fast are all with the first, the first with these."""
    return [
        pytest.param(
            optimizer,
            pooling,
            marks=() if place == 0 or (number == 0 and pooling in fast) else pytest.mark.slow,
            id=f"{optimizer}-{pooling}",
        )
        for number, optimizer in enumerate(optimizers)
        for place, pooling in enumerate(POOLINGS)
    ]


@pytest.mark.parametrize(("optimizer", "pooling"), _pairs(list(ANY_ROWS), POOLINGS))
def test_equals_torch_whatever_rows_are_met(pooling: str, optimizer: str) -> None:
    _check(pooling, ANY_ROWS[optimizer], _steps(meets_all=False))


@pytest.mark.parametrize(("optimizer", "pooling"), _pairs(list(ALL_ROWS), ()))
def test_equals_torch_when_every_row_is_met(pooling: str, optimizer: str) -> None:
    _check(pooling, ALL_ROWS[optimizer], _steps(meets_all=True))


@pytest.mark.parametrize("group", [None, "slot"])
def test_a_schedule_of_the_embeddings_is_torchs(group: str | None) -> None:
    steps = _steps(meets_all=True)[:60]
    _check("sum", ALL_ROWS["adam"], steps, partial(Schedule, step_size=7, gamma=0.5), group)


@pytest.mark.parametrize("optimizer", list(ANY_ROWS))
def test_weighted_ids_are_per_sample_weights(optimizer: str) -> None:
    rng = np.random.default_rng(8)
    steps = _steps(meets_all=False)[:60]
    for step in steps:  # some are negative, some 0
        halves = [rng.integers(-1, 4, len(ids)).astype(np.float32) for ids in step.ids]
        step.weights = [each / np.float32(2) for each in halves]
    _check("sum", ANY_ROWS[optimizer], steps)


def test_w44_defaults_work_without_rank_and_without_cuda(make_ctx: MakeCtx) -> None:
    ctx = make_ctx()
    assert (ctx.world_size, ctx.rank_id) == (1, 0)
    assert ctx.mixed_precision is False
    assert ctx.grad_scaler is None
    assert ctx.device_id is None
    assert make_ctx(device_id=-1).device_id is None
    assert ctx.grad_queue is None
    with ctx:
        assert ctx.grad_queue is not None
        assert len(ctx.grad_queue) == 0


def test_original_positional_order() -> None:
    fake, model = SpyWorker(), Net()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx = TrainCtx(SGD(1), dense, 4, 10, 8, 60, True, False, None, model, embedding_worker=fake)
    assert ctx.model is model
    assert ctx.dense_optimizer is dense
    with pytest.raises(ConfigError, match="TrainCtx needs model="):
        TrainCtx(SGD(lr=1), dense, embedding_worker=fake)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("embedding_optimizer", None),
        (r"embedding_optimizer: .* such as Adam\(lr=0.1\)", Adam),
        (r"embedding_optimizer: .* such as Adagrad\(lr=0.1\)", "adam"),
        ("dense_optimizer", None),
        ("grad_scalar_update_factor", 0),
        ("backward_buffer_size", 0),
        ("backward_workers_size", 0),
        ("embedding_gradient_reduction", "max"),
        ("device_id", 1000),
    ],
)
def test_bad_settings_name_themselves(make_ctx: MakeCtx, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        make_ctx(**{option.partition(":")[0]: value})


def test_gradients_are_averaged_or_summed(make_ctx: MakeCtx, monkeypatch: Monkey) -> None:
    scales = []
    env.set_env(world_size=4, rank=1, local_rank=1)
    monkeypatch.setattr("persia.ctx.train.Ranks", lambda world_size, rank: SpyRanks(world_size))
    monkeypatch.setattr("persia.ctx.train.StepBarrier", lambda *parts: None)
    monkeypatch.setattr(TrainCtx, "_join_ranks", lambda ctx: None)
    for reduction in ("mean", "sum"):
        fake = SpyWorker()
        with make_ctx(embedding_worker=fake, embedding_gradient_reduction=reduction) as ctx:
            train(ctx, batches(1))
        scales.append(fake.gradients[0].scale)
        assert fake.update_ids[0][0] % 2**16 == 1  # the rank
    assert scales == [4.0, 1.0]


def test_w13_a_context_that_is_entered_again_repeats_no_update_id(
    worker: SpyWorker, make_ctx: MakeCtx, monkeypatch: Monkey
) -> None:
    # Servers would take such an update for a repetition, and leave it out.
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc://nowhere")
    monkeypatch.setattr(Connection, "to_job", lambda *given: Connection(worker))
    ctx = make_ctx(embedding_worker=None)
    for _ in range(2):
        with ctx:
            train(ctx, batches(2))
    assert len(set(worker.update_ids)) == 4


def test_entering_may_fail_and_be_done_again(make_ctx: MakeCtx, monkeypatch: Monkey) -> None:
    def fail(*given: object) -> None:
        raise NotADirectoryError("tensorboard")

    ctx = make_ctx()
    with monkeypatch.context() as patch:
        patch.setattr(ctx, "_tensorboard", "file/of-another")
        patch.setattr("persia.ctx.train.Recorder", fail)
        with pytest.raises(NotADirectoryError), ctx:
            pass
    connection = ctx._connected().connection
    assert (connection.backward, connection.folders) == (None, None)
    with ctx:
        train(ctx, batches(1))


def test_updates_are_sent_whatever_fails(make_ctx: MakeCtx, monkeypatch: Monkey) -> None:
    def fail(folders: JobFolders) -> None:
        raise OSError("stale handle")

    monkeypatch.setattr(JobFolders, "release", fail)
    with pytest.raises(OSError, match="stale handle"), make_ctx() as ctx:
        train(ctx, batches(1))
    # That no thread is left is what every test here is looked through for.
    assert ctx.backward_engine is None


def test_rounds_are_needed_to_be_reproducible(make_ctx: MakeCtx, monkeypatch: Monkey) -> None:
    env.set_env(world_size=2, rank=0, local_rank=0)
    monkeypatch.setattr(TrainCtx, "_join_ranks", lambda ctx: None)
    ctx = make_ctx()
    with pytest.raises(ConfigError, match="drop_last=False: expected reproducible=False"):
        ctx.join_ranks(reproducible=True)
    env.set_env(world_size=1, rank=0, local_rank=0)
    with make_ctx() as alone:
        assert len(train(alone, batches(1), reproducible=True, drop_last=False)) == 1


BEFORE_WITH: dict[str, Callable[[Any], object]] = {
    "backward": lambda ctx: ctx.backward(torch.ones((), requires_grad=True)),
    "backward_engine": lambda ctx: ctx.backward_engine,
    "grad_queue": lambda ctx: ctx.grad_queue,
    "keep": lambda ctx: ctx.keep(a_training_batch()),
    "set_lr": lambda ctx: ctx.set_lr(0.1),
    "resume_position": lambda ctx: ctx.resume_position,
    "write_report": lambda ctx: ctx.write_report(),
    "wait_servers_ready": lambda ctx: ctx.wait_servers_ready(),
    "embedding_worker": lambda ctx: ctx.embedding_worker,
    "configure_embedding_parameter_servers": lambda ctx: (
        ctx.configure_embedding_parameter_servers(EmbeddingConfig())
    ),
    "register_optimizer": lambda ctx: ctx.register_optimizer(SGD(lr=1.0).settings()),
    "get_embedding_size": lambda ctx: ctx.get_embedding_size(),
    "server_stats": lambda ctx: ctx.server_stats(),
    "clear_embeddings": lambda ctx: ctx.clear_embeddings(),
    "report": lambda ctx: ctx.report(auc=0.5),
    "top": lambda ctx: ctx.top(),
    "stats": lambda ctx: ctx.stats(),
    "get_embedding_from_data": lambda ctx: ctx.get_embedding_from_data(make_batch()),
    "get_embedding_from_bytes": lambda ctx: ctx.get_embedding_from_bytes(
        make_batch().to_bytes()
    ),
    "dump_checkpoint": lambda ctx: ctx.dump_checkpoint("here"),
    "load_checkpoint": lambda ctx: ctx.load_checkpoint("here"),
    "dump_embedding": lambda ctx: ctx.dump_embedding("here"),
    "load_embedding": lambda ctx: ctx.load_embedding("here"),
    "wait_for_dump_embedding": lambda ctx: ctx.wait_for_dump_embedding(),
    "wait_for_load_embedding": lambda ctx: ctx.wait_for_load_embedding(),
}


def a_training_batch() -> PersiaTrainingBatch:
    batch = PersiaTrainingBatch(NamedList(), NamedList(), None, 1)
    batch.ticket = InFlightBatch()
    return batch


@pytest.mark.parametrize("method", BEFORE_WITH)
def test_what_is_called_before_with_says_so(
    make_ctx: MakeCtx, monkeypatch: Monkey, method: str
) -> None:
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc://nowhere")
    for ctx in (make_ctx(embedding_worker=None), InferCtx(model=Net())):
        if not hasattr(type(ctx), method):
            continue
        with pytest.raises(ConfigError, match="with") as raised:
            BEFORE_WITH[method](ctx)
        assert "`with" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_no_batch_is_kept_before_with(make_ctx: MakeCtx) -> None:
    """A context with servers of its own can be asked much before, but not this."""
    with pytest.raises(ConfigError, match=r"TrainCtx\.keep must be called inside `with Train"):
        make_ctx().keep(a_training_batch())


def test_training_without_labels(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    ids = np.arange(4, dtype=np.uint64)
    data = [PersiaBatch([IDTypeFeatureWithSingleID("user", ids)], labels=[]) for _ in range(3)]
    with make_ctx(model=Net(num_features=1, num_dense=0)) as ctx:
        for batch in DataLoader(data, reproducible=True):
            output, labels = ctx.forward(batch)
            assert labels is None
            ctx.backward(output.square().mean())
    assert sorted(worker.of("update")) == [0, 1, 2]
    assert any(row.any() for row in worker.rows.values())


def test_the_defaults_of_adagrad_learn_a_two_tower() -> None:
    """A softmax over the batch; with the original's accumulator of 0.01 it stays at ln 64."""
    rng = np.random.default_rng(0)
    item_of = rng.permutation(500)

    def batch() -> PersiaBatch:
        users = rng.integers(0, 500, 64)
        pairs = ("user", users), ("item", item_of[users])
        return PersiaBatch([IDTypeFeatureWithSingleID(*pair) for pair in pairs], labels=[])

    model = torch.nn.Linear(1, 1)  # unused: the towers are the rows
    config = {"slots_config": {name: {"dim": 16} for name in ("user", "item")}}
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=config,
        mixed_precision=False,
    ) as ctx:
        losses = []
        for one in DataLoader((batch() for _ in range(150)), **LOCKSTEP):
            (users, items) = ctx.prepare_features(one)[1]
            loss = torch.nn.functional.cross_entropy(users @ items.T, torch.arange(64))
            losses.append(ctx.backward(loss).item())
    assert losses[0] == pytest.approx(math.log(64), abs=0.01)
    assert np.mean(losses[-10:]) < 1.0
