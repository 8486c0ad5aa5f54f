"""Every message and exception there and back, and what is refused on either side."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia import errors
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.codec import (
    ArrayReader,
    ArrayWriter,
    ErrorOrigin,
    coder_of,
    error_from_body,
    error_to_body,
)
from persia._rpc.frame import BFLOAT16, DTYPES, Failure, Reply, decode, encode
from persia._rpc.messages import (
    FoundRows,
    IDFeatures,
    JaggedOutput,
    LookupReply,
    LookupRequest,
    LookupResult,
    NamedArray,
    OptimizerSettings,
    PooledOutput,
    RawOutput,
    RowPiece,
    SlotGradient,
    TableEntries,
    TableGradients,
    TableRows,
    TableSigns,
    UpdateRequest,
    WireDtypes,
)
from persia._rpc.methods import Hello
from persia.errors import (
    DataTypeError,
    InternalError,
    PersiaError,
    ProtocolError,
    RemoteError,
    ServiceBusy,
)
from tests.reference import halves as model
from tests.reference.ids import number
from tests.rpc.support import message_classes, place, same
from tests.support.profiles import tries
from tests.support.strategies import ids, samples

MESSAGES = message_classes()
AXES = {"rows": 2, "values": 2, "states": 2, "gradients": 2, "gradient": 2}
INT = st.integers(-(2**63), 2**64 - 1)
FLOAT = st.floats(allow_nan=False)


@st.composite
def feature_batches(draw: st.DrawFn) -> FeatureBatch:
    name = draw(st.text(max_size=4).filter(bool))
    if draw(st.booleans()):
        batch = FeatureBatch.from_single(name, np.array(draw(st.lists(ids())), np.uint64))
    else:
        rows = [np.array(row, np.uint64) for row in draw(samples(4, 4))]
        batch = FeatureBatch.from_list(name, rows)
    if draw(st.booleans()):
        return batch
    weights = np.linspace(-1, 1, batch.num_ids, dtype=np.float32)
    return FeatureBatch(name, batch.distinct, batch.inverse, batch.offsets, weights=weights)


def values_of(hint: Any, name: str) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may have."""
    origin, arguments = get_origin(hint), get_args(hint)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: INT,
        float: FLOAT,
        bool: st.booleans(),
        str: st.text(max_size=4),
        type(None): st.none(),
        FeatureBatch: feature_batches(),
    }
    if hint in plain:
        return plain[hint]
    if dataclasses.is_dataclass(hint):
        return instances(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(option, name) for option in arguments])
    if origin is np.ndarray:
        axes = AXES.get(name, 1)
        shapes = hnp.array_shapes(min_dims=axes, max_dims=axes, min_side=0, max_side=4)
        (scalar,) = get_args(arguments[1])
        if scalar is Any:
            shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
            scalar = st.sampled_from(list(DTYPES.values()))
            return scalar.flatmap(lambda dtype: hnp.arrays(dtype, shapes))
        return hnp.arrays(scalar, shapes)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*[values_of(part, name) for part in arguments])
    if origin is Mapping:
        return st.dictionaries(st.text(max_size=3), values_of(arguments[1], name), max_size=3)
    make = list if origin in (list, Sequence) else tuple
    return st.lists(values_of(arguments[0], name), max_size=3).map(make)


def instances(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    fields = {f.name: values_of(hints[f.name], f.name) for f in dataclasses.fields(cls)}
    if cls is PooledOutput:
        fields["index"] = st.none()  # or one that the values agree with, below
    return st.builds(cls, **fields)


def read(cls: Any, body: Any, *arrays: Any) -> Any:
    reader = ArrayReader(arrays)
    value = coder_of(cls).read(body, cls.__name__, reader)
    reader.check_all_taken(cls.__name__)
    return value


def there_and_back(cls: Any, value: Any) -> Any:
    arrays = ArrayWriter()
    body = coder_of(cls).write(value, cls.__name__, arrays)
    reply = decode(encode(Reply(1, 1, body, tuple(arrays))))
    return read(cls, reply.body, *reply.arrays)


@pytest.mark.parametrize("cls", [*MESSAGES, Hello], ids=lambda cls: cls.__name__)
@tries(25)
@given(data=st.data())
def test_every_message_there_and_back(cls: Any, data: Any) -> None:
    message = data.draw(instances(cls))
    assert same(there_and_back(cls, message), message)


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    sent = UpdateRequest((np.int64(3), np.uint64(2**64 - 1)), ())
    assert there_and_back(UpdateRequest, sent).update_id == (3, 2**64 - 1)
    options = {"lr": 1, "flag": np.bool_(True)}
    sent_too = OptimizerSettings("sgd", options)  # type: ignore[arg-type]
    back = there_and_back(OptimizerSettings, sent_too)
    assert back.options == {"lr": 1.0, "flag": True}


FLOATS = hnp.arrays(
    np.uint32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9),
    elements=st.integers(0, 2**32 - 1),
).map(lambda words: words.view(np.float32))
INDEX = np.arange(3)
SIGNS = np.arange(3, dtype=np.uint64)
# A message around floats, and which of the dtypes is theirs.
TRAVELLERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda floats: TableRows(1, floats, None), "rows"),
    (lambda floats: PooledOutput("a", floats), "rows"),
    (lambda floats: RawOutput("a", floats, INDEX, 2), "rows"),
    (lambda floats: JaggedOutput("a", floats, INDEX, INDEX), "rows"),
    (lambda floats: TableGradients(1, SIGNS, None, floats), "gradients"),
    (lambda floats: SlotGradient("a", floats), "gradients"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("make", "kind"), TRAVELLERS)
