from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.base import cpu
from persia._core.kernels.optim import OPTIONS, RowOptimizer
from persia.errors import ConfigError, DataError
from tests.reference import optim as model

if TYPE_CHECKING:
    from collections.abc import Callable

Floats = NDArray[np.float32]

# The order of the original, which cannot begin with a sum of 0, and its beginning.
ORIGINAL = {"original_order": True, "initial_accumulator_value": 1e-2}
# Every kernel, its options away from the defaults where they have an effect.
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1}),
    "sgd_momentum": ("sgd", {"lr": 0.1, "momentum": 0.9}),
    "adagrad": ("adagrad", {"lr": 0.1, "g_square_momentum": 0.95}),
    "adagrad_original": ("adagrad", {"lr": 0.1, **ORIGINAL}),
    "adagrad_shared": ("adagrad", {"lr": 0.1, "vectorwise_shared": True}),
    "adagrad_shared_original": (
        "adagrad",
        {"lr": 0.1, "vectorwise_shared": True, **ORIGINAL},
    ),
    "adam": ("adam", {"lr": 0.1}),
    "rowwise_adam": ("rowwise_adam", {"lr": 0.1}),
    "rmsprop": ("rmsprop", {"lr": 0.1}),
    "rmsprop_momentum": ("rmsprop", {"lr": 0.1, "alpha": 0.9, "momentum": 0.9}),
    "ftrl": ("ftrl", {"lr": 0.3, "l1": 0.7, "l2": 0.1, "beta": 0.5}),
    "lion": ("lion", {"lr": 0.1}),
    "nesterov": ("nesterov", {"lr": 0.1}),
    "adadelta": ("adadelta", {"lr": 0.7}),
    "adamw": ("adamw", {"lr": 0.1}),
    "amsgrad": ("amsgrad", {"lr": 0.1}),
    "lamb": ("lamb", {"lr": 0.1}),
}


def fresh(optimizer: RowOptimizer, values: Floats) -> Floats:
    """Rows as the store holds them: ``values`` [n, dim], each with a new state behind it."""
    n, dim = values.shape
    rows = np.zeros((n, dim + optimizer.state_words(dim)), np.float32)
    rows[:, :dim] = values
    rows[:, dim:] = optimizer.new_state(dim).view(np.float32)
    return rows


def run(optimizer: RowOptimizer, values: Floats, steps: list[Floats]) -> Floats:
    rows = fresh(optimizer, values)
    for grads in steps:
        optimizer.step_rows(rows, grads)
    return rows


def batch(rng: np.random.Generator, n: int, dim: int) -> Floats:
    return rng.standard_normal((n, dim), dtype=np.float32)


def bits(values: Floats) -> list[int]:
    words: list[int] = values.view(np.uint32).ravel().tolist()
    return words


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("extra", [{}, {"weight_decay": 0.01, "weight_bound": 0.7}])
def test_w64_every_variant_agrees_with_the_model_bit_for_bit(
    kernel: str, extra: dict[str, float]
) -> None:
    name, options = KERNELS[kernel]
    optimizer = RowOptimizer(name, **{**options, **extra})
    bound = extra.get("weight_bound", 0.0)
    for dim in range(1, 71):
        rng = np.random.default_rng(dim)
        # 25 rows reach past the prefetch distance.
        values, steps = batch(rng, 25, dim), [batch(rng, 25, dim) for _ in range(3)]
        results = []
        for one in cpu.available():
            cpu.select(one)
            results.append(run(optimizer, values, steps))
        cpu.select(None)
        rows = results[0]
        assert all(bits(other) == bits(rows) for other in results), dim
        for i in (0, 24):
            want, state = values[i], model.new_state(name, optimizer.options, dim)
            for grads in steps:
                want, state = model.step(name, optimizer.options, bound, want, state, grads[i])
            assert bits(rows[i]) == bits(np.concatenate([want, state])), (dim, i)


