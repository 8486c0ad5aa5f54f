"""The bytes of every message: requests and replies of each role, failures, who peers are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from persia import errors
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.codec import ErrorOrigin, error_from_body, error_to_body
from persia._rpc.frame import PROTOCOL, Call, Failure, Reply, decode, encode
from persia._rpc.messages import (
    EmbeddingWorker,
    Job,
    NNWorker,
    ParameterServer,
    PooledOutput,
)
from persia._rpc.methods import (
    HELLO,
    Hello,
    embedding_worker,
    nn_worker,
    parameter_server,
)
from persia.config import EmbeddingSchema, schema_fingerprint
from tests.golden.book import as_text, check, read
from tests.rpc.support import same, schema_text

ROLES = {
    "embedding-parameter-server": (parameter_server, ParameterServer),
    "embedding-worker": (embedding_worker, EmbeddingWorker),
    "nn-worker": (nn_worker, NNWorker),
}
MATRICES = {"rows", "values", "states", "gradients", "gradient"}
FORMS = ("full", "bare")
CALL_ID, INCARNATION, TIMEOUT_MS = 7, (1 << 63) + 5, 300_000


class Maker:
    """Makes values of a type: ``full``, or ``bare`` with None and nothing in lists."""

    def __init__(self, form: str) -> None:
        self._is_full = form == "full"
        self._numbers = itertools.count(1)

    def value(self, hint: Any, name: str) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        number = next(self._numbers)
        plain = {int: number, float: number / 4, bool: self._is_full, str: f"text {number}"}
        if hint in plain:
            return plain[hint]
        if hint is type(None):
            return None
        if hint is FeatureBatch:
            return self._feature(number)
        if hint is PooledOutput:
            rows = self._array(np.float32, "rows", number)
            index = np.array([0, 1, 0, 0] if self._is_full else [], np.uint32)
            return PooledOutput(f"text {number}", rows[index], index if self._is_full else None)
        if dataclasses.is_dataclass(hint):
            hints = get_type_hints(hint)
            fields = [field.name for field in dataclasses.fields(hint)]
            assert isinstance(hint, type)
            return hint(*[self.value(hints[field], field) for field in fields])
        if origin in (Union, types.UnionType):
            return self._all_of(hint, name)[0]
        if origin is np.ndarray:
            return self._array(get_args(arguments[1])[0], name, number)
        if origin is tuple and arguments[-1] is not Ellipsis:
            return tuple(self.value(one, name) for one in arguments)
        inner = arguments[1] if origin is Mapping else arguments[0]
        values = self._all_of(inner, name) + self._all_of(inner, name) if self._is_full else []
        if origin is Mapping:
            return {f"key {place}": value for place, value in enumerate(values)}
        return values if origin in (list, Sequence) else tuple(values)

    def _all_of(self, hint: Any, name: str) -> list[Any]:
        """One value of each type that a union has; of an optional one, as the form says."""
        if get_origin(hint) not in (Union, types.UnionType):
            return [self.value(hint, name)]
        options = get_args(hint)
        if type(None) in options and not self._is_full:
            return [None]
        return [self.value(one, name) for one in options if one is not type(None)]

    def _feature(self, number: int) -> Any:
        samples = [[number, 9], [], [9, number, 1 << 63]]
        ids = [np.array(one, np.uint64) for one in samples]
        weights = [np.array([1, 0.5, 0.25][: len(one)], np.float32) for one in samples]
        return FeatureBatch.from_list(f"text {number}", ids, weights if number % 2 else None)

    def _array(self, scalar: Any, name: str, number: int) -> Any:
        dtype = np.float64 if scalar is Any else scalar
        shape = (2, 2) if name in MATRICES else (3,)
        count = int(np.prod(shape))
        values = (np.arange(count) + number).astype(dtype).reshape(shape)
        return values if self._is_full else values[:0]


def cases() -> Iterator[tuple[str, Any, bool, Any]]:
    """Yield of each message its name, its method, whether it is a request, and its values."""
    for role, (methods_of, protocol) in ROLES.items():
        for name, method in sorted(methods_of().methods.items()):
            hints: dict[str, Any] = {"return": Hello}
            if method is not HELLO:
                hints = get_type_hints((vars(Job) | vars(protocol))[name])
            result = hints.pop("return")
            for form in FORMS:
                maker = Maker(form)
                arguments = [maker.value(hint, one) for one, hint in hints.items()]
                yield f"{role} {name} {form} request", method, True, arguments
                yield f"{role} {name} {form} reply", method, False, maker.value(result, name)


def message_of(method: Any, is_request: bool, value: Any) -> Any:
    if is_request:
        body, arrays = method.write_arguments(value)
        return Call(CALL_ID, method.name, TIMEOUT_MS, body, arrays, replica=2)
    return Reply(CALL_ID, INCARNATION, *method.write_result(value))


def failures() -> dict[str, Any]:
    """Every exception class as a peer gets it, and one from elsewhere."""
    place = {"role": "embedding-worker", "replica": 3, "address": "tcp://host:1", "method": "m"}
    made: dict[str, BaseException] = {"KeyError": KeyError("from elsewhere")}
    for name, cls in sorted(vars(errors).items()):
        if isinstance(cls, type) and issubclass(cls, errors.PersiaError):
            is_placed = issubclass(cls, errors.ServiceError)
            made[name] = cls(f"text of {name}", **(place if is_placed else {}))
    return {
        name: Failure(CALL_ID, INCARNATION, error_to_body(error))
        for name, error in made.items()
    }


def page(message: Any) -> dict[str, Any]:
    """The parts in hexadecimal, and beside them what the header says."""
    protocol, header, *arrays = map(bytes, encode(message))
    assert protocol == PROTOCOL
    said = json.dumps(msgpack.unpackb(header))
    return {"header": said, "parts": [header.hex(), *(one.hex() for one in arrays)]}


def record() -> dict[str, str]:
    schema = EmbeddingSchema.load(
        {
            "feature_index_prefix_bit": 8,
            "slots_config": {"a": {"dim": 4}, "b": {"dim": 8, "pooling": "mean"}},
            "feature_groups": {"both": ["a"]},
        }
    )
    peers = {
        "protocol": PROTOCOL.decode(),
        "schema fingerprint": schema_fingerprint(schema),
    }
    messages: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
    for name, method, is_request, value in cases():
        messages[name.split()[0]][name] = page(message_of(method, is_request, value))
    return {
        "wire/peers.json": as_text(peers),
        "wire/schema.txt": schema_text() + "\n",
        "wire/failures.json": as_text({name: page(one) for name, one in failures().items()}),
        **{f"wire/{role}.json": as_text(content) for role, content in messages.items()},
    }


def test_the_bytes_of_every_message() -> None:
    check(record())


@pytest.mark.parametrize("role", ROLES)
def test_recorded_bytes_are_read_as_the_same_values(role: str) -> None:
    pages = json.loads(read(f"wire/{role}.json"))
    for name, method, is_request, value in cases():
        if name.startswith(f"{role} "):
            parts = map(bytes.fromhex, pages[name]["parts"])
            message: Any = decode([PROTOCOL, *parts])
            take = method.read_arguments if is_request else method.read_result
            assert same(take(message.body, message.arrays), value), name


def test_recorded_failures_are_read_as_the_same_errors() -> None:
    pages = json.loads(read("wire/failures.json"))
    for name, failure in failures().items():
        parts = map(bytes.fromhex, pages[name]["parts"])
        message: Any = decode([PROTOCOL, *parts])
        assert same(message, failure), name
        error = error_from_body(
            message.body, ErrorOrigin("embedding-worker", 3, "tcp://host:1", "m")
        )
        assert type(error) is getattr(errors, name, errors.RemoteError), name
        assert name in str(error)