@tries(25)
@given(floats=FLOATS)
def test_rows_and_gradients_in_two_bytes_are_the_nearest_that_these_have(
    make: Any, kind: str, dtype: str, floats: Any
) -> None:
    """NaN and infinities stay; what is beyond float16's largest becomes that."""
    message = make(floats)
    arrays = ArrayWriter(WireDtypes(**{kind: dtype}))
    body = coder_of(type(message)).write(message, type(message).__name__, arrays)
    parts = encode(Reply(1, 1, body, tuple(arrays)))
    reply = decode([bytes(part) for part in parts])
    floats_part = [len(part) for part in parts].index(2 * floats.size, 2)
    if floats.size:
        # Nothing is copied beside the conversion.
        sent = arrays[floats_part - 2]
        assert np.shares_memory(np.frombuffer(parts[floats_part], np.uint8), sent)
    held = model.held(dtype, floats.reshape(-1)).reshape(floats.shape)
    if dtype == "float16" and isinstance(message, SlotGradient):
        held = held.astype(np.float16)  # as a user may send it
    found = read(type(message), reply.body, *reply.arrays)
    assert same(quiet(found), quiet(make(held)))
    other = ArrayWriter(WireDtypes(**{{"rows": "gradients", "gradients": "rows"}[kind]: dtype}))
    coder_of(type(message)).write(message, "", other)
    assert any(array is floats for array in other)


def quiet(message: Any) -> Any:
    """The message with every NaN the same one: of which kind it is says nothing."""
    changes = {
        field.name: np.where(np.isnan(value), value.dtype.type(np.nan), value)
        for field in dataclasses.fields(message)
        if isinstance(value := getattr(message, field.name), np.ndarray)
        and value.dtype.kind == "f"
    }
    return dataclasses.replace(message, **changes)


def test_whole_rows_and_users_arrays_travel_as_they_are() -> None:
    bfloat16 = WireDtypes("bfloat16", "bfloat16")
    floats = np.full((2, 2), 1 / 3, np.float32)
    signs = np.arange(2, dtype=np.uint64)
    for message in (
        TableEntries(0, signs, floats, None),
        FoundRows(np.ones(2, np.uint8), floats, None),
        RowPiece(signs, floats, None, None, 0),
        NamedArray("dense", floats),
        SlotGradient("a", floats.astype(np.float16)),  # short already
    ):
        arrays = ArrayWriter(bfloat16)
        coder_of(type(message)).write(message, "", arrays)
        assert all(array.dtype != BFLOAT16 for array in arrays)
    for cls, body in ((NamedArray, ["dense", 0]), (FoundRows, [0, 1, None])):
        found = [np.ones(2, np.uint8), np.zeros((2, 2), BFLOAT16)][2 - len(body) + 1 :]
        with pytest.raises(ProtocolError, match="bfloat16"):
            read(cls, body, *found)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@tries(40)
@given(
    index=st.lists(st.integers(0, 5), max_size=12).map(lambda x: number(x)[1]),
    dim=st.integers(0, 9),
)
def test_vectors_that_repeat_are_sent_once(index: list[int], dim: int, dtype: str) -> None:
    numbers = np.array(index, np.uint32)
    rows = np.random.default_rng(0).normal(size=(6, dim)).astype(np.float32)
    output = PooledOutput("a", rows[numbers], numbers)
    arrays = ArrayWriter(WireDtypes(rows=dtype))
    body = coder_of(PooledOutput).write(output, "", arrays)
    num_distinct = len(set(index))
    repeats = bool(index) and num_distinct <= 0.75 * len(index)
    assert len(arrays[0]) == (num_distinct if repeats else len(index))
    assert [array.dtype for array in arrays[1:]] == ([np.uint8] if repeats else [])
    reply = decode(encode(Reply(1, 1, body, tuple(arrays))))
    found = read(PooledOutput, reply.body, *reply.arrays)
    held = model.held(dtype, output.values.reshape(-1)).reshape(output.values.shape)
    assert same(found, PooledOutput("a", held))


