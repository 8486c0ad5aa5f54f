"""One sample beside many, and padding."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from persia._serving import inputs
from persia._serving.bundle import ServedFeature, ServedTensor
from persia._serving.inputs import InputDecoder
from persia.embedding.data import IDTypeFeature, PersiaBatch
from persia.errors import DataError

DECODER = InputDecoder(
    [ServedFeature("a", "pooled", 4), ServedFeature("b", "pooled", 4, optional=True)],
    [ServedTensor("x", "float32", (1,))],
)


def test_one_sample_is_repeated_and_its_ids_are_not() -> None:
    (a, b), (x,), size = DECODER(
        {"a": np.array([[5, 6, 0]]), "a.pad": np.array(0), "x": np.arange(3)}
    )
    assert (size, a.batch_size, a.num_distinct, a.num_ids) == (3, 3, 2, 6)
    assert (b.batch_size, b.num_ids) == (3, 0)
    assert x.dtype == np.float32
    assert x.shape == (3, 1)


def test_sizes_that_differ_are_refused() -> None:
    with pytest.raises(DataError, match="expected 2 samples as in 'a', got 3"):
        DECODER({"a": np.arange(2), "x": np.ones(3)})


@pytest.mark.parametrize("shape", [(1, 3), (4, 2), (2, 0)])
def test_a_table_of_ids_is_refused_where_each_sample_had_one(shape: tuple[int, int]) -> None:
    decoder = InputDecoder([ServedFeature("item", "pooled", 4, single=True)], [])
    ids: Any = np.ones(shape, np.int64)
    with pytest.raises(DataError) as refused:
        decoder({"item": ids})
    assert "input 'item': expected one id a sample, of shape [-1] or [-1, 1]" in str(
        refused.value
    )
    assert f"got {[*shape]}" in str(refused.value)
    for right in (np.arange(3), np.arange(3)[:, None], np.array([b"a", b"b", b"c"])):
        (item,), _, size = decoder({"item": right})
        assert (size, item.num_ids) == (3, 3)
    # What says by itself that samples have several is no mistake.
    given = {"item": np.array([[5, 6, 0]]), "item.pad": np.array(0)}
    assert decoder(given)[0][0].num_ids == 2
    given = {"item.values": np.arange(3), "item.offsets": np.array([0, 3])}
    assert decoder(given)[0][0].num_ids == 3


def test_weights_are_refused_where_the_program_takes_ids_alone() -> None:
    decoder = InputDecoder([ServedFeature("text", "ids", 1)], [])
    given = {"text.values": np.array([5, 6, 7]), "text.offsets": np.array([0, 2, 3])}
    (text,), _, size = decoder(given)
    assert (size, text.num_ids) == (2, 3)
    weights = np.ones(3, np.float32)
    with pytest.raises(DataError, match=r"'text.weights': expected no weights"):
        decoder({**given, "text.weights": weights})
    ids = IDTypeFeature("text", [np.array([1, 2], np.uint64)], [np.ones(2, np.float32)])
    batch = PersiaBatch([ids], requires_grad=False)
    with pytest.raises(DataError, match=r"'text.weights': expected no weights"):
        decoder({"batch": np.frombuffer(batch.to_bytes(), np.uint8)})


def test_few_bytes_do_not_ask_for_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_IDS", 100)
    monkeypatch.setattr(inputs, "MAX_FLOATS", 3000)
    history: Any = np.arange(20)[None]
    DECODER({"a": history, "x": np.ones(5)})
    with pytest.raises(DataError, match="'a': expected at most 100 ids for 6 samples, got 120"):
        DECODER({"a": history, "x": np.ones(6)})
    # 4 of each feature and 1 of x, whatever is repeated.
    monkeypatch.setattr(inputs, "MAX_IDS", 1000)
    DECODER({"a": np.arange(1), "x": np.ones(333)})
    with pytest.raises(DataError, match="at most 3000 numbers in vectors, got 3006 of 334"):
        DECODER({"a": np.arange(1), "x": np.ones(334)})
    wide = InputDecoder(
        [ServedFeature("r", "raw", 7), ServedFeature("j", "jagged", 2)], [], {"r": 100}
    )
    many = {"j.values": np.arange(50), "j.offsets": np.array([0, 50, 50, 50])}
    wide({"r": np.arange(3), **many})
    with pytest.raises(DataError, match="got 3208 of 4"):
        wide({"r": np.arange(4), "j.values": np.arange(4), "j.offsets": np.arange(5)})


MANY = InputDecoder(
    [
        ServedFeature("a", "pooled", 4),
        ServedFeature("b", "pooled", 4),
        ServedFeature("c", "raw", 3, optional=True),
        # Also the pad of `b`.
        ServedFeature("b.pad", "jagged", 2, optional=True),
    ],
    [ServedTensor("x", "float32", (2,)), ServedTensor("id", "int64", ())],
    {"c": 5},
    ["id"],
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a request, most of whose features have one id a sample."""
    size = draw(st.integers(1, 3))

    def vector() -> Any:
        usual = st.sampled_from((size, size, size, 1, 1))
        length = draw(usual if draw(st.integers(0, 9)) else st.integers(0, 4))
        values = draw(st.lists(st.integers(-2, 9), min_size=length, max_size=length))
        dtypes = (np.int64, np.int64, np.uint64, np.int32)
        return np.array(values, np.int64).astype(draw(st.sampled_from(dtypes)))

    def form(name: str) -> dict[str, Any]:
        kind = draw(st.sampled_from(("single",) * 5 + ("column", "table", "padded", "ragged")))
        ids = vector()
        if kind in ("table", "padded"):
            ids = np.stack([ids, ids + 1], axis=1)
        found: dict[str, Any] = {name: ids[:, None] if kind == "column" else ids}
        if kind == "padded":
            found[f"{name}.pad"] = np.array(draw(st.sampled_from(([1], 1, [1, 2]))))
        if kind == "ragged":
            edges = np.arange(len(ids) + 1) if draw(st.booleans()) else np.array([0, len(ids)])
            found = {f"{name}.values": ids, f"{name}.offsets": edges}
        return found

    given: dict[str, Any] = {}
    for name in draw(st.permutations(["a", "b", "c", "b.pad"])):
        if draw(st.integers(0, 9)) > (0 if name in "ab" else 6):
            given.update(form(name))
    given["x"] = np.zeros((len(vector()), 2), draw(st.sampled_from((np.float32, np.float64))))
    given["id"] = vector()
    for name in draw(st.sets(st.sampled_from([*given, "d"]), max_size=1)):
        strange: Any = (np.array(3), np.zeros(2), np.array([b"t", b"u"]), [1, 2])
        given[name] = strange[draw(st.integers(0, len(strange) - 1))]
    return given


