"""Which parameters stand for tables."""

from __future__ import annotations

from torch import nn

import persia.nn


def test_parameters_are_parted_and_each_table_has_one_group() -> None:
    linear = nn.Linear(2, 2)
    one, two = persia.nn.Embedding("parted", 2), persia.nn.EmbeddingBag("parted", 2)
    model = nn.ModuleList([one, linear, two])
    (group,) = persia.nn.sparse_parameters(model)
    assert group["table"] == "parted"
    assert group["params"][0] is one.anchor
    assert [id(x) for x in persia.nn.dense_parameters(model)] == [
        id(x) for x in linear.parameters()
    ]
