"""A training run: its ranks, its updates and its report, from entering a context to leaving."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from persia import env
from persia._files.writer_lock import JobFolders
from persia._process_exit import mark_participated
from persia._training.backward import BackwardPipeline
from persia._training.checkpoint import unwrap
from persia._training.ranks import Ranks, StepBarrier, uneven_steps
from persia.ctx.embedding import EmbeddingCtx, torch_device
from persia.distributed import DistributedBaseOption, get_default_distributed_option
from persia.errors import ConfigError

if TYPE_CHECKING:
    import os
    from contextlib import AbstractContextManager

    import torch

    from persia._report.summary import TrainingRecord
    from persia._training.backward import GradientBatch
    from persia._training.queues import BoundedQueue
    from persia.ctx.checkpoints import TrainerState
    from persia.ctx.connection import Connection
    from persia.ctx.loss_scaling import LossScaling
    from persia.embedding.optim import Optimizer


class RunCtx(EmbeddingCtx):
    """What ``TrainCtx`` opens and closes; its steps are in ``TrainCtx`` itself."""

    # Set by TrainCtx.
    embedding_optimizer: Optimizer
    dense_optimizer: torch.optim.Optimizer
    grad_scaler: torch.amp.GradScaler | None
    distributed_option: object | None
    backward_buffer_size: int
    backward_workers_size: int
    world_size: int
    rank_id: int
    update_times: int
    _record: TrainingRecord
    _scaling: LossScaling
    _state: TrainerState

    def _join_ranks(self) -> None:
        """Make the model data-parallel, with the option given or the default one."""
        option = self.distributed_option
        if option is None:
            option = get_default_distributed_option(self.device_id)
        if not isinstance(option, DistributedBaseOption):
            raise ConfigError(
                "distributed_option: expected DDPOption or BaguaDistributedOption, got "
                f"{type(option).__name__}"
            )
        self.distributed_option = option
        self.model, optimizer = option.convert2distributed_model(
            self.model,
            self.world_size,
            self.rank_id,
            self.device_id,
            optimizer=self.dense_optimizer,
        )
        self.dense_optimizer = optimizer or self.dense_optimizer

    def join_ranks(self, *, reproducible: bool) -> AbstractContextManager[Any]:
        """Return what lets a rank without batches answer the others' collectives.

        Raises:
            ConfigError: If the ranks exchange more in a step than DDP does.
        """
        if self.world_size == 1:
            return contextlib.nullcontext()
        _check_uneven(
            self.model, self.distributed_option, reproducible, self.grad_scaler is not None
        )
        return uneven_steps(self.model, self.dense_optimizer)

    @property
    def backward_engine(self) -> BackwardPipeline | None:
        """What sends the updates; None outside the ``with`` block."""
        return self._connected().backward

    @property
    def grad_queue(self) -> BoundedQueue[GradientBatch] | None:
        """Updates that wait to be sent; None outside the ``with`` block."""
        engine = self.backward_engine
        return None if engine is None else engine.queue

    def _open(self, stack: contextlib.ExitStack) -> None:
        # Undone from the last to the first: updates end before anything they need does.
        folders = JobFolders()
        stack.callback(folders.release)
        stack.callback(self._leave_ranks)
        super()._open(stack)
        connection = self._connected()
        if connection.backward is not None:
            raise ConfigError("another TrainCtx that shares these embeddings is entered")
        mark_participated()
        connection.worker.configure(self.embedding_config.settings())
        connection.worker.register_optimizer(self.embedding_optimizer.settings())
        if self.world_size > 1:
            self._ranks = Ranks(self.world_size, self.rank_id)
        tracker = self._own_tracker()
        engine = BackwardPipeline(
            connection.worker,
            tracker,
            client=self._new_client(),
            num_workers=self.backward_workers_size,
            capacity=self.backward_buffer_size,
            device=torch_device(self.device_id),
            ranks=self._ranks,
        )
        engine.end_step(self.update_times)
        engine.is_between_passes = self._progress.is_between_passes
        stack.callback(connection.leave_barrier)
        stack.callback(self._end_recording, connection)
        stack.callback(lambda: self._scaling.warn_of_nans(tracker, self.update_times, True))
        stack.callback(connection.end_updates, engine)
        if self._ranks is not None:
            connection.barrier = StepBarrier.join(
                self.world_size,
                self.rank_id,
                engine.hold,
                engine.resume,
                lambda: self._state.of_rank(self._progress),
                env.rpc_timeout_s(),
            )
        connection.recorder = self._record.begin(
            connection.worker, tracker, engine, self.world_size
        )
        connection.backward, connection.folders = engine, folders

    def _end_recording(self, connection: Connection) -> None:
        recorder, connection.recorder = connection.recorder, None
        try:
            if recorder is not None and self._record.has_report:
                self.write_report()
            elif recorder is not None:
                recorder.settle()
        finally:
            self._record.end()

    def _leave_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _new_client(self) -> int:
        # First half of the update ids: random, so that a context that is entered again
        # repeats none of them; the low bits are the rank.
        return secrets.randbits(47) << 16 | self.rank_id

    def write_report(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the report of the run so far: one HTML file that needs nothing beside it.

        Ranks other than 0 record nothing and write nothing.

        Args:
            path: The file; None is the one that the context was given as ``report``.

        Raises:
            ConfigError: Without ``report=``, or outside the ``with`` block.
            OSError: If the file cannot be written.
        """
        self._connected()
        if self.rank_id > 0:
            return
        optimizers = (
            f"{type(self.embedding_optimizer).__name__} for embeddings, "
            f"{type(self.dense_optimizer).__name__} for the dense net"
        )
        self._record.write(path, type(unwrap(self.model)).__name__, optimizers)


def _check_uneven(model: Any, option: object, reproducible: bool, is_scaled: bool) -> None:
    """Refuse ``drop_last=False`` where ranks exchange more in a step than DDP does."""
    problem = ""
    if reproducible:
        problem = (
            "reproducible=False with several ranks, as those that have a batch update in no "
            "order; or keep drop_last=True"
        )
    elif not isinstance(model, DistributedDataParallel):
        problem = f"a model that is data-parallel by DDPOption, got {type(model).__name__}"
    elif getattr(option, "needs_equal_batches", False):
        problem = (
            "an algorithm that does not count steps (gradient_allreduce or bytegrad), got "
            "another; ranks would wait for each other"
        )
    elif is_scaled:
        problem = (
            "mixed_precision=False, as the ranks must agree in every step whether gradients "
            "are finite"
        )
    if problem:
        raise ConfigError(f"drop_last=False: expected {problem}")
