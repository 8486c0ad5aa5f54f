"""Checkpoints as a script sees them: stop after any batch, restart, continue bit for bit."""

from __future__ import annotations

import io
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore

from persia._files import catalog
from persia._files.parts import write_file
from persia._files.storage import LocalStorage
from persia._server import restore
from persia._training import checkpoint
from persia._training.backward import BackwardPipeline
from persia._training.progress import Position
from persia.ctx import InferCtx, TrainCtx, eval_ctx
from persia.ctx.checkpoints import TrainerState
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad
from persia.errors import CheckpointError, ConfigError
from tests.distributed.batches import DIM, SLOTS, make_batch
from tests.distributed.net import Net, Tensors, rows
from tests.distributed.net import make_ctx as make_stream_ctx
from tests.support.fixtures import Log, Monkey
from tests.support.processes import run

from .conftest import LOCKSTEP, MakeCtx, step
from .conftest import Net as SmallNet

NUM_BATCHES = 10


class Batches(IterableDataset):
    """Notes where it was begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_at: list[int] = []

    def __iter__(self) -> Iterator[PersiaBatch]:
        return self.iter_from(0)

    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        self.begun_at.append(first)
        for number in range(first, NUM_BATCHES):
            yield make_batch(number)


class OnlyForward(IterableDataset):
    """Cannot seek."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        for number in range(NUM_BATCHES):
            yield make_batch(number)


class Dropping(Net):
    """A model that draws random numbers."""

    def forward(self, dense: Tensors, embeddings: Tensors) -> torch.Tensor:
        noise = random.gauss(1, 0.1) + float(np.random.normal(1, 0.1))  # two at a time
        hidden = torch.relu(self.first(torch.cat([*dense, *embeddings], dim=1)))
        logits: torch.Tensor = self.second(torch.dropout(hidden, 0.5, True) * noise)
        return logits


class Scriptable(Net):  # TorchScript takes no starred lists
    def forward(self, dense: Tensors, embeddings: Tensors) -> torch.Tensor:
        logits: torch.Tensor = self.second(self.first(torch.cat(dense + embeddings, dim=1)))
        return logits


def make_ctx(optimizer: Optimizer | None = None, **options: Any) -> TrainCtx:
    torch.manual_seed(0)
    model = options.pop("model", None)
    model = Dropping() if model is None else model
    config = EmbeddingConfig(
        emb_initialization=(-0.5, 0.5), admit_probability=0.7, seed=3, schema=SLOTS
    )
    return TrainCtx(
        model=model,
        embedding_optimizer=optimizer or Adagrad(lr=0.1),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        **{"embedding_config": config, "global_config": {}, **options},
    )


def train(
    ctx: TrainCtx, dataset: Any, after: Callable[[int], object] = bool, **options: Any
) -> list[float]:
    losses = []
    loader = DataLoader(dataset, **{**LOCKSTEP, **options})
    for number, batch in enumerate(loader, start=1):
        losses.append(step(ctx, batch).item())
        after(number)
    return losses


def dump_at(ctx: TrainCtx, last: int, url: Any, blocking: bool = True) -> Callable[[int], None]:
    """Return what makes a checkpoint behind that batch."""

    def dump(number: int) -> None:
        if number == last:
            ctx.dump_checkpoint(url, blocking=blocking)

    return dump


def dumped_state(url: Any, optimizer: Optimizer | None = None) -> tuple[Any, ...]:
    """Train one pass, make a checkpoint behind it, and return the state."""
    with make_ctx(optimizer) as ctx:
        train(ctx, Batches())
        ctx.dump_checkpoint(url)
        return state(ctx)


def state(ctx: TrainCtx) -> tuple[Any, ...]:
    dense = [parameter.tolist() for parameter in ctx.model.parameters()]
    moments = [
        value.tolist()
        for slots in ctx.dense_optimizer.state_dict()["state"].values()
        for value in slots.values()
    ]
    return rows(ctx), dense, moments, ctx.update_times


def seed() -> None:
    random.seed(1)
    np.random.seed(1)


