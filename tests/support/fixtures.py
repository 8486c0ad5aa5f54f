"""Short names of what pytest gives tests."""

from __future__ import annotations

import pytest

Log = pytest.LogCaptureFixture
Monkey = pytest.MonkeyPatch
