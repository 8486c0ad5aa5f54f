"""Scores of a version, against those of evaluation, in every form of input."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia._serving.bundle import ServedFeature
from persia._serving.predictor import describe
from persia.ctx import TrainCtx, eval_ctx
from persia.embedding.data import PersiaBatch
from persia.embedding.text_ids import hash_text
from persia.errors import CheckpointError, DataError
from persia.serving import Bundle, Predictor
from tests.serving.models import arrays, batch_of, make_ctx, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainCtx, Path]]:
    folder = tmp_path_factory.mktemp("models") / "clicks"
    with make_ctx() as ctx:
        train(ctx, np.random.default_rng(0))
        version = ctx.export(folder)
        yield ctx, folder / str(version)


@pytest.fixture(scope="module")
def predictor(trained: tuple[TrainCtx, Path]) -> Iterator[Predictor]:
    found = Predictor(trained[1])
    yield found
    found.close()


def scores(ctx: TrainCtx, given: dict[str, Any]) -> np.ndarray:
    ctx.model.eval()
    with eval_ctx(model=ctx.model) as reader, torch.no_grad():
        output, _ = reader.forward(reader.get_embedding_from_data(batch_of(given)))
    found: np.ndarray = output.numpy()
    return found


@pytest.mark.parametrize("size", [1, 2, 16, 100])
def test_scores_are_those_of_evaluation_bit_for_bit(
    trained: tuple[TrainCtx, Path], predictor: Predictor, size: int
) -> None:
    given = arrays(np.random.default_rng(size), size)
    expected = scores(trained[0], given)
    assert np.array_equal(predictor(given)["output"], expected)
    data = batch_of(given).to_bytes()
    assert np.array_equal(predictor({"batch": np.array([data], object)})["output"], expected)
    raw = {"batch": np.frombuffer(data, np.uint8)}
    assert np.array_equal(predictor(raw)["output"], expected)


def test_every_form_of_ids_is_the_same_batch(predictor: Predictor) -> None:
    given = arrays(np.random.default_rng(3), 4)
    lengths = np.array([2, 0, 3, 1])
    edges = np.concatenate([[0], np.cumsum(lengths)])
    values = np.array([1, 2, 3, 4, 5, 6])
    given |= {"tags.values": values, "tags.offsets": edges}
    expected = predictor(given)["output"]
    padded = np.full((4, 3), -1)
    for row, (begin, end) in enumerate(itertools.pairwise(edges)):
        padded[row, : end - begin] = values[begin:end]
    other = {name: one for name, one in given.items() if not name.startswith("tags")}
    other |= {"tags": padded, "tags.pad": np.array([-1])}
    assert np.array_equal(predictor(other)["output"], expected)
    other["user"] = given["user"][:, None].astype(np.uint32)
    assert np.array_equal(predictor(other)["output"], expected)
    texts = np.array(["a", "b", "c", "a"])
    by_text = predictor(given | {"user": texts})["output"]
    by_hash = predictor(given | {"user": hash_text(texts.tolist())})["output"]
    assert np.array_equal(by_text, by_hash)
    as_bytes = np.array([b"a", b"b", b"c", b"a"], object)
    assert np.array_equal(predictor(given | {"user": as_bytes})["output"], by_text)


def test_ids_of_one_sample_are_refused_where_training_had_one(
    trained: tuple[TrainCtx, Path], predictor: Predictor
) -> None:
    single = {one.name for one in predictor.model.features if one.single}
    assert single == {"user", "hs"}
    given = arrays(np.random.default_rng(3), 1)
    with pytest.raises(DataError, match=r"'hs': expected one id a sample.*got \[1, 3\]"):
        predictor(given | {"hs": np.array([[1, 2, 3]])})
    # By what the features of its batch were declared as: `tags` may have one id by chance.
    ctx, folder = trained
    batch = batch_of(given | {"tags.values": np.array([3]), "tags.offsets": np.array([0, 1])})
    for inputs, expected in (
        (batch, single),
        (PersiaBatch.from_bytes(batch.to_bytes()), set()),
    ):
        version = ctx.export(folder.parent.parent / "others", inputs)
        model = Bundle.open(folder.parent.parent / "others" / str(version)).model
        assert {one.name for one in model.features if one.single} == expected


def test_the_last_call_says_how_long_it_looked_up_and_scored(predictor: Predictor) -> None:
    given = arrays(np.random.default_rng(3), 4)
    began = time.perf_counter_ns()
    predictor(given)
    lookup, forward = predictor.spent_ns
    assert min(lookup, forward) > 0
    assert lookup + forward < time.perf_counter_ns() - began


def test_one_user_is_scored_with_many_candidates(predictor: Predictor) -> None:
    given = arrays(np.random.default_rng(5), 1)
    given |= {"tags.values": np.array([3, 4]), "tags.offsets": np.array([0, 2])}
    given |= {"w.values": np.array([3]), "w.offsets": np.array([0, 1])}
    given["w.weights"] = np.array([0.5], np.float32)
    items = np.arange(20)
    found = predictor(given | {"hs": items})["output"]
    repeated = {}
    for name, one in given.items():
        _stem, _, suffix = name.partition(".")
        if suffix == "offsets":
            repeated[name] = np.arange(21) * one[-1]
        else:
            repeated[name] = np.concatenate([one] * 20)
    assert np.array_equal(found, predictor(repeated | {"hs": items})["output"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"user": None}, "input 'user': expected it"),
        ({"usr": np.arange(4)}, "did you mean 'user'"),
        ({"user": np.arange(3)}, "got "),
        ({"user": np.ones(4)}, "expected integers or texts"),
        ({"dense": np.ones((4, 2), np.float32)}, "expected the shape"),
        ({"dense": np.ones((4, 3), complex)}, "expected float32"),
        ({"tags.offsets": None}, "tags.offsets"),
        ({"tags.offsets": np.array([0, 9, 2, 3, 4])}, "tags"),
        ({"tags": np.arange(4)}, "got both"),
        ({"user": np.ones((2, 2, 2), int)}, "expected the shape"),
    ],
)
def test_wrong_inputs_are_named(
    predictor: Predictor, change: dict[str, Any], says: str
) -> None:
    given = arrays(np.random.default_rng(1), 4) | change
    given = {name: one for name, one in given.items() if one is not None}
    with pytest.raises(DataError, match=says):
        predictor(given)


def test_threads_share_a_predictor(predictor: Predictor) -> None:
    given = arrays(np.random.default_rng(9), 8)
    expected = predictor(given)["output"]
    wrong: list[int] = []

    def work() -> None:
        for number in range(20):
            if not np.allclose(predictor(given)["output"], expected, atol=1e-6):
                wrong.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_metadata_and_counts(predictor: Predictor) -> None:
    found = predictor.metadata()
    json.dumps(found)
    (user,) = [one for one in found["inputs"] if one["name"] == "user"]
    expected = {"kind": "id", "dim": 8, "optional": False, "single": True}
    assert user["parameters"] == expected
    # What a program looks up by itself has no vector of one dim.
    ids = replace(predictor.model, features=(ServedFeature("seen", "ids", 1),))
    assert "dim" not in describe(ids)["inputs"][0]["parameters"]
    assert (found["name"], found["versions"]) == ("clicks", ["1"])
    assert found["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 1]}]
    assert predictor.is_batch_independent
    assert predictor.stats()["rows"] > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_smaller_rows_are_close(
    trained: tuple[TrainCtx, Path], predictor: Predictor, dtype: str
) -> None:
    given = arrays(np.random.default_rng(2), 50)
    small = Predictor(trained[1], row_dtype=dtype)
    try:
        found = small(given)["output"]
    finally:
        small.close()
    assert np.allclose(found, predictor(given)["output"], atol=0.02)


def test_a_damaged_bundle_is_refused(trained: tuple[TrainCtx, Path], tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        import shutil

        target = tmp_path / name / "1"
        shutil.copytree(trained[1], target)
        return target

    one = copied("flipped")
    data = bytearray((one / "dense.pt2").read_bytes())
    data[len(data) // 2] ^= 1
    (one / "dense.pt2").write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        Predictor(one)
    two = copied("linked")
    (two / "dense.pt2").unlink()
    (two / "dense.pt2").symlink_to(trained[1] / "dense.pt2")
    with pytest.raises(CheckpointError, match="link"):
        Bundle.open(two).verify()
    three = copied("moved")
    three.rename(three.with_name("2"))
    with pytest.raises(CheckpointError, match="expected a folder named 1"):
        Bundle.open(three.with_name("2"))


@pytest.mark.slow
def test_a_compiled_net_scores_as_the_model_does(
    trained: tuple[TrainCtx, Path], tmp_path: Path
) -> None:
    ctx = trained[0]
    folder = tmp_path / "compiled"
    bundle = folder / str(ctx.export(folder, format="aot"))
    with pytest.raises(CheckpointError, match="--allow-native"):
        Predictor(bundle)
    compiled = Predictor(bundle, allow_native=True)
    try:
        assert compiled.model.max_difference <= 1e-5
        assert compiled.model.processor
        for size in (1, 2, 16, 100):
            given = arrays(np.random.default_rng(size), size)
            found = compiled(given)["output"]
            np.testing.assert_allclose(found, scores(ctx, given), rtol=0, atol=1e-5)
    finally:
        compiled.close()


def test_rows_are_where_they_may_be(trained: tuple[TrainCtx, Path], tmp_path: Path) -> None:
    Predictor(trained[1], rows_within=[]).close()
    bundle = trained[1]
    model = Bundle.open(bundle).model

    def check(allowed: list[str], **rows: Any) -> None:
        changed = replace(model, rows=replace(model.rows, **rows))
        Bundle(trained[1], changed).check_places(allowed)

    inside, link = tmp_path / "in", tmp_path / "link"
    (inside / "a").mkdir(parents=True)
    link.symlink_to(tmp_path)
    check([str(inside)], url=str(inside / "a"), log=str(inside))
    (inside / "out").symlink_to(tmp_path)
    check([str(inside), "s3://b/c"], url="s3://b/c/d", log="s3://b/c")
    check([str(inside)], url=f"file://{inside}/a")
    for place in (
        *(str(tmp_path), f"{inside}/../x", f"{inside}2", f"file://{inside}/out", "s3://b/cd"),
        *("s3://b/c/../d", "s3://b/c/%2e%2e/d", f"{link}/x", "x", "simplecache::s3://b/c"),
        *("s3://b/c/d::file:///etc", "s3://b/c?versionId=1"),
    ):
        for what in ("url", "log"):
            with pytest.raises(CheckpointError, match=rf"expected a folder below .*{bundle}"):
                check([f"file://{inside}", "s3://b/c"], **{what: place})
