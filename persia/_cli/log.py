"""The log of processes that a command starts."""

from __future__ import annotations

import faulthandler
import logging
from contextlib import suppress

from persia import env


def set_up_logging(process: str) -> None:
    """Send PERSIA's log to stderr, each line with the role and number of this process.

    A crash of native code writes the stacks of all threads there.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s"))
    log = logging.getLogger("persia")
    log.addHandler(handler)
    log.setLevel(env.log_level())
    with suppress(OSError, ValueError):  # stderr is no file
        faulthandler.enable()
