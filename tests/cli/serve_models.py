"""A model of a version's folder, for ``persia-launcher serve --loader``."""

from __future__ import annotations

import os
from pathlib import Path

from tests.serving.oip.serving_models import Arrays, EchoModel


class ProcessModel(EchoModel):
    """Also says which process it is in."""

    def __call__(self, inputs: Arrays) -> dict[str, object]:  # type: ignore[override]
        import numpy as np

        return {**super().__call__(inputs), "pid": np.array([os.getpid()])}


def load(folder: Path) -> EchoModel:
    return ProcessModel(version=int(folder.name))
