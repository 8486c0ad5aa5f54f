"""The context that trains."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
from typing import TYPE_CHECKING, Any

from persia import env
from persia._process_exit import note_part
from persia.ctx.base import PreprocessMode
from persia.ctx.devices import grad_scaler, torch_device
from persia.ctx.embedding import EmbeddingCtx
from persia.ctx.ready import wait_until_ready
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Optimizer
from persia.errors import (
    ConfigError,
    DataError,
    DataTypeError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    import torch

    from persia._report.recorder import CurveStore, Sink
    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline, GradientBatch
    from persia._training.inflight import InFlightTracker
    from persia._training.queues import BoundedQueue
    from persia._training.resume import Plain, Position
    from persia._training.transfer import PersiaTrainingBatch
    from persia.ctx.connection import Embeddings
    from persia.ctx.embedding import ConfigSource, SchemaSource


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
        grad_update_buffer_size: Kept for scripts of the original; gradients are owned by
            their update, so that no buffer has to keep them alive.
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
        tensorboard: Write loss, speed, rows, norms and what is reported to this folder, as
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
        embedding_config: EmbeddingConfig | SchemaSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
        embedding_gradient_reduction: str = "mean",
        report: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(embedding_optimizer, Optimizer):
            raise ConfigError(
                "embedding_optimizer: expected one of persia.embedding.optim, got "
                + _no_optimizer(embedding_optimizer)
            )
        for name, given in (("dense_optimizer", dense_optimizer), ("model", model)):
            if given is None:
                raise ConfigError(f"TrainCtx needs {name}=, got None")
        if not grad_scalar_update_factor > 0:
            raise ConfigError(
                f"grad_scalar_update_factor must be above 0, got {grad_scalar_update_factor!r}"
            )
        for name, size in (
            ("backward_buffer_size", backward_buffer_size),
            ("backward_workers_size", backward_workers_size),
        ):
            if size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size}")
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
        _compare(model, dense_optimizer)
        self.grad_scalar_update_factor = grad_scalar_update_factor
        self.backward_buffer_size = backward_buffer_size
        self.backward_workers_size = backward_workers_size
        self.distributed_option = distributed_option
        self.world_size = env.get_world_size() or 1
        self.rank_id = env.get_rank() or 0
        self.mixed_precision = (
            self.device_id is not None if mixed_precision is None else mixed_precision
        )
        self.grad_scaler = grad_scaler(self.device_id) if self.mixed_precision else None
        self.update_times = 0
        if self.world_size > 1:
            self._join_ranks()
        # Each rank computes the mean over its own batch; the worker divides by the scale.
        self._reduction = self.world_size if embedding_gradient_reduction == "mean" else 1
        self._warned_nans = 0
        self._loss: torch.Tensor | None = None  # of the last step; nobody waits for it
        self._num_bad_losses = 0  # not finite, of those that were looked at
        self._has_told_no_gradients = False
        self._random: Plain = {}  # of a rank that others ask, after its last step
        if tensorboard is not None:
            from persia._report.tensorboard import need_tensorboard

            need_tensorboard()
        if report is not None and self.rank_id == 0:
            from persia._report.summary import check_place

            check_place(report)
        self._report_path, self._tensorboard = report, tensorboard
        self._curves: CurveStore | None = (
            None  # while it is entered, if a report is to be written
        )

    def _join_ranks(self) -> None:
        """Make the model data-parallel, with the option given or the default one."""
        from persia.distributed import DistributedBaseOption, get_default_distributed_option

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
        if optimizer is not None:
            self.dense_optimizer = optimizer

    def join_ranks(self, *, reproducible: bool) -> AbstractContextManager[Any]:
        """Return what lets a rank without batches answer the others' collectives.

        Raises:
            ConfigError: If not all that the ranks tell each other in a step is DDP's.
        """
        if self.world_size == 1:
            return contextlib.nullcontext()
        if reproducible:
            raise ConfigError(
                "drop_last=False: expected reproducible=False with several ranks, as those "
                "that have a batch update in no order; or keep drop_last=True"
            )
        from torch.nn.parallel import DistributedDataParallel

        from persia._training.uneven import uneven_steps

        if not isinstance(self.model, DistributedDataParallel):
            raise ConfigError(
                "drop_last=False: expected a model that is data-parallel by DDPOption, got "
                f"{type(self.model).__name__}"
            )
        if getattr(self.distributed_option, "needs_equal_batches", False):
            raise ConfigError(
                "drop_last=False: expected an algorithm that does not count steps "
                "(gradient_allreduce or bytegrad), got another; ranks would wait for each other"
            )
        if self.grad_scaler is not None:
            raise ConfigError(
                "drop_last=False: expected mixed_precision=False, as the ranks must agree in "
                "every step whether gradients are finite"
            )
        return uneven_steps(self.model, self.dense_optimizer)

    @property
    def backward_engine(self) -> BackwardPipeline | None:
        """What sends the updates; None outside the ``with`` block."""
        return self._connected().engine

    @property
    def grad_queue(self) -> BoundedQueue[tuple[GradientBatch, float]] | None:
        """Updates that wait to be sent; None outside the ``with`` block."""
        engine = self.backward_engine
        return None if engine is None else engine.queue

    def _enter(self) -> None:
        super()._enter()
        try:
            self._begin()
        except BaseException:
            self._disconnect()
            raise

    def _begin(self) -> None:
        from persia._files.writer_lock import JobFolders
        from persia._training.backward import BackwardPipeline

        embeddings = self._connected()
        if embeddings.engine is not None:
            raise ConfigError("another TrainCtx that shares these embeddings is entered")
        note_part()
        embeddings.worker.configure(self.embedding_config.settings())
        embeddings.worker.register_optimizer(self.embedding_optimizer.settings())
        if self.world_size > 1:
            from persia._training.ranks import Ranks

            self._ranks = Ranks(self.world_size, self.rank_id)
        engine = BackwardPipeline(
            embeddings.worker,
            self._own_book(),
            client=self._new_client(),
            num_workers=self.backward_workers_size,
            capacity=self.backward_buffer_size,
            device=torch_device(self.device_id),
            ranks=self._ranks,
        )
        engine.end_step(self.update_times)
        if self._progress is not None:
            engine.is_between_passes = self._progress.is_between_passes
        try:
            if self.world_size > 1:
                from persia._training.step_barrier import StepBarrier

                embeddings.halts = StepBarrier.join(
                    self.world_size, self.rank_id, engine, self._rank_state, env.rpc_timeout_s()
                )
            engine.start()
            if self.rank_id == 0:
                self._record(embeddings, engine)
        except BaseException:
            self._curves = None
            self._leave_ranks(embeddings)
            engine.close()
            raise
        embeddings.engine, embeddings.folders = engine, JobFolders()

    def _record(self, embeddings: Embeddings, engine: BackwardPipeline) -> None:
        """Begin to write the run down, if that was asked for."""
        from persia._report.recorder import CurveStore, Recorder
        from persia._report.tensorboard import TensorBoard

        sinks: list[Sink] = []
        if self._report_path is not None:
            self._curves = CurveStore()
            sinks.append(self._curves)
        if self._tensorboard is not None:
            sinks.append(TensorBoard(self._tensorboard))
        if sinks:
            embeddings.recorder = Recorder(
                embeddings.worker, self._own_book(), engine, sinks, self.world_size
            )

    def write_report(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the report of the run so far: one HTML file that needs nothing beside it.

        Ranks other than 0 record nothing and write nothing.

        Args:
            path: The file; None is the one that the context was given as ``report``.

        Raises:
            ConfigError: Without ``report=``, or outside the ``with`` block.
            OSError: If the file cannot be written.
        """
        from persia._report import summary

        recorder, curves = self._connected().recorder, self._curves
        if self.rank_id > 0:
            return
        if recorder is None or curves is None or self._report_path is None:
            raise ConfigError(
                "TrainCtx.write_report: expected TrainCtx(report='report.html'), which has the "
                "run recorded, and to be called inside its `with`"
            )
        recorder.settle()
        told = summary.RunFacts(
            f"Training report: {type(self._bare_model()).__name__}",
            env.get_mode(),
            self.world_size,
            f"{type(self.embedding_optimizer).__name__} for embeddings, "
            f"{type(self.dense_optimizer).__name__} for the dense net",
        )
        page = summary.gather(told, recorder, curves, self._own_book(), recorder.worker)
        summary.write(self._report_path if path is None else path, page)

    def _bare_model(self) -> Any:
        from persia._training.dense_files import unwrap

        return unwrap(self.model)

    def _end_recording(self, embeddings: Embeddings) -> None:
        recorder = embeddings.recorder
        if recorder is None:
            return
        try:
            if self._report_path is not None:
                self.write_report()
            else:
                recorder.settle()
        finally:
            embeddings.recorder, self._curves = None, None
            recorder.close()

    def _new_client(self) -> int:
        return secrets.randbits(47) << 16 | self.rank_id

    def _exit(self) -> None:
        embeddings = self._connected()
        engine, embeddings.engine = embeddings.engine, None
        folders, embeddings.folders = embeddings.folders, None
        try:
            self._finish()
        finally:
            try:
                if engine is not None:
                    engine.close()
                    self._warn_of_nans(self._own_book(), is_last=True)
                # Servers of their own processes do so when they end.
                flush = getattr(embeddings.worker, "flush_changes", None)
                if flush is not None:
                    flush()
            finally:
                try:
                    self._end_recording(embeddings)
                finally:
                    try:
                        self._leave_ranks(embeddings)
                        self._disconnect()
                    finally:
                        if folders is not None:
                            folders.release()

    def _leave_ranks(self, embeddings: Embeddings) -> None:
        halts, embeddings.halts = embeddings.halts, None
        if halts is not None:
            halts.close()

    def _disconnect(self) -> None:
        ranks, self._ranks = self._ranks, None
        try:
            super()._disconnect()
        finally:
            if ranks is not None:
                ranks.close()

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
        if self._progress is None:
            raise ConfigError("TrainCtx.resume_position: expected a context with embeddings")
        return self._progress.where()

    def _rank_state(self) -> Plain:
        """Return what of this rank belongs into a checkpoint; asked by another thread."""
        progress = self._progress
        return {
            "random": self._random,
            "progress": {} if progress is None else progress.snapshot(),
        }

    def _trainer_state(self, others: list[Plain]) -> Plain:
        from persia._training.resume import merge, of_one_pass, random_states

        self._random = random_states()
        ranks = [self._rank_state(), *others]
        passes, positions = of_one_pass([rank["progress"] for rank in ranks])
        return {
            "step": self.update_times,
            "scaler": None if self.grad_scaler is None else self.grad_scaler.state_dict(),
            "ranks": ranks,
            "passes": passes,
            "stream": merge(positions),
        }

    def _resume(self, trainer: Plain) -> None:
        from persia._training.resume import set_random_states

        ranks, engine = trainer["ranks"], self.backward_engine
        self.update_times = trainer["step"]
        if engine is not None:
            engine.end_step(self.update_times)
            engine.client = self._new_client()
        if self.grad_scaler is not None and trainer["scaler"] is not None:
            self.grad_scaler.load_state_dict(trainer["scaler"])
        is_same = len(ranks) == self.world_size
        mine = ranks[self.rank_id if is_same else 0]
        progress = mine["progress"]
        position, next_number = trainer["stream"], progress["next_number"]
        passes = progress["passes"] if position is None else trainer["passes"]
        if not is_same:
            next_number = max(rank["progress"]["next_number"] for rank in ranks)
            logger.warning(
                "the checkpoint is of %d ranks and there are %d: random numbers begin anew%s",
                len(ranks),
                self.world_size,
                "" if position else ", and so does the pass over the data",
            )
        elif position is None:
            position = progress["position"]
        if self._progress is not None:
            self._progress.resume(passes, position, next_number)
            self._lookups.resume(next_number)
        if is_same and mine["random"]:
            self._random = mine["random"]  # until the next step, if this is not rank 0
            set_random_states(self._random)
        logger.info("continues after step %d, %s", self.update_times, self.resume_position)

    def wait_servers_ready(self) -> None:
        """Wait until all servers are configured and answer.

        Raises:
            ServiceTimeout: If they are not within 300 s.
        """
        wait_until_ready(self.embedding_worker)

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Return the model's output for a batch, and the batch's labels.

        With mixed precision the model runs under autocast.
        """
        if not self.mixed_precision:
            return super().forward(batch)
        import torch

        with torch.autocast(torch_device(self.device_id).type):
            return super().forward(batch)

    def set_lr(self, lr: float, group: str | None = None) -> None:
        """Set the learning rate of embeddings from the next ``backward`` on.

        Gradients take the rate along under which they were computed, so those on their way
        keep the old one, whatever the staleness. The same rate again costs nothing: call it
        in every step. With several ranks, call it on each of them.

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
        self._own_book().keep(batch.ticket)
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
        engine, book = self.backward_engine, self._own_book()
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
            # Afterwards would be too late: the loss's gradients were in the dense model.
            book.check_open(current.ticket)
        elif not self._has_told_no_gradients:
            self._has_told_no_gradients = True
            logger.warning(
                "batch %d has a backward and was looked up without gradients, so it trains the "
                "dense net only: made with requires_grad=False, or in an eval_ctx? (said once)",
                current.batch_id,
            )
        book.release_orphans()
        scaler = self.grad_scaler
        scale = 1.0
        self._loss = unscaled = loss.detach()
        if scaler is not None:
            loss = scaler.scale(loss)
            scale = scaler.get_scale()
        if self._measures is not None:
            self._measures.note_step(self.update_times + 1, unscaled.item)
        loss.backward()  # type: ignore[no-untyped-call]
        self._output = None
        recorder = self._connected().recorder
        if recorder is not None and recorder.note_step(self.update_times + 1, unscaled):
            groups = self.dense_optimizer.param_groups
            dense = [one for group in groups for one in group["params"]]
            recorder.note_norms(self._prepared.values(), dense, scale)
        updates = engine.collect(list(self._prepared.values()), current)
        self._kept = [batch for batch in self._kept if batch.awaits_backward()]
        for key, batch in list(self._prepared.items()):
            if not batch.awaits_backward():
                del self._prepared[key]
        if scaler is None:
            engine.submit(updates, scale * self._reduction)
            self.dense_optimizer.step()
        else:
            try:
                is_finite = self._scaled_step(scaler, updates, scale)
            except BaseException:
                engine.give_up(updates)
                raise
            if is_finite:
                engine.submit(updates, scale * self._reduction)
            else:
                engine.skip(updates)
                self._is_loss_bad(self.update_times + 1)
        self.dense_optimizer.zero_grad()
        self.update_times += 1
        if self.rank_id:
            from persia._training.resume import random_states

            self._random = random_states()  # before rank 0 can ask for it
        engine.end_step(self.update_times)
        if self.update_times % max(embedding_gradient_check_frequency, 1) == 0:
            self._warn_of_nans(book)
        return loss

    def _scaled_step(
        self, scaler: torch.amp.GradScaler, updates: list[GradientBatch], scale: float
    ) -> bool:
        """Step the dense part; False if a gradient, dense or sparse, was not finite."""
        is_finite = all(update.is_finite() for update in updates)
        if self._ranks is not None:
            if getattr(self.distributed_option, "needs_equal_batches", False):
                # Dense gradients may be this rank's own: the scaler would skip a step, and
                # the average that goes with it, on this rank only.
                is_finite = is_finite and self._has_finite_dense()
            is_finite = not self._ranks.any(not is_finite)  # one step, or none, for all
        if not is_finite:
            # The dense gradients are dropped too: no step, and a smaller scale from now on.
            scaler.update(scale / self.grad_scalar_update_factor)
            return False
        if not any(
            parameter.grad is not None
            for group in self.dense_optimizer.param_groups
            for parameter in group["params"]
        ):
            return True  # the scaler refuses an optimizer without any gradient
        scaler.step(self.dense_optimizer)
        scaler.update()
        # The scaler says that it skipped the step by lowering the scale.
        return scaler.get_scale() >= scale

    def _has_finite_dense(self) -> bool:
        import torch

        checks = [
            torch.isfinite(parameter.grad).all()
            for group in self.dense_optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        return not checks or bool(torch.stack(checks).all())

    def _warn_of_nans(self, book: InFlightTracker, *, is_last: bool = False) -> None:
        total, by_feature = book.nan_counts()
        if total <= self._warned_nans:
            return
        if self._is_loss_bad(self.update_times) and not is_last:
            return  # all gradients of it are: counted at the end
        self._warned_nans = total
        logger.warning(
            "%d embedding gradients were not finite so far and were left out: %s",
            total,
            ", ".join(f"{name} {count}" for name, count in sorted(by_feature.items())),
        )

    def _is_loss_bad(self, step: int) -> bool:
        """Whether the last loss is not finite; tells the 1st, 10th, 100th... that is not.

        It waits for the device: to be asked only where a gradient is known not to be finite.
        """
        value = 0.0 if self._loss is None else self._loss.item()
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


def _compare(model: Any, optimizer: Any) -> None:
    """Warn of an optimizer that cannot train the model; over a part of it one may be."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None or not callable(getattr(model, "parameters", None)):
        return
    own = {id(parameter) for parameter in model.parameters()}
    if own and not any(id(one) in own for group in groups for one in group["params"]):
        logger.warning(
            "dense_optimizer has none of the model's %d parameters, so the dense net is not "
            "trained: make it over model.parameters() of the same model",
            len(own),
        )


def _check_loss(loss: torch.Tensor) -> None:
    """Check what torch would refuse in words of its own, and after the fact."""
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
            f"{expected} one without a graph: it was detached, made anew from a number, or "
            "computed under torch.no_grad()"
        )


def _no_optimizer(given: object) -> str:
    """Say what was given for an optimizer of embeddings, and what to type."""
    if not isinstance(given, type | str):
        return f"{type(given).__module__}.{type(given).__name__}"
    is_class = isinstance(given, type) and issubclass(given, Optimizer)
    name = given.__name__ if isinstance(given, type) and is_class else "Adagrad"
    return f"{given!r}; give an instance: {name}(lr=0.1)"
