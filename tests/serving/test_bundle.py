"""What a bundle's files may say, and versions in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash
import yaml

from persia._serving.bundle import (
    CURRENT,
    Bundle,
    ServedFile,
    _kept_schema_of,
    check_name,
    current_version,
    new_version,
    read_plain,
    schema_document,
    versions,
)
from persia._serving.bundle import (
    SCHEMA as SCHEMA_NAME,
)
from persia.config import EmbeddingSchema, schema_fingerprint
from persia.errors import CheckpointError, ConfigError
from tests.serving.models import SCHEMA


def test_a_config_is_written_as_it_was(tmp_path: Path) -> None:
    schema = EmbeddingSchema.load(SCHEMA)
    (tmp_path / "config.yml").write_text(schema_document(schema))
    found = EmbeddingSchema.load(tmp_path / "config.yml")
    assert found.slots == schema.slots
    assert schema_fingerprint(found) == schema_fingerprint(schema)


def test_a_config_keeps_what_tells_tables_apart() -> None:
    groups: dict[str, dict[str, Any]] = {
        "a": {"optimizer": {}},
        "b": {"optimizer": {"name": "adagrad", "lr": 0.5}},
        "c": {"optimizer": {"lr": 0.25}},
        "d": {"eviction": {"policy": "lfu", "ttl_seconds": 5.0}},
        "e": {"admission": {"policy": "count", "threshold": 3}, "dtype": "float16"},
        "f": {},
    }
    schema = EmbeddingSchema.load(
        {"slots_config": {name: {"dim": 4} for name in groups}, "group_settings": groups}
    )
    found = EmbeddingSchema.load(yaml.safe_load(schema_document(schema)))
    assert found == schema


def test_the_embedding_config_is_the_files_and_parsed_once(tmp_path: Path) -> None:
    other = tmp_path / "other.yml"
    other.write_text(schema_document(EmbeddingSchema.load(SCHEMA)))
    parsed = _kept_schema_of.cache_info()
    found = [_config_of(tmp_path / name, other.read_bytes()) for name in ("a", "b")]
    assert found[0] is found[1]
    assert _kept_schema_of.cache_info().misses <= parsed.misses + 1
    for data in (str(other).encode(), b"", b"[1]", b"slots_config: [", b"\xff"):
        with pytest.raises(CheckpointError, match=r"c/.*\.y.?ml: .*expected"):
            _config_of(tmp_path / "c", data)


def _config_of(folder: Path, data: bytes) -> EmbeddingSchema:
    folder.mkdir(exist_ok=True)
    (folder / SCHEMA_NAME).write_bytes(data)
    file = ServedFile(len(data), xxhash.xxh3_128_hexdigest(data))
    return Bundle(folder, Mock(files={SCHEMA_NAME: file})).schema()


def test_a_version_that_is_not_published_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "clicks"
    with pytest.raises(ValueError, match="no such output"), new_version(folder):
        raise ValueError("no such output")
    assert not folder.exists()
    with new_version(folder) as aside:
        aside.rename(folder / "1")
    assert [one.name for one in folder.iterdir()] == ["1"]


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    for text in ("", "[]", "{}", '{"format": "persia-model", "format_version": 2}'):
        (folder / "persia-model.json").write_text(text)
        with pytest.raises(CheckpointError, match="persia-model"):
            Bundle.open(folder)
    (folder / "persia-model.json").unlink()
    (folder / "persia-model.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Bundle.open(folder)


def test_a_size_that_a_manifest_says_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_plain(tmp_path / "file", 1 << 60) == b"content"


def test_names_and_versions(tmp_path: Path) -> None:
    assert versions(tmp_path / "none") == []
    assert current_version(tmp_path) is None
    (tmp_path / CURRENT).write_text(json.dumps({"version": "../1"}))
    with pytest.raises(CheckpointError, match="version"):
        current_version(tmp_path)
    for name in ("", "..", "a/b", ".x", "a" * 101):
        with pytest.raises(ConfigError):
            check_name(name)
