"""The tree of exceptions, and the hint that an unknown name gets."""

from __future__ import annotations

import inspect
import re

from persia import errors
from persia.errors import PersiaError, did_you_mean


def test_the_docstring_draws_the_tree() -> None:
    above: list[str] = []
    drawn = {}
    for indent, name, builtin in re.findall(
        r"^    ( *)([A-Z]\w+)(?:\((\w+)\))?", errors.__doc__ or "", re.MULTILINE
    ):
        above = above[: len(indent) // 2]
        drawn[name] = {*above[-1:], *filter(None, [builtin])}
        above.append(name)
    members = inspect.getmembers(errors, inspect.isclass)
    classes = {name: cls for name, cls in members if issubclass(cls, PersiaError)}
    assert drawn == {
        name: {base.__name__ for base in cls.__bases__} for name, cls in classes.items()
    }
    # What an old `except RuntimeError` catches.
    assert issubclass(PersiaError, RuntimeError)


def test_the_nearest_name_is_offered() -> None:
    names = ("pooling", "dim", "initialization")
    assert did_you_mean("poling", names) == ", did you mean 'pooling'?"
    assert did_you_mean("zzz", names) == ""
    assert did_you_mean("dimm", iter(names), cutoff=0.99) == ""
