"""One thing that was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. An error is what a job would fail of."""

    check: str
    status: Status
    text: str
    todo: str = ""  # of a warning or an error


def ok(check: str, text: str) -> Finding:
    """Return what is as it should be."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, todo: str) -> Finding:
    """Return what costs something, or may be a mistake."""
    return Finding(check, "warning", text, todo)


def error(check: str, text: str, todo: str) -> Finding:
    """Return what a job would fail of."""
    return Finding(check, "error", text, todo)
