"""Every command has help with an example, and refuses a bad command line in one line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from persia import launcher
from persia._cli import ckpt
from persia.version import __version__

GROUPS = {"persia-launcher": launcher.cli, "persia-ckpt": ckpt.cli}
COMMANDS = [(name, command) for name, group in GROUPS.items() for command in group.commands]


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(GROUPS[name], arguments, prog_name=name)
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_help_has_an_example_that_could_be_typed(name: str, command: str) -> None:
    status, text, _ = run(name, command, "--help")
    assert status == 0
    (line,) = (line.strip() for line in text.splitlines() if "Example: " in line)
    words = line.removeprefix("Example: ").split()
    assert words[:2] == [name, command]
    group = GROUPS[name]
    # It is read without an error, and not run.
    with click.Context(group, info_name=name) as ctx:
        group.commands[command].make_context(command, words[2:], parent=ctx)


@pytest.mark.parametrize("name", GROUPS)
def test_help_of_all_lists_every_command(name: str) -> None:
    status, text, _ = run(name, "--help")
    assert status == 0
    assert all(f"  {command} " in text for command in GROUPS[name].commands)
    status, _, text = run(name, "nothing-of-the-kind")
    assert (status, text.count("\n")) == (2, 1)
    assert f" Example: {name} " in text
    assert run(name, "--nothing")[0] == 2


BAD = {
    "nn-worker": ["--nproc-per-node", "none"],
    "embedding-worker": ["--port", "99999"],
    "top": ["--interval", "0"],
    "verify": ["one", "two"],
    "convert": ["url", "folder", "--to", "gold"],
    "reshard": ["one", "two", "--servers", "0"],
}


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
    for words in [*filter(None, [BAD.get(command)]), *bad_lines(known)]:
        status, out, text = run(name, command, *words)
        assert (status, out, text.count("\n")) == (2, "", 1), (words, out, text)
        assert text.startswith(f"{name} {command}: ")
        assert text.endswith(f" Example: {example}\n")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("persia-launcher top --onec", "No such option '--onec'. Did you mean '--once'? "),
        ("persia-launcher tpo --once", "No such command 'tpo'. Did you mean 'top'? "),
        ("persia-launcher --hepl", "No such option '--hepl'. Did you mean '--help'? "),
        ("persia-launcher --", "Missing command. "),
        ("persia-ckpt --quick", "No such option '--quick'. "),
        ("persia-ckpt convert a b --to gold", "'gold' is not one of 'parquet', "),
        (
            "persia-launcher nn-worker a.py --nproc_per_node=2",
            "No such option '--nproc_per_node'. Did you mean '--nproc-per-node'? ",
        ),
    ],
)
def test_the_message_is_that_of_click(given: str, says: str) -> None:
    name, *words = shlex.split(given)
    status, out, text = run(name, *words)
    assert (status, out, text.count("\n")) == (2, "", 1)
    assert says in text


@pytest.mark.parametrize("name", GROUPS)
def test_short_help_and_the_version_are_the_same_everywhere(name: str) -> None:
    assert run(name, "--version") == (0, f"{name}, version {__version__}\n", "")
    for words in [(), *((command,) for command in GROUPS[name].commands)]:
        status, text, _ = run(name, *words, "-h")
        assert (status, text) == run(name, *words, "--help")[:2]
        assert status == 0
        assert "Example: " in text


def test_what_is_behind_a_script_or_two_dashes_is_the_scripts() -> None:
    command = launcher.cli.commands["nn-worker"]
    with launcher.cli.make_context("persia-launcher", ["nn-worker"]) as parent:
        for words in (["-h"], ["-depth", "3"], ["--", "--nproc-per-nod"]):
            with command.make_context("nn-worker", ["a.py", *words], parent=parent) as ctx:
                passed_on = tuple(word for word in words if word != "--")
                assert ctx.params["filepath"] == ("a.py", *passed_on)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["top", "nowhere"], "expected HOST:PORT of a process's metrics, got 'nowhere'"),
        (
            ["nn-worker", "train.py", "--nproc-per-nod", "2"],
            "Did you mean '--nproc-per-node'? Options of the script that look alike go",
        ),
        (["doctor", "--sample", "nowhere.npz"], "--sample: no such file: nowhere.npz"),
        (["doctor", "--rows", "user"], "--rows: expected FEATURE=NUMBER, such as user=2e9"),
        (["doctor", "--rows", "user=many"], "got 'user=many'"),
    ],
)
def test_what_click_cannot_check_is_one_line_too(arguments: list[str], says: str) -> None:
    status, out, text = run("persia-launcher", *arguments)
    assert (status, out) == (2, "")
    assert text.count("\n") == 1
    assert says in text
