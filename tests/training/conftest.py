from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from persia import _context_stack
from persia._training.batch import PersiaTrainingBatch
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S

from .fakes import DIM, SpyWorker, make_batch


@pytest.fixture(autouse=True)
def clean_process(no_job: None) -> Iterator[None]:
    """No test sees a rank or servers of its surroundings, or leaves a thread or context."""
    before = set(threading.enumerate())  # stores of modules in other tests keep theirs
    yield
    assert _context_stack.current() is None
    # The fan-out threads of several servers live as long as the servers do.
    left = [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("persia-") and "fan-out" not in thread.name
    ]
    if left:
        # Threads of servers in this process end by themselves once the servers are freed.
        gc.collect()  # a tenth of a second, where torch is loaded
    for thread in left:
        thread.join(PATIENCE_S)
    assert [thread for thread in left if thread.is_alive()] == []


MakeCtx = Callable[..., TrainCtx]


class Net(torch.nn.Module):
    """Dense features and pooled embeddings through one layer; raw ones are averaged."""

    def __init__(self, num_features: int = 2, num_dense: int = 2, dim: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim = dim
        self.layer = torch.nn.Linear(num_dense + num_features * dim, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        columns = list(dense)
        for embedding in embeddings:
            if isinstance(embedding, tuple):
                values, offsets = embedding
                lengths = offsets.diff()
                samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                embedding = torch.zeros(len(lengths), self.dim).index_add(0, samples, values)
            elif embedding.dim() == 3:
                embedding = embedding[:, :, : self.dim].sum(1)
            columns.append(embedding)
        output: torch.Tensor = self.layer(torch.cat(columns, 1))
        return output


@pytest.fixture
def worker() -> SpyWorker:
    return SpyWorker()


def new_ctx(model: torch.nn.Module, **options: Any) -> TrainCtx:
    """A TrainCtx whose optimizers are SGD, unless options replace them."""
    settings: dict[str, Any] = {
        "embedding_optimizer": SGD(lr=0.5),
        "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return TrainCtx(model=model, **{**settings, **options})


@pytest.fixture
def make_ctx(worker: SpyWorker) -> MakeCtx:
    """A ``new_ctx`` over the fake, unless options replace it."""

    def make(num_features: int = 2, **options: Any) -> TrainCtx:
        model = options.pop("model", None) or Net(num_features)
        return new_ctx(model, **{"embedding_worker": worker, **options})

    return make


@pytest.fixture
def ctx(make_ctx: MakeCtx) -> Iterator[TrainCtx]:
    """A plain TrainCtx over the fake, entered until the test ends."""
    with make_ctx() as made:
        yield made


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of an embedded data-loader, to be written."""
    path = tmp_path / "data_loader.py"
    path.touch()
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path


def embeddings_of(batch: PersiaTrainingBatch) -> list[torch.Tensor]:
    """Those of a batch without jagged features."""
    assert all(isinstance(tensor, torch.Tensor) for tensor in batch.embedding_tensors)
    return [tensor for tensor in batch.embedding_tensors if isinstance(tensor, torch.Tensor)]


def loss_of(output: torch.Tensor, labels: list[torch.Tensor] | None) -> torch.Tensor:
    assert labels is not None
    return torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0])


def step(ctx: TrainCtx, batch: Any) -> torch.Tensor:
    """One training step; returns the loss."""
    output, labels = ctx.forward(batch)
    return ctx.backward(loss_of(output, labels))


# Options of a DataLoader whose lookups and updates alternate.
LOCKSTEP: dict[str, Any] = {"reproducible": True, "embedding_staleness": 1}


def batches(count: int, **options: Any) -> list[Any]:
    return [make_batch(number, **options) for number in range(count)]


def train(ctx: TrainCtx, data: Iterable[Any], **options: Any) -> list[float]:
    """Train one pass; returns the losses."""
    return [step(ctx, batch).item() for batch in DataLoader(data, **options)]


def wait(event: threading.Event | threading.Barrier) -> None:
    event.wait(PATIENCE_S)


def fail_at(number: int, error: Exception) -> Callable[[int], None]:
    """What raises an error at the call of one batch."""

    def fail(batch_id: int) -> None:
        if batch_id == number:
            raise error

    return fail
