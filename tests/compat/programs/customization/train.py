# mypy: ignore-errors
"""Customization, the model and the loop: any torch module, in the words of November 2021.

The tutorial's errors are mended: the loader's name, and what ``ctx.backward`` returns.
"""

import torch
from torch import nn

from persia.ctx import TrainCtx
from persia.data import Dataloader, StreamDataset
from persia.embedding.optim import Adagrad


class Model(nn.Module):
    """What a model is called with: dense tensors, then embeddings."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 + 8 + 8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, non_id_type_tensors, embedding_tensors):
        columns = [*non_id_type_tensors, *(each.float() for each in embedding_tensors)]
        return torch.sigmoid(self.layers(torch.cat(columns, dim=1)))


def main():
    torch.manual_seed(1)
    model = Model()
    loss_fn = nn.BCELoss()
    losses = []
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.3),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        mixed_precision=False,
        device_id=-1,
        torch_distributed_port=23456,
    ) as ctx:
        for batch in Dataloader(StreamDataset(), is_training=True, timeout=60_000):
            output, labels = ctx.forward(batch)
            loss = ctx.backward(loss_fn(output, labels[0]))
            losses.append(loss.item())
        rows = sum(ctx.get_embedding_size())
    return losses, rows


if __name__ == "__main__":
    losses, rows = main()
