"""Versions of a model that is trained, written every so often beside the training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from persia import env
from persia._serving.export import model_folder
from persia._serving.publish import Publisher
from persia.ctx import exporting
from persia.ctx.embedding import EmbeddingCtx
from persia.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from persia._training.backward import BackwardPipeline

logger = logging.getLogger("persia.serving")


class PublishingCtx(EmbeddingCtx):
    """Publishes versions of what it trains."""

    def _engine(self, what: str) -> BackwardPipeline:
        raise NotImplementedError

    def publish(
        self,
        dst: str | os.PathLike[str],
        *,
        every_s: float = 60.0,
        rows: str = "checkpoint",
        **options: Any,
    ) -> None:
        """Export a version every so often from now on, until the ``with`` block is left.

        Model and rows are taken between two steps, by the batch that was trained last; they
        are written, and the model traced, beside training. A version that fails is logged, and
        training goes on; leaving raises what the last one raised.

        Args:
            dst: As of ``export``, as are ``options``.
            every_s: Seconds to the first version, and between two, at least.
            rows: ``checkpoint``, or ``log`` for versions whose rows go on by the change log
                that the servers write.
            **options: As of ``export``.
        """
        self._engine("publish")
        if self._publisher is not None:
            raise ConfigError("publish: this context publishes already")
        if rows not in ("checkpoint", "log"):
            raise ConfigError(f"rows: expected 'checkpoint' or 'log', got {rows!r:.80}")
        chosen, folder = exporting.options_of(options), model_folder(dst)
        self._own_model()
        if env.get_rank():
            return

        def begin() -> Callable[[], int]:
            return exporting.begin_export(self, folder, None, chosen, follows_log=rows == "log")

        self._publisher = Publisher(every_s, begin)

    def _end_publishing(self, kind: object, error: BaseException | None, _: object) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is None:
            return
        try:
            publisher.close()
        except Exception as failure:
            if error is None:
                raise
            # What the block itself raised is what leaves it.
            logger.error("a version was not published: %s", failure)
