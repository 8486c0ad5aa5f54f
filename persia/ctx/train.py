"""The context that trains."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from persia import env
from persia._report.summary import TrainingRecord
from persia._training.backward import BackwardPipeline
from persia.ctx.base import PreprocessMode
from persia.ctx.checkpoints import TrainerState
from persia.ctx.embedding import torch_device
from persia.ctx.loss_scaling import LossScaling, gradients, is_dense_finite
from persia.ctx.run import RunCtx
from persia.embedding.optim import Optimizer
from persia.errors import ConfigError, DataError, DataTypeError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import GradientBatch
    from persia._training.batch import PersiaTrainingBatch
    from persia._training.inflight import Plain, Position
    from persia.config import ConfigSource
    from persia.embedding import EmbeddingConfig


logger = logging.getLogger("persia.ctx")


class TrainCtx(RunCtx):
    """Trains a model: the dense part here, the embeddings at the parameter servers.

    Args:
        embedding_optimizer: One of ``persia.embedding.optim``.
        dense_optimizer: A torch optimizer over the model's parameters.
        grad_scalar_update_factor: With mixed precision, what the scale of the loss is
            divided by when an embedding gradient is not finite. (The original's spelling.)
        backward_buffer_size: Updates that wait before ``backward`` does.
        backward_workers_size: Updates sent at the same time.
        grad_update_buffer_size: Kept for scripts of the original; without effect.
        lookup_emb_directly: Kept for scripts of the original.
        mixed_precision: Scale the loss and run the model under autocast. None is True with
            a CUDA device and False without.
        distributed_option: Used with more than one rank.
        model: As of ``EmbeddingCtx``.
        embedding_config: As of ``EmbeddingCtx``.
        threadpool_worker_size: Kept for scripts of the original.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.
        global_config: As of ``EmbeddingCtx``.
        embedding_worker: As of ``EmbeddingCtx``.
        embedding_gradient_reduction: Over ranks, ``"mean"`` (equals synchronous training) or
            ``"sum"``.
        report: Write a report of the run to this HTML file when the context is left; only
            rank 0 does. ``write_report`` writes it before. Its folder is made at once.
        tensorboard: Write loss, speed, rows, norms and reported values to this folder, as
            TensorBoard's event files; only rank 0 does.

    Attributes:
        world_size: Number of ranks.
        rank_id: This rank.
        mixed_precision: Whether the loss is scaled.
        grad_scaler: The ``torch.amp.GradScaler``, or None.
        update_times: Number of ``backward`` calls.
        dense_optimizer: As given.
        embedding_optimizer: As given.
        backward_engine: Sends the updates, while the context is entered.

    Raises:
        ConfigError: If a setting cannot be used.

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
        _check_numbers(
            grad_scalar_update_factor,
            backward_buffer_size,
            backward_workers_size,
            embedding_gradient_reduction,
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
        self.grad_scaler: torch.amp.GradScaler | None = None
        if self.mixed_precision:
            self.grad_scaler = torch.amp.GradScaler(torch_device(self.device_id).type)
        self._scaling = LossScaling()
        self.update_times = 0
        if self.world_size > 1:
            self._join_ranks()
        # Each rank computes the mean over its own batch; the worker divides by the scale.
        self._reduction = self.world_size if embedding_gradient_reduction == "mean" else 1
        self._state = TrainerState(self.rank_id, self.world_size)
        self._record = TrainingRecord(report, tensorboard, self.rank_id)
        self._has_warned_no_gradients = False

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

        Embeddings with their optimizer's state, the model, the dense optimizer, the scaler,
        the states of random generators, and how far the data is. With several ranks, rank 0's
        call is for all of them, and a call of another does nothing. Training pauses for the
        moment itself; with ``blocking=False`` it goes on while files are written.

        Args:
            dst_dir: As of ``EmbeddingCtx.dump_checkpoint``, as are the others.
            dense_model_filename: Name of the model's state dict.
            jit_dense_model_filename: Name of the scripted model.
            opt_filename: Name of the dense optimizer's state dict.
            blocking: Wait until the checkpoint is there.
            with_jit_model: Write the model as TorchScript too, for serving.
            keep_last: How many checkpoints of this folder to keep.

        Raises:
            CheckpointError: If a file cannot be written.
            ServiceTimeout: If a rank does not come to the end of the step; names it.
            ServiceError: If a server is gone.
            BaseException: What an earlier update raised.

        Example:
            >>> for number, batch in enumerate(loader):  # doctest: +SKIP
            ...     output, labels = ctx.forward(batch)
            ...     ctx.backward(loss_fn(output, labels[0]))
            ...     if number % 10_000 == 9_999:
            ...         ctx.dump_checkpoint("s3://bucket/clicks", blocking=False)
        """
        dense = {dense_model_filename: self._own_model(), opt_filename: self.dense_optimizer}
        jit = jit_dense_model_filename if with_jit_model else None
        self._dump(dst_dir, dense, jit, blocking, keep_last)

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

        The next pass over a ``DataLoader`` leaves out the batches that were trained;
        ``resume_position`` says how far that is. In reproducible mode the run continues bit
        for bit as if it had not been stopped.

        Args:
            src_dir: As of ``EmbeddingCtx.load_checkpoint``, as are the others.
            map_location: As of ``torch.load``.
            dense_model_filename: Name of the model's state dict.
            opt_filename: Name of the dense optimizer's state dict.
            blocking: Wait until the embeddings are there; with several ranks it always does.
            features: Load the rows of these only; where training was is then not restored.

        Raises:
            CheckpointError: If there is no checkpoint, or a file of it is damaged or does not
                fit; nothing has changed.
            ConfigError: In the middle of a pass over a ``DataLoader``.
            ServiceError: If a server is gone.
        """
        dense = {dense_model_filename: self._own_model(), opt_filename: self.dense_optimizer}
        self._load(src_dir, map_location, dense, blocking, features)

    @property
    def resume_position(self) -> Position:
        """How far the data was in the checkpoint that was loaded: passes, then batches.

        ``passes`` over the data had ended, and of the next one ``batches`` were trained; the
        next pass leaves those out by itself. It counts on from there as passes end.
        """
        self._connected()
        return self._progress.where()

    def _trainer_state(self, others: list[Plain]) -> Plain:
        return self._state.of_all(self.update_times, self.grad_scaler, self._progress, others)

    def _resume(self, trainer: Plain) -> None:
        self.update_times = trainer["step"]
        engine = self.backward_engine
        if engine is not None:
            engine.end_step(self.update_times)
            engine.client = self._new_client()  # numbers of updates come again
        if self.grad_scaler is not None and trainer["scaler"] is not None:
            self.grad_scaler.load_state_dict(trainer["scaler"])
        self._lookups.resume(self._state.restore(trainer, self._progress))
        logger.info("continues after step %d, %s", self.update_times, self.resume_position)

    # --- steps ------------------------------------------------------------------------------

    def wait_servers_ready(self) -> None:
        """Wait until all servers are configured and answer.

        Raises:
            ServiceTimeout: If they are not within 300 s.
        """
        self._connected().wait_until_ready()

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Return the model's output for a batch, and the batch's labels.

        With mixed precision the model runs under autocast.
        """
        if not self.mixed_precision:
            return super().forward(batch)
        with torch.autocast(torch_device(self.device_id).type):
            return super().forward(batch)

    def set_lr(self, lr: float, group: str | None = None) -> None:
        """Set the learning rate of embeddings from the next ``backward`` on.

        Gradients carry the rate under which they were computed, so those in flight keep the
        old one, whatever the staleness. Setting the same rate again costs nothing: call it in
        every step. With several ranks, call it on each of them.

        It holds until the end of the ``with`` block, or until an optimizer is registered.

        Args:
            lr: Learning rate.
            group: A group of the embedding config, or a slot outside any, with an
                ``optimizer`` under ``group_settings``. None is for all groups that have no
                rate of their own, by the config or by an earlier call.

        Raises:
            ConfigError: If the rate cannot be used, the group is unknown or shares its rate
                with others, or outside the ``with`` block.

        Example:
            >>> scheduler = StepLR(dense_optimizer, step_size=1000)  # doctest: +SKIP
            >>> for batch in loader:  # doctest: +SKIP
            ...     output, labels = ctx.forward(batch)
            ...     ctx.backward(loss_fn(output, labels[0]))
            ...     scheduler.step()
            ...     ctx.set_lr(scheduler.get_last_lr()[0])
        """
        engine = self.backward_engine
        if engine is None:
            raise ConfigError("TrainCtx.set_lr must be called inside `with TrainCtx(...)`")
        engine.learning_rates.set(lr, group)

    def keep(self, batch: PersiaTrainingBatch) -> None:
        """Hold a batch over the next ones, to accumulate gradients.

        Its permit stays lent until the next ``backward`` whose loss reaches it, so
        ``embedding_staleness`` bounds how many can be kept.

        Raises:
            DataError: If the batch has ended already.

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
        self._own_tracker().keep(batch.ticket)
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
            loss: A scalar that depends on the current batch, and on those kept.
            embedding_gradient_check_frequency: Without a GradScaler, every how many steps to
                warn of the non-finite rows that were left out since.

        Returns:
            The loss, multiplied with the scale under mixed precision.

        Raises:
            DataError: If no batch was prepared, the current one had its backward, or the loss
                is not one number that depends on something trained.
            DataTypeError: If the loss is no tensor.
            ConfigError: Outside the ``with`` block.
            BaseException: What an earlier update raised.
        """
        _check_loss(loss)
        engine, current = self._begin_backward()
        self._scaling.loss = unscaled = loss.detach()
        scale = 1.0
        if self.grad_scaler is not None:
            loss, scale = self.grad_scaler.scale(loss), self.grad_scaler.get_scale()
        self._metrics.note_step(self.update_times + 1, unscaled.item)
        loss.backward()  # type: ignore[no-untyped-call]
        self._output = None
        self._note_step(unscaled, scale)
        updates = engine.collect(list(self._prepared.values()), current)
        self._forget_reached()
        self._step(engine, updates, scale)
        self.dense_optimizer.zero_grad()
        self.update_times += 1
        self._state.note_step()
        engine.end_step(self.update_times)
        if self.update_times % max(embedding_gradient_check_frequency, 1) == 0:
            self._scaling.warn_of_nans(self._own_tracker(), self.update_times)
        return loss

    def _begin_backward(self) -> tuple[BackwardPipeline, PersiaTrainingBatch]:
        """Check, before the loss changes any gradient, that there is a batch to train."""
        engine, tracker = self.backward_engine, self._own_tracker()
        if engine is None:
            raise ConfigError("TrainCtx.backward must be called inside `with TrainCtx(...)`")
        engine.raise_failure()
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
                "batch %d has a backward and was looked up without gradients, so it trains the "
                "dense net only: made with requires_grad=False, or in an eval_ctx? (said once)",
                current.batch_id,
            )
        tracker.release_orphans()
        return engine, current

    def _note_step(self, loss: torch.Tensor, scale: float) -> None:
        """Record the loss, and every few steps the norms, while leaves have gradients."""
        recorder = self._connected().recorder
        if recorder is not None and recorder.note_step(self.update_times + 1, loss):
            recorder.note_norms(self._prepared.values(), gradients(self.dense_optimizer), scale)

    def _forget_reached(self) -> None:
        """Drop the batches that this backward has reached."""
        self._kept = [batch for batch in self._kept if batch.awaits_backward()]
        for key, batch in list(self._prepared.items()):
            if not batch.awaits_backward():
                del self._prepared[key]

    def _step(
        self, engine: BackwardPipeline, updates: list[GradientBatch], scale: float
    ) -> None:
        """Step the dense optimizer and queue the updates; under a scaler both or neither."""
        scaler = self.grad_scaler
        if scaler is None:
            # Queued first: workers send while the dense optimizer steps.
            engine.submit(updates, scale * self._reduction)
            self.dense_optimizer.step()
            return
        try:
            is_finite = all(update.is_finite() for update in updates)
            if self._ranks is not None:
                # Gradients that are a rank's own may be finite here only: the scaler would
                # skip a step, and the average that goes with it, on one rank.
                if getattr(self.distributed_option, "needs_equal_batches", False):
                    is_finite = is_finite and is_dense_finite(self.dense_optimizer)
                is_finite = not self._ranks.any(not is_finite)
            if is_finite:
                is_finite = self._scaling.step(scaler, self.dense_optimizer, scale)
            else:
                # The dense gradients are dropped too: no step, and a smaller scale.
                scaler.update(scale / self.grad_scalar_update_factor)
        except BaseException:
            engine.discard(updates)
            raise
        if is_finite:
            engine.submit(updates, scale * self._reduction)
        else:
            engine.skip(updates)
            self._scaling.is_loss_bad(self.update_times + 1)


def _check_optimizers(embedding_optimizer: object, dense_optimizer: Any, model: Any) -> None:
    """Refuse what is no optimizer; warn of a dense one that cannot train the model."""
    if not isinstance(embedding_optimizer, Optimizer):
        raise ConfigError(
            "embedding_optimizer: expected one of persia.embedding.optim, got "
            + _no_optimizer(embedding_optimizer)
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


def _check_numbers(
    update_factor: float, buffer_size: int, workers_size: int, reduction: str
) -> None:
    if not update_factor > 0:
        raise ConfigError(f"grad_scalar_update_factor must be above 0, got {update_factor!r}")
    for name, size in (
        ("backward_buffer_size", buffer_size),
        ("backward_workers_size", workers_size),
    ):
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            f"embedding_gradient_reduction must be 'mean' or 'sum', got {reduction!r}"
        )


def _check_loss(loss: torch.Tensor) -> None:
    """Refuse, before any gradient changes, what torch would refuse after that."""
    expected = "TrainCtx.backward: expected a loss of one number that requires grad, got"
    if not callable(getattr(loss, "backward", None)):
        raise DataTypeError(
            f"TrainCtx.backward: expected a tensor, got {type(loss).__name__}; give the "
            "loss tensor, not its .item()"
        )
    if loss.numel() != 1:
        raise DataError(
            f"{expected} one of shape {list(loss.shape)}; give its .mean(), or take "
            'reduction="none" out of the loss function'
        )
    if not loss.requires_grad:
        raise DataError(
            f"{expected} one without a graph: it was detached, made from a number, or "
            "computed under torch.no_grad()"
        )


def _no_optimizer(given: object) -> str:
    """Describe what was given for an optimizer of embeddings, and what to write."""
    if not isinstance(given, type | str):
        return f"{type(given).__module__}.{type(given).__name__}"
    is_class = isinstance(given, type) and issubclass(given, Optimizer)
    name = given.__name__ if isinstance(given, type) and is_class else "Adagrad"
    return f"{given!r}; give an instance: {name}(lr=0.1)"
