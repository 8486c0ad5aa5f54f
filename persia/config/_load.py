"""The two YAML files of a process: those its script gives, or the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping

from persia import env
from persia.config import EmbeddingSchema, GlobalConfig
from persia.errors import ConfigError

# A mapping as YAML has it, or the path of a file.
ConfigSource = str | os.PathLike[str] | Mapping[str, object]


def load_configs(
    schema: ConfigSource | EmbeddingSchema | None, config: ConfigSource | None
) -> tuple[EmbeddingSchema, GlobalConfig]:
    """Load both; None reads the file that the environment names.

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