def outcome(inputs: Any) -> Any:
    try:
        features, dense, size = MANY(inputs)
    except DataError as error:
        return type(error), str(error)
    parts = [
        (one.name, one.batch_size, [(part.dtype, part.tolist()) for part in one.parts()])
        for one in features
    ]
    return parts, [(one.dtype, one.tolist(), one.flags.writeable) for one in dense], size


@settings(max_examples=400, deadline=None)
@given(requests())
@example({})
@example({"x": np.zeros((0, 2), np.float32), "id": np.zeros(0, np.int64)})
def test_features_made_at_once_are_those_made_one_by_one(inputs: dict[str, Any]) -> None:
    # Of another mapping than a dictionary none are made at once.
    assert outcome(inputs) == outcome(MappingProxyType(inputs))


def test_ids_are_made_at_once_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = InputDecoder._feature

    def note(self: InputDecoder, feature: ServedFeature, inputs: Any) -> Any:
        asked.append(feature.name)
        return plain(self, feature, inputs)

    monkeypatch.setattr(InputDecoder, "_feature", note)
    given = {"a": np.array([7]), "b": np.arange(3), "x": np.zeros((3, 2)), "id": np.arange(3)}
    (a, b, *_), _, size = MANY({**given, "c": np.zeros((3, 2), np.int64)})
    assert (size, a.num_ids, a.num_distinct, b.num_distinct) == (3, 3, 1, 3)
    assert asked == ["b", "c", "b.pad"]  # what `b` is depends on `b.pad`
