"""Schemas, batches and servers for the tests of the services."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.base.hashing import owners, route
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import (
    BatchGradients,
    HyperParameters,
    IDFeatures,
    InitializationSettings,
    LookupResult,
    OptimizerSettings,
    PooledOutput,
    RawOutput,
    SlotGradient,
    TableSigns,
)
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig, ParameterServerConfig
from tests.reference.worker import Weights
from tests.support import kernels

Samples = list[list[int]]


def _stack(rounds: int, size: int) -> dict[str, Any]:
    return {"hash_stack_config": {"hash_stack_rounds": rounds, "embedding_size": size}}


# Every pooling, a group of three slots, hash stacks alone, shared, raw and jagged, two dims,
# and tables that differ in initial values only.
CONFIG: dict[str, Any] = {
    "feature_index_prefix_bit": 8,
    "slots_config": {
        "sum": {"dim": 4},
        "max": {"dim": 4, "pooling": "max"},
        "mean": {"dim": 4, "pooling": "mean"},
        "sqrt": {"dim": 8, "pooling": "sqrt"},
        "jagged": {"dim": 4, "pooling": "jagged"},
        "raw": {"dim": 8, "pooling": "raw", "sample_fixed_size": 3},
        "constant": {"dim": 8, "initialization": {"method": "constant", "value": 0.5}},
        "stack": {"dim": 4, **_stack(2, 7)},
        "stack_mean": {"dim": 4, "pooling": "mean", **_stack(2, 7)},
        "stack_max": {"dim": 8, "pooling": "max", **_stack(3, 5)},
        "stack_raw": {
            "dim": 8,
            "pooling": "raw",
            "sample_fixed_size": 3,
            "padding": "front",
            **_stack(2, 3),
        },
    },
    "feature_groups": {"shared": ["sum", "max", "jagged"], "stacks": ["stack", "stack_mean"]},
}
SCHEMA = EmbeddingSchema.load(CONFIG)


def hashed(*flags: str) -> EmbeddingSchema:
    """The same slots, all with the hash of ``kernels/hash.c`` for ids."""
    name = kernels.load("hash", *flags)
    slots = {slot: {**own, "id_hash": name} for slot, own in CONFIG["slots_config"].items()}
    return EmbeddingSchema.load({**CONFIG, "slots_config": slots})


SETTINGS = HyperParameters(
    InitializationSettings("uniform", {"lower": -1.0, "upper": 1.0}), 1.0, 10.0, 7
)
SGD = OptimizerSettings("sgd", {"lr": 0.5})
ADAM = OptimizerSettings("adam", {"lr": 0.1})
ADAGRAD = OptimizerSettings("adagrad", {"lr": 0.1, "initial_accumulator_value": 1e-8})


def settings(**changes: Any) -> HyperParameters:
    return replace(SETTINGS, **changes)


def features(
    batch: dict[str, Samples],
    batch_id: int = 0,
    *,
    requires_grad: bool = True,
    weights: Weights | None = None,
) -> IDFeatures:
    own = weights or {}
    return IDFeatures(
        tuple(
            FeatureBatch.from_list(
                name, [np.array(x, np.uint64) for x in samples], own.get(name)
            )
            for name, samples in batch.items()
        ),
        batch_id,
        requires_grad,
    )


def make_servers(
    num_servers: int = 1,
    schema: EmbeddingSchema = SCHEMA,
    *,
    hyper: HyperParameters | None = SETTINGS,
    optimizer: OptimizerSettings | None = SGD,
    **config: Any,
) -> list[ParameterServer]:
    servers = [
        ParameterServer(
            schema,
            ParameterServerConfig(**({"memory_limit": 0} | config)),
            replica_index=index,
            replica_size=num_servers,
        )
        for index in range(num_servers)
    ]
    for server in servers:
        if hyper is not None:
            server.configure(hyper)
        if optimizer is not None:
            server.register_optimizer(optimizer)
    return servers


def make_worker(
    servers: list[Any],
    schema: EmbeddingSchema = SCHEMA,
    clock: Any = None,
    num_pooling_threads: int = 1,
    **config: Any,
) -> EmbeddingWorker:
    more: dict[str, Any] = {} if clock is None else {"clock": clock}
    more["num_pooling_threads"] = num_pooling_threads
    return EmbeddingWorker(schema, EmbeddingWorkerConfig(**config), servers, **more)


def gradient(
    result: LookupResult,
    update_id: tuple[int, int] = (0, 0),
    by_name: dict[str, Any] | None = None,
) -> BatchGradients:
    """Gradients of a lookup: those given by name, ones elsewhere."""
    if result.ref is None:
        raise ValueError("a lookup without gradients")
    slots = []
    for output in result.outputs:
        values = output.values if isinstance(output, PooledOutput) else output.rows
        if isinstance(output, RawOutput):
            values = values[1:]  # row 0 is the padding's
        given = (by_name or {}).get(output.name, np.ones_like(values))
        slots.append(SlotGradient(output.name, given))
    return BatchGradients(result.ref, update_id, tuple(slots))


def read_rows(
    servers: list[ParameterServer], signs: dict[int, list[int]]
) -> dict[int, NDArray[np.float32]]:
    """Rows with their state, by sign, of the signs listed by table."""
    rows = {}
    owner = owners(len(servers))
    for table, wanted in signs.items():
        array = np.array(sorted(wanted), np.uint64)
        order, starts = route(array, owner, len(servers))
        for index, server in enumerate(servers):
            mine = array[order[starts[index] : starts[index + 1]]]
            (entries,) = server.read_embedding([TableSigns(table, mine)])
            assert entries.states is not None
            for sign, values, state in zip(
                entries.signs.tolist(),
                entries.values,
                entries.states.view(np.float32),
                strict=True,
            ):
                rows[sign] = np.concatenate([values, state])
    return rows


def sign(name: str, x: int, schema: EmbeddingSchema = SCHEMA) -> int:
    return x | schema.slots[name].prefix


def value(servers: list[ParameterServer], name: str, x: int) -> NDArray[np.float32]:
    """The embedding of one id, without its state."""
    slot, of = SCHEMA.slots[name], sign(name, x)
    return read_rows(servers, {slot.table: [of]})[of][: slot.dim]
