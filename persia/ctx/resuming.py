"""A trainer that is stopped, and another process that goes on where it was.

    every ``checkpoint_every`` steps    a checkpoint, written beside the training
    SIGTERM                             the step is finished, a last checkpoint is written, and
                                        the process ends with 143
    entering the first TrainCtx         loads the newest checkpoint of PERSIA_RESUME_FROM, or,
                                        if there is none yet, writes one of the beginning
    the same without that variable      loads the newest of its folder if it is of this job
                                        (PERSIA_JOB_ID), or begins

Of several ranks all end at the same step, that at which the first of them was asked to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from numbers import Integral
from typing import TYPE_CHECKING, Any

from persia import env
from persia._files import catalog
from persia._files.open import folder_url, open_storage
from persia._process_exit import mark_slow_end
from persia._training.checkpoint import JOB
from persia.ctx.publishing import PublishingCtx
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    import torch

    from persia._training.backward import BackwardPipeline, Rate
    from persia._training.progress import Plain, Position
    from persia.ctx.checkpoints import TrainerState

logger = logging.getLogger("persia.ctx")

# Status of a process that SIGTERM has ended, as a shell says it.
STATUS = 128 + signal.SIGTERM
# Of the grace period, the part in which a step may come to its end.
_STEP_SHARE = 1 / 3

_has_resumed = False  # of this process, which is one training
_has_begun = False  # the same


class Termination:
    """SIGTERM as a request, from ``listen`` to ``close``.

    A request that is not met in time is raised where the program is, unless it is ``held``.

    Attributes:
        is_requested: Whether the process is to end.
        is_raised: Whether SystemExit was raised for it.
        held: Whether the main thread is where nothing may be raised.
    """

    def __init__(self, patience_s: float) -> None:
        self.is_requested = self.is_raised = self.held = False
        self._patience_s = patience_s
        self._is_overdue = False
        self._timer: threading.Timer | None = None
        self._before: Any = None

    def listen(self) -> None:
        """Take SIGTERM over; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            logger.info("SIGTERM writes no checkpoint: the context is not in the main thread")
            return
        mark_slow_end()
        self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def close(self, raised: BaseException | None) -> None:
        """Give SIGTERM back; end the process if that was requested, ignoring any further one.

        An exception that is on its way has precedence. The program may go on behind it: it
        gets the signal again once its time is up.
        """
        if self._before is None:
            return
        is_ending = self.is_requested and isinstance(raised, SystemExit | None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if is_ending else self._before)
        self._before = None
        if not self.is_requested:
            return
        if self._timer is not None:
            self._timer.cancel()
        if not isinstance(raised, SystemExit | None):
            self._start_timer()
        elif raised is None:
            self.end()

    def end(self) -> None:
        """End the process, what the request asked for being done."""
        self.is_raised = True
        raise SystemExit(STATUS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_raised:
            return
        if not self.is_requested:
            self.is_requested = True
            self._start_timer()
        elif self._is_overdue and not self.held:
            self.end()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self._patience_s, self._remind)
        self._timer.daemon = True
        self._timer.start()

    def _remind(self) -> None:
        self._is_overdue = True
        os.kill(os.getpid(), signal.SIGTERM)


