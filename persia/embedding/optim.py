"""Optimizers of embedding rows. The formulas are those of ``torch.optim``, where it has them.

An optimizer here holds settings only: the servers step the rows. A value that is out of range
is a ConfigError when the object is made, by the code that will use it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from persia import _context_stack, _deprecated
from persia._build import kernel_library
from persia._core.kernels.optim import RowOptimizer, complete
from persia._rpc.messages import OptimizerSettings
from persia.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Native",
    "Optimizer",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
]


@dataclass(eq=False, repr=False)
class Optimizer:
    """Base of the optimizers of embedding rows.

    To set an option while a TrainCtx with this optimizer is entered is a ConfigError.
    """

    name: ClassVar[str]

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Refuse parameters, which torch's optimizers take first, before they seem to be lr."""
        if given and isinstance(given[0], Iterable) and not isinstance(given[0], str):
            raise ConfigError(
                f"{cls.__name__}: expected options only, as it steps rows of the servers, got "
                f"{type(given[0]).__name__}; write {cls.__name__}(lr=0.1), and give "
                "model.parameters() to the dense_optimizer"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if type(self) is Optimizer:
            raise TypeError("expected one of the optimizers, such as Adagrad(), got their base")
        self.settings()

    def __setattr__(self, option: str, value: object) -> None:
        """Refuse what would have no effect: servers got the options when a TrainCtx began."""
        for ctx in _context_stack.entered():
            if getattr(ctx, "embedding_optimizer", None) is self:
                todo = f"write ctx.set_lr({value!r})"
                if option != "lr":
                    todo = "make another one and call its apply(), or set it outside"
                raise ConfigError(
                    f"{type(self).__name__}.{option}: expected no change inside the `with` of "
                    f"its TrainCtx, as servers have the options already; {todo}"
                )
        super().__setattr__(option, value)

    def options(self) -> dict[str, float | bool]:
        """Return every option by the name that servers know; ``betas`` are two of theirs."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        if "betas" in options:
            betas = options.pop("betas")
            try:
                options["beta1"], options["beta2"] = betas
            except (TypeError, ValueError):
                raise ConfigError(
                    f"betas: expected two numbers, as (0.9, 0.999), got {betas!r}"
                ) from None
        return options

    def settings(self) -> OptimizerSettings:
        """Return the optimizer as it is sent to servers."""
        return OptimizerSettings(self.name, complete(self.name, self.options()))

    def apply(self) -> None:
        """Register this optimizer on the servers of the current context, which must train.

        ``TrainCtx`` does so by itself for its ``embedding_optimizer``.
        """
        ctx = _context_stack.current()
        if not isinstance(ctx, _context_stack.TakesOptimizer):
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


@dataclass(eq=False, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    Args:
        lr: Learning rate.
        momentum: Momentum factor; above 0 a row keeps one more vector.
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
        nesterov: Nesterov's momentum, which must then be above 0; servers know it as an
            optimizer of its own, ``nesterov``.
    """

    name = "sgd"

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def options(self) -> dict[str, float | bool]:
        """Return every option by the name that servers know."""
        options = super().options()
        options.pop("nesterov")
        return options

    def settings(self) -> OptimizerSettings:
        """Return the optimizer as it is sent to servers."""
        if not isinstance(self.nesterov, bool):
            raise ConfigError(f"sgd: nesterov must be True or False, got {self.nesterov!r}")
        name = "nesterov" if self.nesterov else self.name
        settings = OptimizerSettings(name, complete(name, self.options()))
        if self.nesterov and settings.options["momentum"] == 0:
            raise ConfigError("sgd: nesterov needs a momentum above 0, as 0.9")
        return settings

    def __repr__(self) -> str:
        text = super().__repr__()
        return text.replace(")", ", nesterov=True)") if self.nesterov else text


@dataclass(eq=False, repr=False)
class Adam(Optimizer):
    """Adam, as ``torch.optim.Adam``, with moments and bias correction counted per row.

    ``torch.optim.SparseAdam`` adds ``eps`` before the bias correction; it differs where a
    gradient is not far above ``eps``.

    Args:
        lr: Learning rate.
        betas: Factors of the running means of the gradient and of its square, in [0, 1).
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
        eps: Added to the root of the second mean.
    """

    name = "adam"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0
    eps: float = 1e-8


@dataclass(eq=False, repr=False)
class Adagrad(Optimizer):
    """Adagrad, as ``torch.optim.Adagrad``, and with its defaults.

    The original's sum began with 0.01. A gradient of a mean loss is far smaller than the root
    of that, so rows then move almost as with SGD: on click data it cost 0.005 AUC and more.

    Args:
        lr: Learning rate.
        initial_accumulator_value: What the sum of squares of a new row begins with; above 0
            with ``original_order``.
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
        g_square_momentum: Factor on the old sum before a square is added; 1 never forgets.
        eps: Added to the root of the sum.
        vectorwise_shared: Keep one sum per row, of the mean square over its values, in
            place of one per value; saves 4 * (dim - 1) bytes per row.
        original_order: Step with the sum before this gradient, and with eps under the root,
            as the original PERSIA did.
    """

    name = "adagrad"

    lr: float = 1e-2
    initial_accumulator_value: float = 0
    weight_decay: float = 0
    g_square_momentum: float = 1
    eps: float = 1e-10
    vectorwise_shared: bool = False
    original_order: bool = False

    def settings(self) -> OptimizerSettings:
        """Return the optimizer as it is sent to servers."""
        if _deprecated.used and self.initial_accumulator_value == 0:
            _log_new_default()
        return super().settings()


@functools.cache
def _log_new_default() -> None:
    """Log, once, what a script that was written for the original trains with now."""
    logger.warning(
        "Adagrad begins with initial_accumulator_value=0, as torch's does; in the PERSIA that "
        "had %s it began with 0.01: pass that for its numbers (docs/moving-from-old-persia.md)",
        min(_deprecated.used),
    )


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum per row: ``Adagrad(vectorwise_shared=True)`` by its peers' name.

    This is FBGEMM's ``EXACT_ROWWISE_ADAGRAD``.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        initial_accumulator_value: float = 0,
        weight_decay: float = 0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(
            lr, initial_accumulator_value, weight_decay, eps=eps, vectorwise_shared=True
        )


class AMSGrad(Adam):
    """AMSGrad, as ``torch.optim.Adam(amsgrad=True)``, counted per row as ``Adam`` is."""

    name = "amsgrad"


@dataclass(eq=False, repr=False)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``, counted per row.

    Args:
        lr: Learning rate.
        betas: Factors of the running means of the gradient and of its square, in [0, 1).
        weight_decay: Decoupled: a step also takes ``lr * weight_decay`` of the value away,
            from the rows that a batch meets.
        eps: Added to the root of the second mean.
    """

    name = "adamw"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-2
    eps: float = 1e-8


@dataclass(eq=False, repr=False)
class LAMB(Optimizer):
    """LAMB (You et al. 2020), for which each row is a layer.

    Adam's step and the decoupled decay together are made as long as ``lr`` times the row.

    Args:
        lr: Learning rate: the length of a step as a part of the row's.
        betas: Factors of the running means of the gradient and of its square, in [0, 1).
        weight_decay: Part of the row that is added to Adam's step.
        eps: Added to the root of the second mean.
    """

    name = "lamb"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0
    eps: float = 1e-6


@dataclass(eq=False, repr=False)
class Adadelta(Optimizer):
    """Adadelta, as ``torch.optim.Adadelta``.

    Args:
        lr: Factor of a step, which has the gradient's scale by itself.
        rho: Factor of the running means of squares, in [0, 1).
        eps: Added under both roots.
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
    """

    name = "adadelta"

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0


class RowwiseAdam(Adam):
    """Adam with one second moment per row, of the mean square over its values.

    This is FBGEMM's ``PARTIAL_ROWWISE_ADAM``, with the L2 penalty in the gradient as in
    ``Adam``; it saves 4 * (dim - 1) bytes per row.
    """

    name = "rowwise_adam"


@dataclass(eq=False, repr=False)
class RMSprop(Optimizer):
    """RMSprop, as ``torch.optim.RMSprop`` without ``centered``.

    Args:
        lr: Learning rate.
        alpha: Factor of the running mean of squares, in [0, 1).
        eps: Added to the root of the mean.
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
        momentum: Momentum factor; above 0 a row keeps one more vector.
    """

    name = "rmsprop"

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0
    momentum: float = 0


@dataclass(eq=False, repr=False)
class FTRL(Optimizer):
    """FTRL-Proximal with a learning rate per value (McMahan et al. 2013).

    The paper's weights begin at 0. Here a value begins where the row's initialization puts it,
    stays there until its first nonzero gradient, and is pulled to 0 by ``l1`` only from then
    on; begin with zeros for the paper's sparsity.

    Args:
        lr: The paper's alpha.
        l1: L1 penalty; values whose gradients do not outweigh it are exactly 0.
        l2: L2 penalty.
        beta: Added to the root of the sum of squares.
        weight_decay: L2 penalty, added to the gradient of the rows that a batch meets.
    """

    name = "ftrl"

    lr: float = 0.1
    l1: float = 0
    l2: float = 0
    beta: float = 1
    weight_decay: float = 0


@dataclass(eq=False, repr=False)
class Lion(Optimizer):
    """Lion (Chen et al. 2023): a step is the sign of a mean of gradients.

    Args:
        lr: Learning rate; each value moves by it in each step.
        betas: Factors of the old mean in the step and in the mean that is kept, in [0, 1).
        weight_decay: Decoupled: a step also takes ``lr * weight_decay`` of the value away,
            from the rows that a batch meets.
    """

    name = "lion"

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0


# Dims at which the state that a script expects is compared with the library's.
_COMPARED_DIMS = (1, 2, 3, 8, 16, 64, 100)


class Native(Optimizer):
    """An optimizer of the user's own, in C or C++ by the header ``persia_kernels.h``.

    Sources are compiled by the C compiler of this machine, once, and kept as
    ``persia.cpp_extension`` keeps modules. Servers of their own find the library below their
    PERSIA_KERNEL_ROOTS, and load it if it has the sha256 of the one here.

    Args:
        source: A file or several, or the .so that one was compiled to.
        name: What checkpoints and messages name it by, an identifier; by default the file's.
        state: Words of 4 bytes that a row of a dim keeps, if that is to be compared with what
            the library says, such as ``lambda dim: 2 * dim + 1``.
        params: Parameters that the library has, if not its defaults.
        lr: Learning rate.
        guard: Whether rows for which the kernel fails are put back, which takes a copy of each
            row before its step. Without it they are reported as well, but are as the kernel
            left them. A kernel that guards its rows itself does so in any case.

    Raises:
        ConfigError: If an argument cannot be used, or the library keeps another state.
        ExtensionError: If it cannot be compiled, or is not what the header says.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        *,
        name: str | None = None,
        state: Callable[[int], int] | None = None,
        params: Mapping[str, float] | None = None,
        lr: float = 1e-2,
        guard: bool = True,
    ) -> None:
        self._library, self._optimizer = kernel_library.load_sources("Native", source, name)
        self.lr, self.guard = lr, guard
        self.params = dict(params or {})
        self.__post_init__()
        if state is not None:
            self._compare(state)

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Take a list of files, which the others refuse."""
        return object.__new__(cls)

    @property
    def library(self) -> Path:
        """The compiled library: the file that servers of their own need."""
        return self._library

    def options(self) -> dict[str, float | bool]:
        """Return the learning rate, the guard and the parameters that were given."""
        return {"lr": self.lr, "guard": self.guard, **self.params}

    def settings(self) -> OptimizerSettings:
        """Return the optimizer as it is sent to servers."""
        return OptimizerSettings(self._optimizer, complete(self._optimizer, self.options()))

    def _compare(self, state: Callable[[int], int]) -> None:
        optimizer = RowOptimizer(self._optimizer, **self.options())
        for dim in _COMPARED_DIMS:
            words = optimizer.state_words(dim)
            if state(dim) != words:
                raise ConfigError(
                    f"Native: state: expected {state(dim)} words for dim {dim}, the library "
                    f"{self._library.name} keeps {words}"
                )
