"""Where rows of modules are: stores of this process, contexts, several servers."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia._modules import homes
from persia._modules.homes import home_of
from persia.ctx import TrainCtx
from persia.embedding.optim import SGD, Adagrad
from persia.errors import ConfigError


def a_context(optimizer: Any, compensation: float = 0.0, **slots: Any) -> TrainCtx:
    """A context of two servers, with the slots given."""
    linear = nn.Linear(2, 1)
    return TrainCtx(
        optimizer,
        torch.optim.SGD(linear.parameters(), lr=0.1),
        model=linear,
        embedding_config={"slots_config": slots},
        global_config={
            "embedded_config": {"num_servers": 2},
            "embedding_worker_config": {"delay_compensation": compensation},
        },
    )


@pytest.mark.parametrize("pooling", ["jagged", "sum", "raw"])
def test_in_a_context_modules_use_its_tables(pooling: str) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[1, 2], [2, 3], [4, 4]])
    with a_context(
        SGD(lr=1.0), both={"dim": 3, "pooling": pooling}, more={"dim": 3, "pooling": pooling}
    ) as ctx:
        module = persia.nn.EmbeddingBag("both", 3, mode="sum")
        other = persia.nn.Embedding("more", 3)
        optimizer = persia.optim.SGD(
            persia.nn.sparse_parameters(nn.ModuleList([module, other])), lr=0.5
        )
        assert home_of(module._tables[0]).worker is ctx.embedding_worker
        optimizer.zero_grad()  # the tables of these names had a context before
        before = module(ids).detach(), other(ids[0]).detach()
        (module(ids).sum() + other(ids[0]).sum()).backward()
        optimizer.step()
        # A row moves by the rate and by how often its id occurs.
        moved = before[0] - module(ids).detach()
        assert torch.allclose(moved[:, 0], 0.5 * torch.tensor([3.0, 3.0, 4.0]), atol=1e-5)
        assert torch.allclose(before[1] - other(ids[0]).detach(), torch.full((2, 3), 0.5))
        assert sum(ctx.get_embedding_size()) == 6
        assert ctx.stats()["batches"] == 2
    assert home_of(module._tables[0]).worker is not ctx.embedding_worker


@pytest.mark.parametrize("pooling", ["jagged", "sum", "raw"])
def test_a_delay_compensation_leaves_rows_of_modules_as_they_are_and_says_so(
    pooling: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Distinct ids are no samples: those of one number have nothing in common."""
    homes._warn_of_compensation.cache_clear()
    ids = torch.tensor([[1, 2], [2, 3], [4, 4]])
    slots = {name: {"dim": 3, "pooling": pooling} for name in ("late", "later")}
    with a_context(SGD(lr=1.0), 1.0, **slots) as ctx:
        model = persia.nn.EmbeddingCollection({name: (name, 3) for name in slots})
        optimizer = persia.optim.SGD(persia.nn.sparse_parameters(model), lr=1.0)
        values = {"late": ids, "later": ids[:, :1]}
        before = {name: one.detach() for name, one in model(values).items()}
        # Each but the first misses the steps before it.
        for found in [model(values) for _ in range(3)]:
            optimizer.zero_grad()
            sum(one.sum() for one in found.values()).mul(0.1).backward()
            optimizer.step()
        after = model(values)
        moved = {name: (before[name] - after[name].detach())[:, 0] for name in slots}
        assert torch.allclose(moved["late"], torch.tensor([0.9, 0.9, 1.2]), atol=1e-5)
        assert torch.allclose(moved["later"], torch.full((3,), 0.3), atol=1e-5)
        assert ctx.embedding_worker.stats()["compensated_updates"] == 0
    (line,) = [one for one in caplog.messages if "delay_compensation" in one]
    assert "gradients of modules of persia.nn are not corrected" in line


def test_the_row_of_a_padding_id_is_that_of_the_place_and_of_the_load(tmp_path: Path) -> None:
    ids = torch.tensor([0])
    module = persia.nn.Embedding("padded", 2, padding_idx=0, num_embeddings=1)
    module.weight.copy_(torch.full((1, 2), 5.0))
    assert module(ids).tolist() == [[5.0, 5.0]]
    with a_context(SGD(lr=1.0), padded={"dim": 2, "pooling": "jagged"}) as ctx:
        assert module(ids).tolist() == [[0.0, 0.0]]
        ctx.dump_checkpoint(tmp_path)
        module.weight.copy_(torch.full((1, 2), 7.0))
        assert module(ids).tolist() == [[7.0, 7.0]]
        ctx.load_checkpoint(tmp_path)
        assert module(ids).tolist() == [[0.0, 0.0]]
    assert module(ids).tolist() == [[5.0, 5.0]]


def test_two_servers_give_the_losses_of_torch() -> None:
    theirs = nn.EmbeddingBag(30, 3, mode="mean")
    with a_context(Adagrad(lr=0.1), served={"dim": 3, "pooling": "jagged"}):
        ours = persia.nn.EmbeddingBag("served", 3, num_embeddings=30)
        ours.weight.copy_(theirs.weight)
        optimizers = (
            persia.optim.Adagrad(ours.parameters(), lr=0.1),
            torch.optim.Adagrad(theirs.parameters(), lr=0.1),
        )
        for _ in range(30):
            ids = torch.randint(30, (16, 4))
            losses = []
            for module, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                loss = (module(ids) - 1).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_rows_that_were_copied_before_a_context_are_in_its_tables() -> None:
    theirs = nn.Embedding(4, 3)
    ours = persia.nn.convert(nn.ModuleDict({"copied": theirs}))["copied"]  # type: ignore[index]
    with a_context(SGD(lr=1.0), copied={"dim": 3, "pooling": "jagged"}) as ctx:
        assert torch.equal(ours(torch.arange(4)), theirs.weight)
        assert sum(ctx.get_embedding_size()) == 4


