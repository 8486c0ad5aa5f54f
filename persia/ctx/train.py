"""The context that trains."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from persia import env
from persia._files.writer_lock import JobFolders
from persia._process_exit import mark_participated
from persia._report import summary
from persia._report.parameters import parameters
from persia._report.recorder import Recorder
from persia._training.backward import BackwardPipeline
from persia._training.backward_checks import (
    BackwardChecks,
    check_loss,
    check_no_backward,
    has_gradients,
    run_backward,
    ticket_to_keep,
)
from persia._training.checkpoint import unwrap
from persia._training.dense_step import BeforeStep, DenseStep, gradients, reader
from persia._training.feature_order import check_ranks
from persia._training.ranks import Ranks, StepBarrier, uneven_steps
from persia.config import EmbeddingSchema
from persia.ctx.base import PreprocessMode
from persia.ctx.checkpoints import TrainerState
from persia.ctx.resuming import ResumingCtx, new_client
from persia.ctx.session import new_scaler, torch_device
from persia.distributed import DistributedBaseOption, get_default_distributed_option
from persia.embedding.optim import Optimizer
from persia.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.batch import PersiaTrainingBatch
    from persia._training.inflight import InFlightBatch, InFlightTracker
    from persia._training.queues import BoundedQueue
    from persia.config import ConfigSource
    from persia.ctx.connection import Connection
    from persia.ctx.session import Session
    from persia.embedding import EmbeddingConfig

logger = logging.getLogger("persia.ctx")

_trained: weakref.WeakSet[Any] = weakref.WeakSet()  # models, by contexts of this process


class TrainCtx(ResumingCtx):
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
        report: File for rank 0's report of the run, written when the context is left: a page,
            or with a name in ``.json`` its data.
        tensorboard: Folder for rank 0's event files: loss, speed, rows, norms, reported values.
        checkpoint_every: Steps between two checkpoints, written beside training; what one
            raises, the next ``backward`` that writes one does.
        checkpoint_folder: Folder or URL of those, and of the last one after SIGTERM.
            ``PERSIA_RESUME_FROM`` takes precedence, and is where a run goes on from.

    Attributes:
        world_size: Number of ranks; ``rank_id`` is this one.
        mixed_precision: Whether the loss is scaled.
        grad_scaler: The ``torch.amp.GradScaler``, or None.
        update_times: Number of ``backward`` calls that stepped.

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
        features: Sequence[str] | None = None,
        allow_missing: Sequence[str] = (),
        embedding_gradient_reduction: str = "mean",
        report: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_optimizers(embedding_optimizer, dense_optimizer, model)
        _check_sizes(backward_buffer_size, backward_workers_size, grad_scalar_update_factor)
        _check_words(embedding_gradient_reduction, mixed_precision)
        super().__init__(
            PreprocessMode.TRAIN,
            model,
            embedding_config,
            threadpool_worker_size,
            device_id,
            global_config=global_config,
            embedding_worker=embedding_worker,
            features=features,
            allow_missing=allow_missing,
        )
        self.embedding_optimizer = embedding_optimizer
        self.dense_optimizer: torch.optim.Optimizer = dense_optimizer
        self.grad_scalar_update_factor = grad_scalar_update_factor
        self.backward_buffer_size = backward_buffer_size
        self.backward_workers_size = backward_workers_size
        self.distributed_option = distributed_option
        self.world_size, self.rank_id = env.get_world_size() or 1, env.get_rank() or 0
        has_device = self.device_id is not None
        self.mixed_precision = has_device if mixed_precision is None else mixed_precision
        self.grad_scaler = new_scaler(self.device_id) if self.mixed_precision else None
        if self.world_size > 1:
            self._join_ranks()
        # Each rank computes the mean over its own batch; the worker divides by the scale.
        reduction = self.world_size if embedding_gradient_reduction == "mean" else 1
        self._dense = DenseStep(grad_scalar_update_factor, reduction)
        self._checks, self._rates = BackwardChecks(), []
        self._state = TrainerState(self.rank_id, self.world_size)
        self._report, self._tensorboard = report, tensorboard
        summary.check_outputs(report, tensorboard, self.rank_id)
        self._set_up_checkpoints(checkpoint_every, checkpoint_folder)

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
        self._is_uneven = True
        return uneven_steps(self.model, self.dense_optimizer)

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
        connection.has_trained_model = _is_trained(self.model)
        mark_participated()
        connection.worker.configure(self.embedding_config.settings())
        connection.worker.register_optimizer(self.embedding_optimizer.settings())
        if self.world_size > 1:
            self._ranks = Ranks(self.world_size, self.rank_id)
            check_ranks(self._ranks, self._features)
        engine = BackwardPipeline(
            connection.worker,
            tracker,
            client=new_client(self.rank_id),
            num_workers=self.backward_workers_size,
            capacity=self.backward_buffer_size,
            device=torch_device(self.device_id),
            ranks=self._ranks,
        )
        engine.end_step(self.update_times)
        engine.is_between_passes = session.progress.is_between_passes
        rates, self._rates = self._rates, []
        engine.learning_rates.restore(rates)
        stack.callback(connection.leave_barrier)
        stack.callback(connection.end_recording, self.write_report if self._report else None)
        stack.callback(lambda: self._dense.warn_of_nans(tracker, self.update_times, True))
        stack.callback(connection.end_updates, engine)
        if self._ranks is not None:
            connection.barrier = _step_barrier(self, engine, session)
        if self.rank_id == 0 and (self._report is not None or self._tensorboard is not None):
            connection.recorder = _recorder(self, connection, tracker, engine)
        stack.push(self._end_publishing)
        connection.backward, connection.folders = engine, folders

    def _finish(self) -> None:
        self._checks.warn_of_kept(self._kept)
        if self._kept:
            self.dense_optimizer.zero_grad()
        if self.update_times and isinstance(self.model, torch.nn.Module):
            _trained.add(unwrap(self.model))
        super()._finish()

    def _leave_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

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
        summary.write(self._report if path is None else path, recorder, unwrap(self.model))

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
        end of the ``with`` block, or until an optimizer is registered; checkpoints have it,
        and loading one sets it. Setting the same rate again costs nothing.

        Args:
            lr: Learning rate, such as ``scheduler.get_last_lr()[0]``.
            group: A group of the embedding config, or a slot outside any, with an
                ``optimizer`` under ``group_settings``. None is for all groups that have no
                rate of their own, by the config or by an earlier call.

        Raises:
            ConfigError: If rate or group cannot be used, or outside the ``with`` block.
        """
        self._engine("set_lr").learning_rates.set(lr, group)

    def prepare_features(self, batch: PersiaTrainingBatch) -> Any:
        """Return dense tensors, embeddings and labels, as ``EmbeddingCtx`` does."""
        self._checks.is_forwarded_again = batch is self.current_batch
        if not self._checks.is_forwarded_again:
            self._checks.warn_of_lost(self.current_batch)
        return super().prepare_features(batch)

    def keep(self, batch: PersiaTrainingBatch) -> None:
        """Hold a batch, for a loss of several batches, until the next ``backward`` that steps.

        ``embedding_staleness`` bounds how many can be kept. One that has ended already is a
        DataError; one that the loss does not reach is released with a warning. To accumulate
        gradients, ``backward(loss, step=False)`` holds no graphs.
        """
        self._engine("keep")  # or an own store would keep it for a block to come
        self._connected().tracker.keep(ticket_to_keep(batch))
        self._prepared[id(batch)] = batch
        self._kept.append(batch)

    def backward(
        self,
        loss: torch.Tensor,
        embedding_gradient_check_frequency: int = 20,
        *,
        max_norm: float | None = None,
        before_step: Callable[[], object] | None = None,
        step: bool = True,
    ) -> torch.Tensor:
        """Run the loss backward, step the dense optimizer, and send embedding gradients.

        Calls ``loss.backward()``, ``optimizer.step()`` and ``zero_grad()``. Rows of non-finite
        gradients are left out and counted; with a GradScaler they skip the batch, all of it.

        Args:
            loss: A scalar that depends on the current batch, and on those kept. It is
                returned, multiplied with the scale under mixed precision.
            embedding_gradient_check_frequency: Steps between warnings of rows left out.
            max_norm: Clip the dense gradients, as ``torch.nn.utils.clip_grad_norm_``, to this
                norm over all of them: unscaled, and those that DDP has averaged over ranks.
                Embedding gradients count nothing to it and are not clipped.
            before_step: Called without arguments when the dense gradients are there, unscaled
                and clipped, before the optimizer steps; not where a scaler skips the step.
            step: False only adds this loss's gradients to those of the next ``backward``,
                and frees its graph. Each batch's rows then get its own update.

        Raises:
            DataError: If no batch was prepared, the current one had its backward, or the loss
                is not one number that depends on something trained.
            ConfigError: Outside the ``with`` block, or if an argument cannot be used.
            BaseException: What an earlier update raised, or ``before_step`` did.

        Example:
            >>> for number, batch in enumerate(loader, start=1):  # doctest: +SKIP
            ...     output, labels = ctx.forward(batch)
            ...     loss = loss_fn(output, labels[0]) / 4
            ...     ctx.backward(loss, max_norm=1.0, step=number % 4 == 0)
        """
        check_loss(loss)
        before = BeforeStep(max_norm, before_step)
        session = self._connected()
        self._engine("backward").raise_failure()
        current = self._checks.to_train(self.current_batch, session.tracker)
        if not self._checks.is_forwarded_again:
            check_no_backward(current)
        self._dense.loss = unscaled = loss.detach()
        if self.grad_scaler is not None:
            loss = self.grad_scaler.scale(loss)
        self._run_backward(loss)
        self._output = None
        if step:
            with self._undisturbed():
                self._step(session, current, unscaled, before)
            if self.update_times % max(embedding_gradient_check_frequency, 1) == 0:
                self._dense.warn_of_nans(session.tracker, self.update_times)
        else:
            for batch in list(self._prepared.values()):
                if batch not in self._kept and batch.awaits_backward() and has_gradients(batch):
                    self.keep(batch)
        return loss

    def _run_backward(self, loss: torch.Tensor) -> None:
        try:
            run_backward(loss)
        except BaseException:
            if not self._kept:  # else those of the batches before would go, too
                self.dense_optimizer.zero_grad()  # or the next step would be made with them
            raise

    def _step(
        self,
        session: Session,
        current: PersiaTrainingBatch,
        loss: torch.Tensor,
        before: BeforeStep,
    ) -> None:
        """Step with the gradients of this backward and those accumulated."""
        engine, number = self._engine("backward"), self.update_times + 1
        self._checks.warn_of_schedule(self.dense_optimizer, engine.learning_rates)
        session.last_step = number, reader(loss)
        recorder = session.connection.recorder
        if recorder is not None and recorder.note_step(number, loss, current.batch_size):
            # Every few steps, while leaves have gradients.
            scale = 1.0 if self.grad_scaler is None else self.grad_scaler.get_scale()
            recorder.note_norms(self._prepared.values(), gradients(self.dense_optimizer), scale)
        updates = engine.collect(list(self._prepared.values()), current)
        self._prepared.clear()
        self._kept.clear()
        try:
            self._dense.run(
                engine,
                updates,
                self.dense_optimizer,
                self.grad_scaler,
                self._ranks,
                before,
                # Not every algorithm makes the dense gradients of all ranks equal.
                getattr(self.distributed_option, "needs_equal_batches", False),
            )
        finally:
            self.dense_optimizer.zero_grad()
        self.update_times = number
        if self.rank_id:
            self._state.note_step()
        engine.end_step(number)
        if self._publisher is not None:
            self._publisher.note_step()
        self._end_step()


