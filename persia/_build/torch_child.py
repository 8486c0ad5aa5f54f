"""The process that compiles with PyTorch's tool chain: ``python -m ... request.json``.

A process of its own can be killed at the deadline, and a module that crashes when it is
imported takes nothing with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Compile and import what a file of JSON says; its keys are those of torch's ``load``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    import torch.utils.cpp_extension

    torch.utils.cpp_extension.load(**request, verbose=True)


def _end_with_parent() -> None:
    # Standard input is a pipe that nothing is written to: it ends with the parent. Ninja and
    # the compilers are of this process's group. Not by sys.stdin, whose lock a daemon thread
    # would hold when the interpreter ends.
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
