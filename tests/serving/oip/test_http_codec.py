"""Bodies of HTTP, read and written without a server."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia._serving.oip.http_codec import decode, encode
from persia._serving.oip.tensors import RequestLimits
from persia._serving.request import InferOutcome
from persia.errors import DataError

LIMITS = RequestLimits(body_bytes=10_000, tensors=3)
BODY = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [5]}]}'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 64) | st.text(max_size=5),
    lambda one: (
        st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3)
    ),
    max_leaves=6,
)
KEYS = ("name", "shape", "datatype", "data", "parameters")


@pytest.mark.parametrize("encoding", ["", "gzip", "deflate"])
def test_encodings(encoding: str) -> None:
    packed = {"": BODY, "gzip": gzip.compress(BODY), "deflate": zlib.compress(BODY)}[encoding]
    assert decode(packed, None, encoding, LIMITS).inputs["x"].tolist() == [5]
    if encoding:
        for wrong in (packed[:-5], b"x" * 10):
            with pytest.raises(DataError, match=encoding):
                decode(wrong, None, encoding, LIMITS)
    with pytest.raises(DataError, match="Content-Encoding"):
        decode(BODY, None, "br", LIMITS)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "oops"])
def test_numbers_that_json_does_not_have_are_named(value: str) -> None:
    body = BODY.replace(b"[5]", f"[{value}]".encode())
    with pytest.raises(DataError, match="expected a request in JSON") as refused:
        decode(body, None, "", LIMITS)
    assert ("which has no NaN" in str(refused.value)) == (value != "oops")


@pytest.mark.parametrize(
    ("place", "name", "expected"),
    [
        ("input", "padding", "parameter 'padding' of input 'x': expected 'pad', the id"),
        ("input", "PAD", "parameter 'PAD' of input 'x': expected 'pad', the id"),
        ("input", "timeout", "of input 'x': expected it of the request"),
        ("request", "pad", "parameter 'pad' of the request: expected it of an input"),
        ("output", "binary_data_size", "of output 'x': expected it of an input"),
    ],
)
def test_parameters_in_a_wrong_place_are_refused(place: str, name: str, expected: str) -> None:
    """And those of other servers are not: the protocol leaves them open."""
    request = orjson.loads(BODY)
    request["outputs"] = [{"name": "x"}]
    owner = request if place == "request" else request[f"{place}s"][0]
    owner["parameters"] = {"content_type": "np", "priority": 1}
    assert decode(orjson.dumps(request), None, None, LIMITS).inputs["x"].tolist() == [5]
    owner["parameters"][name] = 5
    with pytest.raises(DataError) as refused:
        decode(orjson.dumps(request), None, None, LIMITS)
    assert expected in str(refused.value)


@settings(max_examples=150, deadline=None)
@given(
    JSON, st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON)), st.binary(max_size=9)
)
def test_any_json_is_read_or_refused(top: Any, tensor: dict[str, Any], extra: bytes) -> None:
    usual = orjson.loads(BODY)
    request = {"inputs": [{**usual["inputs"][0], **tensor}], "parameters": top, "outputs": top}
    for value in (top, request):
        try:
            text = orjson.dumps(value)
        except TypeError:  # beyond 64 bits
            continue
        for length in (None, str(len(text))):
            with contextlib.suppress(DataError):
                assert decode(text + (extra if length else b""), length, None, LIMITS).inputs


def test_a_raw_body_by_the_models_metadata() -> None:
    def read(body: bytes, *shape: int, datatype: str = "FP32") -> Any:
        found = decode(body, "0", None, LIMITS).read_raw
        assert found is not None
        return found({"inputs": [{"name": "x", "datatype": datatype, "shape": [*shape]}]})["x"]

    assert read(bytes(24), -1, 3).shape == (2, 3)
    assert read(b"abc", -1, datatype="BYTES").tolist() == [b"abc"]
    assert read(bytes(4), 2, datatype="BF16").dtype == np.float32
    for shape in ((-1, 5), (-1, -1), (7,)):
        with pytest.raises(DataError):
            read(bytes(24), *shape)


def test_an_answer_has_json_and_binary_outputs() -> None:
    names = np.array([b"a", b"\xc3\xa4"], object)
    outcome = InferOutcome(
        "m", "2", "id", [("y", np.array([1.5], np.float32), True), ("n", names, False)]
    )
    headers, body = encode(outcome)
    length = int(dict(headers)[b"inference-header-content-length"])
    header = orjson.loads(body[:length])
    assert header["outputs"][0]["parameters"] == {"binary_data_size": 4}
    assert header["outputs"][1]["data"] == ["a", "ä"]
    assert body[length:] == np.array([1.5], np.float32).tobytes()
    assert (header["id"], header["model_version"]) == ("id", "2")
