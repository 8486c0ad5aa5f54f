"""Names of the original's native module that still mean something.

There is no native object behind a batch or a context any more. Of the names that are not here,
``persia.compat`` has the batch that was filled piece by piece, and says for each of the others
(``PersiaCommonContext``, ``Forward``, ``Backward``, ...) what to write today.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from persia._deprecated import names_of
from persia.embedding.data import NdarrayDataBase
from persia.embedding.optim import Optimizer as OptimizerBase
from persia.errors import DataTypeError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["OptimizerBase", "check_pyarray_dtype_valid", "is_cuda_feature_available"]

if not TYPE_CHECKING:  # where any name would be taken for one
    __getattr__ = names_of(__name__)


def check_pyarray_dtype_valid(array: Any, dtype: DTypeLike, name: str | None = None) -> None:
    """Check that ``array`` has the dtype it is said to have, and one that a batch takes.

    Raises:
        DataTypeError: If it is no such array.
    """
    given = NdarrayDataBase(array, name)
    if given.data.dtype != np.dtype(dtype):
        raise DataTypeError(
            f"array {given.name!r}: expected dtype {np.dtype(dtype)}, got {given.data.dtype}"
        )


def is_cuda_feature_available() -> bool:
    """Return whether embeddings can be delivered on a CUDA device; imports torch."""
    import torch

    return torch.cuda.is_available()
