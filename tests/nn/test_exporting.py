"""Whole models with modules, exported and served: scores are those of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia._core.ids.feature_batch import FeatureBatch
from persia._serving.program import copy_model, load_program, trace
from persia.ctx import TrainCtx
from persia.embedding import NativeInitialValues
from persia.embedding.optim import SGD
from persia.errors import ConfigError, DataError
from persia.nn.checkpoints import stores_of
from persia.nn.exporting import DrawnRows, _cut, _schema
from persia.serving import Bundle, ExportOptions, Predictor, versions
from tests.support import kernels

NUM_IDS = 200
KERNELS = Path(__file__).parent.parent / "support" / "kernels"


class Net(nn.Module):
    """Has every module, a shared table, ids that it computes, and a small table of torch's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.user = persia.nn.Embedding(f"{name} user", 4, padding_idx=0)
        self.seen = persia.nn.EmbeddingBag(f"{name} item", 8, mode="sum")
        self.tags = persia.nn.EmbeddingBag(f"{name} tag", 4, mode="max", padding_idx=0)
        self.rest = persia.nn.EmbeddingCollection(
            {"item": (f"{name} item", 8), "shop": (f"{name} shop", 4)},
            mode={"item": "sum", "shop": "mean"},
        )
        self.day = nn.Embedding(7, 2)
        self.top = nn.Sequential(nn.Linear(4 + 8 + 4 + 8 + 4 + 2 + 3 + 8, 16), nn.ReLU())
        self.out = nn.Linear(16, 1)

    def forward(
        self, batch: dict[str, Any], price: torch.Tensor, day: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        ids, offsets = batch["seen"]
        rest = self.rest({"item": batch["item"], "shop": batch["shop"]})
        parts = [
            self.user(batch["user"]),
            self.seen(ids, offsets[:-1]),
            self.tags(batch["tags"]),
            rest["item"],
            rest["shop"],
            self.day(day),
            price,
            self.seen.rows(batch["item"] + 1),
        ]
        hidden = self.top(torch.cat(parts, 1))
        return {"click": torch.sigmoid(self.out(hidden))[:, 0], "hidden": hidden}


def arrays(seed: int, size: int, top: int = NUM_IDS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    edges = np.concatenate([[0], np.cumsum(rng.integers(0, 5, size))])
    return {
        "user": rng.integers(0, top, size),
        "item": rng.integers(0, top, size),
        "shop": rng.integers(0, top, (size, 2)),
        "tags": rng.integers(0, top, (size, 3)),
        "seen.values": rng.integers(0, top, edges[-1]),
        "seen.offsets": edges,
        "price": rng.random((size, 3), dtype=np.float32),
        "day": rng.integers(0, 7, size),
    }


def called_with(given: dict[str, np.ndarray]) -> tuple[Any, ...]:
    tensors = {name: torch.from_numpy(one) for name, one in given.items()}
    batch = {name: tensors[name] for name in ("user", "item", "shop", "tags")}
    batch["seen"] = tensors["seen.values"], tensors["seen.offsets"]  # type: ignore[assignment]
    return batch, tensors["price"], tensors["day"]


def trained(name: str, are_apart: bool = False, steps: int = 4) -> Net:
    torch.manual_seed(3)
    net = Net(name)
    optimizers: list[torch.optim.Optimizer] = [persia.optim.Adagrad(net.parameters(), lr=0.1)]
    if are_apart:
        optimizers = [
            persia.optim.Adagrad(net.user.parameters(), lr=0.1),
            persia.optim.SGD(
                [one for n, one in net.named_parameters() if "user" not in n], 0.1
            ),
        ]
    step(net, optimizers, steps)
    return net


def step(net: Net, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for seed in range(steps):
        for one in optimizers:
            one.zero_grad()
        net(*called_with(arrays(seed, 64)))["click"].square().sum().backward()
        for one in optimizers:
            one.step()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(net: Net, score: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Compare served scores to the model's own, of several sizes and of unknown ids."""
    was_training = net.training
    net.eval()
    for size in (1, 2, 7, 64):
        for top in (NUM_IDS, 1 << 40):
            given = arrays(size + 100, size, top)
            with torch.no_grad():
                expected = net(*called_with(given))
            found = score(given)
            assert list(found) == ["click", "hidden"]
            for name, one in expected.items():
                assert found[name].tobytes() == one.numpy().tobytes(), (name, size, top)
    net.train(was_training)


# --- what a model is called with ------------------------------------------------------------


def cut_of(model: nn.Module, inputs: Any, **ragged: str) -> Any:
    return _cut(model, inputs, ragged, ExportOptions(), stores_of(model))


def test_inputs_have_the_names_of_arguments_and_keys() -> None:
    net = Net("names")
    given = arrays(0, 5)
    for inputs in (
        called_with(given),
        dict(zip(("batch", "price", "day"), called_with(given), strict=True)),
    ):
        cut = cut_of(net, inputs)
        assert [one.name for one in cut.dense] == [
            "user",
            "item",
            "shop",
            "tags",
            "price",
            "day",
        ]
        assert [(one.name, one.kind) for one in cut.features] == [("seen", "ids")]
        assert [(one.dtype, one.shape) for one in cut.dense][2:5] == [
            ("int64", (2,)),
            ("int64", (3,)),
            ("float32", (3,)),
        ]
        assert sorted((one.name, one.dim) for one in cut.tables) == [
            ("names item", 8),
            ("names shop", 4),
            ("names tag", 4),
            ("names user", 4),
        ]
        # A call from the flat tensors is the call that was given.
        again = cut.layout.call(Call(), cut.samples)
        assert repr(again) == repr((called_with(given), {}))


class Call:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class OfOffsets(nn.Module):
    def __init__(self, include_last_offset: bool) -> None:
        super().__init__()
        self.bag = persia.nn.EmbeddingBag(
            "offsets", 3, mode="sum", include_last_offset=include_last_offset
        )

    def forward(
        self, scale: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        found: torch.Tensor = self.bag(ids, ends) * scale[:, None]
        return found


@pytest.mark.parametrize("has_end", [True, False])
def test_offsets_may_leave_the_end_out(has_end: bool) -> None:
    ids, ends = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3, 3])
    inputs = torch.ones(3), ids, ends if has_end else ends[:-1]
    cut = cut_of(OfOffsets(has_end), inputs, ids="ends")
    assert [one.tolist() for one in cut.samples[1:]] == [[1, 2, 3], [0, 2, 3, 3]]
    args, _ = cut.layout.call(Call(), cut.samples)
    assert all(torch.equal(one, other) for one, other in zip(args, inputs, strict=True))


def test_inputs_that_cannot_be_served_are_refused() -> None:
    model = OfOffsets(True)
    ids, ends = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    ones = torch.ones(2)
    cases: tuple[tuple[Any, dict[str, str], str], ...] = (
        ((ones, ids, ends), {}, r"'ids': expected \[2, ...\], one entry .*wrap a model that"),
        ((ones, ids), {}, "missing a required argument: 'ends'"),
        ((ones, ids, ends), {"ids": "offsets"}, "ragged: expected inputs.*got 'offsets'"),
        ((ones, ids, ends[:1]), {"ids": "ends"}, r"expected offsets \[2\] or \[3\]"),
        ((torch.tensor(1.0), ids, ends), {"ids": "ends"}, "input 'scale'"),
        ((np.ones(2), ids, ends), {"ids": "ends"}, "expected a tensor.*got ndarray"),
        ((ones, ids.float(), ends), {"ids": "ends"}, "'ids': expected integers.*got torch.fl"),
        (({"ids": ones}, ids, ends), {}, "each name once, got 'ids' twice"),
    )
    for inputs, ragged, message in cases:
        with pytest.raises(ConfigError, match=message):
            cut_of(model, inputs, **ragged)
    with pytest.raises(ConfigError, match="features of the model, which are offsets"):
        persia.nn.export(
            model, "models/x", (ones, ids, ends), ragged={"ids": "ends"}, missing={"x": "mean"}
        )
    with pytest.raises(ConfigError, match=r"modules of persia.nn, got Linear with none"):
        persia.nn.export(nn.Linear(1, 1), "models/x", torch.ones(1, 1))


def test_each_id_has_a_row_of_its_own_while_a_model_is_traced() -> None:
    ids = np.arange(1000, dtype=np.uint64)
    (rows,) = DrawnRows(3).look_up([FeatureBatch.from_single("x", ids)])
    assert len(np.unique(rows)) > 2990
    assert -0.5 <= rows.min() < -0.4
    assert 0.4 < rows.max() < 0.5
    (again,) = DrawnRows(3).look_up([FeatureBatch.from_single("x", ids[5:6])])
    assert np.array_equal(again, rows[5:6])


# --- the program ----------------------------------------------------------------------------


def test_a_program_looks_up_by_the_names_of_tables(one_thread: None) -> None:
    net = trained("program")
    cut = cut_of(net, called_with(arrays(9, 6)))
    traced = trace(cut.model, cut.layout, cut.samples, "export")
    assert traced.max_difference == 0
    assert traced.is_batch_independent
    names = [one.name for one in cut.dense] + ["seen", "seen.offsets"]
    # Not the day, whose table is torch's.
    assert [names[place] for place in traced.id_places] == [
        *("user", "item", "shop", "tags", "seen")
    ]
    given = arrays(11, 20)
    tensors = cut_of(net, called_with(given)).samples
    with cut.layout.rows(cut.model), torch.no_grad():
        click, _ = load_program(traced.data, "export")(*tensors)
        assert torch.equal(click, net.eval()(*called_with(given))["click"])


def test_a_program_looks_up_in_the_models_own_rows(tmp_path: Path) -> None:
    """A load by place has given the table of another model of this process the same name."""
    model, other = (
        persia.nn.convert(nn.Sequential(nn.Embedding(4, 2), nn.Flatten()), prefix="twice.")
        for _ in range(2)
    )
    persia.nn.save(model, tmp_path)
    persia.nn.load(other, tmp_path)
    tables: list[Any] = [one.get_submodule("0").table for one in (model, other)]
    assert [one.name for one in tables] == ["twice.0"] * 2
    tables[1].write(np.arange(4), np.full((4, 2), 9.0))
    cut = cut_of(model, torch.arange(4)[:, None])
    assert trace(cut.model, cut.layout, cut.samples, "export").max_difference == 0


class OfAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = persia.nn.Embedding("of all", 2)

    def forward(self, item: torch.Tensor) -> torch.Tensor:
        rows = self.item(item)
        found: torch.Tensor = rows - rows.mean(0)
        return found


def test_a_model_of_the_whole_batch_is_found() -> None:
    model = OfAll()
    model.item.table.write(np.array([1, 2]), np.array([[1, 2], [3, 4]], np.float32))
    cut = cut_of(model, torch.tensor([1, 2]))
    assert not trace(cut.model, cut.layout, cut.samples, "export").is_batch_independent


def test_a_context_refuses_what_it_would_freeze() -> None:
    model = OfAll()
    with pytest.raises(ConfigError, match=r"write persia\.nn\.export\(model, \.\.\.\)"):
        copy_model(model)
    assert model.item.anchor.requires_grad


# --- versions -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("are_apart", [False, True])
def test_served_scores_are_those_of_the_model(
    are_apart: bool, tmp_path: Path, one_thread: None
) -> None:
    net = trained(f"served{are_apart}", are_apart)
    folder = tmp_path / "clicks"
    anchors = [one.requires_grad for one in net.parameters()]
    assert persia.nn.export(net, folder, called_with(arrays(9, 6))) == 1
    assert net.training
    assert [one.requires_grad for one in net.parameters()] == anchors
    predictor = Predictor(folder / "1")
    check(net, predictor)
    kinds = {one["name"]: one["parameters"]["kind"] for one in predictor.metadata()["inputs"]}
    assert kinds == {
        **dict.fromkeys(("user", "item", "shop", "tags", "seen"), "id"),
        **dict.fromkeys(("price", "day"), "dense"),
    }
    # Training goes on, and its next version has a graph that is known; the first one stays.
    before = predictor(arrays(1, 8))
    step(net, [persia.optim.Adagrad(net.parameters(), lr=0.1)], 3)
    assert persia.nn.export(net, folder, called_with(arrays(5, 3))) == 2
    newer = Predictor(folder / "2")
    check(net, newer)
    after = predictor(arrays(1, 8))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert versions(folder) == [1, 2]
    predictor.close()
    newer.close()


@pytest.mark.slow
def test_requests_have_ids_of_every_form(tmp_path: Path, one_thread: None) -> None:
    net = trained("forms")
    persia.nn.export(net, tmp_path / "clicks", called_with(arrays(9, 6)))
    predictor = Predictor(tmp_path / "clicks" / "1")
    given = arrays(4, 3)
    given |= {"seen.values": np.array([5, 6, 7]), "seen.offsets": np.array([0, 2, 2, 3])}
    expected = predictor(given)["click"]
    other = {name: one for name, one in given.items() if not name.startswith("seen")}
    padded = np.array([[5, 6], [-1, -1], [7, -1]])
    other |= {"seen": padded, "seen.pad": np.array([-1])}
    assert np.array_equal(predictor(other)["click"], expected)
    other["user"] = given["user"].astype(np.uint64)
    other["item"] = given["item"].astype(np.int32)
    assert np.array_equal(predictor(other)["click"], expected)
    # One user for all candidates, and ids as texts.
    other["user"] = given["user"][:1]
    same = {**other, "user": np.repeat(given["user"][:1], 3)}
    assert np.array_equal(predictor(other)["click"], predictor(same)["click"])
    other["user"] = np.array(["ann", "bob", "ann"])
    assert np.isfinite(predictor(other)["click"]).all()
    with pytest.raises(DataError, match="input 'shop': expected the shape"):
        predictor({**given, "shop": given["shop"][:, :1]})
    with pytest.raises(DataError, match="input 'day': expected int64, got float64"):
        predictor({**given, "day": given["day"] + 0.5})
    predictor.close()


class Ranker(nn.Module):
    """Written for torch."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(50, 4), nn.EmbeddingBag(60, 4, mode="mean")
        self.top = nn.Linear(8, 1)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(torch.cat([self.user(user), self.item(items)], 1))
        return found


@pytest.mark.slow
def test_a_converted_model_is_served(tmp_path: Path, one_thread: None) -> None:
    torch.manual_seed(0)
    plain = Ranker()
    model: Any = persia.nn.convert(copy.deepcopy(plain), prefix="ranker.")
    optimizer = persia.optim.SGD(model.parameters(), lr=0.1)
    users, items = torch.arange(32), torch.arange(96).view(32, 3) % 60
    version = persia.nn.export(model, tmp_path / "plain", (users, items), outputs=["score"])
    predictor = Predictor(tmp_path / "plain" / str(version))
    found = predictor({"user": users.numpy(), "items": items.numpy()})["score"]
    torch.testing.assert_close(torch.from_numpy(found), plain(users, items).detach())
    predictor.close()
    for _ in range(5):
        optimizer.zero_grad()
        model(users, items).square().mean().backward()
        optimizer.step()
    model.eval()
    version = persia.nn.export(
        model, tmp_path / "trained", (users, items), missing={"ranker.user": "mean"}
    )
    predictor = Predictor(tmp_path / "trained" / str(version))
    with torch.no_grad():
        expected = model(users, items).numpy()
    found = predictor({"user": users.numpy(), "items": items.numpy()})["output"]
    assert found.tobytes() == expected.tobytes()
    unknown = predictor({"user": np.array([1 << 30]), "items": items[:1].numpy()})["output"]
    with torch.no_grad():
        mean = model.user(torch.arange(50)).double().mean(0).float()
        row = torch.cat([mean[None], model.item(items[:1])], 1)
        torch.testing.assert_close(torch.from_numpy(unknown), model.top(row))
    assert predictor.stats()["missing"]["ranker.user"] == 1
    predictor.close()
    assert Bundle.open(tmp_path / "trained" / str(version)).model.tables[0].missing == "mean"


@pytest.mark.slow
@pytest.mark.parametrize("is_hashed", [False, True])
def test_rows_of_a_context_are_exported(
    is_hashed: bool, tmp_path: Path, one_thread: None
) -> None:
    """Where it has a slot of the table's name, whose pooling modules do not use."""
    model = OfOffsets(include_last_offset=True)
    slots: dict[str, Any] = {"other": {"dim": 2}, "offsets": {"dim": 3, "pooling": "mean"}}
    if is_hashed:
        slots["offsets"]["id_hash"] = kernels.load("hash", "-DSHIFT=0")
    ids, ends = torch.tensor([1, 2, 3, 1]), torch.tensor([0, 2, 3, 4])
    with TrainCtx(
        SGD(lr=0.5),
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1),
        model=nn.Linear(1, 1),
        embedding_config={"slots_config": slots},
    ):
        model.bag.table.write(np.arange(4), np.arange(12, dtype=np.float32).reshape(4, 3))
        model.eval()
        with torch.no_grad():
            expected = model(torch.ones(3), ids, ends).numpy()
        version = persia.nn.export(
            model, tmp_path / "bags", (torch.ones(3), ids, ends), ragged={"ids": "ends"}
        )
    assert expected.any()
    predictor = Predictor(tmp_path / "bags" / str(version))
    given = {"scale": np.ones(3, np.float32), "ids.values": ids.numpy()}
    found = predictor({**given, "ids.offsets": ends.numpy()})["output"]
    assert found.tobytes() == expected.tobytes()
    predictor.close()


# --- what a request may have ------------------------------------------------------------------


def served(model: nn.Module, folder: Path, inputs: Any, **options: Any) -> Predictor:
    """Export a model, and return what answers for it."""
    return Predictor(folder / str(persia.nn.export(model, folder, inputs, **options)))


def check_same(
    predictor: Predictor, model: nn.Module, given: Mapping[str, torch.Tensor]
) -> None:
    """Compare a served answer to the model's own, bit for bit."""
    with torch.no_grad():
        expected = model.eval()(*given.values())
    found = predictor({name: one.numpy() for name, one in given.items()})["output"]
    assert found.tobytes() == expected.numpy().tobytes()


def filled(module: Any, count: int = 50) -> None:
    """Write rows of ids 1 to ``count`` - 1."""
    rows = np.random.default_rng(1).random((count, module.embedding_dim), np.float32) - 0.5
    module.table.write(np.arange(1, count), rows[1:])


class Columns(nn.Module):
    """Its ids are columns of one float matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(10, 4), nn.Embedding(10, 4)
        self.hour = nn.Embedding(3, 2)
        self.top = nn.Linear(11, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, :3].long().unbind(1)
        parts = [
            one(of) for one, of in zip((self.user, self.item, self.hour), ids, strict=True)
        ]
        found: torch.Tensor = self.top(torch.cat([*parts, x[:, 3:]], 1))
        return found


@pytest.mark.slow
def test_ids_may_be_columns_of_a_float_matrix(tmp_path: Path, one_thread: None) -> None:
    torch.manual_seed(1)
    model = persia.nn.convert(
        Columns(), prefix="columns.", min_rows=5
    )  # the hour stays torch's
    ids = torch.cat([torch.randint(10, (6, 2)), torch.randint(3, (6, 1))], 1)
    x = torch.cat([ids.float(), torch.rand(6, 1)], 1)
    predictor = served(model, tmp_path / "columns", x)
    (described,) = predictor.metadata()["inputs"]
    assert (described["datatype"], described["parameters"]["kind"]) == ("FP32", "dense")
    assert predictor.is_batch_independent
    check_same(predictor, model, {"x": x})
    check_same(predictor, model, {"x": x[:1].flip(1).round().clamp(0, 2)})
    predictor.close()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = persia.nn.Embedding("masked", 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.item(ids.masked_fill(~mask, 0)).sum(1)
        return found


@pytest.mark.slow
def test_ids_may_depend_on_a_mask(tmp_path: Path, one_thread: None) -> None:
    model = Masked()
    filled(model.item)
    given = {"ids": torch.randint(50, (6, 3)), "mask": torch.rand(6, 3) > 0.5}
    predictor = served(model, tmp_path / "masked", tuple(given.values()))
    kinds = {one["name"]: one["parameters"]["kind"] for one in predictor.metadata()["inputs"]}
    assert kinds == {"ids": "id", "mask": "dense"}
    check_same(predictor, model, given)
    predictor.close()


class Sums(nn.Module):
    """Of ids [B], or of each sample's ids [B, L]."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.item = persia.nn.Embedding(name, 2, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.item(ids)
        return found.sum(1) if ids.dim() == 2 else found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64])
