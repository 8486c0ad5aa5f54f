"""Command lines: help that ends with an example, and errors that are one line.

persia-launcher top: No such option '--onec'. Type: persia-launcher top --once
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from persia.errors import PersiaError

_EXAMPLE = "Example: "
# Of two options' names, from which on one is taken for the other, spelled wrong.
_NEAR = 0.85


def example(text: str) -> dict[str, Any]:
    """Return what gives a command its example."""
    return {"epilog": f"\b\n{_EXAMPLE}{text}"}


class Refused(click.ClickException):
    """A command line that cannot be used: one line, and exit status 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(self.format_message(), file=file, err=True)


def _what_to_type(ctx: click.Context | None) -> str:
    """Return the example of the command that failed; of several commands, what lists them."""
    if ctx is None:
        return ""
    if isinstance(ctx.command, click.Group):
        return f"{ctx.command_path} --help"
    return (ctx.command.epilog or "").partition(_EXAMPLE)[2].strip()


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            raise  # the whole help
        path = "" if error.ctx is None else f"{error.ctx.command_path}: "
        message = " ".join(error.format_message().split()).rstrip(".")
        what = _what_to_type(error.ctx)
        stop = "" if message.endswith("?") else "."
        raise Refused(f"{path}{message}" + (f"{stop} Type: {what}" if what else "")) from error


class ScriptCommand(click.Command):
    """A command that gives a script what is no option of its own, unless it nearly is one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words behind the command."""
        own = [
            name for one in self.params if isinstance(one, click.Option) for name in one.opts
        ]
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            near = difflib.get_close_matches(name, own, n=1, cutoff=_NEAR)
            if name.startswith("--") and near and name not in own:
                raise click.UsageError(
                    f"no such option: {name}; did you mean {near[0]}? put -- before it if it "
                    "is the script's",
                    ctx,
                )
        return super().parse_args(ctx, args)


class OneLineGroup(click.Group):
    """Commands whose errors are one line each; PERSIA's own have exit status 1."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        """Read the command line up to the command."""
        with _in_one_line():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        """Read the rest of it, and run the command."""
        try:
            with _in_one_line():
                return super().invoke(ctx)
        except PersiaError as error:
            raise click.ClickException(str(error)) from error
