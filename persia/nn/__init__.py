"""Embeddings as PyTorch modules: tables without a fixed number of rows, in any model.

``Embedding`` and ``EmbeddingBag`` take the place of torch's, and ``convert`` puts them there.
``persia.optim`` steps their rows.
"""

from __future__ import annotations

from persia.nn.convert import convert
from persia.nn.modules import Embedding, EmbeddingBag, EmbeddingCollection
from persia.nn.parameters import dense_parameters, sparse_parameters

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "convert",
    "dense_parameters",
    "sparse_parameters",
]
