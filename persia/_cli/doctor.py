"""``persia-launcher doctor``: what a job would fail of, before it starts.

checks     -->  findings: ok, warning, error, and what to do
forecast   -->  a table: bytes of a row of each feature, rows that fit
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    check_variables,
    error,
    file_in_procfile,
    forecast,
    ok,
    read_sample,
)
from persia._metrics.top_view import WIDTH, need_rich
from persia.config import schema_fingerprint
from persia.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

# Where a project has its files, unless options or variables name them.
_EMBEDDING = ("embedding_config.yml", "config/embedding_config.yml")
_GLOBAL = ("global_config.yml", "config/global_config.yml")
_SCRIPT = "data_loader.py"
_PROCFILE = "Procfile"

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of the command."""

    embedding_config: Path | None = None
    global_config: Path | None = None
    sample: Path | None = None
    optimizer: str = "adagrad"
    rows: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Findings and forecasts of one run."""

    findings: list[Finding]
    forecasts: list[Forecast]

    @property
    def status(self) -> int:
        """The exit status: 1 if there is an error."""
        return int(any(one.status == "error" for one in self.findings))

    def to_json(self) -> str:
        """Return the report for programs."""
        return json.dumps(
            {
                "ok": not self.status,
                "findings": [dataclasses.asdict(one) for one in self.findings],
                "forecast": [dataclasses.asdict(one) for one in self.forecasts],
            },
            indent=2,
        )

    def summary(self) -> str:
        """Return the last line: counts of errors and warnings."""
        counts = {
            name: sum(one.status == name for one in self.findings)
            for name in ("error", "warning")
        }
        return ", ".join(
            f"{number or 'no'} {name}{'' if number == 1 else 's'}"
            for name, number in counts.items()
        )

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=WIDTH).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what rich draws."""
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


def examine(options: DoctorOptions) -> Report:
    """Run every check.

    Raises:
        ConfigError: If the options cannot be used.
    """
    if options.sample is not None and not options.sample.is_file():
        raise ConfigError(f"--sample: no such file: {options.sample}")
    embedding = options.embedding_config or env.embedding_config_path() or _first(_EMBEDDING)
    embedding = embedding or _in_procfile("--embedding-config")
    common = options.global_config or env.global_config_path() or _first(_GLOBAL)
    common = common or _in_procfile("--global-config")
    findings = [*check_machine(), *check_variables()]
    found, schema, config = check_files(embedding, common)
    findings += found
    forecasts: list[Forecast] = []
    if any(one.status == "error" and one.check == "variables" for one in findings):
        return Report(findings, forecasts)  # the checks below read them
    if schema is not None:
        forecasts = forecast(schema, config, options.optimizer, options.rows)
    findings += check_memory(config, forecasts)
    if schema is not None:
        path = options.sample or env.data_loader_entry() or _first([_SCRIPT])
        if path is None:
            findings.append(ok("data", "no sample given: --sample FILE compares one"))
        else:
            try:
                findings += check_sample(schema, read_sample(path), str(path))
            except DataError as exc:
                findings.append(error("data", str(exc), "correct it, or give another --sample"))
    if Path(_PROCFILE).is_file():
        findings += check_procfile(Path(_PROCFILE))
    findings += check_network("" if schema is None else schema_fingerprint(schema))
    return Report(findings, forecasts)


def _in_procfile(option: str) -> Path | None:
    path = Path(_PROCFILE)
    return file_in_procfile(path, option) if path.is_file() else None


def _first(names: Sequence[str]) -> Path | None:
    return next((Path(name) for name in names if Path(name).is_file()), None)


def rows_of(texts: Sequence[str]) -> dict[str, int]:
    """Parse texts of the form ``feature=number``, such as ``user=2e9``.

    Raises:
        ConfigError: If a text has another form.
    """
    return dict(_row_of(text) for text in texts)


def _row_of(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    try:
        count = int(float(number))
        if name and count >= 0:
            return name, count
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"--rows: expected FEATURE=NUMBER, such as user=2e9, got {text!r}")


def run_doctor(options: DoctorOptions, *, as_json: bool) -> int:
    """Print the report; returns the exit status.

    Raises:
        ConfigError: If the options cannot be used, or rich is not installed.
    """
    if as_json:
        report = examine(options)
        print(report.to_json())
        return report.status
    need_rich()
    from rich.console import Console

    report, console = examine(options), Console()
    if console.is_terminal:
        console.print(report)
    else:
        print(report)
    return report.status
