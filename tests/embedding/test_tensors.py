"""Tensors of torch and of other libraries become batches without a copy of their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.tensors import JaggedArrays, as_array, jagged_arrays
from persia.errors import DataError, DataTypeError

LISTS = [[3, 7], [], [2**64 - 1, 3, 3]]
VALUES = torch.tensor([3, 7, -1, 3, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])
# What torch warns of once, where a nested tensor of its older layout is made.
PROTOTYPE = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
CUDA, PINNED = 2, 3  # DLPack's numbers of memory


class Other:
    """An array of another library, known by DLPack only."""

    def __init__(self, tensor: torch.Tensor, device: tuple[int, int] = (1, 0)) -> None:
        self._tensor, self._device = tensor, device

    def __dlpack__(self, **options: Any) -> Any:
        options.pop("max_version", None)
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class Own(torch.Tensor):
    """A subclass as users make them."""


class Jagged:
    """What TorchRec's JaggedTensor has."""

    def __init__(
        self,
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        self._values, self._offsets, self._weights = values, offsets, weights

    def values(self) -> torch.Tensor:
        return self._values

    def offsets(self) -> torch.Tensor:
        return self._offsets

    def lengths(self) -> torch.Tensor:
        return self._offsets.diff()

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights


class KeyedJagged(Jagged):
    """What TorchRec's KeyedJaggedTensor has beside."""

    def keys(self) -> list[str]:
        return ["user", "item"]


def nested(layout: torch.layout = torch.jagged) -> torch.Tensor:
    parts = [VALUES[:2], VALUES[:0], VALUES[2:]]
    made: torch.Tensor = torch.nested.nested_tensor(parts, layout=layout)
    return made


def of_values(values: torch.Tensor, offsets: torch.Tensor = OFFSETS) -> torch.Tensor:
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return made


def ids_of(feature: IDTypeFeature) -> list[list[int]]:
    """What was packed, which is what is looked up."""
    batch = feature.feature_batch
    ids = batch.distinct[batch.inverse]
    assert batch.offsets is not None
    lists = [part.tolist() for part in np.split(ids, batch.offsets[1:-1])]
    assert [sample.tolist() for sample in feature.data] == lists
    return lists


def begins_at(array: NDArray[Any], tensor: torch.Tensor) -> bool:
    return array.ctypes.data == tensor.data_ptr()


# --- dense data and labels --------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [lambda x: x, Other, lambda x: x.as_subclass(Own)])
def test_dense_data_is_the_memory_that_was_given(
    dtype: torch.dtype, given: Callable[[torch.Tensor], Any]
) -> None:
    tensor = torch.arange(6).reshape(3, 2).to(dtype)
    for item in (NonIDTypeFeature(given(tensor), "age"), Label(given(tensor), "click")):
        assert begins_at(item.data, tensor)
        assert np.shares_memory(item.data, tensor.numpy())
        assert item.data.dtype == tensor.numpy().dtype
        assert item.data.tolist() == tensor.tolist()


def test_the_memory_outlives_what_was_given() -> None:
    tensor = torch.arange(1000.0)
    item = Label(Other(tensor[500:]), "click")
    del tensor
    assert item.data.tolist() == list(map(float, range(500, 1000)))


@pytest.mark.parametrize(
    ("tensor", "is_copied"),
    [
        (torch.arange(12.0).reshape(4, 3)[1:], False),  # rows in a row
        (torch.arange(12.0).reshape(4, 3).t(), True),
        (torch.arange(12.0).reshape(4, 3)[:, :2], True),
        (torch.ones(1).expand(4), True),
        (torch.arange(4.0)._neg_view(), True),  # its memory has the other sign
    ],
)
def test_dense_data_with_gaps_is_copied(tensor: torch.Tensor, is_copied: bool) -> None:
    item = NonIDTypeFeature(tensor, "age")
    assert item.data.tolist() == tensor.tolist()
    assert item.data.flags.c_contiguous
    assert begins_at(item.data, tensor) is not is_copied


def test_arrow_columns_are_dense_data_by_dlpack() -> None:
    column = pa.array([1.5, 2.5])
    item = NonIDTypeFeature(column, "age")
    assert item.data.ctypes.data == column.buffers()[1].address
    with pytest.raises(DataTypeError, match=r"'age': .* got DoubleArray; .to_numpy\(zero_copy"):
        NonIDTypeFeature(pa.array([1.5, None]), "age")


# --- ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [lambda x: x, Other, lambda x: x.as_subclass(Own)])
def test_int64_ids_keep_memory_and_bits(given: Callable[[torch.Tensor], Any]) -> None:
    single = IDTypeFeatureWithSingleID("user", given(VALUES))
    assert single.data.tolist() == [3, 7, 2**64 - 1, 3, 3]
    assert begins_at(single.data, VALUES)
    strided = IDTypeFeatureWithSingleID("user", given(VALUES.repeat_interleave(2)[::2]))
    narrow = IDTypeFeatureWithSingleID("user", given(VALUES.to(torch.int32)))
    for each in (single, strided, narrow):
        batch = each.feature_batch
        assert batch.distinct[batch.inverse].tolist() == [3, 7, 2**64 - 1, 3, 3]


@pytest.mark.parametrize(
    "given",
    [
        lambda: nested(),
        pytest.param(lambda: nested(torch.strided), marks=PROTOTYPE),
        lambda: of_values(VALUES),
        lambda: of_values(torch.cat([VALUES, VALUES]), OFFSETS + 5),  # not from the first on
        lambda: of_values(torch.cat([VALUES, VALUES])),  # and not up to the last
        lambda: of_values(VALUES.to(torch.int32)),
        lambda: Jagged(VALUES, OFFSETS),
        lambda: Jagged(VALUES, OFFSETS.to(torch.int32)),
        lambda: [VALUES[:2], VALUES[:0], VALUES[2:]],
        lambda: [Other(VALUES[:2]), Other(VALUES[:0]), VALUES[2:].numpy()],
    ],
)
def test_jagged_ids_in_one_object(given: Callable[[], Any]) -> None:
    assert ids_of(IDTypeFeature("clicks", given())) == LISTS


@pytest.mark.parametrize("given", [of_values, lambda x: Jagged(x, OFFSETS)])
def test_jagged_ids_are_not_copied(given: Callable[[torch.Tensor], Any]) -> None:
    feature = IDTypeFeature("clicks", given(VALUES))
    assert begins_at(feature.data[0], VALUES)
    assert begins_at(feature.data[2], VALUES[2:])
    for make in (IDTypeFeature.from_csr, IDTypeFeature.from_jagged):
        assert begins_at(make("clicks", VALUES, OFFSETS).data[0], VALUES)
        assert begins_at(make("clicks", Other(VALUES), Other(OFFSETS)).data[0], VALUES)


def test_a_matrix_of_ids_is_not_copied() -> None:
    matrix = torch.tensor([[3, -1], [7, 7]])
    for given in (matrix, Other(matrix), matrix.numpy()):
        feature = IDTypeFeature("clicks", given)
        assert ids_of(feature) == [[3, 2**64 - 1], [7, 7]]
        assert begins_at(feature.data[1], matrix[1])
    assert ids_of(IDTypeFeature("clicks", matrix.t())) == [[3, 7], [2**64 - 1, 7]]
    assert ids_of(IDTypeFeature("clicks", matrix[:, :0])) == [[], []]


def test_samples_of_a_nested_tensor_may_have_gaps() -> None:
    matrix = torch.tensor([[3, 7, 9], [9, 9, 9], [-1, 3, 3]])
    begins, lengths = torch.tensor([0, 0, 0]), torch.tensor([2, 0, 3])
    cut = torch.nested.narrow(matrix, 1, begins, lengths, layout=torch.jagged)
    assert cut.lengths() is not None  # type: ignore[attr-defined]  # torch's stub has none
    assert ids_of(IDTypeFeature("clicks", cut)) == LISTS


WEIGHTS = torch.tensor([0.5, 1, 2, -1, 0])
WEIGHT_LISTS = [WEIGHTS[:2], WEIGHTS[2:2], WEIGHTS[2:]]


@pytest.mark.parametrize(
    "build",
    [
        lambda: IDTypeFeature("f", Jagged(VALUES, OFFSETS, WEIGHTS)),
        lambda: IDTypeFeature("f", of_values(VALUES), of_values(WEIGHTS)),
        lambda: IDTypeFeature("f", of_values(VALUES), WEIGHT_LISTS),
        lambda: IDTypeFeature("f", [VALUES[:2], VALUES[2:2], VALUES[2:]], of_values(WEIGHTS)),
        lambda: IDTypeFeature("f", nested(), [Other(own) for own in WEIGHT_LISTS]),
        lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS, WEIGHTS),
        lambda: IDTypeFeature.from_csr("f", Other(VALUES), Other(OFFSETS), Other(WEIGHTS)),
        lambda: IDTypeFeature.from_jagged(
            "f", VALUES, lengths=OFFSETS.diff(), weights=Other(WEIGHTS)
        ),
    ],
)
def test_weights_come_as_tensors_too(build: Callable[[], IDTypeFeature]) -> None:
    feature = build()
    assert ids_of(feature) == LISTS
    assert feature.feature_batch.weights is not None
    assert feature.feature_batch.weights.tolist() == WEIGHTS.tolist()


