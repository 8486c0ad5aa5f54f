"""adult_income: beside its plain PyTorch twin (same rows, same batches), and its loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia._rpc.messages import TableEntries
from persia.config import EmbeddingSchema
from tests.examples.loading import EXAMPLES, load
from tests.meta.test_layers import WITHOUT_TORCH
from tests.support.fixtures import Record
from tests.support.processes import ROOT, run

SEEDS = range(1, 6)
MAX_ID = 64  # above the largest category code


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
            signs = ids | np.uint64(slot.prefix)
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


@pytest.mark.slow
@pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR names no data")
def test_as_good_as_plain_pytorch(data: Any, record_property: Record) -> None:
    twin = np.array([_twin_auc(data, seed) for seed in SEEDS])
    for staleness, allowed in ((1, 0.0005), (10, 0.001)):
        # What is in flight differs from run to run where staleness is allowed, and so does the
        # AUC, by some ten-thousandths: of the mean of runs the claim is made.
        runs = 1 if staleness == 1 else 3
        aucs = [[_persia_auc(data, seed, staleness) for seed in SEEDS] for _ in range(runs)]
        ours = np.mean(aucs, axis=0)
        difference = float(np.mean(ours - twin))
        record_property(
            "measured",
            f"staleness {staleness}: mean AUC {ours.mean():.6f}, PyTorch {twin.mean():.6f}, "
            f"mean paired difference {difference:+.6f}",
        )
        assert abs(difference) <= allowed, (ours, twin)
        assert ours.mean() >= 0.8930, ours


def test_it_loads_without_torch() -> None:
    place, own = EXAMPLES / "adult_income", {"PYTHONPATH": str(ROOT)}
    ran = run("-c", WITHOUT_TORCH, "data_loader", cwd=place, env=own)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("size", [1, 2, 3])
def test_loaders_share_the_batches_in_the_order_of_the_file(size: int) -> None:
    train = load("adult_income")
    income = train.Income(
        np.arange(5 * 300, dtype=np.float32).reshape(300, 5),
        np.arange(8 * 300, dtype=np.uint64).reshape(300, 8),
        np.zeros((300, 1), np.float32),
    )
    shares: list[list[Any]] = [
        list(train.batches(income, requires_grad=True, index=index, size=size))
        for index in range(size)
    ]
    together = [shares[number % size][number // size] for number in range(3)]
    dense = [batch.non_id_type_features[0].data for batch in together]
    assert [len(one) for one in dense] == [128, 128, 44]
    assert np.array_equal(np.concatenate(dense), income.continuous)
    assert sum(map(len, shares)) == 3
