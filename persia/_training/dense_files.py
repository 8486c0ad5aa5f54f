"""The dense side's files: state dicts and scripted models.

A file is written beside its place and renamed into it, so that a reader meets the old one or
the new one, and loaded with ``weights_only=True``, so that it cannot run code. A model that
is wrapped for data parallelism is stored without the wrapper's ``module.`` prefix: a file of
four ranks loads into one, and the other way round.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from persia.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "module."


def unwrap(instance: Any) -> Any:
    """Return the model inside a data-parallel wrapper, or the instance itself."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while isinstance(instance, wrappers):
        instance = instance.module
    return instance


def save(instance: Any, dst_dir: str | os.PathLike[str], file_name: str, is_jit: bool) -> Path:
    """Write a state dict, or a scripted model, and return its path.

    Raises:
        ConfigError: If a scripted model is asked of something that is no module.
        CheckpointError: If the file cannot be written.
    """
    instance = unwrap(instance)
    if is_jit:
        if not isinstance(instance, torch.nn.Module):
            raise ConfigError(
                f"is_jit=True needs a torch.nn.Module, got {type(instance).__name__}"
            )
        scripted: Any = torch.jit.script(instance)
        return _publish(Path(dst_dir), file_name, lambda path: scripted.save(str(path)))
    state = instance.state_dict()
    return _publish(Path(dst_dir), file_name, lambda path: torch.save(state, path))


def _publish(directory: Path, file_name: str, write: Callable[[Path], None]) -> Path:
    path = directory / file_name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{file_name}.")
        os.close(handle)
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be written: {exc}") from exc
    aside = Path(temporary)
    try:
        write(aside)
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(path)
    except (OSError, RuntimeError) as exc:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {exc}") from exc
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return path


def load(instance: Any, path: str | os.PathLike[str], map_location: Any = None) -> None:
    """Load a state dict into a model or an optimizer.

    Raises:
        CheckpointError: If the file is missing, unreadable, or does not fit the instance.
    """
    place = Path(path)
    if not place.is_file():
        raise CheckpointError(f"expected the file of a state dict at {place}, found none")
    try:
        state = torch.load(place, map_location=map_location, weights_only=True)
    except Exception as exc:
        raise CheckpointError(f"{place} cannot be read as a state dict: {exc}") from exc
    instance = unwrap(instance)
    if not isinstance(state, dict):
        raise CheckpointError(f"expected a state dict in {place}, got {type(state).__name__}")
    if isinstance(instance, torch.nn.Module):
        state = _without_prefix(state, instance)
    try:
        instance.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as exc:
        raise CheckpointError(
            f"{place} does not fit this {type(instance).__name__}: {exc}"
        ) from exc


def _without_prefix(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Take the wrapper's prefix off the names of a file that was saved with it."""
    own = model.state_dict()
    if not state or not all(name.startswith(PREFIX) for name in state):
        return state
    if all(name.startswith(PREFIX) for name in own):
        return state  # the model itself names its only child "module"
    return {name[len(PREFIX) :]: value for name, value in state.items()}
