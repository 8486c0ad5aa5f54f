"""The lookup of a served program, against torch's own modules over the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from persia._core.ids.feature_batch import FeatureBatch
from persia._serving import module_lookups
from persia._serving.module_lookups import served_lookup, use_rows
from persia.errors import ConfigError, DataError

DIMS = {"user": 3, "item": 5}
# Every id of a test is below.
WEIGHTS = {
    name: torch.randn(100, dim, generator=torch.Generator().manual_seed(dim))
    for name, dim in DIMS.items()
}


class Rows:
    """Answers with ``WEIGHTS``, and keeps which tables each request was of."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, features: Sequence[FeatureBatch]) -> list[NDArray[np.float32]]:
        self.asked.append([one.name for one in features])
        return [WEIGHTS[one.name].numpy()[one.distinct.astype(np.int64)] for one in features]


def look_up(*arguments: Any, padding: int | None = None) -> torch.Tensor:
    with use_rows(Rows()):
        found: torch.Tensor = served_lookup(*arguments, padding)
    return found


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 7])
def test_bags_are_those_of_torch(mode: str, padding: int | None) -> None:
    ids = torch.tensor([7, 1, 7, 2, 50, 7, 7, 99, 1])
    offsets = torch.tensor([0, 2, 2, 5, 7, 9])  # one bag is empty, and one of padding only
    found = look_up(ids, offsets, None, ["item"], [mode], [5], padding=padding)
    bag = torch.nn.EmbeddingBag.from_pretrained(
        WEIGHTS["item"], mode=mode, include_last_offset=True, padding_idx=padding
    )
    torch.testing.assert_close(found.view(5, 5), bag(ids, offsets))


def test_weights_of_ids_go_with_them() -> None:
    ids, offsets = torch.tensor([3, 7, 4, 3]), torch.tensor([0, 3, 4])
    factors = torch.tensor([0.5, 2.0, -1.0, 3.0])
    for padding in (None, 7):
        found = look_up(ids, offsets, factors, ["user"], ["sum"], [3], padding=padding)
        bag = torch.nn.EmbeddingBag.from_pretrained(
            WEIGHTS["user"], mode="sum", include_last_offset=True, padding_idx=padding
        )
        expected = bag(ids, offsets, per_sample_weights=factors)
        torch.testing.assert_close(found.view(2, 3), expected)


def test_single_ids_have_their_rows_the_padding_id_too() -> None:
    ids = torch.tensor([[3, 7], [7, 4]], dtype=torch.int32)
    found = look_up(ids, None, None, ["user"], ["none"], [3], padding=7)
    assert torch.equal(found.view(2, 2, 3), WEIGHTS["user"][ids.long()])
    assert look_up(ids[:0], None, None, ["user"], ["none"], [3]).shape == (0,)


def test_the_padding_ids_row_may_be_the_models() -> None:
    ids = torch.tensor([[3, 7], [7, 4]])
    rows = Rows()
    for row in ([0.0, 0.0, 0.0], [0.5, -1.0, 2.0]):
        with use_rows(rows):
            found = served_lookup(ids, None, None, ["user"], ["none"], [3], 7, row)
        expected = WEIGHTS["user"][ids]
        expected[ids == 7] = torch.tensor(row)
        assert torch.equal(found.view(2, 2, 3), expected)
        with use_rows(rows):
            found = served_lookup(ids, None, None, ["user"], ["none"], [3], 9, row)
        assert torch.equal(found.view(2, 2, 3), WEIGHTS["user"][ids])


def test_features_lie_one_behind_the_other_and_a_request_has_a_table_once() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    rows = Rows()
    with use_rows(rows):
        found = served_lookup(
            *(ids, None, None, ["user", "item", "user"], ["sum"] * 3, [3, 5, 3], None)
        )
    assert rows.asked == [["user", "item"], ["user"]]
    for part, name, own in zip(
        found.split([6, 10, 6]), ("user", "item", "user"), ids.view(3, 2), strict=True
    ):
        assert torch.equal(part.view(2, -1), WEIGHTS[name][own])
    edges = torch.tensor([0, 1, 3, 3, 6])
    found = look_up(ids, edges, None, ["user", "item"], ["sum", "max"], [3, 5])
    user, item = WEIGHTS["user"], WEIGHTS["item"]
    expected = torch.stack([user[1], user[2] + user[3]])
    assert torch.equal(found[:6].view(2, 3), expected)
    expected = torch.stack([torch.zeros(5), item[4:7].max(0).values])
    assert torch.equal(found[6:].view(2, 5), expected)


def test_without_rows_or_with_wrong_ones_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
    arguments = ids, offsets, None, ["user"], ["sum"]
    with pytest.raises(ConfigError, match=r"a persia\.serving\.Predictor"):
        served_lookup(*arguments, [3], None)
    with pytest.raises(DataError, match=r"'user': expected rows \[2, 4\], got \[2, 3\]"):
        look_up(*arguments, [4])
    for edges in ([0, 3], [-1, 2], [1, 0]):
        with pytest.raises(DataError, match="user"):
            look_up(ids, torch.tensor(edges), None, ["user"], ["sum"], [3])
    monkeypatch.setattr(module_lookups, "MAX_FLOATS", 2)
    with pytest.raises(DataError, match="at most 2 numbers in vectors of user, got 1 of 3"):
        look_up(*arguments, [3])


def test_the_compilers_view_of_it_has_the_same_shape() -> None:
    with use_rows(Rows()):
        torch.library.opcheck(
            served_lookup.default,
            (
                torch.tensor([1, 2, 3]),
                torch.tensor([0, 1, 3]),
                None,
                ["user"],
                ["sum"],
                [3],
                None,
            ),
        )