# With the same names of options.
TORCH: list[tuple[str, Any, dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 1e-2}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 1e-8}),
    ("adam", torch.optim.Adam, {"lr": 0.01}),
    ("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9}),
    ("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "momentum": 0.5}),
    ("nesterov", partial(torch.optim.SGD, nesterov=True), {"lr": 0.01, "momentum": 0.9}),
    ("adadelta", torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01}),
    ("amsgrad", partial(torch.optim.Adam, amsgrad=True), {"lr": 0.01}),
]


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(("name", "peer_class", "options"), TORCH)
def test_two_hundred_steps_agree_with_torch(
    name: str, peer_class: Any, options: dict[str, Any], weight_decay: float
) -> None:
    options = {**options, "weight_decay": weight_decay}
    rng = np.random.default_rng(7)
    values = batch(rng, 5, 12)
    steps = [batch(rng, 5, 12) for _ in range(200)]
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    peer = peer_class([parameter], **options)
    for grads in steps:
        parameter.grad = torch.from_numpy(grads)
        peer.step()
    rows = run(RowOptimizer(name, **options), values, steps)
    # Torch multiplies and adds in one rounding and scales in another order; 200 steps of
    # size 0.1 leave that far below 1e-5 of values around 10.
    np.testing.assert_allclose(rows[:, :12], parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


Doubles = NDArray[np.float64]


def rowwise_adam(w: Doubles, steps: list[Doubles]) -> Doubles:
    """FBGEMM's PARTIAL_ROWWISE_ADAM: the second moment is of the row's mean square."""
    m, v = np.zeros_like(w), np.zeros((len(w), 1))
    for t, g in enumerate(steps, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * (g * g).mean(axis=1, keepdims=True)
        w = w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
    return w


def lamb(w: Doubles, steps: list[Doubles]) -> Doubles:
    """Algorithm 2 of You et al. 2020, each row a layer, the norm of a row as it is."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(steps, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6) + 0.1 * w
        norms = (np.linalg.norm(x, axis=1, keepdims=True) for x in (w, r))
        w = w - 0.01 * next(norms) / next(norms) * r
    return w


def ftrl(w: Doubles, steps: list[Doubles]) -> Doubles:
    """Algorithm 1 of McMahan et al. 2013, which has no initial values: weights begin at 0."""
    alpha, beta, l1, l2 = 0.1, 0.5, 4.0, 0.1
    z, n = np.zeros_like(w), np.zeros_like(w)
    w = np.zeros_like(w)
    for g in steps:
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
        z = z + g - sigma * w
        n = n + g * g
        w = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2)
        w = np.where(np.abs(z) <= l1, 0.0, w)
    assert (w == 0).any()
    return w


def lion(w: Doubles, steps: list[Doubles]) -> Doubles:
    """Algorithm 2 of Chen et al. 2023."""
    m = np.zeros_like(w)
    for g in steps:
        w = w - 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * w)
        m = 0.99 * m + 0.01 * g
    return w


@pytest.mark.parametrize(
    ("formula", "options"),
    [
        (rowwise_adam, {"lr": 0.01, "beta2": 0.99}),
        (ftrl, {"lr": 0.1, "beta": 0.5, "l1": 4.0, "l2": 0.1}),
        (lion, {"lr": 0.01, "weight_decay": 0.1}),
        (lamb, {"lr": 0.01, "beta2": 0.99, "weight_decay": 0.1}),
    ],
)
def test_two_hundred_steps_agree_with_the_formula_in_double(
    formula: Callable[[Doubles, list[Doubles]], Doubles], options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(7)
    values = np.zeros((5, 12), np.float32) if formula is ftrl else batch(rng, 5, 12)
    steps = [batch(rng, 5, 12) for _ in range(200)]
    rows = run(RowOptimizer(formula.__name__, **options), values, steps)
    want = formula(values.astype(np.float64), [grads.astype(np.float64) for grads in steps])
    np.testing.assert_allclose(rows[:, :12], want, rtol=1e-4, atol=1e-5)


def test_ftrl_at_another_rate_leaves_past_steps_alone() -> None:
    rng = np.random.default_rng(10)
    optimizer = RowOptimizer("ftrl", lr=0.5)
    rows = run(optimizer, batch(rng, 4, 8), [batch(rng, 4, 8) for _ in range(3)])
    before = rows[:, :8].copy()
    optimizer.with_lr(0.0).step_rows(rows, batch(rng, 4, 8))
    np.testing.assert_allclose(rows[:, :8], before, rtol=1e-5)


def test_lion_does_not_move_by_a_sum_of_zero() -> None:
    optimizer = RowOptimizer("lion", lr=0.5, beta1=0.5)
    rows = fresh(optimizer, np.full((1, 8), 2.0, np.float32))
    rows[0, 8:] = 1.0
    optimizer.step_rows(rows, np.array([[-1, -2, 0, np.nan] * 2], np.float32))
    assert rows[0, :3].tolist() == [2.0, 2.5, 1.5]
    assert np.isnan(rows[0, 3])


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_learning_rate_is_that_optimizer(kernel: str) -> None:
    name, options = KERNELS[kernel]
    rng = np.random.default_rng(11)
    values, steps = batch(rng, 3, 8), [batch(rng, 3, 8) for _ in range(3)]
    other = RowOptimizer(name, 1.5, **options).with_lr(0.25)
    again = RowOptimizer(name, 1.5, **{**options, "lr": 0.25})
    assert (other.options, other.weight_bound) == (again.options, 1.5)
    assert bits(run(other, values, steps)) == bits(run(again, values, steps))
    with pytest.raises(ConfigError, match="lr must be at least 0"):
        other.with_lr(-0.5)


# Zeros, equal neighbours and values whose squares fade out, far more often than by chance.
awkward = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-23]),
    st.floats(-100, 100, width=32, allow_subnormal=False),
)


@given(kernel=st.sampled_from(sorted(KERNELS)), data=st.data())
def test_awkward_values_agree_with_the_model_bit_for_bit(
    kernel: str, data: st.DataObject
) -> None:
    name, options = KERNELS[kernel]
    dim = data.draw(st.integers(1, 18))
    vectors = st.lists(awkward, min_size=dim, max_size=dim).map(
        lambda row: np.array([row], np.float32)
    )
    values, steps = data.draw(vectors), data.draw(st.lists(vectors, min_size=1, max_size=3))
    decay = data.draw(st.sampled_from([0.0, 0.5]))
    optimizer = RowOptimizer(name, 50.0, weight_decay=decay, **options)
    rows = run(optimizer, values, steps)
    want, state = values[0], model.new_state(name, optimizer.options, dim)
    for grads in steps:
        want, state = model.step(name, optimizer.options, 50.0, want, state, grads[0])
    assert bits(rows[0]) == bits(np.concatenate([want, state]))


# Of the original's own unit tests.
ORIGINAL_VALUES = (
    "0.7306 0.0340 0.1331 0.4355 0.0305 0.6968 0.1528 0.7074 0.5598 0.0271 0.7671 0.8731"
)
ORIGINAL_GRADIENTS = (
    "0.6039 0.2480 0.8303 0.8006 0.6830 0.4730 0.0381 0.8375 0.5836 0.8673 0.2224 0.4040",
    "0.4478 0.9670 0.5724 0.3074 0.5760 0.2937 0.0995 0.6640 0.7718 0.3016 0.0246 0.6975",
    "0.2304 0.9627 0.3126 0.8667 0.6767 0.6441 0.0131 0.1702 0.8901 0.4696 0.2655 0.0545",
)
ORIGINAL_ELEMENTWISE = (
    "0.6598564 -0.036559787 0.04014046 0.34159237 -0.053671654 0.6320387 0.1387946 0.6141905 "
    "0.47925496 -0.06816861 0.7330182 0.81526995 "
    "0.6283042 1.9333843 1.1247585 1.496624 1.2661879 0.7348535 0.021523468 1.1812702 "
    "1.7385421 1.073696 0.13055718 0.6626925"
)
ORIGINAL_SHARED = (
    "0.6601662 -0.018124206 0.03701234 0.33996183 -0.055326782 0.63694036 0.14721976 0.6108338 "
    "0.47815663 -0.070203856 0.741245 0.82074344 0.99936616"
)


def floats(text: str) -> Floats:
    return np.array([[float(word) for word in text.split()]], np.float32)


@pytest.mark.parametrize(
    ("shared", "want"), [(False, ORIGINAL_ELEMENTWISE), (True, ORIGINAL_SHARED)]
)
def test_original_order_meets_the_original_vectors(shared: bool, want: str, level: str) -> None:
    optimizer = RowOptimizer("adagrad", vectorwise_shared=shared, **ORIGINAL)
    rows = run(optimizer, floats(ORIGINAL_VALUES), [floats(g) for g in ORIGINAL_GRADIENTS])
    # Its first 8 elements come from a 12-bit reciprocal root, which is off by up to 1.7e-6.
    np.testing.assert_allclose(rows, floats(want), rtol=0, atol=2e-6)


# Other values than the defaults. Betas seldom change the sign of a step: lion's are not seen.
OTHER_VALUES = {
    **dict.fromkeys(("momentum", "beta1", "beta2", "eps", "alpha", "beta", "rho"), 0.5),
    "g_square_momentum": 0.5,
    "initial_accumulator_value": 1.0,
    "weight_decay": 0.1,
    "vectorwise_shared": True,
    "original_order": True,
    "l2": 3.0,
}
UNSEEN = {("lion", "beta1"), ("lion", "beta2"), ("ftrl", "l1")}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name, options in OPTIONS.items()
        for option in options
        if option != "lr" and (name, option) not in UNSEEN
    ],
)
def test_w14_every_option_has_an_effect(name: str, option: str) -> None:
    rng = np.random.default_rng(3)
    values, steps = batch(rng, 4, 9), [batch(rng, 4, 9) for _ in range(3)]
    # Without it there is no original order.
    begin = {"initial_accumulator_value": 0.5} if name == "adagrad" else {}
    plain = run(RowOptimizer(name, lr=0.1, **begin), values, steps)[:, :9]
    changed = RowOptimizer(name, lr=0.1, **(begin | {option: OTHER_VALUES[option]}))
    other = run(changed, values, steps)[:, :9]
    assert (plain != other).all()


def test_w15_adam_corrects_from_the_first_step() -> None:
    # With full correction the first step is lr against the gradient's sign, for any gradient.
    rows = run(
        RowOptimizer("adam", lr=0.125, eps=1e-12),
        np.zeros((1, 4), np.float32),
        [np.array([[1e-3, -7.0, 250.0, -0.5]], np.float32)],
    )
    np.testing.assert_allclose(rows[0, :4], [-0.125, 0.125, -0.125, 0.125], rtol=1e-6)


def test_w15_adam_counts_the_steps_of_each_row() -> None:
    optimizer = RowOptimizer("adam", lr=0.1)
    rng = np.random.default_rng(5)
    values, first, second = (batch(rng, 3, 8) for _ in range(3))
    rows = fresh(optimizer, values)
    optimizer.step_rows(rows, first)
    some = rows[:1].copy()
    optimizer.step_rows(some, second[:1])
    assert rows.view(np.uint32)[:, -1].tolist() == [1, 1, 1]
    assert some.view(np.uint32)[:, -1].tolist() == [2]
    # Neither company in a batch nor another optimizer object changes a row's step.
    again = RowOptimizer("adam", lr=0.1)
    again.step_rows(rows, second)
    assert bits(rows[:1]) == bits(some)


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.0), (0.5, 0.99999)])
def test_adam_corrections_have_no_seam_at_the_end_of_the_table(
    beta1: float, beta2: float
) -> None:
    optimizer = RowOptimizer("adam", beta1=beta1, beta2=beta2, lr=0.5)
    counts = [0, 1, 52, 53, 54, 37_408, 37_409, 37_410, 65_534, 65_535, 65_536, 10_000_000]
    counts += [2**32 - 2, 2**32 - 1]  # it stays there
    rng = np.random.default_rng(1)
    values, grads = batch(rng, len(counts), 4), batch(rng, len(counts), 4)
    rows = fresh(optimizer, values)
    rows.view(np.uint32)[:, -1] = counts
    states = rows[:, 4:].copy()
    optimizer.step_rows(rows, grads)
    for i in range(len(counts)):
        want, state = model.step("adam", optimizer.options, 0, values[i], states[i], grads[i])
        assert bits(rows[i]) == bits(np.concatenate([want, state])), counts[i]


@pytest.mark.parametrize("shared", [False, True])
def test_w16_new_state_is_initialised(shared: bool) -> None:
    begin = {"initial_accumulator_value": 1e-2}
    optimizer = RowOptimizer("adagrad", vectorwise_shared=shared, **begin)
    state = optimizer.new_state(8).view(np.float32)
    assert state.tolist() == [np.float32(1e-2)] * (1 if shared else 8)
    # From an accumulator of 0 this step would be the whole learning rate.
    rows = run(optimizer, np.zeros((1, 8), np.float32), [np.full((1, 8), 1e-4, np.float32)])
    np.testing.assert_allclose(rows[0, :8], -1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_w34_lengths_that_do_not_fit_are_refused(kernel: str) -> None:
    name, options = KERNELS[kernel]
    optimizer = RowOptimizer(name, **options)
    width = 8 + optimizer.state_words(8)
    for shape, dim in (((4, 0), 8), ((2, 0), 8), ((3, 1), 8), ((3, -1), 8), ((3, 0), 9)):
        values = np.ones((shape[0], width + shape[1]), np.float32)
        with pytest.raises(DataError, match=r"expected rows of shape \(3, "):
            optimizer.step_rows(values, np.ones((3, dim), np.float32))
        assert (values == 1).all()
    optimizer.step_rows(values[:0], np.ones((0, 8), np.float32))  # none is legal


def test_a_bound_of_zero_or_less_is_none_and_none_hides_a_nan(level: str) -> None:
    values, zeros = np.array([[np.nan, 1e30] * 9], np.float32), np.zeros((1, 18), np.float32)
    for bound, kept in ((0.0, np.float32(1e30)), (-1.0, np.float32(1e30)), (1.0, 1.0)):
        rows = run(RowOptimizer("sgd", weight_bound=bound, lr=1.0), values, [zeros])
        assert np.isnan(rows[0, ::2]).all()
        assert (rows[0, 1::2] == kept).all()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("sdg", {}, "optimizer: expected one of .* got 'sdg', did you mean 'sgd'"),
    (5, {}, "optimizer: expected one of .* got 5"),  # type: ignore[list-item]
    ("sgd", {}, "sgd: lr must be a number, it was not given"),
    ("sgd", {"lr": -0.1}, "sgd: lr must be at least 0, got -0.1"),
    ("sgd", {"lr": float("nan")}, "sgd: lr must be finite"),
    ("sgd", {"lr": 1e39}, "sgd: lr must be finite in f32"),
    ("sgd", {"lr": "0.1"}, "sgd: lr must be a number, got '0.1'"),
    ("sgd", {"lr": True}, "sgd: lr must be a number, got True"),
    ("sgd", {"lr": 10**400}, "sgd: lr must be finite in f32"),
    ("sgd", {"lr": 0.1, "momentun": 0.9}, "sgd has no option 'momentun'.*'momentum'"),
    ("sgd", {"lr": 0.1, "momentum": -1}, "sgd: momentum must be at least 0"),
    ("sgd", {"lr": 0.1, "weight_bound": float("nan")}, "sgd: weight_bound must be finite"),
    ("adagrad", {"vectorwise_shared": 1}, "adagrad: vectorwise_shared must be True or False"),
    ("adagrad", {"eps": 0, "initial_accumulator_value": 0}, "must not both be 0"),
    ("adagrad", {"original_order": True}, "must be above 0; the original's is 0.01"),
    (
        "adagrad",
        {"eps": 0, "initial_accumulator_value": 1.0, "g_square_momentum": 0.9},
        "eps must be above 0 where g_square_momentum is below 1.*got 0",
    ),
    ("adam", {"beta1": 1.0}, "adam: beta1 must be below 1"),
    ("adam", {"beta2": 1 - 1e-9}, "adam: beta2 must be below 1"),
    ("adam", {"eps": 0.0}, "adam: eps must be above 0"),
    ("rmsprop", {"eps": 0.0}, "rmsprop: eps must be above 0"),
    ("rmsprop", {"alpha": 1.0}, "rmsprop: alpha must be below 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_settings_name_the_option(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RowOptimizer(name, **options)


def test_defaults_are_torchs() -> None:
    assert {name for name, _ in KERNELS.values()} == set(OPTIONS)  # all are tested here
    adagrad = RowOptimizer("adagrad").options
    parameter = torch.nn.Parameter(torch.zeros(1))
    torchs = torch.optim.Adagrad([parameter]).defaults
    both = torchs.keys() & adagrad.keys()
    assert {key: adagrad[key] for key in both} == {key: torchs[key] for key in both}
    assert RowOptimizer("sgd", lr=1).options == {"lr": 1, "momentum": 0, "weight_decay": 0}
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    assert RowOptimizer("adam").options == rates


def test_an_optimizer_survives_pickling() -> None:
    optimizer = RowOptimizer("adam", weight_bound=3.0, lr=0.5)
    again = pickle.loads(pickle.dumps(optimizer))
    got = again.name, again.weight_bound, again.options
    assert got == ("adam", 3.0, optimizer.options)
