"""How the dense net is kept equal over ranks: PyTorch's own means under PERSIA's names.

Ranks are started by ``torchrun`` or ``persia-launcher``; the options here only set up
``torch.distributed`` and wrap the model.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from persia import env
from persia.config import nearest
from persia.errors import ConfigError
from persia.logger import get_logger

_logger = get_logger("persia.distributed")

DEFAULT_MASTER_PORT = 23456

_BACKENDS = ("nccl", "gloo")
_METHODS = ("tcp", "file")

# Ranks of one job start within this many seconds of each other.
_START_SPREAD_S = 60.0
_loaded_at = time.time()


def _check_known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{what}: expected one of {', '.join(known)}, got {value!r}{nearest(value, known)}"
        )


class DistributedBaseOption(ABC):
    """Base of the options that turn a model into a data-parallel one.

    Args:
        master_port: Port where the ranks meet.
        master_addr: Host where they meet; None leaves it to the context or ``MASTER_ADDR``.
    """

    def __init__(self, master_port: int, master_addr: str | None = None) -> None:
        if type(master_port) is not int or not 1 <= master_port <= 65535:
            raise ConfigError(f"master_port: expected a port in 1..65535, got {master_port!r}")
        self.master_addr = master_addr
        self.master_port = master_port

    @abstractmethod
    def convert2distributed_model(
        self,
        model: torch.nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """Return the data-parallel model, and the optimizer that goes with it.

        Args:
            model: The model to convert, on its device already.
            world_size: Number of ranks.
            rank_id: This process's rank.
            device_id: CUDA device of the model; None on the CPU.
            master_addr: Host where the ranks meet, if the option names none.
            optimizer: Optimizer of the dense parameters.
        """

    @abstractmethod
    def init_with_env_file(self) -> bool:
        """Return whether the ranks meet by a file and need no address."""


class DDPOption(DistributedBaseOption):
    """PyTorch's ``DistributedDataParallel``.

    Args:
        initialization_method: ``tcp`` or ``file``: how the ranks meet.
        backend: ``nccl`` on CUDA devices, ``gloo`` on the CPU.
        **options: ``master_addr`` and ``master_port`` (23456) with ``tcp``; where neither is
            given and ``MASTER_ADDR`` is set, as torchrun does, the ranks meet there.
            ``sync_file`` with ``file``: a path all ranks see, at which there is no file yet.
            ``find_unused_parameters`` (False): needed if a batch may leave parameters of the
            model unused; costs a walk over the graph in each step.

    Raises:
        ConfigError: If an option is unknown or has a value that cannot be used.
    """

    def __init__(
        self, initialization_method: str = "tcp", backend: str = "nccl", **options: Any
    ) -> None:
        if "init_method" in options:
            warnings.warn(
                "DDPOption(init_method=...) is an old spelling of initialization_method",
                DeprecationWarning,
                stacklevel=2,
            )
            initialization_method = options.pop("init_method")
        _check_known("initialization_method", initialization_method, _METHODS)
        _check_known("backend", backend, _BACKENDS)
        known = ("master_addr", "master_port", "sync_file", "find_unused_parameters")
        for name in options:
            if name not in known:
                raise ConfigError(f"DDPOption: unknown option {name!r}{nearest(name, known)}")
        if initialization_method == "file" and not options.get("sync_file"):
            raise ConfigError("sync_file: expected a path with initialization_method 'file'")
        # Nobody chose a place to meet, so that a launcher's choice may hold.
        self._place_is_free = not {"master_addr", "master_port"} & options.keys()
        super().__init__(
            options.pop("master_port", DEFAULT_MASTER_PORT), options.pop("master_addr", None)
        )
        self.initialization_method = initialization_method
        self.backend = backend
        self.options = options

    def convert2distributed_model(
        self,
        model: torch.nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """Join the process group, unless this process has one, and wrap the model.

        Raises:
            ConfigError: If it is not known where to meet, the backend does not fit the
                device, or the process is in a group of another size.
        """
        if self.backend == "nccl" and device_id is None:
            raise ConfigError(
                "backend: 'nccl' needs a CUDA device, got device_id None; use 'gloo' on the CPU"
            )
        if dist.is_initialized():
            joined = (dist.get_rank(), dist.get_world_size())
            if joined != (rank_id, world_size):
                raise ConfigError(
                    f"expected a process group where this is rank {rank_id} of {world_size}, "
                    f"got one where it is rank {joined[0]} of {joined[1]}"
                )
        else:
            method = self._meeting_place(world_size, rank_id, master_addr)
            _logger.info("rank %d of %d joins at %s", rank_id, world_size, method)
            dist.init_process_group(
                self.backend, init_method=method, rank=rank_id, world_size=world_size
            )
        on_device = None if self.backend == "gloo" or device_id is None else [device_id]
        parallel = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=on_device,
            find_unused_parameters=bool(self.options.get("find_unused_parameters", False)),
        )
        return parallel, optimizer

    def _meeting_place(self, world_size: int, rank_id: int, master_addr: str | None) -> str:
        if self.initialization_method == "file":
            path = Path(self.options["sync_file"]).absolute()
            # A file of an earlier job makes ranks read that job's addresses. One that another
            # rank of this job has made is as young as this process.
            if rank_id == 0 and path.exists():
                age_s = _loaded_at - path.stat().st_mtime
                if age_s > _START_SPREAD_S:
                    raise ConfigError(
                        f"sync_file: expected no file at {path}, got one of {age_s:.0f} s "
                        "before this job; remove it"
                    )
            return f"file://{path}"
        if self._place_is_free and master_addr is None and env.master_address():
            # torchrun serves the meeting place itself; only env:// knows not to bind there.
            return "env://"
        host = self.master_addr or master_addr or env.master_address()
        if host is None:
            if world_size > 1:
                raise ConfigError(
                    f"master_addr: expected the host where {world_size} ranks meet, got none; "
                    "pass DDPOption(master_addr=...) or set MASTER_ADDR"
                )
            host = "127.0.0.1"
        return f"tcp://{host}:{self.master_port}"

    def init_with_env_file(self) -> bool:
        """Return whether the ranks meet by a file and need no address."""
        return self.initialization_method == "file"


class BaguaDistributedOption(DistributedBaseOption):
    """Bagua's algorithms by name; of these, ``gradient_allreduce`` is what DDP does.

    Args:
        algorithm: ``gradient_allreduce``.
        **options: ``master_addr`` and ``master_port``; Bagua's own tuning options are taken
            and have no effect.

    Raises:
        ConfigError: If another algorithm is asked for, or an option is unknown.
    """

    _TUNING = (
        "default_bucket_size",
        "autotune_level",
        "bagua_service_port",
        "autotune_max_samples",
        "autotune_warmup_time",
        "is_output_autotune_log",
        "autotune_sampling_confidence_time",
        "enable_bagua_net",
    )

    def __init__(self, algorithm: str, **options: Any) -> None:
        if algorithm != "gradient_allreduce":
            raise ConfigError(
                f"algorithm: expected 'gradient_allreduce', which runs on PyTorch's DDP, got "
                f"{algorithm!r}; Bagua's other algorithms are not available"
            )
        self._meeting = {
            name: options.pop(name)
            for name in ("master_addr", "master_port")
            if name in options
        }
        for name in options:
            if name not in self._TUNING:
                known = (*self._TUNING, "master_addr", "master_port")
                raise ConfigError(
                    f"BaguaDistributedOption: unknown option {name!r}{nearest(name, known)}"
                )
            _logger.warning("Bagua option %s has no effect: PyTorch's DDP does the work", name)
        super().__init__(
            self._meeting.get("master_port", DEFAULT_MASTER_PORT),
            self._meeting.get("master_addr"),
        )
        self.algorithm = algorithm
        self.options = options

    def convert2distributed_model(
        self,
        model: torch.nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """Convert by ``DDPOption``, with nccl on a CUDA device and gloo on the CPU."""
        option = DDPOption(backend="gloo" if device_id is None else "nccl", **self._meeting)
        return option.convert2distributed_model(
            model, world_size, rank_id, device_id, master_addr, optimizer
        )

    def init_with_env_file(self) -> bool:
        """Return False: the ranks meet at an address."""
        return False


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return DDP with nccl if a CUDA device is given, else with gloo."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")
