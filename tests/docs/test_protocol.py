"""docs/protocol.md says what the code does: its bytes and its messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.frame import DTYPES, PROTOCOL, Call, Failure, Limits, Reply, decode, encode
from persia._rpc.messages import (
    CutStatus,
    IDFeatures,
    LookupReply,
    LookupRequest,
    TableRows,
    TableSigns,
)
from persia._rpc.methods import embedding_worker, parameter_server
from persia._rpc.server import ServerLimits
from tests.rpc.support import same, schema_text

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text("utf-8")


def block(name: str) -> str:
    found = re.findall(rf"^```text {name}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0]).strip()


LOOKUP, REGISTER = parameter_server().methods["lookup"], embedding_worker().methods["register"]
REQUEST = LookupRequest(7, True, (TableSigns(0, np.array([5, 6], np.uint64)),))
ROWS = np.array([[1.0], [-2.0]], np.float32)
RESULT = LookupReply((TableRows(0, ROWS, np.array([3, 4], np.uint32)),))
IDS = [np.array(ids, np.uint64) for ids in ([7, 9], [], [9, 7, 9])]
FEATURES = IDFeatures((FeatureBatch.from_list("clicks", IDS),), 1, True)
HALVES = [np.array(weights, np.float32) for weights in ([1, 0.5], [], [2, 0.5, 0])]
WEIGHTED = IDFeatures((FeatureBatch.from_list("clicks", IDS, HALVES),), 1, True)
ERROR = ["UnknownRef", "no such ref", "embedding-worker", 0, "", "lookup", ""]


def call(number: int, timeout_ms: int, method: Any, argument: Any) -> Call:
    return Call(number, method.name, timeout_ms, *method.write_arguments([argument]))


@pytest.mark.parametrize(
    ("name", "message", "read", "value"),
    [
        ("call", call(1, 300_000, LOOKUP, REQUEST), LOOKUP.read_arguments, [REQUEST]),
        ("reply", Reply(1, 9, *LOOKUP.write_result(RESULT)), LOOKUP.read_result, RESULT),
        ("register", call(2, 1000, REGISTER, FEATURES), REGISTER.read_arguments, [FEATURES]),
        (
            "weighted register",
            *(call(3, 1000, REGISTER, WEIGHTED), REGISTER.read_arguments, [WEIGHTED]),
        ),
        ("error", Failure(3, 9, ERROR), lambda body, _: body, ERROR),
    ],
)
def test_golden_bytes(name: str, message: Any, read: Any, value: Any) -> None:
    golden = [bytes.fromhex(line) for line in block(name).splitlines()]
    assert [bytes(part) for part in encode(message)] == golden
    decoded: Any = decode(golden)
    assert same(decoded, message)
    assert same(read(decoded.body, getattr(decoded, "arrays", None)), value)


def test_the_page_lists_every_message_and_method() -> None:
    assert block("messages") == schema_text()


def test_a_terabyte_of_parts_fits_into_a_message() -> None:
    """Some 290 bytes of JSON for each of 11 MB: as text in the header 40 GB were too many."""
    status = CutStatus("written", 1, "", np.zeros(290 * 100_000, np.uint8))
    method = parameter_server().methods["cut_status"]
    reply = decode(list(encode(Reply(1, 9, *method.write_result(status)))))
    assert same(method.read_result(reply.body, reply.arrays), status)


def test_the_page_names_the_numbers_of_the_code() -> None:
    assert f"`{PROTOCOL.decode()}`" in PAGE
    assert "`" + " ".join(sorted(DTYPES, key=list(DTYPES).index)) + "`" in PAGE
    assert Limits() == Limits(1 << 20, 16_384, 2 << 30, 8 << 30)
    settings = ServerLimits()
    assert (settings.calls_per_peer, settings.calls, settings.bytes) == (64, 1024, 4 << 30)
