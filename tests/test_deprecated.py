"""Old names of a module; those that are found: tests/compat."""

from __future__ import annotations

import pytest

from persia._deprecated import Renewed, names_of


def test_names_of_pythons_own_are_not_looked_for() -> None:
    with pytest.raises(AttributeError, match=r"persia\.data' has no attribute '__path__'"):
        names_of("persia.data")("__path__")


def test_a_subclass_of_a_user_keeps_its_class() -> None:
    class Mine(Renewed):
        def __init__(self, sparse_optimizer: object) -> None:
            self.given = sparse_optimizer

    assert Mine(sparse_optimizer=1).given == 1
