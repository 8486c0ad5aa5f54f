"""What the fuzzer found worth keeping, in the fast tier; ``make fuzz`` looks for more."""

from __future__ import annotations

import random

from tests.fuzz.target import corpus, from_bytes, seeds, target, to_bytes


def test_every_kept_input_is_answered_or_counted() -> None:
    with target() as replayed:
        for data in seeds() + corpus():
            replayed.send(data)
        replayed.check()


def test_bytes_mean_parts_and_back() -> None:
    for data in seeds():
        assert to_bytes(*from_bytes(data)) == data


def test_damaged_seeds_are_answered_or_counted() -> None:
    dice = random.Random(5)
    with target() as replayed:
        for data in seeds():
            for _ in range(10):
                damaged = bytearray(data)
                damaged[dice.randrange(len(data))] = dice.randrange(256)
                replayed.send(bytes(damaged))
        replayed.check()
