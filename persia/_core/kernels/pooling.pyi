from typing import final

import numpy as np
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch

@final
class PoolCalls:
    def pool(
        self,
        mode: str,
        rows: NDArray[np.float32],
        places: NDArray[np.uint32] | None,
        rounds: int,
        ids: FeatureBatch,
        out: NDArray[np.float32],
    ) -> NDArray[np.int32] | None: ...
    def begin_sums(self, sums: NDArray[np.float32] | None) -> None: ...
    def pool_grad(
        self,
        mode: str,
        grad: NDArray[np.float32],
        places: NDArray[np.uint32] | None,
        rounds: int,
        ids: FeatureBatch,
        argmax: NDArray[np.int32] | None,
        skip: NDArray[np.uint8] | None,
        out: NDArray[np.float32],
    ) -> None: ...
    def scatter_add(
        self,
        grad: NDArray[np.float32],
        places: NDArray[np.uint32] | None,
        rounds: int,
        out: NDArray[np.float32],
    ) -> None: ...
    def run_with_norms(self, threads: ThreadPool) -> NDArray[np.float32]: ...
    def run(self, threads: ThreadPool) -> bool: ...

def gather(
    rows: NDArray[np.float32],
    places: NDArray[np.uint32] | None,
    rounds: int,
    out: NDArray[np.float32],
) -> None: ...
def index_add(
    grad: NDArray[np.float32], index: NDArray[np.int64], out: NDArray[np.float32]
) -> None: ...
def nonfinite(matrix: NDArray[np.float32]) -> NDArray[np.uint8]: ...
