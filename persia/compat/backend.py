"""The backend of 2021, which sent batches or spoke to the servers.

In a data-loader it is a ``DataCtx`` without a ``with`` block: its data ends with the script,
or fails with it. In a trainer its methods are those of the context that is entered.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

from persia.ctx import DataCtx, PreprocessMode, cnt_ctx
from persia.errors import ConfigError, JobFinished

if TYPE_CHECKING:
    from persia.ctx import EmbeddingCtx
    from persia.embedding.data import PersiaBatch
    from persia.embedding.optim import Optimizer

__all__ = ["Backend", "get_backend", "init_backend"]

logger = logging.getLogger(__name__)


class Backend:
    """What ``init_backend`` and ``get_backend`` return."""

    def __init__(self) -> None:
        self._data_ctx: DataCtx | None = None

    def open(self) -> DataCtx:
        """Begin to send; what ends it is the end of the script."""
        if self._data_ctx is None:
            ctx = DataCtx()
            ctx.__enter__()
            self._data_ctx = ctx
            # No thread can be started at exit, and leaving a DataCtx starts some: so this
            # one, for which Python waits, waits for the script.
            threading.Thread(target=self._close_after_script, name="persia-backend").start()
        return self._data_ctx

    def send_data(self, batch: PersiaBatch, blocking: bool = True) -> None:
        """Send one batch; waits for room, and exits with the job's status if it has ended."""
        try:
            self.open().send_data(batch)
        except JobFinished as exc:
            raise SystemExit(exc.status or 0) from None

    def close(self) -> None:
        """End the data, and wait until it was trained on; the script's end does so, too."""
        self._leave(None)

    def _close_after_script(self) -> None:
        threading.main_thread().join()
        try:
            # What Python has printed of the main thread, or persia-launcher has.
            self._leave(getattr(sys, "last_value", None))
        except SystemExit as leaving:
            logger.debug("the job has ended with status %s", leaving.code)
        except BaseException:
            logger.exception("the data could not be ended")

    def _leave(self, raised: BaseException | None) -> None:
        ctx, self._data_ctx = self._data_ctx, None
        if ctx is not None:
            ctx.__exit__(None if raised is None else type(raised), raised, None)

    # --- a trainer's -------------------------------------------------------------------------

    @staticmethod
    def _ctx() -> EmbeddingCtx:
        from persia.ctx import EmbeddingCtx  # needs torch, which a data-loader has not

        ctx = cnt_ctx()
        if not isinstance(ctx, EmbeddingCtx):
            raise ConfigError(
                "the backend speaks to the servers of the context that is entered, such as "
                f"`with TrainCtx(...)`; got {'none' if ctx is None else type(ctx).__name__}"
            )
        return ctx

    def set_configuration(
        self,
        initialize_lower: float = -0.01,
        initialize_upper: float = 0.01,
        admit_probability: float = 1.0,
        enable_weight_bound: bool = True,
        weight_bound: float = 10,
    ) -> None:
        """Tell the servers how embeddings begin, and how far they may go."""
        self._ctx().common_context.configure_embedding_parameter_servers(
            initialize_lower,
            initialize_upper,
            admit_probability,
            enable_weight_bound,
            weight_bound,
        )

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Register an embedding optimizer on the servers."""
        self._ctx().register_optimizer(optimizer.settings())

    def dump_embedding(self, dst_dir: str, blocking: bool = False) -> None:
        """Write the embeddings."""
        self._ctx().dump_embedding(dst_dir, blocking)

    def load_embedding(self, src_dir: str, blocking: bool = True) -> None:
        """Load embeddings in place of those held."""
        self._ctx().load_embedding(src_dir, blocking)

    def wait_for_dump_embedding(self) -> None:
        """Wait for a dump; raises what it raised."""
        self._ctx().wait_for_dump_embedding()

    def wait_for_load_embedding(self) -> None:
        """Wait for a load; raises what it raised."""
        self._ctx().wait_for_load_embedding()

    def wait_servers_ready(self) -> None:
        """Wait until all servers answer."""
        ctx = self._ctx()
        if ctx.preprocess_mode is PreprocessMode.TRAIN:
            ctx.common_context.wait_servers_ready()


_backend = Backend()


def init_backend(
    worker_size: int = 20,
    middleware_services: Any = None,
    wait_server_ready: bool = False,
    output_addrs: Any = None,
    init_output: bool = False,
) -> Backend:
    """Return the backend; with ``init_output`` it begins to send now, else with a batch.

    All else is without effect: the environment has the addresses, and sending waits.
    """
    if init_output:
        _backend.open()
    return _backend


def get_backend() -> Backend:
    """Return the backend."""
    return _backend