@pytest.mark.parametrize(
    ("body", "arrays", "text"),
    [
        (["a", 0], [np.zeros((2, 1), np.float32)], "the 3 fields of PooledOutput"),
        (["a", 0, 1], [np.zeros((2, 1), np.float32), np.array([0, 2], np.uint8)], "below 2"),
        (["a", 0, 1], [np.zeros((2, 1), np.float32), np.zeros((1, 1), np.uint8)], "u8, u16"),
        (["a", 0, 1], [np.zeros((2, 1), np.float32), np.zeros(1, np.int64)], "u8, u16"),
        (["a", 0, 1], [np.zeros((1, 1 << 20), np.float32), np.zeros(513, np.uint8)], "bytes"),
    ],
)
def test_numbers_of_vectors_are_checked(body: Any, arrays: list[Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        read(PooledOutput, body, *arrays)


def test_a_peer_of_before_says_no_dtypes() -> None:
    with pytest.raises(ProtocolError, match="the 7 fields of Hello"):
        read(Hello, ["embedding-worker", 0, 1, 7, "0.1", ""])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (TableSigns(0, SIGNS.astype(np.int64)), "TableSigns.signs: expected uint64 with 1"),
        (TableSigns(0, SIGNS.reshape(1, 3)), "uint64 with 2"),
        (TableSigns(0, [1, 2]), "got list"),  # type: ignore[arg-type]
        (TableSigns(True, SIGNS), "TableSigns.table: expected int, got bool"),
        (TableSigns(1 << 64, SIGNS), "does not fit 64 bits"),
        (SlotGradient("a", np.zeros((1, 1))), "float32 or float16"),  # type: ignore[arg-type]
        (PooledOutput(1, np.zeros((1, 1), np.float32)), "expected str"),  # type: ignore[arg-type]
        (LookupRequest(1, 1, ()), "expected bool, got int"),  # type: ignore[arg-type]
        (UpdateRequest((1, 2, 3), ()), "a tuple of 2"),  # type: ignore[arg-type]
        (LookupReply((TableSigns(0, SIGNS),)), "expected TableRows"),  # type: ignore[arg-type]
        (LookupResult((7,), None), "expected one of Pooled"),  # type: ignore[arg-type]
        (IDFeatures((3,), 1, True), "expected a FeatureBatch"),  # type: ignore[arg-type]
    ],
)
def test_the_writer_refuses_as_the_services_do(message: Any, text: str) -> None:
    with pytest.raises(DataTypeError, match=text):
        there_and_back(type(message), message)


U8, U32 = np.array([0, 1, 0], np.uint8), np.array([0, 1, 0], np.uint32)


@pytest.mark.parametrize(
    ("cls", "body", "arrays", "text"),
    [
        (TableSigns, None, [], "the 2 fields of TableSigns, got None"),
        (TableSigns, [0], [], "the 2 fields"),
        (TableSigns, [0, 0, 0], [SIGNS], "the 2 fields"),
        (TableSigns, {"table": 0}, [], "the 2 fields"),
        (TableSigns, [True, 0], [SIGNS], "TableSigns.table: expected int, got True"),
        (TableSigns, [0.0, 0], [SIGNS], "TableSigns.table"),
        (TableSigns, [0, None], [SIGNS], "expected array 0 of 1, got None"),
        (TableSigns, [0, 1], [SIGNS, SIGNS], "expected array 0"),
        (TableSigns, [0, True], [SIGNS], "expected array 0"),
        (TableSigns, [0, -1], [SIGNS], "expected array 0"),
        (TableSigns, [0, 0], [], "expected array 0 of 0"),
        (TableSigns, [0, 0], [SIGNS, SIGNS], "expected 1 arrays by its fields, got 2"),
        (TableSigns, [0, 0], [U32], "expected uint64 with 1"),
        (LookupRequest, [0, 1, [], "", None], [], "is_training: expected bool"),
        (LookupRequest, [0, True, {}, "", None], [], "expected a list"),
        (LookupRequest, [0, True, [[0, 0], [1, 0]], "", None], [SIGNS], "expected array 1"),
        (LookupResult, [[["SlotGradient", "x", None]], None], [], "one of PooledOutput"),
        (LookupResult, [[[]], None], [], "one of PooledOutput"),
        (LookupResult, [[], 1.0], [], "LookupResult.ref: expected int"),
        (UpdateRequest, [[1], [], None, None], [], "a list of 2"),
        (OptimizerSettings, ["sgd", {1: 1.0}], [], "a map from text"),
        (OptimizerSettings, ["sgd", {"lr": 1}], [], "lr: expected float or bool"),
        (OptimizerSettings, ["sgd", {"lr": msgpack.Timestamp(1, 1)}], [], "float or bool"),
        (IDFeatures, [[["a", 0, 1]], 1, True], [SIGNS, U8], "name, distinct"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [SIGNS, SIGNS], "u8, u16 or u32"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [SIGNS, U8], "some never occur"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [SIGNS[:1], U8], "must number"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [np.zeros(2, "<u8"), U8], "differ"),
        (IDFeatures, [[["a", 0, 1, 2]], 1, True], [SIGNS[:2], U8, U8], "of 3 ids, got 1"),
        (
            IDFeatures,
            [[["a", 0, 1, 2]], 1, True],
            [SIGNS[:2], U8, np.array([2**32 - 1, 4], np.uint32)],  # 3 in u32
            "lengths of 3 ids, got 4294967299",
        ),
    ],
)
def test_the_reader_takes_only_what_a_writer_sends(
    cls: Any, body: Any, arrays: list[Any], text: str
) -> None:
    with pytest.raises(ProtocolError, match=text):
        read(cls, body, *arrays)


