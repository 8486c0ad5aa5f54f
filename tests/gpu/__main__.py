"""All that persia does on a GPU, in at most ten minutes and without a network.

    python -m tests.gpu [--out build/gpu] [--device cpu --quick]
    python -m tests.gpu --carry build/gpu/site

Compiles what is not compiled, runs the tests marked cuda, runs them again under torch's stream
sanitizer, measures a DLRM, and writes gpu.md, gpu.json and a log of each part. Exit status 0:
all passed, or there is no CUDA device; 1: a part failed; 2: something that it needs is missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch

from tests.gpu import machine

TOTAL_S = 590.0
SANITIZED = "tests/training/test_batch.py"
# Where tests marked cuda are. To collect others takes packages that are not carried.
WITH_CUDA = ("tests/gpu", SANITIZED)
# Between when a part has ended by itself and when it is stopped.
RESERVE_S = 15.0


@dataclass
class Part:
    """One command, and what came of it."""

    name: str
    command: list[str]
    seconds: float  # most of it
    environment: dict[str, str] = field(default_factory=dict)
    is_bounded: bool = False  # takes ``--seconds``, and ends by itself then
    status: int | None = None  # None: not begun, for lack of time
    took_s: float = 0.0
    measured: list[str] = field(default_factory=list)
    summary: str = ""

    def run(self, out: Path, left_s: float) -> None:
        """Run the command to its end or its limit; what it prints goes to a file."""
        if left_s <= 0:
            return
        begin = time.monotonic()
        limit_s = min(self.seconds, left_s)
        command = [*self.command]
        if self.is_bounded:
            command += ["--seconds", f"{max(limit_s - RESERVE_S, 0.0):.0f}"]
        log = out / f"{self.name}.log"
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command,
                cwd=machine.ROOT,
                env={**os.environ, **self.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self.status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.status = 124
            finally:
                if process.poll() is None:  # with the servers and measurements it has started
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        self.took_s = time.monotonic() - begin
        lines = log.read_text(encoding="utf-8").splitlines()
        self.summary = next((line for line in reversed(lines) if line.strip()), "")

    @property
    def result(self) -> str:
        texts = {None: "not begun: no time was left", 0: "passed", 124: "out of time"}
        return texts.get(self.status, f"failed ({self.status})")


def parts(device: str, quick: bool, out: Path) -> list[Part]:
    """Return what is run, in order."""
    # xunit1 takes what tests record.
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    pytest += ["-o", "junit_family=xunit1"]
    # What torch says where a package of that name is installed, which some images have.
    pytest += ["-W", "ignore:The pynvml package:FutureWarning"]
    chosen = ["-m", "cuda"] if device == "cuda" else ["-k", "[cpu]", "-m", "not slow"]
    where = WITH_CUDA if device == "cuda" else WITH_CUDA[:1]
    measure = [sys.executable, "-m", "tests.benchmarks.gpu", "--out", str(out)]
    measure += ["--device", device]
    if quick:
        measure += ["--quick", "--pairs", "1", "--threads", "1", "--net", "256-128"]
    found = [
        Part("tests", [*pytest, *chosen, f"--junitxml={out}/tests.xml", *where], 280.0),
        Part("measurement", measure, 300.0, is_bounded=True),
    ]
    if device == "cuda":
        sanitizer = {"TORCH_CUDA_SANITIZER": "1"}
        found.insert(1, Part("sanitizer", [*pytest, *chosen, SANITIZED], 90.0, sanitizer))
    if machine.not_compiled():
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        found.insert(0, Part("compile", build, 300.0))
    return found


def measured_in(report: Path) -> list[str]:
    """Return the lines that tests recorded, from pytest's XML."""
    if not report.exists():
        return []
    root = ElementTree.parse(report).getroot()
    return [
        each.get("value", "")
        for each in root.iter("property")
        if each.get("name") == "measured"
    ]


def page(done: list[Part], device: str, quick: bool, out: Path) -> str:
    """Return the report in Markdown."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    lines = [f"# A DLRM on {device.upper()}, and the tests of a GPU, {today}", ""]
    if device == "cpu" or quick:
        lines += ["A trial of the program, not a measurement.", ""]
    lines += ["## Hardware and versions", ""]
    lines += [f"- {line}" for line in (*machine.described(), f"commit {_commit()}")]
    lines += ["", "## Command", "", "    make gpu", ""]
    lines += ["| part | result | seconds | last line |", "|---|---|---|---|"]
    for part in done:
        last = part.summary.replace("|", "/")[:120]
        lines.append(f"| {part.name} | {part.result} | {part.took_s:.0f} | {last} |")
    lines += ["", "## Numbers", ""]
    lines += [f"- {line}" for part in done for line in part.measured]
    table = out / "measured.md"
    if table.exists():
        lines += ["", table.read_text(encoding="utf-8")]
    return "\n".join(lines).rstrip() + "\n"


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ran = subprocess.run(
            words, cwd=machine.ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown: no git here"
    return re.sub(r"\s", "", ran.stdout) or "unknown: no repository here"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/gpu"), help="folder of gpu.md and gpu.json")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--quick", action="store_true", help="1 %% of the rows, one net, one thread")
    add("--carry", type=Path, help="only copy the packages that are needed into this folder")
    options = parser.parse_args(argv)
    if options.carry is not None:
        size = machine.carry(options.carry)
        print(f"gpu: {options.carry} has {size / 2**20:.0f} MiB of packages")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu: skipped, torch {torch.__version__} finds no CUDA device")
        return 0
    if found := machine.problems():
        print("\n".join(f"gpu: {line}" for line in found), file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tests.xml", "measured.md", "measured.json"):  # of a run before
        (out / name).unlink(missing_ok=True)
    begin = time.monotonic()
    done = parts(options.device, options.quick, out)
    for part in done:
        part.run(out, TOTAL_S - (time.monotonic() - begin))
        print(
            f"gpu: {part.name}: {part.result}, {part.took_s:.0f} s: {part.summary}", flush=True
        )
        if part.name == "compile" and part.status != 0:
            break
    next(part for part in done if part.name == "tests").measured = measured_in(
        out / "tests.xml"
    )
    (out / "gpu.md").write_text(page(done, options.device, options.quick, out), "utf-8")
    (out / "gpu.json").write_text(
        json.dumps([asdict(part) for part in done], indent=1), "utf-8"
    )
    print(f"gpu: wrote {out / 'gpu.md'}")
    return int(any(part.status != 0 for part in done))


if __name__ == "__main__":
    sys.exit(main())
