"""How embeddings begin and how far they may go: ``EmbeddingConfig`` and initial values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from persia._build import kernel_library
from persia._core.kernels import initial
from persia._core.kernels.optim import number
from persia._rpc.messages import HyperParameters, InitializationSettings
from persia.config import EmbeddingSchema, Initialization
from persia.config.document import check_probability
from persia.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "Constant",
    "EmbeddingConfig",
    "Gamma",
    "InitialValues",
    "NativeInitialValues",
    "Normal",
    "Poisson",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "get_default_embedding_config",
]


@dataclass(frozen=True, slots=True)
class InitialValues:
    """Base of the distributions that initial values of a row are drawn from.

    A draw depends on the seed and the row's sign only, so a row that was evicted and comes
    back begins as it did the first time.
    """

    method: ClassVar[str]

    def __post_init__(self) -> None:
        if type(self) is InitialValues:
            raise ConfigError(
                "InitialValues: expected one of the distributions, such as "
                "persia.embedding.Normal(), got their base"
            )
        self.settings()

    def settings(self) -> InitializationSettings:
        """Return the distribution as it is sent to servers."""
        checked = Initialization(self.method, dataclasses.asdict(self))
        return InitializationSettings(checked.method, checked.options)


@dataclass(frozen=True, slots=True)
class Uniform(InitialValues):
    """Uniform in [lower, upper)."""

    method: ClassVar[str] = "uniform"
    lower: float = -0.01
    upper: float = 0.01


@dataclass(frozen=True, slots=True)
class Normal(InitialValues):
    """Normal."""

    method: ClassVar[str] = "normal"
    mean: float = 0.0
    standard_deviation: float = 0.01


@dataclass(frozen=True, slots=True)
class TruncatedNormal(InitialValues):
    """Normal, cut at two standard deviations from the mean."""

    method: ClassVar[str] = "truncated_normal"
    mean: float = 0.0
    standard_deviation: float = 0.01


@dataclass(frozen=True, slots=True)
class Gamma(InitialValues):
    """Gamma; its mean is shape * scale."""

    method: ClassVar[str] = "gamma"
    shape: float
    scale: float


@dataclass(frozen=True, slots=True)
class Poisson(InitialValues):
    """Poisson with mean ``lam``."""

    method: ClassVar[str] = "poisson"
    lam: float


@dataclass(frozen=True, slots=True)
class Zeros(InitialValues):
    """All zeros."""

    method: ClassVar[str] = "zeros"


@dataclass(frozen=True, slots=True)
class Constant(InitialValues):
    """One value everywhere."""

    method: ClassVar[str] = "constant"
    value: float


class NativeInitialValues(InitialValues):
    """Initial values by a function of the user's own, in C by the header ``persia_kernels.h``.

    Compiled, kept and found by servers as the library of a ``persia.embedding.optim.Native``.
    Two of them are equal if their libraries and parameters are.

    Args:
        source: A file or several, or the .so that one was compiled to.
        name: What checkpoints and messages name it by, an identifier; by default the file's.
        params: Parameters that the library has, if not its defaults.

    Raises:
        ConfigError: If an argument cannot be used, or the library has no initializer.
        ExtensionError: If it cannot be compiled, or is not what the header says.
    """

    __slots__ = ("_settings", "library")

    library: Path  # the compiled file, which servers of their own need
    _settings: InitializationSettings

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        *,
        name: str | None = None,
        params: Mapping[str, float] | None = None,
    ) -> None:
        library, method = kernel_library.load_sources("NativeInitialValues", source, name)
        options = initial.complete(method, dict(params or {}))
        object.__setattr__(self, "library", library)
        object.__setattr__(self, "_settings", InitializationSettings(method, options))

    def settings(self) -> InitializationSettings:
        """Return the library's name and all parameters, as they are sent to servers."""
        return self._settings

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NativeInitialValues):
            return NotImplemented
        return self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(self.settings().method)

    def __reduce__(self) -> tuple[object, ...]:
        name = self._settings.method.split(":")[1]
        return _load_again, (self.library, name, dict(self._settings.options))

    def __repr__(self) -> str:
        settings = self.settings()
        options = "".join(f", {name}={value!r}" for name, value in settings.options.items())
        return f"NativeInitialValues({settings.method!r}{options})"


def _load_again(library: Path, name: str, params: Mapping[str, float]) -> NativeInitialValues:
    return NativeInitialValues(library, name=name, params=params)


@dataclass(frozen=True)
class EmbeddingConfig:
    """The settings that parameter servers get before training.

    Args:
        emb_initialization: Bounds of a uniform distribution, one of the distributions here, or
            ``NativeInitialValues``. A slot's own ``initialization`` in the embedding config
            wins.
        admit_probability: Chance that a new id gets a row, in 0..1. A slot's own wins.
        weight_bound: Absolute bound on every value of an embedding after a step; 0 or less
            for none.
        seed: Key of initial values and admission, in 0..2**64 - 1.
        schema: The embedding config: path of a YAML file, a mapping, or what
            ``EmbeddingSchema.load`` returned. None leaves it to ``PERSIA_EMBEDDING_CONFIG``
            or the context.

    Raises:
        ConfigError: If a value is out of range or the embedding config cannot be used.
    """

    emb_initialization: tuple[float, float] | InitialValues = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10
    seed: int = dataclasses.field(default=0, kw_only=True)
    schema: str | os.PathLike[str] | Mapping[str, object] | EmbeddingSchema | None = (
        dataclasses.field(default=None, kw_only=True)
    )

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed: expected an integer in 0..2**64 - 1, got {self.seed!r}")
        check_probability("admit_probability", self.admit_probability)
        number("EmbeddingConfig", "weight_bound", self.weight_bound)
        self.settings()
        if self.schema is not None:
            # Read now: a bad file is this argument's error, not that of a later batch.
            object.__setattr__(self, "schema", EmbeddingSchema.load(self.schema))

    def settings(self) -> HyperParameters:
        """Return the settings as they are sent to servers."""
        initial = self.emb_initialization
        if not isinstance(initial, InitialValues):
            try:
                lower, upper = initial
            except (TypeError, ValueError):
                raise ConfigError(
                    "emb_initialization: expected (lower, upper) or a distribution such as "
                    f"persia.embedding.Normal(), got {initial!r}"
                ) from None
            initial = Uniform(lower, upper)
        return HyperParameters(
            initialization=initial.settings(),
            admit_probability=float(self.admit_probability),
            weight_bound=float(self.weight_bound),
            seed=self.seed,
        )


def get_default_embedding_config() -> EmbeddingConfig:
    """Return the configuration used where none is given."""
    return EmbeddingConfig()
