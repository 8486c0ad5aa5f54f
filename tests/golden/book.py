"""The records: text files, and the comparison with them."""

from __future__ import annotations

import difflib
import json
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

RECORDS = Path(__file__).parent / "records"
_MAX_LINES = 120  # of a difference that is shown


def as_text(content: Any) -> str:
    """Write JSON with a line for each value, lists of numbers apart."""
    return json.dumps(content, indent=1, ensure_ascii=True) + "\n"


def read(name: str) -> str:
    return (RECORDS / name).read_text("utf-8")


def _processor() -> str:
    import torch  # by its capability torch chooses how it computes

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _version(of: str) -> Callable[[], str]:
    return lambda: metadata.version(of).partition("+")[0]


# What else than this code the records depend on.
MAKERS: dict[str, Callable[[], str]] = {
    "click": _version("click"),
    "torch": _version("torch"),
    "processor": _processor,
}


def check(found: Mapping[str, str], *depends_on: str) -> None:
    """Compare texts with the records of these names; a failure shows what differs.

    Args:
        found: Texts by the name of their record.
        depends_on: Of ``MAKERS``: with others than the records were made with, it is skipped.
    """
    then = json.loads(read("made-with.json"))
    for name in depends_on:
        if (now := MAKERS[name]()) != then[name]:
            pytest.skip(f"recorded with {name} {then[name]}, not {now}")
    said = []
    for name, text in found.items():
        path = RECORDS / name
        wanted = path.read_text("utf-8") if path.exists() else ""
        if text != wanted:
            old, new = wanted.splitlines(), text.splitlines()
            lines = difflib.unified_diff(old, new, f"records/{name}", "now", n=2, lineterm="")
            said += [line[:400] for line in lines]
    if said:
        left = len(said) - _MAX_LINES
        more = [f"... and {left} lines more"] if left > 0 else []
        pytest.fail("\n".join([*said[:_MAX_LINES], *more]), pytrace=False)


def write(found: Mapping[str, str]) -> list[str]:
    """Make these texts the records; returns the names of those that changed."""
    changed = []
    for name, text in found.items():
        path = RECORDS / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            changed.append(name)
    return changed
