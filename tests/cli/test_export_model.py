"""``persia-launcher export``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from persia.launcher import cli
from persia.serving import Predictor
from tests.serving.models import SCHEMA, arrays, batch_of, make_ctx, train
from tests.support.processes import ROOT


@pytest.mark.slow
def test_a_checkpoint_becomes_a_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = arrays(rng, 4)
    with make_ctx() as ctx:
        train(ctx, rng)
        ctx.dump_checkpoint(tmp_path / "dumped")
        expected = Predictor(tmp_path / "a" / str(ctx.export(tmp_path / "a")))(given)
    (tmp_path / "batch").write_bytes(batch_of(given).to_bytes())
    (tmp_path / "slots.yml").write_text(yaml.safe_dump(SCHEMA))
    words = ["export", str(tmp_path / "dumped"), "--model", "tests.serving.models:make_net"]
    words += ["--output", str(tmp_path / "clicks"), "--sample", str(tmp_path / "batch")]
    ran = CliRunner().invoke(cli, [*words, "--embedding-config", str(tmp_path / "slots.yml")])
    assert (ran.exit_code, ran.output) == (0, f"{tmp_path / 'clicks' / '1'}\n")
    found = Predictor(tmp_path / "clicks" / "1")(given)
    assert np.array_equal(found["output"], expected["output"])
    # A second version, and a repository of Triton with the same rows and program.
    words += ["--triton", str(tmp_path / "triton")]
    ran = CliRunner().invoke(cli, [*words, "--embedding-config", str(tmp_path / "slots.yml")])
    assert (ran.exit_code, ran.output) == (0, f"{tmp_path / 'clicks' / '2'}\n")
    folder = tmp_path / "triton" / "clicks"
    assert sorted(one.name for one in folder.iterdir()) == ["2", "config.pbtxt"]
    assert str(ROOT) in (folder / "2" / "model.py").read_text()
    found = Predictor(folder / "2")(given)
    assert np.array_equal(found["output"], expected["output"])


@pytest.mark.parametrize("model", ["none", "tests.none:make", "tests.serving.models:none"])
def test_a_model_that_cannot_be_made_is_one_line(tmp_path: Path, model: str) -> None:
    words = ["export", "x", "--model", model, "--output", str(tmp_path / "m")]
    ran = CliRunner().invoke(cli, [*words, "--sample", str(tmp_path / "none")])
    assert ran.exit_code
    assert "--model: " in ran.output
