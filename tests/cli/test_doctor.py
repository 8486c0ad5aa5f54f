"""``persia-launcher doctor``: one report of all checks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from persia._cli import checks, doctor
from persia._cli.checks import ok
from tests.support.processes import loopback_host


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of PyTorch or other jobs; no Procfile names commands."""
    monkeypatch.setattr(checks, "_check_torch", lambda: ok("torch", "not asked"))
    monkeypatch.chdir(tmp_path)
    for name in ("PERSIA_KEYS", "PERSIA_LISTEN_WITHOUT_KEYS", "PERSIA_METRICS_PORT"):
        monkeypatch.delenv(name, raising=False)
    host = loopback_host()
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "127.0.0.1")
    monkeypatch.setenv("PERSIA_METRICS_HOST", host)
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", f"{host}:22888")
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", f"{host}:22887")
    monkeypatch.setenv("PERSIA_NN_WORKERS", f"{host}:22457")


def test_variables_that_cannot_be_read_end_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "abc")
    report = doctor.examine(doctor.DoctorOptions())
    assert report.status == 1
    assert "addresses" not in {one.check for one in report.findings}


def test_the_config_that_a_procfile_names() -> None:
    Path("far").mkdir()
    Path("far/slots.yml").write_text("slots_config: {user: {dim: 8}}\n")
    line = "persia-launcher embedding-worker --embedding-config far/slots.yml"
    Path("Procfile").write_text(f"w: {line}\n")
    report = doctor.examine(doctor.DoctorOptions())
    assert "far/slots.yml: 1 features in 1 groups" in [one.text for one in report.findings]


def test_a_report_as_text_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slots, batch = tmp_path / "slots.yml", tmp_path / "a.npz"
    slots.write_text(yaml.safe_dump({"slots_config": {"user": {"dim": 8}}}))
    np.savez(batch, user=np.arange(3))
    options = doctor.DoctorOptions(slots, sample=batch, rows=doctor.rows_of(["user=1e3"]))
    assert doctor.run_doctor(options, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["forecast"][0]["feature"] == "user"
    assert {one["check"] for one in report["findings"]} >= {
        *("build", "processor", "torch", "huge pages", "config", "memory", "data"),
        *("addresses", "metrics"),
    }
    np.savez(batch, usr=np.arange(3))
    assert doctor.run_doctor(options, as_json=False) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "feature user of the config is not in the data" in text
    assert "-> send it, or take user out of slots_config" in text
    assert "bytes a row" in text
    assert "1 error, " in text
