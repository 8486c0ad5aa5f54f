"""Settings of optimizers: every option reaches the servers or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from persia._rpc import session
from persia._rpc.messages import OptimizerSettings
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia.errors import ConfigError

DEFAULTS = {
    "sgd": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adagrad": {
        "lr": 1e-2,
        "initial_accumulator_value": 1e-2,
        "weight_decay": 0.0,
        "g_square_momentum": 1.0,
        "eps": 1e-10,
        "vectorwise_shared": False,
        "original_order": False,
    },
}


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adam(), Adagrad()])
def test_defaults(optimizer: Optimizer) -> None:
    settings = optimizer.settings()
    assert settings.options == DEFAULTS[settings.name]


def test_w14_every_option_is_sent() -> None:
    assert SGD(0.5, momentum=0.9, weight_decay=0.01).settings() == OptimizerSettings(
        "sgd", {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
    )
    assert Adam(0.5, (0.8, 0.9), 0.01, 1e-6).settings() == OptimizerSettings(
        "adam", {"lr": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.01}
    )
    assert Adagrad(0.5, 1e-8, 0.01, 0.99, 1e-6, True, True).settings() == OptimizerSettings(
        "adagrad",
        {
            "lr": 0.5,
            "initial_accumulator_value": 1e-8,
            "weight_decay": 0.01,
            "g_square_momentum": 0.99,
            "eps": 1e-6,
            "vectorwise_shared": True,
            "original_order": True,
        },
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGD(-0.1), "lr: expected a finite number of at least 0, got -0.1"),
        (lambda: SGD(math.nan), "lr: expected a finite number"),
        (lambda: SGD(math.inf), "lr: expected a finite number"),
        (lambda: SGD("0.1"), "lr: expected a number, got str '0.1'"),  # type: ignore[arg-type]
        (lambda: SGD(True), "lr: expected a number, got bool True"),
        (lambda: SGD(0.1, momentum=1.0), r"momentum: expected a finite number in \[0, 1\)"),
        (lambda: SGD(0.1, weight_decay=-1), "weight_decay"),
        (lambda: Adam(betas=(0.9, 1.0)), r"betas\[1\]: expected a finite number in \[0, 1\)"),
        (lambda: Adam(betas=(-0.1, 0.9)), r"betas\[0\]"),
        (lambda: Adam(betas=0.9), "betas: expected two numbers, got 0.9"),  # type: ignore[arg-type]
        (lambda: Adam(eps=-1e-8), "eps"),
        (lambda: Adagrad(initial_accumulator_value=-1), "initial_accumulator_value"),
        (lambda: Adagrad(g_square_momentum=-1), "g_square_momentum"),
        (lambda: Adagrad(weight_decay=math.inf), "weight_decay"),
    ],
)
def test_what_cannot_be_used(build: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


class Trainer:
    def __init__(self) -> None:
        self.registered: list[OptimizerSettings] = []

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        self.registered.append(settings)


def test_apply_registers_with_the_current_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_entered", [])
    optimizer = Adagrad()
    with pytest.raises(
        ConfigError, match=r"Adagrad\.apply\(\) must be called inside.*no context"
    ):
        optimizer.apply()
    session.push(object())
    with pytest.raises(ConfigError, match="got object"):
        optimizer.apply()
    trainer = Trainer()
    session.push(trainer)
    optimizer.apply()
    assert trainer.registered == [optimizer.settings()]


def test_repr_shows_the_options() -> None:
    assert repr(SGD(0.5)) == "SGD(lr=0.5, momentum=0.0, weight_decay=0.0)"
