"""Models of DeepCTR-Torch: xDeepFM and DIN.

It takes all features as columns of one float32 tensor, in which ids above 2^24 are rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import persia.nn
import persia.optim
from tests.zoo.alike import (
    OPTIMIZERS,
    STEPS,
    assert_converted_alike,
    assert_learns_new,
    num_distinct,
    package,
    tables_of,
)

pytestmark = pytest.mark.slow

ROWS, DIM, BATCH, LENGTH = 50, 8, 32, 6
NEW = 1 << 23
# Penalties are over whole tables, of which rows have weight_decay= of the optimizer.
NO_PENALTY = {"l2_reg_embedding": 0}


def columns(*names: str) -> list[Any]:
    inputs = package("deepctr_torch.inputs")
    return [inputs.SparseFeat(name, ROWS, embedding_dim=DIM) for name in names]


def xdeepfm() -> Any:
    inputs = package("deepctr_torch.inputs")
    given = [*columns("user", "item"), inputs.DenseFeat("price")]
    return package("deepctr_torch.models").xDeepFM(
        *(given, given, (16,), (8, 8)), l2_reg_linear=0, init_std=0.05, **NO_PENALTY
    )


def din() -> Any:
    inputs = package("deepctr_torch.inputs")
    seen = inputs.SparseFeat("hist_item", ROWS, embedding_dim=DIM, embedding_name="item")
    given = [
        *columns("user", "item"),
        inputs.DenseFeat("price"),
        inputs.VarLenSparseFeat(seen, maxlen=LENGTH, length_name="length"),
    ]
    return package("deepctr_torch.models").DIN(
        given, ["item"], dnn_hidden_units=(16,), init_std=0.05, **NO_PENALTY
    )


MODELS = {"xdeepfm": xdeepfm, "din": din}
Batch = tuple[torch.Tensor, torch.Tensor]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    features, labels = batch
    return functional.binary_cross_entropy(model(features), labels)


def batches(model: Any, count: int, seed: int, first: int = 0) -> list[Batch]:
    """Draw the columns that the model wants, of ids from ``first`` on."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        user, item = torch.randint(ROWS, (2, BATCH, 1), generator=generator)
        drawn = {
            "user": user + first,
            "item": item + first,
            "price": torch.rand(BATCH, 1, generator=generator),
            "hist_item": torch.randint(ROWS, (BATCH, LENGTH), generator=generator) + first,
            "length": torch.randint(1, LENGTH + 1, (BATCH, 1), generator=generator),
        }
        labels = ((user * 7 + item * 3) % 5 < 2).float()
        features = [drawn[name].float() for name in model.feature_index]
        found.append((torch.cat(features, 1), labels))
    return found


def ids_of(model: Any, data: list[Batch], *names: str) -> int:
    """Return how many distinct ids columns have."""
    places = [model.feature_index[name] for name in names if name in model.feature_index]
    return num_distinct(features[:, slice(*place)] for features, _ in data for place in places)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_trains_alike_and_then_learns_new_ids(
    name: str, optimizer: str
) -> None:
    model = MODELS[name]()
    converted = assert_converted_alike(
        *(model, loss_of, batches(model, STEPS, 1), optimizer), lr=0.05
    )
    unseen = batches(model, 10, 2, NEW)
    users, items = ids_of(model, unseen, "user"), ids_of(model, unseen, "item", "hist_item")
    times = 2 if name == "xdeepfm" else 1  # its linear part has tables of its own
    assert_learns_new(converted, loss_of, unseen, times * (users + items))


def test_its_fit_trains_a_converted_model() -> None:
    model: Any = persia.nn.convert(xdeepfm())
    model.compile(persia.optim.Adagrad(model.parameters(), lr=0.05), "binary_crossentropy")
    data = batches(model, 10, 1, NEW)
    features = torch.cat([each for each, _ in data]).numpy()
    labels = torch.cat([each for _, each in data]).numpy()
    columns = [features[:, [place]] for place in range(features.shape[1])]
    history = model.fit(columns, labels, batch_size=BATCH, epochs=5, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    users = len(np.unique(features[:, 0]))
    assert len(tables_of(model)["embedding_dict.user"]) == ROWS + users
