"""A request's arrays as a batch: ids of every form, dense tensors, a user for many candidates.

    user                          integers [B] or [B, 1], one id a sample; [B, L], padded, where
                                  ``user.pad`` is the id that stands for none; not without,
                                  if the model was trained with one id a sample
    user.values, user.offsets     integers [N], [B + 1]: sample b has offsets[b]:offsets[b + 1]
    user.weights                  f32 [N], beside these
    (texts in place of integers)  the ids that readers make of them
    dense                         [B, ...]
    batch                         ``PersiaBatch.to_bytes()``, alone

An input of one sample beside others of B is repeated for each of them; its rows are looked up
once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.single_ids import single_ids
from persia._serving.bundle import ServedFeature, ServedTensor
from persia.embedding.data import PersiaBatch
from persia.embedding.text_ids import hash_text
from persia.errors import DataError, DataTypeError, did_you_mean

Array = NDArray[Any]
_SUFFIXES = ("", ".values", ".offsets", ".weights", ".pad")
# The input that is a whole batch.
BATCH = "batch"
# Of one request: ids of a feature after one sample's were repeated for all others, and numbers
# in all vectors. A few megabytes of a request may ask for very many of both.
MAX_IDS, MAX_FLOATS = 16 << 20, 1 << 28


class InputDecoder:
    """Reads the requests of one model; any thread may call it.

    Args:
        features: Of the model.
        dense: Its dense inputs.
        fixed_sizes: Ids that a sample has of each raw feature, by name.
        id_inputs: Dense inputs that are ids, which may come as texts.
    """

    def __init__(
        self,
        features: Sequence[ServedFeature],
        dense: Sequence[ServedTensor],
        fixed_sizes: Mapping[str, int] | None = None,
        id_inputs: Sequence[str] = (),
    ) -> None:
        self._features = tuple(features)
        self._names = tuple(one.name for one in features)
        self._id_inputs = frozenset(id_inputs)
        fixed = fixed_sizes or {}
        self._widths = [_width(one, fixed.get(one.name, 1)) for one in features]
        self._dense = tuple((one, np.dtype(one.dtype)) for one in dense)
        self._plain = {*self._names, *(one.name for one in dense)}
        self._known = {name + suffix for name in self._names for suffix in _SUFFIXES}
        self._known |= self._plain
        # Without those that another input's name makes something else.
        self._names_of_singles = tuple(
            "" if any(name + suffix in self._plain for suffix in _SUFFIXES[1:]) else name
            for name in self._names
        )
        # Numbers in vectors of a sample that has one id of each feature.
        self._num_dense_floats = sum(
            max(1, math.prod(max(1, dim) for dim in one.shape)) for one in dense
        )
        self._largest_sample = sum(map(sum, self._widths)) + self._num_dense_floats

    def __call__(
        self, inputs: Mapping[str, Array]
    ) -> tuple[tuple[FeatureBatch, ...], list[Array], int]:
        """Return id features and dense arrays, in the model's order, and the batch size.

        Raises:
            DataError: If an input is missing, unknown, or of another form; names it.
        """
        if BATCH in inputs and BATCH not in self._known:
            return self._of_batch(inputs)
        if not self._known.issuperset(inputs):
            name = next(name for name in inputs if name not in self._known)
            names = [*self._names, *(one.name for one, _ in self._dense)]
            raise DataError(
                f"input {name!r:.120}: expected one of {', '.join(names)}"
                f"{did_you_mean(name, names)}"
            )
        singles, size = self._single_ids(inputs)
        has_others = None in singles
        features = self._features_of(inputs, singles) if has_others else singles
        dense = [self._tensor(one, dtype, inputs) for one, dtype in self._dense]
        sizes = set(map(len, dense))
        if has_others:  # singles have the batch size already
            sizes.update(one.batch_size for one in features if one is not None)
        if not sizes <= {1, size}:
            # Each as large as it says it is: offsets have more samples, or something is wrong.
            others = [
                one if single is None else None
                for one, single in zip(features, singles, strict=True)
            ]
            features, has_others = self._features_of(inputs, others), True
            size = self._batch_size(features, dense)
        # A bound of the same numbers: the check looks at each feature.
        if has_others or size > MAX_IDS or size * self._largest_sample > MAX_FLOATS:
            self._check_memory(features, size)
        whole = [one for one in features if one is not None]
        if has_others:
            whole = [
                _empty(one, size) if found is None else _repeated(found, size)
                for one, found in zip(self._features, features, strict=True)
            ]
        return (
            tuple(whole),
            [
                array if len(array) == size else np.repeat(array, size, axis=0)
                for array in dense
            ],
            size,
        )

    # --- ids ----------------------------------------------------------------------------------

    def _single_ids(self, inputs: Mapping[str, Array]) -> tuple[list[FeatureBatch | None], int]:
        """Return at once all features of which each sample has one id, None for the others.

        And the batch size, unless only the offsets of a feature have more samples.
        """
        others = inputs.keys() - self._plain
        names = self._names_of_singles
        if others:  # with `user.pad` or `user.values` beside it, `user` is something else
            bases = {name.rpartition(".")[0] for name in others}
            names = tuple("" if name in bases else name for name in names)
        try:
            size = max(1, *[len(inputs[name]) for name in inputs.keys() - others])
        except TypeError:  # one without dimensions, or there is none
            size = 1
        if size > MAX_IDS or not isinstance(inputs, dict):
            return [None] * len(names), size
        return single_ids(names, inputs, size), size

    def _features_of(
        self, inputs: Mapping[str, Array], found: Sequence[FeatureBatch | None]
    ) -> list[FeatureBatch | None]:
        """Return all features, those that were not found with the samples that they have."""
        return [
            one or self._feature(feature, inputs)
            for feature, one in zip(self._features, found, strict=True)
        ]

    def _feature(
        self, feature: ServedFeature, inputs: Mapping[str, Array]
    ) -> FeatureBatch | None:
        name = feature.name
        ids = inputs.get(name)
        values = inputs.get(f"{name}.values")
        if ids is not None and values is not None:
            raise DataError(f"input {name!r}: expected it or {name}.values, got both")
        if ids is not None:
            return _plain(feature, np.asarray(ids), inputs.get(f"{name}.pad"))
        if values is not None:
            return _usable(feature, _ragged(name, np.asarray(values), inputs))
        if feature.optional:
            return None
        raise DataError(
            f"input {name!r}: expected it, or {name}.values with {name}.offsets, got "
            f"{', '.join(inputs) or 'no inputs'}"
        )

    # --- dense --------------------------------------------------------------------------------

    def _tensor(
        self, spec: ServedTensor, dtype: np.dtype[Any], inputs: Mapping[str, Array]
    ) -> Array:
        given = inputs.get(spec.name)
        if given is None:
            raise DataError(f"input {spec.name!r}: expected it, got {', '.join(inputs)}")
        array = np.asarray(given)
        if spec.name in self._id_inputs:
            array = _dense_ids(spec.name, array, dtype)
        expected = spec.shape
        if array.ndim == 1 and expected == (1,):
            array = array[:, None]
        shape = array.shape[1:]
        fits = len(shape) == len(expected) and all(
            want in (-1, got) for want, got in zip(expected, shape, strict=True)
        )
        if not fits or array.ndim == 0:
            raise DataError(
                f"input {spec.name!r}: expected the shape {[-1, *expected]}, got "
                f"{list(array.shape)}"
            )
        if array.dtype != dtype:
            if not np.can_cast(array.dtype, dtype, "same_kind"):
                raise DataTypeError(f"input {spec.name!r}: expected {dtype}, got {array.dtype}")
            _check_range(spec.name, array, dtype)
            array = array.astype(dtype)
        # The model's tensor shares it: it must be its own, in order, and may be written.
        return np.require(array, requirements=("C", "W"))

    def _batch_size(self, features: Sequence[FeatureBatch | None], dense: list[Array]) -> int:
        sizes = [(one.name, one.batch_size) for one in features if one is not None]
        sizes += [
            (one.name, len(array)) for (one, _), array in zip(self._dense, dense, strict=True)
        ]
        size, of = 1, ""
        for name, its in sizes:
            if its in (1, size):
                of = of or name
                continue
            if size != 1 or its < 1:
                raise DataError(
                    f"input {name!r}: expected {max(size, 1)} samples"
                    f"{f' as in {of!r}' if size != 1 else ' or more'}, got {its}"
                )
            size, of = its, name
        return size

    def _check_memory(self, features: Sequence[FeatureBatch | None], size: int) -> None:
        """Refuse more samples than there shall be memory for, before it is taken."""
        num_floats = 0
        for (of_sample, of_id), one in zip(self._widths, features, strict=True):
            num_ids = 0
            if one is not None:
                num_ids = one.num_ids * (size if one.batch_size < size else 1)
                if num_ids > MAX_IDS:
                    raise DataError(
                        f"input {one.name!r}: expected at most {MAX_IDS} ids for {size} "
                        f"samples, got {num_ids}"
                    )
            num_floats += size * of_sample + num_ids * of_id
        num_floats += size * self._num_dense_floats
        if num_floats > MAX_FLOATS:
            raise DataError(
                f"expected a request of at most {MAX_FLOATS} numbers in vectors, got "
                f"{num_floats} of {size} samples"
            )

    # --- a whole batch ------------------------------------------------------------------------

    def _of_batch(
        self, inputs: Mapping[str, Array]
    ) -> tuple[tuple[FeatureBatch, ...], list[Array], int]:
        if len(inputs) > 1:
            raise DataError(
                f"input 'batch': expected no other beside it, got {len(inputs) - 1}"
            )
        given = np.asarray(inputs[BATCH])
        if given.dtype == np.uint8:
            data = given.tobytes()
        elif given.size == 1 and isinstance(given.reshape(-1)[0], bytes):
            data = given.reshape(-1)[0]
        else:
            raise DataTypeError(
                "input 'batch': expected the bytes of one PersiaBatch, got "
                f"{given.dtype} {list(given.shape)}"
            )
        batch = PersiaBatch.from_bytes(data)
        features = {one.name: one for one in batch.features}
        known = {one.name for one in self._features}
        for name in features:
            if name not in known:
                raise DataError(f"feature {name!r:.120}: expected one of {', '.join(known)}")
        ids = []
        for one in self._features:
            if one.name not in features and not one.optional:
                raise DataError(f"feature {one.name!r}: expected it in the batch")
            ids.append(_usable(one, features.get(one.name) or _empty(one, batch.batch_size)))
        self._check_memory(ids, batch.batch_size)
        arrays = batch.non_id_type_features
        if len(arrays) != len(self._dense):
            raise DataError(
                f"batch: expected {len(self._dense)} dense features, got {len(arrays)}"
            )
        by_name = {one.name: one.data for one in arrays}
        named = all(one.name in by_name for one, _ in self._dense)
        found = []
        for (spec, dtype), array in zip(self._dense, arrays, strict=True):
            given = by_name[spec.name] if named else array.data
            found.append(self._tensor(spec, dtype, {spec.name: given}))
        return tuple(ids), found, batch.batch_size


def _width(feature: ServedFeature, fixed_size: int) -> tuple[int, int]:
    """Return the numbers that each sample of a feature becomes, and those of each id."""
    if feature.kind in ("jagged", "ids"):
        return 0, feature.dim
    if feature.kind == "raw":
        return fixed_size * (feature.dim + 1), 0
    return feature.dim, 0


def _ids(name: str, given: Array) -> NDArray[np.uint64]:
    """Return integers, or texts by the rule that training has for them, as u64."""
    kind = given.dtype.kind
    if kind == "i":  # the id's bits, without training's warning of -1, a sixth of the decoding
        return given.astype(np.int64, copy=False).view(np.uint64)
    if kind == "u":
        return given.astype(np.uint64, copy=False)
    if kind in "SUO":
        texts = given.reshape(-1).tolist()
        try:
            found: NDArray[np.uint64] = hash_text(texts).reshape(given.shape)
            return found
        except DataError as exc:
            raise type(exc)(f"input {name!r}: {exc}") from None
    raise DataTypeError(f"input {name!r}: expected integers or texts, got {given.dtype}")


def _dense_ids(name: str, given: Array, dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Return ids for an input of the model, by their bits."""
    if dtype != np.int64 and given.dtype.kind in "SUO":
        raise DataTypeError(
            f"input {name!r}: expected {dtype}, as in the batch of the export, got texts, "
            "whose ids have 64 bits: export with int64"
        )
    return _ids(name, given).view(np.int64)


