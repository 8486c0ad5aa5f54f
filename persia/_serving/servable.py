"""What a host of models calls: one version of one model, without a server around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

Inputs = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]


class Servable(Protocol):
    """One loaded version of a model. Any number of threads may call it at the same time.

    It may have ``spent_ns``: nanoseconds of the last call of this thread in lookup and forward;
    and ``stats()``: what metrics say of its rows, see ``row_samples``.
    """

    @property
    def version(self) -> int:
        """Its number in the repository, from 1; 0 of one that is in none."""
        ...

    @property
    def is_batch_independent(self) -> bool:
        """Whether a sample's outputs depend on it only, so that requests may be joined."""
        ...

    def __call__(self, inputs: Inputs) -> Outputs:
        """Return the outputs by name, each [B, ...].

        Raises:
            DataError: If the inputs are not what ``metadata`` says; names the input.
        """
        ...

    def metadata(self) -> Mapping[str, Any]:
        """Return ``name``, ``versions``, ``platform``, ``inputs`` and ``outputs``, as JSON.

        An input or output is ``{name, datatype, shape, parameters}``, datatypes and shapes as
        the Open Inference Protocol has them: -1 is any size.
        """
        ...

    def close(self) -> None:
        """Give up memory and threads; no call may come afterwards."""
        ...
