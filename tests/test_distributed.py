"""Data parallelism of the dense net: PyTorch's, under PERSIA's names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from persia import env
from persia._training.comm_hooks import ALGORITHMS
from persia.distributed import (
    BaguaDistributedOption,
    DDPOption,
    DistributedBaseOption,
    get_default_distributed_option,
)
from persia.errors import ConfigError
from tests.support.fixtures import Log, Monkey


@pytest.fixture
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_default_option_follows_the_device() -> None:
    assert get_default_distributed_option().backend == "gloo"
    assert get_default_distributed_option(0).backend == "nccl"
    option = DDPOption()
    assert (option.initialization_method, option.backend) == ("tcp", "nccl")
    assert (option.master_port, option.master_addr) == (23456, None)
    assert isinstance(option, DistributedBaseOption)


def test_w67_the_documented_spelling_of_the_method_works() -> None:
    with pytest.warns(DeprecationWarning, match="initialization_method"):
        option = DDPOption(init_method="file", backend="gloo", sync_file="x")
    assert option.initialization_method == "file"
    assert option.init_with_env_file() is True
    assert DDPOption().init_with_env_file() is False


ASYNC = {"algorithm": "async"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "glo"}, "backend: expected one of nccl, .*, did you mean 'gloo'"),
        ({"initialization_method": "udp"}, "initialization_method: expected one of tcp, file"),
        ({"initialization_method": "file"}, "sync_file: expected a path"),
        ({"master_prt": 1}, "option of DDPOption: .*'master_prt', did you mean 'master_port'"),
        ({"master_port": 0}, "master_port: expected a port in 1..65535, got 0"),
        ({"master_port": "1"}, "master_port: expected a port in 1..65535, got '1'"),
        (
            {"algorithm": "bytgrad"},
            "expected one of gradient_allreduce, .* did you mean 'bytegrad'",
        ),
        (ASYNC | {"autotune": 1}, "got 'autotune', did you mean"),
        (ASYNC | {"communication_interval": 1}, "expected an int of at least 2, got 1"),
        (ASYNC | {"warmup_steps": -1}, "warmup_steps: expected an int of at least 0, got -1"),
        (ASYNC | {"default_bucket_size": 1e6}, "default_bucket_size: expected an int"),
    ],
)
def test_options_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    option = BaguaDistributedOption if "algorithm" in arguments else DDPOption
    with pytest.raises(ConfigError, match=message):
        option(**arguments)


def test_w67_ranks_must_know_where_to_meet(tmp_path: Path, monkeypatch: Monkey) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    path = tmp_path / "sync"
    path.touch()
    os.utime(path, (0, 0))
    for option, message in (
        (DDPOption(), "'nccl' needs a CUDA device"),
        (DDPOption(backend="gloo"), "the host where 2 ranks meet, got none"),
        (DDPOption("file", "gloo", sync_file=str(path)), f"expected no file at {path}"),
        (DDPOption("env", "gloo"), "'env' needs MASTER_ADDR and MASTER_PORT"),
    ):
        with pytest.raises(ConfigError, match=message):
            option.convert2distributed_model(torch.nn.Linear(1, 1), 2, 0)


@pytest.mark.usefixtures("_no_group_left")
def test_one_rank_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sync_file = tmp_path / "sync"
    sync_file.touch()  # just now, as another rank may have
    option = DDPOption("file", "gloo", sync_file=str(sync_file))
    parallel, same = option.convert2distributed_model(model, 1, 0, optimizer=optimizer)
    assert isinstance(parallel, torch.nn.parallel.DistributedDataParallel)
    assert parallel.module is model
    assert same is optimizer
    assert parallel.find_unused_parameters is False
    # A second model joins the group that is there, Bagua's option too; another rank cannot.
    bagua = BaguaDistributedOption("gradient_allreduce", find_unused_parameters=True)
    second, _ = bagua.convert2distributed_model(torch.nn.Linear(2, 1), 1, 0)
    assert isinstance(second, torch.nn.parallel.DistributedDataParallel)
    asked = DDPOption("file", "gloo", sync_file="x", find_unused_parameters=True)
    second, _ = asked.convert2distributed_model(torch.nn.Linear(2, 1), 1, 0)
    assert isinstance(second, torch.nn.parallel.DistributedDataParallel)
    assert second.find_unused_parameters is True
    with pytest.raises(
        ConfigError, match="this is rank 1 of 2, got one where it is rank 0 of 1"
    ):
        option.convert2distributed_model(torch.nn.Linear(2, 1), 2, 1)
    none = torch.nn.Identity()  # has no parameters, and so needs no wrapper
    assert DDPOption(backend="gloo").convert2distributed_model(none, 1, 0) == (none, None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.usefixtures("_no_group_left")
def test_w67_bagua_algorithms_say_what_runs(algorithm: str, caplog: Log) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    option = BaguaDistributedOption(algorithm)
    if algorithm in {"qadam", "decentralized", "async"}:
        with pytest.raises(ConfigError, match=f"'{algorithm}' works after steps of the optim"):
            option.convert2distributed_model(model, 1, 0)
    with caplog.at_level("INFO", "persia.distributed"):
        parallel, same = option.convert2distributed_model(model, 1, 0, optimizer=optimizer)
    assert f"Bagua's {algorithm} runs as" in caplog.text
    assert "{" not in caplog.text
    assert isinstance(parallel, torch.nn.parallel.DistributedDataParallel)
    assert same is optimizer
    assert option.needs_equal_batches is (algorithm not in {"gradient_allreduce", "bytegrad"})
    before = model.weight.clone()
    parallel(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_w67_bagua_options_without_effect(caplog: Log) -> None:
    option = BaguaDistributedOption(
        "bytegrad",
        autotune_level=1,
        enable_bagua_net=True,
        communication_interval=3,
        default_bucket_size=2**20,
        master_port=1234,
    )
    # One line for all of them, and nothing of those that mean something.
    assert [record.getMessage() for record in caplog.records] == [
        "BaguaDistributedOption: no effect with 'bytegrad' on PyTorch: autotune_level, "
        "enable_bagua_net, communication_interval"
    ]
    assert option.algorithm == "bytegrad"
    assert option.master_port == 1234
    assert option.init_with_env_file() is False


@pytest.mark.parametrize(
    ("options", "launcher", "context", "want"),
    [
        ({}, "", None, "tcp://127.0.0.1:0"),  # alone
        ({}, "node0:29500", None, "env://"),
        ({"initialization_method": "env://"}, "node0:29500", None, "env://"),
        # By hand, as the original's users do, there is an address and no port.
        ({}, "node0", None, "tcp://node0:23456"),
        ({}, "node0:29500", "node1", "tcp://node1:23456"),
        ({}, "", "node1", "tcp://node1:23456"),
        ({"master_port": 99}, "node0:29500", None, "tcp://node0:99"),
        ({"master_addr": "node2"}, "node0", "node1", "tcp://node2:23456"),
    ],
)
def test_where_ranks_meet(
    options: dict[str, Any], launcher: str, context: str | None, want: str
) -> None:
    host, _, port = launcher.partition(":")
    with env.changed(MASTER_ADDR=host or None, MASTER_PORT=port or None):
        assert DDPOption(backend="gloo", **options)._meeting_place(1, 0, context) == want
