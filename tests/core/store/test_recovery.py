"""A store whose rows outlive it; tests/recovery kills processes as well."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from persia._core.store.store import EmbeddingStore
from persia.errors import StoreError
from tests.core.state_files import ARGUMENTS, CONTROL, filled, new_store, state_file
from tests.core.stores import contents, orders_of, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")


def test_rows_their_order_and_clocks_are_those_of_the_store_before() -> None:
    with state_file() as file:
        store = filled(file)
        wanted = contents(store), orders_of(store), store.clock_times()
        del store
        again = new_store(file, attach=True)
        again.check()
        assert (contents(again), orders_of(again), again.clock_times()) == wanted
        train(again, range(3000, 9000))
        again.check()
        assert again.stats()["evicted"] > 0


def test_what_is_not_whole_is_refused() -> None:
    with state_file() as file:
        filled(file)
        with pytest.raises(StoreError, match=r"shard \d: a (row|chunk|policy) "):
            new_store(file, num_shards=2, attach=True)
        with pytest.raises(StoreError, match="too short for 4 shards"):
            new_store(file, num_shards=4, attach=True)
        os.pwrite(file, b"\1", CONTROL)
        with pytest.raises(StoreError, match="is void"):
            new_store(file, attach=True)


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="it maps terabytes")
def test_too_little_memory_for_the_rows_is_no_damage() -> None:
    """The file is kept then, and the attempt can be repeated."""
    with state_file() as file:
        filled(file)
        reached = []
        for room in range(100, 2000, 20):
            child = os.fork()
            if child == 0:  # the limit is for good, so it is a process of its own
                os._exit(_attach_within(file, room << 20))
            reached.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if reached[-1] == ATTACHED:
                break
        assert reached[-1] == ATTACHED
        assert set(reached) == {ATTACHED, NO_MEMORY}


ATTACHED, NO_MEMORY, OTHER = 0, 1, 2


def _attach_within(file: int, room: int) -> int:
    """Attach with so little address space left; returns an exit status."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        EmbeddingStore(**ARGUMENTS, state_file=file, attach=True)
    except MemoryError:
        return NO_MEMORY
    except BaseException:
        return OTHER
    return ATTACHED
