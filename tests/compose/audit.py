"""Looks for known holes in what the images are made of.

    python3 -m tests.compose.audit       # needs pip-audit, and a way to its data

Without a way to the data it says so, and ends with 0: nothing was found either way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PINS = (
    "requirements.txt",
    "requirements-build.txt",
    "requirements-serve.txt",
    "requirements-torch.txt",
)
COMPOSE = Path(__file__).parents[2] / "compose"
DEADLINE_S = 120.0


def verdict(packages: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Return the exit status and what to say of pip-audit's findings."""
    # Those that its data does not know have a reason in place of a list of holes.
    known = [one for one in packages if "skip_reason" not in one]
    holes = [
        f"{one['name']} {one['version']}: {hole['id']}, mended in "
        f"{', '.join(hole['fix_versions']) or 'no version yet'}"
        for one in known
        for hole in one["vulns"]
    ]
    if holes:
        return 1, "\n".join(["audit: known holes", *holes])
    if not known:
        return 0, "audit: skipped, the data of pip-audit is not to be had here"
    return 0, f"audit: no known hole in {len(known)} of {len(packages)} packages"


def audited() -> list[dict[str, Any]]:
    """Ask pip-audit of every pinned package; it may not be able to tell."""
    words = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    words += ["--no-deps", "--disable-pip", "--timeout", "10"]
    for name in PINS:
        words += ["-r", str(COMPOSE / name)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        return []
    return found


if __name__ == "__main__":
    status, text = verdict(audited())
    print(text)
    sys.exit(status)
