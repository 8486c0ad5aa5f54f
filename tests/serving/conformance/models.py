"""The models of the suite, for any host. Triton's own Python loads this: numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
WEIGHTS = np.array([0.5, -1.0, 2.0, 0.25], np.float32)


class SuiteModel:
    """A version of a model, as every host calls it."""

    name: str
    inputs: tuple[tuple[str, str, list[int]], ...]
    outputs: tuple[tuple[str, str, list[int]], ...]
    is_batch_independent = True

    def __init__(self, folder: Path) -> None:
        self.version = int(Path(folder).name)

    def __call__(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": [str(self.version)],
            "platform": "persia_bundle",
            "inputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in self.inputs],
            "outputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in self.outputs],
        }

    def close(self) -> None:
        pass


class EchoModel(SuiteModel):
    """Each input ``in_X`` as ``out_X``, of every datatype."""

    name = "echo"
    inputs = tuple((f"in_{name}", name, [-1, -1]) for name in DTYPES)
    outputs = tuple((f"out_{name}", name, [-1, -1]) for name in DTYPES)

    def __call__(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        return {f"out_{name[3:]}": values for name, values in inputs.items()}


class LinearModel(SuiteModel):
    """``score`` is x [B, 4] by fixed weights, plus the version; ``total`` is their sum."""

    name = "linear"
    inputs = (("x", "FP32", [-1, 4]),)
    outputs = (("score", "FP32", [-1]), ("total", "FP64", [1]))
    # Its total is over the whole request.
    is_batch_independent = False

    def __call__(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        if "x" not in inputs:
            raise ValueError("model 'linear': expected input 'x', got none")
        x = inputs["x"]
        if np.isnan(x).any():
            raise ValueError("model 'linear': expected numbers in 'x', got nan")
        score = (x @ WEIGHTS + np.float32(self.version)).astype(np.float32)
        return {"score": score, "total": score.sum(keepdims=True, dtype=np.float64)}


MODELS: tuple[tuple[type[SuiteModel], tuple[int, ...]], ...] = (
    (EchoModel, (1,)),
    (LinearModel, (1, 2)),
)
