"""What the fuzzer found worth keeping, in the fast tier; ``make fuzz`` looks for more."""

from __future__ import annotations

import random

from persia._rpc.frame import Call, decode, encode
from tests.fuzz.target import (
    PATIENCE_S,
    corpus,
    from_bytes,
    seeds,
    target,
    to_bytes,
    with_deadline,
)


def test_every_kept_input_is_answered_or_counted() -> None:
    with target() as replayed:
        for data in seeds() + corpus():
            replayed.send(data)
        replayed.check()


def test_deadlines_end_before_patience_does() -> None:
    """Or an input that waits as long as it may would be a finding."""
    for timeout_ms in (0, 20_000, 20_001, (1 << 32) - 1):
        waits = encode(Call(9, "poll", timeout_ms, [[0, 9], 0]))
        sent = decode(with_deadline([bytes(part) for part in waits]))
        assert isinstance(sent, Call)
        assert sent.timeout_ms == min(timeout_ms, 20_000)
        assert sent.timeout_ms < PATIENCE_S * 1000
        assert (sent.method, sent.body) == ("poll", [[0, 9], 0])


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
