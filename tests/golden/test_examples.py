"""What both examples compute in reproducible mode: AUC, loss, and every row they hold."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import env
from tests.examples.loading import EXAMPLES, load, run_quickstart
from tests.golden.book import as_text, check
from tests.golden.commands import invoke, quiet_surroundings

SMALL = 6_000  # samples that touch every feature, in a second
COLUMNS = ("group", "id", "states", "values")
SHOWN = 3  # rows of each table


def rows_of(ctx: Any) -> dict[str, Any]:
    """Return a hash over the rows as persia-ckpt writes them, sorted, and the first of them."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        ctx.dump_embedding(place / "rows")
        ran = invoke("persia-ckpt", "convert", place / "rows", place / "to", "--to", "npz")
        assert ran.exit_code == 0, ran.output
        by_table: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((place / "to").iterdir()):
            with np.load(path) as arrays:
                columns = {name: arrays[name] for name in COLUMNS}
            by_table.setdefault(path.name.partition("-")[0], []).append(columns)
    for table, parts in sorted(by_table.items()):
        rows = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
        order = np.lexsort((rows["id"], rows["group"]))
        total = hashlib.sha256()
        for name in COLUMNS:
            rows[name] = np.ascontiguousarray(rows[name][order])
            total.update(rows[name].tobytes())
        first = [
            {name: array[number].tolist() for name, array in rows.items()}
            for number in range(SHOWN)
        ]
        shapes = {name: f"{array.dtype} {list(array.shape)}" for name, array in rows.items()}
        found[table] = {
            "sha256": total.hexdigest(),
            "arrays": shapes,
            "first": [str(one) for one in first],
        }
    return found


def outline(report: Any, rows: dict[str, Any]) -> str:
    said = {name: getattr(report, name) for name in ("auc", "loss", "rows")}
    return as_text({**said, "tables": rows})


def quickstart(**options: Any) -> str:
    options |= {"reproducible": True, "staleness": 1}
    with quiet_surroundings():
        return outline(*run_quickstart(load("quickstart"), rows_of, **options))


def adult_income() -> str:
    example = load("adult_income")
    options = example.Options(reproducible=True, staleness=1, quiet=True)
    more = {
        "PERSIA_DATA_DIR": str(env.data_dir()),
        "PERSIA_DATALOADER_ENTRY": str(EXAMPLES / "adult_income" / "data_loader.py"),
        "REPRODUCIBLE": "1",
    }
    with quiet_surroundings(**more), example.build_ctx(options) as ctx:
        return outline(example.run(ctx, example.load(), options), rows_of(ctx))


def record() -> dict[str, str]:
    found = {
        "examples/quickstart-small.json": quickstart(samples=SMALL),
        "examples/quickstart.json": quickstart(),
    }
    if env.data_dir() is not None:
        found["examples/adult_income.json"] = adult_income()
    return found


def test_quickstart_small() -> None:
    check({"examples/quickstart-small.json": quickstart(samples=SMALL)}, "torch", "processor")


@pytest.mark.slow
def test_quickstart() -> None:
    check({"examples/quickstart.json": quickstart()}, "torch", "processor")


@pytest.mark.slow
@pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR names no data")
def test_adult_income() -> None:
    check({"examples/adult_income.json": adult_income()}, "torch", "processor")
