"""The files of configs: how they are opened, and the line that an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.config import EmbeddingSchema, GlobalConfig
from persia.errors import ConfigError


def test_w28_unknown_key_names_file_path_and_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text("slots_config:\n  age:\n    dim: 8\n    embeding_summation: false\n")
    with pytest.raises(ConfigError) as caught:
        EmbeddingSchema.load(path)
    assert str(caught.value) == (
        f"{path}:4: slots_config.age.embeding_summation: unknown key, "
        "did you mean 'embedding_summation'?"
    )


def test_two_files_that_were_swapped_are_said_to_be(tmp_path: Path) -> None:
    slots, common = tmp_path / "slots.yml", tmp_path / "common.yml"
    slots.write_text("slots_config: {age: {dim: 8}}\n")
    common.write_text("embedding_worker_config: {forward_buffer_size: 9}\n")
    for cls, path, says in (
        (EmbeddingSchema, common, "expected the embedding config, got one with 'embedding_w"),
        (GlobalConfig, slots, "expected the global config, got one with 'slots_config', which"),
    ):
        with pytest.raises(ConfigError, match=f"{path}: {says}.* swapped?"):
            cls.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping, got nothing"),
        ("- a\n", "expected a mapping, got a list"),
        ("just words\n", "expected a mapping, got 'just words'"),
        ("slots_config: {\n", "expected YAML"),
        (
            "slots_config:\n  a: {dim: 8}\n  a: {dim: 9}\n",
            ":3: key 'a' is already given in line 2",
        ),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        EmbeddingSchema.load(str(path))
    assert str(caught.value).startswith(f"{path}:")
    assert message in str(caught.value)


def test_w39_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "none.yml"
    with pytest.raises(ConfigError, match=f"embedding config: .*{path}"):
        EmbeddingSchema.load(path)


def test_w39_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yml"
    path.touch()

    def refuse(self: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    # Not by chmod, which does not keep root out.
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=f"embedding config: .*Permission denied.*{path}"):
        EmbeddingSchema.load(path)


def test_a_source_of_another_type() -> None:
    with pytest.raises(ConfigError, match="embedding config: expected a path or a mapping"):
        EmbeddingSchema.load(7)  # type: ignore[arg-type]
