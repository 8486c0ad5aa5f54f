"""Every metric there is: the one list that code, documentation and dashboard are checked by.

Names of the original PERSIA are kept where they still mean something; new ones begin with
``persia_``. A counter's name gets ``_total`` where it is written out, and a histogram's
``_bucket``, ``_sum`` and ``_count``, as Prometheus asks for. Every sample has the labels
``role`` and ``replica`` beside those named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

LOADER = "data-loader"
WORKER = "embedding-worker"
SERVER = "embedding-parameter-server"
TRAINER = "nn-worker"
EVERY = (LOADER, WORKER, SERVER, TRAINER)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: what it is called, and what it means."""

    name: str
    kind: Kind
    help: str
    roles: tuple[str, ...]
    labels: tuple[str, ...] = ()
    is_originals: bool = False  # the old PERSIA had the name

    @property
    def series(self) -> str:
        """The name of its samples; of a histogram's, without what follows."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _old(name: str, kind: Kind, roles: tuple[str, ...], help: str, *labels: str) -> Metric:
    return Metric(name, kind, help, roles, labels, True)


def _new(name: str, kind: Kind, roles: tuple[str, ...], help: str, *labels: str) -> Metric:
    return Metric(f"persia_{name}", kind, help, roles, labels)


_PROCESS = (
    _new(
        "info",
        "gauge",
        EVERY,
        "1; the labels say which PERSIA this is, and which run (PERSIA_RUN_ID, or the folder).",
        "version",
        "run",
    ),
    _new("ready", "gauge", EVERY, "1 if /readyz says that the process can be used, else 0."),
    _new("healthy", "gauge", EVERY, "1 if /healthz says that its threads live, else 0."),
)

_SERVES = (WORKER, SERVER, TRAINER)
_CALLS = (LOADER, WORKER, TRAINER)

_RPC = (
    _new(
        "rpc_served_seconds",
        "histogram",
        _SERVES,
        "Seconds from a call's arrival to its answer, by method.",
        "method",
    ),
    _new("rpc_errors", "counter", _SERVES, "Calls answered with an error.", "method"),
    _new("rpc_received_bytes", "counter", _SERVES, "Bytes of calls received.", "method"),
    _new("rpc_sent_bytes", "counter", _SERVES, "Bytes of answers sent.", "method"),
    _new("rpc_queue_calls", "gauge", _SERVES, "Calls that wait or run now."),
    _new("rpc_queue_bytes", "gauge", _SERVES, "Bytes of calls that wait or run now."),
    _new("rpc_busy", "counter", _SERVES, "Calls refused as too many wait; they come again."),
    _new(
        "rpc_expired",
        "counter",
        _SERVES,
        "Calls not begun, as whoever called had stopped waiting.",
    ),
    _new(
        "rpc_bad_messages",
        "counter",
        _SERVES,
        "Messages that could not be read, taken or answered.",
        "reason",
    ),
    _new(
        "rpc_call_seconds",
        "histogram",
        _CALLS,
        "Seconds of a call, repetitions included, by whom it was made to.",
        "peer",
        "method",
    ),
    _new("rpc_call_errors", "counter", _CALLS, "Calls that raised.", "peer", "method"),
    _new("rpc_call_received_bytes", "counter", _CALLS, "Bytes of answers received.", "peer"),
    _new(
        "rpc_call_sent_bytes",
        "counter",
        _CALLS,
        "Bytes of calls sent, repetitions included.",
        "peer",
    ),
    _new(
        "rpc_sent_again",
        "counter",
        _CALLS,
        "Calls sent again after silence or a lost connection.",
        "peer",
        "peer_replica",
    ),
    _new(
        "rpc_lost_connections",
        "counter",
        _CALLS,
        "Connections that broke.",
        "peer",
        "peer_replica",
    ),
)

_LOADERS = (
    _new(
        "loader_batches",
        "counter",
        (LOADER,),
        "Batches by what became of them: sent, redelivered, registered_again, dropped "
        "(trained before), skipped (sent to another embedding-worker), lost.",
        "what",
    ),
    _new("loader_kept_batches", "gauge", (LOADER,), "Batches kept until they are trained on."),
    _new("loader_kept_bytes", "gauge", (LOADER,), "Bytes of those batches."),
    _new(
        "loader_credits",
        "gauge",
        (LOADER,),
        "Batches that nn-workers will take now; 0 is back-pressure.",
    ),
    _new(
        "loader_wait_seconds",
        "histogram",
        (LOADER,),
        "Seconds that send_data waited for an nn-worker to have room.",
    ),
)

_WORKERS = (
    _old(
        "batch_unique_indices_rate",
        "gauge",
        (WORKER,),
        "Distinct ids / ids, of the batches since it was read last; absent before the first "
        "id.",
        "feat",
    ),
    _old(
        "num_pending_batches", "gauge", (WORKER,), "Batches registered and not looked up yet."
    ),
    _old(
        "staleness",
        "gauge",
        (WORKER, TRAINER),
        "Batches between lookup and acknowledged update: those that this embedding-worker "
        "holds, or those of this rank.",
    ),
    _old(
        "nan_count",
        "counter",
        (WORKER,),
        "Rows left out of an update as not finite: of a gradient (of=sample), or of the sum "
        "for one id (of=sum).",
        "feat",
        "of",
    ),
    _old(
        "nan_grad_skipped",
        "counter",
        (WORKER,),
        "Gradients that did not come, as the loss did not reach the feature.",
        "feat",
    ),
    _old(
        "lookup_preprocess_time_cost_sec",
        "histogram",
        (WORKER,),
        "Seconds to hash, pack and sort the ids of a batch by server.",
    ),
    _old(
        "lookup_rpc_time_cost_sec",
        "histogram",
        (WORKER,),
        "Seconds until all parameter servers have answered a lookup.",
    ),
    _old(
        "lookup_postprocess_time_cost_sec",
        "histogram",
        (WORKER,),
        "Seconds to pool the rows of a lookup.",
    ),
    _old(
        "lookup_total_time_cost_sec",
        "histogram",
        (WORKER,),
        "Seconds of a lookup after its ids were packed.",
    ),
    _old(
        "update_gradient_time_cost_sec",
        "histogram",
        (WORKER,),
        "Seconds to sum the gradients of a batch and have all servers apply them.",
    ),
    _new("ids", "counter", (WORKER,), "Ids in batches.", "feat"),
    _new(
        "distinct_ids", "counter", (WORKER,), "Distinct ids in batches, batch by batch.", "feat"
    ),
    _new(
        "masked_ids",
        "counter",
        (WORKER,),
        "Ids that did not fit their bits and were cut to them.",
        "feat",
    ),
    _new(
        "worker_batches",
        "counter",
        (WORKER,),
        "Batches by what became of them: registered, registered_again, refused_busy, "
        "released, expired (lost), lookups, updates, repeated_updates, failed_updates.",
        "what",
    ),
    _new("worker_buffer_bytes", "gauge", (WORKER,), "Bytes of the batches in flight."),
    _new("worker_buffer_batches", "gauge", (WORKER,), "Batches in flight."),
    _new(
        "worker_buffer_capacity",
        "gauge",
        (WORKER,),
        "Batches that may be in flight (forward_buffer_size).",
    ),
    _new(
        "server_restarts",
        "counter",
        (WORKER,),
        "Parameter servers that were found to be another process than before.",
    ),
)

_SERVERS = (
    _old(
        "index_miss_count",
        "counter",
        (SERVER,),
        "Ids looked up that had no row: new ones in training, zeros in evaluation.",
    ),
    _old(
        "index_miss_ratio",
        "gauge",
        (SERVER,),
        "Misses / distinct ids looked up, since it was read last; absent before the first.",
    ),
    _old("gradient_id_miss_count", "counter", (SERVER,), "Gradients whose id had no row."),
    _old("set_embedding_time_cost_sec", "histogram", (SERVER,), "Seconds of a set_embedding."),
    _old(
        "lookup_hashmap_time_cost_sec",
        "histogram",
        (SERVER,),
        "Seconds to find the rows of one lookup, and to make new ones.",
    ),
    _new(
        "update_rows_seconds", "histogram", (SERVER,), "Seconds to step the rows of one update."
    ),
    _new("rows", "gauge", (SERVER,), "Rows held."),
    _new("rows_bytes", "gauge", (SERVER,), "Memory of the rows and of what finds them."),
    _new("capacity_rows", "gauge", (SERVER,), "Rows beyond which rows are evicted."),
    _new(
        "memory_limit_bytes",
        "gauge",
        (SERVER,),
        "Memory of rows beyond which rows are evicted; 0 is no limit.",
    ),
    _new("inserted_rows", "counter", (SERVER,), "Rows made for new ids."),
    _new("evicted_rows", "counter", (SERVER,), "Rows evicted, by policy.", "policy"),
    _new("expired_rows", "counter", (SERVER,), "Rows dropped as nobody had used them."),
    _new("refused_rows", "counter", (SERVER,), "Ids looked up and not admitted."),
    _new("recovered_rows", "gauge", (SERVER,), "Rows found again when this process started."),
    _new("looked_up_ids", "counter", (SERVER,), "Distinct ids looked up."),
    _new("lookups", "counter", (SERVER,), "Lookups answered."),
    _new("updates", "counter", (SERVER,), "Updates applied."),
    _new("repeated_updates", "counter", (SERVER,), "Updates that had been applied before."),
    _new(
        "checkpoint_age_seconds",
        "gauge",
        (SERVER,),
        "Seconds since the last dump in which this server's rows were committed, or since a "
        "checkpoint was loaded; absent before the first.",
    ),
)

_TRAINERS = (
    _new("batches", "counter", (TRAINER,),
         "Batches by what became of them: trained, abandoned (no backward), unused (looked up "
         "ahead), incomplete (other ranks had none), skipped (not finite, with a GradScaler), "
         "failed (lost with an update that raised).", "outcome"),
    _new("trained_samples", "counter", (TRAINER,), "Samples of trained batches."),
    _new("steps", "counter", (TRAINER,), "Calls of backward."),
    _new("loss", "gauge", (TRAINER,), "Loss of the last backward, without its scale."),
    _new("reported", "gauge", (TRAINER,),
         "What the script reported last by ctx.report, such as an AUC.", "name"),
    _old("forward_client_time_cost_sec", "histogram", (TRAINER,),
         "Seconds of a lookup as the nn-worker sees it."),
    _old("forward_client_to_gpu_time_cost_sec", "histogram", (TRAINER,),
         "Seconds to make tensors of a lookup and to start their way to the device."),
    _old("backward_client_time_cost_sec", "histogram", (TRAINER,),
         "Seconds of an update as the nn-worker sees it."),
    _old("get_train_batch_time_cost_more_than_1ms_sec", "histogram", (TRAINER,),
         "Seconds that the training loop waited for a batch, where it was more than 1 ms."),
    _old("update_gradient_batched_time_cost_more_than_1ms_sec", "histogram", (TRAINER,),
         "Seconds that backward waited for room for its gradients, where more than 1 ms."),
    _old("forward_error", "counter", (TRAINER,), "Lookups that raised."),
    _new("update_queue_batches", "gauge", (TRAINER,), "Updates that wait to be sent."),
    _new("update_queue_bytes", "gauge", (TRAINER,), "Bytes of gradients that wait to be sent."),
    _new("inbox_batches", "gauge", (TRAINER,),
         "Batches received from data-loaders and not looked up yet."),
    _new("inbox_bytes", "gauge", (TRAINER,),
         "Bytes of dense data and labels of those batches."),
    _new("inbox_received", "counter", (TRAINER,),
         "Batches from data-loaders: delivered, delivered_again, left_out (trained before), "
         "relocated and asked_again (their ids were lost), lost, unread.", "what"),
)  # fmt: skip

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (*_PROCESS, *_RPC, *_LOADERS, *_WORKERS, *_SERVERS, *_TRAINERS)
}
