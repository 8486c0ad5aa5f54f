"""The contexts: where a script says what it trains, and how.

    BaseCtx                 device, nesting
      DataCtx               sends batches (torch-free)
      EmbeddingCtx          embeddings of a batch, in one of three modes
        TrainCtx            backward: dense step here, sparse step at the servers
        InferCtx            no labels, no gradients

Importing this module does not import torch: a data-loader's script needs ``DataCtx`` only. The
contexts that need torch are imported when their names are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persia.ctx.base import BaseCtx, PreprocessMode, cnt_ctx
from persia.ctx.data import DataCtx

if TYPE_CHECKING:
    from persia.ctx.embedding import EmbeddingCtx, InferCtx, eval_ctx
    from persia.ctx.train import TrainCtx

__all__ = [
    "BaseCtx",
    "DataCtx",
    "EmbeddingCtx",
    "InferCtx",
    "PreprocessMode",
    "TrainCtx",
    "cnt_ctx",
    "eval_ctx",
]

_WITH_TORCH = {
    "EmbeddingCtx": "embedding",
    "InferCtx": "embedding",
    "TrainCtx": "train",
    "eval_ctx": "embedding",
    "_prepare_feature": "embedding",  # the original's tests import it
}

# This is where users and their pickles find them; those with torch say so themselves.
for _public in (BaseCtx, DataCtx, PreprocessMode, cnt_ctx):
    _public.__module__ = __name__

if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> Any:
        if name in _WITH_TORCH:
            module = import_module(f"{__name__}.{_WITH_TORCH[name]}")
            return globals().setdefault(name, getattr(module, name))
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Called from here, and not by ``names_of``: its warning names the caller's line.
        return import_module("persia.compat").find(__name__, name)
