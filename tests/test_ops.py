"""The operators: their contract with torch, the compiler and export."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import persia.nn
import persia.optim
from persia import ops
from persia.errors import ConfigError, DataTypeError
from tests.support.twins import batches, twins


def a_table(name: str, dim: int = 4) -> persia.nn.Embedding:
    module = persia.nn.Embedding(name, dim)
    persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    return module


def test_opcheck_passes_on_each() -> None:
    module = a_table("checked")
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 6])
    weights = torch.rand(6, requires_grad=True)
    tables = (["checked"], ["sum"], [4], None)
    for given in ((offsets, weights), (offsets, None), (None, None)):
        arguments = (module.version, [module.anchor], ids, *given, *tables, True, True)
        torch.library.opcheck(ops.lookup.default, arguments)
    of_backward = (torch.zeros(1, dtype=torch.int64), torch.rand(24), ids, None, None)
    torch.library.opcheck(ops.gradient.default, (*of_backward, *tables, False, 7))
    version = torch.zeros((), dtype=torch.int64)
    torch.library.opcheck(ops.update.default, (version, ids, torch.rand(24), "checked", 0.1))


def test_update_steps_rows_and_changes_the_version() -> None:
    module = a_table("updated")
    before = module(torch.tensor([3, 5])).detach()
    version = torch.zeros((), dtype=torch.int64)
    ops.update(version, torch.tensor([3, 3]), torch.ones(2, 4), "updated", 0.5)
    after = module(torch.tensor([3, 5])).detach()
    assert torch.allclose(after[0], before[0] - 1.0)  # its two gradients are one step
    assert torch.equal(after[1], before[1])
    assert version == 1
    with pytest.raises(ConfigError, match="table 'no such'"):
        ops.update(version, torch.tensor([3]), torch.ones(1, 4), "no such", 0.5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, in inductor
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_training_equals_torchs(backend: str) -> None:
    both = twins("adagrad")
    compiled = torch.compile(both.ours, backend=backend, fullgraph=True)
    for users, items, labels in batches(5):
        ours = ((compiled(users, items) - labels) ** 2).mean()  # type: ignore[no-untyped-call]
        theirs = ((both.torchs(users, items) - labels) ** 2).mean()
        assert abs(ours.item() - theirs.item()) < 1e-5
        both.our_optimizer.zero_grad()
        both.torch_optimizer.zero_grad()
        ours.backward()
        theirs.backward()
        both.our_optimizer.step()
        both.torch_optimizer.step()
    both.assert_equal()


def test_a_compiler_keeps_the_order_of_lookups_and_updates() -> None:
    module = a_table("ordered")

    def look_up_twice(version: torch.Tensor, ids: torch.Tensor) -> Any:
        found = []
        for _ in range(2):
            arguments = (["ordered"], ["sum"], [4], None, True, False)
            found.append(ops.lookup(version, [module.anchor], ids, None, None, *arguments)[0])
            ops.update(version, ids, torch.ones(4), "ordered", 1.0)
        return found

    compiled = torch.compile(look_up_twice, backend="aot_eager", fullgraph=True)
    version = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        first, second = compiled(version, torch.tensor([9]))
    assert torch.allclose(second, first - 1.0)
    assert version == 2


def test_equal_lookups_of_one_graph_both_give_gradients() -> None:
    module = persia.nn.Embedding("twice in a graph", 2, num_embeddings=1)
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    module.weight.data.zero_()

    def twice(ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(ids) + module(ids)
        return out.sum()

    torch.compile(twice, backend="aot_eager", fullgraph=True)(torch.tensor([0])).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert (module.weight.detach() + 0).tolist() == [[-2.0, -2.0]]


def test_two_forwards_before_their_backwards_compiled() -> None:
    both = twins("sgd")
    compiled = torch.compile(both.ours, backend="aot_eager", fullgraph=True)
    one, two = batches(2)
    pair = one, two
    ours = torch.stack([((compiled(u, i) - y) ** 2).mean() for u, i, y in pair]).sum()  # type: ignore[no-untyped-call]
    theirs = torch.stack([((both.torchs(u, i) - y) ** 2).mean() for u, i, y in pair]).sum()
    ours.backward()  # type: ignore[no-untyped-call]
    theirs.backward()  # type: ignore[no-untyped-call]
    both.our_optimizer.step()
    both.torch_optimizer.step()
    both.assert_equal()


def test_export_keeps_lookups_as_nodes() -> None:
    both = twins()
    users, items, _ = next(batches(1))
    program = torch.export.export(both.ours.eval(), (users, items))
    found = [node for node in program.graph.nodes if node.target is ops.lookup.default]
    modules = both.ours.user, both.ours.item
    assert [node.args[5] for node in found] == [[one._tables[0].key] for one in modules]
    assert torch.equal(program.module()(users, items), both.ours(users, items))


def test_ids_of_every_integer_dtype_are_the_same_rows() -> None:
    module = a_table("dtypes")
    ids = torch.tensor([1, 2, 300])
    expected = module(ids)
    for dtype in (torch.int32, torch.int16, torch.uint64):
        assert torch.equal(module(ids.to(dtype)), expected)
    strided = torch.stack([ids, ids + 7], 1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(module(strided), expected)
    # An id that needs all bits but those of the table keeps them.
    high = torch.tensor([(1 << 55) + 1, 1])
    assert not torch.equal(*module(high))
    with pytest.raises(DataTypeError, match="expected integers"):
        module(torch.tensor([1.0]))


def test_saved_tensors_that_are_copied_lose_nothing() -> None:
    module = persia.nn.Embedding("copied", 2, num_embeddings=1)
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    module.weight.data.zero_()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        out = module(torch.tensor([0])).sum()
    out.backward()
    optimizer.step()
    assert (module.weight.detach() + 0).tolist() == [[-1.0, -1.0]]
