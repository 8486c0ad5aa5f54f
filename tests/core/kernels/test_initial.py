from __future__ import annotations

import math
import pickle
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persia._core.base.halves import DTYPES
from persia._core.kernels.initial import MAX_LAM, OPTIONS, Initializer, elementary
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia.errors import ConfigError, DataError, KernelError
from tests.reference import initial as model
from tests.support import kernels
from tests.support.profiles import tries

if TYPE_CHECKING:
    from numpy.typing import NDArray

STANDARD = NormalDist()

METHODS: dict[str, dict[str, float]] = {
    "uniform": {"lower": -0.5, "upper": 0.25},
    "normal": {"mean": 0.5, "standard_deviation": 2.0},
    "truncated_normal": {"mean": -1.0, "standard_deviation": 0.5},
    "gamma": {"shape": 2.5, "scale": 0.5},
    "poisson": {"lam": 3.5},
    "zeros": {},
    "constant": {"value": 0.125},
}

WORDS = st.integers(0, 2**64 - 1)


def draws(method: str, options: dict[str, float], count: int = 20_000) -> NDArray[np.float64]:
    """``count`` values, from rows of 50 with consecutive signs."""
    initializer = Initializer(method, **options)
    rows = [initializer.values(3, sign, 50) for sign in range(count // 50)]
    return np.concatenate(rows).astype(np.float64)


OF_ALL_SIZES = [
    *METHODS.items(),
    ("gamma", {"shape": 0.3, "scale": 2.0}),
    ("gamma", {"shape": 0.01, "scale": 1}),
    *(("poisson", {"lam": lam}) for lam in (0.01, 31.9, 32.0, 32.1, 700.0)),
]


@pytest.mark.parametrize(("method", "options"), OF_ALL_SIZES)
@tries(20)
@given(seed=WORDS, sign=WORDS, dim=st.integers(1, 70))
def test_values_agree_with_the_model(
    method: str, options: dict[str, float], seed: int, sign: int, dim: int
) -> None:
    initializer = Initializer(method, **options)
    got = initializer.values(seed, sign, dim)
    # A shorter row is the beginning of the longer.
    assert got.tolist() == initializer.values(seed, sign, 71)[:dim].tolist()
    want = model.values(method, initializer.options, seed, sign, dim)
    assert got.dtype == np.float32
    if method in ("uniform", "poisson", "zeros", "constant"):
        assert got.tolist() == want.tolist()
    else:
        # The model's log is libm's; one rounding to f32 may fall to the other side.
        rtol = 1e-6 if options.get("shape", 1) < 1 else 1.2e-7
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-9)


def test_log_exp_and_quantile_are_exact_to_a_few_ulp() -> None:
    rng = np.random.default_rng(0)
    for x in [*rng.random(2000), *(rng.random(500) * 1e-8), 0.5, 2.0**-53, 1 - 2.0**-53]:
        log, exp, quantile = elementary(float(x))
        assert math.isclose(log, math.log(x), rel_tol=1e-15)
        assert math.isclose(exp, math.exp(x), rel_tol=1e-15)
        assert math.isclose(quantile, STANDARD.inv_cdf(float(x)), rel_tol=2e-15)
    for x in (1.0, 1e-300 * 2, 1e300, 2.0, 1.4142135623730951, 0.7071067811865476, 7.5):
        assert math.isclose(elementary(x)[0], math.log(x), rel_tol=1e-15, abs_tol=1e-300)
    for x in (-700.0, -32.0, -1e-9, 0.0, 700.0):
        assert math.isclose(elementary(x)[1], math.exp(x), rel_tol=1e-15)


# Bits of the first four values for seed 42 and sign 2^63 + 12345. Frozen: rows that were
# never trained must come out the same on every machine and in every version.
GOLDEN: dict[str, list[str]] = {
    "uniform": ["bd9043d4", "be1427c6", "bece478b", "be5e567a"],
    "normal": ["3f5de203", "3ebc96b2", "bfe0fc51", "be00e508"],
    "truncated_normal": ["bf699bc2", "bf840571", "bfc3584a", "bf9316a6"],
    "gamma": ["3eb17d3f", "40045847", "3f33bdcf", "3fddb5a3"],
    "poisson": ["40000000", "40c00000", "40800000", "40400000"],
    "zeros": ["00000000", "00000000", "00000000", "00000000"],
    "constant": ["3e000000", "3e000000", "3e000000", "3e000000"],
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_values_have_the_recorded_bits(method: str) -> None:
    values = Initializer(method, **METHODS[method]).values(42, 2**63 + 12345, 4)
    assert [f"{word:08x}" for word in values.view(np.uint32)] == GOLDEN[method]


@pytest.mark.parametrize(("shape", "scale"), [(2.5, 0.5), (0.3, 2.0), (1.0, 1.0)])
def test_gamma_follows_the_distribution(shape: float, scale: float) -> None:
    values = np.sort(draws("gamma", {"shape": shape, "scale": scale}))
    n = len(values)
    shapes = torch.full((n,), shape, dtype=torch.float64)
    want = torch.special.gammainc(shapes, torch.from_numpy(values / scale)).numpy()
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) would be passed once in a hundred seeds.
    assert np.abs(want - (np.arange(n) + 0.5) / n).max() < 1.63 / math.sqrt(n)


@pytest.mark.parametrize("lam", [0.5, 3.5, 100.0])
def test_poisson_follows_the_distribution(lam: float) -> None:
    values = draws("poisson", {"lam": lam})
    n = len(values)
    assert abs(values.mean() - lam) < 4 * math.sqrt(lam / n)
    cumulated = 0.0
    for k in range(int(lam + 10 * math.sqrt(lam)) + 2):
        cumulated += math.exp(k * math.log(lam) - lam - math.lgamma(k + 1))
        assert abs((values <= k).mean() - cumulated) < 1.63 / math.sqrt(n)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-0.01, 0.01), (0.1, 0.3), (1e6, 1e6 + 1), (1.0, 1.0000002), (-3e38, 3e38)],
)
def test_uniform_stays_below_its_upper_bound(lower: float, upper: float) -> None:
    values = draws("uniform", {"lower": lower, "upper": upper})
    assert np.float32(lower) <= values.min()
    assert values.max() < np.float32(upper)


