"""50 data-loaders and 8 ranks at one embedding-worker and one server, for minutes.

    python -m tests.load.soak MINUTES

The books are exact: each data-loader's batches are trained once, rows tell. Memory of every
process is flat once the first part of the time is over, and no data-loader is served much more
than another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np

from persia import env
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import IDFeatures, PooledOutput
from tests.benchmarks.memory import resident
from tests.load.parts import NAMES, NUM_IDS, SLOTS, all_workers
from tests.support.processes import Cluster, _children

NUM_LOADERS, NUM_RANKS, PER_PROCESS = 50, 8, 10
SAMPLE_S = 0.5
END_S = 120.0
# Memory settles in this part of the time; then it may grow by this many MiB in all of the rest.
WARM_UP = 0.3
MAX_GROWTH_MIB = 6.0
# The eight ranks, one process here, settle within some 12,000 batches. A run that ends before
# is all warm-up and shows only that nothing runs away, as 5 KiB kept of each batch would.
SETTLED_BATCHES = 20_000
MAX_WARM_UP_MIB = 32.0
# Of batches served, most over least of a data-loader, but for those that credits let it have
# on the way: two for each rank that it sends to.
MAX_SHARE, ON_THE_WAY = 1.5, 8


def resident_mib(pid: int) -> float:
    """Return the memory of a process and of those it started."""
    return sum(map(resident, (pid, *_children(pid)))) / 2**20


def growth_mib(times: list[float], mib: list[float]) -> float:
    """Return what the line through the samples after the warm-up climbs."""
    at = np.array(times)
    late = at >= at[0] + WARM_UP * (at[-1] - at[0])
    slope = np.polyfit(at[late], np.array(mib)[late], 1)[0]
    return float(slope * (at[-1] - at[late][0]))


def started(stack: ExitStack, cluster: Cluster, *words: object) -> Any:
    """Start a process of ``tests.load.parts``, which ends with the stack."""
    command = [sys.executable, "-m", "tests.load.parts", *map(str, words)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    part = stack.enter_context(subprocess.Popen(command, env=cluster.environment, **pipes))
    stack.callback(part.kill)
    return part


def result(part: Any) -> Any:
    """Have a part end, if it has not, and return what it says."""
    text, _ = part.communicate(timeout=END_S)
    assert part.returncode == 0
    return json.loads(text)


def soak(seconds: float) -> str:
    """Return what happened; AssertionError if the books are wrong or memory grows."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(SLOTS, transport="tcp", num_ranks=NUM_RANKS))
        cluster.start_servers()
        stack.enter_context(env.changed(**cluster.variables))
        ranks = started(stack, cluster, "ranks", NUM_RANKS, NUM_LOADERS)
        loaders = [
            started(stack, cluster, "loaders", first, PER_PROCESS, NUM_LOADERS)
            for first in range(0, NUM_LOADERS, PER_PROCESS)
        ]
        for part in (ranks, *loaders):
            assert part.stdout.readline() == "ready\n"
        processes = cluster.processes | {"ranks": ranks}
        processes |= {f"loaders-{n}": one for n, one in enumerate(loaders)}
        times: list[float] = []
        mib: dict[str, list[float]] = {name: [] for name in processes}
        for part in loaders:
            part.stdin.write("\n")
            part.stdin.flush()
        begin = time.monotonic()
        never = threading.Event()
        while (now := time.monotonic()) < begin + seconds:
            times.append(now)
            for name, process in processes.items():
                mib[name].append(resident_mib(process.pid))
            never.wait(SAMPLE_S)
        for part in loaders:
            part.stdin.close()
            part.stdin = None
        sent = [result(part) for part in loaders]
        served = result(ranks)
        took_s = time.monotonic() - begin
        rows = rows_say()
    growth = {name: growth_mib(times, one) for name, one in mib.items()}
    return check(sent, served, rows, mib, growth, took_s)


def rows_say() -> np.ndarray:
    """Return how often each id was trained, a line for each feature."""
    workers = all_workers()
    everything = np.arange(NUM_IDS, dtype=np.uint64)
    features = tuple(FeatureBatch.from_single(name, everything) for name in NAMES)
    outputs = workers.lookup_direct(IDFeatures(features, 0, False)).outputs
    stats = workers.stats()
    workers.close()
    assert stats["in_flight"] == 0, stats
    lines = []
    for output in outputs:
        assert isinstance(output, PooledOutput)
        assert (output.values == output.values[:, :1]).all()
        lines.append(-output.values[:, 0])
    return np.array(lines)


def check(
    sent: list[Any],
    served: Any,
    rows: np.ndarray,
    mib: dict[str, list[float]],
    growth: dict[str, float],
    took_s: float,
) -> str:
    stats: Counter[str] = Counter()
    by_loader = []
    for part in sent:
        for one in part["stats"]:
            by_loader.append(one["sent"])
            stats.update(one)
    counts = served["counts"]
    assert served["served"] == by_loader, (served["served"], by_loader)
    assert counts["trained"] == stats["sent"] == sum(by_loader)
    for name in ("lost", "kept"):
        assert stats[name] == 0, stats
    for name in ("doubled", "missing", "lost", "unread", "pending", "taken"):
        assert counts.get(name, 0) == 0, counts
    np.testing.assert_array_equal(rows, sum(np.array(part["occurrences"]) for part in sent))
    share = max(by_loader) / min(by_loader)
    report = "; ".join(
        f"{name} {one[0]:.0f} to {one[-1]:.0f} MiB, {growth[name]:+.2f} after warm-up"
        for name, one in mib.items()
    )
    text = (
        f"{len(by_loader)} data-loaders, {NUM_RANKS} ranks, {took_s:.0f} s: {stats['sent']} "
        f"batches sent, each trained once, {stats['sent'] / took_s:.0f} a second; most over "
        f"least of a data-loader {share:.3f}; {dict(stats)}; {counts}\n{report}"
    )
    assert max(by_loader) - ON_THE_WAY <= MAX_SHARE * min(by_loader), text
    bound = MAX_GROWTH_MIB if stats["sent"] >= SETTLED_BATCHES else MAX_WARM_UP_MIB
    assert max(growth.values()) <= bound, text
    return text


if __name__ == "__main__":
    print(soak(60.0 * float(sys.argv[1])))