@pytest.fixture(scope="module")
def whole() -> tuple[list[float], tuple[Any, ...]]:
    """A run that never stopped."""
    seed()
    with make_ctx() as ctx:
        losses = train(ctx, Batches())
        return losses, state(ctx)


Whole = tuple[list[float], tuple[Any, ...]]


@pytest.mark.parametrize(
    ("stop", "blocking", "seeks", "url"),
    [
        *[(stop, True, True, "") for stop in (1, 6, NUM_BATCHES)],
        *[(stop, False, True, "") for stop in (1, 6, NUM_BATCHES)],
        (4, True, False, ""),
        (5, True, True, "memory://tests/w20"),  # the original left out the dense side there
    ],
)
def test_w20_a_stopped_run_goes_on(
    whole: Whole, tmp_path: Path, stop: int, blocking: bool, seeks: bool, url: str
) -> None:
    place = url or tmp_path
    dataset = Batches()
    data = dataset if seeks else OnlyForward()
    seed()
    with make_ctx() as ctx:
        assert train(ctx, data, dump_at(ctx, stop, place, blocking)) == whole[0]
    torch.manual_seed(9)
    other, servers = Dropping(), {"embedded_config": {"num_servers": 3}}
    with make_ctx(model=other, global_config=servers) as ctx:
        ctx.load_checkpoint(place)
        assert ctx.resume_position == Position(0, stop)
        assert train(ctx, data) == whole[0][stop:]
        assert state(ctx) == whole[1]
    assert dataset.begun_at == ([0, stop] if seeks else [])


def with_a_group() -> EmbeddingConfig:
    settings = {**SLOTS, "group_settings": {"user": {"optimizer": {}}}}
    return EmbeddingConfig(emb_initialization=(-0.5, 0.5), seed=3, schema=settings)


@pytest.mark.parametrize("is_entered", [True, False])
def test_rates_of_embeddings_go_on(tmp_path: Path, is_entered: bool) -> None:
    """The script that resumes sets none: the next steps are those of the run that went on."""
    config = with_a_group()
    with make_ctx(model=(model := Net()), embedding_config=config) as ctx:
        ctx.set_lr(0.5)
        ctx.set_lr(0.25, "user")

        def dump(number: int) -> None:
            if number == 3:
                ctx.dump_checkpoint(tmp_path)

        losses = train(ctx, Batches(), dump)
        want = rows(ctx)
    assert model is ctx.model
    ctx = make_ctx(model=Net(), embedding_config=config)
    if not is_entered:
        ctx.load_checkpoint(tmp_path)
        ctx.dump_checkpoint(tmp_path)  # it has them already
        ctx.load_checkpoint(tmp_path)
    with ctx:
        if is_entered:
            ctx.load_checkpoint(tmp_path)
        rates = engine_of(ctx).learning_rates
        assert sorted(rates.state(), key=str) == [("user", 0.25), (None, 0.5)]
        assert train(ctx, Batches()) == losses[3:]
        assert rows(ctx) == want
    # As ever, they end with the block.
    with ctx:
        assert engine_of(ctx).learning_rates.state() == []


def test_loading_restores_the_optimizers_own_rate_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_ctx() as ctx:
        losses = train(ctx, Batches(), dump_at(ctx, 3, tmp_path))
    with make_ctx() as ctx:
        ctx.set_lr(0.5)
        ctx.load_checkpoint(tmp_path)
        assert train(ctx, Batches()) == losses[3:]
    assert "the learning rate of all groups is the optimizer's again" in caplog.text


def engine_of(ctx: TrainCtx) -> BackwardPipeline:
    engine = ctx.backward_engine
    assert engine is not None
    return engine


def test_a_rate_of_a_group_that_is_gone_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_ctx(embedding_config=with_a_group()) as ctx:
        ctx.set_lr(0.25, "user")
        train(ctx, Batches())
        ctx.dump_checkpoint(tmp_path)
    with make_ctx() as ctx:
        ctx.load_checkpoint(tmp_path)
        assert engine_of(ctx).learning_rates.state() == []
    assert "the learning rate 0.25 of user is not restored: " in caplog.text


