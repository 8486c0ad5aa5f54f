"""The Procfile: commands that are there, scripts and configs that are, and replicas that agree.

    name: [env] [VARIABLE=value ...] command words ...         .env: VARIABLE=value

Of a command that starts a role more is known than that it is there: the launcher reads its
words, without running it. The lines of one role on this machine are some, or all, of its
``REPLICA_SIZE`` replicas. honcho runs a line by a shell: nothing is said of one in which there
is anything for it to do, nor of the replicas of its role.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia._cli.checks.findings import Finding, error, ok, warning
from persia._cli.checks.variables import unknown, unread
from persia._cli.errors import refusal
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia.errors import ConfigError

if TYPE_CHECKING:
    import click

_LINE = re.compile(r"([A-Za-z0-9_-]+):\s*(.+)")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# What only a shell can say of a line, which is what honcho runs it by.
_SHELLS = re.compile(r"[$&|;<>()`~*?{}\[\]]")
_BUILTINS = {
    *(".", ":", "!", "alias", "cd", "command", "eval", "exec", "exit", "export", "if", "for"),
    *("case", "read", "readonly", "set", "shift", "source", "time", "trap", "type", "ulimit"),
    *("umask", "unset", "until", "wait", "while"),
}
_LAUNCHER = "persia-launcher"
_ROLES = (LOADER, WORKER, SERVER, TRAINER)
# Of which a role's replicas have addresses, one each.
_LISTS = {
    WORKER: (env.EMBEDDING_WORKERS_VARIABLE, env.embedding_worker_addresses),
    SERVER: (env.PARAMETER_SERVERS_VARIABLE, env.parameter_server_addresses),
}
_FILES = ("--embedding-config", "--global-config")


@dataclass(frozen=True, slots=True)
class Line:
    """One process that is started."""

    where: str  # file, line and name
    variables: dict[str, str]
    words: list[str]

    @property
    def role(self) -> str:
        """Of ``persia-launcher``; "" if the command is another."""
        is_role = Path(self.words[0]).name == _LAUNCHER and len(self.words) > 1
        return self.words[1] if is_role else ""

    def option(self, name: str, variable: str = "") -> str | None:
        """Return the value of an option, or else of its variable."""
        for number, word in enumerate(self.words):
            if word == name and number + 1 < len(self.words):
                return self.words[number + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return self.variables.get(variable)


def check_procfile(path: Path, launcher: click.Group | None = None) -> Iterator[Finding]:
    """Yield what is found of the commands that honcho would start.

    Args:
        path: The file.
        launcher: Reads the words of its own lines; without it they are not read.
    """
    lines, shells, bad = _read(path)
    for line in lines:
        bad += _check_line(line)
        bad += _of_variables(line, {one.text for one in bad})
    refused: set[str] = set()  # roles: nothing more is known of their replicas
    if launcher is not None:
        for line in lines:
            found = [*_refused(launcher, line)]
            refused |= {line.role for _ in found}
            bad += found
    for role in dict.fromkeys(line.role for line in lines if line.role in _ROLES):
        if role not in refused and not any(role in text for text in shells):
            bad += _check_replicas(role, [line for line in lines if line.role == role])
    yield from bad
    if not bad:
        count = f"{len(lines)} command{'' if len(lines) == 1 else 's'}"
        more = f"; {len(shells)} of a shell, not looked into" if shells else ""
        yield ok("procfile", f"{path}: {count}, each of which is there{more}")


def file_named_in(path: Path, option: str) -> Path | None:
    """Return the first file that an option of the servers' lines names, if it is there."""
    lines, _, _ = _read(path)
    names = (line.option(option) for line in lines if line.role in (WORKER, SERVER))
    return next((Path(name) for name in names if name and Path(name).is_file()), None)


def _read(path: Path) -> tuple[list[Line], list[str], list[Finding]]:
    """Return lines, the texts of those that are for a shell, and what cannot be read."""
    common = _variables_of(path.with_name(".env"))
    lines: list[Line] = []
    shells: list[str] = []
    bad: list[Finding] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        found = _LINE.fullmatch(text.strip())
        if found is None:  # honcho leaves it out
            if text.strip() and not text.strip().startswith("#"):
                what = f"{path}:{number}: nothing is started by {text.strip()!r}"
                bad.append(warning("procfile", what, "write name: command, or # before it"))
            continue
        if _SHELLS.search(found[2]):
            shells.append(found[2])
            continue
        where = f"{path}:{number}: {found[1]}"
        try:
            line = _parsed(where, dict(common), shlex.split(found[2]))
        except ValueError as exc:
            bad.append(error("procfile", f"{where}: {exc}", "close the quotes"))
            continue
        if line is None:
            continue
        first = line.words[0]
        if first in _BUILTINS or first.startswith("-"):  # or an option of env
            shells.append(found[2])
        else:
            lines.append(line)
    return lines, shells, bad


