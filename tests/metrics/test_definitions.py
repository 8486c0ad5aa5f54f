"""docs/metrics.md names every metric there is, and says of it what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from persia._metrics.definitions import EVERY, LOADER, METRICS, SERVER, SERVING, TRAINER, WORKER
from persia._metrics.endpoint import DEFAULT_PORTS

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
SHORT = {
    LOADER: "loader",
    WORKER: "worker",
    SERVER: "server",
    TRAINER: "trainer",
    SERVING: "serving",
}


def row(name: str) -> str:
    metric = METRICS[name]
    roles = "all" if metric.roles == EVERY else ", ".join(SHORT[one] for one in metric.roles)
    star = "" if name.startswith("persia_") else " *"  # a name of the original's
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.series}`{star} | {metric.kind} | {roles} | {labels} | {metric.help} |"


def test_the_table_is_the_catalogue() -> None:
    found = PAGE.read_text().partition("| name | kind |")[2].splitlines()[2:]
    want = [row(name) for name in METRICS]
    assert want == found, "\n".join(["the table should be", *want])


def test_ports_are_those_of_the_code() -> None:
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| not set"))
    assert [int(port) for port in re.findall(r"\b9\d\d\d\b", line)] == list(
        DEFAULT_PORTS.values()
    )


def test_every_name_of_the_original_is_kept_or_accounted_for() -> None:
    originals = {
        *("batch_unique_indices_rate", "num_pending_batches", "staleness", "nan_count"),
        *("nan_grad_skipped", "lookup_preprocess_time_cost_sec", "lookup_rpc_time_cost_sec"),
        *("lookup_postprocess_time_cost_sec", "lookup_total_time_cost_sec"),
        *("update_gradient_time_cost_sec", "index_miss_count", "index_miss_ratio"),
        *("gradient_id_miss_count", "set_embedding_time_cost_sec"),
        *("lookup_hashmap_time_cost_sec", "forward_client_to_gpu_time_cost_sec"),
        *("forward_client_time_cost_sec", "backward_client_time_cost_sec", "forward_error"),
        "get_train_batch_time_cost_more_than_1ms_sec",
        "update_gradient_batched_time_cost_more_than_1ms_sec",
    }
    assert {name for name in METRICS if not name.startswith("persia_")} == originals
