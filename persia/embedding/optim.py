"""Optimizers of embedding rows. The formulas are those of ``torch.optim``.

An optimizer here holds settings only: the servers step the rows. Every option works; each is
checked when the object is made, by the code that will use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from persia._core.optim import complete
from persia._rpc import session
from persia._rpc.messages import OptimizerSettings
from persia.errors import ConfigError

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]


class Optimizer(ABC):
    """Base of the optimizers of embedding rows."""

    name: ClassVar[str]

    @abstractmethod
    def options(self) -> dict[str, float | bool]:
        """Return every option by the name that servers know."""

    def settings(self) -> OptimizerSettings:
        """Return the optimizer as servers are told it.

        Raises:
            ConfigError: If an option is out of range.
        """
        return OptimizerSettings(self.name, complete(self.name, self.options()))

    def apply(self) -> None:
        """Register this optimizer on the servers of the current context.

        ``TrainCtx`` does so by itself for its ``embedding_optimizer``.

        Raises:
            ConfigError: If there is no current context that trains embeddings.
        """
        ctx = session.current()
        if not isinstance(ctx, session.TakesOptimizer):
            what = "no context" if ctx is None else type(ctx).__name__
            raise ConfigError(
                f"{type(self).__name__}.apply() must be called inside a context that trains "
                f"embeddings, such as `with TrainCtx(...)`; got {what}"
            )
        ctx.register_optimizer(self.settings())

    def __repr__(self) -> str:
        options = ", ".join(
            f"{key}={value!r}" for key, value in self.settings().options.items()
        )
        return f"{type(self).__name__}({options})"


class SGD(Optimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    Args:
        lr: Learning rate.
        momentum: Momentum factor; above 0 a row keeps one more vector.
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.

    Raises:
        ConfigError: If a value is out of range.
    """

    name = "sgd"

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.settings()

    def options(self) -> dict[str, float | bool]:
        """Return every option by the name that servers know."""
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }


class Adam(Optimizer):
    """Adam, as ``torch.optim.Adam``, with moments and bias correction counted per row.

    ``torch.optim.SparseAdam`` adds ``eps`` before the bias correction; it differs where a
    gradient is not far above ``eps``.

    Args:
        lr: Learning rate.
        betas: Factors of the running means of the gradient and of its square, in [0, 1).
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
        eps: Added to the root of the second mean.

    Raises:
        ConfigError: If a value is out of range.
    """

    name = "adam"

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        eps: float = 1e-8,
    ) -> None:
        try:
            beta1, beta2 = betas
        except (TypeError, ValueError):
            raise ConfigError(f"betas: expected two numbers, got {betas!r}") from None
        self.lr = lr
        self.betas = (beta1, beta2)
        self.weight_decay = weight_decay
        self.eps = eps
        self.settings()

    def options(self) -> dict[str, float | bool]:
        """Return every option by the name that servers know."""
        return {
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


class Adagrad(Optimizer):
    """Adagrad, as ``torch.optim.Adagrad``.

    The default of ``initial_accumulator_value`` is the original's. A gradient of a mean loss
    is far smaller than its root, so rows then move almost as with SGD: on click data
    ``1e-8`` gained 0.005 AUC and more.

    Args:
        lr: Learning rate.
        initial_accumulator_value: What the sum of squares of a new row begins with.
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
        g_square_momentum: Factor on the old sum before a square is added; 1 never forgets.
        eps: Added to the root of the sum.
        vectorwise_shared: Keep one sum per row, of the mean square over its values, in
            place of one per value; saves 4 * (dim - 1) bytes per row.
        original_order: Step with the sum before this gradient, and with eps under the root,
            as the original PERSIA did.

    Raises:
        ConfigError: If a value is out of range.
    """

    name = "adagrad"

    def __init__(
        self,
        lr: float = 1e-2,
        initial_accumulator_value: float = 1e-2,
        weight_decay: float = 0,
        g_square_momentum: float = 1,
        eps: float = 1e-10,
        vectorwise_shared: bool = False,
        original_order: bool = False,
    ) -> None:
        self.lr = lr
        self.initial_accumulator_value = initial_accumulator_value
        self.weight_decay = weight_decay
        self.g_square_momentum = g_square_momentum
        self.eps = eps
        self.vectorwise_shared = vectorwise_shared
        self.original_order = original_order
        self.settings()

    def options(self) -> dict[str, float | bool]:
        """Return every option by the name that servers know."""
        return {
            "lr": self.lr,
            "initial_accumulator_value": self.initial_accumulator_value,
            "weight_decay": self.weight_decay,
            "g_square_momentum": self.g_square_momentum,
            "eps": self.eps,
            "vectorwise_shared": self.vectorwise_shared,
            "original_order": self.original_order,
        }