def test_an_id_is_never_cut_to_the_dtype_of_the_sample(
    dtype: torch.dtype, tmp_path: Path, one_thread: None
) -> None:
    model = Sums(f"ids of {dtype}")
    filled(model.item)
    predictor = served(model, tmp_path / "ids", torch.arange(6).to(dtype))
    check_same(predictor, model, {"ids": torch.tensor([5, 49, 5])})
    check_same(predictor, model, {"ids": torch.tensor([5, 49], dtype=torch.int32)})
    large, texts = {"ids": np.array([(1 << 40) + 5, 5])}, {"ids": np.array(["ann", "bob"])}
    if dtype is torch.uint64:
        check_same(predictor, model, {"ids": torch.from_numpy(large["ids"])})
        assert predictor(texts)["output"].shape == (2, 2)
    else:
        with pytest.raises(DataError, match=r"'ids': expected u?int.*, got 1099511627781"):
            predictor(large)
        with pytest.raises(DataError, match=r"'ids': expected u?int.*got texts, whose ids"):
            predictor(texts)
    predictor.close()


class Lookups(nn.Module):
    """Returns how many of a sample's days its torch table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.item = persia.nn.EmbeddingBag("of int32", 2, include_last_offset=True)

    def forward(self, day: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.item(ids, ends) * day[:, None]
        return found


@pytest.mark.slow
def test_integers_that_the_model_cannot_have_are_refused(
    tmp_path: Path, one_thread: None
) -> None:
    """Of dense inputs too; ragged ids have 64 bits whatever the sample has."""
    model = Lookups()
    filled(model.item)
    ids, ends = torch.tensor([1, 2, 3, 1]), torch.tensor([0, 2, 4])
    day = torch.tensor([3, 4], dtype=torch.int32)
    sample = day, ids.int(), ends.int()
    predictor = served(model, tmp_path / "days", sample, ragged={"ids": "ends"})
    with torch.no_grad():
        expected = model.eval()(day, ids + (1 << 40), ends).numpy()
    given = {"day": day.long().numpy(), "ids.offsets": ends.numpy()}
    found = predictor({**given, "ids.values": (ids + (1 << 40)).numpy()})["output"]
    assert found.tobytes() == expected.tobytes()
    with pytest.raises(DataError, match=r"'day': expected int32.*got -2147483649"):
        predictor({**given, "ids.values": ids.numpy(), "day": np.array([1, -(1 << 31) - 1])})
    predictor.close()


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["mean", "initial"])
def test_padding_is_what_the_model_has_for_it(
    missing: Any, tmp_path: Path, one_thread: None
) -> None:
    """Whatever an id without a row is; also where the padding id has a row of its own."""
    model = Pair(f"padded {missing}")
    filled(model.item)
    filled(model.user)
    model.user.table.write(np.array([0, 7]), np.full((2, 2), 0.3, np.float32))
    ids = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 0, 0]])
    predictor = served(model, tmp_path / "padded", ids, missing=missing)
    for given in (ids, torch.zeros_like(ids), ids[2:3]):
        check_same(predictor, model, {"ids": given})
    assert not predictor.stats()["missing"]
    assert predictor({"ids": np.array([[99, 0, 0]])})["output"].any()
    predictor.close()


class Pair(nn.Module):
    """A table without a row of its padding id, and one with it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.item = persia.nn.Embedding(f"{name} item", 2, padding_idx=0)
        self.user = persia.nn.Embedding(f"{name} user", 2, padding_idx=7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.item(ids).sum(1) + self.user(ids).mean(1)
        return found


class NotPickled:
    """Is copied, and cannot be sent to another process."""

    def __deepcopy__(self, memo: object) -> NotPickled:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


@pytest.mark.slow
def test_a_model_traced_in_this_process_keeps_its_rows(
    tmp_path: Path, one_thread: None
) -> None:
    """Of a context, behind which its modules look up in rows of their own."""
    model = Sums("traced here")
    model.odd = NotPickled()  # type: ignore[assignment]
    ids = torch.arange(4)
    with TrainCtx(
        SGD(lr=0.5),
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1),
        model=nn.Linear(1, 1),
        embedding_config={"slots_config": {"traced here": {"dim": 2}}},
    ):
        filled(model.item)
        predictor = served(model, tmp_path / "here", ids)
        check_same(predictor, model, {"ids": ids})
    with torch.no_grad():
        assert not model(ids).any()  # no row is there
    predictor.close()


