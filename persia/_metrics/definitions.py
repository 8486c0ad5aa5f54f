"""Every metric: the catalogue that code, documentation and dashboard are checked by.

Names of the original PERSIA are kept where they still mean something; all others begin with
``persia_``. In Prometheus' text a counter's name ends in ``_total``, and a histogram's in
``_bucket``, ``_sum`` and ``_count``. Every sample has the labels ``role`` and ``replica``
beside those named here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

LOADER = "data-loader"
WORKER = "embedding-worker"
SERVER = "embedding-parameter-server"
TRAINER = "nn-worker"
EVERY = (LOADER, WORKER, SERVER, TRAINER)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the catalogue."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    @property
    def is_originals(self) -> bool:
        """Whether the original PERSIA had the name."""
        return not self.name.startswith("persia_")

    @property
    def series(self) -> str:
        """Name of its samples; of a histogram's, without the suffix."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _metric(
    kind: Literal["counter", "gauge", "histogram"],
    name: str,
    help: str,
    *labels: str,
    roles: tuple[str, ...] = (),
) -> Metric:
    return Metric(name, kind, help, labels, roles)


_counter = partial(_metric, "counter")
_gauge = partial(_metric, "gauge")
_histogram = partial(_metric, "histogram")


def _of(roles: tuple[str, ...], *metrics: Metric) -> list[Metric]:
    """Return metrics with their roles, unless they name their own."""
    return [one if one.roles else replace(one, roles=roles) for one in metrics]


_PROCESS = _of(
    EVERY,
    _gauge(
        "persia_info",
        "1; the labels say which PERSIA this is, and which run (PERSIA_RUN_ID, or the folder).",
        "version",
        "run",
    ),
    _gauge("persia_ready", "1 if /readyz says that the process can be used, else 0."),
    _gauge("persia_healthy", "1 if /healthz says that its threads live, else 0."),
)

_RPC_SERVERS = _of(
    (WORKER, SERVER, TRAINER),
    _histogram(
        "persia_rpc_served_seconds",
        "Seconds from a call's arrival to its answer, by method.",
        "method",
    ),
    _counter("persia_rpc_errors", "Calls answered with an error.", "method"),
    _counter("persia_rpc_received_bytes", "Bytes of calls received.", "method"),
    _counter("persia_rpc_sent_bytes", "Bytes of answers sent.", "method"),
    _gauge("persia_rpc_queue_calls", "Calls that wait or run now."),
    _gauge("persia_rpc_queue_bytes", "Bytes of calls that wait or run now."),
    _counter("persia_rpc_busy", "Calls refused as too many wait; they come again."),
    _counter("persia_rpc_expired", "Calls not begun, as the caller had stopped waiting."),
    _counter(
        "persia_rpc_bad_messages",
        "Messages that could not be read, taken or answered.",
        "reason",
    ),
)

_RPC_CLIENTS = _of(
    (LOADER, WORKER, TRAINER),
    _histogram(
        "persia_rpc_call_seconds",
        "Seconds of a call, repetitions included, by the peer that was called.",
        "peer",
        "method",
    ),
    _counter("persia_rpc_call_errors", "Calls that raised.", "peer", "method"),
    _counter("persia_rpc_call_received_bytes", "Bytes of answers received.", "peer"),
    _counter(
        "persia_rpc_call_sent_bytes", "Bytes of calls sent, repetitions included.", "peer"
    ),
    _counter(
        "persia_rpc_sent_again",
        "Calls sent again after silence or a lost connection.",
        "peer",
        "peer_replica",
    ),
    _counter("persia_rpc_lost_connections", "Connections that broke.", "peer", "peer_replica"),
)

_LOADERS = _of(
    (LOADER,),
    _counter(
        "persia_loader_batches",
        "Batches by what became of them: sent, redelivered, registered_again, dropped "
        "(trained before), skipped (sent to another embedding-worker), lost.",
        "what",
    ),
    _gauge("persia_loader_kept_batches", "Batches kept until they are trained on."),
    _gauge("persia_loader_kept_bytes", "Bytes of those batches."),
    _gauge(
        "persia_loader_credits", "Batches that nn-workers will take now; 0 is back-pressure."
    ),
    _histogram(
        "persia_loader_wait_seconds",
        "Seconds that send_data waited for an nn-worker to have room.",
    ),
)

