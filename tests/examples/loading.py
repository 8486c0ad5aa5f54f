"""The examples as modules; they are scripts, and import their neighbours by plain names."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.core.stores import entries

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


def run_quickstart(
    train: Any, rows_of: Callable[[Any], Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Run the quickstart; returns its report, and its rows or a digest of them."""
    chosen = train.Options(quiet=True, **options)
    log = train.generate(chosen.samples, chosen.seed)
    with train.build_ctx(chosen) as ctx:
        report = train.run(ctx, log, chosen)
        return report, (rows_of or digest)(ctx)


def digest(ctx: Any) -> str:
    """Return a hash over every row of every server, optimizer state included, by sign.

    Which server and which shard holds a row, and the order of use, are not part of it.
    """
    return digest_of(parts_of(ctx))


def parts_of(ctx: Any) -> dict[int, list[tuple[Any, Any, Any]]]:
    """Return all rows of embedded mode by dim, in parts of (signs, values, states)."""
    ctx.get_embedding_size()  # waits for the last update, which may be in flight
    found: dict[int, list[tuple[Any, Any, Any]]] = {}
    for server in ctx.embedding_worker.servers:
        assert server._settings.state is not None
        for shard in entries(server._settings.state.store):
            for part in shard:
                found.setdefault(part[1].shape[1], []).append(part)
    return found


def digest_of(parts: dict[int, list[tuple[Any, Any, Any]]]) -> str:
    """Return a hash over parts of (signs, values, states), those of one dim taken together."""
    total = hashlib.sha256()
    for dim in sorted(parts):
        joined = [np.concatenate(arrays) for arrays in zip(*parts[dim], strict=True)]
        order = np.argsort(joined[0])
        for array in joined:
            total.update(np.ascontiguousarray(array[order]).tobytes())
    return total.hexdigest()