def _check_range(name: str, array: Array, dtype: np.dtype[Any]) -> None:
    """Refuse integers that would be others in the model's dtype."""
    if dtype.kind not in "iu" or not array.size:
        return
    known = np.iinfo(dtype)
    least, greatest = int(array.min()), int(array.max())
    if least < known.min or greatest > known.max:
        raise DataError(
            f"input {name!r}: expected {dtype}, as in the batch of the export, got "
            f"{greatest if greatest > known.max else least}: export with int64"
        )


def _plain(feature: ServedFeature, given: Array, pad: Array | None) -> FeatureBatch:
    name = feature.name
    if feature.single and pad is None and given.ndim == 2 and given.shape[1] != 1:
        raise DataError(
            f"input {name!r}: expected one id a sample, of shape [-1] or [-1, 1], as in "
            f"training, got {list(given.shape)}; several come with {name}.pad, or as "
            f"{name}.values and {name}.offsets"
        )
    if given.ndim == 2 and (given.shape[1] != 1 or pad is not None):
        return _padded(name, given, pad)
    if given.ndim not in (1, 2):
        raise DataError(
            f"input {name!r}: expected the shape [-1], [-1, 1] or [-1, n], got "
            f"{list(given.shape)}"
        )
    if pad is not None:
        return _padded(name, given[:, None], pad)
    return FeatureBatch.from_single(name, np.ascontiguousarray(_ids(name, given).reshape(-1)))


