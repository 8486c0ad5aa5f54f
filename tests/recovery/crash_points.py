"""A program that ends a store's process at every point where it writes to its state file.

Each time a new process takes the file up, repeats the request that was cut short, finishes the
others, and must have the rows of a store that was never stopped: bit by bit, in the same order
of use. Run by a test in a process of its own, because it forks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia._server.state_file import StateFile
from tests.core.stores import entries, new_store, train
from tests.support import kernels

INITIALIZER = Initializer("uniform", lower=-1.0, upper=1.0)
NUM_SHARDS = 2
# The second one's scorer depends on values alone, so that a request may be repeated.
POLICIES = (("lru", "steps", 40), (kernels.load("scorer", "-DBY_VALUE=2"), None, 0))


class Case:
    """One kind of rows, and the requests on them."""

    def __init__(
        self, dtype: str, dim: int, optimizer: str, policy: int, twin: str | None = None
    ) -> None:
        self.dtype, self.dim = dtype, dim
        self.optimizer = RowOptimizer(optimizer, 10.0, lr=0.1)
        self.twins = RowOptimizer(twin or optimizer, 10.0, lr=0.1)  # whose bytes are expected
        self.kind: dict[str, Any] = {"policy": policy, "dtype": dtype}
        random = np.random.default_rng(dim)
        self.requests = [
            (
                random.permutation(220)[: 60 + 15 * i].astype(np.uint64) + np.uint64(30 * i),
                random.standard_normal((60 + 15 * i, dim)).astype(np.float32),
            )
            for i in range(5)
        ]
        self.num_steps = 4 * len(self.requests)

    def store(self, state: StateFile | None = None, attach: bool = False) -> EmbeddingStore:
        file = None if state is None else state.descriptor
        own: dict[str, Any] = {"seed": 7, "policies": POLICIES, "sketch_bytes": 4096}
        own |= {"num_shards": NUM_SHARDS, "state_file": file, "attach": attach}
        return new_store(200, self.optimizer, **own)

    def twin(self) -> EmbeddingStore:
        """A store that nothing happens to."""
        own: dict[str, Any] = {"seed": 7, "policies": POLICIES, "sketch_bytes": 4096}
        return new_store(200, self.twins, num_shards=NUM_SHARDS, **own)

    def step(self, store: EmbeddingStore, number: int) -> None:
        """One request: a lookup, its update, a write, a delete, in turn."""
        which, kind = divmod(number, 4)
        signs, gradients = self.requests[which]
        store.set_clocks(0, 10 * which)
        if kind == 0:
            options = self.kind | {"batch_id": which, "initializer": INITIALIZER}
            train(store, signs, self.dim, **options)
        elif kind == 1:
            # Two calls, as of two tables; the second has some of the first one's signs.
            for call, part in enumerate((slice(0, 40), slice(30, None))):
                steps = np.ascontiguousarray(gradients[part])
                own: dict[str, Any] = {"slot": 1 + which % 2, "tag": 1 + 2 * which + call}
                store.update(signs[part], None, steps, dtype=self.dtype, number=which, **own)
        elif kind == 2:
            store.write(signs[:7] + np.uint64(1000), gradients[:7], None, **self.kind)
        else:
            store.delete(signs[5:9])

    def held(self, store: EmbeddingStore) -> list[tuple[bytes, ...]]:
        store.check()
        return [
            (shard.to_bytes(2, "little"), *(array.tobytes() for array in block))
            for shard, blocks in enumerate(entries(store))
            for block in blocks
        ]


def crashes(case: Case, path: Path, point: int, first: int) -> bool:
    """Run the requests in a process that ends at a point; False if it did not get there."""
    done_end, ack_end = os.pipe()
    child = os.fork()
    if child == 0:
        state = StateFile(path, NUM_SHARDS)
        store = case.store(state)
        state.note(test=1)
        for number in range(case.num_steps):
            if number == first:
                store.crash_after(point)
            case.step(store, number)
            os.write(ack_end, b".")
        os._exit(0)
    os.close(ack_end)
    with os.fdopen(done_end, "rb") as reader:
        num_done = len(reader.read())
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return False
    assert code == 137, code
    state = StateFile(path, NUM_SHARDS)
    assert state.problem is None, state.problem
    store = case.store(state, attach=True)
    twin = case.twin()
    for number in range(case.num_steps):
        case.step(twin, number)
    for number in range(num_done, case.num_steps):
        case.step(store, number)
    assert case.held(store) == case.held(twin), (point, num_done)
    state.remove()
    del store
    state.close()
    return True


def main(directory: str, stride: str) -> None:
    """Try points of every case; the directory is a tmpfs."""
    path = Path(directory) / "persia-test.rows"
    total = 0
    for case in (
        Case("float32", 4, "adagrad", 0),
        Case("float16", 6, "adam", 1),
        Case("float32", 8, "sgd", 1),
        Case("float32", 8, kernels.load("adagrad"), 0, twin="adagrad"),
        Case("float16", 8, "adagrad", 2),
    ):
        path.unlink(missing_ok=True)
        point = 1
        while crashes(case, path, point, 0):
            total += 1
            point += int(stride)
        path.unlink(missing_ok=True)
    print(f"{total} crashes")


if __name__ == "__main__":
    main(*sys.argv[1:])