def test_no_value_is_out_of_its_range() -> None:
    values = draws("truncated_normal", {"mean": 1.0, "standard_deviation": 0.25}, 50_000)
    assert 0.5 <= values.min() < 0.502
    assert 1.498 < values.max() <= 1.5
    values = draws("gamma", {"shape": 1e-3, "scale": 1.0})
    assert 0 <= values.min() <= values.max() < np.inf


def test_neighbouring_signs_and_elements_are_uncorrelated() -> None:
    initializer = Initializer("uniform", lower=-1, upper=1)
    rows = np.array([initializer.values(0, sign, 16) for sign in range(4000)])
    correlations = np.corrcoef(np.concatenate([rows[:-1], rows[1:]], axis=1).T)
    np.fill_diagonal(correlations, 0.0)
    # The overlap of the two halves is the same column, shifted by one sign.
    assert np.abs(correlations).max() < 5 / math.sqrt(4000)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("unifrom", {}, "initialization: expected one of .* got 'unifrom', did you mean 'uniform'"),
    (5, {}, "initialization: expected one of .* got 5"),  # type: ignore[list-item]
    ("uniform", {"low": 0.0}, "initialization uniform has no option 'low'.*'lower'"),
    ("uniform", {"lower": 1.0, "upper": 1.0}, "lower must be below upper"),
    ("uniform", {"lower": 1.0, "upper": 1.0 + 1e-12}, "lower must be below upper"),
    ("uniform", {"lower": float("nan")}, "lower must be finite"),
    ("uniform", {"upper": "1"}, "upper must be a number, got '1'"),
    ("normal", {"standard_deviation": 0.0}, "standard_deviation must be above 0, got 0.0"),
    ("truncated_normal", {"standard_deviation": -1}, "standard_deviation must be above 0"),
    ("gamma", {"shape": 1.0}, "gamma: scale must be a number, it was not given"),
    ("gamma", {"shape": 1e-4, "scale": 1.0}, "shape must be at least 1e-3"),
    ("gamma", {"shape": 1.0, "scale": 0.0}, "scale must be above 0"),
    ("poisson", {"lam": 0.0}, "lam must be above 0"),
    ("poisson", {"lam": MAX_LAM * 1.01}, "lam must be at most"),
    ("zeros", {"value": 1.0}, "initialization zeros has no option 'value'"),
    ("constant", {}, "value must be a number, it was not given"),
    ("constant", {"value": float("inf")}, "value must be finite"),
]


