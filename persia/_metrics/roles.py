"""What each kind of component tells: its counts, under the names of the catalogue.

Components know nothing of this. They keep counts and timings, mostly for ``stats()``, and have
a method for what is to be measured only when somebody asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from persia._metrics.definitions import SERVER, WORKER
from persia._metrics.registry import Sample, Source
from persia._metrics.timings import CallTimings, Timings, total

_BAD = ("bad.", "dropped.")


class RpcServer(Protocol):
    """``persia._rpc.server.Server``."""

    timings: CallTimings

    def stats(self) -> Mapping[str, int]: ...
    def load(self) -> tuple[int, int]: ...


class RpcClient(Protocol):
    """``persia._rpc.client.Client``."""

    timings: CallTimings

    @property
    def role(self) -> str: ...
    @property
    def replica(self) -> int | None: ...
    def stats(self) -> Mapping[str, int]: ...
    def traffic(self) -> tuple[int, int]: ...


@runtime_checkable
class ServerStats(Protocol):
    """``persia._server.service.ParameterServer``."""

    timings: Timings

    @property
    def replica_index(self) -> int: ...
    def stats(self) -> Mapping[str, int]: ...
    def limits(self) -> tuple[int, int]: ...
    def checkpointed_at(self) -> float | None: ...


@runtime_checkable
class WorkerStats(Protocol):
    """``persia._worker.service.EmbeddingWorker``."""

    timings: Timings

    def stats(self) -> Mapping[str, int]: ...
    def measure(self) -> tuple[int, int, int]: ...
    def id_counts(self) -> Mapping[str, tuple[int, int, int, int]]: ...


class LoaderStats(Protocol):
    """``persia._loader.sender.Feeder``."""

    timings: Timings

    def stats(self) -> Mapping[str, int]: ...
    def measure(self) -> tuple[int, int, int]: ...


class InFlightStats(Protocol):
    """``persia._training.inflight.Book``."""

    timings: Timings

    def stats(self) -> Mapping[str, int | Mapping[str, int]]: ...
    def totals(self) -> tuple[int, int]: ...


class ReceiverStats(Protocol):
    """``persia._training.receiver.Inbox``."""

    def stats(self) -> Mapping[str, int]: ...
    def num_bytes(self) -> int: ...


class Reports(Protocol):
    """What a script reports by ``ctx.report``."""

    @property
    def reported(self) -> Mapping[str, float]: ...


class _Ratio:
    """part / whole since it was asked last; the ratio before if there was nothing since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._part = self._whole = 0
        self._ratio: float | None = None

    def of(self, part: int, whole: int) -> float | None:
        """Return the ratio; None before there was anything, and never NaN."""
        with self._lock:
            if whole > self._whole:
                self._ratio = (part - self._part) / (whole - self._whole)
            self._part, self._whole = part, whole
            return self._ratio


def _histograms(timings: Timings) -> Iterator[Sample]:
    for name, took in timings.read().items():
        yield Sample(name, took)


# --- calls ------------------------------------------------------------------------------------


def of_rpc_server(role: str, replica: int, server: RpcServer) -> Source:
    """Return what a server tells of the calls that it answers."""

    def read() -> Iterable[Sample]:
        stats, (num_calls, num_bytes) = server.stats(), server.load()
        yield Sample("persia_rpc_queue_calls", num_calls)
        yield Sample("persia_rpc_queue_bytes", num_bytes)
        yield Sample("persia_rpc_busy", stats.get("busy", 0))
        yield Sample("persia_rpc_expired", stats.get("expired", 0))
        for name, count in stats.items():
            if name.startswith(_BAD):
                yield Sample("persia_rpc_bad_messages", count, {"reason": name})
        for method, traffic in server.timings.read().items():
            labels = {"method": method}
            yield Sample("persia_rpc_served_seconds", traffic.took, labels)
            yield Sample("persia_rpc_errors", traffic.errors, labels)
            yield Sample("persia_rpc_received_bytes", traffic.received, labels)
            yield Sample("persia_rpc_sent_bytes", traffic.sent, labels)

    return Source(role, replica, "rpc", server, read)


