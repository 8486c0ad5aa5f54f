"""The command that starts a script's ranks; mistakes: tests/e2e/test_command_lines.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia._cli import scripts
from persia._cli.scripts import Script
from persia.errors import ConfigError


def test_a_script_that_is_not_there_and_one_that_nearly_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=r"found none, did you mean '.*train\.py'\?"):
        Script(tmp_path / "trai.py")


def test_the_command_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["-m", "persia._cli.run", "torchrun"]
    assert scripts.torchrun(2, 0, 1) == [*run, "--nproc-per-node=2", "--standalone"]
    monkeypatch.setenv("MASTER_ADDR", "node0")
    meet = ["--nnodes=3", "--node-rank=1", "--master-addr=node0"]
    assert scripts.torchrun(2, 1, 3) == [*run, "--nproc-per-node=2", *meet]
    monkeypatch.setenv("MASTER_PORT", "5")
    assert scripts.torchrun(2, 1, 3)[-1] == "--master-port=5"
    with pytest.raises(ConfigError, match=r"--node-rank must be in 0\.\.2, got 3"):
        scripts.torchrun(2, 3, 3)
