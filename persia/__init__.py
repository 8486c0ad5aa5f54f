"""PERSIA: train recommender models whose embeddings are larger than any one machine."""

from persia.version import __version__

__all__ = ["__version__"]
