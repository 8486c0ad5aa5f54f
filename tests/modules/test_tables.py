"""Names of tables, and the parameters that stand for them."""

from __future__ import annotations

import gc

import pytest
import torch

from persia._modules.tables import declare, declare_new, find, of_anchor
from persia.errors import ConfigError


def test_a_name_is_one_table_and_a_new_one_gets_a_number() -> None:
    table = declare("named once", 4)
    assert declare("named once", 4) is table
    assert find("named once") is table
    assert of_anchor(table.anchor) is table
    assert of_anchor(torch.nn.Parameter(torch.zeros(2))) is None
    assert declare_new("named once", 4).name == "named once_2"


def test_another_dim_has_another_key() -> None:
    first, second = declare("dims", 4), declare("dims", 8)
    assert (first.key, second.key) == ("dims", "dims#2")
    assert declare("dims", 8) is second


def test_a_table_without_a_users_name_goes_with_its_module() -> None:
    table = declare_new("passing", 4)
    key = table.key
    del table
    gc.collect()
    with pytest.raises(ConfigError, match="no module of this process has declared it"):
        find(key)


@pytest.mark.parametrize(("name", "dim"), [("", 4), ("x", 0), ("x", True), (None, 4)])
def test_bad_names_and_dims_are_refused(name: str, dim: int) -> None:
    with pytest.raises(ConfigError, match=r"expected a name|embedding_dim must be"):
        declare(name, dim)
