"""The process that tries a library of kernels out: ``python -m ... PATH NAME``.

A library that crashes when it is loaded or called takes this process with it, and no server.
"""

from __future__ import annotations

import resource
import sys

from persia._core.kernels import native
from persia.errors import ExtensionError


def main(path: str, library: str) -> int:
    """Return the exit status; what is wrong with the library is printed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        native.load(path, library)
        native.try_out(library)
    except ExtensionError as exc:
        print(exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
