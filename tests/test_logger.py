"""Loggers under PERSIA's names, on the standard library."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import logger


@pytest.fixture
def name() -> Iterator[str]:
    yield "persia-test"
    log = logging.getLogger("persia-test")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


@pytest.fixture(autouse=True)
def _no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "_default_logger", None)


def test_one_line_for_an_event_however_often_it_is_set_up(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.setLogger(name)
    log = logger.setLogger(name, log_level=logging.INFO)
    log.debug("not this")
    log.info("trained %d batches", 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("trained 3 batches")
    assert "INFO" in lines[0]
    assert "[test_logger.py:" in lines[0]


def test_colors_on_a_terminal_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, plain = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    logger.setLogger(name).error("red")
    monkeypatch.setattr(sys, "stderr", plain)
    logger.setLogger(name).error("plain")
    assert "\x1b[31m" in terminal.getvalue()
    assert "\x1b" not in plain.getvalue()
    record = logging.LogRecord("x", 25, __file__, 1, "a level without a color", (), None)
    assert "a level" in logger.COLOR_FORMATTER.format(record)


def test_files(name: str, tmp_path: Path) -> None:
    every, errors = tmp_path / "train.log", tmp_path / "error.log"
    log = logger.setLogger(
        name,
        log_filename=str(every),
        enable_file_logger=True,
        err_redirect_filepath=str(errors),
        enable_err_redirect=True,
        err_redirect_level=logging.WARNING,
    )
    log.warning("at the level")
    log.error("above it")
    for handler in log.handlers:
        handler.flush()
    assert "at the level" in every.read_text()
    assert "above it" in every.read_text()
    assert "at the level" not in errors.read_text()
    assert "above it" in errors.read_text()


def test_default_logger_is_made_once_and_others_have_no_handlers(name: str) -> None:
    assert logger.get_logger(name) is logging.getLogger(name)
    assert logging.getLogger(name).handlers == []
    first = logger.get_default_logger(name, log_level=logging.ERROR)
    assert (first.name, first.level) == (name, logging.ERROR)
    assert logger.get_default_logger("another") is first
