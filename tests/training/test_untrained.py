"""Passes that do nothing are errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from persia import env
from persia._training.forward import ENDED, HAS_BATCH
from persia._training.untrained import FEW, MANY
from persia.ctx import InferCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import DataError
from tests.support.fixtures import Log, Monkey

from .conftest import MakeCtx, loss_of, step
from .fakes import SpyRanks, SpyWorker, make_batch


class Clicks(IterableDataset):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.read = 0

    def __iter__(self) -> Iterator[PersiaBatch]:
        for number in range(self.count):
            self.read += 1
            yield make_batch(number)


# --- no batch ---------------------------------------------------------------------------------

EMPTY = r"the dataset \(Clicks\) yielded no batch in this pass: check .*allow_untrained=True"


@pytest.mark.parametrize("kind", ["train", "eval", "infer"])
def test_a_pass_without_a_batch(ctx: TrainCtx, kind: str) -> None:
    inner: Any = {"train": torch.enable_grad, "eval": eval_ctx, "infer": InferCtx}[kind]
    with inner():
        with pytest.raises(DataError, match=EMPTY):
            list(DataLoader(Clicks(0)))
        assert list(DataLoader(Clicks(0), allow_untrained=True)) == []


def test_a_generator_is_used_up(ctx: TrainCtx) -> None:
    loader = DataLoader(make_batch(number) for number in range(3))
    for batch in loader:
        step(ctx, batch)
    said = r"dataset \(generator\), an iterator, which one pass uses up, yielded no batch"
    with pytest.raises(DataError, match=said):
        list(loader)


class OtherRanks(SpyRanks):
    """Ranks of which some have no batch."""

    def __init__(self, empty: tuple[int, ...]) -> None:
        super().__init__(3)
        self.empty = empty

    def agree(self, code: int) -> list[int]:
        codes = super().agree(code)
        return [ENDED if rank in self.empty else one for rank, one in enumerate(codes)]


@pytest.mark.parametrize(("empty", "count"), [((1, 2), 5), ((0, 1, 2), 0)])
def test_the_ranks_without_a_batch_are_named(
    ctx: TrainCtx, empty: tuple[int, ...], count: int
) -> None:
    ctx._ranks = OtherRanks(empty)
    names = ", ".join(map(str, empty))
    with pytest.raises(DataError, match=f"rank {names} of 3 had no batch .* the shard of each"):
        list(DataLoader(Clicks(count)))
    assert list(DataLoader(Clicks(count), allow_untrained=True)) == []


def test_a_rank_without_a_batch_names_itself(ctx: TrainCtx, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(env, "get_world_size", lambda: 3)
    monkeypatch.setattr(env, "get_rank", lambda: 1)
    with pytest.raises(DataError, match=f"rank 1: {EMPTY}"):
        list(DataLoader(Clicks(0)))


def test_ranks_that_end_early_had_batches(ctx: TrainCtx, caplog: Log) -> None:
    class Shorter(SpyRanks):
        def agree(self, code: int) -> list[int]:
            self.flags.append(code == HAS_BATCH)
            return [code, code if len(self.flags) < 3 else ENDED]

    ctx._ranks = Shorter()
    assert len([step(ctx, batch) for batch in DataLoader(Clicks(5))]) == 2
    # What is dropped for the others' sake is said, once.
    for _ in range(2):
        ctx._ranks = Shorter()
        list(DataLoader(Clicks(5), allow_untrained=True))
    said = "rank 1 of 2 has no batch behind round 2: this pass ends for all ranks"
    assert caplog.text.count(said) == caplog.text.count("has no batch") == 1
    assert "drop_last=False" in caplog.text


def test_a_script_that_sends_no_batch_is_named(ctx: TrainCtx, script: Path) -> None:
    """The embedded data-loader, which ended well."""
    script.write_text("from persia.ctx import DataCtx\nwith DataCtx():\n    pass\n")
    with pytest.raises(DataError, match="data-loader 0 of 1 sent no batch in this pass"):
        list(DataLoader(StreamingDataset(4), timeout_ms=30_000))


# --- batches without a step -------------------------------------------------------------------


def evaluate(ctx: TrainCtx, batch: Any) -> None:
    ctx.forward(batch)


def pooled(ctx: TrainCtx, batch: Any) -> tuple[Any, Any, Any]:
    found: tuple[Any, Any, Any] = ctx.prepare_features(batch)
    return found


def detached(ctx: TrainCtx, batch: Any) -> None:
    dense, embeddings, labels = pooled(ctx, batch)
    ctx.backward(loss_of(ctx.model(dense, [one.detach() for one in embeddings]), labels))


def without_grad(ctx: TrainCtx, batch: Any) -> None:
    dense, embeddings, labels = pooled(ctx, batch)
    with torch.no_grad():
        summed = [embedding * 2 for embedding in embeddings]
    ctx.backward(loss_of(ctx.model(dense, summed), labels))


def through_numpy(ctx: TrainCtx, batch: Any) -> None:
    dense, embeddings, labels = pooled(ctx, batch)
    copies = [torch.from_numpy(embedding.detach().numpy()) for embedding in embeddings]
    ctx.backward(loss_of(ctx.model(dense, copies), labels))


def some(ctx: TrainCtx, batch: Any) -> None:
    """One feature of two is reached, in one batch of two."""
    dense, (user, tags), labels = pooled(ctx, batch)
    if batch.batch_id % 2:
        user = user.detach()
    ctx.backward(loss_of(ctx.model(dense, [user, tags.detach()]), labels))


NO_BACKWARD = r"none of {} batches had a backward, .*call ctx.backward\(loss\) .* eval_ctx"
UNREACHED = r"{} batches had a backward and none of them reached .*tensors of user, tags as "


@pytest.mark.parametrize(
    ("loop", "error"),
    [
        (evaluate, NO_BACKWARD),
        (detached, UNREACHED),
        (without_grad, UNREACHED),
        (through_numpy, UNREACHED),
    ],
)
@pytest.mark.parametrize("count", [1, 3 * MANY])
def test_a_pass_that_trains_no_row(
    ctx: TrainCtx, loop: Callable[[TrainCtx, Any], None], error: str, count: int
) -> None:
    seen: list[int] = []

    def run(**options: Any) -> None:
        seen.clear()
        for batch in DataLoader(Clicks(count), **options):
            loop(ctx, batch)
            seen.append(batch.batch_id)

    with pytest.raises(DataError, match=error.format(min(count, MANY))):
        run()
    assert len(seen) == min(count, MANY)  # not at the end of a long epoch
    run(allow_untrained=True)
    assert len(seen) == count
    # The context is as it was: the next pass trains.
    for batch in DataLoader(Clicks(2)):
        step(ctx, batch)


ZEROS = r"zero in {} steps, .* Uniform\(-0.01, 0.01\).*allow_untrained=True"


def without_effect(ctx: TrainCtx, batch: Any) -> None:
    """All gradients are there, and zero."""
    output, labels = ctx.forward(batch)
    ctx.backward(0 * loss_of(output, labels))


def rest(ctx: TrainCtx, count: int, **options: Any) -> None:
    for batch in DataLoader(Clicks(count), **options):
        without_effect(ctx, batch)


@pytest.mark.parametrize(("count", "seen"), [(FEW, FEW), (3 * MANY, MANY)])
def test_gradients_that_are_all_zero(ctx: TrainCtx, count: int, seen: int) -> None:
    with pytest.raises(DataError, match=ZEROS.format(seen)):
        rest(ctx, count)
    assert ctx.update_times == seen
    rest(ctx, count, allow_untrained=True)


def test_zeros_of_short_passes_add_up(ctx: TrainCtx) -> None:
    for _ in range(3):
        rest(ctx, FEW // 3)
    with pytest.raises(DataError, match=ZEROS.format(FEW + 2)):
        rest(ctx, FEW // 3)


def test_rows_that_have_moved_may_rest(ctx: TrainCtx) -> None:
    """As those of a hinge loss without errors do."""
    for batch in DataLoader(Clicks(1)):
        step(ctx, batch)
    rest(ctx, 2 * MANY)


def test_a_last_layer_that_begins_as_zeros_is_no_error(ctx: TrainCtx) -> None:
    """Its first step has no gradient of embeddings, of however many batches it is made."""
    torch.nn.init.zeros_(ctx.model.layer.weight)
    for batch in DataLoader(Clicks(2 * FEW), embedding_staleness=2 * FEW):
        ctx.backward(loss_of(*ctx.forward(batch)), step=batch.batch_id == 2 * FEW - 1)
    for batch in DataLoader(Clicks(FEW)):
        step(ctx, batch)
    assert ctx.stats()["abandoned"] == 0


@pytest.mark.parametrize("rate", ["dense", "embeddings"])
def test_a_rate_of_zero_is_no_error(make_ctx: MakeCtx, rate: str) -> None:
    given: dict[str, Any] = {"embedding_optimizer": SGD(lr=0)} if rate == "embeddings" else {}
    with make_ctx(**given) as ctx:
        if rate == "dense":
            ctx.dense_optimizer.param_groups[0]["lr"] = 0.0
        for batch in DataLoader(Clicks(MANY + 2)):
            step(ctx, batch)


@pytest.mark.parametrize("loop", [some, step])
def test_a_pass_that_trains_some_rows_is_one(
    ctx: TrainCtx, loop: Callable[[TrainCtx, Any], None]
) -> None:
    for batch in DataLoader(Clicks(MANY + 2)):
        loop(ctx, batch)


def test_kept_batches_are_not_untrained_yet(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        losses = []
        for batch in DataLoader(Clicks(MANY + 5), embedding_staleness=None):
            losses.append(loss_of(*ctx.forward(batch)))
            ctx.keep(batch)
        ctx.backward(torch.stack(losses).sum())  # behind the loop
    assert len(worker.of("update")) == MANY + 5


def test_kept_batches_that_are_trained_count(ctx: TrainCtx) -> None:
    kept: Any = None
    for batch in DataLoader(Clicks(2 * MANY)):
        if kept is None:
            kept = batch
            ctx.forward(batch)
            ctx.keep(batch)
            continue
        loss = loss_of(*ctx.forward(kept))  # of the other one only
        ctx.prepare_features(batch)
        ctx.backward(loss)
        kept = None


def test_a_kept_batch_may_be_the_only_one_that_trains(
    worker: SpyWorker, make_ctx: MakeCtx
) -> None:
    with make_ctx() as ctx:
        for number, batch in enumerate(DataLoader(Clicks(2))):
            loss = loss_of(*ctx.forward(batch))
            if number:
                ctx.keep(batch)
        ctx.backward(loss)  # behind the loop
    assert worker.of("update") == [1]


def test_what_had_a_backward_is_said_of_a_pass_that_had_some(ctx: TrainCtx) -> None:
    def run() -> None:
        for number, batch in enumerate(DataLoader(Clicks(2))):
            (detached if number else evaluate)(ctx, batch)

    with pytest.raises(DataError, match=UNREACHED.format(1)):
        run()


def test_batches_without_gradients_train_the_dense_net(ctx: TrainCtx) -> None:
    data = [make_batch(number, requires_grad=False) for number in range(MANY + 2)]
    for batch in DataLoader(data):
        step(ctx, batch)


def test_a_loop_that_is_left_is_none_of_these(ctx: TrainCtx) -> None:
    for batch in DataLoader(Clicks(5)):
        ctx.forward(batch)
        break
