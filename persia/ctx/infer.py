"""The context that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia.ctx.base import PreprocessMode
from persia.ctx.embedding import EmbeddingCtx

if TYPE_CHECKING:
    from persia._rpc.messages import EmbeddingWorker
    from persia.config import ConfigSource
    from persia.embedding import EmbeddingConfig


class InferCtx(EmbeddingCtx):
    """Looks embeddings up for serving: no labels, no gradients, nothing configured.

    Args:
        embedding_worker_address_list: ``host:port`` of embedding-workers. Without any, those
            of the job, or in embedded mode the context it is entered in.
        model: As of ``EmbeddingCtx``.
        embedding_config: As of ``EmbeddingCtx``.
        threadpool_worker_size: Kept for scripts of the original.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.
        global_config: As of ``EmbeddingCtx``.
        embedding_worker: As of ``EmbeddingCtx``.

    Raises:
        ConfigError: If a setting cannot be used.
    """

    __module__ = "persia.ctx"

    def __init__(
        self,
        embedding_worker_address_list: list[str] | None = None,
        model: Any = None,
        embedding_config: EmbeddingConfig | ConfigSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
    ) -> None:
        super().__init__(
            PreprocessMode.INFERENCE,
            model,
            embedding_config,
            threadpool_worker_size,
            device_id,
            global_config=global_config,
            embedding_worker=embedding_worker,
        )
        if embedding_worker_address_list:
            self._addresses = list(embedding_worker_address_list)

    def wait_for_serving(self) -> None:
        """Wait until all servers are configured and answer.

        Raises:
            ServiceTimeout: If they are not within 300 s.
        """
        self._wait_for_servers()
