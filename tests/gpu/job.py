"""What the tests of a device train: a net over every kind of feature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import SGD
from tests.gpu.devices import number_of
from tests.training.fakes import DIM, SLOTS, make_batch

NAMES = ("user", "tags", "seq", "jag")


class Net(torch.nn.Module):
    """Pooled embeddings as they are, the others summed per sample, and layers of a width.

    ``dtype`` is what autocast runs the layers in; None leaves that to the context.
    """

    def __init__(self, width: int = 16, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2 + len(NAMES) * DIM, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        )

    def forward(self, dense: list[torch.Tensor], embeddings: Any) -> torch.Tensor:
        user, tags, raw, (values, offsets) = embeddings
        num_samples = len(user)
        # Its size is given: torch would ask the device for the sum of the lengths.
        samples = torch.repeat_interleave(
            torch.arange(num_samples, device=user.device),
            offsets.diff(),
            output_size=len(values),
        )
        jagged = torch.zeros_like(user).index_add(0, samples, values)
        columns = torch.cat([dense[0], user, tags, raw[..., :-1].sum(1), jagged], 1)
        kind = columns.device.type
        with torch.autocast(kind, self.dtype, enabled=self.dtype is not None):
            output: torch.Tensor = self.layers(columns)
        return output.float()


def new_ctx(device: str, net: Net, **options: Any) -> TrainCtx:
    """Return a context over embedded tables, or over the servers that the environment names."""
    model = net.to(device)
    settings: dict[str, Any] = {
        "embedding_optimizer": SGD(lr=0.1),
        "dense_optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "embedding_config": {"slots_config": SLOTS},
        "mixed_precision": False,
        "device_id": number_of(device),
    }
    return TrainCtx(model=model, **{**settings, **options})


def batches(count: int, size: int = 64) -> Iterator[PersiaBatch]:
    for number in range(count):
        yield make_batch(number, size, NAMES)


def loss_of(output: torch.Tensor, labels: Any) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0])


def step(ctx: TrainCtx, batch: Any) -> torch.Tensor:
    """Make one training step; the loss stays on the device, without the scale."""
    loss = loss_of(*ctx.forward(batch))
    ctx.backward(loss)
    return loss.detach()


def train(ctx: TrainCtx, data: Iterable[PersiaBatch], **options: Any) -> list[float]:
    """Train one pass and return the losses, which are read at its end."""
    losses = [step(ctx, batch) for batch in DataLoader(data, **options)]
    found: list[float] = torch.stack(losses).tolist()
    return found


def embeddings(ctx: TrainCtx) -> list[torch.Tensor]:
    """Return what the rows of one batch are now, in the host."""
    batch = ctx.get_embedding_from_data(make_batch(0, 64, NAMES, requires_grad=False))
    found: list[torch.Tensor] = []
    for each in batch.embedding_tensors:
        found += [each] if isinstance(each, torch.Tensor) else [*each]
    return [each.detach().cpu() for each in found]
