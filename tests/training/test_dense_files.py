"""Files of the dense side."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore

from persia.errors import CheckpointError, ConfigError

from .conftest import MakeCtx, Net


class Plain(torch.nn.Module):
    """What TorchScript understands."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(
        torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True)
    )


def test_model_and_optimizer_come_back(make_ctx: MakeCtx, tmp_path: Path) -> None:
    ctx = make_ctx()
    model, other = Plain(), Plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ctx.dump_torch_state_dict(model, tmp_path / "new", "dense.pt")
    ctx.dump_torch_state_dict(optimizer, str(tmp_path / "new"), "opt.pt")
    assert not same(model, other)
    ctx.load_torch_state_dict(other, tmp_path / "new" / "dense.pt", map_location="cpu")
    assert same(model, other)
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    ctx.load_torch_state_dict(fresh, str(tmp_path / "new" / "opt.pt"))
    assert fresh.param_groups[0]["lr"] == 0.5
    # written aside and renamed: nothing else is left
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["dense.pt", "opt.pt"]


def test_a_file_can_be_written_again(make_ctx: MakeCtx, tmp_path: Path) -> None:
    ctx, model, other = make_ctx(), Plain(), Plain()
    ctx.dump_torch_state_dict(other, tmp_path, "dense.pt")
    ctx.dump_torch_state_dict(model, tmp_path, "dense.pt")
    ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
    assert same(model, other)


def test_w67_data_parallel_wrapper_leaves_no_prefix(
    make_ctx: MakeCtx, tmp_path: Path, group: None
) -> None:
    ctx, model, other = make_ctx(), Plain(), Plain()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ctx.dump_torch_state_dict(wrapped, tmp_path, "dense.pt")
    state = torch.load(tmp_path / "dense.pt", weights_only=True)
    assert sorted(state) == ["layer.bias", "layer.weight"]
    ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
    assert same(model, other)
    # into a wrapped one, and from a file that has the prefix
    third = torch.nn.parallel.DistributedDataParallel(Plain())
    ctx.load_torch_state_dict(third, tmp_path / "dense.pt")
    assert same(third, other)
    torch.save(wrapped.state_dict(), tmp_path / "prefixed.pt")
    fourth = Plain()
    ctx.load_torch_state_dict(fourth, tmp_path / "prefixed.pt")
    assert same(fourth, model)


def test_model_whose_only_child_is_named_module(make_ctx: MakeCtx, tmp_path: Path) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 1)

    ctx, model, other = make_ctx(), Holder(), Holder()
    ctx.dump_torch_state_dict(model, tmp_path, "dense.pt")
    ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
    assert same(model, other)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_w67_scripted_model_of_a_wrapper(
    make_ctx: MakeCtx, tmp_path: Path, group: None
) -> None:
    ctx, model = make_ctx(), Plain()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ctx.dump_torch_state_dict(wrapped, tmp_path, "jit.pt", is_jit=True)
    scripted = torch.jit.load(str(tmp_path / "jit.pt"))  # type: ignore[no-untyped-call]
    x = torch.ones(3, 2)
    assert torch.equal(scripted(x), model(x))


def test_only_a_module_can_be_scripted(make_ctx: MakeCtx, tmp_path: Path) -> None:
    ctx = make_ctx()
    with pytest.raises(ConfigError, match=r"is_jit=True needs a torch\.nn\.Module, got SGD"):
        ctx.dump_torch_state_dict(ctx.dense_optimizer, tmp_path, "x.pt", is_jit=True)


def test_missing_file(make_ctx: MakeCtx, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dense\.pt, found none"):
        make_ctx().load_torch_state_dict(Plain(), tmp_path / "dense.pt")


def test_w71_a_file_cannot_run_code(make_ctx: MakeCtx, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "touched",))  # type: ignore[return-value]

    with (tmp_path / "evil.pt").open("wb") as file:
        pickle.dump(Evil(), file)
    with pytest.raises(CheckpointError, match=r"evil\.pt cannot be read"):
        make_ctx().load_torch_state_dict(Plain(), tmp_path / "evil.pt")
    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt cannot be read"):
        make_ctx().load_torch_state_dict(Plain(), tmp_path / "evil.pt")
    assert not (tmp_path / "touched").exists()


def test_file_that_does_not_fit(make_ctx: MakeCtx, tmp_path: Path) -> None:
    ctx = make_ctx()
    ctx.dump_torch_state_dict(Plain(), tmp_path, "dense.pt")
    with pytest.raises(CheckpointError, match="does not fit this Net"):
        ctx.load_torch_state_dict(Net(), tmp_path / "dense.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(CheckpointError, match=r"expected a state dict in .*, got Tensor"):
        ctx.load_torch_state_dict(Net(), tmp_path / "tensor.pt")
    ctx.dump_torch_state_dict(ctx.dense_optimizer, tmp_path, "opt.pt")
    with pytest.raises(CheckpointError, match="does not fit this Net"):
        ctx.load_torch_state_dict(Net(), tmp_path / "opt.pt")


def test_directory_that_cannot_be_written(make_ctx: MakeCtx, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="cannot be written"):
        make_ctx().dump_torch_state_dict(Plain(), tmp_path / "file", "dense.pt")


def test_failed_write_leaves_the_old_file(
    make_ctx: MakeCtx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, model, other = make_ctx(), Plain(), Plain()
    ctx.dump_torch_state_dict(model, tmp_path, "dense.pt")

    def no_space(state: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(CheckpointError, match="No space left"):
        ctx.dump_torch_state_dict(other, tmp_path, "dense.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["dense.pt"]
    ctx.load_torch_state_dict(other, tmp_path / "dense.pt")
    assert same(model, other)
