"""A run's values as TensorBoard's event files."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from persia.errors import ConfigError


def need_tensorboard() -> None:
    """Raise ConfigError unless TensorBoard is installed, which writes its own files."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard=: expected the package tensorboard, which is not installed: "
            "pip install tensorboard"
        )


class TensorBoard:
    """A sink that writes event files.

    Args:
        folder: Where; the name of the run in TensorBoard.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        need_tensorboard()
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder))

    def add(self, name: str, step: int, seconds: float, value: float) -> None:
        """Write one scalar."""
        self._writer.add_scalar(name.removeprefix("reported/"), value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
