"""One inference request as both protocols hand it over, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray


class RequestedOutput(NamedTuple):
    """An output that the caller named, and the form in which it is sent."""

    name: str
    is_binary: bool


@dataclass(slots=True)
class DecodedRequest:
    """Tensors and parameters of a request; whose model it is for stands in its job."""

    inputs: dict[str, NDArray[Any]]
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[RequestedOutput] = ()  # empty: all of them
    is_binary: bool = False  # form of outputs that were not named
    # Of a whole body that is the model's only input: reads it by the model's metadata.
    read_raw: Callable[[Mapping[str, Any]], dict[str, NDArray[Any]]] | None = None


@dataclass(slots=True)
class InferOutcome:
    """What a model answered to one request."""

    model: str
    version: str
    id: str
    outputs: list[tuple[str, NDArray[Any], bool]]  # name, values, whether sent as raw data
