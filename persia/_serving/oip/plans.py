"""Requests of one form, of which only the data is read.

A client asks with the same names, datatypes and shapes again and again. The first such requests
are read and checked as a whole. What was true of them is true of each whose bytes before the
data are the same: what is left is to copy its data to where the plan says.

    body     | header | a: 3 INT64 | b: 1 INT64 | c: 2 FP32 |
    memory            | a          | b          | c         |   one block, three arrays
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from persia._serving.oip.tensors import DTYPES
from persia._serving.request import DecodedRequest

V = TypeVar("V")

# Bytes of data beyond which a request has no plan: copying them is what takes its time then.
MOST_BYTES = 1 << 20
# All other bytes of BOOL than 0 and 1 become 1, which is no copy.
_PLAIN = str, int, float  # and bool
_COPIED = DTYPES.keys() - {"BOOL"}
_MOST_MARKS = 4096
# Bytes that a plan takes beside its header, about, and for each input.
_PLAN_BYTES, _INPUT_BYTES = 2048, 640


class DataSpan(NamedTuple):
    """Where the data of an input lies, counted from the header's end."""

    name: str
    datatype: str
    start: int
    size: int


class RequestPlan:
    """Makes requests with the header of one that was read, and other data.

    Args:
        request: That was read.
        spans: Of all its inputs that have data; the others, such as ``user.pad``, are of the
            header.
    """

    def __init__(self, request: DecodedRequest, spans: Sequence[DataSpan]) -> None:
        # Data is not kept: a plan is little larger than what ``fits`` and ``num_held`` say.
        self._request = replace(request, inputs={})
        by_name = {one.name: one for one in spans}
        self._tensors = []
        self._constants = []
        self._copies: list[list[int]] = []  # to, its end, from, its end
        end = 0
        for name, values in request.inputs.items():
            place = end + -end % max(1, values.itemsize)
            end = place + values.nbytes
            self._tensors.append((name, values.dtype, values.shape, place))
            span = by_name.get(name)
            if span is None:
                self._constants.append((place, end, values.tobytes()))
            elif self._copies and self._copies[-1][1::2] == [place, span.start]:
                self._copies[-1][1::2] = end, span.start + span.size
            else:
                self._copies.append([place, end, span.start, span.start + span.size])
        self._size = end
        self.num_bytes = sum(one.size for one in spans)
        self.num_held = _PLAN_BYTES + _INPUT_BYTES * len(self._tensors)  # beside the header

    @staticmethod
    def fits(request: DecodedRequest, spans: Sequence[DataSpan], num_inputs: int) -> bool:
        """Whether a request can have a plan: one of little data, all of it as memory has it.

        And with parameters as the protocol has them: others may be larger than their header.
        """
        return (
            len(spans) == num_inputs
            and all(isinstance(one, _PLAIN) for one in request.parameters.values())
            and all(one.datatype in _COPIED for one in spans)
            and sum(one.size for one in spans) <= MOST_BYTES
        )

    def read(self, message: bytes, header_end: int) -> DecodedRequest:
        """Return the request of a message whose data begins at ``header_end``."""
        memory = bytearray(self._size)
        target, source = memoryview(memory), memoryview(message)[header_end:]
        for place, end, start, stop in self._copies:
            target[place:end] = source[start:stop]
        for place, end, constant in self._constants:
            target[place:end] = constant
        inputs = {
            name: np.ndarray(shape, dtype, memory, place)
            for name, dtype, shape, place in self._tensors
        }
        one = self._request
        return DecodedRequest(inputs, one.id, one.parameters, one.outputs, one.is_binary)


class PlanCache(Generic[V]):
    """Values of headers that came more than once; any thread may call any method.

    Those that came first go first, so that headers that never come again, such as those with an
    id of their own, neither fill it nor cost a plan.

    Args:
        most_bytes: That all values take, as ``put`` is given it.
    """

    def __init__(self, most_bytes: int = 8 << 20) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # guards all below for writing
        self._values: dict[Hashable, tuple[int, V]] = {}
        self._num_bytes = 0
        self._marks: set[int] = set()  # hashes of keys that came

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: Hashable) -> V | None:
        """Return the value of a key."""
        found = self._values.get(key)
        return None if found is None else found[1]

    def wants(self, key: Hashable) -> bool:
        """Whether a key that was not found came before, or one with the same hash."""
        mark = hash(key)
        with self._lock:
            if mark in self._marks:
                return True
            if len(self._marks) >= _MOST_MARKS:
                self._marks.clear()
            self._marks.add(mark)
            return False

    def put(self, key: Hashable, value: V, num_bytes: int) -> None:
        """Keep a value that takes ``num_bytes``; beyond the bound the oldest go."""
        with self._lock:
            self._drop(key)
            if num_bytes > self._most_bytes:
                return
            while self._num_bytes + num_bytes > self._most_bytes:
                self._drop(next(iter(self._values)))
            self._values[key] = num_bytes, value
            self._num_bytes += num_bytes

    def _drop(self, key: Hashable) -> None:
        found = self._values.pop(key, None)
        if found is not None:
            self._num_bytes -= found[0]
