from __future__ import annotations

from tests.training.conftest import clean_process, ctx, make_ctx, worker

__all__ = ["clean_process", "ctx", "make_ctx", "worker"]
