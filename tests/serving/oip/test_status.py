"""What callers of both protocols get for an error."""

from __future__ import annotations

import pytest

from persia._serving.oip.status import Status, status_of
from persia.errors import (
    CheckpointError,
    DataError,
    DataTypeError,
    NotAllowed,
    ProtocolError,
    ServiceBusy,
    ServiceTimeout,
    ServiceUnavailable,
)
from tests.serving.oip.serving_models import NoSuchModel


@pytest.mark.parametrize(
    ("error", "http", "grpc"),
    [
        (DataError("x"), 400, "INVALID_ARGUMENT"),
        (DataTypeError("x"), 400, "INVALID_ARGUMENT"),
        (ProtocolError("x"), 400, "INVALID_ARGUMENT"),
        (NotAllowed("x"), 403, "PERMISSION_DENIED"),
        (NoSuchModel("x"), 404, "NOT_FOUND"),
        (ServiceBusy("x"), 429, "RESOURCE_EXHAUSTED"),
        (ServiceUnavailable("x"), 503, "UNAVAILABLE"),
        (ServiceTimeout("x"), 504, "DEADLINE_EXCEEDED"),
        (CheckpointError("x"), 500, "INTERNAL"),
    ],
)
def test_errors_of_persia(error: BaseException, http: int, grpc: str) -> None:
    assert status_of(error) == Status(http, grpc, "x")


def test_of_other_errors_only_the_first_line() -> None:
    found = status_of(RuntimeError("first\n  at /secret/file.py"))
    assert found == Status(500, "INTERNAL", "the model failed: RuntimeError: first")
    assert status_of(KeyError()).message == "the model failed: KeyError: "
