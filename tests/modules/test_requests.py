"""Ids of an operator's features, and rows that were asked for ahead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import persia.nn
import persia.optim
from persia._core.ids.joined_features import GivenIds, split_features
from persia._modules import requests
from persia._modules.homes import homes_of
from persia.embedding.optim import SGD
from tests.modules.test_homes import a_context

if TYPE_CHECKING:
    from persia._modules.tables import ModuleTable


def stepped(name: str) -> ModuleTable:
    """Return the table of a module that was looked up in once."""
    module = persia.nn.Embedding(name, 2)
    persia.optim.SGD(module.parameters(), lr=0.1)
    module(torch.tensor([1]))
    return module._tables[0]


def given(table: ModuleTable, *ids: int) -> tuple[ModuleTable, GivenIds]:
    return table, split_features([table.name], np.array(ids, np.uint64), None, None)[0]


def ask_ahead(*features: tuple[ModuleTable, GivenIds]) -> list[requests.AheadRows]:
    found = requests.ask(features)
    for one in found:
        requests.put_ahead(one)
    return found


def test_rows_ahead_are_taken_once_and_for_equal_ids_only() -> None:
    table = stepped("ahead of")
    (rows,) = ask_ahead(given(table, 1, 2))

    def taken(*ids: int) -> dict[int, requests.AheadRows]:
        return requests.take_ahead([table], [given(table, *ids)[1]], homes_of([table]))

    assert taken(2, 1) == {}
    assert taken(1, 2) == {0: rows}
    assert taken(1, 2) == {}
    assert not rows.give_up()
    (left,) = ask_ahead(given(table, 3))
    assert left.give_up() == 1
    assert not left.request.batch.is_open()
    rows.request.release()
    assert not requests._ahead


def test_rows_of_before_a_contexts_load_are_not_taken(tmp_path: Path) -> None:
    """Servers would refuse the update of them."""
    with a_context(SGD(lr=1.0), loaded={"dim": 2, "pooling": "jagged"}) as ctx:
        module = persia.nn.Embedding("loaded", 2)
        optimizer = persia.optim.SGD(module.parameters(), lr=0.5)
        before = module(torch.tensor([1])).detach()
        ctx.dump_checkpoint(tmp_path)
        (rows,) = ask_ahead(given(module._tables[0], 1))
        ctx.load_checkpoint(tmp_path)
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert torch.equal(module(torch.tensor([1])), before - 0.5)
        assert rows.give_up() == 1


def test_a_call_ahead_is_taken_once_as_a_whole() -> None:
    one, other = stepped("called"), stepped("called too")

    def put(*ids: int) -> requests.AheadCall:
        rows = requests.ask([given(one, *ids), given(other, *ids)])
        return requests.put_call(rows, np.zeros(4 * len(ids), np.float32))

    call = put(1, 2)
    ids = np.array([1, 2, 1, 2], np.uint64)
    edges = np.arange(5)
    for tables, asked, offsets in (
        ([other, one], ids, None),
        ([one], ids, None),
        ([one, other], ids[::-1].copy(), None),
        ([one, other], ids[:2], None),
        ([one, other], ids, np.array([0, 2, 2, 3, 4])),
        ([one, other], ids, np.array([0, 4])),
    ):
        assert requests.take_call(tables, asked, offsets) is None
    assert requests.take_call([one, other], ids, edges) is call
    assert requests.take_call([one, other], ids) is None
    assert call.give_up() == 0
    call.rows[0].request.release()
    left = put(3)
    left.rows[0].request.release()  # as another backward of its rows would
    assert requests.take_call([one, other], [np.array([3], np.uint64)] * 2) is None
    assert left.give_up() == 2
    assert not requests._calls


def test_what_a_forward_misses_is_its_own_and_a_loaders() -> None:
    table = stepped("missed")
    feature = given(table, 1)
    requests.start_recording()
    requests.begin_forward()
    requests.note_missed([feature], 1)
    assert requests.take_missed() == []
    assert requests.end_forward() == [([feature], 1)]
    requests.note_missed([feature], 2)
    assert requests.take_missed(goes_on=False) == [([feature], 1), ([feature], 2)]
    assert not requests.is_recording()
    requests.begin_forward()
    for _ in range(requests._MOST_MISSED + 1):
        requests.note_missed([feature], 1)
    assert not requests.is_in_forward()
