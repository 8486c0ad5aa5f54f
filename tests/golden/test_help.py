"""What the commands say of themselves, and of lines that they cannot use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tests.golden.book import as_text, check
from tests.golden.commands import SCRIPTS, command, invoke, run

LINES = (
    ("persia-launcher", "top", "--onec"),
    ("persia-launcher", "nnworker"),
    ("persia-launcher", "nn-worker", "--nproc-per-node", "0", "train.py"),
    ("persia-launcher", "embedding-worker", "--port", "70000"),
    ("persia-launcher", "doctor", "--optimizer", "adagrd"),
    ("persia-launcher", "doctor", "--rows", "user"),
    ("persia-launcher", "keys"),
    ("persia-launcher", "top", "nowhere"),
    ("persia-ckpt", "inspect"),
    ("persia-ckpt", "inspect", "no-such-folder"),
    ("persia-ckpt", "convert", "no-such-folder", "tables", "--to", "csv"),
    ("persia-ckpt", "reshard", "no-such-folder", "other", "--servers", "0"),
)
# These set up logging, so each has a process of its own.
ROLE_LINES = (
    ("persia-launcher", "nn-worker"),
    ("persia-launcher", "embedding-worker", "--embedding-config", "no-such-file.yml"),
    ("persia_launcher", "server", "--help"),
)


def _commands(name: str, found: Any) -> Iterator[list[str]]:
    yield [name]
    if isinstance(found, click.Group):
        for inner, its in sorted(found.commands.items()):
            for words in _commands(inner, its):
                yield [name, *words]


def record() -> dict[str, str]:
    pages = []
    for name in SCRIPTS:
        if isinstance(command(name), click.Command):
            for words in _commands(name, command(name)):
                ran = invoke(*words, "--help")
                pages.append(f"$ {' '.join(words)} --help\n{ran.output}")
    refused: dict[str, Any] = {}
    for line in LINES:
        ran = invoke(*line)
        refused[" ".join(line)] = [ran.exit_code, *ran.output.splitlines()]
    for line in ROLE_LINES:
        status, text = run(*line)
        text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?", "TIME", text)
        text = text.replace(str(Path.cwd()), "FOLDER")
        refused[" ".join(line)] = [status, *text.splitlines()]
    return {"help/help.txt": "\n".join(pages), "help/refused.json": as_text(refused)}


def test_help_and_refusals() -> None:
    check(record(), "click")
