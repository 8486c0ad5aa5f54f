"""docs/serving.md as a new user follows it: export, serve, and ask in each way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cli.test_serve import await_ready, launched
from tests.docs.test_pages import Block, blocks
from tests.golden.commands import without_persia
from tests.support.processes import ROOT, run
from tests.support.waiting import PATIENCE_S

BLOCKS = blocks((ROOT / "docs/serving.md").read_text(encoding="utf-8"))


def block(language: str, file: str = "", piece: str = "") -> Block:
    (found,) = [
        one
        for one in BLOCKS
        if (one.language, one.file) == (language, file) and piece in one.text
    ]
    return found


@pytest.mark.slow
def test_a_model_is_exported_served_and_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = block("python", "export.py")
    (tmp_path / program.file).write_text(program.text, encoding="utf-8")
    ran = run("-W", "error", program.file, cwd=tmp_path, env=without_persia(), timeout_s=240)
    assert ran.returncode == 0, ran.stderr
    assert block("sh", piece="launcher serve models\n").text == "persia-launcher serve models\n"
    with launched(tmp_path / "models", loader=None) as (_, url, grpc):
        await_ready(url)
        places = {"127.0.0.1:8080": url.partition("//")[2], "127.0.0.1:9000": grpc}

        def here(text: str) -> str:
            for place, actual in places.items():
                text = text.replace(place, actual)
            return text

        body = re.search(r"-d '(.*)'$", block("sh", piece="curl").text.strip(), re.DOTALL)
        assert body is not None
        answer = httpx.post(
            f"{url}/v2/models/clicks/infer", content=body[1], timeout=PATIENCE_S
        ).json()
        scores = np.array(answer["outputs"][0]["data"], np.float32).reshape(3, 1)
        names: dict[str, Any] = {"__name__": "page"}
        for file in ("http", "grpc"):
            exec(compile(here(block("py", file).text), file, "exec"), names)
            assert capsys.readouterr().out.endswith(f"{scores}\n")
        inputs = httpx.get(f"{url}/v2/models/clicks", timeout=PATIENCE_S).json()["inputs"]
        assert {one["name"] for one in inputs} == {"user", "item", "seen", "price"}
        # The table's other forms, as JSON.
        changes: tuple[dict[str, Any], ...] = (
            {"item": ([3, 1], [1, 2, 3], {})},
            {"seen": ([1, 3], [4, 5, 0], {"pad": 0})},
        )
        for change in changes:
            again = json.loads(body[1])
            for one in again["inputs"]:
                if one["name"] in change:
                    one["shape"], one["data"], one["parameters"] = change[one["name"]]
            other = httpx.post(
                f"{url}/v2/models/clicks/infer", json=again, timeout=PATIENCE_S
            ).json()
            assert other["outputs"] == answer["outputs"], change


def test_options_of_the_page_exist() -> None:
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    of_others = {"--model", "--sample", "--output", "--profile"}  # of export, and of compose
    named = set(re.findall(r"(--[a-z][a-z-]+)", text)) - of_others
    known = ""
    for command in ("serve", "embedding-parameter-server"):
        asked = ("-m", "persia.launcher", command, "--help")
        ran = run(*asked, env=without_persia(), timeout_s=60)
        assert ran.returncode == 0, ran.stderr
        known += ran.stdout
    assert {name for name in named if name not in known} == set()
    assert len(named) > 15
