"""Where the two YAML files of a process come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.config import load_configs
from persia.errors import ConfigError


def test_what_is_given_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, config = tmp_path / "slots.yml", tmp_path / "global.yml"
    schema.write_text("slots_config:\n  user:\n    dim: 4\n")
    config.write_text("embedded_config:\n  num_servers: 3\n")
    monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG", raising=False)
    monkeypatch.delenv("PERSIA_GLOBAL_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=r"no embedding config: .*PERSIA_EMBEDDING_CONFIG"):
        load_configs(None, None)
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(schema))
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(config))
    named = load_configs(None, None)
    assert (list(named[0].slots), named[1].embedded_config.num_servers) == (["user"], 3)
    given = load_configs({"slots_config": {"item": {"dim": 8}}}, {})
    assert (list(given[0].slots), given[1].embedded_config.num_servers) == (["item"], 1)
