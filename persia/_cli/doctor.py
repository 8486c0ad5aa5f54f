"""Before a job: ``persia-launcher init``, and the report of ``persia-launcher doctor``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia._cli.checks import (
    Finding,
    Forecast,
    check_files,
    check_machine,
    check_memory,
    check_network,
    check_procfile,
    check_sample,
    check_servers,
    check_variables,
    error,
    file_in_procfile,
    forecast,
    ok,
    read_sample,
)
from persia._metrics.top_view import WIDTH
from persia.config import schema_fingerprint
from persia.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_PROCFILE = Path("Procfile")
# Templates of a project; with .txt they are not taken for modules of this package.
_SKELETON = Path(__file__).parent / "skeleton"
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class Report:
    findings: list[Finding]
    forecasts: list[Forecast]

    @property
    def status(self) -> int:
        return int(any(one.status == "error" for one in self.findings))

    def to_json(self) -> str:
        findings = [dataclasses.asdict(one) for one in self.findings]
        forecasts = [dataclasses.asdict(one) for one in self.forecasts]
        report = {"ok": not self.status, "findings": findings, "forecast": forecasts}
        return json.dumps(report, indent=2)

    def summary(self) -> str:
        texts = []
        for name in ("error", "warning"):
            number = sum(one.status == name for one in self.findings)
            texts.append(f"{number or 'no'} {name}{'' if number == 1 else 's'}")
        return ", ".join(texts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for one in self.findings:
            text = Text(one.text)
            if one.todo:
                text.append(f"\n-> {one.todo}", "bold")
            table.add_row(Text(one.status, _STYLES[one.status]), one.check, text)
        yield table
        if self.forecasts:
            yield Text()
            yield self._table()
        yield Text(f"\n{self.summary()}", _STYLES["error"] if self.status else "bold")

    def _table(self) -> Table:
        from rich.table import Table

        has_rows = any(one.rows for one in self.forecasts)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("feature", "group", "dtype", "optimizer"):
            table.add_column(name)
        for name in ("dim", "bytes a row", "rows that fit", *(["rows", "GiB"] * has_rows)):
            table.add_column(name, justify="right")
        for one in self.forecasts:
            cells = [one.feature, one.group, one.dtype, one.optimizer, str(one.dim)]
            cells += [f"{one.row_bytes:.0f}", f"{one.fit:,}" if one.fit else "no limit"]
            if has_rows:
                cells += [f"{one.rows:,}", f"{one.rows * one.row_bytes / 2**30:.2f}"]
            table.add_row(*cells)
        return table


def examine(
    embedding_config: Path | None = None,
    global_config: Path | None = None,
    sample: Path | None = None,
    optimizer: str = "adagrad",
    rows: Mapping[str, int] | None = None,
) -> Report:
    """Run every check; what is not given is looked for where a project has it."""
    if sample is not None and not sample.is_file():
        raise ConfigError(f"--sample: no such file: {sample}")
    embedding = embedding_config or env.embedding_config_path() or _find("embedding")
    common = global_config or env.global_config_path() or _find("global")
    findings = [*check_machine(), *check_variables()]
    found, schema, config = check_files(embedding, common)
    findings += found
    if any(one.status == "error" and one.check == "variables" for one in findings):
        return Report(findings, [])  # the checks below read them
    forecasts = [] if schema is None else forecast(schema, config, optimizer, rows or {})
    findings += check_memory(config, forecasts)
    if schema is not None:
        path = sample or env.data_loader_entry() or _first(["data_loader.py"])
        try:
            if path is None:
                findings.append(ok("data", "no sample given: --sample FILE compares one"))
            else:
                findings += check_sample(schema, read_sample(path), str(path))
        except DataError as exc:
            findings.append(error("data", str(exc), "correct it, or give another --sample"))
    if _PROCFILE.is_file():
        findings += check_procfile(_PROCFILE)
    findings += check_network("" if schema is None else schema_fingerprint(schema))
    return Report(findings, forecasts)


def compare(
    servers: Iterable[tuple[str, str, str]], embedding_config: Path | None = None
) -> list[Finding]:
    """Check servers that run elsewhere: role, what messages call it, and address of each."""
    path = embedding_config or env.embedding_config_path() or _find("embedding")
    findings, schema, _ = check_files(path, None)
    fingerprint = "" if schema is None else schema_fingerprint(schema)
    return [*findings, *check_servers(servers, fingerprint)]


def _find(which: str) -> Path | None:
    """Return where a project has one of its configs: here, or where its Procfile says."""
    found = _first([f"{which}_config.yml", f"config/{which}_config.yml"])
    if found is None and _PROCFILE.is_file():
        found = file_in_procfile(_PROCFILE, f"--{which}-config")
    return found


def _first(names: Sequence[str]) -> Path | None:
    return next((Path(name) for name in names if Path(name).is_file()), None)


def rows_of(texts: Sequence[str]) -> dict[str, int]:
    """Parse texts of the form ``feature=number``, such as ``user=2e9``."""
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            found[name] = int(float(number))
        except (ValueError, OverflowError):
            name = ""
        if not name or found[name] < 0:
            raise ConfigError(
                f"--rows: expected FEATURE=NUMBER, such as user=2e9, got {text!r}"
            )
    return found


def print_report(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
        return
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(report)


def write_project(directory: Path) -> list[Path]:
    """Write a project that trains as it is into a new or empty directory; returns its files."""
    written: list[Path] = []
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} is not empty: expected a new or an empty directory")
        directory.mkdir(parents=True, exist_ok=True)
        for template in sorted(_SKELETON.rglob("*.txt")):
            path = directory / template.relative_to(_SKELETON).with_suffix("")
            path.parent.mkdir(exist_ok=True)
            path.write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
            written.append(path)
    except OSError as exc:
        raise ConfigError(f"{directory}: {exc.strerror}") from exc
    return written
