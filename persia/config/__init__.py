"""The two YAML files as frozen dataclasses, checked whole before anything uses them.

``GlobalConfig`` says how servers are set up; ``EmbeddingSchema`` says which features (slots)
there are and which of them share rows; ``GroupSettings`` says how the rows of one group are
kept and trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from persia import env
from persia.config._compare import (
    SAME_EVERYWHERE,
    describe_differences,
    list_differences,
    schema_fingerprint,
)
from persia.config._global import (
    CheckpointingConfig,
    CommonConfig,
    EmbeddedConfig,
    EmbeddingWorkerConfig,
    GlobalConfig,
    InferConfig,
    MetricsConfig,
    ParameterServerConfig,
    WireConfig,
    resolve_memory_limit,
)
from persia.config._schema import (
    EVICTION_POLICY,
    ID_HASH,
    OPTIMIZERS,
    POOLINGS,
    USUAL_SIZE,
    EmbeddingSchema,
    GroupAdmission,
    GroupEviction,
    GroupOptimizer,
    GroupSettings,
    Initialization,
    Padding,
    Pooling,
    Slot,
    TableSettings,
    tables_at_rate,
)
from persia.errors import ConfigError

__all__ = [
    "EVICTION_POLICY",
    "ID_HASH",
    "OPTIMIZERS",
    "POOLINGS",
    "SAME_EVERYWHERE",
    "USUAL_SIZE",
    "CheckpointingConfig",
    "CommonConfig",
    "ConfigSource",
    "EmbeddedConfig",
    "EmbeddingSchema",
    "EmbeddingWorkerConfig",
    "GlobalConfig",
    "GroupAdmission",
    "GroupEviction",
    "GroupOptimizer",
    "GroupSettings",
    "InferConfig",
    "Initialization",
    "MetricsConfig",
    "Padding",
    "ParameterServerConfig",
    "Pooling",
    "Slot",
    "TableSettings",
    "WireConfig",
    "describe_differences",
    "list_differences",
    "load_configs",
    "resolve_memory_limit",
    "schema_fingerprint",
    "tables_at_rate",
]

# A mapping as YAML has it, or the path of a file.
ConfigSource = str | os.PathLike[str] | Mapping[str, object]


def load_configs(
    schema: ConfigSource | EmbeddingSchema | None, config: ConfigSource | None
) -> tuple[EmbeddingSchema, GlobalConfig]:
    """Load the two YAML files; None reads the one that the environment names.

    Raises:
        ConfigError: If there is no embedding config, or one of the two cannot be used.
    """
    if schema is None:
        schema = env.embedding_config_path()
    if schema is None:
        raise ConfigError(
            "no embedding config: pass embedding_config= (a mapping, the path of a YAML "
            "file, or an EmbeddingConfig with schema=), or set PERSIA_EMBEDDING_CONFIG"
        )
    if config is None:
        config = env.global_config_path()
    return EmbeddingSchema.load(schema), GlobalConfig.load(config)
