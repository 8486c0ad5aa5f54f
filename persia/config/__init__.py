"""The two YAML files as frozen dataclasses, checked whole before anything uses them.

``GlobalConfig`` says how servers are set up; ``EmbeddingSchema`` says which features (slots)
there are and which of them share rows; ``GroupSettings`` says how the rows of one group are
kept and trained.
"""

from persia.config._compare import (
    SAME_EVERYWHERE,
    describe_differences,
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
    resolve_memory_limit,
)
from persia.config._groups import GroupAdmission, GroupEviction, GroupOptimizer, GroupSettings
from persia.config._lines import with_line
from persia.config._reading import check_probability, nearest
from persia.config._schema import (
    POOLINGS,
    EmbeddingSchema,
    Initialization,
    Pooling,
    Slot,
    Table,
    tables_at_rate,
)

__all__ = [
    "POOLINGS",
    "SAME_EVERYWHERE",
    "CheckpointingConfig",
    "CommonConfig",
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
    "ParameterServerConfig",
    "Pooling",
    "Slot",
    "Table",
    "check_probability",
    "describe_differences",
    "nearest",
    "resolve_memory_limit",
    "schema_fingerprint",
    "tables_at_rate",
    "with_line",
]
