"""Pages opened in a real browser."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import pytest

from tests.support.processes import run

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def screenshot(url: str, picture: Path, width: int = 1280, height: int = 1000) -> bytes:
    """Open a page in headless Chromium and write what it shows as a PNG.

    Returns:
        The bytes of its pixels as the PNG filters them; a blank page has few values.
    """
    _show(picture.parent, f"--window-size={width},{height}", f"--screenshot={picture}", url)
    return pixels(picture.read_bytes())


def document(page: Path, query: str = "", scripts_ms: int = 0) -> str:
    """Return a page as it is after its scripts have run.

    ``scripts_ms`` is how long, by their clock, they may work on after the page was loaded.
    """
    url = f"{page.as_uri()}{query}"
    budget = [f"--virtual-time-budget={scripts_ms}"] if scripts_ms else []
    return _show(page.parent, "--window-size=1240,1500", *budget, "--dump-dom", url)


def _show(folder: Path, *words: str) -> str:
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command = [browser, *options, f"--user-data-dir={folder / 'browser'}", *words]
    ran = run(*command)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def pixels(png: bytes) -> bytes:
    """Return what a PNG's image data holds."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    data, at = b"", 8
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    return zlib.decompress(data)
