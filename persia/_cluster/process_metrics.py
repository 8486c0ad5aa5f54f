"""Metrics: of each kind of component, and of a process that runs a user's script.

Components know nothing of metrics. They count for ``stats()``, and measure queues and bytes
only when they are read.

``persia._cli.run`` opens the endpoint before a script begins; else an entered context does, and
it is closed with the last one. In embedded mode a script has none, unless
``PERSIA_METRICS_PORT`` asks for it: a notebook should open no port unasked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from persia import _context_stack, env
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.endpoint import Endpoint, PushSettings
from persia._metrics.registry import MetricSource, Sample
from persia._metrics.timings import Timings, total
from persia._rpc.deadlines import within
from persia.config import GlobalConfig
from persia.errors import ConfigError

if TYPE_CHECKING:
    from persia._loader.sender import BatchSender
    from persia._rpc.client import Client
    from persia._rpc.server import Server
    from persia._server.read_only import ReadOnlyParameterServer
    from persia._server.service import ParameterServer
    from persia._training.inflight import InFlightTracker
    from persia._training.receiver import BatchReceiver
    from persia._worker.service import EmbeddingWorker

# Names in ``Server.stats`` of messages that could not be read, accepted or answered.
_BAD = ("bad.", "dropped.")


class _Ratio:
    """part / whole since the last reading; the ratio before if nothing was counted since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._part = self._whole = 0
        self._ratio: float | None = None

    def of(self, part: int, whole: int) -> float | None:
        """Return the ratio; None before anything was counted, and never NaN."""
        with self._lock:
            if whole > self._whole:
                self._ratio = (part - self._part) / (whole - self._whole)
            self._part, self._whole = part, whole
            return self._ratio


def _histograms(timings: Timings) -> Iterator[Sample]:
    for name, took in timings.read().items():
        yield Sample(name, took)


# --- calls ------------------------------------------------------------------------------------


def of_rpc_server(role: str, replica: int, server: Server) -> MetricSource:
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

    return MetricSource(role, replica, "rpc", server, read)


def of_clients(role: str, replica: int, of: object, clients: Sequence[Client]) -> MetricSource:
    """Return a source of the calls to others; latencies and bytes by role, not replica."""

    def read() -> Iterable[Sample]:
        for peer in sorted({client.role for client in clients}):
            yield from _calls_to(peer, [one for one in clients if one.role == peer])

    return MetricSource(role, replica, "calls", of, read)


def _calls_to(peer: str, clients: Sequence[Client]) -> Iterator[Sample]:
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


def of_server(server: ParameterServer | ReadOnlyParameterServer) -> MetricSource:
    misses = _Ratio()

    def read() -> Iterable[Sample]:
        stats = server.stats()
        yield Sample("index_miss_count", stats["misses"])
        ratio = misses.of(stats["misses"], stats["looked_up_ids"])
        if ratio is not None:
            yield Sample("index_miss_ratio", ratio)
        yield Sample("gradient_id_miss_count", stats["update_missing"])
        yield Sample("persia_rows_bytes", stats["bytes"])
        capacity, memory = server.limits()
        yield Sample("persia_capacity_rows", capacity)
        yield Sample("persia_memory_limit_bytes", memory)
        for policy in ("lru", "lfu", "native"):
            evicted = stats[f"evicted_{policy}"]
            yield Sample("persia_evicted_rows", evicted, {"policy": policy})
        for name in ("inserted", "expired", "refused"):
            yield Sample(f"persia_{name}_rows", stats[name])
        yield Sample("persia_recovered_rows", stats.get("recovered_rows", 0))
        for name in ("rows", "looked_up_ids", "lookups", "updates"):
            yield Sample(f"persia_{name}", stats[name])
        for name in ("repeated_updates", "replaced_updates"):
            yield Sample(f"persia_{name}", stats[name])
        at = server.checkpointed_at()
        if at is not None:
            yield Sample("persia_checkpoint_age_seconds", time.monotonic() - at)
        for writer, seconds in server.row_ages().items():
            yield Sample("persia_row_age_seconds", seconds, {"server": str(writer)})
        yield from _histograms(server.timings)

    return MetricSource(SERVER, server.replica_index, "rows", server, read)


