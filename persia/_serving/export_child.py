"""``python -m persia._serving.export_child FOLDER``: trace a model that a parent put there."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from persia._serving.program import trace
from persia.errors import PersiaError


def main(folder: Path) -> None:
    """Read ``task``, write ``traced``: what was traced, or the error."""
    found: object
    try:
        found = trace(*cloudpickle.loads((folder / "task").read_bytes()))
    except PersiaError as exc:
        found = exc
    (folder / "traced").write_bytes(cloudpickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