def _variables_of(path: Path) -> dict[str, str]:
    """Return what honcho sets for all of them."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = (_VARIABLE.fullmatch(line.strip()) for line in text.splitlines())
    return {one[1]: one[2].strip("'\"") for one in found if one is not None}


def _parsed(where: str, variables: dict[str, str], words: list[str]) -> Line | None:
    """Return a line, the variables that it sets apart; None if nothing else is there."""
    while words and (words[0] == "env" or _VARIABLE.fullmatch(words[0])):
        name, is_set, value = words.pop(0).partition("=")
        if is_set:
            variables[name] = value
    return Line(where, variables, words) if words else None


def _check_line(line: Line) -> Iterator[Finding]:
    command = line.words[0]
    if shutil.which(command) is None:
        todo = "pip install persia, or activate its environment"
        if command != _LAUNCHER:
            todo = "install it, or correct the name"
        yield error("procfile", f"{line.where}: no such command: {command}", todo)
        return
    if not line.role:
        return
    if line.role not in _ROLES:
        yield error(
            "procfile",
            f"{line.where}: {_LAUNCHER} has no role {line.role!r}",
            f"one of {', '.join(_ROLES)}",
        )
        return
    names = [line.option(name) for name in _FILES if line.role in (WORKER, SERVER)]
    if line.role in (LOADER, TRAINER) and len(line.words) > 2:
        names += line.words[2:3] if not line.words[2].startswith("-") else []
    for name in names:
        if name is not None and not Path(name).is_file():
            yield error("procfile", f"{line.where}: no such file: {name}", "correct the path")


def _of_variables(line: Line, said: set[str]) -> Iterator[Finding]:
    with env.changed(**line.variables):
        found = [*unread(), *unknown(line.variables)]
    for one in found:  # those of .env are every line's
        if one.text not in said:
            yield one


def _refused(launcher: click.Group, line: Line) -> Iterator[Finding]:
    said = refusal(launcher, line.words[1:]) if line.role in _ROLES else ""
    if said:
        text, _, example = said.partition(" Type: ")
        yield error("procfile", f"{line.where}: {text}", example or "persia-launcher --help")


def _check_replicas(role: str, lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield what replicas of one role do not agree on."""
    if role == TRAINER:
        return
    try:
        size, index = env.get_replica_size() or 1, env.get_replica_index() or 0
        replicas = [_replica(line, index, size) for line in lines]
    except ConfigError as exc:
        yield error("procfile", str(exc), "write numbers")
        return
    sizes = sorted({size for _, size in replicas})
    where = lines[0].where if len(lines) == 1 else f"{len(lines)} lines of {role}"
    if len(sizes) > 1:
        yield error(
            "procfile",
            f"{where}: REPLICA_SIZE is {' and '.join(map(str, sizes))}",
            "give all of them the same --replica-size",
        )
        return
    (size,) = sizes
    taken: set[int] = set()
    for line, (index, _) in zip(lines, replicas, strict=True):
        if not 0 <= index < size:
            yield error(
                "procfile",
                f"{line.where}: replica {index} of REPLICA_SIZE {size}",
                f"--replica-index is in 0..{size - 1}",
            )
        elif index in taken:
            yield error(
                "procfile",
                f"{line.where}: replica {index} is started twice",
                f"give each of them its own --replica-index, and --replica-size {len(lines)}",
            )
        taken.add(index)
    if len(lines) < size:
        yield warning(
            "procfile",
            f"{where}: {len(lines)} of REPLICA_SIZE {size} start here",
            "start the others elsewhere, or correct --replica-size",
        )
    if role in _LISTS:
        variable, known = _LISTS[role]
        text = lines[0].variables.get(variable)
        count = len(known() if text is None else text.split(","))
        if count != size:
            yield error(
                "procfile",
                f"{where}: REPLICA_SIZE is {size}, and {variable} has {count}",
                f"one address for each, with commas between, in {variable}",
            )


def _replica(line: Line, index: int, size: int) -> tuple[int, int]:
    """Return number and count of the replica that a line starts."""
    found = []
    for name, default in (("index", index), ("size", size)):
        text = line.option(f"--replica-{name}", f"REPLICA_{name.upper()}")
        if text is not None and not text.isdecimal():
            raise ConfigError(f"{line.where}: REPLICA_{name.upper()} is {text!r}")
        found.append(default if text is None else int(text))
    return found[0], found[1]
