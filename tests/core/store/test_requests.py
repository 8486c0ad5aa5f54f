"""Requests row by row: hints, first values and states, admission."""

from __future__ import annotations

import numpy as np
import pytest

from persia._core.base.halves import DTYPES
from tests.core.stores import NO_ROW, new_store, train, u64
from tests.reference.store import admits


def test_a_freed_rows_link_is_no_sign() -> None:
    # A freed row keeps the place of the next freed one where its sign stood.
    store = new_store(100)
    _, hints, _, _ = train(store, range(50, 80))
    store.delete(u64(range(50, 79)))
    for sign in range(40):
        signs = u64([sign] * 30)
        assert store.update(signs, hints, np.ones((30, 4), np.float32)) == 30
    train(store, range(29))  # reuse them
    store.check()
    assert store.update(u64(range(50, 80)), hints, np.ones((30, 4), np.float32)) == 29


def test_w27_admission_depends_on_seed_sign_and_batch_only() -> None:
    signs = list(range(3000))
    refusals = []
    for num_shards in (1, 8):
        store = new_store(10**6, num_shards=num_shards, seed=9)
        rows, hints, inserted, refused = train(store, signs, admit=0.3, batch_id=5)
        admitted = [admits(9, sign, 5, 0.3) for sign in signs]
        assert (hints != NO_ROW).tolist() == admitted
        assert inserted == sum(admitted)
        assert refused == len(signs) - inserted == store.stats()["refused"]
        assert not rows[hints == NO_ROW].any()
        assert 0.25 < inserted / len(signs) < 0.35
        # Again: the same draw, so the same refusals; held rows need none.
        again, _, more, refused_again = train(store, signs, admit=0.3, batch_id=5)
        assert (more, refused_again) == (0, refused)
        assert np.array_equal(again, rows)
        _, _, more, _ = train(store, signs, admit=0.3, batch_id=6)
        assert more == sum(admits(9, s, 6, 0.3) and not admits(9, s, 5, 0.3) for s in signs)
        refusals.append(refused)
    assert refusals[0] == refusals[1]
    store = new_store(10**6)
    assert train(store, signs, admit=0.0)[3] == 3000
    assert train(store, signs, admit=1.0)[2] == 3000
    assert train(store, signs, admit=0.0)[3] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 40, 511, 513, 5000])
def test_a_request_may_repeat_a_sign(count: int, dtype: str) -> None:
    rng = np.random.default_rng(7)
    signs = u64(rng.integers(0, max(2, count // 3), count))
    places = signs.astype(np.int64)
    store = new_store(10**5, num_shards=4)
    rows, hints, inserted, _ = train(store, signs, dtype=dtype)
    assert inserted == len(set(places)) == len(store)
    store.check()
    assert np.array_equal(rows, store.read(signs, 4, dtype=dtype)[1])
    # From zeros, multiples of what every value so far shows: nothing is rounded.
    store.write(signs, np.zeros((count, 4), np.float32), None, dtype=dtype)
    gradients = rng.integers(-4, 4, (count, 4)).astype(np.float32)
    assert store.update(signs, hints, gradients, dtype=dtype) == 0
    wanted = np.zeros((count, 4), np.float32)
    np.subtract.at(wanted, places, np.float32(0.5) * gradients)
    assert np.array_equal(store.read(signs, 4, dtype=dtype)[1], wanted[places])
    store.write(signs, gradients, None, dtype=dtype)
    last = dict(zip(places, gradients, strict=True))
    assert np.array_equal(store.read(signs, 4, dtype=dtype)[1], [last[one] for one in places])
    assert store.delete(signs) == inserted
    store.check()
