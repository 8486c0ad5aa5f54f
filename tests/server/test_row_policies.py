"""Eviction and admission by the config: what a server does with a group's settings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._rpc.messages import (
    LookupRequest,
    TableEntries,
    TableGradients,
    TableSigns,
    UpdateRequest,
)
from persia._server.service import ParameterServer
from persia.config import EmbeddingSchema, ParameterServerConfig
from tests.support.services import SETTINGS, SGD

DIM = 4


class Server:
    """One server with slots a and b, a clock of the test's, and ids for signs."""

    def __init__(self, capacity: int = 1000, **settings: Any) -> None:
        self.schema = EmbeddingSchema.load(
            {
                "slots_config": {name: {"dim": DIM} for name in "ab"},
                "group_settings": settings,
            }
        )
        self.now = 100.0
        self.batch_id = 0
        self.server = ParameterServer(
            self.schema,
            ParameterServerConfig(capacity=capacity, num_hashmap_internal_shards=1),
            clock=lambda: self.now,
        )
        self.server.configure(SETTINGS)
        self.server.register_optimizer(SGD)

    def signs(self, slot: str, ids: Any) -> NDArray[np.uint64]:
        return np.array([self.schema.slots[slot].prefix | int(x) for x in ids], np.uint64)

    def held(self, slot: str, ids: Any) -> list[bool]:
        """Whether evaluation finds each id."""
        part = TableSigns(self.schema.slots[slot].table, self.signs(slot, ids))
        reply = self.server.lookup(LookupRequest(0, False, (part,)))
        return [bool(row.any()) for row in reply.tables[0].rows]

    def train(self, slot: str, ids: Any, batch_id: int | None = None) -> list[bool]:
        """Whether each id was admitted."""
        self.batch_id += 1
        number = self.batch_id if batch_id is None else batch_id
        part = TableSigns(self.schema.slots[slot].table, self.signs(slot, ids))
        reply = self.server.lookup(LookupRequest(number, True, (part,)))
        return [bool(row.any()) for row in reply.tables[0].rows]


def test_an_id_is_admitted_at_its_third_batch_and_a_repeated_lookup_counts_once() -> None:
    server = Server(a={"admission": {"policy": "count", "threshold": 3}})
    assert server.train("b", [1, 2]) == [True, True]
    assert server.train("a", [1, 2], batch_id=7) == [False, False]
    assert server.train("a", [1, 2], batch_id=7) == [False, False]
    assert server.train("a", [1]) == [False]
    assert server.train("a", [1, 2], batch_id=9) == [True, False]
    assert server.train("a", [1, 2], batch_id=9) == [True, False]
    # The batch's number alone does not make it a repetition.
    assert server.train("a", [2], batch_id=9) == [True]
    assert server.server.stats()["refused"] == 7


def test_gradients_of_refused_ids_are_counted_and_skipped() -> None:
    server = Server(a={"admission": {"policy": "count", "threshold": 2}})
    server.train("a", [1])
    server.train("a", [1, 2])
    part = TableGradients(
        server.schema.slots["a"].table,
        server.signs("a", [1, 2]),
        None,
        np.ones((2, DIM), np.float32),
    )
    assert server.server.update(UpdateRequest((1, 1), (part,))).num_missing == 1
    assert server.held("a", [1, 2]) == [True, False]


def test_admission_of_a_group_comes_before_that_of_all() -> None:
    server = Server(a={"admission": {"policy": "probability", "probability": 0.0}})
    assert server.train("a", range(50)) == [False] * 50
    assert all(server.train("b", range(50)))


def test_rows_expire_by_seconds() -> None:
    server = Server(a={"eviction": {"ttl_seconds": 16}})
    server.train("a", [1, 2])
    server.train("b", [1])
    server.now += 10
    server.train("a", [2])
    server.now += 5.999
    assert server.held("a", [1, 2]) == [True, True]
    server.now += 1.001
    assert server.held("a", [1, 2]) == [False, True]
    assert server.held("b", [1]) == [True]
    # Evaluation drops nothing; the next training lookup does.
    assert server.server.get_embedding_size() == 3
    server.train("b", [1])
    assert server.server.get_embedding_size() == 2
    assert server.server.stats()["expired"] == 1


def test_rows_expire_by_steps_of_which_a_repeated_lookup_is_none() -> None:
    server = Server(a={"eviction": {"ttl_steps": 2}})
    server.train("a", [1])
    server.train("b", [1], batch_id=5)
    server.train("b", [1], batch_id=5)
    assert server.held("a", [1]) == [True]
    server.train("b", [1])
    assert server.held("a", [1]) == [False]


def test_a_group_by_frequency_keeps_what_is_used_often() -> None:
    server = Server(64, a={"eviction": {"policy": "lfu"}})
    for _ in range(20):
        server.train("a", range(32))
    for first in range(100, 1000, 50):
        server.train("a", range(first, first + 50))
    assert all(server.held("a", range(32)))
    stats = server.server.stats()
    assert (stats["evicted_lru"], stats["evicted"]) == (0, stats["evicted_lfu"])
    assert stats["evicted_lfu"] == 900 + 32 - 64


def test_rows_that_are_written_follow_their_groups_policy() -> None:
    server = Server(a={"eviction": {"ttl_seconds": 1}})
    part = TableEntries(
        server.schema.slots["a"].table,
        server.signs("a", [1]),
        np.ones((1, DIM), np.float32),
        None,
    )
    server.server.set_embedding([part])
    assert server.held("a", [1]) == [True]
    server.now += 2
    assert server.held("a", [1]) == [False]
    signs = [TableSigns(part.table, part.signs)]
    assert len(server.server.read_embedding(signs)[0].signs) == 0