def test_bad_settings_name_the_option() -> None:
    for method, options, message in BAD:
        with pytest.raises(ConfigError, match=message):
            Initializer(method, **options)
    assert sorted(METHODS) == sorted(OPTIONS)  # all are tested here


def test_initializers_compare_by_settings_and_survive_pickling() -> None:
    one = Initializer("normal", mean=1)
    assert Initializer() == Initializer("uniform", lower=-0.01, upper=0.01)
    assert one == Initializer("normal", mean=1.0, standard_deviation=0.01)
    assert hash(one) == hash(Initializer("normal", mean=1.0))
    assert one != Initializer("truncated_normal", mean=1)
    assert one != "normal"
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("method", "options"), OF_ALL_SIZES)
def test_rows_are_those_that_a_store_inserts(
    level: str, method: str, options: dict[str, float], dtype: str
) -> None:
    dim, seed = 19, 2**63 + 11
    signs = np.append(np.arange(40, dtype=np.uint64) << np.uint64(50), np.uint64(2**64 - 1))
    initializer = Initializer(method, **options)
    store = EmbeddingStore(1000, num_shards=2, seed=seed)
    store.configure(RowOptimizer("sgd", lr=0.5))
    inserted = np.empty((len(signs), dim), np.float32)
    hints = np.empty(len(signs), np.uint32)
    store.lookup_train(signs, initializer, 1.0, 0, inserted, hints, dtype=dtype)
    rows = np.full_like(inserted, np.nan)
    initializer.fill_rows(seed, signs, rows, dtype)
    assert rows.tobytes() == inserted.tobytes()
    assert store.lookup_eval(signs, inserted, dtype=dtype) == 0
    assert rows.tobytes() == inserted.tobytes()


def test_rows_of_another_number_or_dtype_are_refused() -> None:
    signs, initializer = np.arange(3, dtype=np.uint64), Initializer()
    with pytest.raises(DataError, match="rows_out must have one row a sign, 3, got 2"):
        initializer.fill_rows(1, signs, np.empty((2, 4), np.float32))
    with pytest.raises(ConfigError, match="dtype"):
        initializer.fill_rows(1, signs, np.empty((3, 4), np.float32), "int8")
    initializer.fill_rows(1, signs[:0], np.empty((0, 4), np.float32))


# --- by a user's kernel, which has the formula of uniform -------------------------------------


def native(**options: float) -> Initializer:
    return Initializer(kernels.load("initial"), **options)


