"""Wires between the processes of a job: cut for a while, and with lost and doubled messages.

Each batch is trained once: rows tell.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from tests.faults.apart import can_be_laid
from tests.faults.batches import SLOTS
from tests.faults.job import LOADER, train_each_once
from tests.rpc.proxies import MessageProxy, TcpProxy
from tests.support.fixtures import Record
from tests.support.processes import LISTS, SERVERS, Cluster, run

COUNT = 120
CUTS_S = (5, 30)  # `make proof-cut CUT_S=120` is a longer one
Proxy = TcpProxy | MessageProxy


@contextmanager
def behind_proxies(transport: str, make: Callable[[str, str], Proxy]) -> Iterator[list[Proxy]]:
    """Start a job of which every process sees the others through a proxy.

    ``make`` takes where a proxy may listen, and the address of a server.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(SLOTS, transport=transport, num_servers=2, num_workers=2)
        )
        proxies: list[Proxy] = []
        behind: dict[str, str] = {}
        for role, addresses in cluster.addresses.items():
            made = []
            for number, address in enumerate(addresses):
                front = f"ipc://{cluster.place}/proxy-{role}-{number}"
                made.append(make(front, address))
                stack.callback(made[-1].close)
            behind[LISTS[role]] = ",".join(proxy.address for proxy in made)
            proxies += made
        own = dict(cluster.variables)
        # A server listens where its own list says, and finds the others at their proxies.
        cluster.variables |= behind
        for role in SERVERS:
            for number in range(2):
                cluster.start_replica(role, number, **{LISTS[role]: own[LISTS[role]]})
        cluster.start_loaders(LOADER, 2, str(COUNT))
        os.environ.update(own | behind | {LISTS["nn-worker"]: own[LISTS["nn-worker"]]})
        yield proxies
        # Now: without the proxies the end could not be announced to the servers.
        cluster.stop()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_w13_each_batch_is_trained_once_through_cuts(seed: int) -> None:
    dice = random.Random(seed)

    def make(front: str, address: str) -> Proxy:
        # From the middle of a handshake to some hundred messages.
        cuts = [int(10 ** dice.uniform(1.5, 4.5)) for _ in range(12)]
        return TcpProxy(f"tcp://{address}", (*cuts, None))

    with behind_proxies("tcp", make) as proxies:
        train_each_once(COUNT)
    cuts = [proxy.num_cut for proxy in proxies if isinstance(proxy, TcpProxy)]
    assert min(cuts) > 3


@pytest.mark.slow
def test_w13_each_batch_is_trained_once_through_drops_and_repetitions() -> None:
    dice = random.Random(3)

    def fate(number: int) -> int:
        if abs(number) == 50:  # a client waits for 10 s before it sends again
            return 0
        return dice.choice((1, 1, 1, 2))

    def make(front: str, address: str) -> Proxy:
        return MessageProxy(front, address, fate)

    with behind_proxies("ipc", make) as proxies:
        train_each_once(COUNT)
    found = [proxy for proxy in proxies if isinstance(proxy, MessageProxy)]
    assert sum(proxy.num_dropped for proxy in found) > 4
    assert min(proxy.num_repeated for proxy in found) > 20


@pytest.mark.slow
def test_w17_a_server_is_cut_off_and_every_batch_is_trained_once(
    record_property: Record,
) -> None:
    """For a while: it comes back as it was."""
    if not can_be_laid():
        pytest.skip("needs root, and network namespaces")
    ask = partial(run, "-m", "tests.faults.apart", timeout_s=360)
    with ThreadPoolExecutor(len(CUTS_S)) as pool:
        for ran in pool.map(ask, CUTS_S):
            assert ran.returncode == 0, ran.stdout + ran.stderr
            found = json.loads(ran.stdout.splitlines()[-1])
            line = "cut off for {cut_s:g} s: on again {back_s:.1f} s later".format(**found)
            record_property("measured", line)
