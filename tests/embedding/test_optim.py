"""Settings of optimizers: every option reaches the servers or is refused."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from persia import _context_stack
from persia._core.kernels.optim import OPTIONS, RowOptimizer
from persia._rpc.messages import OptimizerSettings
from persia.compat import find
from persia.embedding import optim
from persia.embedding.optim import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    AMSGrad,
    Lion,
    Native,
    Optimizer,
    RMSprop,
    RowwiseAdagrad,
    RowwiseAdam,
)
from persia.errors import ConfigError
from tests.support import kernels


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (SGD(1, momentum=2, weight_decay=4), {"lr": 1, "momentum": 2}),
        (Adam(1, (0.2, 0.3), 4, 5), {"lr": 1, "beta1": 0.2, "beta2": 0.3, "eps": 5}),
        (RowwiseAdam(1, (0.2, 0.3), 4, 5), {"lr": 1, "beta1": 0.2, "beta2": 0.3, "eps": 5}),
        (RMSprop(1, 0.2, 3, 4, 5), {"lr": 1, "alpha": 0.2, "eps": 3, "momentum": 5}),
        (FTRL(1, 2, 3, 5, 4), {"lr": 1, "l1": 2, "l2": 3, "beta": 5}),
        (Lion(1, (0.2, 0.3), 4), {"lr": 1, "beta1": 0.2, "beta2": 0.3}),
        (AdamW(1, (0.2, 0.3), 4, 5), {"lr": 1, "beta1": 0.2, "beta2": 0.3, "eps": 5}),
        (AMSGrad(1, (0.2, 0.3), 4, 5), {"lr": 1, "beta1": 0.2, "beta2": 0.3, "eps": 5}),
        (LAMB(1, (0.2, 0.3), 4, 5), {"lr": 1, "beta1": 0.2, "beta2": 0.3, "eps": 5}),
        (Adadelta(1, 0.2, 3, 4), {"lr": 1, "rho": 0.2, "eps": 3}),
        (
            Adagrad(1, 2, 4, 3, 5, True, True),
            {
                "lr": 1,
                "initial_accumulator_value": 2,
                "g_square_momentum": 3,
                "eps": 5,
                "vectorwise_shared": True,
                "original_order": True,
            },
        ),
    ],
)
def test_w14_every_option_is_sent(optimizer: Optimizer, options: dict[str, Any]) -> None:
    settings = optimizer.settings()
    assert settings == OptimizerSettings(optimizer.name, options | {"weight_decay": 4})


def test_rowwise_adagrad_is_adagrad_with_one_sum_per_row() -> None:
    shared = RowwiseAdagrad(1, 2, 3, 4).settings()
    assert shared == Adagrad(1, 2, 3, 1, 4, vectorwise_shared=True).settings()
    assert RowwiseAdagrad().settings() == Adagrad(vectorwise_shared=True).settings()


def test_nesterov_is_an_optimizer_of_its_own_for_servers() -> None:
    optimizer = SGD(0.1, momentum=0.9, weight_decay=0.5, nesterov=True)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    assert optimizer.settings() == OptimizerSettings("nesterov", options)
    assert repr(optimizer) == "SGD(lr=0.1, momentum=0.9, weight_decay=0.5, nesterov=True)"
    with pytest.raises(ConfigError, match="nesterov needs a momentum above 0"):
        SGD(0.1, nesterov=True)
    with pytest.raises(ConfigError, match="nesterov must be True or False, got 1"):
        SGD(0.1, momentum=0.9, nesterov=1)  # type: ignore[arg-type]


OF_BETAS: tuple[Any, ...] = (RowwiseAdam, Lion, AdamW, AMSGrad, LAMB)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGD(-0.1), "sgd: lr must be at least 0, got -0.1"),
        (lambda: SGD(math.nan), "lr must be finite"),
        (lambda: SGD("0.1"), "lr must be a number, got '0.1'"),  # type: ignore[arg-type]
        (lambda: SGD(True), "lr must be a number, got True"),
        (lambda: SGD(0.1, momentum=-1), "momentum must be at least 0"),
        (lambda: SGD(0.1, weight_decay=-1), "weight_decay must be at least 0"),
        (lambda: Adam(betas=(0.9, 1.0)), "adam: beta2 must be below 1"),
        (lambda: Adam(betas=(-0.1, 0.9)), "beta1 must be at least 0"),
        (lambda: Adam(betas=0.9), "betas: expected two numbers, .*, got 0.9"),  # type: ignore[arg-type]
        (lambda: Adam(eps=0), "adam: eps must be above 0"),
        (lambda: Adagrad(initial_accumulator_value=-1), "initial_accumulator_value"),
        (lambda: Adagrad(g_square_momentum=-1), "g_square_momentum"),
        (lambda: Adagrad(vectorwise_shared=1), "vectorwise_shared .* got 1"),  # type: ignore[arg-type]
        *(
            (partial(build, betas=betas), "beta")
            for build in OF_BETAS
            for betas in (0.9, (0.9,), (0.9, 1.0))
        ),
    ],
)
def test_what_cannot_be_used(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_apply_is_of_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it reaches the context's servers is in tests/ctx."""
    monkeypatch.setattr(_context_stack, "_entered", [])
    with pytest.raises(ConfigError, match=r"Adagrad\.apply.. must be called inside.*no co"):
        Adagrad().apply()


