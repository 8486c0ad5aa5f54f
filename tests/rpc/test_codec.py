"""Every message there and back, what is refused on either side, and how many bytes it takes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc import messages
from persia._rpc.codec import ArrayReader, coder_of
from persia._rpc.dtypes import DTYPES
from persia._rpc.frame import Call, Reply, decode, encode
from persia._rpc.messages import (
    BatchGradients,
    IDFeatures,
    LookupReply,
    LookupRequest,
    LookupResult,
    PooledOutput,
    SlotGradient,
    TableEntries,
    TableGradients,
    TableRows,
    TableSigns,
    UpdateRequest,
)
from persia._rpc.methods import Hello, embedding_worker, parameter_server
from persia.errors import DataTypeError, InternalError, ProtocolError
from tests.rpc.support import same
from tests.support.profiles import tries
from tests.support.strategies import ids, samples

MESSAGES = [
    cls
    for cls in vars(messages).values()
    if isinstance(cls, type)
    and dataclasses.is_dataclass(cls)
    and cls.__module__ == messages.__name__
]
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
    return st.builds(cls, **fields)


def there_and_back(cls: Any, value: Any) -> Any:
    arrays: list[Any] = []
    coder = coder_of(cls)
    body = coder.write(value, cls.__name__, arrays)
    reply = decode(encode(Reply(1, 1, body, tuple(arrays))))
    reader = ArrayReader(reply.arrays)
    read = coder.read(reply.body, cls.__name__, reader)
    reader.check_all_taken(cls.__name__)
    return read


@pytest.mark.parametrize("cls", [*MESSAGES, Hello], ids=lambda cls: cls.__name__)
@tries(25)
@given(data=st.data())
def test_every_message_there_and_back(cls: Any, data: Any) -> None:
    message = data.draw(instances(cls))
    assert same(there_and_back(cls, message), message)


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    sent = messages.UpdateRequest((np.int64(3), np.uint64(2**64 - 1)), ())
    assert there_and_back(UpdateRequest, sent).update_id == (3, 2**64 - 1)
    options = {"lr": 1, "flag": np.bool_(True)}
    sent_too = messages.OptimizerSettings("sgd", options)  # type: ignore[arg-type]
    assert there_and_back(messages.OptimizerSettings, sent_too).options == {
        "lr": 1.0,
        "flag": True,
    }


SIGNS = np.arange(3, dtype=np.uint64)


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


def read(cls: Any, body: Any, *arrays: Any) -> Any:
    reader = ArrayReader(arrays)
    value = coder_of(cls).read(body, cls.__name__, reader)
    reader.check_all_taken(cls.__name__)
    return value


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
        (LookupRequest, [0, 1, []], [], "is_training: expected bool"),
        (LookupRequest, [0, True, {}], [], "expected a list"),
        (LookupRequest, [0, True, [[0, 0], [1, 0]]], [SIGNS], "expected array 1"),
        (LookupResult, [[["SlotGradient", "x", None]], None], [], "one of PooledOutput"),
        (LookupResult, [[[]], None], [], "one of PooledOutput"),
        (LookupResult, [[], 1.0], [], "LookupResult.ref: expected int"),
        (UpdateRequest, [[1], []], [], "a list of 2"),
        (messages.OptimizerSettings, ["sgd", {1: 1.0}], [], "a map from text"),
        (messages.OptimizerSettings, ["sgd", {"lr": 1}], [], "lr: expected float or bool"),
        (
            messages.OptimizerSettings,
            ["sgd", {"lr": msgpack.Timestamp(1, 1)}],
            [],
            "float or bool",
        ),
        (IDFeatures, [[["a", 0, 1]], 1, True], [SIGNS, U8], "name, distinct"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [SIGNS, SIGNS], "u8, u16 or u32"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [SIGNS, U8], "some never occur"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [SIGNS[:1], U8], "must number"),
        (IDFeatures, [[["a", 0, 1, None]], 1, True], [np.zeros(2, "<u8"), U8], "differ"),
        (IDFeatures, [[["a", 0, 1, 2]], 1, True], [SIGNS[:2], U8, U8], "add up to 1, expected"),
        (
            IDFeatures,
            [[["a", 0, 1, 2]], 1, True],
            [SIGNS[:2], U8, np.array([2**32 - 1, 4], np.uint32)],  # 3 in u32
            "add up to 4294967299",
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
        coder_of(get_type_hints(messages.TableSigns)["signs"], "Strange.unheard_of")


# --- bytes ------------------------------------------------------------------------------


def num_bytes(method: Any, *arguments: Any) -> int:
    body, arrays = method.write_arguments(arguments)
    return sum(map(len, encode(Call(1, method.name, 1, body, arrays))))


def num_result_bytes(method: Any, result: Any) -> int:
    body, arrays = method.write_result(result)
    return sum(map(len, encode(Reply(1, 1, body, arrays))))


def close_to(got: int, wanted: int) -> bool:
    """Within the 5 % and 4 KiB that issue and docs/protocol.md allow a message."""
    return wanted <= got <= wanted * 1.05 + 4096


B, F, DIM = 4096, 26, 16


@pytest.mark.parametrize(("vocabulary", "width"), [(200, 1), (60_000, 2), (10**9, 2)])
@pytest.mark.parametrize("is_single", [True, False])
def test_bytes_from_loader_to_worker(vocabulary: int, width: int, is_single: bool) -> None:
    rng = np.random.default_rng(0)
    features = []
    for number in range(F):
        if is_single:
            values = rng.integers(0, vocabulary, B, np.uint64)
            features.append(FeatureBatch.from_single(f"feature_{number}", values))
        else:
            offsets = np.arange(B + 1, dtype=np.int64) * 10
            values = rng.integers(0, vocabulary, 10 * B, np.uint64)
            features.append(FeatureBatch.from_csr(f"feature_{number}", values, offsets))
    sent = num_bytes(
        embedding_worker().methods["register"], IDFeatures(tuple(features), 1, True)
    )
    wanted = sum(8 * f.num_distinct + width * f.num_ids for f in features)
    wanted += 0 if is_single else F * B  # lengths, one byte a sample
    assert close_to(sent, wanted)
    # What is asked for counts no lengths and two bytes a position.
    asked = sum(8 * f.num_distinct + 2 * f.num_ids for f in features)
    assert sent <= asked * 1.05 + 4096


def test_wide_numbers_where_there_are_many_distinct_ids() -> None:
    for distinct, width in ((256, 1), (257, 2), (65_536, 2), (65_537, 4)):
        batch = FeatureBatch.from_single("a", np.arange(distinct, dtype=np.uint64))
        method = embedding_worker().methods["register"]
        sent = num_bytes(method, IDFeatures((batch,), 1, True))
        assert 0 <= sent - (8 + width) * distinct < 200


def test_bytes_between_worker_and_server() -> None:
    distinct = 50_000
    signs = np.arange(distinct, dtype=np.uint64)
    rows = np.zeros((distinct, DIM), np.float32)
    hints = np.zeros(distinct, np.uint32)
    methods = parameter_server().methods
    asked = num_bytes(methods["lookup"], LookupRequest(1, True, (TableSigns(0, signs),)))
    assert close_to(asked, 8 * distinct)
    back = num_result_bytes(methods["lookup"], LookupReply((TableRows(0, rows, hints),)))
    assert close_to(back, (4 * DIM + 4) * distinct)
    tables = (TableGradients(0, signs, hints, rows),)
    update = num_bytes(methods["update"], UpdateRequest((1, 1), tables))
    assert close_to(update, (8 + 4 + 4 * DIM) * distinct)


def test_bytes_between_worker_and_trainer() -> None:
    values = np.zeros((B, DIM), np.float32)
    outputs = tuple(PooledOutput(f"feature_{n}", values) for n in range(F))
    methods = embedding_worker().methods
    back = num_result_bytes(methods["lookup"], LookupResult(outputs, 1))
    assert close_to(back, 4 * DIM * B * F)
    gradients = tuple(SlotGradient(f"feature_{n}", values) for n in range(F))
    sent = num_bytes(methods["update"], BatchGradients(1, (1, 1), gradients))
    assert close_to(sent, 4 * DIM * B * F)
    halves = tuple(SlotGradient(g.name, values.astype(np.float16)) for g in gradients)
    sent = num_bytes(methods["update"], BatchGradients(1, (1, 1), halves))
    assert close_to(sent, 2 * DIM * B * F)


def test_whole_rows_keep_their_states() -> None:
    entries = TableEntries(
        0, SIGNS, np.ones((3, 2), np.float32), np.full((3, 1), 2**32 - 1, np.uint32)
    )
    assert same(there_and_back(TableEntries, entries), entries)
