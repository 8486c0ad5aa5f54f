"""How the dense net is kept equal over ranks: PyTorch's own means under PERSIA's names.

Ranks are started by ``torchrun`` or ``persia-launcher``; the options here only set up
``torch.distributed`` and wrap the model.
"""

from __future__ import annotations

import atexit
import functools
import time
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from persia import env
from persia._training import comm_hooks
from persia.errors import ConfigError, ServiceUnavailable, did_you_mean
from persia.logger import get_logger

_logger = get_logger("persia.distributed")

DEFAULT_MASTER_PORT = 23456

_BACKENDS = ("nccl", "gloo")
_METHODS = ("tcp", "file", "env")
_FOR_TORCH = (
    "find_unused_parameters",
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "static_graph",
)

# What BaguaDistributedOption passes on, its numbers with the least value of each (an average in
# each step costs as much as gradients do), and options of Bagua's that have no effect here.
_FOR_DDP = ("master_addr", "master_port", "find_unused_parameters")
_NUMBERS = {"default_bucket_size": 1, "warmup_steps": 0, "communication_interval": 2}
_WITHOUT_EFFECT = (
    "autotune_level",
    "bagua_service_port",
    "autotune_max_samples",
    "autotune_warmup_time",
    "is_output_autotune_log",
    "autotune_sampling_confidence_time",
    "enable_bagua_net",
)

# Ranks of one job start within this many seconds of each other.
_START_SPREAD_S = 60.0
_loaded_at = time.time()
# A gloo thread that lets go of the last call's tensors while the interpreter goes down ends
# the process by SIGABRT (pytorch pull request 179291): seen in 3 of 12 exits on one core. It
# needs to be scheduled once before that, and for the interpreter's lock not to be held.
_LET_GO_S = 0.1


@functools.cache
def _let_gloo_go_at_exit() -> None:
    atexit.register(time.sleep, _LET_GO_S)


def _check_known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{what}: expected one of {', '.join(known)}, got {value!r}"
            f"{did_you_mean(value, known)}"
        )


class DistributedBaseOption(ABC):
    """Base of the options that turn a model into a data-parallel one.

    Args:
        master_port: Port where the ranks meet.
        master_addr: Host where they meet; None leaves it to the context or ``MASTER_ADDR``.

    Attributes:
        needs_equal_batches: Whether every rank must make every step, so that the last round
            of a pass is dropped unless it is complete.
    """

    needs_equal_batches = False

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
            model: The model, on its device already.
            world_size: Number of ranks.
            rank_id: This process's rank.
            device_id: CUDA device of the model; None on the CPU.
            master_addr: Host where the ranks meet, if the option names none.
            optimizer: Of the dense parameters.
        """

    def init_with_env_file(self) -> bool:
        """Return whether the ranks meet by a file and need no address."""
        return False


class DDPOption(DistributedBaseOption):
    """PyTorch's ``DistributedDataParallel``.

    Args:
        initialization_method: How the ranks meet: ``tcp``, ``file``, or ``env`` as torchrun
            has set the environment up.
        backend: ``nccl`` on CUDA devices, ``gloo`` on the CPU.
        **options: ``master_addr`` and ``master_port`` (23456) with ``tcp``; where neither is
            given and ``MASTER_ADDR`` and ``MASTER_PORT`` are set, as torchrun does, the ranks
            meet there. ``sync_file`` with ``file``: a path all ranks see, at which there is
            no file yet. ``find_unused_parameters`` (False): needed if a batch may leave
            parameters of the model unused; costs a walk over the graph in each step.
            ``bucket_cap_mb``, ``gradient_as_bucket_view`` and ``static_graph`` go to PyTorch as
            they are.

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
        initialization_method = initialization_method.removesuffix("://")  # torch's "env://"
        _check_known("initialization_method", initialization_method, _METHODS)
        _check_known("backend", backend, _BACKENDS)
        known = ("master_addr", "master_port", "sync_file", *_FOR_TORCH)
        for name in options:
            _check_known("option of DDPOption", name, known)
        if initialization_method == "file" and not options.get("sync_file"):
            raise ConfigError("sync_file: expected a path with initialization_method 'file'")
        # No place to meet was given, so a launcher's choice holds.
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

        A model without parameters to train is returned as it is.

        Raises:
            ConfigError: If it is not known where to meet, the backend does not fit the
                device, or the process is in a group of another size.
            ServiceUnavailable: If the ranks did not meet.
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
            self._join(world_size, rank_id, master_addr)
        _let_gloo_go_at_exit()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model, optimizer
        # Without device_ids: batches are on the device already, and what moves them there would
        # make plain lists of those that have names.
        parallel = torch.nn.parallel.DistributedDataParallel(
            model,
            **{name: self.options[name] for name in _FOR_TORCH if name in self.options},
        )
        return parallel, optimizer

    def _join(self, world_size: int, rank_id: int, master_addr: str | None) -> None:
        method = self._meeting_place(world_size, rank_id, master_addr)
        _logger.info("rank %d of %d joins at %s", rank_id, world_size, method)
        try:
            restart = env.restart_count()
            if method == "env://" and restart:
                # Torchrun serves the same store again, and what the ranks before have left
                # there leads to ports that are closed.
                store = _store_of_start(restart, world_size)
                dist.init_process_group(
                    self.backend, store=store, rank=rank_id, world_size=world_size
                )
                return
            dist.init_process_group(
                self.backend, init_method=method, rank=rank_id, world_size=world_size
            )
        except RuntimeError as exc:
            raise ServiceUnavailable(
                f"rank {rank_id} of {world_size} did not meet the others at {method}: {exc}",
                role="nn-worker",
                replica=rank_id,
                address=method,
            ) from exc

    def _meeting_place(self, world_size: int, rank_id: int, master_addr: str | None) -> str:
        if self.initialization_method == "file":
            return f"file://{self._new_file(rank_id)}"
        in_environment = env.master_address() is not None and env.master_port() is not None
        if self.initialization_method == "env":
            if not in_environment:
                raise ConfigError(
                    "initialization_method: 'env' needs MASTER_ADDR and MASTER_PORT, which "
                    "torchrun sets"
                )
            return "env://"
        if self._place_is_free and master_addr is None and in_environment:
            # torchrun serves the meeting place itself; only env:// knows not to bind there.
            return "env://"
        host = self.master_addr or master_addr or env.master_address()
        if host is None:
            if world_size > 1:
                raise ConfigError(
                    f"master_addr: expected the host where {world_size} ranks meet, got none; "
                    "pass DDPOption(master_addr=...) or set MASTER_ADDR"
                )
            return "tcp://127.0.0.1:0"  # alone: no other rank needs the port
        return f"tcp://{host}:{self.master_port}"

    def _new_file(self, rank_id: int) -> Path:
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
        return path

    def init_with_env_file(self) -> bool:
        """Return whether the ranks meet by a file and need no address."""
        return self.initialization_method == "file"