_WORKER_BATCHES = (
    *("registered", "registered_again", "refused_busy", "released", "expired", "lookups"),
    *("updates", "repeated_updates", "failed_updates"),
)
# Counts by feature, as ``EmbeddingWorker.stats`` spells them.
_NOT_FINITE = {"nan_samples.": "sample", "nan_rows.": "sum"}


def of_worker(replica: int, worker: EmbeddingWorker) -> MetricSource:
    rates: dict[str, _Ratio] = {}

    def read() -> Iterable[Sample]:
        stats, (waiting, stale, num_bytes) = worker.stats(), worker.buffer.measure()
        yield Sample("num_pending_batches", waiting)
        yield Sample("staleness", stale)
        yield Sample("persia_worker_buffer_batches", waiting + stale)
        yield Sample("persia_worker_buffer_bytes", num_bytes)
        yield Sample("persia_worker_buffer_capacity", stats["forward_buffer_size"])
        yield Sample("persia_server_restarts", stats.get("server_restarts", 0))
        for what in _WORKER_BATCHES:
            yield Sample("persia_worker_batches", stats.get(what, 0), {"what": what})
        for feat, counts in sorted(worker.statistics.count_ids().items()):
            num_ids, distinct, masked, skipped = counts
            labels = {"feat": feat}
            rate = rates.setdefault(feat, _Ratio()).of(distinct, num_ids)
            if rate is not None:
                yield Sample("batch_unique_indices_rate", rate, labels)
            yield Sample("persia_ids", num_ids, labels)
            yield Sample("persia_distinct_ids", distinct, labels)
            yield Sample("persia_masked_ids", masked, labels)
            yield Sample("nan_grad_skipped", skipped, labels)
            for prefix, of in _NOT_FINITE.items():
                num_rows = stats.get(f"{prefix}{feat}", 0)
                yield Sample("nan_count", num_rows, {**labels, "of": of})
        yield from _histograms(worker.timings)

    return MetricSource(WORKER, replica, "batches", worker, read)


def of_embedded(worker: object) -> Iterator[tuple[object, Callable[[], MetricSource]]]:
    """Yield components of embedded mode with their sources; none of a user's own classes."""
    from persia._server.service import ParameterServer
    from persia._worker.service import EmbeddingWorker

    if isinstance(worker, EmbeddingWorker):
        yield worker, partial(of_worker, 0, worker)
        for server in worker.servers:
            if isinstance(server, ParameterServer):
                yield server, partial(of_server, server)


_LOADER_BATCHES = ("sent", "redelivered", "registered_again", "dropped", "skipped", "lost")


def of_sender(role: str, replica: int, sender: BatchSender) -> MetricSource:
    def read() -> Iterable[Sample]:
        stats, (kept, num_bytes, num_credits) = sender.stats(), sender.measure()
        yield Sample("persia_loader_kept_batches", kept)
        yield Sample("persia_loader_kept_bytes", num_bytes)
        yield Sample("persia_loader_credits", num_credits)
        for what in _LOADER_BATCHES:
            yield Sample("persia_loader_batches", stats.get(what, 0), {"what": what})
        yield from _histograms(sender.timings)

    return MetricSource(role, replica, "sending", sender, read)


_OUTCOMES = {
    "trained": "batches",
    **{name: name for name in ("abandoned", "unused", "incomplete", "skipped", "failed")},
}


def of_inflight(role: str, rank: int, tracker: InFlightTracker) -> MetricSource:
    def read() -> Iterable[Sample]:
        stats, (num_samples, num_errors) = tracker.stats(), tracker.totals()
        counts = {name: value for name, value in stats.items() if isinstance(value, int)}
        yield Sample("staleness", counts["staleness"])
        for outcome, name in _OUTCOMES.items():
            yield Sample("persia_batches", counts[name], {"outcome": outcome})
        yield Sample("persia_trained_samples", num_samples)
        yield Sample("forward_error", num_errors)
        limit = None if tracker.limiter is None else tracker.limiter.limit
        if limit is not None:
            yield Sample("persia_permits", limit)
        yield from _histograms(tracker.timings)

    return MetricSource(role, rank, "training", tracker, read)


