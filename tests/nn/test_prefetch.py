"""Lookups ahead of the model: what they change, and what they do not."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import persia.nn
import persia.optim
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.joined_features import GivenIds
from persia._modules import joint, lookups, requests
from persia._modules.tables import ModuleTable
from persia._server.restore import CheckpointRestore
from persia._training.inflight import StalenessLimiter
from persia.embedding import Constant
from persia.errors import ConfigError
from persia.nn import recipes
from persia.nn.prefetch import PrefetchedLoader, _Pass
from tests.support.waiting import until

NUM = 24


class Rows(torch.utils.data.Dataset[Any]):
    """Ids as a dict of columns, as rows of a matrix, and behind an offset."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 50, (NUM * 8, 3), generator=generator)
        self.labels = torch.rand(NUM * 8, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Any:
        ids = self.ids[place]
        return {"user": ids[0], "clicked": ids, "x": ids.float()}, self.labels[place]


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.user = persia.nn.Embedding(f"{name} user", 4)
        self.item = persia.nn.EmbeddingBag(f"{name} item", 4, padding_idx=7)
        self.column = persia.nn.Embedding(f"{name} column", 4)
        self.top = nn.Linear(4, 1)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        column = features["x"][:, 2].long() + 1000
        found = self.user(features["user"]) + self.item(features["clicked"])
        out: torch.Tensor = self.top(found + self.column(column)).squeeze(1)
        return out


def filled(name: str) -> Model:
    """Return a model with the same rows as others."""
    torch.manual_seed(3)
    model = Model(name)
    for module in (model.user, model.item, model.column):
        rows = torch.arange(1100 * 4, dtype=torch.float32).view(1100, 4).sin()
        module.num_embeddings = 1100
        module.weight.copy_(rows)
    return model


def trained(name: str, depth: int | str | None, every: int = 1) -> tuple[Any, list[float]]:
    """Train, stepping every few batches; return the loader and the losses."""
    model = filled(name)
    optimizer = persia.optim.Adagrad(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Rows(), batch_size=8)
    if depth is not None:
        loader = persia.nn.prefetch(loader, model, depth)
    losses = []
    for number, (features, labels) in enumerate(loader, start=1):
        loss = ((model(features) - labels) ** 2).mean()
        loss.backward()
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return loader, losses


def test_at_depth_1_results_are_those_without_bit_for_bit() -> None:
    _, expected = trained("plain", None)
    loader, losses = trained("ahead", 1)
    assert losses == expected
    assert loader.num_hits >= 3 * (NUM - 4)
    assert len(loader) == NUM
    assert loader.batch_size == 8


def test_lookups_begin_in_the_order_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the lookup thread is always faster than the loop."""
    read = _Pass._read

    def read_and_wait(self: Any, source: Any, items: Any) -> bool:
        is_read = read(self, source, items)
        queued = [item for item in items if item.is_queued]
        until(lambda: not queued or any(item.done.is_set() for item in queued))
        return is_read

    _, expected = trained("plain in order", None)
    monkeypatch.setattr(_Pass, "_read", read_and_wait)
    _, losses = trained("ahead in order", 1)
    assert losses == expected


def test_a_lookup_that_has_its_permit_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = StalenessLimiter.acquire

    def acquire_and_pause(self: StalenessLimiter, needs_permit: bool) -> int:
        found = acquire(self, needs_permit)
        threading.Event().wait(0.01)  # as long as a busy machine gives the thread no processor
        return found

    _, expected = trained("plain beside pauses", None)
    monkeypatch.setattr(StalenessLimiter, "acquire", acquire_and_pause)
    loader, losses = trained("ahead with pauses", 1)
    assert losses == expected
    assert loader.num_hits >= 3 * (NUM - 4)


def test_deeper_lookups_hit_as_well() -> None:
    for depth in (3, "auto"):
        loader, losses = trained(f"depth {depth}", depth)
        assert loader.num_hits >= 3 * (NUM - 6)
        assert losses[-1] < losses[0]


class Settled:
    """Waits until the lookup thread has done what it may, as if it were always the faster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pass: tuple[_Pass, Any] | None = None
        read = _Pass._read

        def noting(own: _Pass, source: Any, items: Any) -> bool:
            self._pass = own, items
            return read(own, source, items)

        monkeypatch.setattr(_Pass, "_read", noting)

    def wait(self) -> None:
        if self._pass is None:
            return
        own, items = self._pass
        queued = [item for item in items if item.is_queued]
        until(lambda: own._limiter.is_exhausted() or all(one.is_begun for one in queued))
        until(lambda: all(one.done.is_set() for one in queued if one.is_begun))


def loop(kind: str, name: str, depth: int | None, settled: Settled) -> tuple[Any, list[float]]:
    """Train in a loop of some kind; return the loader and the losses."""
    model, other = filled(name), persia.nn.Embedding(f"{name} other", 4)
    optimizer = persia.optim.Adagrad(model.parameters(), lr=0.1, fused=kind == "fused")
    others = persia.optim.SGD(other.parameters(), lr=0.1)
    loader: Any = DataLoader(Rows(), batch_size=8)
    if depth is not None:
        loader = persia.nn.prefetch(loader, model, depth)
    losses = []

    def step() -> None:
        optimizer.step()
        settled.wait()
        optimizer.zero_grad()

    for features, labels in loader:
        if kind == "another model first":
            other(torch.tensor([1])).sum().backward()
            others.step()
            settled.wait()
        if kind == "step of the batch before":
            step()
        for _ in range(2 if kind == "two steps" else 1):
            loss = ((model(features) - labels) ** 2).mean()
            loss.backward()
            if kind in ("two steps", "another model first"):
                step()
            losses.append(loss.item())
        settled.wait()
    return loader, losses


@pytest.mark.parametrize(
    "kind", ["two steps", "another model first", "step of the batch before", "fused"]
)
def test_at_depth_1_loops_of_any_kind_give_what_they_give_without(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = Settled(monkeypatch)
    _, expected = loop(kind, f"{kind} plain", None, settled)
    loader, losses = loop(kind, f"{kind} ahead", 1, settled)
    assert losses == expected
    if kind in ("another model first", "fused"):
        assert loader.num_hits >= 3 * (NUM - 4)


@pytest.mark.parametrize("kind", ["weight", "table", "load"])
def test_rows_that_are_written_between_steps_are_those_that_a_model_gets(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settled = Settled(monkeypatch)
    losses: dict[int | None, list[float]] = {}
    for depth in (None, 1):
        model = filled(f"written {kind} {depth}")
        optimizer = persia.optim.Adagrad(model.parameters(), lr=0.1)
        persia.nn.save(model, tmp_path / str(depth))
        loader: Any = DataLoader(Rows(), batch_size=8)
        if depth is not None:
            loader = persia.nn.prefetch(loader, model, depth)
        losses[depth] = []
        for number, (features, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = ((model(features) - labels) ** 2).mean()
            loss.backward()
            optimizer.step()
            settled.wait()
            if kind == "weight":
                model.user.weight.copy_(torch.full((1100, 4), 1.0 / (number + 1)))
            elif kind == "table":
                model.user.table.write(range(1100), np.full((1100, 4), 1.0 / (number + 1)))
            elif number % 4 == 3:
                persia.nn.load(model, tmp_path / str(depth))
            losses[depth].append(loss.item())
    assert losses[1] == losses[None]
    assert_nothing_is_ahead()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_lookup_ahead_waits_for_a_load(
    is_renamed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Servers refuse lookups for training while rows are replaced."""
    commit = CheckpointRestore.commit
    asked: list[Any] = []

    def ask(table: ModuleTable) -> None:
        ids = np.array([1], np.uint64)
        features = FeatureBatch.from_single(table.name, ids)
        given = GivenIds(features, features, ids, None)
        asked.extend(requests.ask([(table, given)]))

    def commit_beside(self: CheckpointRestore, *rest: Any) -> None:
        thread.start()
        thread.join(0.2)  # which it does in vain, unless the lookup is refused
        commit(self, *rest)

    models = [persia.nn.convert(nn.Embedding(9, 2), prefix="beside ") for _ in range(2)]
    for model in models:
        persia.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(3))
    persia.nn.save(models[0], tmp_path)
    loaded: Any = models[1 if is_renamed else 0]
    thread = threading.Thread(target=ask, args=(loaded._tables[0],))
    monkeypatch.setattr(CheckpointRestore, "commit", commit_beside)
    persia.nn.load(loaded, tmp_path)
    thread.join(60)
    assert asked[0].give_up() == 0
    asked[0].request.release()


def test_accumulation_neither_waits_for_ever_nor_changes_a_bit() -> None:
    _, expected = trained("plain accumulated", None, every=4)
    _, losses = trained("ahead accumulated", 1, every=4)
    assert losses == expected


def test_a_lookup_that_waits_for_a_permit_notes_that_there_is_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules[PrefetchedLoader.__module__]  # the function has its name
    monkeypatch.setattr(module, "_WAIT_S", 10.0)
    monkeypatch.setattr(module, "_WINDOW", 1)
    monkeypatch.setattr(module, "_MANY_WAITS", -1)  # each batch is a reason to look further
    deepen = PrefetchedLoader.deepen
    limiters: list[StalenessLimiter] = []
    acquire = StalenessLimiter.acquire

    def acquire_and_note(self: StalenessLimiter, needs_permit: bool) -> int:
        limiters[:] = [self]
        return acquire(self, needs_permit)

    def deepen_while_it_waits(self: PrefetchedLoader) -> None:
        if self.depth == 1:
            changed: Any = limiters[0]._changed
            until(lambda: changed._waiters)
        deepen(self)

    monkeypatch.setattr(StalenessLimiter, "acquire", acquire_and_note)
    monkeypatch.setattr(PrefetchedLoader, "deepen", deepen_while_it_waits)
    # Without a step in between, no permit comes back that would wake the thread.
    loader, _ = trained("deeper", "auto", every=4)
    assert loader.num_hits


def test_a_loop_that_is_left_leaves_nothing_in_flight() -> None:
    model = Model("left")
    persia.optim.SGD(model.parameters(), lr=0.1)
    for number, (features, _) in enumerate(
        persia.nn.prefetch(DataLoader(Rows(), batch_size=8), model, 2)
    ):
        model(features).sum().backward()
        if number == 5:
            break
    assert_nothing_is_ahead()


def assert_nothing_is_ahead() -> None:
    assert not requests._ahead
    assert not requests._calls
    assert not requests.is_recording()


class Collected(nn.Module):
    """Two features of one call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        names = {"user": (f"{name} user", 4), "item": (f"{name} item", 4)}
        self.features = persia.nn.EmbeddingCollection(names, initialization=Constant(0.5))
        self.top = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(torch.cat(self.features(ids), 1)).squeeze(1)
        return out


class Converted(nn.Module):
    """The same as modules of torch's, one of them a bag, converted."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.user = nn.Embedding(60, 4)
        self.item = nn.EmbeddingBag(60, 4, mode="sum")
        for one in (self.user, self.item):
            nn.init.constant_(one.weight, 0.5)
        self.top = nn.Linear(8, 1)
        persia.nn.convert(self, prefix=f"{name} ")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors = self.user(ids[:, 0]), self.item(ids[:, 1:2])
        out: torch.Tensor = self.top(torch.cat(vectors, 1)).squeeze(1)
        return out


@pytest.mark.parametrize("kind", [Collected, Converted])
def test_a_call_is_looked_up_and_pooled_by_the_lookup_thread(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled: list[str] = []

    def pool(features: Any) -> Any:
        pooled.append(threading.current_thread().name)
        return own_pool(features)

    own_pool = lookups.pool
    for place in (lookups, joint, recipes):
        monkeypatch.setattr(place, "pool", pool)
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(50, (NUM, 8, 2), generator=generator)
    losses: dict[int | None, list[float]] = {}
    for depth in (None, 1, 3):
        torch.manual_seed(0)
        model = kind(f"{kind.__name__} {depth}")
        optimizer = persia.optim.Adagrad(model.parameters(), lr=0.1)
        loader: Any = batches if depth is None else persia.nn.prefetch(batches, model, depth)
        pooled.clear()
        losses[depth] = []
        for ids in loader:
            optimizer.zero_grad()
            loss = (model(ids) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            losses[depth].append(loss.item())
        if depth is not None:
            assert loader.num_hits >= 2 * (NUM - 3 - 2 * depth)
            assert loader.num_hits + loader.num_misses == 2 * NUM
            assert pooled.count("persia-prefetch") >= NUM - 3 - 2 * depth
            assert pooled[-1] == "persia-prefetch"
    assert losses[1] == losses[None]
    assert losses[3][-1] < losses[3][0]
    assert_nothing_is_ahead()


def test_what_cannot_be_looked_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="depth: expected 'auto'"):
        persia.nn.prefetch([], Model("refused"), 0)
    with pytest.raises(ConfigError, match="got Linear with none"):
        persia.nn.prefetch([], nn.Linear(2, 2))
    swapped: Any = [Model("swapped"), []]
    with pytest.raises(ConfigError, match="a loader and a model, in this order, got Model and"):
        persia.nn.prefetch(*swapped)
