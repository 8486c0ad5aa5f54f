# mypy: ignore-errors
"""Getting started, the model: DLRM and its loop, in the words of July 2021.

The tutorial's errors are mended: the scale is handed to the context before it is updated, and
the step is left out where a gradient was not finite.
"""

import torch
from torch import nn

from persia.ctx import TrainCtx
from persia.sparse.optim import Adagrad

DIM = 8
NUM_SPARSE = 26


class DLRM(nn.Module):
    """Dense features through an MLP, dot products of all pairs, and an MLP on top."""

    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        num_vectors = NUM_SPARSE + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(DIM + num_pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, 1))

    def forward(self, features):
        dense, sparse = features
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(each.float() for each in sparse)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, pairs], dim=1))


def main():
    torch.manual_seed(1)
    model = DLRM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_fn = nn.BCEWithLogitsLoss()
    losses = []
    with TrainCtx(
        grad_scaler=scaler,
        sparse_optimizer=Adagrad(lr=0.3),
        emb_initialization=(-0.3, 0.3),
        device_id=-1,
        wait_server_ready=True,
    ) as ctx:
        loader = ctx.data_loader(port=8000, data_queue_size=5)
        for batch_idx, batch in enumerate(loader):
            (dense, sparse), target = ctx.prepare_features(batch)
            loss = loss_fn(model((dense, sparse)), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            finite = ctx.on_after_backward(scale, batch_idx)
            if finite:
                scaler.step(optimizer)
                scaler.update()
            else:
                scaler.update(scale / 4)
            losses.append(loss.item())
        rows = sum(ctx.get_embedding_size())
    return losses, rows


if __name__ == "__main__":
    losses, rows = main()