# --- the rows ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_version_has_the_rows_of_its_tables_only(tmp_path: Path, one_thread: None) -> None:
    """Of a store that another model shares, and of several stores."""
    other = Sums("of another model", is_new=True)
    model = TwoStores()
    both = [*other.parameters(), *model.first.parameters()]
    optimizers: list[torch.optim.Optimizer] = [
        persia.optim.Adagrad(both, lr=0.1),
        persia.optim.SGD(model.second.parameters(), lr=0.1),
    ]
    ids = torch.arange(6)
    loss = other(torch.arange(1000)).sum() + model(ids, ids).square().sum()
    loss.backward()
    for one in optimizers:
        one.step()
    expected = {"first": 6, "second": 6}
    for part in ("first", "both"):
        chosen: Any = model if part == "both" else Sums("first store")
        given = {"x": ids, "y": ids} if part == "both" else {"ids": ids}
        predictor = served(chosen, tmp_path / part, tuple(given.values()))
        check_same(predictor, chosen, given)
        check_same(predictor, chosen, {name: one + 3 for name, one in given.items()})
        names = sorted(predictor.bundle.schema().slots)
        assert names == (["first store", "second store"] if part == "both" else ["first store"])
        assert predictor.stats()["rows"] == (sum(expected.values()) if part == "both" else 6)
        predictor.close()