@tries(50)
@given(
    seed=WORDS,
    sign=WORDS,
    dim=st.integers(1, 70),
    lower=st.floats(-1, 0.5, width=32),
    upper=st.floats(0.625, 2, width=32),
)
def test_values_of_a_kernel_in_c_agree_with_the_model(
    seed: int, sign: int, dim: int, lower: float, upper: float
) -> None:
    bounds = {"lower": lower, "upper": upper}
    want = model.values("uniform", bounds, seed, sign, dim)
    assert native(**bounds).values(seed, sign, dim).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_inserts_the_rows_of_a_kernel(dtype: str) -> None:
    signs = np.arange(3000, dtype=np.uint64) << np.uint64(40)
    found = []
    for initializer in (native(lower=-1, upper=1), Initializer("uniform", lower=-1, upper=1)):
        store = EmbeddingStore(5000, num_shards=4, seed=9, num_threads=2)
        store.configure(RowOptimizer("adagrad", initial_accumulator_value=0.5))
        rows = np.empty((len(signs), 16), np.float32)
        hints = np.empty(len(signs), np.uint32)
        store.lookup_train(signs, initializer, 1.0, 0, rows, hints, dtype=dtype)
        filled = np.empty_like(rows)
        initializer.fill_rows(9, signs, filled, dtype)
        assert filled.tobytes() == rows.tobytes()
        found.append((rows, *store.read(signs, 16, dtype=dtype)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


FAILURES = [
    ("error_at", r"native:initial:\w{64}: the kernel returned the error 7, the "),
    ("nan_at", "the kernel wrote values that are not finite, the "),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("where", "message"), FAILURES)
def test_a_row_that_a_kernel_has_no_values_for_is_not_created(
    where: str, message: str, dtype: str
) -> None:
    initializer = native(**{where: 77.0})
    store = EmbeddingStore(1000, num_shards=1, seed=9)
    store.configure(RowOptimizer("sgd", lr=0.5))
    signs = np.arange(1, 301, dtype=np.uint64)
    rows, hints = np.empty((300, 8), np.float32), np.empty(300, np.uint32)
    message += "row of sign 0x000000000000004d"
    with pytest.raises(KernelError, match=message):
        store.lookup_train(signs, initializer, 1.0, 0, rows, hints, dtype=dtype)
    store.check()
    found, _, _ = store.read(signs, 8, dtype=dtype)
    assert found.tolist() == [sign < 77 for sign in signs.tolist()]
    others = signs[signs != 77]
    rows, hints = rows[:299], hints[:299]
    store.lookup_train(others, initializer, 1.0, 0, rows, hints, dtype=dtype)
    want = np.empty_like(rows)
    native().fill_rows(9, others, want, dtype)
    assert rows.tobytes() == want.tobytes()
    assert len(store) == 299
    with pytest.raises(KernelError, match=message):
        initializer.fill_rows(9, signs, np.empty((300, 8), np.float32), dtype)
    with pytest.raises(KernelError, match=message):
        initializer.values(9, 77, 8)


def test_an_expired_row_that_cannot_begin_again_is_gone() -> None:
    store = EmbeddingStore(1000, num_shards=1, policies=[("lru", "milliseconds", 5)])
    store.configure(RowOptimizer("sgd", lr=0.5))
    signs = np.array([77], np.uint64)
    rows, hints = np.empty((1, 8), np.float32), np.empty(1, np.uint32)
    store.lookup_train(signs, native(), 1.0, 0, rows, hints, policy=1)
    store.set_clocks(50, 0)
    with pytest.raises(KernelError, match="returned the error 7"):
        store.lookup_train(signs, native(error_at=77), 1.0, 1, rows, hints, policy=1)
    store.check()
    assert len(store) == 0
    assert store.lookup_train(signs, native(), 1.0, 2, rows, hints, policy=1) == (1, 0)


def test_parameters_of_a_kernel_are_those_of_its_library() -> None:
    one = native(lower=-1)
    assert one.options["upper"] == 0.01
    assert (one == native(lower=-1.0), one == native()) == (True, False)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(ConfigError, match="has no option 'low'"):
        native(low=1)
    with pytest.raises(ConfigError, match="lower must be finite"):
        native(lower=math.inf)
    with pytest.raises(ConfigError, match="expected a library with an initializer"):
        Initializer(kernels.load("adagrad"))
    with pytest.raises(ConfigError, match="expected a library with an optimizer"):
        RowOptimizer(kernels.load("initial"), lr=0.1)
    with pytest.raises(ConfigError, match="has not loaded its library"):
        Initializer("native:initial:" + "0" * 64)
