"""Every command has help with an example, and refuses a bad command line in one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from persia import k8s_utils, launcher
from persia._cli import ckpt
from persia.version import __version__

GROUPS = {
    "persia-launcher": launcher.cli,
    "persia-ckpt": ckpt.cli,
    "persia-k8s-utils": k8s_utils.cli,
}
COMMANDS = [(name, command) for name, group in GROUPS.items() for command in group.commands]


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(GROUPS[name], arguments, prog_name=name)
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_help_has_an_example_that_could_be_typed(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text, _ = run(name, command, "--help")
    assert status == 0
    (line,) = (line.strip() for line in text.splitlines() if "Example: " in line)
    words = line.removeprefix("Example: ").split()
    assert words[:2] == [name, command]
    assert run(name, command, "-h") == (0, text, "")
    monkeypatch.chdir(tmp_path)
    for word in words:
        if re.fullmatch(r"\w+\.(yml|parquet)", word):
            Path(word).touch()
    group = GROUPS[name]
    # It is read without an error, and not run.
    with click.Context(group, info_name=name) as ctx:
        group.commands[command].make_context(command, words[2:], parent=ctx)


@pytest.mark.parametrize("name", GROUPS)
def test_help_of_all_lists_every_command(name: str) -> None:
    status, text, _ = run(name, "--help")
    assert status == 0
    assert all(f"  {command} " in text for command in GROUPS[name].commands)
    assert run(name, "-h") == (0, text, "")
    assert run(name, "--version") == (0, f"{name}, version {__version__}\n", "")
    status, _, text = run(name, "nothing-of-the-kind")
    assert (status, text.count("\n")) == (2, 1)
    assert f" Example: {name} " in text
    assert run(name, "--nothing")[0] == 2


def bad_lines(command: click.Command) -> Iterator[list[str]]:
    """Yield words behind a command that no command can use."""
    for param in command.params:
        if isinstance(param, click.Option):
            yield [f"{param.opts[0]}=1" if param.is_flag else param.opts[0]]
            yield [f"{param.opts[0]}x"]
    yield ["--help=1"]
    if not any(param.nargs == -1 for param in command.params):
        yield ["x"] * (1 + len(command.params))
        yield ["--nothing-of-the-kind"]
        yield ["-x"]


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_each_bad_line_is_refused_in_one_line_with_the_example(name: str, command: str) -> None:
    known = GROUPS[name].commands[command]
    example = (known.epilog or "").partition("Example: ")[2]
    for words in bad_lines(known):
        status, out, text = run(name, command, *words)
        assert (status, out, text.count("\n")) == (2, "", 1), (words, out, text)
        assert text.startswith(f"{name} {command}: ")
        assert text.endswith(f" Example: {example}\n")


# Others, word by word: tests/golden/test_help.py.
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("persia-launcher --hepl", "No such option '--hepl'. Did you mean '--help'? "),
        ("persia-launcher --", "Missing command. "),
        ("persia-ckpt --quick", "No such option '--quick'. "),
        ("persia-launcher top --interval 0", "'--interval'"),
        ("persia-launcher nn-worker a.py --nproc_per_node=2", "mean '--nproc-per-node'? "),
        ("persia-launcher nn-worker a.py --nproc-per-nod 2", "Options of the script that look"),
        ("persia-launcher doctor --sample nowhere.npz", "--sample: no such file: nowhere.npz"),
        ("persia-launcher doctor --rows user=many", "got 'user=many'"),
    ],
)
def test_a_mistake_is_one_line(given: str, says: str) -> None:
    name, *words = shlex.split(given)
    status, out, text = run(name, *words)
    assert (status, out, text.count("\n")) == (2, "", 1)
    assert says in text
