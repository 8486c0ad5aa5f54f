"""Which columns are read as what."""

from __future__ import annotations

import pytest

from persia.errors import ConfigError
from persia.readers import Columns
from tests.readers.support import ids_of
from tests.readers.test_arrays import batch_of


def test_a_feature_is_named_once() -> None:
    with pytest.raises(ConfigError, match="ids: expected each feature once, got 'user' twice"):
        Columns(["user", "user"])


def test_a_feature_may_have_another_name_and_two_may_share_a_column() -> None:
    batch = batch_of(
        Columns({"viewer": "user", "owner": "user"}, requires_grad=False), user=[5]
    )
    assert [feature.name for feature in batch.features] == ["viewer", "owner"]
    assert ids_of(batch, "owner") == [[5]]


def test_columns_that_say_nothing() -> None:
    with pytest.raises(ConfigError, match="at least one column, got none"):
        Columns([])
    with pytest.raises(ConfigError, match="expected lists of names, got a str"):
        Columns("user")
    with pytest.raises(ConfigError, match="expected 'hash' or 'hex', got 'md5'"):
        Columns(["user"], strings="md5")
