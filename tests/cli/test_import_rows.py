"""``persia-ckpt import``: what other programs wrote becomes a checkpoint that jobs load."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import persia.nn
from persia._cli.import_rows import import_rows, optimizer_of
from persia._files import catalog
from persia._files.manifest import Manifest
from persia._files.open import open_storage
from persia.ctx import TrainCtx, eval_ctx
from persia.embedding import EmbeddingConfig, Normal
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from persia.errors import CheckpointError, ConfigError
from persia.tables import Table, read_numpy
from tests.cli.checkpoints import run
from tests.support.original_files import OldRow, write_dump

SLOTS = {"slots_config": {"user": {"dim": 4}, "item": {"dim": 4}}}
IDS = np.array([7, 1 << 40, 9], np.uint64)
VECTORS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    path = tmp_path / "slots.yml"
    path.write_text(yaml.safe_dump(SLOTS, sort_keys=False))
    return path


def imported(tmp_path: Path, slots: Path, source: Path, *options: object) -> tuple[str, int]:
    """Return the output of a command that succeeds or not, and its exit status."""
    words = "--embedding-config", slots, "--optimizer", "adagrad"
    ran = run("import", tmp_path / "made", source, *words, *options)
    return ran.output, ran.exit_code


def assert_has(folder: Path, feature: str, ids: Any, vectors: Any) -> None:
    with eval_ctx(embedding_config=SLOTS) as ctx:
        ctx.load_embedding(str(folder))
        found = ctx.table(feature).read(ids, missing="raise")
    assert np.array_equal(found, np.asarray(vectors))


def test_numpy_and_parquet_come_into_one_folder(tmp_path: Path, slots: Path) -> None:
    np.savez(tmp_path / "users.npz", id=IDS, vector=VECTORS)
    output, code = imported(tmp_path, slots, tmp_path / "users.npz", "--feature", "user")
    assert code == 0, output
    assert "3 rows of user" in output
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"name": IDS, "embedding": list(VECTORS + 1)}
    parquet.write_table(pa.table(columns), tmp_path / "items.parquet")
    output, code = imported(
        *(tmp_path, slots, tmp_path / "items.parquet", "--feature", "item"),
        *("--columns", "name", "embedding"),
    )
    assert code == 0, output
    assert "6 in all" in output
    assert_has(tmp_path / "made", "user", IDS, VECTORS)
    assert_has(tmp_path / "made", "item", IDS, VECTORS + 1)
    assert run("verify", tmp_path / "made", "--all").exit_code == 0


def test_vectors_and_ids_in_two_files(tmp_path: Path, slots: Path) -> None:
    np.save(tmp_path / "vectors.npy", VECTORS)
    np.save(tmp_path / "ids.npy", IDS)
    given = tmp_path, slots, tmp_path / "vectors.npy", "--feature", "user"
    output, code = imported(*given)
    assert (code, "expected --ids" in output) == (1, True)
    output, code = imported(*given, "--ids", tmp_path / "ids.npy")
    assert code == 0, output
    assert_has(tmp_path / "made", "user", IDS, VECTORS)


def test_a_state_dict_with_a_vocabulary(tmp_path: Path, slots: Path) -> None:
    weight = torch.from_numpy(VECTORS)
    torch.save({"user.weight": weight}, tmp_path / "model.pt")
    (tmp_path / "ids.json").write_text(json.dumps({str(1 << 40): 2, "5": 0}))
    given = tmp_path, slots, tmp_path / "model.pt", "--feature", "user"
    output, code = imported(*given)
    assert (code, "expected --key, the name of the tensor" in output) == (1, True)
    options = "--key", "user.weight", "--ids", tmp_path / "ids.json"
    output, code = imported(*given, *options)
    assert code == 0, output
    assert_has(tmp_path / "made", "user", [5, 1 << 40], VECTORS[[0, 2]])
    (tmp_path / "ids.json").write_text("[1, 2]")
    output, code = imported(*given, *options)
    assert (code, "or a JSON object with the row of each id" in output) == (1, True)


def test_a_table_of_torchrec(tmp_path: Path, slots: Path) -> None:
    weights = {"ebc.embedding_bags.t_user.weight": torch.from_numpy(VECTORS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process
        save_dcp(weights, checkpoint_id=tmp_path / "torchrec")
    output, code = imported(
        tmp_path, slots, tmp_path / "torchrec", "--feature", "user", "--key", "t_user"
    )
    assert code == 0, output
    assert "the state of TorchRec's optimizer is not taken over" in output
    assert_has(tmp_path / "made", "user", [0, 1, 2], VECTORS)


def test_a_checkpoint_of_the_original(tmp_path: Path, slots: Path) -> None:
    old = {**SLOTS, "feature_index_prefix_bit": 12}
    (tmp_path / "old.yml").write_text(yaml.safe_dump(old, sort_keys=False))
    state = np.full(4, 0.5, np.float32)
    rows = [OldRow((1 << 52) + n, VECTORS[n], state) for n in range(3)]
    write_dump(tmp_path / "dump", [[rows]])
    given = tmp_path, slots, tmp_path / "dump", "--feature", "user"
    output, code = imported(*given)
    assert (code, "expected --old-config" in output) == (1, True)
    output, code = imported(
        *(*given, "--old-config", tmp_path / "old.yml", "--old-optimizer", "adagrad")
    )
    assert code == 0, output
    assert "3 rows of user" in output
    assert_has(tmp_path / "made", "user", [0, 1, 2], VECTORS)


def test_what_cannot_be_imported_leaves_no_checkpoint(tmp_path: Path, slots: Path) -> None:
    np.savez(tmp_path / "users.npz", id=IDS, vector=VECTORS[:, :3])
    given = tmp_path, slots, tmp_path / "users.npz", "--feature"
    for options, expected in (
        (("user",), "expected vectors of dim 4, got 3"),
        (("usr_id",), "did you mean 'user'"),
        (("user", "--optimizer-option", "eps"), "expected NAME=VALUE"),
        (("user", "--optimizer-option", "rho=1"), "rho"),
        (("user", "--from", "original"), "expected --old-config"),
    ):
        output, code = imported(*given, *options)
        assert (code, expected in output) == (1, True), output
    np.savez(tmp_path / "users.npz", id=IDS[:0], vector=VECTORS[:0])
    output, code = imported(*given, "user")
    assert (code, "expected rows, got none" in output) == (1, True)
    (tmp_path / "unknown").mkdir()
    output, code = imported(tmp_path, slots, tmp_path / "unknown", "--feature", "user")
    assert (code, "write --from, one of numpy" in output) == (1, True)
    assert not (tmp_path / "made").exists() or not [*(tmp_path / "made").glob("*.json")]


def test_a_checkpoint_with_a_model_is_left_alone(tmp_path: Path, slots: Path) -> None:
    model = torch.nn.Sequential(persia.nn.Embedding("of a model", 4))
    model(torch.tensor([1]))
    persia.nn.save(model, tmp_path / "made")
    np.savez(tmp_path / "users.npz", id=IDS, vector=VECTORS)
    output, code = imported(tmp_path, slots, tmp_path / "users.npz", "--feature", "user")
    assert (code, "its checkpoint has dense.pt" in output) == (1, True)


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, _: Any, embeddings: Any) -> Any:
        """Score a batch."""
        return self.net(embeddings[0] + embeddings[1])


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with rows of a job that had settings, and an order of features, of its own."""
    model = Sum()
    one_id = np.arange(3, dtype=np.uint64)
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID(name, one_id) for name in ("item", "user")],
        labels=[Label(np.ones((3, 1), np.float32))],
        requires_grad=True,
    )
    with TrainCtx(
        Adagrad(lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        embedding_config=EmbeddingConfig(
            emb_initialization=Normal(0.0, 0.5), weight_bound=3.0, seed=7, schema=SLOTS
        ),
    ) as ctx:
        output, _ = ctx.forward(ctx.get_embedding_from_data(batch))
        ctx.backward(output.mean())
        ctx.dump_embedding(str(tmp_path / "made"))
    np.savez(tmp_path / "items.npz", id=IDS, vector=VECTORS)
    return tmp_path / "made"


def latest(folder: Path) -> Manifest:
    storage = open_storage(str(folder))
    return catalog.load(storage, catalog.ids(storage)[-1])


def test_order_settings_and_step_of_the_checkpoint_stay(
    tmp_path: Path, slots: Path, trained: Path
) -> None:
    before = latest(trained)
    output, code = imported(tmp_path, slots, tmp_path / "items.npz", "--feature", "item")
    assert code == 0, output
    after = latest(trained)
    assert f"{after.id}: 3 rows of item" in output
    assert after.num_rows == before.num_rows + 3
    assert after.step == before.step == 1
    assert after.extras["features"] == before.extras["features"]
    assert after.extras["features"]["ids"] == ["item", "user"]
    settings = [one.extras["servers"]["hyper_parameters"] for one in (before, after)]
    assert settings[0] == settings[1]
    assert settings[0]["seed"] == 7


@pytest.mark.parametrize(
    ("slots_here", "optimizer", "expected"),
    [
        ({"item": {"dim": 4}}, "adagrad", "features user of the checkpoint are not here"),
        (SLOTS["slots_config"], "adam", "were trained by adagrad and are by adam"),
        (
            {"item": {"dim": 4}, "user": {"dim": 4, "pooling": "mean"}},
            "adagrad",
            "pooling is sum in the checkpoint and mean here",
        ),
    ],
)
def test_what_would_drop_or_change_rows_of_the_folder_is_refused(
    tmp_path: Path, trained: Path, slots_here: Any, optimizer: str, expected: str
) -> None:
    before = latest(trained).id
    config = tmp_path / "other.yml"
    config.write_text(yaml.safe_dump({"slots_config": slots_here}, sort_keys=False))
    source = read_numpy(tmp_path / "items.npz")
    with pytest.raises(ConfigError, match=expected):
        import_rows(str(trained), source, "item", config, optimizer_of(optimizer, ()))
    assert latest(trained).id == before


def test_a_feature_that_the_checkpoint_has_not_comes_beside_its_rows(
    tmp_path: Path, slots: Path, trained: Path
) -> None:
    both: dict[str, Any] = SLOTS["slots_config"]
    slots.write_text(yaml.safe_dump({"slots_config": {**both, "city": {"dim": 4}}}))
    output, code = imported(tmp_path, slots, tmp_path / "items.npz", "--feature", "city")
    assert code == 0, output
    assert latest(trained).num_rows == 9


def test_of_two_imports_at_once_the_second_is_refused(
    tmp_path: Path, slots: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read the rows before the first wrote its own, and write without them."""
    load, given = Table.load, (slots, optimizer_of("adagrad", ()))

    def again(self: Table, source: Any, *rest: Any, **options: Any) -> Any:
        monkeypatch.setattr(Table, "load", load)
        with pytest.raises(CheckpointError, match="expected one writer"):
            import_rows(str(trained), read_numpy(tmp_path / "items.npz"), "item", *given)
        return load(self, source, *rest, **options)

    monkeypatch.setattr(Table, "load", again)
    before = latest(trained).num_rows
    import_rows(str(trained), read_numpy(tmp_path / "items.npz"), "user", *given)
    assert latest(trained).num_rows == before + 3
    import_rows(str(trained), read_numpy(tmp_path / "items.npz"), "item", *given)
    assert latest(trained).num_rows == before + 6