class ResumingCtx(PublishingCtx):
    """Writes checkpoints as it trains, and goes on from the newest."""

    dense_optimizer: torch.optim.Optimizer
    grad_scaler: torch.amp.GradScaler | None
    world_size: int
    rank_id: int
    update_times = 0
    _state: TrainerState
    _rates: list[Rate]  # of a checkpoint, until the next entering
    _is_uneven = False  # ranks without a batch leave the others alone

    def _set_up_checkpoints(
        self, every: int | None, folder: str | os.PathLike[str] | None
    ) -> None:
        """Check what the context was given, before anything is opened."""
        self._resume_from = env.resume_from()
        found = self._resume_from or folder
        self._folder = None if found is None else folder_url(found, "checkpoint_folder")
        is_number = isinstance(every, Integral) and not isinstance(every, bool)
        if every is not None and not (is_number and every >= 1):
            raise ConfigError(f"checkpoint_every: expected steps, at least 1, got {every!r}")
        if every is not None and self._folder is None:
            raise ConfigError(
                f"checkpoint_every={every}: expected {env.resume_from.name} to name the folder "
                "of checkpoints, or checkpoint_folder="
            )
        self._every = every
        self._termination: Termination | None = None

    def _enter(self) -> None:
        super()._enter()
        if self._folder is None:
            self._note_beginning()
            return
        self._termination = Termination(env.grace_period_s() * _STEP_SHARE)
        self._termination.listen()
        try:
            self._begin_where_it_was()
        except BaseException as exc:
            try:
                self._exit(exc)
            except BaseException as own:  # as in __exit__
                logger.error("leaving %s also failed: %r", type(self).__name__, own)
            raise

    def _begin_where_it_was(self) -> None:
        global _has_resumed
        if _has_resumed:
            return
        with self._replacing():
            # Rank 0 looks for all of them: a folder need not look the same from everywhere.
            is_there = self.rank_id == 0 and self._has_checkpoint(str(self._folder))
            if self._ranks is not None:
                is_there = self._ranks.any(is_there)
            if is_there:
                self.load_checkpoint(str(self._folder))
            else:
                self._note_beginning()
                if self._resume_from is not None:
                    logger.info("%s has no checkpoint yet: training begins", self._resume_from)
                    # Or a trainer that is killed before the first one would go on from rows
                    # that have been trained, with a net that has not.
                    self.dump_checkpoint(self._resume_from)
        _has_resumed = True

    def _has_checkpoint(self, url: str) -> bool:
        """Whether there is one to go on from: any of PERSIA_RESUME_FROM, else of this job."""
        job = env.job_id()
        if self._resume_from is None and job is None:
            return False
        storage = open_storage(url)
        newest = catalog.latest(storage)
        if newest is None or self._resume_from is not None:
            return newest is not None
        return bool(catalog.load(storage, newest).extras.get(JOB) == job)

    def _note_beginning(self) -> None:
        """Warn of rows that are older than this training, if it begins with none."""
        global _has_begun
        if _has_begun or self.rank_id:
            return
        _has_begun = True
        servers = self._connected().connection.worker.server_stats()
        count = sum(one.get("recovered_rows", 0) for one in servers)
        if count:
            logger.warning(
                "parameter servers began with %d rows that were trained before, under the same "
                "%s (%s), and this training begins with a net that was not: a start of all "
                "processes needs another name, or a checkpoint to go on from (%s)",
                count,
                env.run_id.name,
                env.run_id(),
                env.resume_from.name,
            )

    def _exit(self, raised: BaseException | None) -> None:
        termination, self._termination = self._termination, None
        session = self._session
        fails = raised is not None or (termination is not None and termination.is_requested)
        if session is not None and fails and self._resume_from is not None:
            session.connection.is_back = True
        if termination is None:
            super()._exit(raised)
            return
        with contextlib.ExitStack() as stack:
            # What the body raised has precedence, here as in __exit__.
            stack.push(
                lambda kind, own, trace: termination.close(own if raised is None else raised)
            )
            stack.callback(super()._exit, raised)
            if termination.is_requested and isinstance(raised, SystemExit | None):
                termination.held = True
                # Alone a trainer stands between two steps, unless it was stopped in a load.
                if self._is_whole and not self._is_saved and self.world_size == 1:
                    self._save_last()

    _is_saved = False  # for the last time
    _is_whole = True  # rows and net are those of one step

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Surround what replaces rows and net: if the process ends in it, none are saved."""
        self._is_whole = False
        try:
            yield
        except Exception:
            self._is_whole = True  # the script may go on with what it has
            raise
        self._is_whole = True

    def _load(self, *given: Any) -> None:
        with self._replacing():
            super()._load(*given)

    def _save_last(self) -> None:
        self._is_saved = True
        logger.info("writes a checkpoint after step %d, and ends", self.update_times)
        with contextlib.suppress(Exception):  # it is in the log
            self.wait_for_dump_embedding()
        try:
            self.dump_checkpoint(str(self._folder))
        except Exception as exc:
            logger.error("the checkpoint before this one is the last: %s", exc)

    def _end_step(self) -> None:
        """Write a checkpoint if one is due, and end if this process is to."""
        termination = self._termination
        if termination is None:
            return
        ranks = None if self._is_uneven else self._ranks
        asked = termination.is_requested  # read once: it may be set while ranks meet
        if ranks is not None:
            asked = ranks.any(asked)
        if not asked:
            if self._every and self.update_times % self._every == 0:
                self.dump_checkpoint(str(self._folder), blocking=False)
            return
        termination.is_requested = True
        self._save_last()
        if ranks is not None:
            ranks.any(False)  # rank 0 writes, and the end of another rank would be its own
        termination.end()

    @property
    def backward_engine(self) -> BackwardPipeline | None:
        """What sends the updates; None outside the ``with`` block."""
        return self._connected().connection.backward

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Surround what a SIGTERM may not leave half done."""
        termination = self._termination
        if termination is None:
            yield
            return
        termination.held = True
        try:
            yield
        finally:
            termination.held = False

    # --- where it was -----------------------------------------------------------------------

    @property
    def resume_position(self) -> Position:
        """How far the data was in the checkpoint that was loaded.

        ``passes`` over the data had ended, and of the next one ``batches`` were trained. It
        counts on from there as passes end.
        """
        return self._connected().progress.where()

    def _trainer_state(self, others: list[Plain]) -> Plain:
        progress = self._connected().progress
        engine = self.backward_engine
        rates = self._rates if engine is None else engine.learning_rates.state()
        return self._state.of_all(self.update_times, self.grad_scaler, progress, others, rates)

    def _resume(self, trainer: Plain) -> None:
        self.update_times = trainer["step"]
        engine = self.backward_engine
        rates = trainer.get("rates")  # those before did not have them
        if engine is None:
            self._rates = rates or []
        else:
            if rates is not None:
                engine.learning_rates.restore(rates)
            engine.end_step(self.update_times)
            engine.client = new_client(self.rank_id)  # numbers of updates come again
        if self.grad_scaler is not None and trainer["scaler"] is not None:
            self.grad_scaler.load_state_dict(trainer["scaler"])
        session = self._connected()
        session.lookups.resume(self._state.restore(trainer, session.progress))
        logger.info("continues after step %d, %s", self.update_times, self.resume_position)


def new_client(rank: int) -> int:
    """Return the first half of update ids; one that is entered again repeats none of them."""
    return secrets.randbits(47) << 16 | rank
