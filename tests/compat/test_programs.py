"""The first tutorial's program of 2021, as unchanged scripts, end to end.

``train.py`` runs in this process and its ``data_loader.py`` in a child, by embedded mode. They
are restated in our own words, with the mistakes of the tutorial mended (each says which).
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from persia import _context_stack, env
from tests.meta.sources import ROOT
from tests.support.fixtures import Monkey

PROGRAM = Path(__file__).parent / "programs" / "getting_started"


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


def test_getting_started(tmp_path: Path, monkeypatch: Monkey) -> None:
    sample = tmp_path / "train.txt"
    write_criteo(sample, 64 * 200 + 10)
    monkeypatch.setenv("CRITEO_SAMPLE", str(sample))
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(PROGRAM / "data_loader.py"))
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(PROGRAM / "embedding_config.yml"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    env.reload_env()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran: dict[str, Any] = runpy.run_path(str(PROGRAM / "train.py"), run_name="__main__")
    assert _context_stack.current() is None
    losses = ran["losses"]
    assert len(losses) == 201
    assert ran["rows"] == 26 * 20
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:10])
    assert {each.category for each in caught} == {DeprecationWarning}
    warned = [str(each.message) for each in caught]
    for name in ("persia.sparse.optim.Adagrad", "sparse_optimizer=", "ctx.data_loader()"):
        assert any(name in message for message in warned)
    assert len(warned) == 5, warned  # each old name once, and slot_configs in the YAML
