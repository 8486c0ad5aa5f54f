"""At which line of a YAML file the thing is that an error message names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from persia.errors import ConfigError


@contextmanager
def lines_said(name: str) -> Iterator[None]:
    """Put the line into what is raised of a file; of what is none it is as it was."""
    try:
        yield
    except ConfigError as exc:
        raise ConfigError(with_line(str(exc), name)) from None


def with_line(message: str, file: str) -> str:
    """Put the line behind the file's name in a message that begins with it.

    Messages name places by keys, ``file: slots_config.user.dim: expected ...``: the line is
    that of the deepest key that is there. A message that has a line already stays, as it begins
    otherwise, and so does one of the file as a whole.
    """
    prefix = f"{file}: "
    if not message.startswith(prefix):
        return message
    rest = message.removeprefix(prefix)
    try:
        root = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return message
    line = _line_of(root, rest)
    return f"{file}:{line}: {rest}" if line else message


def _line_of(node: yaml.Node | None, rest: str) -> int:
    """Return the line of the key that a message leads to, from a node on; 0 if to none."""
    line = 0
    while isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        if isinstance(node, yaml.MappingNode):
            items = [(str(key.value), key, value) for key, value in node.value]
        else:
            items = [(str(place), value, value) for place, value in enumerate(node.value)]
        found = [item for item in items if re.match(rf"{re.escape(item[0])}(?:\.|: )", rest)]
        if not found:
            break
        name, key, node = max(found, key=lambda item: len(item[0]))
        line = key.start_mark.line + 1
        rest = re.sub(r"^(?:\.|: )", "", rest[len(name) :])
    unknown = re.match(r"unknown key '([^']+)'", rest)
    if unknown and isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            if str(key.value) == unknown[1]:
                return int(key.start_mark.line) + 1
    return line
