"""What data-loaders and ranks are without a script or a net: their clients, in threads.

    python -m tests.load.parts ranks WORLD_SIZE NUM_LOADERS
    python -m tests.load.parts loaders FIRST COUNT NUM_LOADERS

Loaders begin when a line comes at their standard input, and stop to send when it ends. Each
process says ``ready``, and at its end one line of JSON. A rank steps each row by 1 for each
time that its id is in a batch, so rows tell which batches were trained, and how often.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from persia import env
from persia._cluster import connect
from persia._core.ids.feature_batch import FeatureBatch
from persia._loader.sender import BatchSender
from persia._rpc.messages import (
    BatchGradients,
    HyperParameters,
    InitializationSettings,
    NamedArray,
    OptimizerSettings,
    PooledOutput,
    SlotGradient,
)
from persia._rpc.worker_pool import EmbeddingWorkers, handle_of
from persia._rpc.zmq_transport import ZmqTransport

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


def run_all(functions: Sequence[Callable[[], None]]) -> list[Future[None]]:
    """Begin all of them, each in a thread."""
    pool = ThreadPoolExecutor(len(functions))
    return [pool.submit(function) for function in functions]


# --- ranks ----------------------------------------------------------------------------------


class Rank:
    """Takes batches, looks them up and updates; ``served`` counts them by data-loader."""

    def __init__(self, rank: int, world_size: int, num_loaders: int) -> None:
        # Here alone: this loads torch.
        from persia._training.receiver import Stream

        self.rank = rank
        self.num_loaders = num_loaders
        self.workers = all_workers()
        if rank == 0:
            self.workers.configure(SETTINGS)
            self.workers.register_optimizer(SGD)
        self.stream = Stream(rank, world_size, CAPACITY, env.nn_worker_addresses()[rank])
        self.served = [0] * num_loaders
        self._last = [-1] * num_loaders
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Train until every data-loader has ended its stream."""
        from persia._training.queues import Finished

        receiver = self.stream.receiver
        receiver.begin_pass()
        number = 0
        while True:
            try:
                stream, batch = receiver.take(False, lambda: False)
            except Finished:
                break
            ref = handle_of(batch.ids)
            result = self.workers.lookup(ref, True)
            slots = []
            for output in result.outputs:
                assert isinstance(output, PooledOutput)
                slots.append(SlotGradient(output.name, np.ones_like(output.values)))
            gradients = BatchGradients(ref, (self.rank, number), tuple(slots))
            report = self.workers.update(gradients)
            self.counts["repeated"] += report.repeated
            self.counts["missing"] += report.num_missing
            receiver.mark_done(stream, batch.batch_id)
            receiver.end(stream, batch.batch_id)
            number += 1
            # They come in ascending order, so that another one has come before.
            place, loader = divmod(batch.batch_id, self.num_loaders)
            self.served[loader] += 1
            self.counts["doubled"] += place <= self._last[loader]
            self._last[loader] = max(self._last[loader], place)
        receiver.end_pass()
        self.counts["trained"] = number
        self.counts.update(receiver.stats())

    def close(self) -> None:
        self.stream.close()
        self.workers.close()


def run_ranks(world_size: int, num_loaders: int) -> None:
    ranks = [Rank(number, world_size, num_loaders) for number in range(world_size)]
    print("ready", flush=True)
    for training in run_all([rank.run for rank in ranks]):
        training.result()
    counts: Counter[str] = Counter()
    for rank in ranks:
        counts.update(rank.counts)
        rank.close()
    served = [sum(one) for one in zip(*(rank.served for rank in ranks), strict=True)]
    print(json.dumps({"counts": dict(counts), "served": served}), flush=True)


# --- data-loaders ---------------------------------------------------------------------------


class Loader:
    """Sends batches as fast as they are taken."""

    def __init__(self, transport: ZmqTransport, loader: int, num_loaders: int) -> None:
        self.loader = loader
        workers = connect.connect_embedding_workers(transport)
        ranks = connect.connect_nn_workers(transport)

        def disconnect() -> None:
            for link in (*workers, *ranks):
                link.close()

        self.feeder = BatchSender(
            workers, ranks, loader=loader, num_loaders=num_loaders, disconnect=disconnect
        )
        self.feeder.start()
        self.occurrences = np.zeros((len(NAMES), NUM_IDS), np.int64)

    def run(self, is_over: threading.Event) -> None:
        labels = (NamedArray("label", np.zeros((BATCH, 1), np.float32)),)
        place = 0
        while not is_over.is_set():
            # Of a batch, a line for each feature.
            dice = np.random.default_rng((self.loader, place))
            ids = dice.integers(0, NUM_IDS, (len(NAMES), BATCH), np.uint64)
            features = tuple(
                FeatureBatch.from_single(name, one)
                for name, one in zip(NAMES, ids, strict=True)
            )
            self.feeder.send(features, (), labels, batch_size=BATCH, requires_grad=True)
            for total, one in zip(self.occurrences, ids, strict=True):
                total += np.bincount(one.view(np.int64), minlength=NUM_IDS)
            place += 1
        self.feeder.finish()
        self.feeder.close()


def run_loaders(first: int, count: int, num_loaders: int) -> None:
    transport = ZmqTransport()
    loaders = [Loader(transport, first + n, num_loaders) for n in range(count)]
    print("ready", flush=True)
    is_over = threading.Event()
    sys.stdin.readline()
    sending = run_all([functools.partial(loader.run, is_over) for loader in loaders])
    sys.stdin.read()
    is_over.set()
    for one in sending:
        one.result()
    transport.close()
    stats = [dict(loader.feeder.stats()) for loader in loaders]
    occurrences = sum(loader.occurrences for loader in loaders)
    print(json.dumps({"stats": stats, "occurrences": np.asarray(occurrences).tolist()}))


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:]]
    if sys.argv[1] == "ranks":
        run_ranks(*numbers)
    else:
        run_loaders(*numbers)