def test_a_checkpoint_without_rates_is_loaded(tmp_path: Path, monkeypatch: Monkey) -> None:
    kept = TrainerState.of_all

    def of_before(*given: Any) -> dict[str, Any]:
        state = kept(*given)
        del state["rates"]
        return state

    with monkeypatch.context() as patch, make_ctx() as ctx:
        patch.setattr(TrainerState, "of_all", of_before)
        ctx.set_lr(0.25)
        train(ctx, Batches())
        ctx.dump_checkpoint(tmp_path)
    with make_ctx() as ctx:
        ctx.set_lr(0.125)
        ctx.load_checkpoint(tmp_path)
        assert ctx.update_times == NUM_BATCHES
        assert engine_of(ctx).learning_rates.state() == [(None, 0.125)]


@pytest.mark.parametrize(("first", "stop"), [(0, NUM_BATCHES), (1, 3)])
def test_passes_are_counted_over_a_stop(tmp_path: Path, first: int, stop: int) -> None:
    """Also where a checkpoint was made behind the end of the data."""
    seed()
    with make_ctx() as ctx:
        for _ in range(first):
            train(ctx, Batches())
        losses = train(ctx, Batches(), dump_at(ctx, stop, tmp_path)) + train(ctx, Batches())
    dataset = Batches()
    with make_ctx() as ctx:
        ctx.load_checkpoint(tmp_path)
        assert ctx.resume_position == Position(first, stop)
        found = train(ctx, dataset)
        assert ctx.resume_position == Position(first + 1)
        assert found + train(ctx, dataset) == losses[stop:]
    assert dataset.begun_at == [stop, 0]


def test_other_data_is_trained_from_its_beginning(tmp_path: Path) -> None:
    before = dumped_state(tmp_path)
    dataset = Batches()
    with make_ctx() as ctx:
        ctx.load_checkpoint(tmp_path, features=SLOTS["slots_config"])
        assert state(ctx)[:3] == before[:3]  # rows, model, optimizer; steps begin at 0
        assert len(train(ctx, dataset)) == NUM_BATCHES
    assert dataset.begun_at == [0]


def test_nothing_is_trained_twice_or_left_out_without_an_order(tmp_path: Path) -> None:
    seen: list[float] = []

    def run(ctx: TrainCtx, stop: int | None) -> None:
        free = DataLoader(OnlyForward(), embedding_staleness=3)
        for number, batch in enumerate(free, start=1):
            seen.append(float(batch.non_id_type_tensors[0][0, 0]))
            step(ctx, batch)
            if number == stop:
                ctx.dump_checkpoint(tmp_path)
                return

    with make_ctx() as ctx:
        run(ctx, 4)
    with make_ctx() as ctx:
        ctx.load_checkpoint(tmp_path)
        run(ctx, None)
    assert len(seen) == NUM_BATCHES
    assert len(set(seen)) == NUM_BATCHES


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_dense_files_are_there_under_their_names_too(tmp_path: Path) -> None:
    model = Scriptable()
    with make_ctx(model=model) as ctx:
        train(ctx, Batches())
        ctx.dump_checkpoint(tmp_path, with_jit_model=True, dense_model_filename="m.pt")
        ctx.load_torch_state_dict(model, tmp_path / "m.pt")
        jit = torch.jit.load(tmp_path / "jit_dense.pt")  # type: ignore[no-untyped-call]
        batch = ctx.get_embedding_from_data(make_batch(1))
        dense, embeddings, _ = ctx.prepare_features(batch)
        assert torch.equal(jit(dense, embeddings), model(dense, embeddings))
        ctx.model = Dropping()
        with pytest.raises(ConfigError, match="Dropping cannot be scripted"):
            ctx.dump_checkpoint(tmp_path, with_jit_model=True)
        with pytest.raises(CheckpointError, match=r"dense\.pt .*m\.pt"):
            ctx.load_checkpoint(tmp_path)
    found = catalog.load(LocalStorage(tmp_path)).files
    assert {"m.pt", "opt.pt", "jit_dense.pt"} <= found.keys()