class BaguaDistributedOption(DistributedBaseOption):
    """Bagua's algorithms by name, on PyTorch's own means.

    ``gradient_allreduce``
        DDP.
    ``bytegrad``
        DDP whose gradients travel as 8-bit codes.
    ``qadam``
        DDP with full gradients for ``warmup_steps``, then with 8-bit codes. The optimizer is
        the one you pass, meant to be Adam; Bagua's own compressed its momentum instead.
    ``decentralized``
        Every rank steps alone; parameters are averaged every ``communication_interval`` steps.
    ``low_precision_decentralized``
        As before; changes since the last average travel as 8-bit codes.
    ``async``
        Post-local SGD: DDP for ``warmup_steps``, then as ``decentralized``, less often.

    The last three leave ranks with different nets between two averages, and BatchNorm's
    buffers with each rank; a checkpoint has rank 0's. They and ``qadam`` count steps, which
    must be the same on all ranks.

    Args:
        algorithm: One of these names.
        **options: ``master_addr``, ``master_port`` and ``find_unused_parameters`` as of
            ``DDPOption``. ``default_bucket_size``: bytes of gradients sent at once.
            ``warmup_steps`` (100 for ``qadam`` and ``async``, else 0) and
            ``communication_interval`` (16 for ``async``, else 4). Bagua's other tuning options
            are taken and have no effect.

    Raises:
        ConfigError: If one of these is unknown or cannot be used.
    """

    def __init__(self, algorithm: str, **options: Any) -> None:
        _check_known("algorithm", algorithm, tuple(comm_hooks.ALGORITHMS))
        known = (*_FOR_DDP, *_NUMBERS, *_WITHOUT_EFFECT)
        for name in options:
            _check_known("option of BaguaDistributedOption", name, known)
        for name, least in _NUMBERS.items():
            value = options.get(name, least)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}: expected an int of at least {least}, got {value!r}")
        chosen = comm_hooks.ALGORITHMS[algorithm]
        self._algorithm = chosen.tuned(
            options.get("warmup_steps"), options.get("communication_interval")
        )
        idle = set(_WITHOUT_EFFECT)
        if chosen.exchange is None:
            idle.add("warmup_steps")
        if chosen.averager is None:
            idle.add("communication_interval")
        ignored = [name for name in options if name in idle]
        if ignored:
            _logger.warning(
                "BaguaDistributedOption: no effect with %r on PyTorch: %s",
                algorithm,
                ", ".join(ignored),
            )
        self._ddp = {name: options[name] for name in _FOR_DDP if name in options}
        if "default_bucket_size" in options:
            self._ddp["bucket_cap_mb"] = options["default_bucket_size"] / 2**20
        super().__init__(
            options.get("master_port", DEFAULT_MASTER_PORT), options.get("master_addr")
        )
        self.algorithm = algorithm
        self.needs_equal_batches = self._algorithm.counts_steps
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
        """Convert by ``DDPOption``, with nccl on a CUDA device and gloo on the CPU.

        What an algorithm does after a step is registered with the optimizer: convert it once.

        Raises:
            ConfigError: As ``DDPOption`` does, or if the algorithm needs the optimizer.
        """
        if self._algorithm.counts_steps and optimizer is None:
            raise ConfigError(
                f"algorithm {self.algorithm!r} works after steps of the optimizer: expected "
                "one, got None"
            )
        _logger.info(
            "Bagua's %s runs as %s",
            self.algorithm,
            self._algorithm.what.format(**vars(self._algorithm)),
        )
        option = DDPOption(backend="gloo" if device_id is None else "nccl", **self._ddp)
        parallel, optimizer = option.convert2distributed_model(
            model, world_size, rank_id, device_id, master_addr, optimizer
        )
        if isinstance(parallel, torch.nn.parallel.DistributedDataParallel):
            comm_hooks.apply(self._algorithm, parallel, optimizer)
        return parallel, optimizer


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return DDP with nccl if a CUDA device is given, else with gloo."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")


def _store_of_start(restart: int, world_size: int) -> Any:
    """Return the part of torchrun's store for ranks that it has started again so often."""
    # Their stubs are of torch._C alone.
    stores: Any = dist
    host, port = env.master_address(), env.master_port()
    store = stores.TCPStore(str(host), int(port or 0), world_size, is_master=False)
    return stores.PrefixStore(f"start-{restart}", store)
