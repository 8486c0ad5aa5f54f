"""Ids of an operator's features, and rows that were asked for ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import persia.nn
import persia.optim
from persia._modules import requests
from persia._modules.homes import homes_of
from persia.errors import DataError


def test_features_lie_one_behind_the_other() -> None:
    tables = [persia.nn.Embedding(name, 2)._tables[0] for name in ("split a", "split b")]
    ids = np.array([5, 6, 5, 7], np.uint64)
    one, two = requests.split_features(tables, ids, None, None)
    assert (one.values.tolist(), two.values.tolist()) == ([5, 6], [5, 7])
    edges = np.array([0, 0, 3, 3, 4], np.int64)
    one, two = requests.split_features(tables, ids, edges, None)
    assert (one.asked.batch_size, one.asked.num_ids, two.asked.num_ids) == (2, 3, 1)
    with pytest.raises(DataError, match=r"offsets must be in 0\.\.4"):
        requests.split_features(tables, ids, edges + 2, None)


def test_padding_is_left_out_and_remembered() -> None:
    table = persia.nn.Embedding("padded request", 2)._tables[0]
    ids = np.array([0, 3, 0, 4], np.uint64)
    (given,) = requests.split_features([table], ids, None, None, padding=0)
    assert given.asked.distinct.tolist() == [3, 4]
    assert given.asked.batch_size == 4
    assert given.kept is not None
    assert given.kept.tolist() == [False, True, False, True]


def test_rows_ahead_are_taken_once_and_for_equal_ids_only() -> None:
    module = persia.nn.Embedding("ahead of", 2)
    persia.optim.SGD(module.parameters(), lr=0.1)
    table = module._tables[0]
    module(torch.tensor([1]))

    def given(*ids: int) -> requests.GivenIds:
        return requests.split_features([table], np.array(ids, np.uint64), None, None)[0]

    (rows,) = requests.ask_ahead([(table, given(1, 2))])

    def taken(*ids: int) -> dict[int, requests.AheadRows]:
        return requests.take_ahead([table], [given(*ids)], homes_of([table]))

    assert taken(2, 1) == {}
    assert taken(1, 2) == {0: rows}
    assert taken(1, 2) == {}
    assert not rows.give_up()
    (left,) = requests.ask_ahead([(table, given(3))])
    assert left.give_up()
    assert not left.request.batch.is_open()
    rows.request.release()
