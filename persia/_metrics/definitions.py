"""Every metric: the catalogue that code, documentation and dashboard are checked by.

Names of the original PERSIA are kept where they still mean something; all others begin with
``persia_``. In Prometheus' text a counter's name ends in ``_total``, and a histogram's in
``_bucket``, ``_sum`` and ``_count``. Every sample has the labels ``role`` and ``replica``
beside those named here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

LOADER = "data-loader"
WORKER = "embedding-worker"
SERVER = "embedding-parameter-server"
TRAINER = "nn-worker"
SERVING = "serving"  # a server of models, which belongs to no training job
EVERY = (LOADER, WORKER, SERVER, TRAINER)


class Metric(NamedTuple):
    """One metric of the catalogue."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    roles: tuple[str, ...]

    @property
    def series(self) -> str:
        """Name of its samples; of a histogram's, without the suffix."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


# [roles], then of each metric: kind, name and labels; its help below.
_CATALOGUE = """
[data-loader, embedding-worker, embedding-parameter-server, nn-worker]
gauge persia_info{version, run}
    1; the labels say which PERSIA this is, and which run (PERSIA_RUN_ID, or the folder).
gauge persia_ready
    1 if /readyz says that the process can be used, else 0.
gauge persia_healthy
    1 if /healthz says that its threads live, else 0.

[embedding-worker, embedding-parameter-server, nn-worker]
histogram persia_rpc_served_seconds{method}
    Seconds from a call's arrival to its answer, by method.
counter persia_rpc_errors{method}
    Calls answered with an error.
counter persia_rpc_received_bytes{method}
    Bytes of calls received.
counter persia_rpc_sent_bytes{method}
    Bytes of answers sent.
gauge persia_rpc_queue_calls
    Calls that wait or run now.
gauge persia_rpc_queue_bytes
    Bytes of calls that wait or run now.
counter persia_rpc_busy
    Calls refused as too many wait; they come again.
counter persia_rpc_expired
    Calls not begun, as the caller had stopped waiting.
counter persia_rpc_bad_messages{reason}
    Messages that could not be read, taken or answered.

[data-loader, embedding-worker, nn-worker]
histogram persia_rpc_call_seconds{peer, method}
    Seconds of a call, repetitions included, by the peer that was called.
counter persia_rpc_call_errors{peer, method}
    Calls that raised.
counter persia_rpc_call_received_bytes{peer}
    Bytes of answers received.
counter persia_rpc_call_sent_bytes{peer}
    Bytes of calls sent, repetitions included.
counter persia_rpc_sent_again{peer, peer_replica}
    Calls sent again after silence or a lost connection.
counter persia_rpc_lost_connections{peer, peer_replica}
    Connections that broke.

[data-loader]
counter persia_loader_batches{what}
    Batches by what became of them: sent, redelivered, registered_again, dropped (trained
    before), skipped (sent to another embedding-worker), lost.
gauge persia_loader_kept_batches
    Batches kept until they are trained on.
gauge persia_loader_kept_bytes
    Bytes of those batches.
gauge persia_loader_credits
    Batches that nn-workers will take now; 0 is back-pressure.
histogram persia_loader_wait_seconds
    Seconds that send_data waited for an nn-worker to have room.

[embedding-worker]
gauge batch_unique_indices_rate{feat}
    Distinct ids / ids, of the batches since it was read last; absent before the first id.
gauge num_pending_batches
    Batches registered and not looked up yet.

[embedding-worker, nn-worker]
gauge staleness
    Batches between lookup and acknowledged update: those that this embedding-worker holds,
    or those of this rank.

[embedding-worker]
counter nan_count{feat, of}
    Rows left out of an update as not finite: of a gradient (of=sample), or of the sum for
    one id (of=sum).
counter nan_grad_skipped{feat}
    Gradients that did not come, as the loss did not reach the feature.
histogram lookup_preprocess_time_cost_sec
    Seconds to hash, pack and sort the ids of a batch by server.
histogram lookup_rpc_time_cost_sec
    Seconds until all parameter servers have answered a lookup.
histogram lookup_postprocess_time_cost_sec
    Seconds to pool the rows of a lookup.
histogram lookup_total_time_cost_sec
    Seconds of a lookup after its ids were packed.
histogram update_gradient_time_cost_sec
    Seconds to sum the gradients of a batch and have all servers apply them.
histogram persia_delay_compensation_seconds
    Seconds of it in which rows are looked up again and gradients corrected; absent without
    delay_compensation.
counter persia_ids{feat}
    Ids in batches.
counter persia_distinct_ids{feat}
    Distinct ids in batches, batch by batch.
counter persia_masked_ids{feat}
    Ids that did not fit their bits and were cut to them.
counter persia_worker_batches{what}
    Batches by what became of them: registered, registered_again, refused_busy, released,
    expired (lost), lookups, updates, repeated_updates, failed_updates.
gauge persia_worker_buffer_bytes
    Bytes of the batches in flight.
gauge persia_worker_buffer_batches
    Batches in flight.
gauge persia_worker_buffer_capacity
    Batches that may be in flight (forward_buffer_size).
counter persia_server_restarts
    Parameter servers that were found to be another process than before.

[embedding-parameter-server]
counter index_miss_count
    Ids looked up that had no row: new ones in training, zeros in evaluation.
gauge index_miss_ratio
    Misses / distinct ids looked up, since it was read last; absent before the first.
counter gradient_id_miss_count
    Gradients whose id had no row.
histogram set_embedding_time_cost_sec
    Seconds of a set_embedding.