def _padded(name: str, given: Array, pad: Array | None) -> FeatureBatch:
    ids = _ids(name, given)
    if pad is None:
        edges = np.arange(len(ids) + 1, dtype=np.int64) * ids.shape[1]
        return FeatureBatch.from_csr(name, np.ascontiguousarray(ids).reshape(-1), edges)
    one = np.asarray(pad)
    if one.size != 1:
        raise DataError(f"input {name + '.pad'!r}: expected one id, got {one.size}")
    # A text stands for none as it is, an integer as the bits that it has.
    is_id = given != one.reshape(()) if given.dtype.kind in "SUO" else None
    mask = ids != _ids(name, one.reshape(1))[0] if is_id is None else np.asarray(is_id, bool)
    edges = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(np.count_nonzero(mask, axis=1), out=edges[1:])
    return FeatureBatch.from_csr(name, np.ascontiguousarray(ids[mask]), edges)


def _ragged(name: str, values: Array, inputs: Mapping[str, Array]) -> FeatureBatch:
    offsets, weights = inputs.get(f"{name}.offsets"), inputs.get(f"{name}.weights")
    if offsets is None:
        raise DataError(f"input {name + '.offsets'!r}: expected it beside {name}.values")
    edges = np.asarray(offsets)
    if edges.dtype.kind not in "iu" or edges.ndim != 1 or values.ndim != 1:
        raise DataError(
            f"input {name!r}: expected values [-1] and offsets [-1] of integers, got "
            f"{list(values.shape)} and {edges.dtype} {list(edges.shape)}"
        )
    factors = None
    if weights is not None:
        factors = np.asarray(weights)
        if factors.dtype.kind != "f":
            raise DataTypeError(
                f"input {name + '.weights'!r}: expected float32, got {factors.dtype}"
            )
        factors = np.ascontiguousarray(factors, np.float32)
    ids = np.ascontiguousarray(_ids(name, values))
    return FeatureBatch.from_csr(name, ids, edges.astype(np.int64), factors)


def _usable(feature: ServedFeature, batch: FeatureBatch) -> FeatureBatch:
    """Refuse weights of ids that the program looks up by itself: it takes none."""
    if feature.kind == "ids" and batch.weights is not None:
        raise DataError(
            f"input {feature.name + '.weights'!r}: expected no weights, as the model takes ids "
            "alone"
        )
    return batch


def _empty(feature: ServedFeature, size: int) -> FeatureBatch:
    edges = np.zeros(size + 1, np.int64)
    return FeatureBatch.from_csr(feature.name, np.empty(0, np.uint64), edges)


def _repeated(batch: FeatureBatch, size: int) -> FeatureBatch:
    """Return the one sample of a batch ``size`` times; its distinct ids stay as many."""
    if batch.batch_size == size:
        return batch
    num_ids = batch.num_ids
    inverse = np.tile(batch.inverse, size) if num_ids > 1 else batch.inverse.repeat(size)
    edges = None
    if batch.offsets is not None:
        edges = np.arange(size + 1, dtype=np.uint32) * np.uint32(num_ids)
    weights = None if batch.weights is None else np.tile(batch.weights, size)
    return FeatureBatch(batch.name, batch.distinct, inverse, edges, weights)
