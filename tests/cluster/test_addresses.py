"""Names and their hosts."""

from __future__ import annotations

from persia._cluster import addresses
from tests.cluster.place import Monkey, hosts_of


def test_a_name_of_both_families_is_asked_once_per_host(monkeypatch: Monkey) -> None:
    hosts_of(monkeypatch, {"both": ["::1", "127.0.0.1", "127.0.0.2"], "six": ["::1", "::2"]})
    assert addresses.resolve("tcp://both:5") == ["tcp://127.0.0.1:5", "tcp://127.0.0.2:5"]
    assert addresses.resolve("tcp://six:5") == ["tcp://[::1]:5", "tcp://[::2]:5"]
