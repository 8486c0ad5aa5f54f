from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

MAX_DIM: int
OPTIONS: dict[str, dict[str, float | bool | None]]

BELOW_ONE: tuple[str, ...]

def nearest(name: object, known: list[str]) -> str: ...
def number(owner: str, option: str, value: object) -> float: ...
def checked(
    owner: str, option: str, value: object, default: float | bool | None
) -> float | bool: ...
def complete(name: str, options: dict[str, Any]) -> dict[str, float | bool]: ...

@final
class RowOptimizer:
    name: str
    weight_bound: float
    options: dict[str, float | bool]
    def __new__(cls, name: str, weight_bound: float = 0.0, **options: float | bool) -> Self: ...
    def state_words(self, dim: int) -> int: ...
    def new_state(self, dim: int) -> NDArray[np.uint32]: ...
    def step_rows(self, values: NDArray[np.float32], grads: NDArray[np.float32]) -> None: ...
