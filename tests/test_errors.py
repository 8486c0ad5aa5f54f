"""The tree of exceptions, and the hint that an unknown name gets."""

from __future__ import annotations

import inspect
import re

import pytest

from persia import errors
from persia.errors import PersiaError, did_you_mean


def classes() -> dict[str, type[PersiaError]]:
    members = dict(inspect.getmembers(errors, inspect.isclass))
    return {name: cls for name, cls in members.items() if issubclass(cls, PersiaError)}


def test_the_docstring_draws_the_tree() -> None:
    above: list[str] = []
    drawn = {}
    for indent, name, builtin in re.findall(
        r"^    ( *)([A-Z]\w+)(?:\((\w+)\))?", errors.__doc__ or "", re.MULTILINE
    ):
        above = above[: len(indent) // 2]
        drawn[name] = {*above[-1:], *filter(None, [builtin])}
        above.append(name)
    assert drawn == {
        name: {base.__name__ for base in cls.__bases__} for name, cls in classes().items()
    }


@pytest.mark.parametrize(("name", "cls"), classes().items())
def test_an_old_except_runtime_error_catches_all(name: str, cls: type[PersiaError]) -> None:
    assert issubclass(cls, RuntimeError)
    assert name == cls.__name__


def test_the_nearest_name_is_offered() -> None:
    names = ("pooling", "dim", "initialization")
    assert did_you_mean("poling", names) == ", did you mean 'pooling'?"
    assert did_you_mean("zzz", names) == ""
    assert did_you_mean("dimm", iter(names), cutoff=0.99) == ""
