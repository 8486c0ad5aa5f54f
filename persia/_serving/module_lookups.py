"""``persia::served_lookup``: the lookup inside a program that was exported as a whole model.

    persia::lookup           of modules of ``persia.nn``, where a model is trained
    persia::served_lookup    takes its place in the exported program

The operator names tables. Whose rows they are is said by the thread that calls the program: all
versions of a model have the same graph, and each has rows of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.joined_features import PER_ID, POOLINGS, split_features
from persia._core.kernels.pooling import PoolCalls
from persia._serving.inputs import MAX_FLOATS
from persia.errors import ConfigError, DataError

# Returns the rows [D, dim] of the distinct ids of each feature, whose names are tables'.
RowsOf = Callable[[Sequence[FeatureBatch]], Sequence[NDArray[np.float32]]]

# A pool of one thread runs its work in the caller's.
_threads = ThreadPool(1)
_current = threading.local()

_library: Any = torch.library.Library("persia", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "served_lookup(Tensor ids, Tensor? offsets, Tensor? weights, str[] tables, str[] modes, "
    "int[] dims, int? padding, float[]? padding_row=None) -> Tensor"
)


@contextmanager
def use_rows(rows_of: RowsOf) -> Iterator[None]:
    """Have programs that this thread calls inside look up by ``rows_of``."""
    before = getattr(_current, "rows_of", None)
    _current.rows_of = rows_of
    try:
        yield
    finally:
        _current.rows_of = before


def _look_up(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: list[str],
    modes: list[str],
    dims: list[int],
    padding: int | None,
    padding_row: list[float] | None = None,
) -> torch.Tensor:
    """Return the vectors of all tables, one behind the other, each [B, dim], as f32.

    With ``padding_row``, that of the model, no row of the padding id is asked for.
    """
    rows_of: RowsOf | None = getattr(_current, "rows_of", None)
    if rows_of is None:
        raise ConfigError(
            "persia::served_lookup: expected to be called by a persia.serving.Predictor, which "
            "has the rows"
        )
    values = ids.to(torch.int64).contiguous().numpy().reshape(-1).view(np.uint64)
    edges = None if offsets is None else offsets.to(torch.int64).contiguous().numpy()
    factors = None if weights is None else weights.float().contiguous().numpy()
    size = (len(values) if edges is None else len(edges) - 1) // len(tables)
    if size * sum(dims) > MAX_FLOATS:
        raise DataError(
            f"expected at most {MAX_FLOATS} numbers in vectors of {', '.join(tables)}, got "
            f"{size} of {sum(dims)}"
        )
    if modes == [PER_ID] and padding_row is None:
        padding = None  # the row of that id is one like others
    given = split_features(tables, values, edges, factors, padding)
    rows = _rows(rows_of, [one.asked for one in given], dims)
    out = torch.empty(size * sum(dims), dtype=torch.float32)
    calls, rest = PoolCalls(), out.numpy()
    for one, found, mode, dim in zip(given, rows, modes, dims, strict=True):
        target, rest = rest[: size * dim].reshape(size, dim), rest[size * dim :]
        calls.pool(POOLINGS[mode], found, None, 1, one.pooled, target)
    calls.run(_threads)
    kept = given[0].kept
    if kept is not None and padding_row is not None and any(padding_row):
        out.view(-1, dims[0])[torch.from_numpy(~kept)] = torch.tensor(padding_row)
    return out


def _rows(
    rows_of: RowsOf, asked: Sequence[FeatureBatch], dims: Sequence[int]
) -> list[NDArray[np.float32]]:
    """Return the rows of each feature; one request has each table once."""
    found: dict[int, NDArray[np.float32]] = {}
    while len(found) < len(asked):
        places: dict[str, int] = {}
        for place, feature in enumerate(asked):
            if place not in found:
                places.setdefault(feature.name, place)
        chosen = list(places.values())
        rows = rows_of([asked[place] for place in chosen])
        found.update(zip(chosen, rows, strict=True))
    for place, dim in enumerate(dims):
        expected = asked[place].num_distinct, dim
        if found[place].shape != expected:
            raise DataError(
                f"table {asked[place].name!r}: expected rows {list(expected)}, got "
                f"{list(found[place].shape)}"
            )
    return [found[place] for place in range(len(asked))]


def _fake(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: list[str],
    modes: list[str],
    dims: list[int],
    padding: int | None,
    padding_row: list[float] | None = None,
) -> torch.Tensor:
    num_ids = ids.numel() if offsets is None else offsets.numel() - 1
    return ids.new_empty(num_ids // len(tables) * sum(dims), dtype=torch.float32)


_library.impl("served_lookup", _look_up, "CPU")
_register_fake: Any = torch.library.register_fake  # its type is unknown
_register_fake("persia::served_lookup", _fake, lib=_library)

served_lookup = torch.ops.persia.served_lookup
