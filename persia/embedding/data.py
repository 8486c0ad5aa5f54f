"""The batch a user builds: id features, dense features, labels.

User data enters here. Everything is checked once, over whole arrays, before anything else has
happened; the code behind trusts what it gets. With
``PERSIA_SKIP_CHECK_DATA=1`` the checks of the dtypes and values of dense data and labels are
skipped; sizes, and everything that memory safety hangs on, are checked always.

Tensors of torch and of other libraries come in by ``persia.embedding.tensors``, which imports
none of them; pyarrow is optional and slow to import.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from persia import env
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc import serialization
from persia.embedding.tensors import (
    JaggedArrays,
    as_array,
    is_strided_nested,
    jagged_arrays,
)
from persia.errors import DataError, DataTypeError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

__all__ = [
    "MAX_BATCH_SIZE",
    "IDTypeFeature",
    "IDTypeFeatureWithSingleID",
    "Label",
    "NdarrayDataBase",
    "NonIDTypeFeature",
    "PersiaBatch",
]

# The original's limit, kept for code that reads it. Nothing enforces it: a batch may be as
# large as memory allows.
MAX_BATCH_SIZE = 65535

_BLOCK_KIND = b"PRSBAT01"


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise DataTypeError(
            f"expected a str as feature name, got {type(name).__name__}; the name comes first, "
            "as in IDTypeFeature('user', ids)"
        )
    if not name:
        raise DataError("expected a feature name, got ''")
    return name


def _items(what: str, given: Any, *kinds: type) -> tuple[Any, ...]:
    """Return a list's items, which are of these classes."""
    if given is None:
        return ()
    first = kinds[0].__name__
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        todo = "put it into a list" if isinstance(given, kinds) else f"[{first}(...)] is one"
        raise DataTypeError(f"{what}: expected a list, got {type(given).__name__}; {todo}")
    items = tuple(given)
    for number, item in enumerate(items):
        if not isinstance(item, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            todo = f"; make it by {first}(...)" if hasattr(item, "dtype") else ""
            raise DataTypeError(
                f"{what}[{number}]: expected {expected}, got {type(item).__name__}{todo}"
            )
    return items


def _samples(data: Any) -> Any:
    """Return the samples of an object array as pandas makes them, or nested ones, as a list."""
    if is_strided_nested(data):
        return list(data.unbind())
    return list(data) if isinstance(data, np.ndarray) and data.ndim else data


def _weights_of(where: str, weights: Any) -> Any:
    """Return the weights of a batch as one array per sample; None if there are none."""
    if weights is None:
        return None
    whole = jagged_arrays(where, "weights", weights)
    if whole is not None:
        return _split(whole.values, whole.offsets)
    samples = _samples(weights)
    if not isinstance(samples, list | tuple):
        return samples
    return [as_array(where, "weights", sample) for sample in samples]


def _split(values: NDArray[Any], offsets: NDArray[Any]) -> list[NDArray[Any]]:
    """Return what each sample has; views of ``values``."""
    return [values[i:j] for i, j in itertools.pairwise(offsets.tolist())]


def _not_finite(data: NDArray[Any]) -> str:
    """Return the first value that is not finite, with its sample; "" if all are."""
    is_finite = np.isfinite(data)
    if is_finite.all():
        return ""
    place = np.unravel_index(int(np.argmin(is_finite)), data.shape)
    return f"{data[place]} in sample {place[0]}"


class IDTypeFeature:
    """Ids of one feature, any number per sample; an empty sample is legal.

    Args:
        name: The feature's name, as in the embedding config.
        data: One 1-D array of uint64 per sample, or all samples at once: a matrix [B, L], a
            nested tensor, or TorchRec's JaggedTensor, whose ids are not copied. Other integers
            are taken too; signed ids keep their bits: -1 is 2**64 - 1. For arrays there may be
            torch tensors in CPU memory, and objects with ``__dlpack__`` there.
        weights: One 1-D array of float32 per sample, as long as its ids; the feature's rows
            are multiplied by them before they are summed, and so are their gradients. Only
            for slots that are pooled by sum. None: each id counts once, unless a JaggedTensor
            has weights of its own.

    Raises:
        DataTypeError: If an array is of another type; names feature and sample.
        DataError: If there is not one finite weight for each id, or offsets do not fit.

    Example:
        >>> import numpy as np
        >>> ids = [np.array([3, 7], np.uint64), np.array([], np.uint64)]
        >>> IDTypeFeature("clicks", ids).batch_size
        2

    ``from_csr``, ``from_jagged`` and ``from_arrow`` take a whole batch as one array of ids,
    without copying it; with them the time per sample is a small part of a list's.
    """

    def __init__(
        self,
        name: str,
        data: Any,
        weights: Any = None,
    ) -> None:
        where = f"feature {_check_name(name)!r}"
        whole = jagged_arrays(where, "ids", data)
        if whole is not None:
            if whole.values.dtype.kind == "f":
                raise DataTypeError(f"{where}: expected ids, got {whole.values.dtype}{_FLOATS}")
            self._take(name, whole, _weights_of(where, weights))
            return
        self.name = name
        samples, own = _samples(data), _weights_of(where, weights)
        self._data: Sequence[NDArray[np.uint64]] = samples
        self._csr: tuple[NDArray[np.uint64], NDArray[Any]] | None = None
        refused: DataTypeError | None = None
        try:
            self.feature_batch = FeatureBatch.from_list(name, samples, own)  # checks all of it
        except DataTypeError as exc:
            refused = exc  # handled below: what is raised there is not "during" this one
        if refused is not None:
            self._csr = _own_samples(name, samples, refused)
            if own is None:
                self.feature_batch = FeatureBatch.from_csr(name, *self._csr)
            else:  # whose weights are a list too
                self.feature_batch = FeatureBatch.from_list(name, list(self.data), own)

    def _take(self, name: str, ids: JaggedArrays, weights: Any) -> None:
        """Take a whole batch; ``weights``, one array a sample, come before those it has."""
        taken = IDTypeFeature.from_csr(name, *ids)
        self.name, self._data, self._csr = name, taken._data, taken._csr
        self.feature_batch = taken.feature_batch
        if weights is not None:
            self.feature_batch = FeatureBatch.from_list(name, list(self.data), weights)

    @classmethod
    def from_csr(
        cls,
        name: str,
        values: Any,
        offsets: Any,
        weights: Any = None,
    ) -> IDTypeFeature:
        """Take all ids of the batch in one array, or tensor.

        Args:
            name: The feature's name.
            values: Ids u64 [N], sample after sample; signed ones keep their bits as i64.
            offsets: int32, int64 or uint32 [B + 1], ascending from 0 to N: sample ``b``
                holds ``values[offsets[b]:offsets[b + 1]]``.
            weights: The weight of each id, float32 [N]; None: each counts once.
        """
        feature = cls.__new__(cls)
        where = f"feature {_check_name(name)!r}"
        feature.name = name
        values, offsets = as_array(where, "values", values), as_array(where, "offsets", offsets)
        weights = None if weights is None else as_array(where, "weights", weights)
        if isinstance(values, np.ndarray) and values.dtype.kind == "i" and values.ndim == 1:
            values = bits_of(name, values)
        try:
            feature.feature_batch = FeatureBatch.from_csr(name, values, offsets, weights)
        except DataError as exc:
            raise _explained(exc, values, offsets) from None
        feature._data, feature._csr = [], (values, offsets)
        return feature

    @classmethod
    def from_jagged(
        cls,
        name: str,
        values: Any,
        offsets: Any = None,
        *,
        lengths: Any = None,
        weights: Any = None,
    ) -> IDTypeFeature:
        """Take a jagged pair of tensors (or arrays) in CPU memory.

        Args:
            name: The feature's name.
            values: Ids [N] of an integer dtype. Signed ids keep their bits: -1 is 2**64 - 1.
            offsets: int32 or int64 [B + 1], ascending from 0 to N; or else
            lengths: int32 or int64 [B], the number of ids of each sample.
            weights: The weight of each id, float32 [N]; None: each counts once.
        """
        where = f"feature {_check_name(name)!r}"
        ids = as_array(where, "values", values)
        if (offsets is None) is (lengths is None):
            both = "neither" if offsets is None else "both"
            raise DataError(
                f"feature {name!r}: expected offsets, or lengths as TorchRec's, got {both}"
            )
        if lengths is not None:
            offsets = _offsets_of(name, as_array(where, "lengths", lengths))
            if isinstance(ids, np.ndarray) and offsets[-1] != ids.size:
                raise DataError(
                    f"{where}: expected lengths that sum to {ids.size}, the ids given, got "
                    f"{offsets[-1]}"
                )
        return cls.from_csr(name, ids, offsets, weights)

    @classmethod
    def from_arrow(cls, name: str, list_array: Any) -> IDTypeFeature:
        """Take an Arrow list array: ``list``, ``large_list`` or ``fixed_size_list``.

        Of uint64 or int64, sliced or not, or a chunked array of one chunk. Signed ids keep
        their bits: -1 is 2**64 - 1. An absent (null) list is an empty sample.
        """
        return cls.from_csr(name, *_from_arrow(_check_name(name), list_array))

    @property
    def data(self) -> Sequence[NDArray[np.uint64]]:
        """One array of ids per sample."""
        if self._csr is not None:
            self._data = _split(*self._csr)
            self._csr = None
        return self._data

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self.feature_batch.batch_size


class IDTypeFeatureWithSingleID:
    """Ids of one feature, exactly one per sample.

    Args:
        name: The feature's name, as in the embedding config.
        data: Ids u64 [B]; an array with gaps, such as a column of a matrix, is copied. Other
            integers and tensors are taken as ``IDTypeFeature`` takes them.

    Example:
        >>> import numpy as np
        >>> IDTypeFeatureWithSingleID("user", np.array([10001, 10002], np.uint64)).batch_size
        2
    """

    def __init__(self, name: str, data: Any) -> None:
        self.name = _check_name(name)
        data = as_array(f"feature {name!r}", "ids", data)
        refused: DataTypeError | None = None
        try:
            self.feature_batch = FeatureBatch.from_single(name, data)
        except DataTypeError as exc:
            refused = exc
        if refused is not None:
            data = _own_ids(name, data, refused)
            self.feature_batch = FeatureBatch.from_single(name, data)
        self.data: NDArray[np.uint64] = data

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self.feature_batch.batch_size


class NdarrayDataBase:
    """An array with one entry per sample, which becomes a tensor of the same dtype.

    Args:
        data: Array [B, ...] of bool, an integer or a float dtype that torch has, a torch tensor
            in CPU memory, or an object with ``__dlpack__`` there; one with gaps is copied.
            numpy has no bfloat16: write ``.float()``, which copies, or ``.half()``.
        name: Its name; the class's ``DEFAULT_NAME`` if not given.

    The array is not copied: do not write to it before its batch is consumed.
    """

    DEFAULT_NAME: ClassVar[str] = "ndarray_base"
    _WHAT: ClassVar[str] = "data"

    def __init__(self, data: Any, name: str | None = None) -> None:
        self._name = name if name is None else _check_name(name)
        given: object = as_array(f"{self._WHAT} {self.name!r}", "data", data)
        # A masked array would lose its mask on the way.
        if not isinstance(given, np.ndarray) or isinstance(given, np.ma.MaskedArray):
            raise DataTypeError(
                f"{self._WHAT} {self.name!r}: expected a numpy array, got "
                f"{type(data).__name__}{_to_array(given)}"
            )
        data = given
        if data.ndim < 1:
            raise DataTypeError(
                f"{self._WHAT} {self.name!r}: expected at least 1 dimension, got {data.ndim}"
            )
        if not env.skip_check_data():
            self._check_values(data)
        self.data: NDArray[Any] = np.ascontiguousarray(data)

    def _check_values(self, data: NDArray[Any]) -> None:
        # What torch.from_numpy takes; 2 is a dtype of another package, such as a float8.
        dtype = data.dtype
        is_plain = dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.isnative
        if not is_plain or dtype.isbuiltin == 2:
            todo = "; .astype(np.float32) makes numbers of it"
            if any(isinstance(value, str | bytes) for value in data.flat):
                todo = "; texts are ids: IDTypeFeatureWithSingleID(name, hash_text(texts))"
            raise DataTypeError(
                f"{self._WHAT} {self.name!r}: expected a dtype of bool, or of integers or "
                f"floats of at most 64 bits, got {dtype}{todo}"
            )

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return int(self.data.shape[0])

    @property
    def name(self) -> str:
        """The name given, or the class's default."""
        return self._name or self.DEFAULT_NAME

    def __len__(self) -> int:
        return self.batch_size


class Label(NdarrayDataBase):
    """What the model shall predict; see ``NdarrayDataBase``.

    A value that is not finite is a DataError: it would make every parameter NaN.
    """

    DEFAULT_NAME = "label_anonymous"
    _WHAT = "label"

    def _check_values(self, data: NDArray[Any]) -> None:
        super()._check_values(data)
        if data.dtype.kind == "f" and (found := _not_finite(data)):
            raise DataError(f"label {self.name!r}: expected finite values, got {found}")


class NonIDTypeFeature(NdarrayDataBase):
    """Dense input of the model; see ``NdarrayDataBase``."""

    DEFAULT_NAME = "non_id_type_feature_anonymous"
    _WHAT = "dense feature"
    _warned: ClassVar[set[str]] = set()  # features that were warned of

    def _check_values(self, data: NDArray[Any]) -> None:
        super()._check_values(data)
        if data.dtype.kind != "f" or self.name in self._warned:
            return
        # A model may know what to do with NaN, so it is no error; most make the loss NaN by it.
        if found := _not_finite(data):
            self._warned.add(self.name)
            logger.warning(
                "dense feature %r: %s of a batch; unless the model expects it, the loss and "
                "then every parameter become NaN (logged once)",
                self.name,
                found,
            )


class PersiaBatch:
    """One batch: id features, dense features, labels and bytes of the user's own.

    A batch is not changed by being sent, so it can be sent again.

    Args:
        id_type_features: Id features, at least one, each name once.
        non_id_type_features: Dense features, each name once if they have names.
        labels: Labels, likewise. ``[]`` is for a loss that needs none.
        batch_size: Number of samples; that of the first id feature if not given.
        requires_grad: Whether embeddings shall be trained by this batch.
        meta: Bytes that travel along.

    Raises:
        DataTypeError: If an argument is of another type.
        DataError: If parts do not fit together, two of a kind have one name, or labels are
            None where gradients are asked.

    Example:
        >>> import numpy as np
        >>> users = IDTypeFeatureWithSingleID("user", np.array([1, 2, 2], np.uint64))
        >>> batch = PersiaBatch([users], labels=[Label(np.array([[1.0], [0.0], [1.0]]))])
        >>> batch.batch_size
        3

    Attributes:
        features: The id features as ``FeatureBatch``, in the order given.
        single: Names of those that were given as ``IDTypeFeatureWithSingleID``.
        batch_id: Number that the sender of the batch gives it; None before.
    """

    def __init__(
        self,
        id_type_features: Sequence[IDTypeFeature | IDTypeFeatureWithSingleID],
        non_id_type_features: Sequence[NonIDTypeFeature] | None = None,
        labels: Sequence[Label] | None = None,
        batch_size: int | None = None,
        requires_grad: bool = True,
        meta: bytes | None = None,
    ) -> None:
        ids = _items(
            "id_type_features",
            id_type_features,
            *(IDTypeFeature, IDTypeFeatureWithSingleID, FeatureBatch),
        )
        if not ids:
            raise DataError("id_type_features: expected at least one, got none")
        dense = _items(
            "non_id_type_features", non_id_type_features, NonIDTypeFeature, NdarrayDataBase
        )
        targets = _items("labels", labels, Label)
        if meta is not None and not isinstance(meta, bytes):
            raise DataTypeError(
                f"meta: expected bytes, got {type(meta).__name__}; encode it first"
            )
        if requires_grad and labels is None:
            raise DataError(
                "labels: expected a label where gradients are asked, got none; pass "
                "labels=[Label(...)], labels=[] if the loss needs none, or "
                "requires_grad=False for evaluation"
            )
        self.features: tuple[FeatureBatch, ...] = tuple(
            each if isinstance(each, FeatureBatch) else each.feature_batch for each in ids
        )
        self.single = frozenset(
            [x.name for x in ids if isinstance(x, IDTypeFeatureWithSingleID)]
        )
        _check_once(dense)
        _check_once(targets)
        self._batch_size = _common_size(self.features, (*dense, *targets), batch_size)
        self._dense: tuple[NdarrayDataBase, ...] = dense
        self._labels: tuple[Label, ...] = targets
        self._requires_grad = bool(requires_grad)
        self._meta = meta
        self.batch_id: int | None = None

    @property
    def id_type_features(self) -> list[FeatureBatch]:
        """The id features, in the order given."""
        return list(self.features)

    @property
    def non_id_type_features(self) -> list[NdarrayDataBase]:
        """The dense features, in the order given."""
        return list(self._dense)

    @property
    def labels(self) -> list[Label]:
        """The labels, in the order given."""
        return list(self._labels)

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self._batch_size

    @property
    def requires_grad(self) -> bool:
        """Whether embeddings shall be trained by this batch."""
        return self._requires_grad

    @property
    def meta(self) -> bytes | None:
        """Bytes of the user's own."""
        return self._meta

    @property
    def data(self) -> PersiaBatch:
        """The batch itself; the original kept a native object here."""
        return self

    def to_bytes(self) -> bytes:
        """Return the batch as one run of bytes, for ``from_bytes``.

        The layout is that of ``persia._rpc.serialization`` with kind ``PRSBAT01``. Its header
        holds ``size``, ``grad``, ``id`` and ``meta`` of the batch; ``features``, a list of
        [name, number of arrays]; and ``dense`` and ``labels``, lists of names or nil. The
        arrays are, per feature, its distinct ids u64 [D], the number of each id among them u32
        [N] and, unless each sample has one id, offsets u32 [B + 1]; a fourth array, if there is
        one, is the weights f32 [N]; then dense features; then labels.
        """
        features: list[list[object]] = []
        arrays: list[NDArray[Any]] = []
        for feature in self.features:
            parts = feature.parts()
            features.append([feature.name, len(parts)])
            arrays += parts
        header = {
            "size": self._batch_size,
            "grad": self._requires_grad,
            "id": self.batch_id,
            "meta": self._meta,
            "features": features,
            "dense": [item._name for item in self._dense],
            "labels": [item._name for item in self._labels],
        }
        arrays += [item.data for item in (*self._dense, *self._labels)]
        return serialization.pack(_BLOCK_KIND, header, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> PersiaBatch:
        """Return the batch that ``to_bytes`` wrote.

        Raises:
            ProtocolError: If the bytes are not such a batch, or are damaged.
        """
        header, arrays = serialization.unpack(_BLOCK_KIND, data)
        remaining = arrays[::-1]

        def take() -> NDArray[Any]:
            if not remaining:
                raise DataError(f"expected more arrays, got {len(arrays)}")
            return remaining.pop()

        batch = cls.__new__(cls)
        try:
            features: list[Any] = [
                FeatureBatch.from_parts(
                    _check_name(name), [take() for _ in range(_typed(num_parts, int))]
                )
                for name, num_parts in _typed(header["features"], list)
            ]
            dense = [NonIDTypeFeature(take(), name) for name in _typed(header["dense"], list)]
            labels = [Label(take(), name) for name in _typed(header["labels"], list)]
            size, grad = _typed(header["size"], int), _typed(header["grad"], bool)
            PersiaBatch.__init__(batch, features, dense, labels, size, grad, header["meta"])
            if header["id"] is not None:
                batch.batch_id = _typed(header["id"], int)
            if remaining:
                raise DataError(f"expected {len(arrays) - len(remaining)} arrays, got more")
        except (DataError, KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"expected a batch, got bytes that say: {exc}") from exc
        return batch


def _check_once(arrays: Sequence[NdarrayDataBase]) -> None:
    """Refuse two arrays of one name; those without one share their class's default."""
    names: set[str] = set()
    for item in arrays:
        if item._name in names and item._name != item.DEFAULT_NAME:
            raise DataError(
                f"{item._WHAT} {item._name!r}: expected once in a batch, got twice; give the "
                "other a name of its own"
            )
        if item._name is not None:
            names.add(item._name)


def _common_size(
    features: Sequence[FeatureBatch], arrays: Sequence[NdarrayDataBase], batch_size: int | None
) -> int:
    """Return the number of samples that all parts of a batch have; refuse what does not fit."""
    names: set[str] = set()
    for feature in features:
        if feature.name in names:
            raise DataError(
                f"feature {feature.name!r}: expected once in a batch, got twice; give the "
                "other a name of its own, and both a feature group if they share rows"
            )
        names.add(feature.name)
    source = "batch_size"
    if batch_size is None:
        source = f"feature {features[0].name!r}"
        batch_size = features[0].batch_size
    elif isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise DataTypeError(f"batch_size: expected an integer, got {type(batch_size).__name__}")
    batch_size = int(batch_size)
    if batch_size < 1:
        raise DataError(f"{source}: expected at least 1 sample, got {batch_size}")
    sizes = [(f"feature {feature.name!r}", feature.batch_size) for feature in features]
    sizes += [(f"{item._WHAT} {item.name!r}", item.batch_size) for item in arrays]
    for what, size in sizes:
        if size != batch_size:
            raise DataError(f"{what}: expected {batch_size} samples as in {source}, got {size}")
    return batch_size


def _typed(value: Any, kind: type) -> Any:
    """Return ``value`` if it is exactly of that type; bool is no int here."""
    if type(value) is not kind:
        raise DataTypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _offsets_of(name: str, lengths: Any) -> NDArray[np.int64]:
    """Return where each sample begins among the ids, i64 [B + 1], from lengths [B].

    A length below 0 makes them descend, which ``FeatureBatch`` refuses.
    """
    is_array = isinstance(lengths, np.ndarray)
    if not is_array or lengths.ndim != 1 or lengths.dtype not in (np.int32, np.int64):
        got = (
            f"{lengths.dtype} of shape {lengths.shape}" if is_array else type(lengths).__name__
        )
        raise DataTypeError(
            f"feature {name!r}: expected lengths as 1-D int32 or int64, got {got}"
        )
    return edges_of(lengths)


def _explained(error: DataError, values: Any, offsets: Any) -> DataError:
    """Return an error, with what to write for offsets as ``nn.EmbeddingBag`` takes them."""
    last = offsets[-1] if isinstance(offsets, np.ndarray) and offsets.size else None
    if isinstance(error, DataTypeError) or last is None or not last < np.size(values):
        return error
    return DataError(
        f"{error}; the last is the number of ids, which nn.EmbeddingBag leaves out: append it"
    )


# --- what users give in place of arrays of uint64 ---------------------------------------------

_warned_of_minus_one: set[str] = set()  # features
_NO_VALUES = frozenset(("None", "nan", "<NA>", "NaT"))  # as texts: pandas is not imported
_FLOATS = "; floats lose ids above 2**53: read them as integers"
_LEAVE_OUT = "leave missing ids out, a sample of an IDTypeFeature may be empty"


def _own_samples(
    name: str, samples: Any, refused: DataTypeError
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return ids and where each sample begins, of what a ``FeatureBatch`` refused."""
    samples = as_array(f"feature {name!r}", "ids", samples)
    if isinstance(samples, np.ndarray) or _are_numbers(samples):
        raise DataTypeError(
            f"{refused}; one id for each sample is for IDTypeFeatureWithSingleID"
        )
    if not isinstance(samples, list | tuple):
        raise refused
    # All at once: one by one, thousands of small arrays take milliseconds.
    try:
        arrays = samples if type(samples[0]) is np.ndarray else [x.numpy() for x in samples]
        ids = np.concatenate(arrays)
        is_fit = ids.ndim == 1 and ids.dtype.kind in "iu"
    except Exception:  # of whatever is in it
        is_fit = False
    if not is_fit:  # the first that cannot be used is named here
        arrays = [as_array(f"feature {name!r}", "ids", sample) for sample in samples]
        none = np.empty(0, np.uint64)  # in place of those that can
        try:
            pairs = zip(arrays, samples, strict=True)
            FeatureBatch.from_list(name, [none if _are_ids(x) else own for x, own in pairs])
        except DataTypeError as exc:
            refused = exc
        arrays = [_own_ids(name, ids, refused) for ids in arrays]
        ids = np.concatenate(arrays)
    edges = edges_of(np.fromiter(map(len, arrays), np.int64, len(arrays)))
    return _own_ids(name, ids, refused), edges


def _are_numbers(samples: Any) -> bool:
    is_list = isinstance(samples, list | tuple) and len(samples) > 0
    return is_list and isinstance(samples[0], int | np.integer)


def _are_ids(ids: Any) -> bool:
    return type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype.kind in "iu"


def _own_ids(name: str, ids: Any, refused: DataTypeError) -> NDArray[np.uint64]:
    """Return ids of another integer dtype, or of a tensor, as u64; or raise ``refused``."""
    if type(ids) is not np.ndarray:
        ids = as_array(f"feature {name!r}", "ids", ids)
    if type(ids) is not np.ndarray or ids.dtype.kind == "O":
        raise DataTypeError(f"{refused}{_of_missing(ids)}")
    kind = ids.dtype.kind
    if _are_ids(ids):
        return bits_of(name, ids)
    hint = ""
    if kind == "f":
        hint = (
            f"; NaN is no id: {_LEAVE_OUT}, and read the others as integers"
            if np.isnan(ids).any()
            else _FLOATS
        )
    elif ids.ndim == 2 and kind in "iu":
        hint = (
            "; .reshape(-1) makes one of a matrix of one column, "
            f"IDTypeFeature({name!r}, list(ids)) takes several ids a sample"
        )
    raise DataTypeError(f"{refused}{hint}")


def _of_missing(ids: Any) -> str:
    """Say what to do with None, NaN and pandas' NA, if there are such among ids."""
    try:
        values = np.asarray(ids).flat
    except Exception:  # of whatever was given
        return ""
    missing = next((each for each in map(str, values) if each in _NO_VALUES), None)
    return f"; {missing} is no id: {_LEAVE_OUT}" if missing else ""


def bits_of(name: str, ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Return integers as u64; signed ones by the bits that they have as i64."""
    if ids.dtype.kind == "u":
        return ids.astype(np.uint64, copy=False)
    ids = ids.astype(np.int64, copy=False)
    # ``count_nonzero`` takes a fifth of the time of ``any`` for a request's few ids.
    if name not in _warned_of_minus_one and np.count_nonzero(ids == -1):
        _warned_of_minus_one.add(name)
        logger.warning(
            "feature %r: -1 is taken as an id like any other, 2**64 - 1; if it stands for a "
            "missing one, leave it out: a sample of an IDTypeFeature may be empty (said once)",
            name,
        )
    return ids.view(np.uint64)


def _to_array(given: Any) -> str:
    """Say what to type for a dense array that came as something else."""
    package = type(given).__module__.split(".")[0]
    if package in ("pandas", "polars"):
        return "; .to_numpy() makes one of it"
    if package == "pyarrow":
        return "; .to_numpy(zero_copy_only=False) makes one of it"
    is_list = isinstance(given, list | tuple | int | float | np.generic)
    return "; np.asarray(data, np.float32) makes one of it" if is_list else ""


def edges_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each sample begins, and their end, from how many ids each has."""
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=edges[1:])
    return edges


def flat_list(array: Any) -> tuple[Any, NDArray[np.int64]]:
    """Return the entries of an Arrow list array, and where each list begins among them."""
    ids = array.flatten()  # it knows of slices, and leaves out what lies behind an absent list
    if array.null_count or not hasattr(array, "offsets"):  # lists of a fixed size have none
        lengths = array.value_lengths().fill_null(0)
        return ids, edges_of(lengths.to_numpy(zero_copy_only=False))
    offsets = array.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return ids, offsets


def _from_arrow(name: str, array: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return ids and offsets of an Arrow list array; ids without a copy if it can be done."""
    expected = f"feature {name!r}: expected an Arrow list array of uint64 or int64"
    if type(array).__module__.split(".")[0] != "pyarrow":
        raise DataTypeError(
            f"{expected}, got {type(array).__name__}; IDTypeFeature({name!r}, samples) takes a "
            "list of numpy arrays"
        )
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        if array.num_chunks != 1:
            raise DataError(
                f"feature {name!r}: expected a chunked array of one chunk, got "
                f"{array.num_chunks}; call .combine_chunks() on it"
            )
        array = array.chunk(0)
    is_list = isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray)
    # A map is a list too, without a type of its values.
    value_type = getattr(array.type, "value_type", None) if is_list else None
    if value_type not in (pa.uint64(), pa.int64()):
        raise DataTypeError(f"{expected}, got {getattr(array, 'type', type(array))}")
    ids, offsets = flat_list(array)
    if ids.null_count:
        place = int(np.argmin(ids.is_valid().to_numpy(zero_copy_only=False)))
        sample = int(np.searchsorted(offsets, place, side="right")) - 1
        raise DataError(f"feature {name!r}: expected ids, got a null in sample {sample}")
    return ids.to_numpy(), offsets
