"""The two YAML files as frozen dataclasses, checked whole before anything uses them.

``GlobalConfig`` says how servers are set up; ``EmbeddingSchema`` says which features (slots)
there are and which of them share rows; ``GroupSettings`` says how the rows of one group are
kept and trained.
"""

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
    resolve_memory_limit,
)
from persia.config._groups import GroupAdmission, GroupEviction, GroupOptimizer, GroupSettings
from persia.config._models import (
    Expect,
    InvalidValue,
    Listed,
    Model,
    Named,
    check_probability,
    integer,
    show,
    validate,
)
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
    "Expect",
    "GlobalConfig",
    "GroupAdmission",
    "GroupEviction",
    "GroupOptimizer",
    "GroupSettings",
    "InferConfig",
    "Initialization",
    "InvalidValue",
    "Listed",
    "MetricsConfig",
    "Model",
    "Named",
    "ParameterServerConfig",
    "Pooling",
    "Slot",
    "Table",
    "check_probability",
    "describe_differences",
    "integer",
    "list_differences",
    "resolve_memory_limit",
    "schema_fingerprint",
    "show",
    "tables_at_rate",
    "validate",
]
