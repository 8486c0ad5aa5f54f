"""The first batch of a data-loader's script, without a trainer to send it to.

    python -m persia._cli.checks.first_batch PLACE data_loader.py

runs the script with a ``DataCtx`` that writes the first batch to the file PLACE and ends the
process.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import persia.ctx
from persia.embedding.data import PersiaBatch


class FirstBatchCtx:
    """Stands in for ``DataCtx`` until a batch is sent."""

    resume_position = 0
    place = Path()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __enter__(self) -> FirstBatchCtx:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def seek(self, batch: int) -> None:
        """Begin at the first batch, which is the only one there is."""

    def stats(self) -> dict[str, int]:
        """Return no counts: nothing was sent."""
        return {}

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Write the batch, and end this process."""
        part = self.place.with_suffix(".part")
        part.write_bytes(persia_batch.to_bytes())
        part.rename(self.place)
        os._exit(0)


def main() -> None:
    """Run the script that the command line names."""
    place, script = sys.argv[1:3]
    FirstBatchCtx.place = Path(place)
    setattr(persia.ctx, "DataCtx", FirstBatchCtx)  # noqa: B010  (mypy: a class is replaced)
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
