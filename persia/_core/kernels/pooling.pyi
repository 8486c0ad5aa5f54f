import numpy as np
from numpy.typing import NDArray

MODES: dict[str, int]

def pool(
    mode: str,
    rows: NDArray[np.float32],
    slots: NDArray[np.uint32] | None,
    rounds: int,
    inverse: NDArray[np.uint32],
    offsets: NDArray[np.uint32] | None,
    out: NDArray[np.float32],
    weights: NDArray[np.float32] | None = None,
) -> NDArray[np.int32] | None: ...
def pool_grad(
    mode: str,
    grad: NDArray[np.float32],
    slots: NDArray[np.uint32] | None,
    rounds: int,
    inverse: NDArray[np.uint32],
    offsets: NDArray[np.uint32] | None,
    argmax: NDArray[np.int32] | None,
    skip: NDArray[np.uint8] | None,
    out: NDArray[np.float32],
    weights: NDArray[np.float32] | None = None,
) -> None: ...
def begin_grad(
    mode: str,
    grad: NDArray[np.float32],
    inverse: NDArray[np.uint32],
    offsets: NDArray[np.uint32] | None,
    out: NDArray[np.float32],
) -> bool: ...
def gather(
    rows: NDArray[np.float32],
    slots: NDArray[np.uint32] | None,
    rounds: int,
    out: NDArray[np.float32],
) -> None: ...
def scatter_add(
    grad: NDArray[np.float32],
    slots: NDArray[np.uint32] | None,
    rounds: int,
    out: NDArray[np.float32],
) -> None: ...
def index_add(
    grad: NDArray[np.float32], index: NDArray[np.int64], out: NDArray[np.float32]
) -> None: ...
def nonfinite(matrix: NDArray[np.float32]) -> NDArray[np.uint8]: ...