def test_embeddings_alone(tmp_path: Path) -> None:
    with make_ctx() as ctx:
        train(ctx, Batches())
        ctx.dump_embedding(tmp_path, blocking=False)
        ctx.wait_for_dump_embedding()
        expected = rows(ctx)
        ctx.clear_embeddings()
        assert rows(ctx) != expected
        ctx.load_embedding(tmp_path, blocking=False)
        ctx.wait_for_load_embedding()
        assert rows(ctx) == expected
        assert ctx.resume_position.passes == 1  # of this run, which goes on


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("how", ["load_embedding", "load_checkpoint"])
def test_what_servers_wrote_is_loaded(tmp_path: Path, how: str, num_servers: int) -> None:
    server = {"enable_incremental_update": True, "incremental_dir": str(tmp_path)}
    config = {
        "embedding_parameter_server_config": server,
        "embedded_config": {"num_servers": num_servers},
    }
    with make_ctx(global_config=config) as ctx:
        train(ctx, Batches())
        expected = rows(ctx)
    assert len(list(tmp_path.iterdir())) == num_servers
    with make_ctx() as ctx:
        # Of the model there is nothing.
        (ctx.load_embedding if how == "load_embedding" else ctx.load_checkpoint)(tmp_path)
        assert rows(ctx) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("keep_last", value) for value in (1.5, "3", 0)],
        *[("dst_dir", value) for value in ("", None)],
        *[("src_dir", value) for value in (3, b"folder")],
        *[("features", value) for value in ("item", [3], [])],
    ],
)
def test_w50_bad_arguments_leave_nothing(
    tmp_path: Path, name: str, value: Any, monkeypatch: Monkey
) -> None:
    monkeypatch.chdir(tmp_path)
    is_load = name in ("src_dir", "features")
    arguments = {"src_dir" if is_load else "dst_dir": tmp_path, name: value}
    with make_ctx() as ctx:
        call = ctx.load_checkpoint if is_load else ctx.dump_checkpoint
        with pytest.raises(ConfigError, match=f"{name}: expected"):
            call(**arguments)
    assert not list(tmp_path.iterdir())


def test_evaluation_dumps_and_loads_what_it_has(tmp_path: Path) -> None:
    with make_ctx() as ctx:
        train(ctx, Batches())
        with eval_ctx(model=ctx.model) as evaluation:
            evaluation.dump_checkpoint(tmp_path)
            before = rows(ctx)
            ctx.clear_embeddings()
            evaluation.load_checkpoint(tmp_path)
        assert rows(ctx) == before


def test_jobs_that_dump_in_turn_do_not_remove_each_others_checkpoints(tmp_path: Path) -> None:
    with make_ctx() as other:
        with make_ctx() as ctx:
            ctx.dump_checkpoint(tmp_path)
            kept = catalog.ids(LocalStorage(tmp_path))
            with eval_ctx(model=ctx.model) as evaluation:  # is part of the job
                evaluation.dump_checkpoint(tmp_path, keep_last=2)
            assert catalog.ids(LocalStorage(tmp_path))[0] == kept[0]
        with make_ctx() as ctx:  # that one has ended
            ctx.dump_checkpoint(tmp_path, blocking=False)
            ctx.wait_for_dump_embedding()
            kept = catalog.ids(LocalStorage(tmp_path))
            with pytest.raises(CheckpointError, match="is writing here"):
                other.dump_checkpoint(tmp_path)
            assert catalog.ids(LocalStorage(tmp_path)) == kept
        other.dump_checkpoint(tmp_path)
        assert catalog.ids(LocalStorage(tmp_path)) != kept


def test_w43_an_infer_ctx_is_entered_and_loads(tmp_path: Path) -> None:
    expected = dumped_state(tmp_path)[0]
    with InferCtx(embedding_config=EmbeddingConfig(schema=SLOTS)) as infer:
        infer.load_embedding(tmp_path)
        infer.wait_for_serving()
        assert rows(infer) == expected