class TwoStores(nn.Module):
    """Tables whose optimizers differ; one begins with values of a native library."""

    def __init__(self) -> None:
        super().__init__()
        values = NativeInitialValues(KERNELS / "initial.c", params={"lower": -1, "upper": 1})
        self.first = persia.nn.Embedding("first store", 2, initialization=values)
        self.second = persia.nn.Embedding("second store", 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(x) + self.second(y)
        return found


def test_more_tables_than_a_version_has_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleList(persia.nn.Embedding(f"many {n}", 2) for n in range(260))
    persia.optim.Adagrad(model[:130].parameters(), lr=0.1)
    persia.optim.SGD(model[130:].parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"at most 255 of them in one version, got 260"):
        _schema(stores_of(model), ExportOptions())


@pytest.mark.slow
def test_rows_of_a_group_are_exported_as_one(tmp_path: Path, one_thread: None) -> None:
    """Two tables of a context that share rows with each other, and with a third slot."""
    model = Shared()
    slots = {name: {"dim": 2} for name in ("other", "seen", "bought", "viewed")}
    ids = torch.arange(6)
    with TrainCtx(
        SGD(lr=0.5),
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1),
        model=nn.Linear(1, 1),
        embedding_config={
            "slots_config": slots,
            "feature_groups": {"items": ["viewed", "bought", "seen"]},
            "group_settings": {"items": {"dtype": "float16"}},
            "strict_ids": True,
        },
    ):
        filled(model.seen)
        predictor = served(model, tmp_path / "shared", ids, missing="initial")
        check_same(predictor, model, {"ids": ids[1:]})
    assert predictor.stats()["rows"] == 49
    assert set(predictor.bundle.schema().slots) == {"seen", "bought"}
    with pytest.raises(DataError, match="expected at most 56"):
        predictor({"ids": np.array([1 << 60])})
    predictor.close()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = persia.nn.Embedding("seen", 2)
        self.bought = persia.nn.Embedding("bought", 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.seen(ids) - 2 * self.bought(ids + 1)
        return found


# --- forms of models --------------------------------------------------------------------------


class OfTexts(nn.Module):
    """The classifier of torch's tutorial: ids, and offsets without their end."""

    def __init__(self, include_last_offset: bool) -> None:
        super().__init__()
        self.bag = persia.nn.EmbeddingBag(
            "words", 4, mode="mean", include_last_offset=include_last_offset
        )
        self.top = nn.Linear(4, 2)

    def forward(self, text: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(self.bag(text, offsets))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("has_end", [False, True])
def test_offsets_alone_say_how_many_samples_there_are(
    has_end: bool, tmp_path: Path, one_thread: None
) -> None:
    model = OfTexts(has_end)
    filled(model.bag)
    text, offsets = torch.randint(50, (20,)), torch.tensor([0, 4, 9, 9, 20])
    inputs = text, offsets if has_end else offsets[:-1]
    predictor = served(model, tmp_path / "texts", inputs, ragged={"text": "offsets"})
    with torch.no_grad():
        expected = model.eval()(*inputs).numpy()
    found = predictor({"text.values": text.numpy(), "text.offsets": offsets.numpy()})["output"]
    assert found.tobytes() == expected.tobytes()
    predictor.close()


class Partly(nn.Module):
    """Looks up in graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.item = persia.nn.Embedding("partly", 2)
        self.top = nn.Linear(2, 1)

    def forward(
        self, day: torch.Tensor, ids: torch.Tensor, others: torch.Tensor
    ) -> torch.Tensor:
        with torch.enable_grad():
            first = self.item(ids)
        with torch.no_grad():
            second = self.item(others + 1) * day[:, None]
        found: torch.Tensor = self.top(first + second)
        return found


@pytest.mark.slow
def test_lookups_may_be_under_no_grad(tmp_path: Path, one_thread: None) -> None:
    model = Partly()
    filled(model.item)
    given = {name: torch.randint(40, (6,)) for name in ("day", "ids", "others")}
    predictor = served(model, tmp_path / "partly", tuple(given.values()))
    kinds = {one["name"]: one["parameters"]["kind"] for one in predictor.metadata()["inputs"]}
    assert kinds == {"day": "dense", "ids": "id", "others": "id"}
    check_same(predictor, model, given)
    predictor.close()


class NotTraced(Sums):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids if int(ids.sum()) > 3 else ids + 1)


class NotCopied(NotPickled):
    def __deepcopy__(self, memo: object) -> NotPickled:
        raise TypeError("a lock")


def test_errors_say_what_can_be_done() -> None:
    model = NotTraced("not traced")
    cut = cut_of(model, torch.arange(6))
    with pytest.raises(ConfigError, match=r"torch\.export cannot trace it") as caught:
        trace(cut.model, cut.layout, cut.samples, "export")
    assert "format=" not in str(caught.value)  # persia.nn.export has no other
    alone = torch.arange(4)
    cut = cut_of(OfOffsets(False), (torch.ones(4), alone, alone))
    with pytest.raises(DataError, match=r"0\.\.1, got 3.*among scale, ids, ends .* by ragged="):
        trace(cut.model, cut.layout, cut.samples, "export")
    model.odd = NotCopied()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"NotTraced: cannot be copied .*: a lock"):
        cut_of(model, torch.arange(6))
