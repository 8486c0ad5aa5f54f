"""The index from sign to row, under signs that crowd."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.stores import UNIFORM, evaluate, held, new_store, train, u64
from tests.reference.hashing import unmix64


def sign_of_bucket(bucket: int, serial: int) -> int:
    """A sign whose home is that bucket; serials differ in the tag and above it."""
    return unmix64((serial + 1) << 32 | bucket)


def test_a_search_ends_although_rows_passed_every_bucket() -> None:
    store = new_store(64)
    # Two buckets of twelve. The thirteenth row passes the first, then room is made there, the
    # second fills, and its thirteenth row passes on to the first.
    first = [sign_of_bucket(0, serial) for serial in range(13)]
    train(store, first)
    assert store.delete(u64(first[:10])) == 10
    second = [sign_of_bucket(1, serial) for serial in range(100, 112)]
    expected, _, _, _ = train(store, second)
    store.check()
    for bucket in range(2):
        rows, missing = evaluate(store, [sign_of_bucket(bucket, 999)])
        assert missing == 1
        assert not rows.any()
    assert np.array_equal(evaluate(store, second)[0], expected)
    assert evaluate(store, first)[1] == 10


def crafted(kind: str, count: int) -> list[int]:
    if kind == "bucket":  # same home bucket in any table
        return [unmix64((serial << 9 | 77) & (2**64 - 1)) for serial in range(1, count + 1)]
    if kind == "tag":  # every bucket, one tag
        return [
            unmix64((serial >> 17) << 40 | 0x5A << 32 | serial * 0x8003 % 2**32)
            for serial in range(count)
        ]
    if kind == "tag 0 and 1":  # 0 is stored as 1
        return [
            unmix64(serial << 33 | (serial & 1) << 32 | 3 * serial) for serial in range(count)
        ]
    # The directory bits agree up to the top one: splits find everything on one side.
    return [
        unmix64(serial << 32 | (serial & 1) << 24 | serial & 511) for serial in range(count)
    ]


@pytest.mark.parametrize("kind", ["bucket", "tag", "tag 0 and 1", "directory"])
def test_adversarial_signs(kind: str) -> None:
    signs = crafted(kind, 9000)
    assert len(set(signs)) == len(signs)
    store = new_store(8000)
    for first in range(0, 9000, 600):
        train(store, signs[first : first + 600], 1)
        store.check()
    assert held(store) == signs[-8000:]
    gone = signs[1500:9000:3]
    assert store.delete(u64(gone)) == len(gone)
    store.check()
    absent = set(gone) | set(signs[:1000])
    found, values, _ = store.read(u64(signs), 1)
    assert found.tolist() == [sign not in absent for sign in signs]
    wanted = np.array([UNIFORM.values(0, sign, 1) for sign in signs]) * found[:, None]
    assert np.array_equal(values, wanted)
    assert evaluate(store, [sign ^ 1 << 63 for sign in signs], 1)[1] == len(signs)


def test_signs_that_no_hash_bit_parts_are_refused_when_a_table_is_full() -> None:
    signs = [unmix64(serial << 32 | 12345) for serial in range(6000)]
    store = new_store(10**6)
    train(store, range(100), 1)
    with pytest.raises(MemoryError, match="dim 1"):
        train(store, signs, 1)
    store.check()
    assert len(store) >= 5000
    assert evaluate(store, range(100), 1)[1] == 0
    held_of_them = len(signs) - evaluate(store, signs, 1)[1]
    assert store.delete(u64(signs)) == held_of_them
    store.check()
    assert train(store, signs[:5000], 1)[2] == 5000


def test_growth_through_doublings_and_splits() -> None:
    store = new_store(10**6)
    total = 0
    for size in (1, 9, 1, 1, 11, 20, 40, 90, 200, 500, 2000, 3000, 9000, 30_000):
        rows, hints, inserted, _ = train(store, range(total, total + size), 2)
        assert inserted == size
        total += size
        store.check()
        assert evaluate(store, range(total), 2)[1] == 0
        assert store.update(u64(range(total - size, total)), hints, 0 * rows) == 0
    for first in range(0, total, 997):
        store.delete(u64(range(first, first + 900)))
    store.check()
    kept = [sign for sign in range(total) if sign % 997 >= 900]
    assert held(store) == kept
