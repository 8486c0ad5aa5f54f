"""Models take what their fields say and nothing else; errors lead to the value's line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from persia.config import EmbeddingSchema, GlobalConfig
from persia.config.document import (
    Expect,
    InvalidValue,
    Listed,
    Named,
    Section,
    check_probability,
    integer,
    show,
    validate,
)
from persia.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Inner(Section):
    size: Annotated[int, integer(1, 9)]
    kind: Literal["one", "two"] = "one"
    rate: float = 0.5


@dataclass(frozen=True, slots=True)
class Outer(Section):
    inner: Inner
    names: Listed[tuple[str, ...]] = ()
    others: Named[Inner] = field(default_factory=dict, metadata={"aliases": ("old",)})
    word: Annotated[str, Expect("a hexadecimal digit", pattern="^[0-9a-f]$")] = "0"

    def check(self) -> None:
        if self.names and not self.others:
            raise InvalidValue("expected others beside names", "others")


def test_values_are_taken_as_they_are() -> None:
    found = validate(Outer, {"inner": {"size": 1, "rate": 2, "kind": None}, "names": None})
    assert found == Outer(Inner(1, rate=2.0))
    assert validate(
        Outer, {"inner": {"size": 1}, "old": {"a": {"size": 2}}, "names": ["x"]}
    ) == (Outer(Inner(1), ("x",), {"a": Inner(2)}))


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"inner": None}, "inner", "the key is required"),
        ({"inner": {}}, "inner.size", "the key is required"),
        ({"inner": {"size": 10}}, "inner.size", "expected an integer in 1..9, got 10"),
        ({"inner": {"size": "1"}}, "inner.size", "expected an integer in 1..9, got '1'"),
        ({"inner": {"size": 1, "rate": "1e3"}}, "inner.rate", "expected a number, got '1e3'"),
        ({"inner": {"size": 1, "kind": "too"}}, "inner.kind", "'one' or 'two', got 'too'"),
        ({"inner": {"size": 1, "siz": 1}}, "inner.siz", "unknown key, did you mean 'size'?"),
        ({"names": ["a", 2]}, "names[1]", "expected a string, got 2"),
        ({"names": "a"}, "names", "expected a list, got 'a'"),
        ({"names": ["a"]}, "others", "expected others beside names"),
        ({"others": {3: {}}}, "others", "expected names as keys, got 3; put it in quotes"),
        ({"others": {}, "old": {}}, "", "'others' and 'old' are the same setting"),
        ({"word": "x"}, "word", "expected a hexadecimal digit, got 'x'"),
    ],
)
def test_an_error_leads_to_its_value(change: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        validate(Outer, {"inner": {"size": 1}} | change)
    assert caught.value.path == path
    assert message in str(caught.value)
    assert caught.value.at("f").startswith(f"f: {path}")


def test_a_value_of_any_size_is_shown_short() -> None:
    assert show("x" * 1000) == "'" + "x" * 79 + "..."
    assert (show({"a": 1}), show([1]), show(None)) == ("a mapping", "a list", "nothing")


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "1"])
def test_what_is_no_probability(value: Any) -> None:
    check_probability("p", 1.0)
    with pytest.raises(ConfigError, match=r"p: expected a probability in 0\.\.1"):
        check_probability("p", value)


# --- files -----------------------------------------------------------------------------------


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
        (EmbeddingSchema, common, "embedding_worker_config: unknown key: it is of the global"),
        (GlobalConfig, slots, "slots_config: unknown key: it is of the embedding"),
    ):
        with pytest.raises(
            ConfigError, match=rf"{path}:1: {says} config; are the two swapped\?"
        ):
            cls.load(path)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    for text, message in (
        ("", "expected a mapping, got nothing"),
        ("- a\n", "expected a mapping, got a list"),
        ("slots_config: {\n", "expected YAML"),
        ("slots_config:\n  a: {dim: 8}\n  a: {dim: 9}\n", "3: key 'a' is given twice"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"^{path}:.*{message}"):
            EmbeddingSchema.load(str(path))


def test_w39_a_file_that_is_missing_or_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yml"
    with pytest.raises(ConfigError, match=f"embedding config: .*{path}"):
        EmbeddingSchema.load(path)
    path.touch()

    def refuse(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    # Not by chmod, which does not keep root out.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=f"embedding config: .*Permission denied.*{path}"):
        EmbeddingSchema.load(path)
    with pytest.raises(ConfigError, match="embedding config: expected a path or a mapping"):
        EmbeddingSchema.load(7)  # type: ignore[arg-type]
