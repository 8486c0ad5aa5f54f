"""JSON that others may have written is an error that says why; its values: test_manifest.py."""

from __future__ import annotations

import pytest

from persia._files.json_models import parse
from persia.errors import CheckpointError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected JSON in UTF-8"),
        (b'{"a": 1, "a": 2}', "a key comes twice"),
        (b"[1e999]", "expected finite numbers, got 1e999"),
        (b"[" * 100_000, "a value nested too deeply"),
    ],
)
def test_other_bytes_are_an_error(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^f: .*{message}"):
        parse(data, "f")
