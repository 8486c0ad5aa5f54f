"""Threads of a pool: shared, asleep when idle, gone with the last handle."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from persia._core.base.threads import ThreadPool, prefer_thread
from persia.errors import ConfigError
from tests.support.waiting import PATIENCE_S, until

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def states(name: str) -> list[str]:
    """Return the kernel's state of each thread of this process with a name."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            _, comm, rest = (task / "stat").read_text().replace(") ", "(").split("(")
        except FileNotFoundError:  # it has just ended
            continue
        if comm == name:
            found.append(rest[0])
    return found


@pytest.mark.parametrize("num_threads", [0, 1025])
def test_a_number_of_threads_out_of_range_is_refused(num_threads: int) -> None:
    with pytest.raises(ConfigError, match=f"num_threads.*{num_threads}"):
        ThreadPool(num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_part_is_done_once_beside_other_callers(num_threads: int) -> None:
    callers, rounds, parts = 4, 50, 20
    done = [[0] * parts for _ in range(callers)]
    with closing(ThreadPool(num_threads)) as threads, ThreadPoolExecutor(callers) as pool:

        def call(caller: int) -> None:
            def count(part: int) -> None:
                done[caller][part] += 1

            for turn in range(1, rounds + 1):
                threads.run(count, range(parts))
                assert done[caller] == [turn] * parts  # all had ended when it returned

        list(pool.map(call, range(callers)))


def test_a_part_may_call_its_own_pool() -> None:
    done = []
    with closing(ThreadPool(2)) as threads:
        threads.run(lambda a: threads.run(lambda b: done.append((a, b)), [0, 1]), [0, 1])
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_closed_pool_calls_on_the_callers_thread() -> None:
    threads = ThreadPool(3)
    threads.close()
    threads.close()
    callers: list[int] = []
    threads.run(lambda _: callers.append(threading.get_ident()), range(8))
    assert callers == [threading.get_ident()] * 8


@on_linux
def test_pools_share_helpers_that_sleep_when_idle_and_end_with_the_last() -> None:
    name = "shared-by-test"
    one, other = ThreadPool(3, name), ThreadPool(3, name)
    until(lambda: states(name) == ["S", "S"])
    met = threading.Barrier(3)
    one.run(lambda _: met.wait(PATIENCE_S), range(3))
    until(lambda: states(name) == ["S", "S"])
    one.close()
    other.run(lambda _: met.wait(PATIENCE_S), range(3))
    other.close()
    until(lambda: not states(name))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    # A debugger showed a thread of the child wait for the lock of a size class.
    reason="a fork may take locks of the sanitizer's own allocator along, held for ever",
)
def test_a_child_has_no_helpers_and_does_all_itself() -> None:
    script = """
import os
from persia._core.base.threads import ThreadPool
threads = ThreadPool(2)
done = []
threads.run(done.append, range(4))
child = os.fork()
if child == 0:
    threads.run(done.append, range(4))
    other = ThreadPool(2)  # has helpers of its own
    other.run(done.append, range(4))
    other.close()
    threads.close()
    os._exit(len(done))
status = os.waitpid(child, 0)[1]
threads.run(done.append, range(4))
print(os.waitstatus_to_exitcode(status), len(done))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.split() == ["12", "8"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_when_all_parts_have_ended(failing: int) -> None:
    ended = []

    def call(part: int) -> None:
        if part == failing:
            raise ValueError(part)
        ended.append(part)

    with (
        closing(ThreadPool(2, "threads")) as threads,
        pytest.raises(ValueError, match=str(failing)),
    ):
        threads.run(call, [0, 1])
    assert ended == [1 - failing]


def slice_ns() -> int:
    """Return the nanoseconds that the scheduler gives this thread at a time."""
    numbers = {"x86_64": 315, "aarch64": 275}  # of sched_getattr
    if platform.machine() not in numbers:
        pytest.skip("the number of a system call is not known here")
    found = ctypes.create_string_buffer(56)
    call = ctypes.CDLL(None, use_errno=True).syscall
    assert call(numbers[platform.machine()], 0, found, len(found), 0) == 0, ctypes.get_errno()
    return int(struct.unpack_from("Q", found, 24)[0])


@on_linux
def test_a_preferred_thread_gives_its_slice_to_those_that_it_starts() -> None:
    found: list[int] = []

    def work() -> None:
        found.append(slice_ns())
        prefer_thread()
        found.append(slice_ns())
        child = threading.Thread(target=lambda: found.append(slice_ns()))
        child.start()
        child.join(PATIENCE_S)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    before, after, child = found
    if not before:
        pytest.skip("a kernel before 6.12 has one slice for all threads")
    assert after == child < before == slice_ns()
