"""The tutorials' programs of 2021, as unchanged scripts, end to end.

``train.py`` runs in this process and its ``data_loader.py`` in a child, by embedded mode. They
are restated in our own words, with the mistakes of the tutorials mended (each says which).
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persia import _context_stack, env
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    import pytest

PROGRAMS = Path(__file__).parent / "programs"


def write_criteo(path: Path, num_lines: int) -> None:
    """A log in Criteo's layout, whose label follows from the first column of words."""
    rng = np.random.default_rng(5)
    with path.open("w", encoding="ascii") as file:
        for _ in range(num_lines):
            words = rng.integers(0, 20, 26)
            numbers = [str(each) if each else "" for each in rng.integers(0, 9, 13)]
            texts = [f"{0x68FD1E00 + each:08x}" if each else "" for each in words]
            label = int(words[0] % 2)
            file.write("\t".join([str(label), *numbers, *texts]) + "\n")


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], int, list[str]]:
    """Run a program; returns its losses, its rows and what it was warned of."""
    folder = PROGRAMS / name
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(folder / "data_loader.py"))
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(folder / "embedding_config.yml"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    env.reload_env()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran: dict[str, Any] = runpy.run_path(str(folder / "train.py"), run_name="__main__")
    assert _context_stack.current() is None
    assert {each.category for each in caught} == {DeprecationWarning}
    return ran["losses"], ran["rows"], [str(each.message) for each in caught]


def test_getting_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = tmp_path / "train.txt"
    write_criteo(sample, 64 * 200 + 10)
    monkeypatch.setenv("CRITEO_SAMPLE", str(sample))
    losses, rows, warned = run("getting_started", monkeypatch)
    assert len(losses) == 201
    assert rows == 26 * 20
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:10])
    for name in ("persia.sparse.optim.Adagrad", "sparse_optimizer=", "ctx.data_loader()"):
        assert any(name in message for message in warned)
    assert len(warned) == 5, warned  # each old name once, and slot_configs in the YAML


def test_customization(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, rows, warned = run("customization", monkeypatch)
    assert len(losses) == 160
    assert rows == 50 + 50
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:10])
    for name in ("Dataloader", "StreamDataset", "torch_distributed_port="):
        assert any(name in message for message in warned)
    assert len(warned) == 4, warned
