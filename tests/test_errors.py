"""The tree of exceptions, and the hint that an unknown name gets."""

from __future__ import annotations

import pytest

from persia import errors
from persia.errors import PersiaError, did_you_mean


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.DataTypeError, TypeError),
        (errors.DimMismatch, ValueError),
        (errors.ServiceUnavailable, ConnectionError),
        (errors.ServiceTimeout, TimeoutError),
        (errors.NotAllowed, PermissionError),
        (errors.UnknownRef, LookupError),
        (errors.UnknownModel, LookupError),
        (errors.UnknownStream, LookupError),
        (errors.CheckpointError, OSError),
        (errors.ExtensionError, ImportError),
    ],
)
def test_an_error_is_the_builtin_one_too(
    error: type[PersiaError], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, RuntimeError)  # what an old `except RuntimeError` catches


def test_the_nearest_name_is_offered() -> None:
    names = ("pooling", "dim", "initialization")
    assert did_you_mean("poling", names) == ", did you mean 'pooling'?"
    assert did_you_mean("zzz", names) == ""
    assert did_you_mean("dimm", iter(names), cutoff=0.99) == ""