histogram lookup_hashmap_time_cost_sec
    Seconds to find the rows of one lookup, and to make new ones.
histogram persia_update_rows_seconds
    Seconds to step the rows of one update.
gauge persia_rows
    Rows held.
gauge persia_rows_bytes
    Memory of the rows and of what finds them.
gauge persia_capacity_rows
    Rows beyond which rows are evicted.
gauge persia_memory_limit_bytes
    Memory of rows beyond which rows are evicted; 0 is no limit.
counter persia_inserted_rows
    Rows made for new ids.
counter persia_evicted_rows{policy}
    Rows evicted, by policy.
counter persia_expired_rows
    Rows dropped because they were not used.
counter persia_refused_rows
    Ids looked up and not admitted.
gauge persia_recovered_rows
    Rows found again when this process started.
counter persia_looked_up_ids
    Distinct ids looked up.
counter persia_lookups
    Lookups answered.
counter persia_updates
    Updates applied.
counter persia_repeated_updates
    Updates that had been applied before.
counter persia_replaced_updates
    Updates refused, as a load had replaced their rows: of a trainer before this one.
gauge persia_checkpoint_age_seconds
    Seconds since the last dump in which this server's rows were committed, or since a
    checkpoint was loaded; absent before the first.
gauge persia_row_age_seconds{server}
    Seconds since the last change of rows that a read-only server applied was written, by
    training server.

[nn-worker]
counter persia_batches{outcome}
    Batches by what became of them: trained, abandoned (no backward), unused (looked up
    ahead), incomplete (other ranks had none), skipped (not finite, with a GradScaler),
    failed (lost with an update that raised).
counter persia_trained_samples
    Samples of trained batches.
counter persia_steps
    Calls of backward.
gauge persia_loss
    Loss of the last backward, without its scale.
gauge persia_reported{name}
    What the script reported last by ctx.report, such as an AUC.
histogram forward_client_time_cost_sec
    Seconds of a lookup as the nn-worker sees it.
histogram forward_client_to_gpu_time_cost_sec
    Seconds to make tensors of a lookup and to start their way to the device.
histogram backward_client_time_cost_sec
    Seconds of an update as the nn-worker sees it.
histogram get_train_batch_time_cost_more_than_1ms_sec
    Seconds that the training loop waited for a batch, where it was more than 1 ms.
histogram update_gradient_batched_time_cost_more_than_1ms_sec
    Seconds that backward waited for room for its gradients, where more than 1 ms.
histogram persia_missed_updates
    Updates of earlier batches of this rank that a lookup may miss, as they were not
    acknowledged when it began; with embedding_staleness=k at most k - 1.
gauge persia_permits
    Batches that may be between lookup and acknowledged update now: embedding_staleness, or
    what "auto" has chosen; absent without a bound.
counter forward_error
    Lookups that raised.
gauge persia_update_queue_batches
    Updates that wait to be sent.
gauge persia_update_queue_bytes
    Bytes of gradients that wait to be sent.
gauge persia_inbox_batches
    Batches received from data-loaders and not looked up yet.
gauge persia_inbox_bytes
    Bytes of dense data and labels of those batches.
counter persia_inbox_received{what}
    Batches from data-loaders: delivered, delivered_again, left_out (trained before),
    relocated and asked_again (their ids were lost), refused (beyond their credits), lost,
    unread.

[serving]
histogram persia_serving_request_seconds{model, version}
    Seconds from a whole request to its whole answer.
histogram persia_serving_stage_seconds{model, version, stage}
    Seconds of a request in queue, decode (its features and joining included), lookup (of
    rows), forward and encode.
counter persia_serving_requests{model, version, outcome}
    Requests by outcome: answered, failed.
counter persia_serving_rows{model, version}
    Samples scored.
counter persia_serving_executions{model, version}
    Calls of the model; fewer than requests where requests were joined.
counter persia_serving_refused{reason}
    Requests not scored: busy (the queue was full), deadline (the caller had stopped waiting).
gauge persia_serving_in_flight
    Requests that wait or are scored now.
gauge persia_serving_version_ready{model, version}
    1 of a version that answers, 0 of one that is loading, failed or unloaded.
gauge persia_serving_not_loaded{model, reason}
    Versions that should be loaded and are not, or not as they are on disk now, by why: an
    error's class, timeout, other.
gauge persia_serving_held_rows{model, version}
    Rows in memory.
gauge persia_serving_held_bytes{model, version}
    Bytes of these rows.
counter persia_serving_missing_ids{model, version, feature}
    Distinct ids of requests that had no row.
gauge persia_serving_row_age_seconds{model, version, server}
    Seconds since the last change of rows that was applied was written, by training server.
counter persia_serving_packets{model, version, what}
    Packets of the change log: applied; gaps (one was missing) and resyncs (all read again);
    damaged (loads that had to leave the newest ones out).
counter persia_serving_cache{model, version, what}
    Rows asked of servers: hits (held here) and misses; flushes (all of them given up).
"""

_ENTRY = re.compile(r"^(\w+) (\w+)(?:{(.*)})?\n((?:    .*\n)+)", re.MULTILINE)


def _read_catalogue() -> Iterator[Metric]:
    for section in _CATALOGUE.split("\n[")[1:]:
        roles, entries = section.split("]", 1)
        for kind, name, labels, text in _ENTRY.findall(entries):
            label_names = tuple(labels.split(", ")) if labels else ()
            help = " ".join(text.split())
            yield Metric(name, kind, help, label_names, tuple(roles.split(", ")))


METRICS: dict[str, Metric] = {metric.name: metric for metric in _read_catalogue()}
