"""Short runs of the proofs: what is counted has to hold; times are not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.proofs import switch


@pytest.mark.slow
def test_no_answer_is_mixed_while_versions_and_rows_change(tmp_path: Path) -> None:
    assert switch.run(tmp_path, 1500, 8000, 2, judges=False) == 0
