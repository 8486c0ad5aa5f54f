"""Logging by the standard library, under PERSIA's names.

Nothing is set up at import: PERSIA's own modules log to children of the logger ``persia`` and
leave handlers to the program. ``setLogger`` and ``get_default_logger`` are for user code.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

STREAM_LOG_FORMAT = (
    "%(log_color)s%(asctime)s %(levelname)-8s%(reset)s "
    "%(blue)s[%(filename)s:%(lineno)d]%(reset)s %(log_color)s%(message)s%(reset)s"
)
FILE_LOG_FORMAT = "%(asctime)s %(levelname)-8s [%(filename)s:%(lineno)d] %(message)s"
DEFAULT_LOGGER_NAME = "log"
LOG_COLOR = {
    "DEBUG": "cyan",
    "INFO": "green",
    "WARNING": "yellow",
    "ERROR": "red",
    "CRITICAL": "red,bg_white",
}

# The ANSI codes of the words that LOG_COLOR uses.
_ANSI = {"blue": 34, "cyan": 36, "green": 32, "yellow": 33, "red": 31, "bg_white": 47}


def _escape(words: str) -> str:
    return f"\x1b[{';'.join(str(_ANSI[word]) for word in words.split(','))}m"


class levelFilter(logging.Filter):
    """Passes records strictly above a level."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is above the level."""
        return record.levelno > self.level


class _ColorFormatter(logging.Formatter):
    """Fills in the colors of STREAM_LOG_FORMAT by the record's level."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        # The record is shared with other handlers; the colors go no further than this line.
        color = LOG_COLOR.get(record.levelname)
        values = dict(
            record.__dict__,
            log_color=_escape(color) if color else "",
            blue=_escape("blue"),
            reset="\x1b[0m",
        )
        return STREAM_LOG_FORMAT % values


COLOR_FORMATTER: logging.Formatter = _ColorFormatter(FILE_LOG_FORMAT)
FORMATTER = logging.Formatter(FILE_LOG_FORMAT)

_default_logger: logging.Logger | None = None


def setLogger(
    name: str,
    log_level: int = logging.DEBUG,
    log_filename: str = "train.log",
    enable_file_logger: bool = False,
    err_redirect_filepath: str = "error.log",
    enable_err_redirect: bool = False,
    err_redirect_level: int = logging.INFO,
) -> logging.Logger:
    """Give a logger a handler that writes to stderr, and files if asked.

    A second call for the same name replaces what the first installed, so that no line comes
    twice. Colors are used on a terminal only.

    Args:
        name: Name of the logger.
        log_level: Level below which the logger drops records.
        log_filename: File of every record, if ``enable_file_logger``.
        enable_file_logger: Whether it is written.
        err_redirect_filepath: File of records above a level, if ``enable_err_redirect``.
        enable_err_redirect: Whether it is written.
        err_redirect_level: The level.
    """
    logger = logging.getLogger(name)
    for old in [h for h in logger.handlers if (h.get_name() or "").startswith("persia.")]:
        logger.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if enable_file_logger:
        handlers.append(logging.FileHandler(log_filename, mode="a"))
    if enable_err_redirect:
        handlers.append(logging.FileHandler(err_redirect_filepath, mode="a"))
        handlers[-1].addFilter(levelFilter(err_redirect_level))
    for handler in handlers:
        handler.setFormatter(FORMATTER)
        handler.set_name(f"persia.{type(handler).__name__}")
        logger.addHandler(handler)
    if sys.stderr.isatty():
        handlers[0].setFormatter(COLOR_FORMATTER)
    logger.setLevel(log_level)
    return logger


def get_logger(name: str) -> logging.Logger:
    """Return the logger of that name, untouched."""
    return logging.getLogger(name)


def get_default_logger(name: str | None = None, **kwargs: Any) -> logging.Logger:
    """Return the default logger, made by ``setLogger`` at the first call.

    Args:
        name: Its name, at the first call only; ``log`` if not given.
        **kwargs: Arguments of ``setLogger``, at the first call only.
    """
    global _default_logger
    if _default_logger is None:
        _default_logger = setLogger(name or DEFAULT_LOGGER_NAME, **kwargs)
    return _default_logger
