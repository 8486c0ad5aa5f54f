"""One report of all checks; and a project that ``init`` wrote: it is whole, and it trains."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from persia._cli import doctor
from persia._cli.checks import check_files, check_sample, read_sample
from persia._cli.doctor import write_project
from persia.errors import ConfigError
from persia.launcher import cli
from tests.golden.commands import without_persia
from tests.support.processes import ROOT, loopback_host, run, why_no_compose

pytestmark = pytest.mark.usefixtures("lists", "no_torch")


@pytest.fixture(autouse=True)
def _no_procfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_config_that_a_procfile_names(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("far").mkdir()
    Path("far/slots.yml").write_text("slots_config: {user: {dim: 8}}\n")
    lines = ("$A", "none.yml", "far/slots.yml")
    words = [f"w: sh --embedding-config={name}\n" for name in lines]
    Path("Procfile").write_text("".join(words))
    report = doctor.examine()
    assert "far/slots.yml: 1 features in 1 groups" in [one.text for one in report.findings]
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "abc")  # ends the checks
    report = doctor.examine()
    assert report.status == 1
    assert "addresses" not in {one.check for one in report.findings}


def test_without_rich_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia._metrics.top_view.find_spec", lambda name: None)
    monkeypatch.delattr("persia.launcher.examine")
    ran = CliRunner().invoke(cli, ["doctor"])
    assert "pip install rich" in ran.output


def test_a_report_as_text_and_as_json(tmp_path: Path) -> None:
    slots, batch = tmp_path / "slots.yml", tmp_path / "a.npz"
    slots.write_text(yaml.safe_dump({"slots_config": {"user": {"dim": 8}}}))
    np.savez(batch, user=np.arange(3))
    words = ["doctor", f"--embedding-config={slots}", f"--sample={batch}", "--rows=user=1e3"]
    ran = CliRunner().invoke(cli, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert report["ok"]
    assert report["forecast"][0]["feature"] == "user"
    assert {one["check"] for one in report["findings"]} >= {
        *("build", "processor", "torch", "huge pages", "config", "memory", "data"),
        *("addresses", "metrics"),
    }
    np.savez(batch, usr=np.arange(3))
    ran = CliRunner().invoke(cli, words)
    assert ran.exit_code == 1
    text = " ".join(ran.stdout.split())
    assert "feature user of the config is not in the data" in text
    assert "-> send it, or take user out of slots_config" in text
    assert "bytes a row" in text
    assert "1 error, " in text


# --- init ------------------------------------------------------------------------------------

NAMES = {
    *("README.md", "train.py", "data_loader.py", "model.py", "clicks.py", "Procfile"),
    *("config/embedding_config.yml", "config/global_config.yml"),
    *("serve.py", "compose.yaml", "compose.env"),
}


def test_a_project_is_whole_and_its_data_fits_its_config(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    written = write_project(project)
    assert {str(path.relative_to(project)) for path in written} == NAMES
    for path in project.rglob("*.py"):
        ast.parse(path.read_text())
    assert NAMES - {"README.md"} <= set(
        re.findall(r"[\w/]+\.?\w+", (project / "README.md").read_text())
    ) | {"README.md"}
    yaml.safe_load((project / "compose.yaml").read_text())
    config = project / "config"
    findings, schema, _ = check_files(
        config / "embedding_config.yml", config / "global_config.yml"
    )
    assert schema is not None
    findings += check_sample(schema, read_sample(project / "data_loader.py"), "data_loader.py")
    assert {one.status for one in findings} == {"ok"}


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    for directory in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ConfigError, match="expected a new or an empty directory"):
            write_project(directory)
    ran = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    ran = CliRunner().invoke(cli, ["init", str(tmp_path / "other")])
    assert ran.exit_code == 0
    assert "next: cd " in ran.stdout
    ran = CliRunner().invoke(cli, ["init", str(tmp_path / "my clicks")])
    assert f"next: cd '{tmp_path / 'my clicks'}'; " in ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_project_trains_embedded_and_by_honcho(tmp_path: Path) -> None:
    project, host = tmp_path / "mine", loopback_host()
    write_project(project)
    alone = without_persia(
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        PERSIA_METRICS_HOST=host,
        PERSIA_STATE_DIRECTORY="off",
    )
    job = alone | {
        "PERSIA_LISTEN_HOST": host,
        "PERSIA_EMBEDDING_PARAMETER_SERVERS": f"{host}:23888",
        "PERSIA_EMBEDDING_WORKERS": f"{host}:23887",
        "PERSIA_NN_WORKERS": f"{host}:23457",
    }
    aucs = []
    for words, variables in (("train.py", alone), ("-m honcho start --no-colour", job)):
        command = (sys.executable, *words.split())
        ran = run(*command, cwd=project, env=variables, timeout_s=300)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        (auc,) = re.findall(r"test AUC (0\.\d+), \d+ rows, 300 batches", ran.stdout)
        aucs.append(float(auc))
    assert min(aucs) > 0.7
    assert abs(aucs[0] - aucs[1]) < 0.03
    ran = run("-m", "persia.launcher", "doctor", cwd=project, env=job)
    assert ran.returncode == 0, ran.stdout
    assert "all 3 features are there" in ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_project_is_exported_and_scores(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    write_project(project)
    for words in ("train.py checkpoint", "serve.py"):
        command = (sys.executable, *words.split())
        ran = run(*command, cwd=project, env=without_persia(), timeout_s=200)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    scores = re.search(r"^version 1: logits \[(.*)\]", ran.stdout, re.MULTILINE)
    assert scores is not None
    assert len(scores[1].split()) == 3


@pytest.mark.slow
def test_the_containers_of_a_project_are_described(tmp_path: Path) -> None:
    if why := why_no_compose():
        pytest.skip(why)
    write_project(tmp_path / "mine")
    variables = {**os.environ, "PERSIA_SOURCE": str(ROOT), "PWD": str(tmp_path / "mine")}
    words = "docker compose --profile train config"
    ran = run(*words.split(), cwd=tmp_path / "mine", env=variables)
    assert ran.returncode == 0, ran.stderr
    services = yaml.safe_load(ran.stdout)["services"]
    mounted = services["nn_worker"]["volumes"][0]
    assert (mounted["source"], mounted["target"]) == (str(tmp_path / "mine"), "/workspace")
    assert services["embedding_parameter_server"]["deploy"]["replicas"] == 2
