"""The process that tries a library of kernels out: ``python -m ... PATH OPTIMIZER``.

A library that crashes when it is loaded or called takes this process with it, and no server.
"""

from __future__ import annotations

import resource
import sys

from persia._core.kernels import native
from persia.errors import ExtensionError


def main(path: str, optimizer: str) -> int:
    """Return the exit status; what is wrong with the library is printed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        native.load(path, optimizer)
        native.try_out(optimizer)
    except ExtensionError as exc:
        print(exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
