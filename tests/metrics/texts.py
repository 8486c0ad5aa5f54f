"""Texts and readings of metrics, of numbers that a test chooses."""

from __future__ import annotations


def text_of(role: str, replica: int, run: str = "", **values: float) -> str:
    """Return Prometheus' text of one process."""
    labels = f'role="{role}",replica="{replica}"'
    info = f'version="1.2.3",run="{run}"'
    lines = [f"persia_info{{{labels},{info}}} 1.0", f"persia_ready{{{labels}}} 1.0"]
    lines += [f"{name}{{{labels}}} {value!r}" for name, value in values.items()]
    return "\n".join([*lines, "process_resident_memory_bytes 1e+08", ""])
