"""What a shard writes to its state file while it works."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from persia.errors import StoreError
from tests.core.state_files import filled, new_store, state_file
from tests.core.stores import contents, evaluate, train, u64

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")


def test_an_update_that_was_done_is_not_done_again() -> None:
    with state_file() as file:
        wanted = contents(filled(file))
        again = new_store(file, attach=True)
        signs = u64(range(3300, 4200))
        ones = np.ones((900, 4), np.float32)
        again.update(signs, None, ones, slot=1, tag=12)
        again.update(signs, None, ones, slot=1, tag=11)  # of before
        assert contents(again) == wanted
        with pytest.raises(StoreError, match="other signs"):
            again.update(signs[:500], None, ones[:500], slot=1, tag=12)
        again.update(signs, None, ones, slot=1, tag=13)
        assert contents(again) != wanted


def test_cleared_rows_do_not_come_back() -> None:
    with state_file() as file:
        store = filled(file)
        store.clear()
        rows, _, _, _ = train(store, range(10))
        del store
        again = new_store(file, attach=True)
        assert len(again) == 10
        assert np.array_equal(evaluate(again, range(10))[0], rows)
