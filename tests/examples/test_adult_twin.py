"""adult_income beside its plain PyTorch twin: same rows to begin with, same batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia._core.base import cpu
from persia._core.ids.signs import pack
from persia._rpc.messages import TableEntries
from persia.config import EmbeddingSchema
from tests.examples.loading import digest, load

SEEDS = range(1, 6)
MAX_ID = 64  # above the largest category code

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR names no data"),
]


@pytest.fixture(scope="module")
def data() -> Any:
    return load("adult_income").load()


def _initial_rows(seed: int) -> torch.Tensor:
    """Return rows for every id of every slot: f32 [8, MAX_ID, 8]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(8, MAX_ID, 8).uniform_(-0.01, 0.01, generator=generator)


def _persia_auc(data: Any, seed: int, staleness: int) -> float:
    train = load("adult_income")
    options = train.Options(
        seed=seed, staleness=staleness, reproducible=staleness == 1, quiet=True
    )
    schema = EmbeddingSchema.load(train.CONFIG / "embedding_config.yml")
    rows = _initial_rows(seed).numpy()
    with train.build_ctx(options) as ctx:
        for slot, values in zip(schema.slots.values(), rows, strict=True):
            ids = np.arange(MAX_ID, dtype=np.uint64)
            signs, _ = pack(ids, slot.prefix, schema.prefix_bits)
            ctx.embedding_worker.set_embedding([TableEntries(slot.table, signs, values, None)])
        return float(train.run(ctx, data, options).auc)


def _twin_auc(data: Any, seed: int) -> float:
    train = load("adult_income")
    torch.manual_seed(seed)
    model = train.IncomeModel()
    bags = [
        torch.nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum")
        for rows in _initial_rows(seed)
    ]
    sparse = torch.optim.Adagrad(
        [bag.weight for bag in bags], lr=train.EMBEDDING_LR, initial_accumulator_value=1e-2
    )
    dense = torch.optim.SGD(model.parameters(), lr=train.DENSE_LR)

    def forward(income: Any, part: slice) -> torch.Tensor:
        ids = torch.from_numpy(income.categorical[part].astype(np.int64))
        embeddings = [bag(ids[:, [slot]]) for slot, bag in enumerate(bags)]
        output: torch.Tensor = model([torch.from_numpy(income.continuous[part])], embeddings)
        return output

    train_data, test_data = data
    size = next(train.batches(train_data, requires_grad=True)).batch_size
    for start in range(0, len(train_data), size):
        part = slice(start, start + size)
        target = torch.from_numpy(train_data.target[part])
        loss = torch.nn.functional.binary_cross_entropy(forward(train_data, part), target)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sparse.step()
        dense.step()
    model.eval()
    with torch.no_grad():
        scores = forward(test_data, slice(None))
    return float(train.auc(test_data.target[:, 0], scores[:, 0].numpy()))


def test_as_good_as_plain_pytorch(data: Any) -> None:
    twin = np.array([_twin_auc(data, seed) for seed in SEEDS])
    for staleness, allowed in ((1, 0.0005), (10, 0.001)):
        # What is in flight differs from run to run where staleness is allowed, and so does the
        # AUC, by some ten-thousandths: of the mean of runs the claim is made.
        runs = 1 if staleness == 1 else 3
        ours = np.array(
            [
                np.mean([_persia_auc(data, seed, staleness) for _ in range(runs)])
                for seed in SEEDS
            ]
        )
        difference = float(np.mean(ours - twin))
        print(
            f"staleness {staleness}: mean AUC {ours.mean():.6f}, PyTorch {twin.mean():.6f}, "
            f"mean paired difference {difference:+.6f}"
        )
        assert abs(difference) <= allowed, (ours, twin)
        assert ours.mean() >= 0.8930, ours


def _reproducible(data: Any, **options: Any) -> tuple[float, float, str]:
    train = load("adult_income")
    chosen = train.Options(seed=3, reproducible=True, staleness=1, quiet=True, **options)
    with train.build_ctx(chosen) as ctx:
        report = train.run(ctx, data, chosen)
        return report.auc, report.loss, digest(ctx)


@pytest.mark.usefixtures("restored_isa")
def test_reproducible_runs_are_bit_equal(data: Any) -> None:
    want = _reproducible(data)
    assert _reproducible(data) == want
    for servers, threads in ((2, 1), (4, 1), (1, 2), (2, 2)):
        assert _reproducible(data, servers=servers, threads=threads) == want
    for name in cpu.available():
        cpu.select(name)
        assert _reproducible(data) == want
