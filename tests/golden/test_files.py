"""Checkpoints, packets of changed rows, and what persia-ckpt makes of them, file by file."""

from __future__ import annotations

import hashlib
import pprint
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.version import __version__
from tests.golden.book import as_text, check
from tests.golden.commands import invoke, quiet_surroundings
from tests.support.waiting import until

SLOTS = {
    "feature_index_prefix_bit": 8,
    "slots_config": {"user": {"dim": 4}, "item": {"dim": 2}, "tags": {"dim": 4}},
    "group_settings": {"item": {"dtype": "float16"}},
}
NUM_BATCHES = 4
CAPACITY = 14


class Net(torch.nn.Module):
    """Every gradient of a row is 0.5, so that no rounding of torch's is in the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((1,), 0.5))

    def forward(self, dense: Any, embeddings: list[torch.Tensor]) -> torch.Tensor:
        return sum((one.sum() for one in embeddings), torch.zeros(())) * 0.5 + self.bias


def make_batch(number: int) -> PersiaBatch:
    # The first fills the server; those after it are few, and drive the oldest out.
    ids = np.arange(3 if number else 5, dtype=np.uint64) * np.uint64(2) + np.uint64(3 * number)
    tags = [ids[:place] + np.uint64(1 << 40) for place in range(len(ids))]
    return PersiaBatch(
        [
            IDTypeFeatureWithSingleID("user", ids),
            IDTypeFeatureWithSingleID("item", ids + np.uint64(3)),
            IDTypeFeature("tags", tags),
        ],
        labels=[Label(np.zeros((len(ids), 1), np.float32))],
    )


def train(place: Path) -> None:
    """Train some batches, with a packet of changed rows after each, and dump."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = Net()
    server = {
        "enable_incremental_update": True,
        "incremental_buffer_size": 1,
        "incremental_dir": str(place / "incremental"),
        "capacity": CAPACITY,
        "num_hashmap_internal_shards": 1,
    }
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.125, initial_accumulator_value=0.01),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.25),
        mixed_precision=False,
        embedding_config=EmbeddingConfig(seed=3, schema=SLOTS),
        global_config={"embedding_parameter_server_config": server},
    ) as ctx:
        for number in range(NUM_BATCHES):
            loader = DataLoader([make_batch(number)], reproducible=True, embedding_staleness=1)
            for batch in loader:
                ctx.backward(ctx.forward(batch)[0].sum())
            # The packet has ended before the next batch changes rows.
            until(lambda: count_packets(place / "incremental") == number + 1)  # noqa: B023
            if number == NUM_BATCHES - 2:
                ctx.dump_checkpoint(place / "checkpoint")
        ctx.dump_checkpoint(place / "checkpoint", keep_last=2, with_jit_model=False)


def count_packets(folder: Path) -> int:
    """Return how many there are, without those beside the others, which come at any time."""
    return sum('"after":' not in path.read_text() for path in folder.glob("*/*.json"))


def normal(text: str) -> str:
    """Replace what no two runs share: chance in ids, times, checksums over them, versions."""
    text = text.replace(__version__, "VERSION")
    text = re.sub(r"(\d{8})-[0-9a-f]{8}\b", r"\1-CHANCE", text)
    text = re.sub(r'("created":)"[^"]*"', r'\1"TIME"', text)
    text = re.sub(r'("change_log":\{[^"]*"histories".*?,"url":)"[^"]*"', r'\1"THERE"', text)
    text = re.sub(r'("histories":\{"0":|"history":)"[0-9a-f]{16}"', r'\1"HISTORY"', text)
    text = re.sub(r"created \S+Z, \S+ ago", "created TIME, AGE ago", text)
    return re.sub(r'("xxh3_128":)"[0-9a-f]{32}"(}\Z)', r'\1"OF THIS"\2', text)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _brief(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"{value.dtype} {list(value.shape)} {digest(value.numpy().tobytes())}"
    if isinstance(value, dict):
        return {key: _brief(one) for key, one in value.items()}
    return [_brief(one) for one in value] if isinstance(value, (list, tuple)) else value


def page(path: Path) -> Any:
    """What is in a file: as text where it is one, its header and the bytes behind it."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return normal(data.decode())
    if path.suffix == ".pt":
        held = pprint.pformat(_brief(torch.load(path, weights_only=True)), width=90)
        return {"sha256": digest(data), "holds": held.splitlines()}
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(data[:8], "little")
        lines = [data[at : at + 64].hex() for at in range(end, len(data), 64)]
        return {"length": end - 8, "header": data[8:end].decode(), "data": lines}
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: summary(array) for name, array in arrays.items()}
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        schema = [f"{field.name}: {field.type}" for field in table.schema]
        return {"schema": schema, "rows": [str(row) for row in table.to_pylist()]}
    return data.decode()


def summary(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)} {array.tolist()}"


def pages(folder: Path) -> str:
    found = {normal(str(path.relative_to(folder))): path for path in folder.rglob("*.*")}
    return as_text({name: page(found[name]) for name in sorted(found) if found[name].is_file()})


def told_by_commands(place: Path) -> str:
    """Return what persia-ckpt prints; tables and a copy are beside the checkpoint then."""
    here, said = place / "checkpoint", []
    for words in (
        ("inspect", here),
        ("inspect", here, "--quick", "--id", "1"),
        ("verify", here, "--all"),
        ("diff", here, here, "--before-id", "1"),
        ("diff", here, here),
        *(("convert", here, place / "tables" / to, "--to", to) for to in TABLES),
        ("reshard", here, place / "copy", "--servers", 2),
        ("verify", place / "copy"),
    ):
        ran = invoke("persia-ckpt", *words)
        line = " ".join(map(str, words))
        said.append(f"$ persia-ckpt {line}\n{ran.output}status {ran.exit_code}\n")
    return normal("\n".join(said).replace(str(place), "PLACE"))


TABLES = ("npz", "parquet", "safetensors")


def record() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory, quiet_surroundings():
        place = Path(directory)
        train(place)
        commands = told_by_commands(place)
        return {
            "files/commands.txt": commands,
            **{
                f"files/{name}.json": pages(place / name)
                for name in ("checkpoint", "incremental", "tables", "copy")
            },
        }


def test_files_of_checkpoints() -> None:
    check(record(), "torch")
