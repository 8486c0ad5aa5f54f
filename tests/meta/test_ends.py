"""Which files are the user's, whose frames a traceback keeps."""

from __future__ import annotations

import os
import site
from pathlib import Path

from persia import _process_exit


def test_what_is_installed_for_a_user_is_not_the_users() -> None:
    for place in (site.getusersitepackages(), *site.getsitepackages()):
        assert not _process_exit._is_users(f"{place}{os.sep}pandas{os.sep}io.py")
    assert _process_exit._is_users(str(Path(__file__)))