def test_a_model_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    dumped_state(tmp_path)

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(11, 9)

    with make_ctx(model=Other()) as ctx:
        before = state(ctx)
        with pytest.raises(CheckpointError, match=r"first\.(bias|weight) is"):
            ctx.load_checkpoint(tmp_path)
        assert state(ctx) == before


# What a file may hold instead, by its name.
NO_STATES: list[tuple[str, Callable[[Any], object]]] = [
    ("trainer.pt", lambda state: state.pop("ranks")),
    ("trainer.pt", lambda state: state.update(step=-1)),
    ("trainer.pt", lambda state: state.update(stream={"kind": "stream"})),
    ("trainer.pt", lambda state: state.update(rates=[["user", "fast"]])),
    ("trainer.pt", lambda state: state["ranks"][0]["random"].update(torch=torch.ones(3))),
    ("trainer.pt", lambda state: state["ranks"][0]["random"].update(numpy=[])),
    ("dense.pt", lambda state: state.update({3: torch.ones(3)})),
    ("opt.pt", lambda state: state.update(param_groups=[{}])),
]


def test_a_state_that_is_none_changes_nothing(tmp_path: Path) -> None:
    with make_ctx() as ctx:
        train(ctx, Batches())
        ctx.dump_checkpoint(tmp_path)
        storage = LocalStorage(tmp_path)
        manifest = catalog.load(storage)
        train(ctx, Batches())
        before = state(ctx)
        for number, (name, change) in enumerate(NO_STATES):
            content = torch.load(tmp_path / manifest.files[name].path, weights_only=True)
            change(content)
            path = f"{manifest.id}/{number}.pt"
            file = write_file(storage, path, [checkpoint.serialized(content)])
            files = {**manifest.files, name: file}
            catalog.publish(storage, replace(manifest, files=files))
            with pytest.raises(CheckpointError, match=name):
                ctx.load_checkpoint(tmp_path)
            assert state(ctx) == before


def test_another_dim_is_named_before_the_dense_net(tmp_path: Path) -> None:
    dumped_state(tmp_path)
    slots = {name: {"dim": 2 * DIM} for name in SLOTS["slots_config"]}
    config = EmbeddingConfig(seed=3, schema={"slots_config": slots})
    with (
        make_ctx(model=torch.nn.Linear(2, 1), embedding_config=config) as ctx,
        pytest.raises(CheckpointError, match=r"dim of feature group .* here"),
    ):
        ctx.load_checkpoint(tmp_path)


def test_nothing_is_loaded_from_nowhere_or_inside_a_pass(tmp_path: Path) -> None:
    with make_ctx() as ctx:
        with pytest.raises(CheckpointError, match="no checkpoint"):
            ctx.load_checkpoint(tmp_path / "nothing")
        for batch in DataLoader(Batches(), **LOCKSTEP):
            step(ctx, batch)
            with pytest.raises(ConfigError, match="between two passes"):
                ctx.load_checkpoint(tmp_path)
            break


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (Adam(lr=0.1), SGD(lr=0.1), "trained by adam and are by sgd"),
        (
            Adagrad(lr=0.1),
            RowwiseAdagrad(lr=0.1),
            f"trained by adagrad and are by adagrad, with {DIM} words of state and 1",
        ),
    ],
)
def test_another_embedding_optimizer_starts_over(
    tmp_path: Path, caplog: Log, before: Optimizer, after: Optimizer, change: str
) -> None:
    expected = dumped_state(tmp_path, before)[0]
    with make_ctx(after) as ctx:
        ctx.load_checkpoint(tmp_path)
        assert rows(ctx) == expected
        train(ctx, Batches())
    (line,) = [one for one in caplog.messages if change in one]  # one for all groups
    assert "'user', 'tags'" in line
    assert "the state of their rows starts from its initial values" in line


def test_a_failed_dump_behind_is_raised_at_the_exit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    ctx = make_ctx()
    ctx.__enter__()
    train(ctx, Batches())
    ctx.dump_checkpoint(tmp_path / "file", blocking=False)
    with pytest.raises(CheckpointError, match="file"):
        ctx.__exit__(None, None, None)


