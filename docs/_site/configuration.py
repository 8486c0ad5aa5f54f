"""Writes docs/configuration.md from the code that reads configuration.

    python docs/_site/configuration.py          writes the page
    python docs/_site/configuration.py --check  fails if it is not what the code says

A key is a field of a dataclass of ``persia.config``; its text is the string below the field, or
the comment above it or behind it. A
variable is one of the table of ``persia.env``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import persia.config._global
import persia.config._schema
import persia.env
from persia._core.kernels import initial
from persia.config import OPTIMIZERS, GlobalConfig
from persia.config._schema import _EmbeddingKeys

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by docs/_site/configuration.py from the code. -->

Two YAML files say what a job is, the same two to every role; where processes are is said by
environment variables. Unknown keys are refused, with the nearest known one named. A mapping of
the same shape may stand in place of a file, as in `TrainCtx(embedding_config=...)`.

"""


def texts(module: ModuleType) -> dict[str, dict[str, str]]:
    """Return the text of each field, by class."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            of_class = found[node.name] = {}
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if not isinstance(field, ast.AnnAssign) or not isinstance(
                    field.target, ast.Name
                ):
                    continue
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    text = inspect.cleandoc(str(after.value.value))
                else:
                    text = comment(lines, field)
                of_class[ast.unparse(field.target)] = text
    return found


def comment(lines: list[str], field: ast.AnnAssign) -> str:
    """Return the comment behind a field as a sentence, or that above it."""
    _, _, behind = lines[(field.end_lineno or 0) - 1].partition("  # ")
    if behind:
        return f"{behind[0].upper()}{behind[1:]}."
    above = itertools.takewhile(
        lambda line: line.strip().startswith("# "), reversed(lines[: field.lineno - 1])
    )
    return " ".join(line.strip().removeprefix("# ") for line in reversed([*above]))


TEXTS = texts(persia.config._global) | texts(persia.config._schema)


# Mappings whose keys are the user's own names.
MEMBERS = {"slots_config": "slot", "group_settings": "group"}


def kind(hint: object) -> str:
    """Say a type in the file's words."""
    words = {int: "integer", float: "number", str: "text", bool: "true or false"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in words:
        return words[hint]
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {kind(arguments[0])}"
    if origin is dict:
        return f"mapping to {kind(arguments[1])}"
    if arguments:
        kinds = [kind(one) for one in arguments if one is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    return "mapping"


def plain(text: str) -> str:
    """Make one line of Markdown of a docstring."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def options(title: str, known: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Write what may stand in a mapping that has a name and options."""
    yield f"### {title}\n"
    yield "| name | options |\n| --- | --- |"
    for name, defaults in known.items():
        shown = ", ".join(f"`{key}: {show(value)}`" for key, value in defaults.items())
        yield f"| `{name}` | {shown} |"
    yield ""


def show(value: object) -> str:
    """Write a value as YAML has it."""
    return "required" if value is None else str(value).lower()


def default_of(field: dataclasses.Field[object]) -> str:
    """Write what a key is if it is not given."""
    if field.default is not dataclasses.MISSING:
        known = {None: "", True: "true", False: "false"}
        value = field.default
        if value is None or isinstance(value, bool):
            return known[value]
        return f"{value:_}".replace("_", " ") if type(value) is int else f"`{value}`"
    return "" if field.default_factory is not dataclasses.MISSING else "required"


def nested(hint: object) -> type | None:
    """Return the dataclass that a key's value is read as, key by key."""
    for one in (hint, *typing.get_args(hint)):
        if isinstance(one, type) and dataclasses.is_dataclass(one):
            return None if "options" in one.__dataclass_fields__ else one
    return None


def table(cls: type, name: str, level: int) -> Iterator[str]:
    """Write the keys of one mapping, then those of the mappings in it."""
    hints, inner = typing.get_type_hints(cls), []
    rows = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        text = plain(TEXTS[cls.__name__].get(field.name, ""))
        below = nested(hint)
        if below is not None:
            key = (
                f"{field.name}.<{MEMBERS[field.name]}>" if field.name in MEMBERS else field.name
            )
            inner.append((f"{name}.{key}" if name else key, below))
        else_known = field.metadata.get("aliases", ())
        if else_known:
            text += f" Older spellings: {', '.join(f'`{word}`' for word in else_known)}."
        rows.append(f"| `{field.name}` | {kind(hint)} | {default_of(field)} | {text} |")
    if rows:
        if name:
            yield f"{'#' * level} `{name}`\n"
        yield "| key | value | default | |\n| --- | --- | --- | --- |"
        yield "\n".join(rows) + "\n"
    for title, below in inner:
        yield from table(below, title, level)


def variables() -> Iterator[str]:
    """Write each variable of the table."""
    yield "| variable | default | |\n| --- | --- | --- |"
    for one in persia.env.VARIABLES.values():
        if one.doc:
            default = f"`{one.default}`" if one.default else ""
            yield f"| `{one.name}` | {default} | {plain(one.doc)} |"
    yield ""


def page() -> str:
    """Return the whole page."""
    parts = [
        HEAD,
        "## The embedding config\n",
        "Which features there are and which share rows: `--embedding-config`, "
        "`PERSIA_EMBEDDING_CONFIG`, or `TrainCtx(embedding_config=...)`.\n",
        *table(_EmbeddingKeys, "", 3),
        "A slot outside any group is a group of its own name. See [optimizers](optimizers.md), "
        "[which rows are kept](policies.md) and [rows in half the memory](row-dtypes.md).\n",
        *options("Optimizers", OPTIMIZERS),
        *options("Initializations", initial.OPTIONS),
        "## The global config\n",
        "How processes work: `--global-config`, `PERSIA_GLOBAL_CONFIG`, or "
        "`TrainCtx(global_config=...)`.\n",
        *table(GlobalConfig, "", 3),
        "## Environment variables\n",
        "Those that PERSIA reads. A variable set to the empty text counts as not set. One "
        "whose name is nearly one of these is warned of once in each process.\n",
        *variables(),
    ]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    """Write or check the page."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != page():
            raise SystemExit(
                f"{PAGE.name} is not what the code says: run {Path(__file__).name}"
            )
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
