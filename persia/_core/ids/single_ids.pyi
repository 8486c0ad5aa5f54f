from typing import Any

from numpy.typing import NDArray

from persia._core.ids.feature_batch import FeatureBatch

def single_ids(
    names: tuple[str, ...], arrays: dict[str, NDArray[Any]], batch_size: int
) -> list[FeatureBatch | None]: ...
