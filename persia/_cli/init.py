"""``persia-launcher init``: a project that runs as it is, as a start for one's own."""

from __future__ import annotations

from pathlib import Path

from persia.errors import ConfigError

# Templates; with .txt they are not taken for modules of this package.
_SKELETON = Path(__file__).parent / "skeleton"
_SUFFIX = ".txt"


def write_project(directory: Path) -> list[Path]:
    """Write a project into a new or empty directory; returns its files.

    Raises:
        ConfigError: If the directory is not empty, or cannot be written.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} is not empty: expected a new or an empty directory")
        return _copy(directory)
    except OSError as exc:
        raise ConfigError(f"{directory}: {exc.strerror}") from exc


def _copy(directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for template in sorted(_SKELETON.rglob(f"*{_SUFFIX}")):
        path = directory / template.relative_to(_SKELETON).with_suffix("")
        path.parent.mkdir(exist_ok=True)
        path.write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
        written.append(path)
    return written
