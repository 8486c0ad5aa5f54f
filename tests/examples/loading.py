"""The examples as modules; they are scripts, and import their neighbours by plain names."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(example: str) -> Any:
    """Return the module ``train.py`` of an example."""
    name = f"{example}_train"
    if name not in sys.modules:
        path = EXAMPLES / example / "train.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
    return sys.modules[name]


def digest(ctx: Any) -> str:
    """Return a hash over every row of every server, optimizer state included, by sign.

    Which server and which shard holds a row, and the order of use, are not part of it.
    """
    by_shape: dict[tuple[int, int], list[tuple[Any, Any, Any]]] = {}
    for server in ctx.embedding_worker.servers:
        assert server._settings.state is not None
        for signs, values, states in server._settings.state.store.iterate():
            by_shape.setdefault((values.shape[1], states.shape[1]), []).append(
                (signs, values, states)
            )
    return digest_of(by_shape)


def digest_of(parts_of: dict[Any, list[tuple[Any, Any, Any]]]) -> str:
    """Return a hash over parts of (signs, values, states), those of one key taken together."""
    total = hashlib.sha256()
    for key in sorted(parts_of):
        signs, values, states = (
            np.concatenate(parts) for parts in zip(*parts_of[key], strict=True)
        )
        order = np.argsort(signs)
        for array in (signs, values, states):
            total.update(np.ascontiguousarray(array[order]).tobytes())
    return total.hexdigest()
