"""Record everything again, on purpose: ``python -m tests.golden [--only wire,help]``."""

from __future__ import annotations

import argparse
import importlib

from tests.golden.book import MAKERS, as_text, write

PARTS = ("wire", "help", "files", "examples", "job")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    write({"made-with.json": as_text({name: make() for name, make in MAKERS.items()})})
    for part in parser.parse_args().only.split(","):
        if part not in PARTS:
            parser.error(f"--only: expected some of {', '.join(PARTS)}, got {part!r}")
        changed = write(importlib.import_module(f"tests.golden.test_{part}").record())
        print(f"{part}: {', '.join(changed) or 'as it was'}")


if __name__ == "__main__":
    main()
