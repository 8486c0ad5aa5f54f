"""Models take what their fields say and nothing else, and errors lead to the value."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from persia.config import (
    InvalidValue,
    Listed,
    Named,
    check_probability,
    integer,
    show,
    validate,
)
from persia.config._models import Expect, Section
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
        (
            {"inner": {"size": 1, "rate": "1e3"}},
            "inner.rate",
            "got '1e3'; write 1.0e+3",
        ),
        ({"inner": {"size": 1, "kind": "too"}}, "inner.kind", "'too', did you mean 'two'?"),
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


def test_pydantic_is_imported_with_the_first_document() -> None:
    program = (
        "import sys, persia, persia.launcher, persia.ctx, persia._files.manifest\n"
        "assert 'pydantic' not in sys.modules\n"
        "persia.config.EmbeddingSchema.load({'slots_config': {'a': {'dim': 8}}})\n"
        "assert 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
