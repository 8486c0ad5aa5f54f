"""Embeddings as PyTorch modules: tables without a fixed number of rows, in any model.

``Embedding`` and ``EmbeddingBag`` take the place of torch's, and ``convert`` puts them there.
``persia.optim`` steps their rows.
"""

from __future__ import annotations

from persia.nn.checkpoints import load, save
from persia.nn.collection import EmbeddingCollection
from persia.nn.convert import convert
from persia.nn.exporting import export
from persia.nn.modules import Embedding, EmbeddingBag
from persia.nn.parameters import dense_parameters, sparse_parameters
from persia.nn.prefetch import prefetch

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "convert",
    "dense_parameters",
    "export",
    "load",
    "prefetch",
    "save",
    "sparse_parameters",
]
