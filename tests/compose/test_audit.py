"""What CI makes of pip-audit's findings."""

from __future__ import annotations

import re
from typing import Any

from tests.compose.audit import COMPOSE, PINS, verdict

GOOD: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
BAD = GOOD | {"name": "b", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


def test_a_hole_fails_and_missing_data_does_not() -> None:
    assert verdict([]) == (0, "audit: skipped, the data of pip-audit is not to be had here")
    assert verdict([UNKNOWN])[1].startswith("audit: skipped")
    assert verdict([GOOD, UNKNOWN]) == (0, "audit: no known hole in 1 of 2 packages")
    status, text = verdict([GOOD, BAD, UNKNOWN])
    assert status == 1
    assert "b 1: CVE-1, mended in 2" in text

    # Every file of pins is looked at.
    assert sorted(PINS) == sorted(path.name for path in COMPOSE.glob("requirements*.txt"))
    for name in PINS:
        assert re.search(r"^[a-z0-9-]+==", (COMPOSE / name).read_text(), re.MULTILINE)