def _recorder(
    ctx: TrainCtx, connection: Connection, tracker: InFlightTracker, engine: BackwardPipeline
) -> Recorder:
    """Return what records a run, beginning with what it is run with."""
    source = ctx._schema
    if source is None and env.get_mode() == "embedded":
        source = env.embedding_config_path()  # else it is the servers', on their machines
    found = parameters(
        unwrap(ctx.model),
        ctx.embedding_optimizer,
        ctx.dense_optimizer,
        ctx.embedding_config.settings(),
        None if source is None else EmbeddingSchema.load(source),
        {"ranks": ctx.world_size, "mixed precision": ctx.mixed_precision},
    )
    return Recorder(connection.worker, tracker, engine, ctx.world_size, found, ctx._tensorboard)


def _step_barrier(ctx: TrainCtx, engine: BackwardPipeline, session: Session) -> StepBarrier:
    """Return what holds all ranks between two steps."""
    return StepBarrier(
        ctx.world_size,
        ctx.rank_id,
        engine.hold,
        engine.resume,
        lambda: ctx._state.of_rank(session.progress),
        env.rpc_timeout_s(),
    )


def _is_trained(model: Any) -> bool:
    """Whether an earlier TrainCtx of this process has trained the model."""
    return isinstance(model, torch.nn.Module) and unwrap(model) in _trained


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
            f"as {name}(lr=0.1), got {_shown(embedding_optimizer)}"
        )
    for name, given in (("dense_optimizer", dense_optimizer), ("model", model)):
        if given is None:
            raise ConfigError(f"TrainCtx needs {name}=, got None")
    groups = getattr(dense_optimizer, "param_groups", None)
    if isinstance(dense_optimizer, type) or groups is None:
        todo = "torch.optim.Adam(model.parameters())"
        if isinstance(dense_optimizer, Optimizer):
            todo += "; PERSIA's optimizers step rows, as embedding_optimizer="
        raise ConfigError(
            f"dense_optimizer: expected a torch optimizer, got {_shown(dense_optimizer)}; "
            f"write {todo}"
        )
    if not callable(model) or isinstance(model, type):
        raise ConfigError(
            f"model: expected a torch.nn.Module, got {_shown(model)}; make one by calling it"
        )
    if not callable(getattr(model, "parameters", None)):
        return
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    absent = sum(id(parameter) not in stepped for parameter in own)
    if own and absent == len(own):
        logger.warning(
            "dense_optimizer has none of the model's %d parameters, so the dense net is not "
            "trained: make it over model.parameters() of the same model",
            len(own),
        )
    elif absent:
        logger.warning(
            "dense_optimizer has %d of the model's %d parameters: make it over "
            "model.parameters(), or set requires_grad = False on those that shall stay",
            len(own) - absent,
            len(own),
        )


def _shown(given: object) -> str:
    """Show what was given in one line."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(given, str | int | float | None):
        return f"{given!r:.80}"
    return f"an object of {type(given).__module__}.{type(given).__name__}"


def _check_sizes(buffer_size: int, workers_size: int, update_factor: float) -> None:
    if not update_factor > 0:
        raise ConfigError(f"grad_scalar_update_factor must be above 0, got {update_factor!r}")
    for name, size in (("buffer", buffer_size), ("workers", workers_size)):
        if size < 1:
            raise ConfigError(f"backward_{name}_size must be at least 1, got {size}")


def _check_words(reduction: object, mixed_precision: object) -> None:
    if not isinstance(mixed_precision, bool | None):
        raise ConfigError(
            f"mixed_precision: expected True, False or None, got {mixed_precision!r}; True is "
            "autocast's own dtype, float16 on CUDA"
        )
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            f"embedding_gradient_reduction must be 'mean' or 'sum', got {reduction!r}"
        )
