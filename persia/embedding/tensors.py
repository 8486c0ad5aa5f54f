"""The memory of other libraries' tensors as numpy arrays, without a copy.

    given                                       what is read
    -----------------------------------------   ------------------------------------------
    torch.Tensor                                its CPU memory, by ``Tensor.numpy``
    JAX, Arrow, CuPy on a host: ``__dlpack__``  the CPU memory that DLPack describes
    nested torch tensor of layout jagged        its values and offsets
    TorchRec's JaggedTensor                     its values, offsets and weights
    a matrix of ids [B, L]                      its memory; sample b is row b

No package is imported for this: a data-loader has no torch. A tensor is known by its class's
module, the others by their methods. What lies in a device's memory is refused and never copied
here, because such a copy waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# DLPack's numbers of memory that the CPU reads: its own, and pinned for CUDA or ROCm.
_HOST = frozenset((1, 3, 11))
_DTYPES = {"ids": "integers", "weights": "float32", "data": "a dtype that numpy has"}


class JaggedArrays(NamedTuple):
    """One feature of a batch: sample ``b`` holds ``values[offsets[b]:offsets[b + 1]]``."""

    values: NDArray[Any]
    offsets: NDArray[Any]
    weights: NDArray[Any] | None = None


def is_tensor(value: object) -> bool:
    """Whether an object is a tensor of torch, or of a subclass."""
    return any(
        kind.__name__ == "Tensor" and kind.__module__ == "torch" for kind in type(value).__mro__
    )


def as_array(where: str, what: str, value: Any) -> Any:
    """Return the memory of a tensor as an array; anything else, arrays included, as it is.

    Args:
        where: What errors begin with, such as ``feature 'user'``.
        what: What the values are to be: ``ids``, ``weights``, ``data``, ``offsets``...
        value: What was given.

    Raises:
        DataTypeError: If it is in no memory that the CPU reads, or numpy lacks its dtype.
        DataError: If a gradient is expected for it, which nothing here gives.
    """
    if isinstance(value, np.ndarray):
        return value
    if is_tensor(value):
        return _of_torch(where, what, value)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _of_dlpack(where, what, value)
    return value


def _of_torch(where: str, what: str, tensor: Any) -> NDArray[Any]:
    if tensor.device.type != "cpu":
        raise DataTypeError(
            f"{where}: expected {what} in CPU memory, got {tensor.device}; call .cpu() on it"
        )
    if tensor.requires_grad:
        raise DataError(
            f"{where}: expected {what} that need no gradient, as none is given to them; call "
            ".detach() on them"
        )
    try:
        # A view that is to be negated is the one kind whose memory holds other values.
        array: NDArray[Any] = tensor.resolve_neg().numpy()
    except (TypeError, RuntimeError, NotImplementedError):
        todo = "" if what == "ids" else "; call .float() on it"
        if tensor.is_nested:
            todo = "; torch.nested.to_padded_tensor(it, 0.0) makes one of it" if todo else ""
        elif tensor.is_sparse:
            todo = "; call .to_dense() on it"
        raise DataTypeError(
            f"{where}: expected {what} as a dense tensor of {_DTYPES.get(what, 'integers')}, "
            f"got {tensor.dtype} with layout {tensor.layout}{todo}"
        ) from None
    return array


def _of_dlpack(where: str, what: str, value: Any) -> Any:
    kind = type(value).__name__
    device, number = value.__dlpack_device__()
    if device not in _HOST:
        raise DataTypeError(
            f"{where}: expected {what} in CPU memory, got a {kind} in that of DLPack's device "
            f"type {int(device)}, number {number}; copy it to the CPU first"
        )
    try:
        return np.from_dlpack(value)
    except Exception as exc:  # of the other library, and numpy's for a dtype that it lacks
        if type(value).__module__.partition(".")[0] == "pyarrow":
            return value  # of texts or with nulls: what is wrong with it is known later
        raise DataTypeError(
            f"{where}: expected {what} of {_DTYPES.get(what, 'integers')}, got a {kind} that "
            f"numpy cannot read: {exc}"
        ) from None


def jagged_arrays(where: str, what: str, value: Any) -> JaggedArrays | None:
    """Return a feature that is given as one tensor, or None if it is given in another way.

    Values are copied only where samples do not follow each other in memory.
    """
    if isinstance(value, list | tuple):
        return None
    if callable(getattr(value, "offsets", None)) and callable(getattr(value, "values", None)):
        return _of_jagged(where, what, value)
    array = as_array(where, what, value) if not is_strided_nested(value) else None
    if type(array) is not np.ndarray or array.ndim != 2 or array.dtype.kind not in "iuf":
        return None
    return JaggedArrays(array.reshape(-1), np.arange(len(array) + 1) * array.shape[1])


def is_strided_nested(value: Any) -> bool:
    """Whether an object is a nested tensor of torch's older layout, which has no offsets."""
    return is_tensor(value) and value.is_nested and not hasattr(value, "offsets")


def _of_jagged(where: str, what: str, tensor: Any) -> JaggedArrays:
    if hasattr(tensor, "keys"):
        raise DataTypeError(
            f"{where}: expected one feature, got a {type(tensor).__name__} of several; make "
            "one of each: [IDTypeFeature(key, it[key]) for key in it.keys()]"
        )
    values = as_array(where, what, tensor.values())
    offsets = as_array(where, "offsets", tensor.offsets())
    weights = getattr(tensor, "weights_or_none", lambda: None)()
    if weights is not None:
        weights = as_array(where, "weights", weights)
    lengths = tensor.lengths()
    if lengths is not None:
        lengths = as_array(where, "lengths", lengths)
        if not np.array_equal(lengths, np.diff(offsets)):  # as torch's ``narrow`` makes them
            return _without_gaps(values, offsets[:-1], lengths, weights)
    part = slice(offsets[0], offsets[-1])
    return JaggedArrays(
        values[part], offsets - offsets[0], None if weights is None else weights[part]
    )


def _without_gaps(
    values: NDArray[Any], begins: NDArray[Any], lengths: NDArray[Any], weights: Any
) -> JaggedArrays:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
    return JaggedArrays(values[places], offsets, None if weights is None else weights[places])
