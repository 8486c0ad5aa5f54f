"""The contexts: where a script says what it trains, and how.

    BaseCtx                 device, nesting
      DataCtx               sends batches (torch-free)
      EmbeddingCtx          embeddings of a batch, in one of three modes
        TrainCtx            backward: dense step here, sparse step at the servers
        InferCtx            no labels, no gradients

Importing this module does not import torch: a data-loader's script needs ``DataCtx`` only.
Torch is imported when the first ``EmbeddingCtx`` is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia._deprecated import names_of
from persia.ctx.base import BaseCtx, PreprocessMode, cnt_ctx
from persia.ctx.data import DataCtx
from persia.ctx.embedding import EmbeddingCtx, eval_ctx, prepare_feature
from persia.ctx.infer import InferCtx
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

_prepare_feature = prepare_feature  # the original's tests import it

# This is where users and their pickles find them.
for _public in (
    *(BaseCtx, DataCtx, EmbeddingCtx, InferCtx, TrainCtx),
    *(PreprocessMode, cnt_ctx, eval_ctx),
):
    _public.__module__ = __name__

if not TYPE_CHECKING:  # where any name would be taken for one
    __getattr__ = names_of(__name__)
