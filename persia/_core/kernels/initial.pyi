from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

MAX_LAM: float
OPTIONS: dict[str, dict[str, float | None]]

def complete(method: str, options: dict[str, Any]) -> dict[str, float]: ...
def elementary(x: float) -> tuple[float, float, float]: ...

@final
class Initializer:
    name: str
    options: dict[str, float]
    def __new__(cls, method: str = "uniform", **options: float) -> Self: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    # KernelError, of both: a user's kernel has no values for a sign.
    def values(self, seed: int, sign: int, dim: int) -> NDArray[np.float32]: ...
    def fill_rows(
        self,
        seed: int,
        signs: NDArray[np.uint64],
        rows_out: NDArray[np.float32],
        dtype: str = "float32",
    ) -> None:
        """Write the rows [n, dim] that a training lookup would insert for signs [n].

        ``dtype`` is that of the rows in the store; of two bytes, values are the nearest ones.
        """
