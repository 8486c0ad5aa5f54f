"""The two YAML files: how one is opened, and at which line of it an error is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from persia.config._models import InvalidValue, show, validate
from persia.errors import ConfigError
from persia.utils import load_yaml

T = TypeVar("T")

# By which each of the two files is known; the older spellings are the original's.
_SECTIONS = {
    "embedding config": ("slots_config", "slot_configs", "slot_config"),
    "global config": (
        *("common_config", "embedding_worker_config"),
        *("embedding_parameter_server_config", "embedded_config"),
    ),
}


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file, or a mapping of the same shape."""

    content: object
    name: str
    """In errors: the file's path, or which of the two configs it is."""

    @staticmethod
    def open(source: str | os.PathLike[str] | Mapping[str, object], config: str) -> Document:
        """Read a file or take a mapping; ``config`` is a key of ``_SECTIONS``.

        Raises:
            ConfigError: It cannot be read, or is the other one of the two.
        """
        if isinstance(source, Mapping):
            document = Document(source, config)
        elif isinstance(source, str | os.PathLike):
            try:
                document = Document(load_yaml(source), os.fspath(source))
            except OSError as exc:
                raise ConfigError(f"{config}: {exc}") from exc
        else:
            raise ConfigError(f"{config}: expected a path or a mapping, got {show(source)}")
        document._check_not_swapped(config)
        return document

    def read(self, cls: type[T]) -> T:
        """Return the content as a model.

        Raises:
            ConfigError: A key or a value cannot be used; names file, line and key.
        """
        try:
            return validate(cls, self.content)
        except InvalidValue as exc:
            error = self.error(str(exc), *exc.keys)
        raise error

    def error(self, message: str, *keys: str | int) -> ConfigError:
        """Return an error of the value that ``keys`` lead to."""
        return ConfigError(InvalidValue(message, *keys).at(self.place(*keys)))

    def place(self, *keys: str | int) -> str:
        """Return the name and, of a file, the line of the deepest of ``keys`` in it."""
        if self.name in _SECTIONS:
            return self.name
        try:
            text = Path(self.name).read_text(encoding="utf-8")
            line = _line_of(yaml.compose(text, Loader=yaml.SafeLoader), keys)
        except (OSError, ValueError, yaml.YAMLError):  # the file has changed since
            return self.name
        return f"{self.name}:{line}" if line else self.name

    def _check_not_swapped(self, config: str) -> None:
        content = self.content
        if not isinstance(content, Mapping) or not content.keys().isdisjoint(_SECTIONS[config]):
            return
        for other, sections in _SECTIONS.items():
            for key in sections:
                if key in content:
                    raise ConfigError(
                        f"{self.name}: expected the {config}, got one with {key!r}, which is "
                        f"in the {other}: are the two swapped?"
                    )


def _line_of(node: yaml.Node | None, keys: tuple[str | int, ...]) -> int:
    """Return the line of the deepest key below a node; 0 if the first one is not there."""
    line = 0
    for wanted in keys:
        found: tuple[yaml.Node, yaml.Node] | None = None
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == wanted), None)
        elif isinstance(node, yaml.SequenceNode) and wanted in range(len(node.value)):
            found = (node.value[wanted], node.value[wanted])
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