def test_weights_beside_a_matrix_of_ids() -> None:
    feature = IDTypeFeature("f", torch.tensor([[1, 2]]), torch.tensor([[0.5, 2.0]]))
    assert feature.feature_batch.weights is not None
    assert feature.feature_batch.weights.tolist() == [0.5, 2.0]
    own = IDTypeFeature("f", Jagged(VALUES, OFFSETS, WEIGHTS), of_values(2 * WEIGHTS))
    assert own.feature_batch.weights is not None
    assert own.feature_batch.weights.tolist() == (2 * WEIGHTS).tolist()  # not its own


def test_a_batch_of_tensors_is_the_batch_of_their_arrays() -> None:
    age, click = torch.arange(3.0)[:, None], torch.tensor([[1.0], [0.0], [1.0]])

    def build(of: Callable[[torch.Tensor], Any]) -> bytes:
        return PersiaBatch(
            [
                IDTypeFeatureWithSingleID("user", of(VALUES[:3])),
                IDTypeFeature.from_csr("clicks", of(VALUES), of(OFFSETS)),
            ],
            [NonIDTypeFeature(of(age), "age")],
            [Label(of(click), "click")],
        ).to_bytes()

    want = build(lambda tensor: tensor.numpy())
    assert build(lambda tensor: tensor) == want
    assert build(Other) == want


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda x: IDTypeFeatureWithSingleID("x", x),
        lambda x: IDTypeFeature("x", x),
        lambda x: IDTypeFeature("x", [x]),
        lambda x: Label(x, "x"),
    ],
)
def test_memory_of_a_device_is_refused(build: Callable[[Any], Any]) -> None:
    on_cuda = Other(torch.ones(3), (CUDA, 1))
    message = "'x': expected .* in CPU memory, got a Other .* type 2, number 1; copy it to the"
    with pytest.raises(DataTypeError, match=message):
        build(on_cuda)
    assert Label(Other(torch.ones(3), (PINNED, 0)), "x").batch_size == 3


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (torch.ones(2).as_subclass(Own).requires_grad_(), DataError, "no gradient.*detach"),
        (torch.ones(2, dtype=torch.bfloat16), DataTypeError, r"bfloat16 .*; call .float\(\)"),
        (
            Other(torch.ones(2, dtype=torch.bfloat16)),
            DataTypeError,
            "a Other that numpy",
        ),
        (torch.ones(2, 2).to_sparse(), DataTypeError, r"sparse_coo; call .to_dense\(\)"),
        (of_values(WEIGHTS), DataTypeError, "torch.jagged; torch.nested.to_padded_tensor"),
        (torch.ones(2, device="meta").as_subclass(Own), DataTypeError, "got meta; call .cpu"),
    ],
)
def test_dense_data_that_is_refused(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"dense feature 'age': .*{message}"):
        NonIDTypeFeature(given, "age")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IDTypeFeature("f", KeyedJagged(VALUES, OFFSETS)), "a KeyedJagged of several"),
        (lambda: IDTypeFeature("f", of_values(WEIGHTS)), "got float32; floats lose ids"),
        (lambda: IDTypeFeature("f", Jagged(WEIGHTS, OFFSETS)), "got float32; floats lose ids"),
        (lambda: IDTypeFeature("f", torch.ones(2, 2)), "got float32; floats lose ids"),
        (lambda: IDTypeFeature("f", VALUES), "one id for each sample is for IDTypeFeatureWith"),
        (lambda: IDTypeFeature("f", [Other(WEIGHTS)]), "sample 0: .*Other; floats lose ids"),
        (lambda: IDTypeFeatureWithSingleID("f", WEIGHTS), "float32 .*; floats lose ids"),
        (lambda: IDTypeFeatureWithSingleID("f", nested()), "dense tensor of integers.*jagged"),
        (lambda: IDTypeFeatureWithSingleID("f", VALUES[:, None]), "2 dim.*; .reshape"),
        (
            lambda: IDTypeFeature("f", of_values(VALUES), of_values(WEIGHTS, OFFSETS.clip(1))),
            "weights, sample 0: expected 2.* got 1",
        ),
    ],
)
def test_ids_that_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=f"feature 'f'.*({message})"):
        build()


