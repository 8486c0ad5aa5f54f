"""Serving a model without a job: score requests with what ``ctx.export`` wrote.

predictor = Predictor("models/clicks/3")
predictor({"user": np.array([7]), "item": np.arange(100)})["output"]
"""

from __future__ import annotations

from persia._serving.bundle import Bundle, current_version, set_current, versions
from persia._serving.export import ExportOptions
from persia._serving.predictor import Predictor
from persia._serving.servable import Servable

__all__ = [
    "Bundle",
    "ExportOptions",
    "Predictor",
    "Servable",
    "current_version",
    "set_current",
    "versions",
]
