"""Fuzz the frame decoder and every server's methods with atheris.

    python -m tests.fuzz DIRECTORY [libFuzzer's options, as -max_total_time=600]
    python -m tests.fuzz --keep DIRECTORY

The directory holds the inputs found so far; the second form writes the shortest of them to
tests/fuzz/corpus.txt, which the fast tests replay.
"""

from __future__ import annotations

import base64
import logging
import random
import sys
from pathlib import Path
from typing import Any

import atheris
import msgpack  # type: ignore[import-untyped]

with atheris.instrument_imports(
    include=[
        f"persia.{room}" for room in ("_rpc", "_server", "_worker", "_loader", "_training")
    ]
):
    from tests.fuzz import target as fuzzed

# Of the committed corpus: an input, and all of them together.
_KEPT_BYTES, _KEPT_TOTAL = 2048, 200_000
_ODD = (0, 1, -1, 255, 1 << 31, 1 << 32, 1 << 48, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_VALUES: tuple[Any, ...] = (
    *(*_ODD, None, True, 0.5, float("nan"), float("inf")),
    *("", "sum", [], {}, [0, 0]),
)


def changed(value: Any, dice: random.Random) -> Any:
    """The same value with something in it replaced, removed or doubled."""
    if isinstance(value, list) and value and dice.random() < 0.9:
        place = dice.randrange(len(value))
        what = dice.random()
        if what < 0.1:
            return value[:place] + value[place + 1 :]
        if what < 0.2:
            return [*value[: place + 1], *value[place:]]
        return [*value[:place], changed(value[place], dice), *value[place + 1 :]]
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(sorted(value, key=str))
        return {**value, key: changed(value[key], dice)}
    if isinstance(value, int) and dice.random() < 0.5:
        return value + dice.choice((-1, 1))
    return dice.choice(_VALUES)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change the bytes, or what they mean."""
    dice = random.Random(seed)
    role, parts = fuzzed.from_bytes(data)
    if len(parts) < 2 or dice.random() < 0.2:
        return bytes(atheris.Mutate(data, max_size))
    which = dice.randrange(1, len(parts))
    if which == 1 or dice.random() < 0.5:
        try:
            header = msgpack.unpackb(parts[1])
            inner = dice.choice(["a", "b", "b", "b", ""])
            if isinstance(header, dict) and inner in header:
                header[inner] = changed(header[inner], dice)
            else:
                header = changed(header, dice)
            parts[1] = msgpack.packb(header)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            parts[1] = atheris.Mutate(parts[1], len(parts[1]) + 16)
    else:
        parts[which] = atheris.Mutate(parts[which], max(len(parts[which]), 8))
    return fuzzed.to_bytes(role, [part[:65535] for part in parts])[:max_size]


def keep(directory: Path) -> None:
    """Add to the committed corpus what the fuzzer kept, the shortest first, up to a size."""
    lines = fuzzed.CORPUS.read_text("ascii").split()
    found = [path for path in directory.iterdir() if not path.name.startswith("seed")]
    for path in sorted(found, key=lambda path: (path.stat().st_size, path.name)):
        data = path.read_bytes()
        if len(data) > _KEPT_BYTES or sum(map(len, lines)) > _KEPT_TOTAL:
            break
        line = base64.b64encode(data).decode()
        if line not in lines:
            lines.append(line)
    fuzzed.CORPUS.write_text("\n".join(lines) + "\n", "ascii")


def main() -> None:
    if sys.argv[1:2] == ["--keep"]:
        keep(Path(sys.argv[2]))
        return
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(fuzzed.seeds() + fuzzed.corpus()):
        (directory / f"seed{number}").write_bytes(seed)
    logging.disable()  # a line with a traceback for each finding
    known: set[str] = set()
    with fuzzed.target() as target:

        def send(data: bytes) -> None:
            try:
                target.send(data)
            except fuzzed.Unmeant as finding:
                # Answered, but by chance: reported once for each place, and the run goes on.
                if finding.where not in known:
                    known.add(finding.where)
                    line = base64.b64encode(data).decode()
                    print(f"\nfinding {len(known)}: {finding}\n{line}\n", flush=True)

        atheris.Setup(sys.argv, send, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
