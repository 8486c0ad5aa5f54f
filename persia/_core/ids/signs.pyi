from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool

def pack_all(
    arrays: Iterable[NDArray[np.uint64]],
    prefixes: Iterable[int],
    prefix_bits: int,
    threads: ThreadPool,
) -> tuple[NDArray[np.uint64], list[int]]: ...
def hash_stack(
    ids: NDArray[np.uint64], rounds: int, embedding_size: int
) -> NDArray[np.uint64]: ...
def merge(
    arrays: Iterable[NDArray[np.uint64]],
) -> tuple[NDArray[np.uint64], list[NDArray[np.uint32]]]: ...
