"""What data-loaders and ranks are without a script or a net: their clients, in threads.

    python -m tests.load.parts ranks WORLD_SIZE NUM_LOADERS
    python -m tests.load.parts loaders FIRST COUNT NUM_LOADERS

Loaders begin when a line comes at their standard input, and stop to send when it ends. Each
process says ``ready``, and at its end one line of JSON. A rank steps each row by 1 for each
time that its id is in a batch, so rows tell which batches were trained, and how often.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia._cluster import connect
from persia._core.ids.feature_batch import FeatureBatch
from persia._loader.sender import BatchSender
from persia._rpc.messages import (
    HyperParameters,
    InitializationSettings,
    NamedArray,
    OptimizerSettings,
)
from persia._rpc.worker_pool import EmbeddingWorkers, handle_of
from persia._rpc.zmq_transport import ZmqTransport
from tests.support.services import gradient

SLOTS = {"slots_config": {"user": {"dim": 8}, "item": {"dim": 16}}}
NAMES = ("user", "item")
NUM_IDS = 1024
BATCH = 32
# Of a rank, for all data-loaders together: two credits for each of 50.
CAPACITY = 100
SETTINGS = HyperParameters(InitializationSettings("constant", {"value": 0.0}), 1.0, 0.0, 3)
SGD = OptimizerSettings("sgd", {"lr": 1.0})


def all_workers() -> EmbeddingWorkers:
    """Connect to the embedding-workers as a rank does."""
    transport = ZmqTransport()
    return EmbeddingWorkers(
        transport,
        lambda on_restart: connect.connect_embedding_workers(transport, on_restart=on_restart),
    )


# --- ranks ----------------------------------------------------------------------------------


class Rank:
    """Takes batches, looks them up and updates; ``served`` counts them by data-loader."""

    def __init__(self, rank: int, world_size: int, num_loaders: int) -> None:
        # Here alone: this loads torch.
        from persia._training.stream_source import Stream

        self.rank = rank
        self.num_loaders = num_loaders
        self.workers = all_workers()
        if rank == 0:
            self.workers.configure(SETTINGS)
            self.workers.register_optimizer(SGD)
        self.stream = Stream(rank, world_size, CAPACITY, env.nn_worker_addresses()[rank])
        self.served = [0] * num_loaders
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Train until every data-loader has ended its stream."""
        from persia._training.queues import Finished

        receiver = self.stream.receiver
        receiver.begin_pass()
        last = [-1] * self.num_loaders
        with contextlib.suppress(Finished):
            while True:
                stream, batch = receiver.take(False, lambda: False)
                ref = handle_of(batch.ids)
                number = (self.rank, self.counts["trained"])
                ones = gradient(self.workers.lookup(ref, True), number)
                report = self.workers.update(replace(ones, ref=ref))
                receiver.mark_done(stream, batch.batch_id)
                receiver.end(stream, batch.batch_id)
                # They come in ascending order, so that another one has come before.
                place, loader = divmod(batch.batch_id, self.num_loaders)
                self.served[loader] += 1
                self.counts["trained"] += 1
                self.counts["repeated"] += report.repeated
                self.counts["missing"] += report.num_missing
                self.counts["doubled"] += place <= last[loader]
                last[loader] = max(last[loader], place)
        receiver.end_pass()
        self.counts.update(receiver.stats())
        self.stream.close()
        self.workers.close()


def run_ranks(world_size: int, num_loaders: int) -> None:
    ranks = [Rank(number, world_size, num_loaders) for number in range(world_size)]
    print("ready", flush=True)
    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(Rank.run, ranks))
    counts: Counter[str] = Counter()
    for rank in ranks:
        counts.update(rank.counts)
    served = [sum(one) for one in zip(*(rank.served for rank in ranks), strict=True)]
    print(json.dumps({"counts": dict(counts), "served": served}), flush=True)


# --- data-loaders ---------------------------------------------------------------------------


def sender(transport: ZmqTransport, loader: int, num_loaders: int) -> BatchSender:
    workers = connect.connect_embedding_workers(transport)
    ranks = connect.connect_nn_workers(transport)

    def disconnect() -> None:
        for link in (*workers, *ranks):
            link.close()

    made = BatchSender(
        workers, ranks, loader=loader, num_loaders=num_loaders, disconnect=disconnect
    )
    made.start()
    return made


def send(feeder: BatchSender, loader: int, is_over: threading.Event) -> NDArray[np.int64]:
    """Send as fast as batches are taken; returns how often each id was sent."""
    labels = (NamedArray("label", np.zeros((BATCH, 1), np.float32)),)
    occurrences = np.zeros((len(NAMES), NUM_IDS), np.int64)
    for place in itertools.count():
        if is_over.is_set():
            break
        # Of a batch, a line for each feature.
        dice = np.random.default_rng((loader, place))
        ids = dice.integers(0, NUM_IDS, (len(NAMES), BATCH), np.uint64)
        features = tuple(map(FeatureBatch.from_single, NAMES, ids))
        feeder.send(features, (), labels, batch_size=BATCH, requires_grad=True)
        for total, one in zip(occurrences, ids, strict=True):
            total += np.bincount(one.view(np.int64), minlength=NUM_IDS)
    feeder.finish()
    feeder.close()
    return occurrences


def run_loaders(first: int, count: int, num_loaders: int) -> None:
    transport = ZmqTransport()
    loaders = range(first, first + count)
    feeders = [sender(transport, loader, num_loaders) for loader in loaders]
    print("ready", flush=True)
    is_over = threading.Event()
    sys.stdin.readline()
    with ThreadPoolExecutor(count) as pool:
        sending = pool.map(send, feeders, loaders, [is_over] * count)
        sys.stdin.read()
        is_over.set()
        occurrences = np.sum(list(sending), axis=0)
    transport.close()
    stats = [dict(feeder.stats()) for feeder in feeders]
    print(json.dumps({"stats": stats, "occurrences": occurrences.tolist()}))


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:]]
    if sys.argv[1] == "ranks":
        run_ranks(*numbers)
    else:
        run_loaders(*numbers)
