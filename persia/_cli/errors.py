"""Command lines: help that ends with an example, and errors that are one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from persia.errors import PersiaError

# Of a group; its commands inherit it.
HELP = {"help_option_names": ["-h", "--help"]}
_EXAMPLE = "Example: "
# Similarity from which a word is taken for a misspelled option of the command itself.
_MISSPELLED = 0.85


def example(text: str) -> dict[str, Any]:
    """Return the keyword arguments that give a command its example."""
    return {"epilog": f"\b\n{_EXAMPLE}{text}"}


class Refused(click.ClickException):
    """A command line that cannot be used: one line, and exit status 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.format_message(), file=file, err=True)


@contextmanager
def _one_line(command: click.Command, path: str) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            raise  # click prints the whole help
        message = " ".join(error.format_message().split())
        message += "" if message.endswith((".", "?")) else "."
        shown = (command.epilog or "").partition(_EXAMPLE)[2].strip()
        raise Refused(f"{path}: {message} {_EXAMPLE}{shown}") from error


class OneLineCommand(click.Command):
    """A command that refuses a bad command line in one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _one_line(self, ctx.command_path):
            return super().parse_args(ctx, args)


class ScriptCommand(OneLineCommand):
    """A command that passes unknown options on to a script, unless they look misspelled.

    A script may have an option ``-h`` of its own: only as the first word is it the command's.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        named["context_settings"] = {
            "ignore_unknown_options": True,
            "help_option_names": ["--help"],
        }
        super().__init__(*arguments, **named)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["-h"]:
            args = ["--help"]
        with _one_line(self, ctx.command_path):
            self._check_spelling(args)
        return super().parse_args(ctx, args)

    def _check_spelling(self, args: list[str]) -> None:
        own = [
            name for one in self.params if isinstance(one, click.Option) for name in one.opts
        ]
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            near = difflib.get_close_matches(name, own, n=1, cutoff=_MISSPELLED)
            if name.startswith("--") and near and name not in own:
                raise click.UsageError(
                    f"No such option {name!r}. Did you mean {near[0]!r}? Options of the script "
                    "that look alike go behind --"
                )


class OneLineGroup(click.Group):
    """Commands whose errors are one line each; those of PERSIA have exit status 1."""

    command_class = OneLineCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _one_line(self, ctx.command_path):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line(self, ctx.command_path):
            try:
                return super().invoke(ctx)
            except PersiaError as error:
                raise click.ClickException(str(error)) from error
