from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool

@final
class FeatureBatch:
    def __init__(
        self,
        name: str,
        distinct: NDArray[np.uint64],
        inverse: NDArray[np.uint32],
        offsets: NDArray[np.uint32] | None = None,
        weights: NDArray[np.float32] | None = None,
    ) -> None: ...
    @staticmethod
    def from_csr(
        name: str,
        values: NDArray[np.uint64],
        offsets: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint32],
        weights: NDArray[np.float32] | None = None,
    ) -> FeatureBatch: ...
    @staticmethod
    def from_single(name: str, ids: NDArray[np.uint64]) -> FeatureBatch: ...
    @staticmethod
    def from_rows(
        name: str, ids: NDArray[np.uint64], rows: NDArray[np.int64], batch_size: int
    ) -> list[FeatureBatch]: ...
    @staticmethod
    def from_list(
        name: str,
        data: list[NDArray[np.uint64]] | tuple[NDArray[np.uint64], ...],
        weights: list[NDArray[np.float32]] | tuple[NDArray[np.float32], ...] | None = None,
    ) -> FeatureBatch: ...
    @staticmethod
    def from_parts(name: str, parts: Sequence[NDArray[Any]]) -> FeatureBatch: ...
    @property
    def name(self) -> str: ...
    @property
    def distinct(self) -> NDArray[np.uint64]: ...
    @property
    def inverse(self) -> NDArray[np.uint32]: ...
    @property
    def offsets(self) -> NDArray[np.uint32] | None: ...
    @property
    def weights(self) -> NDArray[np.float32] | None: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_ids(self) -> int: ...
    @property
    def num_distinct(self) -> int: ...
    def parts(self) -> tuple[NDArray[Any], ...]: ...
    def lengths(self) -> NDArray[np.int64]: ...
    def truncated(self, limit: int, last: bool = False) -> FeatureBatch: ...

def number_all(batches: Sequence[FeatureBatch], threads: ThreadPool) -> None: ...
