"""One rank under torchrun: DDP over nccl on a GPU, over gloo on a CPU, and a metric of it.

python -m torch.distributed.run --nproc-per-node 1 -m tests.gpu.rank cuda
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from persia.data import DataLoader
from persia.distributed import DDPOption
from persia.metrics import AUC
from tests.gpu.devices import number_of
from tests.gpu.job import Net, batches, loss_of, new_ctx

NUM_STEPS = 20


def main(device: str) -> None:
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    backend = "nccl" if device == "cuda" else "gloo"
    option = DDPOption(initialization_method="env", backend=backend)
    net = Net().to(device)
    # A context of one rank wraps nothing by itself.
    model, _ = option.convert2distributed_model(net, 1, 0, number_of(device))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    auc = AUC()
    with new_ctx(device, model) as ctx:  # type: ignore[arg-type]
        losses = []
        for batch in DataLoader(batches(NUM_STEPS)):
            output, labels = ctx.forward(batch)
            loss = loss_of(output, labels)
            ctx.backward(loss)
            auc.update(output.detach(), (labels or [])[0])
            losses.append(loss.detach())
        first, last = losses[0].item(), losses[-1].item()
    assert dist.get_backend() == backend
    assert 0.0 <= float(auc.compute()) <= 1.0
    print(f"{backend}: {len(losses)} steps, loss {first:.6f} to {last:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