@tries(100)
@given(
    cls=st.sampled_from(MESSAGES),
    body=st.recursive(
        st.none() | st.booleans() | st.integers(0, 3) | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    ),
    arrays=st.lists(st.sampled_from([SIGNS, U8, U32, np.zeros((1, 2), np.float32)])),
)
def test_any_body_is_read_or_refused(cls: Any, body: Any, arrays: list[Any]) -> None:
    try:
        value = read(cls, body, *arrays)
    except ProtocolError:
        return
    assert type(value) is cls


def test_fields_that_cannot_travel_are_found_when_the_table_is_made() -> None:
    @dataclasses.dataclass
    class Strange:
        value: complex

    with pytest.raises(InternalError, match="no form on the wire"):
        coder_of(complex, "Strange.value")
    with pytest.raises(InternalError, match="axes"):
        coder_of(get_type_hints(TableSigns)["signs"], "Strange.unheard_of")


# --- exceptions ---------------------------------------------------------------------------

CALLED = ErrorOrigin("embedding-worker", 1, "tcp://a:1", "lookup")


def crossed(error: BaseException) -> PersiaError:
    failure = decode(encode(Failure(1, 1, error_to_body(error))))
    return error_from_body(failure.body, CALLED)


def test_the_place_of_an_error() -> None:
    """What failed further on keeps its own; the peer gets the address that it was called by."""
    further = ("parameter-server", 2, "b", "m")
    for sent, found in (
        (further, further),
        (("embedding-worker", None, "", "m"), ("embedding-worker", 1, "tcp://a:1", "m")),
    ):
        named: Any = dict(zip(("role", "replica", "address", "method"), sent, strict=True))
        error = crossed(ServiceBusy("full", **named))
        assert isinstance(error, ServiceBusy)
        assert place(error) == found


def test_exceptions_from_elsewhere_are_remote_errors() -> None:
    try:
        _ = dict[str, int]()["a key"]
    except KeyError as exc:
        error = crossed(exc)
    assert type(error) is RemoteError
    assert "KeyError: 'a key'" in str(error)
    assert "embedding-worker 1 at tcp://a:1 failed in lookup" in str(error)
    cause = error.__cause__
    assert isinstance(cause, RemoteError)
    assert (cause.role, cause.replica, cause.address) == ("embedding-worker", 1, "tcp://a:1")
    assert "test_codec.py" in str(cause)


def test_a_class_derived_elsewhere_comes_out_as_its_base_and_a_namesake_does_not() -> None:
    assert type(crossed(type("Fuller", (ServiceBusy,), {})("very"))) is ServiceBusy
    assert type(crossed(type("ServiceBusy", (Exception,), {})("mine"))) is RemoteError


@pytest.mark.parametrize("name", ["NewError", "annotations"])  # the latter no exception there
def test_a_class_of_a_later_version(name: str) -> None:
    error = error_from_body([name, "text", "", None, "", "", ""], CALLED)
    assert type(error) is RemoteError
    assert f"{name}: text" in str(error)


@pytest.mark.parametrize("text", ["\udc80", "x" * 10**6, "", "\x00"])
def test_any_text_crosses(text: str) -> None:
    assert len(str(crossed(errors.DataError(text)))) < 10_000


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=8),
    )
)
def test_any_body_gives_an_exception(body: Any) -> None:
    error = error_from_body(body, CALLED)
    assert isinstance(error, PersiaError)
    if type(body) is not list or len(body) != 7:
        assert type(error) is ProtocolError