DIES = """
import os, sys
from persia._server import snapshot
from tests.training.test_checkpoint import Batches, make_ctx, seed, train

def after(number):
    if number == 6:
        setattr(snapshot.PartWriter, sys.argv[2], lambda *_: os.kill(os.getpid(), 9))
    if number in (3, 6):
        ctx.dump_checkpoint(sys.argv[1])

seed()
with make_ctx() as ctx:
    train(ctx, Batches(), after)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["add", "finish"])
def test_a_crash_leaves_the_dump_before(whole: Whole, tmp_path: Path, method: str) -> None:
    ran = run("-c", DIES, tmp_path, method, timeout_s=240)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    with make_ctx() as ctx:
        ctx.load_checkpoint(tmp_path)
        assert ctx.resume_position.batches == 3
        assert train(ctx, Batches()) == whole[0][3:]
        ctx.dump_checkpoint(tmp_path)  # what the crash has left is ignored
        ctx.load_checkpoint(tmp_path)
        assert state(ctx) == whole[1]


def test_going_back_in_one_context_trains_the_same_again(whole: Whole, tmp_path: Path) -> None:
    seed()
    with make_ctx() as ctx:
        assert train(ctx, Batches(), dump_at(ctx, 3, tmp_path)) == whole[0]
        ctx.load_checkpoint(tmp_path)
        assert train(ctx, Batches(), dump_at(ctx, 3, tmp_path)) == whole[0][3:]
        ctx.load_checkpoint(tmp_path)  # that of a run that was resumed itself
        assert ctx.resume_position.batches == 6
        assert train(ctx, Batches()) == whole[0][6:]
        assert state(ctx) == whole[1]


def test_no_pass_begins_on_half_of_it(tmp_path: Path, monkeypatch: Monkey) -> None:
    def fails(*arguments: Any) -> Any:
        raise OSError("gone")

    with make_ctx() as ctx:
        train(ctx, Batches())
        ctx.dump_checkpoint(tmp_path)
        monkeypatch.setattr(restore, "rows_of", fails)
        ctx.load_checkpoint(tmp_path, blocking=False)
        with pytest.raises(CheckpointError, match="load again before you train on"):
            train(ctx, Batches())
        ctx.load_checkpoint(tmp_path, blocking=False)
        with pytest.raises(CheckpointError, match="load again before you train on"):
            ctx.dump_checkpoint(tmp_path)


# --- over a stream: the data-loader sends all of it again ---------------------------------

COUNT = 8
SENDS = f"""
from persia.ctx import DataCtx
from tests.distributed.batches import make_batch

with DataCtx() as ctx:
    first = 0
    for number in range(first, {COUNT}):
        ctx.send_data(make_batch(number))
    print("began at", first, "dropped", ctx.stats().get("dropped", 0), flush=True)
