"""Command lines: help that ends with an example, and errors that are one line.

    persia-launcher top: No such option '--onec'. Did you mean '--once'? Type: persia-launcher
    top --once

What is to be typed is the line that was given, without its mistake, or else the command's
example. Words behind ``--`` are not the command's, and stay as they are.
"""

from __future__ import annotations

import difflib
import io
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import IO, Any

import click

from persia.errors import PersiaError

_EXAMPLE = "Example: "
# Of two options' names, from which on one is taken for the other, spelled wrong.
_NEAR = 0.85
# Of a group, and so of its commands.
HELP = {"help_option_names": ["-h", "--help"]}
# What is said to a flag that takes no value to have it off.
_OFF = {"false", "no", "off", "0"}


def example(text: str) -> dict[str, Any]:
    """Return what gives a command its example."""
    return {"epilog": f"\b\n{_EXAMPLE}{text}"}


class Refused(click.ClickException):
    """A command line that cannot be used: one line, and exit status 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(self.format_message(), file=file, err=True)


@contextmanager
def _in_one_line(ctx: click.Context, words: Sequence[str]) -> Iterator[None]:
    """Say of an error in the words of a command, in one line, what it is and what to type."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            raise  # the whole help
        message = " ".join(error.format_message().split()).rstrip(".")
        stop = "" if message.endswith("?") else "."
        what = _what_to_type(error, ctx, list(words))
        raise Refused(f"{ctx.command_path}: {message}{stop} Type: {what}") from error


def _what_to_type(error: click.UsageError, ctx: click.Context, words: list[str]) -> str:
    """Return the line as it was meant, or an example; of several commands, what lists them."""
    meant = _meant(error, ctx, words)
    if meant != words and _can_be_read(ctx, meant):
        return f"{ctx.command_path} {shlex.join(meant)}".rstrip()
    if isinstance(ctx.command, click.Group):
        return f"{ctx.command_path} --help"
    return (ctx.command.epilog or "").partition(_EXAMPLE)[2].strip()


def _meant(error: click.UsageError, ctx: click.Context, words: list[str]) -> list[str]:
    """Return the words without this error, or as they are if nobody can say how."""
    command = ctx.command
    end = words.index("--") if "--" in words else len(words)
    own, others = words[:end], words[end:]
    if isinstance(error, click.NoSuchOption):
        given = error.option_name
        near = difflib.get_close_matches(given, _options_of(ctx), n=1) or [given]
        named = [near[0] + word[len(given) :] if _names(word, given) else word for word in own]
        return named + others
    if isinstance(error, click.BadOptionUsage):  # such as a value of one that takes none
        return [*_without_value(error.option_name, own), *others]
    if isinstance(error, click.MissingParameter):
        return [*words, *_missing(ctx, words)] if words else words
    if isinstance(error, click.BadParameter) and error.param is not None:
        return _chosen(error.param, own) + others
    if isinstance(command, click.Group) and words:
        near = difflib.get_close_matches(words[0], command.commands, n=1) or words
        return [near[0], *words[1:]]
    return words


def _names(word: str, option: str) -> bool:
    return word == option or word.startswith(f"{option}=")


def _without_value(option: str, words: list[str]) -> Iterator[str]:
    """Yield the words with a flag that has no value, or without it where that was "no"."""
    for word in words:
        if not _names(word, option):
            yield word
        elif word.partition("=")[2].lower() not in _OFF:
            yield option


def _options_of(ctx: click.Context) -> list[str]:
    options = (one for one in ctx.command.get_params(ctx) if isinstance(one, click.Option))
    return [name for option in options for name in option.opts]


def _missing(ctx: click.Context, words: list[str]) -> Iterator[str]:
    """Yield words for what a command needs and was not given."""
    command = ctx.command
    given = command.make_context(
        ctx.info_name, list(words), parent=ctx.parent, resilient_parsing=True
    ).params
    for param in command.params:
        if param.required and given.get(str(param.name)) is None:
            if isinstance(param, click.Option):
                yield param.opts[0]
            if isinstance(param.type, click.Choice):
                yield str(param.type.choices[0])
            else:
                yield param.human_readable_name


def _chosen(param: click.Parameter, words: list[str]) -> list[str]:
    """Return the words with a value that is one of those to choose from."""
    if not isinstance(param.type, click.Choice):
        return words
    choices = list(param.type.choices)
    meant = list(words)
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        name, _, value = word.rpartition("=")
        if (name or before) in param.opts:
            near = difflib.get_close_matches(value, choices, n=1) or choices
            meant[place] = f"{name}={near[0]}" if name else near[0]
    return meant


def _can_be_read(ctx: click.Context, words: list[str]) -> bool:
    try:
        with redirect_stdout(io.StringIO()):
            ctx.command.make_context(ctx.info_name, list(words), parent=ctx.parent)
    except click.exceptions.Exit:  # help and the version are answered as they are read
        return True
    except click.ClickException:
        return False
    return True


class OneLineCommand(click.Command):
    """A command whose line is answered by one line if it cannot be used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words behind the command."""
        # click takes them out of the list; and not all of its errors know the context.
        with _in_one_line(ctx, list(args)):
            return super().parse_args(ctx, args)


class ScriptCommand(OneLineCommand):
    """A command that gives a script what is no option of its own, unless it nearly is one.

    A script may have a ``-h`` of its own: only in front of all others it is the command's.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        named["context_settings"] = {
            "ignore_unknown_options": True,
            "help_option_names": ["--help"],
        }
        super().__init__(*arguments, **named)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words behind the command."""
        if args[:1] == ["-h"]:
            args = ["--help"]
        with _in_one_line(ctx, args):
            self._check_spelling(ctx, args)
        return super().parse_args(ctx, args)

    def _check_spelling(self, ctx: click.Context, args: list[str]) -> None:
        own = [
            name for one in self.params if isinstance(one, click.Option) for name in one.opts
        ]
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            near = difflib.get_close_matches(name, own, n=1, cutoff=_NEAR)
            if name.startswith("--") and near and name not in own:
                raise click.NoSuchOption(
                    name,
                    f"no such option: {name}; did you mean {near[0]}? put -- before it if it "
                    "is the script's",
                    ctx=ctx,
                )


class OneLineGroup(click.Group):
    """Commands whose errors are one line each; PERSIA's own have exit status 1."""

    command_class = OneLineCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line up to the command."""
        with _in_one_line(ctx, list(args)):
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command."""
        with _in_one_line(ctx, list(args)):
            return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Read the rest of it, and run the command."""
        try:
            with _in_one_line(ctx, ()):
                return super().invoke(ctx)
        except PersiaError as error:
            raise click.ClickException(str(error)) from error


def refusal(group: click.Group, words: Sequence[str]) -> str:
    """Return what a command would say of a line that it cannot use; "" if it can.

    Args:
        group: Of the command, named as it is typed.
        words: The command's name, which is one of the group's, and what is behind it.
    """
    name, rest = words[0], list(words[1:])
    # A command keeps its -h as it was when it was first read.
    parent = click.Context(group, info_name=group.name, **group.context_settings)
    try:
        with redirect_stdout(io.StringIO()):  # of --help
            group.commands[name].make_context(name, rest, parent=parent)
    except click.exceptions.Exit:
        return ""
    except click.ClickException as refused:
        return refused.format_message()
    return ""
