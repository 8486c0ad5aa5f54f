"""Where served rows come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia._files import catalog
from persia._files.storage import LocalStorage
from persia._rows.row_source import RowSource, SchemaMatch, open_checkpoint, open_log
from persia.config import EmbeddingSchema
from persia.errors import CheckpointError, ConfigError
from tests.support.saving import Trained, dump, train, writing_changes
from tests.support.services import SCHEMA, make_worker


def test_a_newer_checkpoint_is_found_only_where_it_is_asked_for(
    dumped: Trained, tmp_path: Path
) -> None:
    first = catalog.latest(LocalStorage(tmp_path))
    assert first is not None
    source = RowSource(checkpoint=str(tmp_path), follows_newer=True)
    assert source.newer_than("") == first
    assert source.newer_than(first) is None
    dump(dumped[0], tmp_path, keep_last=2)
    newer = source.newer_than(first)
    assert newer == catalog.latest(LocalStorage(tmp_path)) != first
    assert source.newer_than(newer or "") is None
    assert RowSource(checkpoint=str(tmp_path)).newer_than(first) is None
    assert open_checkpoint(str(tmp_path)).version == newer
    assert open_checkpoint(str(tmp_path), first).version == first


def test_what_is_not_there_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError):
        open_log(str(tmp_path))
    with pytest.raises(ConfigError, match="expected a checkpoint or a change log"):
        RowSource()


def test_packets_of_servers_are_a_checkpoint_too(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path, 2)
    worker = make_worker(servers)

    train(worker, 0, 1)
    worker.flush_changes()
    opened = open_checkpoint(str(tmp_path))
    assert opened.version == ""
    assert len(opened.chains) == 2
    for server in servers:
        server.close()


def test_rows_of_another_config_are_refused(dumped: Trained, tmp_path: Path) -> None:
    saved = open_checkpoint(str(tmp_path)).chains[0].manifests[-1].schema
    match = SchemaMatch(SCHEMA)
    assert match.mapping(saved) is match.mapping(saved)
    other = EmbeddingSchema.load(
        {"feature_index_prefix_bit": 8, "slots_config": {"sum": {"dim": 16}}}
    )
    with pytest.raises(ConfigError, match="does not fit"):
        SchemaMatch(other).mapping(saved)
