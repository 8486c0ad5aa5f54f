"""Pooling of all features of a batch: each call is checked, then all are made by threads."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch

@final
class PoolCalls:
    """Calls of ``pooling`` that wait to be made; their arrays must not be used meanwhile.

    Each method checks its arguments as the function of its name does, and raises what that one
    raises. Outputs of ``pool`` lie apart from each other. A FeatureBatch in the place of
    ``inverse`` has offsets and weights with it, and its numbers are not looked at again.
    """

    def pool(
        self,
        mode: str,
        rows: NDArray[np.float32],
        slots: NDArray[np.uint32] | None,
        rounds: int,
        inverse: NDArray[np.uint32] | FeatureBatch,
        offsets: NDArray[np.uint32] | None,
        out: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
    ) -> NDArray[np.int32] | None:
        """Add a call; what it returns is filled by ``run``."""

    def begin_sums(self, sums: NDArray[np.float32] | None) -> None:
        """Begin a part: the gradients that follow are added in their order, by one thread.

        Args:
            sums: Set to zero before, and looked at for what is not finite afterwards. None:
                neither is done. Sums of different parts lie apart, and so must all rows that
                they add to.
        """

    def pool_grad(
        self,
        mode: str,
        grad: NDArray[np.float32],
        slots: NDArray[np.uint32] | None,
        rounds: int,
        inverse: NDArray[np.uint32] | FeatureBatch,
        offsets: NDArray[np.uint32] | None,
        argmax: NDArray[np.int32] | None,
        skip: NDArray[np.uint8] | None,
        out: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add a call to the part that was begun last.

        Raises:
            DataError: If none was begun.
        """

    def scatter_add(
        self,
        grad: NDArray[np.float32],
        slots: NDArray[np.uint32] | None,
        rounds: int,
        out: NDArray[np.float32],
    ) -> None:
        """Add a call to the part that was begun last.

        Raises:
            DataError: If none was begun.
        """

    def run(self, threads: ThreadPool) -> bool:
        """Make all calls; return whether all sums are finite."""
