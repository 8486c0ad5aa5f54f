"""Short names of what pytest gives tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Log = pytest.LogCaptureFixture
Monkey = pytest.MonkeyPatch

# Of the fixture ``record_property``: a name and a value.
Record = Callable[[str, str], None]
