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
        scripted = script(instance)
        return _publish(Path(dst_dir), file_name, lambda path: scripted.save(str(path)))
    state = instance.state_dict()
    return _publish(Path(dst_dir), file_name, lambda path: torch.save(state, path))


def script(model: torch.nn.Module) -> Any:
    """Compile a model; the result has its very parameters."""
    return torch.jit.script(model)


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
    put(instance, fitting(instance, state, str(place)), str(place))


def fitting(instance: Any, state: Any, place: str) -> dict[str, Any]:
    """Return a state dict as the instance takes it, having changed nothing.

    Raises:
        CheckpointError: If it is none, or does not fit the instance.
    """
    instance = unwrap(instance)
    is_module = isinstance(instance, torch.nn.Module)
    if not isinstance(state, dict) or (is_module and not all(type(x) is str for x in state)):
        raise CheckpointError(f"expected a state dict in {place}, got {type(state).__name__}")
    found: dict[str, Any] = state
    if not is_module:
        _check_groups(instance, found, place)
        return found
    found = _without_prefix(found, instance)
    own: dict[str, Any] = instance.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in found]
    wrong += [f"{name} is not the model's" for name in found if name not in own]
    for name in own.keys() & found.keys():
        shapes = [getattr(of[name], "shape", None) for of in (own, found)]
        if shapes[0] != shapes[1]:
            wrong.append(f"{name} is {_shape(shapes[0])} here and {_shape(shapes[1])} there")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{place} does not fit this {type(instance).__name__}: "
            f"{'; '.join(sorted(wrong)[:3])}{more}"
        )
    return found


def _shape(shape: Any) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _check_groups(optimizer: Any, state: dict[str, Any], place: str) -> None:
    """Check that a state dict has the parameters of an optimizer, if it is one's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    groups, there = state.get("param_groups"), None
    if isinstance(groups, list) and isinstance(state.get("state"), dict):
        params = [group.get("params") for group in groups if isinstance(group, dict)]
        there = [len(one) for one in params if isinstance(one, list)]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"{place} does not fit this {type(optimizer).__name__}: expected groups of {here} "
            f"parameters, got {there}"
        )


def put(instance: Any, state: dict[str, Any], place: str) -> None:
    """Load a state dict that ``fitting`` returned.

    Raises:
        CheckpointError: If the instance refuses it.
    """
    instance = unwrap(instance)
    try:
        instance.load_state_dict(state)
    except Exception as exc:  # of whatever is in it
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