_WORKERS = _of(
    (WORKER,),
    _gauge(
        "batch_unique_indices_rate",
        "Distinct ids / ids, of the batches since it was read last; absent before the first "
        "id.",
        "feat",
    ),
    _gauge("num_pending_batches", "Batches registered and not looked up yet."),
    _gauge(
        "staleness",
        "Batches between lookup and acknowledged update: those that this embedding-worker "
        "holds, or those of this rank.",
        roles=(WORKER, TRAINER),
    ),
    _counter(
        "nan_count",
        "Rows left out of an update as not finite: of a gradient (of=sample), or of the sum "
        "for one id (of=sum).",
        "feat",
        "of",
    ),
    _counter(
        "nan_grad_skipped",
        "Gradients that did not come, as the loss did not reach the feature.",
        "feat",
    ),
    _histogram(
        "lookup_preprocess_time_cost_sec",
        "Seconds to hash, pack and sort the ids of a batch by server.",
    ),
    _histogram(
        "lookup_rpc_time_cost_sec",
        "Seconds until all parameter servers have answered a lookup.",
    ),
    _histogram("lookup_postprocess_time_cost_sec", "Seconds to pool the rows of a lookup."),
    _histogram("lookup_total_time_cost_sec", "Seconds of a lookup after its ids were packed."),
    _histogram(
        "update_gradient_time_cost_sec",
        "Seconds to sum the gradients of a batch and have all servers apply them.",
    ),
    _counter("persia_ids", "Ids in batches.", "feat"),
    _counter("persia_distinct_ids", "Distinct ids in batches, batch by batch.", "feat"),
    _counter(
        "persia_masked_ids", "Ids that did not fit their bits and were cut to them.", "feat"
    ),
    _counter(
        "persia_worker_batches",
        "Batches by what became of them: registered, registered_again, refused_busy, "
        "released, expired (lost), lookups, updates, repeated_updates, failed_updates.",
        "what",
    ),
    _gauge("persia_worker_buffer_bytes", "Bytes of the batches in flight."),
    _gauge("persia_worker_buffer_batches", "Batches in flight."),
    _gauge(
        "persia_worker_buffer_capacity", "Batches that may be in flight (forward_buffer_size)."
    ),
    _counter(
        "persia_server_restarts",
        "Parameter servers that were found to be another process than before.",
    ),
)

_SERVERS = _of(
    (SERVER,),
    _counter(
        "index_miss_count",
        "Ids looked up that had no row: new ones in training, zeros in evaluation.",
    ),
    _gauge(
        "index_miss_ratio",
        "Misses / distinct ids looked up, since it was read last; absent before the first.",
    ),
    _counter("gradient_id_miss_count", "Gradients whose id had no row."),
    _histogram("set_embedding_time_cost_sec", "Seconds of a set_embedding."),
    _histogram(
        "lookup_hashmap_time_cost_sec",
        "Seconds to find the rows of one lookup, and to make new ones.",
    ),
    _histogram("persia_update_rows_seconds", "Seconds to step the rows of one update."),
    _gauge("persia_rows", "Rows held."),
    _gauge("persia_rows_bytes", "Memory of the rows and of what finds them."),
    _gauge("persia_capacity_rows", "Rows beyond which rows are evicted."),
    _gauge(
        "persia_memory_limit_bytes",
        "Memory of rows beyond which rows are evicted; 0 is no limit.",
    ),
    _counter("persia_inserted_rows", "Rows made for new ids."),
    _counter("persia_evicted_rows", "Rows evicted, by policy.", "policy"),
    _counter("persia_expired_rows", "Rows dropped because they were not used."),
    _counter("persia_refused_rows", "Ids looked up and not admitted."),
    _gauge("persia_recovered_rows", "Rows found again when this process started."),
    _counter("persia_looked_up_ids", "Distinct ids looked up."),
    _counter("persia_lookups", "Lookups answered."),
    _counter("persia_updates", "Updates applied."),
    _counter("persia_repeated_updates", "Updates that had been applied before."),
    _gauge(
        "persia_checkpoint_age_seconds",
        "Seconds since the last dump in which this server's rows were committed, or since a "
        "checkpoint was loaded; absent before the first.",
    ),
)

_TRAINERS = _of(
    (TRAINER,),
    _counter(
        "persia_batches",
        "Batches by what became of them: trained, abandoned (no backward), unused (looked up "
        "ahead), incomplete (other ranks had none), skipped (not finite, with a GradScaler), "
        "failed (lost with an update that raised).",
        "outcome",
    ),
    _counter("persia_trained_samples", "Samples of trained batches."),
    _counter("persia_steps", "Calls of backward."),
    _gauge("persia_loss", "Loss of the last backward, without its scale."),
    _gauge(
        "persia_reported",
        "What the script reported last by ctx.report, such as an AUC.",
        "name",
    ),
    _histogram("forward_client_time_cost_sec", "Seconds of a lookup as the nn-worker sees it."),
    _histogram(
        "forward_client_to_gpu_time_cost_sec",
        "Seconds to make tensors of a lookup and to start their way to the device.",
    ),
    _histogram(
        "backward_client_time_cost_sec", "Seconds of an update as the nn-worker sees it."
    ),
    _histogram(
        "get_train_batch_time_cost_more_than_1ms_sec",
        "Seconds that the training loop waited for a batch, where it was more than 1 ms.",
    ),
    _histogram(
        "update_gradient_batched_time_cost_more_than_1ms_sec",
        "Seconds that backward waited for room for its gradients, where more than 1 ms.",
    ),
    _counter("forward_error", "Lookups that raised."),
    _gauge("persia_update_queue_batches", "Updates that wait to be sent."),
    _gauge("persia_update_queue_bytes", "Bytes of gradients that wait to be sent."),
    _gauge("persia_inbox_batches", "Batches received from data-loaders and not looked up yet."),
    _gauge("persia_inbox_bytes", "Bytes of dense data and labels of those batches."),
    _counter(
        "persia_inbox_received",
        "Batches from data-loaders: delivered, delivered_again, left_out (trained before), "
        "relocated and asked_again (their ids were lost), lost, unread.",
        "what",
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *(*_PROCESS, *_RPC_SERVERS, *_RPC_CLIENTS),
        *(*_LOADERS, *_WORKERS, *_SERVERS, *_TRAINERS),
    )
}