def of_clients(role: str, replica: int, of: object, clients: Sequence[RpcClient]) -> Source:
    """Return what is told of the calls to others; latencies and bytes by role, not replica."""

    def read() -> Iterable[Sample]:
        for peer in sorted({client.role for client in clients}):
            yield from _calls_to(peer, [one for one in clients if one.role == peer])

    return Source(role, replica, "calls", of, read)


def _calls_to(peer: str, clients: Sequence[RpcClient]) -> Iterator[Sample]:
    traffic = [client.traffic() for client in clients]
    yield Sample("persia_rpc_call_sent_bytes", sum(n for n, _ in traffic), {"peer": peer})
    yield Sample("persia_rpc_call_received_bytes", sum(n for _, n in traffic), {"peer": peer})
    for client in clients:
        stats = client.stats()
        which = "unknown" if client.replica is None else str(client.replica)
        labels = {"peer": peer, "peer_replica": which}
        yield Sample("persia_rpc_sent_again", stats.get("sent_again", 0), labels)
        yield Sample("persia_rpc_lost_connections", stats.get("lost", 0), labels)
    all_timings = [client.timings.read() for client in clients]
    for method in sorted({method for timings in all_timings for method in timings}):
        calls = [timings[method] for timings in all_timings if method in timings]
        labels = {"peer": peer, "method": method}
        yield Sample("persia_rpc_call_seconds", total(one.took for one in calls), labels)
        yield Sample("persia_rpc_call_errors", sum(one.errors for one in calls), labels)


# --- roles ------------------------------------------------------------------------------------


def of_server(server: ServerStats) -> Source:
    """Return what an embedding-parameter-server tells of its rows."""
    misses = _Ratio()

    def read() -> Iterable[Sample]:
        stats = server.stats()
        num_missed = stats["misses"]
        yield Sample("index_miss_count", num_missed)
        ratio = misses.of(num_missed, stats["looked_up_ids"])
        if ratio is not None:
            yield Sample("index_miss_ratio", ratio)
        yield Sample("gradient_id_miss_count", stats["update_missing"])
        yield Sample("persia_rows_bytes", stats["bytes"])
        capacity, memory = server.limits()
        yield Sample("persia_capacity_rows", capacity)
        yield Sample("persia_memory_limit_bytes", memory)
        for policy in ("lru", "lfu"):
            evicted = stats[f"evicted_{policy}"]
            yield Sample("persia_evicted_rows", evicted, {"policy": policy})
        for name in ("inserted", "expired", "refused"):
            yield Sample(f"persia_{name}_rows", stats[name])
        yield Sample("persia_recovered_rows", stats.get("recovered_rows", 0))
        for name in ("rows", "looked_up_ids", "lookups", "updates", "repeated_updates"):
            yield Sample(f"persia_{name}", stats[name])
        at = server.checkpointed_at()
        if at is not None:
            yield Sample("persia_checkpoint_age_seconds", time.monotonic() - at)
        yield from _histograms(server.timings)

    return Source(SERVER, server.replica_index, "rows", server, read)


_FATES = (
    *("registered", "registered_again", "refused_busy", "released", "expired", "lookups"),
    *("updates", "repeated_updates", "failed_updates"),
)
# Counts by feature, as ``EmbeddingWorker.stats`` spells them.
_LEFT_OUT = {"nan_samples.": "sample", "nan_rows.": "sum"}


