from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia.errors import ConfigError

MAX_DIM: int
OPTIONS: dict[str, dict[str, float | bool | None]]

def unknown(what: str, name: object, known: Iterable[str]) -> ConfigError: ...
def number(owner: str, option: str, value: object) -> float: ...
def checked(
    owner: str, option: str, value: object, default: float | bool | None
) -> float | bool: ...
def with_defaults(
    owner: str, options: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, Any]: ...
def complete(name: str, options: dict[str, Any]) -> dict[str, float | bool]: ...

@final
class RowOptimizer:
    name: str
    weight_bound: float
    options: dict[str, float | bool]
    kept_words: Mapping[int, int] | None
    def __new__(
        cls,
        name: str,
        weight_bound: float = 0.0,
        *,
        kept_words: Any = None,  # as the attribute; else no mapping of options could be given
        **options: float | bool,
    ) -> Self: ...
    def with_lr(self, lr: float) -> Self: ...
    def state_words(self, dim: int) -> int: ...
    def new_state(self, dim: int) -> NDArray[np.uint32]: ...
    def step_rows(
        self, values: NDArray[np.float32], grads: NDArray[np.float32], *, number: int = 0
    ) -> None: ...
