"""``persia-launcher init``: a project that runs as it is, to be changed into one's own."""

from __future__ import annotations

from pathlib import Path

from persia.errors import ConfigError

# Templates, which are no modules of this package.
_SKELETON = Path(__file__).parent / "skeleton"
_SUFFIX = ".txt"


def write_project(directory: Path) -> list[Path]:
    """Write a project into a directory, which is made if it is not there.

    Returns:
        The files.

    Raises:
        ConfigError: If something is in the directory, or it cannot be written.
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