def of_worker(replica: int, worker: WorkerStats) -> Source:
    """Return what an embedding-worker tells of its batches."""
    rates: dict[str, _Ratio] = {}

    def read() -> Iterable[Sample]:
        stats, (waiting, stale, num_bytes) = worker.stats(), worker.measure()
        yield Sample("num_pending_batches", waiting)
        yield Sample("staleness", stale)
        yield Sample("persia_worker_buffer_batches", waiting + stale)
        yield Sample("persia_worker_buffer_bytes", num_bytes)
        yield Sample("persia_worker_buffer_capacity", stats["forward_buffer_size"])
        yield Sample("persia_server_restarts", stats.get("server_restarts", 0))
        for what in _FATES:
            yield Sample("persia_worker_batches", stats.get(what, 0), {"what": what})
        for feat, counts in sorted(worker.id_counts().items()):
            num_ids, distinct, masked, skipped = counts
            labels = {"feat": feat}
            rate = rates.setdefault(feat, _Ratio()).of(distinct, num_ids)
            if rate is not None:
                yield Sample("batch_unique_indices_rate", rate, labels)
            yield Sample("persia_ids", num_ids, labels)
            yield Sample("persia_distinct_ids", distinct, labels)
            yield Sample("persia_masked_ids", masked, labels)
            yield Sample("nan_grad_skipped", skipped, labels)
            for prefix, of in _LEFT_OUT.items():
                num_rows = stats.get(f"{prefix}{feat}", 0)
                yield Sample("nan_count", num_rows, {**labels, "of": of})
        yield from _histograms(worker.timings)

    return Source(WORKER, replica, "batches", worker, read)


_SENT = ("sent", "redelivered", "registered_again", "dropped", "skipped", "lost")


def of_loader(role: str, replica: int, loader: LoaderStats) -> Source:
    """Return what a data-loader tells of what it sends."""

    def read() -> Iterable[Sample]:
        stats, (kept, num_bytes, num_credits) = loader.stats(), loader.measure()
        yield Sample("persia_loader_kept_batches", kept)
        yield Sample("persia_loader_kept_bytes", num_bytes)
        yield Sample("persia_loader_credits", num_credits)
        for what in _SENT:
            yield Sample("persia_loader_batches", stats.get(what, 0), {"what": what})
        yield from _histograms(loader.timings)

    return Source(role, replica, "sending", loader, read)


_OUTCOMES = {
    "trained": "batches",
    **{name: name for name in ("abandoned", "unused", "incomplete", "skipped", "failed")},
}


def of_book(role: str, rank: int, book: InFlightStats) -> Source:
    """Return what an nn-worker tells of its batches."""

    def read() -> Iterable[Sample]:
        stats, (num_samples, num_errors) = book.stats(), book.totals()
        counts = {name: value for name, value in stats.items() if isinstance(value, int)}
        yield Sample("staleness", counts["staleness"])
        for outcome, name in _OUTCOMES.items():
            yield Sample("persia_batches", counts[name], {"outcome": outcome})
        yield Sample("persia_trained_samples", num_samples)
        yield Sample("forward_error", num_errors)
        yield from _histograms(book.timings)

    return Source(role, rank, "training", book, read)


_INBOX_NOW = ("pending", "in_flight")


def of_inbox(role: str, rank: int, inbox: ReceiverStats) -> Source:
    """Return what an nn-worker tells of what data-loaders send it."""

    def read() -> Iterable[Sample]:
        stats = inbox.stats()
        yield Sample("persia_inbox_batches", stats["pending"])
        yield Sample("persia_inbox_bytes", inbox.num_bytes())
        for what in ("delivered", *sorted(stats.keys() - {"delivered", *_INBOX_NOW})):
            yield Sample("persia_inbox_received", stats.get(what, 0), {"what": what})

    return Source(role, rank, "inbox", inbox, read)


def of_reports(role: str, rank: int, reports: Reports) -> Source:
    """Return what a script reported last, by name."""

    def read() -> Iterable[Sample]:
        for name, value in reports.reported.items():
            yield Sample("persia_reported", value, {"name": name})

    return Source(role, rank, "reports", reports, read)