def test_what_a_context_does_not_agree_with_is_refused() -> None:
    with a_context(SGD(lr=1.0), fixed={"dim": 3, "pooling": "jagged"}):
        with pytest.raises(ConfigError, match="embedding_dim is 4, and the embedding config"):
            persia.nn.Embedding("fixed", 4)(torch.tensor([1]))
        module = persia.nn.Embedding("fixed", 3)
        optimizer = persia.optim.Adam(module.parameters(), lr=0.1)
        module(torch.tensor([1])).sum().backward()
        with pytest.raises(ConfigError, match="its servers step rows by sgd"):
            optimizer.step()


def test_tables_declared_later_and_of_other_optimizers_get_stores() -> None:
    one = persia.nn.Embedding("first store", 2)
    persia.optim.SGD(one.parameters(), lr=0.1)
    one(torch.tensor([1]))
    two, three = persia.nn.Embedding("later", 2), persia.nn.Embedding("later too", 2)
    persia.optim.SGD([*two.parameters(), *three.parameters()], lr=0.3)
    two(torch.tensor([1]))
    homes = [home_of(module._tables[0]) for module in (one, two, three)]
    assert homes[0] is not homes[1]
    assert homes[1] is homes[2]


def test_tables_are_one_to_a_store_until_their_rates_differ() -> None:
    names = ["a", "b", "c"]
    ours: Any = persia.nn.EmbeddingCollection({f"rate {name}": 3 for name in names})
    theirs: Any = nn.ModuleList(nn.EmbeddingBag(9, 3, mode="sum") for _ in names)
    for table, bag in zip(ours.tables.values(), theirs, strict=True):
        table.write(torch.arange(9), bag.weight.detach())
    our_optimizer = persia.optim.Adagrad(ours.parameters(), lr=0.1)
    torch_optimizer = torch.optim.Adagrad([{"params": [bag.weight]} for bag in theirs], lr=0.1)
    shared = home_of(ours._tables[0])
    ids = torch.randint(9, (8, 8, 3), generator=torch.Generator().manual_seed(0))
    for step, batch in enumerate(ids):
        for optimizer in (our_optimizer, torch_optimizer):
            optimizer.param_groups[1]["lr"] = 0.1 if step < 3 else 0.4
        ahead = torch.stack(ours(batch))  # by rows that are elsewhere when it is stepped
        given = [bag(column[:, None]) for bag, column in zip(theirs, batch.t(), strict=True)]
        for found, optimizer in ((ahead, our_optimizer), (torch.stack(given), torch_optimizer)):
            optimizer.zero_grad()
            torch.autograd.backward((found - 1).square().sum())
            optimizer.step()
        homes = [home_of(table) for table in ours._tables]
        assert [home is shared for home in homes] == [True, step < 3, True]
        assert len({shared.slots[f"rate {name}"].table for name in names}) == 1
    for table, bag in zip(ours.tables.values(), theirs, strict=True):
        rows = torch.from_numpy(table.read(torch.arange(9)))
        assert torch.allclose(rows, bag.weight, atol=1e-5)


def test_tables_of_different_rates_from_the_beginning_are_in_one_store() -> None:
    modules = [persia.nn.Embedding(f"own rate {number}", 2) for number in range(3)]
    groups = [
        {"params": module.parameters(), "lr": rate}
        for module, rate in zip(modules, (0.1, 0.1, 0.3), strict=True)
    ]
    optimizer = persia.optim.SGD(groups, lr=1.0)
    before = [module(torch.tensor([1])) for module in modules]
    torch.autograd.backward([one.sum() for one in before])
    optimizer.step()
    (home,) = {home_of(module._tables[0]) for module in modules}
    tables = [home.slots[module.table_name].table for module in modules]
    assert tables[0] == tables[1] != tables[2]
    for one, module, rate in zip(before, modules, (0.1, 0.1, 0.3), strict=True):
        assert torch.allclose(one - module(torch.tensor([1])), torch.tensor(rate))


def test_rows_without_a_step_get_an_optimizer_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = persia.nn.Embedding(6, 2, name="looked at before")
    rows = module(torch.arange(3)).detach()
    with caplog.at_level(logging.WARNING):
        optimizer = persia.optim.Adagrad(module.parameters(), lr=0.1)
    assert not caplog.records
    assert torch.equal(module(torch.arange(3)), rows)
    module(torch.arange(3)).sum().backward()
    optimizer.step()
    assert torch.allclose(module(torch.arange(3)), rows - 0.1)
    # Of another optimizer the state is lost, which is said.
    with caplog.at_level(logging.WARNING):
        persia.optim.Adam(module.parameters(), lr=0.1)
    assert "trained by adagrad and are by adam" in caplog.text


@pytest.mark.slow
def test_a_script_may_end_behind_its_last_step() -> None:
    script = """
import torch, persia.nn, persia.optim
bag = persia.nn.EmbeddingBag("of a script", 16)
optimizer = persia.optim.Adagrad(bag.parameters(), lr=0.1)
for _ in range(20):
    bag(torch.randint(1 << 40, (20000, 2))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert ended.returncode == 0
