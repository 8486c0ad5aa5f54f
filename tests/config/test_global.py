"""The global config: defaults, the original's files, sizes of memory, bad values."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia._core.base.hashing import owners
from persia._core.store.store import EmbeddingStore
from persia.config import (
    EmbeddedConfig,
    GlobalConfig,
    ParameterServerConfig,
    resolve_memory_limit,
)
from persia.errors import ConfigError

ORIGINAL = """
common_config:
  metrics_config:
    enable_metrics: false
    push_interval_sec: 20
  job_type: Train
  checkpointing_config:
    num_workers: 8
  infer_config:
    servers: ["10.0.0.1:8888", "10.0.0.2:8888"]
    embedding_checkpoint: /ckpt
embedding_parameter_server_config:
  capacity: 1_000_000
  num_hashmap_internal_shards: 1
  enable_incremental_update: false
  incremental_buffer_size: 5_000_000
  incremental_dir: /workspace/incremental_dir/
embedding_worker_config:
  forward_buffer_size: 1000
"""


def server(**keys: Any) -> ParameterServerConfig:
    source = {"embedding_parameter_server_config": keys}
    return GlobalConfig.load(source).embedding_parameter_server_config


def test_reads_a_file_of_the_original(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "global_config.yml"
    path.write_text(ORIGINAL)
    config = GlobalConfig.load(path)
    assert config.common_config.metrics_config.push_interval_seconds == 20
    assert config.common_config.checkpointing_config.num_workers == 8
    infer = config.common_config.infer_config
    assert infer is not None
    assert infer.servers == ("10.0.0.1:8888", "10.0.0.2:8888")
    assert config.embedding_parameter_server_config.capacity == 1_000_000
    assert config.embedding_parameter_server_config.num_hashmap_internal_shards == 1
    assert caplog.text == ""


def test_defaults() -> None:
    config = GlobalConfig.load(None)
    assert config == GlobalConfig() == GlobalConfig.load({})
    assert GlobalConfig.load(config) is config
    assert config.common_config.job_type == "Train"
    assert config.common_config.metrics_config.enable_metrics is False
    assert config.common_config.infer_config is None
    assert config.embedding_worker_config.forward_buffer_size == 1000
    assert config.embedding_parameter_server_config.capacity == 1_000_000_000
    assert config.embedded_config == EmbeddedConfig(num_servers=1, num_threads=1)


def test_w28_a_section_without_its_keys_has_the_defaults_of_an_absent_one() -> None:
    assert server() == ParameterServerConfig()
    assert GlobalConfig.load({"embedding_parameter_server_config": None}) == GlobalConfig()
    assert server(capacity=None).capacity == 1_000_000_000
    assert server(capacity=5).num_hashmap_internal_shards == 16


def test_w28_push_interval_sec_is_the_same_setting() -> None:
    keys = {"push_interval_sec": 7, "push_interval_seconds": 8}
    source = {"common_config": {"metrics_config": keys}}
    with pytest.raises(ConfigError, match="'push_interval_sec' and 'push_interval_seconds'"):
        GlobalConfig.load(source)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("embedding_parameter_server_config", "incremental_channel_capacity", 10),
        ("common_config", "job_type", "Infer"),
    ],
)
def test_w28_settings_without_effect_say_so(
    section: str, key: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "persia.config"):
        GlobalConfig.load({section: {key: value}})
    assert f"global config: {section}.{key} has no effect in this version" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embeding_worker_config: {}", "unknown key, did you mean 'embedding_worker_config'?"),
        ("common_config: {job_type: train}", "job_type: expected 'Train', 'Eval'"),
        ("common_config: {infer_config: {servers: ['a:1']}}", "embedding_checkpoint: the key"),
        (
            "common_config: {infer_config: {embedding_checkpoint: x, follow_interval_sec: 0}}",
            "follow_interval_sec: expected a number of seconds",
        ),
        (
            "common_config: {infer_config: {embedding_checkpoint: x, row_dtype: f8}}",
            "row_dtype",
        ),
        ("common_config: 3", "common_config: expected a mapping, got 3"),
        ("embedding_parameter_server_config: {capacity: 1.0e+6}", "capacity: expected an int"),
        ("embedding_parameter_server_config: {enable_incremental_update: 1}", "expected true"),
        ("embedding_parameter_server_config: {memory_limit: 0.7}", "expected a memory limit"),
    ],
)
def test_bad_keys_and_values_name_their_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GlobalConfig.load(yaml.safe_load(text))
    assert str(caught.value).startswith("global config: ")
    assert message in str(caught.value)


def test_memory_limit() -> None:
    for limit, want in (
        *((None, 700), (0, 0), (12345, 12345), ("100%", 1000), ("0.5 %", 5), ("512", 512)),
        *(("8GiB", 8 << 30), ("1.5KiB", 1536), ("2MB", 2_000_000), ("512B", 512)),
    ):
        assert resolve_memory_limit(limit, total_bytes=1000) == want, limit
    whole = resolve_memory_limit("100%")
    assert whole > 1 << 20
    assert server().memory_limit_bytes() == int(whole * 0.7)


@pytest.mark.parametrize(
    "limit",
    [-1, True, "", "0%", "101%", "8gib", "1..5", "-3", "GiB", "8388608TiB", 1 << 63, "9" * 400],
)
def test_memory_limit_that_is_none(limit: int | str) -> None:
    with pytest.raises(ConfigError, match="memory limit"):
        resolve_memory_limit(limit, total_bytes=1000)


@pytest.mark.parametrize(
    ("section", "key", "most"),
    [
        ("embedding_parameter_server_config", "capacity", 2**63 - 1),
        ("embedding_parameter_server_config", "num_hashmap_internal_shards", 1024),
        ("embedded_config", "num_servers", 16384),
        ("embedded_config", "num_threads", 1024),
    ],
)
def test_bounds_are_those_of_the_store(section: str, key: str, most: int) -> None:
    loaded = getattr(GlobalConfig.load({section: {key: most}}), section)
    assert getattr(loaded, key) == most
    with pytest.raises(ConfigError, match=rf"{key}: expected an integer in 1\.\.{most}, got"):
        GlobalConfig.load({section: {key: most + 1}})
    EmbeddingStore(2**63 - 1, num_shards=1024, num_threads=1, memory_limit=2**63 - 1)
    assert owners(16384).max() == 16383


def test_the_sketch_follows_capacity_and_memory_limit() -> None:
    assert ParameterServerConfig(capacity=1000, memory_limit="1GiB").sketch_bytes() == 4000
    assert ParameterServerConfig(memory_limit="1GiB").sketch_bytes() == 1 << 25
    assert 0 < ParameterServerConfig(memory_limit=0).sketch_bytes() < 4_000_000_000
    assert ParameterServerConfig(memory_limit=16).sketch_bytes() == 64
    assert ParameterServerConfig(admission_sketch_bytes=64).sketch_bytes() == 64
    with pytest.raises(ConfigError, match="admission_sketch_bytes: expected an integer in 1"):
        server(admission_sketch_bytes=0)


def test_inference_needs_a_checkpoint_only() -> None:
    config = GlobalConfig.load(
        {"common_config": {"job_type": "Infer", "infer_config": {"embedding_checkpoint": "x"}}}
    )
    infer = config.common_config.infer_config
    assert infer is not None
    assert (infer.servers, infer.incremental_dir) == ((), "")
    assert (infer.follow_interval_sec, infer.row_dtype) == (1.0, "float32")
