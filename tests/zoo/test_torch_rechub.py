"""Models of torch-rechub: DIN, MMOE and DSSM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import persia.nn
import persia.optim
from tests.zoo.alike import (
    NEW,
    OPTIMIZERS,
    STEPS,
    assert_converted_alike,
    assert_learns_new,
    num_distinct,
    package,
)

pytestmark = pytest.mark.slow

ROWS, DIM, BATCH, LENGTH = 50, 8, 32, 6
MLP = {"dims": [16], "activation": "relu"}


def feature(name: str) -> Any:
    return package("torch_rechub.basic.features").SparseFeature(name, ROWS, embed_dim=DIM)


def din() -> Any:
    features = package("torch_rechub.basic.features")
    history = features.SequenceFeature(
        "seen", ROWS, embed_dim=DIM, pooling="concat", shared_with="item"
    )
    return package("torch_rechub.models.ranking").DIN(
        features=[feature("user")],
        history_features=[history],
        target_features=[feature("item")],
        mlp_params={"dims": [16]},
        attention_mlp_params={"dims": [8]},
    )


def mmoe() -> Any:
    return package("torch_rechub.models.multi_task").MMOE(
        [feature("user"), feature("item")],
        task_types=["classification", "classification"],
        n_expert=3,
        expert_params=MLP,
        tower_params_list=[MLP, MLP],
    )


def dssm() -> Any:
    return package("torch_rechub.models.matching").DSSM(
        [feature("user")], [feature("item")], user_params=MLP, item_params=MLP
    )


MODELS = {"din": din, "mmoe": mmoe, "dssm": dssm}
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    features, labels = batch
    found = model(features)
    if found.dim() == 2:  # of two tasks
        labels = torch.stack([labels, 1 - labels], 1)
    return functional.binary_cross_entropy(found, labels)


def batches(count: int, seed: int, first: int = 0) -> list[Batch]:
    """Draw users, items and what was seen, of ids from ``first`` on."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        user, item = torch.randint(ROWS, (2, BATCH), generator=generator)
        seen = torch.randint(ROWS, (BATCH, LENGTH), generator=generator)
        labels = ((user * 7 + item * 3) % 5 < 2).float()
        ids = {"user": user, "item": item, "seen": seen}
        found.append(({name: one + first for name, one in ids.items()}, labels))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_trains_alike_and_then_learns_new_ids(
    name: str, optimizer: str
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    converted = assert_converted_alike(model, loss_of, batches(STEPS, 1), optimizer, lr=0.05)
    unseen = batches(10, 2, NEW)
    of_items = ["item", "seen"] if name == "din" else ["item"]
    users = num_distinct(each["user"] for each, _ in unseen)
    items = num_distinct(each[key] for each, _ in unseen for key in of_items)
    assert_learns_new(converted, loss_of, unseen, users + items)


def test_its_trainer_trains_a_converted_model() -> None:
    trainers = package("torch_rechub.trainers")
    torch.manual_seed(0)
    model = persia.nn.convert(din())
    trainer = trainers.CTRTrainer(
        model,
        optimizer_fn=persia.optim.Adagrad,
        optimizer_params={"lr": 0.1},
        n_epoch=1,
        device="cpu",
    )
    data = batches(20, 1, NEW)
    before = sum(loss_of(model, one).item() for one in data)
    for _ in range(3):
        trainer.train_one_epoch(data)
    assert sum(loss_of(model, one).item() for one in data) < before
