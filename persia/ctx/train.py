"""The context that trains."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from persia import env
from persia._files.writer_lock import JobFolders
from persia._process_exit import mark_participated
from persia._report import summary
from persia._report.recorder import Recorder
from persia._training.backward import BackwardPipeline
from persia._training.checkpoint import unwrap
from persia._training.ranks import Ranks, StepBarrier, uneven_steps
from persia.ctx.base import PreprocessMode
from persia.ctx.checkpoints import TrainerState
from persia.ctx.embedding import EmbeddingCtx
from persia.ctx.session import torch_device
from persia.distributed import DistributedBaseOption, get_default_distributed_option
from persia.embedding.optim import Optimizer
from persia.errors import ConfigError, DataError, DataTypeError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.batch import PersiaTrainingBatch
    from persia._training.inflight import InFlightBatch, InFlightTracker
    from persia._training.progress import Plain, Position
    from persia._training.queues import BoundedQueue
    from persia.config import ConfigSource
    from persia.ctx.connection import Connection
    from persia.embedding import EmbeddingConfig

logger = logging.getLogger("persia.ctx")


class TrainCtx(EmbeddingCtx):
    """Trains a model: the dense part here, the embeddings at the parameter servers.

    Args:
        embedding_optimizer: One of ``persia.embedding.optim``.
        dense_optimizer: A torch optimizer over the model's parameters.
        grad_scalar_update_factor: With mixed precision, what the scale of the loss is
            divided by when an embedding gradient is not finite. (The original's spelling.)
        backward_buffer_size: Updates that wait before ``backward`` does.
        backward_workers_size: Updates sent at the same time.
        grad_update_buffer_size: Without effect, as ``lookup_emb_directly``.
        mixed_precision: Scale the loss and run the model under autocast. None is True with
            a CUDA device and False without.
        distributed_option: Used with more than one rank.
        model: As of ``EmbeddingCtx``, as are all that are not named here.
        embedding_gradient_reduction: Over ranks, ``"mean"`` (equals synchronous training) or
            ``"sum"``.
        report: HTML file for rank 0's report of the run, written when the context is left.
        tensorboard: Folder for rank 0's event files: loss, speed, rows, norms, reported values.

    Attributes:
        world_size: Number of ranks; ``rank_id`` is this one.
        mixed_precision: Whether the loss is scaled.
        grad_scaler: The ``torch.amp.GradScaler``, or None.
        update_times: Number of ``backward`` calls.

    Example:
        >>> with TrainCtx(  # doctest: +SKIP
        ...     model=model,
        ...     embedding_optimizer=Adagrad(lr=0.05),
        ...     dense_optimizer=torch.optim.Adam(model.parameters()),
        ...     embedding_config="embedding_config.yml",
        ... ) as ctx:
        ...     for batch in DataLoader(dataset):
        ...         output, labels = ctx.forward(batch)
        ...         ctx.backward(loss_fn(output, labels[0]))
    """

    __module__ = "persia.ctx"

    def __init__(
        self,
        embedding_optimizer: Optimizer,
        dense_optimizer: torch.optim.Optimizer,
        grad_scalar_update_factor: float = 4,
        backward_buffer_size: int = 10,
        backward_workers_size: int = 8,
        grad_update_buffer_size: int = 60,
        lookup_emb_directly: bool = True,
        mixed_precision: bool | None = None,
        distributed_option: object | None = None,
        model: Any = None,
        embedding_config: EmbeddingConfig | ConfigSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
        embedding_gradient_reduction: str = "mean",
        report: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_optimizers(embedding_optimizer, dense_optimizer, model)
        _check_sizes(backward_buffer_size, backward_workers_size, grad_scalar_update_factor)
        if embedding_gradient_reduction not in ("mean", "sum"):
            raise ConfigError(
                "embedding_gradient_reduction must be 'mean' or 'sum', got "
                f"{embedding_gradient_reduction!r}"
            )
        super().__init__(
            PreprocessMode.TRAIN,
            model,
            embedding_config,
            threadpool_worker_size,
            device_id,
            global_config=global_config,
            embedding_worker=embedding_worker,
        )
        self.embedding_optimizer = embedding_optimizer
        self.dense_optimizer: torch.optim.Optimizer = dense_optimizer
        self.grad_scalar_update_factor = grad_scalar_update_factor
        self.backward_buffer_size = backward_buffer_size
        self.backward_workers_size = backward_workers_size
        self.distributed_option = distributed_option
        self.world_size = env.get_world_size() or 1
        self.rank_id = env.get_rank() or 0
        has_device = self.device_id is not None
        self.mixed_precision = has_device if mixed_precision is None else mixed_precision
        device = torch_device(self.device_id)
        self.grad_scaler = torch.amp.GradScaler(device.type) if self.mixed_precision else None
        self._scaling = LossScaling()
        self.update_times = 0
        if self.world_size > 1:
            self._join_ranks()
        # Each rank computes the mean over its own batch; the worker divides by the scale.
        self._reduction = self.world_size if embedding_gradient_reduction == "mean" else 1
        self._state = TrainerState(self.rank_id, self.world_size)
        self._report, self._tensorboard = report, tensorboard
        summary.check_outputs(report, tensorboard, self.rank_id)
        self._has_warned_no_gradients = False

    # --- its ranks, its updates and its report ----------------------------------------------

    def _join_ranks(self) -> None:
        """Make the model data-parallel, with the option given or the default one."""
        self.distributed_option = option = _distributed(self.distributed_option, self.device_id)
        self.model, optimizer = option.convert2distributed_model(
            self.model,
            self.world_size,
            self.rank_id,
            self.device_id,
            optimizer=self.dense_optimizer,
        )
        self.dense_optimizer = optimizer or self.dense_optimizer

    def join_ranks(self, *, reproducible: bool) -> AbstractContextManager[Any]:
        """Return what lets a rank without batches answer the others' collectives."""
        if self.world_size == 1:
            return contextlib.nullcontext()
        is_scaled = self.grad_scaler is not None
        _check_uneven(self.model, self.distributed_option, reproducible, is_scaled)
        return uneven_steps(self.model, self.dense_optimizer)

    @property
    def backward_engine(self) -> BackwardPipeline | None:
        """What sends the updates; None outside the ``with`` block."""
        return self._connected().connection.backward

    def _engine(self, method: str) -> BackwardPipeline:
        engine = self.backward_engine
        if engine is None:
            raise ConfigError(f"TrainCtx.{method} must be called inside `with TrainCtx(...)`")
        return engine

    @property
    def grad_queue(self) -> BoundedQueue[InFlightBatch] | None:
        """Updates that wait to be sent; None outside the ``with`` block."""
        return None if self.backward_engine is None else self.backward_engine.queue

    def _open(self, stack: contextlib.ExitStack) -> None:
        # Undone from the last to the first: updates end before what they need.
        folders = JobFolders()
        stack.callback(folders.release)
        stack.callback(self._leave_ranks)
        super()._open(stack)
        session = self._connected()
        connection, tracker = session.connection, session.tracker
        if connection.backward is not None:
            raise ConfigError("another TrainCtx that shares these embeddings is entered")
        mark_participated()
        connection.worker.configure(self.embedding_config.settings())
        connection.worker.register_optimizer(self.embedding_optimizer.settings())
        if self.world_size > 1:
            self._ranks = Ranks(self.world_size, self.rank_id)
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
        engine.is_between_passes = session.progress.is_between_passes
        stack.callback(connection.leave_barrier)
        stack.callback(self._end_recording, connection)
        stack.callback(lambda: self._scaling.warn_of_nans(tracker, self.update_times, True))
        stack.callback(connection.end_updates, engine)
        if self._ranks is not None:
            connection.barrier = StepBarrier(
                self.world_size,
                self.rank_id,
                engine.hold,
                engine.resume,
                lambda: self._state.of_rank(session.progress),
                env.rpc_timeout_s(),
            )
        if self.rank_id == 0 and (self._report is not None or self._tensorboard is not None):
            connection.recorder = Recorder(
                connection.worker, tracker, engine, self.world_size, self._tensorboard
            )
        connection.backward, connection.folders = engine, folders

    def _end_recording(self, connection: Connection) -> None:
        recorder = connection.recorder
        if recorder is None:
            return
        try:
            if self._report is None:
                recorder.settle()
            else:
                self.write_report()
        finally:
            connection.recorder = None
            recorder.close()

    def _leave_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _new_client(self) -> int:
        # First half of the update ids: random, so that a context that is entered again
        # repeats none of them; the low bits are the rank.
        return secrets.randbits(47) << 16 | self.rank_id

    def write_report(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the report of the run so far; without a path, to the file ``report=`` names.

        Raises:
            ConfigError: Without ``report=``, or outside the ``with`` block.
            OSError: If the file cannot be written.
        """
        recorder = self._connected().connection.recorder
        if self.rank_id > 0:
            return
        if recorder is None or self._report is None:
            raise ConfigError(
                "TrainCtx.write_report: expected TrainCtx(report='report.html'), which has the "
                "run recorded, and to be called inside its `with`"
            )
        summary.write(
            self._report if path is None else path,
            recorder,
            unwrap(self.model),
            self.embedding_optimizer,
            self.dense_optimizer,
        )

    # --- checkpoints ------------------------------------------------------------------------

    def dump_checkpoint(  # type: ignore[override]  # the original's arguments
        self,
        dst_dir: str | os.PathLike[str],
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
        *,
        keep_last: int = 1,
    ) -> None:
        """Write all that training needs to continue, as it is after the last ``backward``.

        Embeddings and models with their optimizers' states, the scaler, random generators,
        and how far the data is. With several ranks, rank 0's call is for all of them, and a
        call of another does nothing. Arguments and errors are those of
        ``EmbeddingCtx.dump_checkpoint``; ``opt_filename`` is the dense optimizer's file.

        Raises:
            ServiceTimeout: If a rank does not come to the end of the step; names it.
        """
        dense = {dense_model_filename: self._own_model(), opt_filename: self.dense_optimizer}
        to_script = {jit_dense_model_filename: self.model} if with_jit_model else {}
        self._dump(dst_dir, dense, to_script, blocking, keep_last)

    def load_checkpoint(  # type: ignore[override]  # the original's arguments
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        *,
        features: Iterable[str] | None = None,
    ) -> None:
        """Load a checkpoint and continue from it. With several ranks, all of them call this.

        The next pass over a ``DataLoader`` leaves out the batches that were trained. In
        reproducible mode the run continues bit for bit as if it had not been stopped.
        Arguments and errors are those of ``EmbeddingCtx.load_checkpoint``. Several ranks
        always wait; with ``features`` where training was is not restored.
        """
        dense = {dense_model_filename: self._own_model(), opt_filename: self.dense_optimizer}
        self._load(src_dir, map_location, dense, blocking, features)

    @property
    def resume_position(self) -> Position:
        """How far the data was in the checkpoint that was loaded.

        ``passes`` over the data had ended, and of the next one ``batches`` were trained. It
        counts on from there as passes end.
        """
        return self._connected().progress.where()

    def _trainer_state(self, others: list[Plain]) -> Plain:
        progress = self._connected().progress
        return self._state.of_all(self.update_times, self.grad_scaler, progress, others)

    def _resume(self, trainer: Plain) -> None:
        self.update_times = trainer["step"]
        engine = self.backward_engine
        if engine is not None:
            engine.end_step(self.update_times)
            engine.client = self._new_client()  # numbers of updates come again
        if self.grad_scaler is not None and trainer["scaler"] is not None:
            self.grad_scaler.load_state_dict(trainer["scaler"])
        session = self._connected()
        session.lookups.resume(self._state.restore(trainer, session.progress))
        logger.info("continues after step %d, %s", self.update_times, self.resume_position)

    # --- steps ------------------------------------------------------------------------------

    def wait_servers_ready(self) -> None:
        """Wait, up to 300 s, until all servers are configured and answer."""
        self._connected().connection.wait_until_ready()

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Return the model's output, under autocast with mixed precision, and the labels."""
        if not self.mixed_precision:
            return super().forward(batch)
        with torch.autocast(torch_device(self.device_id).type):
            return super().forward(batch)

    def set_lr(self, lr: float, group: str | None = None) -> None:
        """Set the learning rate of embeddings from the next ``backward`` on, on this rank.

        Gradients in flight keep the rate under which they were computed. It holds until the
        end of the ``with`` block, or until an optimizer is registered. Setting the same rate
        again costs nothing.

        Args:
            lr: Learning rate, such as ``scheduler.get_last_lr()[0]``.
            group: A group of the embedding config, or a slot outside any, with an
                ``optimizer`` under ``group_settings``. None is for all groups that have no
                rate of their own, by the config or by an earlier call.

        Raises:
            ConfigError: If rate or group cannot be used, or outside the ``with`` block.
        """
        self._engine("set_lr").learning_rates.set(lr, group)

    def keep(self, batch: PersiaTrainingBatch) -> None:
        """Hold a batch, to accumulate gradients, until a ``backward`` whose loss reaches it.

        ``embedding_staleness`` bounds how many can be kept. One that has ended already is a
        DataError.

        Example:
            >>> for number, batch in enumerate(loader, start=1):  # doctest: +SKIP
            ...     output, labels = ctx.forward(batch)
            ...     losses.append(loss_fn(output, labels[0]) / 4)
            ...     if number % 4:
            ...         ctx.keep(batch)
            ...     else:
            ...         ctx.backward(sum(losses))
            ...         losses.clear()
        """
        if batch.ticket is None:
            raise DataError(f"batch {batch.batch_id} has no gradients that could be kept")
        self._connected().tracker.keep(batch.ticket)
        self._prepared[id(batch)] = batch
        self._kept.append(batch)

    def backward(
        self, loss: torch.Tensor, embedding_gradient_check_frequency: int = 20
    ) -> torch.Tensor:
        """Run the loss backward, step the dense optimizer, and send embedding gradients.

        Without a GradScaler, the embedding-worker leaves non-finite rows out one by one and
        counts them. With one, any non-finite gradient skips the whole batch, dense and
        sparse alike; every step is checked, for the scaler waits for the device anyway.

        Args:
            loss: A scalar that depends on the current batch, and on those kept. It is
                returned, multiplied with the scale under mixed precision.
            embedding_gradient_check_frequency: Steps between warnings of rows left out.

        Raises:
            DataError: If no batch was prepared, the current one had its backward, or the loss
                is not one number that depends on something trained.
            ConfigError: Outside the ``with`` block.
            BaseException: What an earlier update raised.
        """
        _check_loss(loss)
        session, engine = self._connected(), self._engine("backward")
        recorder = session.connection.recorder
        engine.raise_failure()
        current = self._batch_to_train(session.tracker)
        self._scaling.loss = unscaled = loss.detach()
        scale, step = 1.0, self.update_times + 1
        if self.grad_scaler is not None:
            loss, scale = self.grad_scaler.scale(loss), self.grad_scaler.get_scale()
        session.last_step = step, unscaled.item
        loss.backward()  # type: ignore[no-untyped-call]
        self._output = None
        if recorder is not None and recorder.note_step(step, unscaled):
            # Every few steps, while leaves have gradients.
            recorder.note_norms(self._prepared.values(), gradients(self.dense_optimizer), scale)
        updates = engine.collect(list(self._prepared.values()), current)
        # What this backward has not reached is still held.
        self._kept = [batch for batch in self._kept if batch.awaits_backward()]
        for key, batch in list(self._prepared.items()):
            if not batch.awaits_backward():
                del self._prepared[key]
        self._step(engine, updates, scale)
        self.dense_optimizer.zero_grad()
        self.update_times = step
        if self.rank_id:
            self._state.note_step()
        engine.end_step(step)
        if step % max(embedding_gradient_check_frequency, 1) == 0:
            self._scaling.warn_of_nans(session.tracker, step)
        return loss

    def _batch_to_train(self, tracker: InFlightTracker) -> PersiaTrainingBatch:
        """Return the current batch, checked before the loss changes any gradient."""
        current = self.current_batch
        if current is None:
            raise DataError(
                "no batch to take gradients of: call ctx.forward(batch) or "
                "ctx.prepare_features(batch) first"
            )
        if current.ticket is not None:
            tracker.check_open(current.ticket)
        elif not self._has_warned_no_gradients:
            self._has_warned_no_gradients = True
            logger.warning(
                "batch %d has no embedding gradients (made with requires_grad=False, or looked "
                "up in an eval_ctx), so it trains the dense net only; said once",
                current.batch_id,
            )
        tracker.release_orphans()
        return current

    def _step(
        self, engine: BackwardPipeline, updates: list[InFlightBatch], scale: float
    ) -> None:
        """Step the dense optimizer and queue the updates; under a scaler both or neither."""
        if self.grad_scaler is None:
            # Queued first: workers send while the dense optimizer steps.
            engine.submit(updates, scale * self._reduction)
            self.dense_optimizer.step()
            return
        # Not every algorithm makes the dense gradients of all ranks equal.
        are_own = getattr(self.distributed_option, "needs_equal_batches", False)
        factor, ranks = self.grad_scalar_update_factor, self._ranks
        try:
            is_finite = self._scaling.step(
                self.grad_scaler, self.dense_optimizer, updates, scale, factor, ranks, are_own
            )
        except BaseException:
            engine.discard(updates)
            raise
        if is_finite:
            engine.submit(updates, scale * self._reduction)
        else:
            engine.skip(updates)
            self._scaling.is_loss_bad(self.update_times + 1)


class LossScaling:
    """Steps under a GradScaler, and what is logged of gradients that are not finite."""

    def __init__(self) -> None:
        self.loss: torch.Tensor | None = None  # of the last step; reading it waits
        self._num_warned = 0  # rows that were not finite, when that was last logged
        self._num_bad_losses = 0  # not finite, of those that were read

    def step(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        updates: list[InFlightBatch],
        scale: float,
        update_factor: float,
        ranks: Ranks | None,
        are_own: bool,
    ) -> bool:
        """Step the dense optimizer; False if a gradient of it or of ``updates`` is not finite.

        ``are_own``: the dense gradients are this rank's, and may be finite on it only; the
        scaler would skip the step there, and the average that goes with it.
        """
        is_finite = all(update.is_finite() for update in updates)
        if ranks is not None:
            is_finite = is_finite and (not are_own or is_dense_finite(optimizer))
            is_finite = not ranks.any(not is_finite)
        if not is_finite:
            # The dense gradients are dropped too: no step, and a smaller scale.
            scaler.update(scale / update_factor)
            return False
        if not gradients(optimizer):
            return True  # the scaler refuses an optimizer without any gradient
        scaler.step(optimizer)
        scaler.update()
        # The scaler shows that it skipped the step by lowering the scale.
        return scaler.get_scale() >= scale

    def warn_of_nans(self, tracker: InFlightTracker, step: int, is_last: bool = False) -> None:
        """Log how many embedding gradients were not finite, if there are more than before."""
        total, by_feature = tracker.nan_counts()
        if total <= self._num_warned:
            return
        if self.is_loss_bad(step) and not is_last:
            return  # all gradients of a bad loss are: counted at the end
        self._num_warned = total
        logger.warning(
            "%d embedding gradients were not finite so far and were left out: %s",
            total,
            ", ".join(f"{name} {count}" for name, count in sorted(by_feature.items())),
        )

    def is_loss_bad(self, step: int) -> bool:
        """Whether the last loss is not finite; logs the 1st, 10th, 100th... that is not.

        It waits for the device: call it only where a gradient is known not to be finite.
        """
        value = 0.0 if self.loss is None else self.loss.item()
        if math.isfinite(value):
            return False
        self._num_bad_losses += 1
        if str(self._num_bad_losses).strip("0") == "1":
            logger.warning(
                "the loss is %s at step %d: lower the learning rate, or look at the data",
                value,
                step,
            )
        return True


def is_dense_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no dense gradient holds NaN or Inf. Waits for the device."""
    checks = [torch.isfinite(gradient).all() for gradient in gradients(optimizer)]
    return not checks or bool(torch.stack(checks).all())


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have one."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return [one.grad for one in parameters if one.grad is not None]


def _distributed(option: object | None, device_id: int | None) -> DistributedBaseOption:
    if option is None:
        option = get_default_distributed_option(device_id)
    if not isinstance(option, DistributedBaseOption):
        raise ConfigError(
            "distributed_option: expected DDPOption or BaguaDistributedOption, got "
            f"{type(option).__name__}"
        )
    return option


def _check_uneven(model: Any, option: object, reproducible: bool, is_scaled: bool) -> None:
    """Refuse ``drop_last=False`` where ranks exchange more in a step than DDP does."""
    expected = ""
    if reproducible:
        expected = (
            "reproducible=False with several ranks, as those that have a batch update in no "
            "order; or keep drop_last=True"
        )
    elif not isinstance(model, DistributedDataParallel):
        expected = f"a model that is data-parallel by DDPOption, got {type(model).__name__}"
    elif getattr(option, "needs_equal_batches", False):
        expected = "gradient_allreduce or bytegrad, as other algorithms count steps"
    elif is_scaled:
        expected = "mixed_precision=False, as all ranks must agree on each step of the scaler"
    if expected:
        raise ConfigError(f"drop_last=False: expected {expected}")


def _check_optimizers(embedding_optimizer: object, dense_optimizer: Any, model: Any) -> None:
    """Refuse what is no optimizer; warn of a dense one that cannot train the model."""
    if not isinstance(embedding_optimizer, Optimizer):
        name = "Adagrad"
        if isinstance(embedding_optimizer, type) and issubclass(embedding_optimizer, Optimizer):
            name = embedding_optimizer.__name__
        raise ConfigError(
            "embedding_optimizer: expected an instance of one of persia.embedding.optim, such "
            f"as {name}(lr=0.1), got {embedding_optimizer!r:.200}"
        )
    for name, given in (("dense_optimizer", dense_optimizer), ("model", model)):
        if given is None:
            raise ConfigError(f"TrainCtx needs {name}=, got None")
    groups = getattr(dense_optimizer, "param_groups", None)
    if groups is None or not callable(getattr(model, "parameters", None)):
        return
    own = {id(parameter) for parameter in model.parameters()}
    if own and not any(id(one) in own for group in groups for one in group["params"]):
        logger.warning(
            "dense_optimizer has none of the model's %d parameters, so the dense net is not "
            "trained: make it over model.parameters() of the same model",
            len(own),
        )


def _check_sizes(buffer_size: int, workers_size: int, update_factor: float) -> None:
    if not update_factor > 0:
        raise ConfigError(f"grad_scalar_update_factor must be above 0, got {update_factor!r}")
    for name, size in (("buffer", buffer_size), ("workers", workers_size)):
        if size < 1:
            raise ConfigError(f"backward_{name}_size must be at least 1, got {size}")


def _check_loss(loss: torch.Tensor) -> None:
    """Refuse, before any gradient changes, what torch would refuse after that."""
    if not callable(getattr(loss, "backward", None)):
        raise DataTypeError(
            f"TrainCtx.backward: expected a tensor, got {type(loss).__name__}; give the loss "
            "tensor, not its .item()"
        )
    if loss.numel() != 1:
        raise DataError(
            "TrainCtx.backward: expected a loss of one number that requires grad, got one of "
            f'shape {list(loss.shape)}; give its .mean(), or take reduction="none" out'
        )
    if not loss.requires_grad:
        raise DataError(
            "TrainCtx.backward: expected a loss of one number that requires grad, got one "
            "without a graph: it was detached, made from a number, or under torch.no_grad()"
        )