_RECEIVER_GAUGES = ("pending", "taken")


def of_receiver(role: str, rank: int, receiver: BatchReceiver) -> MetricSource:
    def read() -> Iterable[Sample]:
        stats = receiver.stats()
        yield Sample("persia_inbox_batches", stats["pending"])
        yield Sample("persia_inbox_bytes", receiver.num_bytes())
        for what in ("delivered", *sorted(stats.keys() - {"delivered", *_RECEIVER_GAUGES})):
            yield Sample("persia_inbox_received", stats.get(what, 0), {"what": what})

    return MetricSource(role, rank, "inbox", receiver, read)


def of_reports(
    role: str, rank: int, of: object, read_reported: Callable[[], Mapping[str, float]]
) -> MetricSource:
    """Return a source of what a script reported last, by name; ``of`` keeps the values."""

    def read() -> Iterable[Sample]:
        for name, value in read_reported().items():
            yield Sample("persia_reported", value, {"name": name})

    return MetricSource(role, rank, "reports", of, read)


# --- the endpoint of a script's process ------------------------------------------------------

# Seconds that the calls behind one probe of readiness get together.
PROBE_S = 3.0


@runtime_checkable
class MonitoredContext(Protocol):
    """What is read of a ``BaseCtx``, whose layer is above."""

    def metric_sources(self) -> Iterable[MetricSource]: ...
    def why_not_ready(self) -> str: ...
    def why_not_healthy(self) -> str: ...


def _entered() -> list[MonitoredContext]:
    return [ctx for ctx in _context_stack.entered() if isinstance(ctx, MonitoredContext)]


def _sources() -> Iterable[MetricSource]:
    return [source for ctx in _entered() for source in ctx.metric_sources()]


def _why_not_ready() -> str:
    contexts = _entered()
    if not contexts:
        return "the script has entered no context"
    with within(PROBE_S):
        return "; ".join(filter(None, (ctx.why_not_ready() for ctx in contexts)))


def _why_not_healthy() -> str:
    return "; ".join(filter(None, (ctx.why_not_healthy() for ctx in _entered())))


_lock = threading.Lock()  # guards both
_num_holders = 0
_endpoint: Endpoint | None = None


def hold(role: str | None = None) -> None:
    """Open the endpoint of this process, if it is to have one; ``release`` undoes it.

    Raises:
        ConfigError: If it cannot listen where the environment says.
    """
    global _num_holders, _endpoint
    with _lock:
        if _num_holders == 0 and _wants_endpoint():
            _endpoint = _open(role)
        _num_holders += 1


def release() -> None:
    """Close it with the last ``hold``."""
    global _num_holders, _endpoint
    with _lock:
        _num_holders -= 1
        endpoint = None
        if _num_holders == 0:
            endpoint, _endpoint = _endpoint, None
    if endpoint is not None:
        endpoint.close()


def push_settings(config: GlobalConfig) -> PushSettings | None:
    """Return what a global config says of the push gateway; None if nothing is to be sent."""
    settings = config.common_config.metrics_config
    if not settings.enable_metrics:
        return None
    return PushSettings(settings.job_name, float(settings.push_interval_seconds))


def url() -> str:
    """Return where this process serves its metrics; "" if nowhere."""
    with _lock:
        return "" if _endpoint is None else _endpoint.url


def _wants_endpoint() -> bool:
    if env.feeds_parent():
        return False  # its parent counts what it has received
    if env.metrics_port() is not None:
        return True
    with contextlib.suppress(ConfigError):  # in no mode; a context of no servers may not care
        return env.get_mode() == "services"
    return False


def _open(role: str | None) -> Endpoint:
    rank = env.get_rank()
    if role is None:
        role = LOADER if rank is None else TRAINER
    config = env.global_config_path()
    number = rank if role == TRAINER else env.get_replica_index()
    return Endpoint(
        role,
        number or 0,
        _sources,
        _why_not_ready,
        _why_not_healthy,
        local_rank=env.get_local_rank() or 0,
        push=None if config is None else push_settings(GlobalConfig.load(config)),
    )