"""
SEEKS = SENDS.replace("first = 0", "first = ctx.resume_position; ctx.seek(first)")


def train_stream(ctx: TrainCtx, last: int = 0, url: Path | None = None) -> list[float]:
    after = dump_at(ctx, last, url)
    return train(ctx, StreamingDataset(4), after, timeout_ms=30_000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(SENDS, "began at 0 dropped 3", id="drops"),
        pytest.param(SEEKS, "began at 3 dropped 3", id="seeks", marks=pytest.mark.slow),
    ],
)
def test_a_stream_is_continued_bit_for_bit(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    script.write_text(SENDS)
    with make_stream_ctx() as ctx:
        whole = train_stream(ctx, 3, tmp_path / "ckpt")
        expected = rows(ctx), train_stream(ctx)
    script.write_text(text)
    with make_stream_ctx() as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        assert ctx.resume_position.batches == 3
        assert train_stream(ctx) == whole[3:]
        # The next pass is a whole one.
        assert (rows(ctx), train_stream(ctx)) == expected
    assert said in capfd.readouterr().out


@pytest.mark.slow
def test_another_number_of_data_loaders_is_refused(script: Path, tmp_path: Path) -> None:
    script.write_text(SENDS)
    with make_stream_ctx() as ctx:
        train_stream(ctx, 3, tmp_path / "ckpt")
    of_two = "from persia import env\nenv.set_env(replica_size=2, replica_index=0)\n"
    script.write_text(of_two + SENDS)
    with make_stream_ctx() as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        with pytest.raises(ConfigError, match="made with 1 data-loaders, now there are 2"):
            train_stream(ctx)


# --- files of the dense side --------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def plain() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def test_model_and_optimizer_come_back(make_ctx: MakeCtx, tmp_path: Path) -> None:
    ctx = make_ctx()  # it need not be entered
    model, other = plain(), plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for one in (other, model):  # a file can be written again
        ctx.dump_torch_state_dict(one, tmp_path / "new", "dense.pt")
    ctx.dump_torch_state_dict(optimizer, str(tmp_path / "new"), "opt.pt")
    assert not same(model, other)
    ctx.load_torch_state_dict(other, tmp_path / "new" / "dense.pt", map_location="cpu")
    assert same(model, other)
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    ctx.load_torch_state_dict(fresh, str(tmp_path / "new" / "opt.pt"))
    assert fresh.param_groups[0]["lr"] == 0.5
    # written aside and renamed: nothing else is left
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["dense.pt", "opt.pt"]


def test_w67_wrapper_leaves_no_prefix(ctx: TrainCtx, tmp_path: Path, group: None) -> None:
    model, other = plain(), plain()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ctx.dump_torch_state_dict(wrapped, tmp_path, "dense.pt")
    state = torch.load(tmp_path / "dense.pt", weights_only=True)
    assert sorted(state) == ["bias", "weight"]
    ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
    assert same(model, other)
    # into a wrapped one, and from a file that has the prefix
    third = torch.nn.parallel.DistributedDataParallel(plain())
    ctx.load_torch_state_dict(third, tmp_path / "dense.pt")
    assert same(third, other)
    torch.save(wrapped.state_dict(), tmp_path / "prefixed.pt")
    fourth = plain()
    ctx.load_torch_state_dict(fourth, tmp_path / "prefixed.pt")
    assert same(fourth, model)


class Normed(torch.nn.Module):
    """With a buffer, and a version of a module in its state."""

    def __init__(self, *, compiles_part: bool = False) -> None:
        super().__init__()
        layer = torch.nn.Linear(2, 1)
        self.layer = compiled(layer) if compiles_part else layer
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.layer(x))
        return output


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    made: Any = torch.compile(model, backend="eager")
    assert isinstance(made, torch.nn.Module)
    return made


COMPILED: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": Normed,
    "whole": lambda: compiled(Normed()),
    "part": lambda: Normed(compiles_part=True),
    "both": lambda: compiled(Normed(compiles_part=True)),
    "around a wrapper": lambda: compiled(torch.nn.DataParallel(Normed())),
    "in a wrapper": lambda: torch.nn.DataParallel(compiled(Normed())),
}


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("is_old", [False, True])
def test_a_compiled_model_has_plain_names_and_loads_both_ways(
    ctx: TrainCtx, tmp_path: Path, how: str, is_old: bool
) -> None:
    model = COMPILED[how]()
    if is_old:  # as files were written before
        torch.save(model.state_dict(), tmp_path / "dense.pt")
    else:
        ctx.dump_torch_state_dict(model, tmp_path, "dense.pt")
        state = torch.load(tmp_path / "dense.pt", weights_only=True)
        assert list(state) == list(Normed().state_dict())
        assert state._metadata.keys() == Normed().state_dict()._metadata.keys()  # type: ignore[attr-defined]
        state = torch.load(io.BytesIO(checkpoint.state_of(model)), weights_only=True)
        Normed().load_state_dict(state)
    for make in COMPILED.values():
        other = make()
        assert not same(model, other)
        ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
        assert same(model, other)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_is_scripted(ctx: TrainCtx, tmp_path: Path, how: str) -> None:
    model = COMPILED[how]().eval()
    names = list(model.state_dict())
    ctx.dump_torch_state_dict(model, tmp_path, "jit.pt", is_jit=True)
    scripted = torch.jit.load(str(tmp_path / "jit.pt"))  # type: ignore[no-untyped-call]
    x = torch.randn(3, 2)
    assert torch.equal(scripted(x), model(x))
    assert list(model.state_dict()) == names  # it is as it was


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_cannot_be_scripted_is_one_error(ctx: TrainCtx, tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        function: Any

        def forward(self, x: Callable[[], int]) -> int:
            return x()

    with pytest.raises(ConfigError, match="is_jit=True: Odd cannot be scripted"):
        ctx.dump_torch_state_dict(compiled(Odd()), tmp_path, "jit.pt", is_jit=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_checkpoint_of_a_compiled_model_is_one_of_its_plain_model(tmp_path: Path) -> None:
    with make_ctx(model=compiled(Scriptable())) as ctx:
        train(ctx, [make_batch(0)])
        ctx.dump_checkpoint(tmp_path, with_jit_model=True)
        trained = ctx.model
    state = checkpoint.Checkpoint(str(tmp_path)).state("dense.pt")
    assert list(state) == list(Scriptable().state_dict())
    with make_ctx(model=Scriptable()) as other:
        other.load_checkpoint(tmp_path)
        assert same(other.model, trained)


def test_model_whose_only_child_is_named_module(ctx: TrainCtx, tmp_path: Path) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 1)

    model, other = Holder(), Holder()
    ctx.dump_torch_state_dict(model, tmp_path, "dense.pt")
    ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
    assert same(model, other)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_w67_script_of_a_wrapper(ctx: TrainCtx, tmp_path: Path, group: None) -> None:
    model = plain()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ctx.dump_torch_state_dict(wrapped, tmp_path, "jit.pt", is_jit=True)
    scripted = torch.jit.load(str(tmp_path / "jit.pt"))  # type: ignore[no-untyped-call]
    x = torch.ones(3, 2)
    assert torch.equal(scripted(x), model(x))


def test_w71_a_file_cannot_run_code(ctx: TrainCtx, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "touched",))  # type: ignore[return-value]

    path = tmp_path / "evil.pt"
    for write in (
        lambda: path.write_bytes(pickle.dumps(Evil())),
        lambda: torch.save(Evil(), path),
    ):
        write()
        with pytest.raises(CheckpointError, match=r"evil\.pt cannot be read"):
            ctx.load_torch_state_dict(plain(), path)
    assert not (tmp_path / "touched").exists()


def test_file_that_is_missing_or_does_not_fit(ctx: TrainCtx, tmp_path: Path) -> None:
    ctx.dump_torch_state_dict(plain(), tmp_path, "dense.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    ctx.dump_torch_state_dict(ctx.dense_optimizer, tmp_path, "opt.pt")
    with pytest.raises(ConfigError, match="is_jit=True needs"):
        ctx.dump_torch_state_dict(ctx.dense_optimizer, tmp_path, "x.pt", is_jit=True)
    for name, says in (
        ("none.pt", r"none\.pt, found none"),
        ("dense.pt", "does not fit this Net"),
        ("tensor.pt", r"expected a state dict in .*, got Tensor"),
        ("opt.pt", "does not fit this Net"),
    ):
        with pytest.raises(CheckpointError, match=says):
            ctx.load_torch_state_dict(SmallNet(), tmp_path / name)


def test_a_failed_write_keeps_the_old_file(
    ctx: TrainCtx, tmp_path: Path, monkeypatch: Monkey
) -> None:
    model, other = plain(), plain()
    ctx.dump_torch_state_dict(model, tmp_path, "dense.pt")

    def no_space(state: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(CheckpointError, match="No space left"):
        ctx.dump_torch_state_dict(other, tmp_path, "dense.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["dense.pt"]
    with pytest.raises(CheckpointError, match="cannot be written"):
        ctx.dump_torch_state_dict(model, tmp_path / "dense.pt", "dense.pt")
    ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
    assert same(model, other)