def test_an_option_cannot_change_where_the_servers_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Trains:
        embedding_optimizer = Adagrad(lr=0.1)

    optimizer = Trains.embedding_optimizer
    optimizer.lr = 0.2
    monkeypatch.setattr(_context_stack, "_entered", [object(), Trains()])
    with pytest.raises(ConfigError, match=r"^Adagrad\.lr: .* write ctx\.set_lr\(0\.01\)$"):
        optimizer.lr = 0.01
    with pytest.raises(ConfigError, match=r"^Adagrad\.eps: .* apply\(\), or set it outside$"):
        optimizer.eps = 1e-3
    assert (optimizer.lr, optimizer.eps) == (0.2, 1e-10)
    Adagrad(lr=0.1).lr = 0.01  # another one
    monkeypatch.setattr(_context_stack, "_entered", [])
    optimizer.lr = 0.01
    assert optimizer.settings().options["lr"] == 0.01


@pytest.mark.parametrize(
    "optimizer",
    [
        *(SGD(lr=0.1), Adam(), Adagrad(), RowwiseAdam(), RMSprop(), FTRL(), Lion()),
        *(AdamW(), AMSGrad(), LAMB(), Adadelta()),
    ],
)
def test_the_core_takes_the_settings_and_has_their_defaults(optimizer: Optimizer) -> None:
    settings = optimizer.settings()
    assert RowOptimizer(settings.name, **settings.options).options == settings.options
    own = {"lr": 0.1} if settings.name == "sgd" else {}  # that has no default
    assert settings.options == OPTIONS[settings.name] | own


def test_repr_shows_the_options() -> None:
    assert repr(SGD(0.5)) == "SGD(lr=0.5, momentum=0.0, weight_decay=0.0)"


def test_a_script_of_old_names_is_warned_of_the_new_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: set[str] = set()
    monkeypatch.setattr("persia._deprecated.used", used)
    optim._log_new_default.cache_clear()
    Adagrad()
    assert caplog.records == []
    with pytest.warns(DeprecationWarning, match="old name"):
        found = find("persia.sparse.optim", "Adagrad")
    found(initial_accumulator_value=0.01)
    assert caplog.records == []
    found(lr=0.3)
    found(lr=0.4)
    (record,) = caplog.records
    assert "persia.sparse.optim.Adagrad" in record.getMessage()
    assert "initial_accumulator_value=0, as torch's does" in record.getMessage()


def test_a_native_optimizer_names_its_library() -> None:
    path = kernels.library("adagrad")
    optimizer = Native(
        kernels.FOLDER / "adagrad.c", state=lambda dim: dim, params={"eps": 0.5}, lr=0.2
    )
    settings = optimizer.settings()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (settings.name, optimizer.library) == (f"native:adagrad:{digest}", path)
    assert settings.options == {
        "lr": 0.2,
        "guard": True,
        "eps": 0.5,
        "initial_accumulator_value": 0.0,
        "weight_decay": 0.0,
    }
    assert Native(path).settings().name == settings.name
    assert Native([path], name="other").settings().name == f"native:other:{digest}"
    with pytest.raises(ConfigError, match="expected 3 words for dim 1, the library"):
        Native(path, state=lambda dim: 2 * dim + 1)
    with pytest.raises(ConfigError, match="has no option 'epps', did you mean 'eps'"):
        Native(path, params={"epps": 1.0})
    with pytest.raises(ConfigError, match="name must be an identifier in ASCII, got 'a-b'"):
        Native(path, name="a-b")
