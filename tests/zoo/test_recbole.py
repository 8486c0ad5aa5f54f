"""Models of RecBole: SASRec and DCN, from its own files, dataset and trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import persia.nn
import persia.optim
from tests.support.fixtures import Monkey
from tests.zoo.alike import (
    NEW,
    OPTIMIZERS,
    STEPS,
    assert_converted_alike,
    assert_learns_new,
    num_distinct,
    package,
    tables_of,
)

# RecBole uses what pandas and NumPy have deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

USERS, ITEMS, BATCH, LENGTH = 40, 60, 32, 8
FIELDS = ["user_id", "item_id", "label", "timestamp"]
SETTINGS: dict[str, dict[str, Any]] = {
    "SASRec": {
        "loss_type": "CE",
        "train_neg_sample_args": None,
        "n_layers": 1,
        "hidden_size": 16,
        "inner_size": 16,
        "MAX_ITEM_LIST_LENGTH": LENGTH,
    },
    "DCN": {"embedding_size": 8, "mlp_hidden_size": [16], "threshold": None},
}


@pytest.fixture
def made(request: Any, tmp_path: Path, monkeypatch: Monkey) -> tuple[Any, Any, Any]:
    """Return config, dataset and model of a name, over a file of clicks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # which its Config reads
    # Its Config gives NumPy its old names again, by some that NumPy 2 has no more.
    for old, new in (("float_", "float64"), ("complex_", "complex128"), ("unicode_", "str_")):
        monkeypatch.setitem(vars(np), old, getattr(np, new))
    for given in ("bool", "int", "float", "complex", "object", "str", "long", "unicode"):
        monkeypatch.setitem(vars(np), given, vars(np).get(given))  # undone behind it
    name = request.param
    rng = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\tlabel:float\ttimestamp:float"]
    for time in range(1500):
        user, item = rng.integers(1, USERS), rng.integers(1, ITEMS)
        lines.append(f"{user}\t{item}\t{int((user + item) % 3 == 0)}\t{time}")
    folder = tmp_path / "clicks"
    folder.mkdir()
    (folder / "clicks.inter").write_text("\n".join(lines), encoding="utf-8")
    config = package("recbole.config").Config(
        model=name,
        dataset="clicks",
        config_dict={
            "data_path": str(tmp_path),
            "load_col": {"inter": FIELDS},
            "device": "cpu",
            "use_gpu": False,
            **SETTINGS[name],
        },
    )
    data = package("recbole.data")
    dataset = data.create_dataset(config)
    train, _, _ = data.data_preparation(config, dataset)
    package("recbole.utils").init_seed(0, True)
    model = package("recbole.utils").get_model(name)(config, train.dataset)
    return config, train, model


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model.calculate_loss(batch)
    return loss


def batches(count: int, seed: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Draw users, items, histories and labels; a model takes what it knows.

    Items that follow are of the vocabulary, as the softmax is over that.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        user = torch.randint(1, USERS, (BATCH,), generator=generator)
        item = torch.randint(1, ITEMS, (BATCH,), generator=generator)
        length = torch.randint(1, LENGTH + 1, (BATCH,), generator=generator)
        seen = torch.randint(1, ITEMS, (BATCH, LENGTH), generator=generator) + first
        seen[torch.arange(LENGTH) >= length[:, None]] = 0
        found.append(
            {
                "user_id": user + first,
                "item_id": item if first == 0 else seen[:, 0] % ITEMS,
                "item_id_list": seen,
                "item_length": length,
                "label": ((user + item) % 3 == 0).float(),
            }
        )
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("made", SETTINGS, indirect=True)
def test_a_converted_model_trains_alike(made: Any, optimizer: str) -> None:
    _, _, model = made
    assert_converted_alike(model, loss_of, batches(STEPS, 1), optimizer, lr=0.05)


@pytest.mark.parametrize("made", ["SASRec"], indirect=True)
def test_sasrec_learns_histories_of_new_items(made: Any) -> None:
    model = persia.nn.convert(made[2])
    unseen = batches(5, 2, NEW)
    items = num_distinct(each["item_id_list"] for each in unseen)
    assert_learns_new(model, loss_of, unseen, items - 1)  # 0 is the padding


@pytest.mark.parametrize("made", ["DCN"], indirect=True)
def test_dcn_learns_new_ids_whose_fields_are_set_apart(made: Any) -> None:
    """Its fields are ranges of one table, one behind the other."""
    model = made[2]
    for table in (model.token_embedding_table, model.first_order_linear.token_embedding_table):
        table.offsets = np.arange(len(table.offsets)) << 48
    persia.nn.convert(model)
    unseen = batches(10, 2, NEW)
    for each in unseen:
        each["item_id"] += NEW
    # The first-order part is made with the model, and is not in its formula.
    users = num_distinct(each["user_id"] for each in unseen)
    items = num_distinct(each["item_id"] for each in unseen)
    assert_learns_new(model, loss_of, unseen, users + items)


@pytest.mark.parametrize("made", SETTINGS, indirect=True)
def test_its_trainer_trains_a_converted_model(made: Any) -> None:
    config, train, model = made
    config["epochs"], config["train_batch_size"] = 3, 128
    persia.nn.convert(model)
    name = config["model"]
    kind = package("recbole.utils").get_trainer(config["MODEL_TYPE"], name)
    trainer = kind(config, model)
    trainer.optimizer = persia.optim.Adagrad(model.parameters(), lr=0.05)
    before = {table: rows.read([1, 2]).copy() for table, rows in tables_of(model).items()}
    trainer.fit(train, saved=False, verbose=False, show_progress=False)
    losses = list(trainer.train_loss_dict.values())
    assert losses[-1] < losses[0]
    table = "item_embedding" if name == "SASRec" else "token_embedding_table.embedding"
    assert not np.array_equal(tables_of(model)[table].read([1, 2]), before[table])
