"""The log of launched processes."""

from __future__ import annotations

import signal
import sys

from tests.support.processes import run


def test_a_crash_of_native_code_leaves_the_stacks_of_its_threads() -> None:
    code = (
        "import ctypes\nfrom persia._cli.log import set_up_logging\n"
        "def crash(): ctypes.string_at(0)\nset_up_logging('a process'); crash()"
    )
    ran = run(sys.executable, "-c", code)
    assert ran.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ran.stderr
    assert "in crash" in ran.stderr
