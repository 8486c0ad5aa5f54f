"""Train on the click log, and publish versions of the model as training goes on."""

import argparse
import time
from pathlib import Path

import torch
from click_log import batch

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.optim import Adagrad


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1 + 3 * 8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, non_id_tensors, embedding_tensors):
        score = self.layers(torch.cat([*non_id_tensors, *embedding_tensors], dim=1))
        return torch.sigmoid(score)


class Log(IterableDataset):
    """Clicks as they come: a number of batches a second, for some seconds."""

    def __init__(self, seconds, batches_per_s):
        super().__init__()
        self.seconds, self.batches_per_s = seconds, batches_per_s

    def __iter__(self):
        begin = time.monotonic()
        for number in range(round(self.seconds * self.batches_per_s)):
            time.sleep(max(0, begin + number / self.batches_per_s - time.monotonic()))
            yield batch(number, (time.monotonic() - begin) / self.seconds)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--into", type=Path, default=Path("run"), help="folder for all files")
parser.add_argument("--seconds", type=float, default=45, help="how long the log is")
parser.add_argument("--publish-every", type=float, default=10, help="seconds")
options = parser.parse_args()

torch.manual_seed(1)
model = Model()
with TrainCtx(
    model=model,
    embedding_config=Path(__file__).parent / "config" / "embedding_config.yml",
    # Rows that changed are written every second; the server follows them.
    global_config={
        "embedding_parameter_server_config": {
            "enable_incremental_update": True,
            "incremental_dir": str((options.into / "log").absolute()),
            "incremental_flush_sec": 1,
        }
    },
    embedding_optimizer=Adagrad(lr=0.1),
    dense_optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    mixed_precision=False,
) as ctx:
    ctx.publish(
        options.into / "models" / "clicks",
        every_s=options.publish_every,
        rows="log",
        outputs=["click"],
    )
    for one in DataLoader(Log(options.seconds, batches_per_s=50)):
        output, labels = ctx.forward(one)
        ctx.backward(torch.nn.functional.binary_cross_entropy(output, labels[0]))
    ctx.dump_checkpoint(str(options.into / "checkpoint"))
    rows = sum(ctx.get_embedding_size())
    print(f"trained {ctx.stats()['batches']} batches, {rows} rows", flush=True)
