"""Reports of several runs in one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from persia._report import page, run
from persia.errors import ConfigError


def combine(paths: Sequence[Path], target: Path) -> None:
    """Write the page of some runs' reports, of which each is a page or the data alone.

    Raises:
        ConfigError: If one cannot be read or is given twice, or the page cannot be written.
    """
    if target.suffix not in (".html", ".htm"):
        raise ConfigError(
            f"report: expected -o to name a page, as runs.html does, got {target}"
        )
    files = [path.resolve() for path in paths]
    if target.resolve() in files:
        raise ConfigError(f"report: -o {target} is one of the reports, and would replace it")
    for number, path in enumerate(paths):
        if files[number] in files[:number]:
            raise ConfigError(f"report: {path} is given twice")
    stems = Counter(path.stem for path in paths)
    runs = {path.stem if stems[path.stem] == 1 else str(path): run.load(path) for path in paths}
    text = page.render(runs)
    try:
        run.save(target, text)
    except OSError as exc:
        raise ConfigError(f"report: cannot write {target}: {exc.strerror}") from exc
