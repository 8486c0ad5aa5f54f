"""What has to be the same for a state file to be a server's, and what its notes say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia._rpc.messages import HyperParameters, InitializationSettings, OptimizerSettings
from persia._server.row_policies import RowPolicies
from persia.config import EmbeddingSchema, ParameterServerConfig, schema_fingerprint
from persia.errors import ConfigError


def facts_of(
    schema: EmbeddingSchema, settings: ParameterServerConfig, index: int, size: int
) -> dict[str, Any]:
    """Return what a server's file says of it, as JSON has it."""
    policies = RowPolicies.of(schema.tables, settings, 1.0)
    return {
        "schema": schema_fingerprint(schema),
        "replica_index": index,
        "replica_size": size,
        "capacity": settings.capacity,
        "num_hashmap_internal_shards": settings.num_hashmap_internal_shards,
        "policies": [list(kind) for kind in policies.kinds],
        "sketch_bytes": policies.sketch_bytes,
    }


def check_facts(found: object, expected: Mapping[str, Any]) -> None:
    """Check what a file says of its server.

    Raises:
        ConfigError: If it is another one's; names every difference.
    """
    known = found if isinstance(found, dict) else {}
    others = [
        f"{name}: expected {value!r}, got {known.get(name)!r}"
        for name, value in expected.items()
        if known.get(name) != value
    ]
    if others:
        raise ConfigError(", ".join(others))


def noted_settings(
    notes: Mapping[str, Any],
) -> tuple[HyperParameters | None, OptimizerSettings | None]:
    """Return what the server had been told, as far as it had.

    Raises:
        ConfigError: If the notes are not those of a server.
    """
    settings = optimizer = None
    try:
        if (found := notes.get("configured")) is not None:
            initialization = InitializationSettings(**found["initialization"])
            settings = HyperParameters(**{**found, "initialization": initialization})
        if (found := notes.get("optimizer")) is not None:
            optimizer = OptimizerSettings(**found)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"notes: expected settings and optimizer, got {error!r}") from None
    return settings, optimizer
