"""The settings that parameter servers get before training."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import pickle
from typing import Any

import pytest

from persia import embedding
from persia._core.kernels.initial import OPTIONS
from persia._rpc.messages import HyperParameters, InitializationSettings
from persia.config import EmbeddingSchema
from persia.embedding import (
    Constant,
    EmbeddingConfig,
    Gamma,
    InitialValues,
    NativeInitialValues,
    Normal,
    Poisson,
    TruncatedNormal,
    Uniform,
    Zeros,
    get_default_embedding_config,
)
from persia.errors import ConfigError
from tests.support import kernels


def test_defaults() -> None:
    config = get_default_embedding_config()
    assert config == EmbeddingConfig()
    assert config.settings() == HyperParameters(
        initialization=InitializationSettings("uniform", {"lower": -0.01, "upper": 0.01}),
        admit_probability=1.0,
        weight_bound=10.0,
        seed=0,
    )


def test_positional_as_in_the_original() -> None:
    settings = EmbeddingConfig((-1, 1), 0.5, -1, seed=2**64 - 1).settings()
    assert settings.initialization.options == {"lower": -1.0, "upper": 1.0}
    assert (settings.admit_probability, settings.weight_bound) == (0.5, -1.0)
    assert settings.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (Uniform(), {"lower": -0.01, "upper": 0.01}),
        (Normal(standard_deviation=2), {"mean": 0.0, "standard_deviation": 2.0}),
        (TruncatedNormal(1.0), {"mean": 1.0, "standard_deviation": 0.01}),
        (Gamma(2, 3), {"shape": 2.0, "scale": 3.0}),
        (Poisson(4), {"lam": 4.0}),
        (Zeros(), {}),
        (Constant(5), {"value": 5.0}),
    ],
)
def test_distributions(values: InitialValues, want: dict[str, float]) -> None:
    settings = EmbeddingConfig(values).settings().initialization
    assert settings == InitializationSettings(values.method, want)


def test_distributions_are_those_of_the_core_with_its_defaults() -> None:
    public = {getattr(embedding, name) for name in embedding.__all__}
    mine = {
        cls.method: {
            f.name: None if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(cls)
        }
        for cls in public & {*InitialValues.__subclasses__()} - {NativeInitialValues}
    }
    assert mine == OPTIONS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"admit_probability": 1.01}, "admit_probability: expected a probability in 0..1"),
        ({"weight_bound": math.nan}, "weight_bound must be finite in f32, got nan"),
        ({"weight_bound": math.inf}, "weight_bound must be finite in f32, got inf"),
        ({"weight_bound": "10"}, "weight_bound must be a number, got '10'"),
        ({"weight_bound": None}, "weight_bound must be a number, got None"),
        ({"emb_initialization": (1.0, -1.0)}, "lower must be below upper .* got 1.0 and -1.0"),
        ({"emb_initialization": (1.0,)}, r"expected \(lower, upper\) or a distribution"),
        ({"emb_initialization": 3}, r"expected \(lower, upper\) or a distribution"),
        ({"seed": -1}, r"seed: expected an integer in 0..2\*\*64 - 1, got -1"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        (
            {"schema": {"slots": {}}},
            "indented below the key slots_config, .*, got slots",
        ),
        ({"schema": "no/such/file.yml"}, "embedding config: expected a YAML file at"),
    ],
)
def test_w39_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingConfig(**arguments)


def test_distributions_check_themselves() -> None:
    with pytest.raises(ConfigError, match="expected one of the distributions"):
        InitialValues()
    with pytest.raises(ConfigError, match="standard_deviation must be above 0"):
        Normal(0.0, -1.0)


def test_schema_is_read_at_once() -> None:
    schema = EmbeddingConfig(schema={"slots_config": {"a": {"dim": 4}}}).schema
    assert isinstance(schema, EmbeddingSchema)
    assert EmbeddingConfig(schema=schema).schema is schema


def test_native_initial_values_name_their_library() -> None:
    path = kernels.library("initial")
    values = NativeInitialValues(kernels.FOLDER / "initial.c", params={"lower": -1})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    settings = EmbeddingConfig(values).settings().initialization
    assert (settings.method, values.library) == (f"native:initial:{digest}", path)
    assert (settings.options["lower"], settings.options["upper"]) == (-1.0, 0.01)
    assert repr(values).startswith(f"NativeInitialValues('native:initial:{digest}', lower=-1.0")
    same = NativeInitialValues(path, params={"lower": -1.0})
    assert (same == values, hash(same) == hash(values)) == (True, True)
    assert NativeInitialValues(path) != values
    assert Zeros() != values
    assert pickle.loads(pickle.dumps(values)) == copy.deepcopy(values) == values


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("initial", {"params": {"low": 1}}, "has no option 'low', did you mean 'lower'"),
        ("initial", {"params": {"lower": math.nan}}, "lower must be finite"),
        ("initial", {"name": "a-b"}, "NativeInitialValues: name must be an identifier"),
        ("adagrad", {}, "expected a library with an initializer, it has its optimizer"),
    ],
)
def test_native_initial_values_that_cannot_be_used(
    source: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        NativeInitialValues(kernels.library(source), **options)