# --- the module itself ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "ids", 3, [1], np.float32(1), np.ones(2), {"a": 1}])
def test_what_is_no_tensor_stays_what_it_is(value: Any) -> None:
    assert as_array("feature 'f'", "ids", value) is value
    assert jagged_arrays("feature 'f'", "ids", value) is None


def test_masked_arrays_are_no_tensors_although_they_have_dlpack() -> None:
    masked = np.ma.masked_array([1, 2], [True, False])
    assert as_array("label 'y'", "data", masked) is masked


def test_gaps_are_left_out_with_their_weights() -> None:
    class Narrow(Jagged):
        def lengths(self) -> torch.Tensor:
            return torch.tensor([1, 0, 2])

    found = jagged_arrays("feature 'f'", "ids", Narrow(VALUES, OFFSETS, WEIGHTS))
    assert isinstance(found, JaggedArrays)
    assert found.values.tolist() == [3, -1, 3]
    assert found.offsets.tolist() == [0, 1, 1, 3]
    assert found.weights is not None
    assert found.weights.tolist() == [0.5, 2, -1]


def test_torch_is_not_imported_for_arrays() -> None:
    program = """
import sys
import numpy as np
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, Label
IDTypeFeature("f", np.ones((2, 2), np.int64)); IDTypeFeatureWithSingleID("f", np.arange(2))
Label(np.ones(2))
assert "torch" not in sys.modules and "pyarrow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
