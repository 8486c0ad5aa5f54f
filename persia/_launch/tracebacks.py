"""What a failed script prints last: the traceback, or a message with the user's own frames.

An error whose message says what to change, or who did not answer, is not explained by the way
through PERSIA that it took. Its traceback keeps every frame that is not PERSIA's, and of its
causes those that have such a frame; all others are printed whole, and so is everything with
``LOG_LEVEL=debug``.
"""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path

import persia
from persia import env
from persia.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ServiceBusy,
    ServiceTimeout,
    ServiceUnavailable,
)

_FOR_USERS = (
    *(ConfigError, DataError, CheckpointError),
    *(ServiceUnavailable, ServiceTimeout, ServiceBusy),
)
_OWN = f"{Path(persia.__file__).parent}{os.sep}"
_COMPILED = "persia/", ".pyx"  # such a file's name is the one the build gave it


def text_of(error: BaseException) -> str:
    """Return what is printed of an exception that ended a script."""
    trace = traceback.TracebackException.from_exception(error)
    if isinstance(error, _FOR_USERS) and env.log_level() > logging.DEBUG:
        _leave_out_own(trace)
    return "".join(trace.format())


def _is_own(filename: str) -> bool:
    begin, end = _COMPILED
    return filename.startswith(_OWN) or (filename.startswith(begin) and filename.endswith(end))


def _leave_out_own(trace: traceback.TracebackException) -> None:
    frames = [frame for frame in trace.stack if not _is_own(frame.filename)]
    trace.stack = traceback.StackSummary.from_list(frames)
    for link in ("__cause__", "__context__"):
        before: traceback.TracebackException | None = getattr(trace, link)
        if before is not None:
            _leave_out_own(before)
            if not (before.stack or before.__cause__ or before.__context__):
                setattr(trace, link, None)
