"""Every exception of persia.errors crosses the wire and keeps its class and text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import errors
from persia._rpc.error_codec import ErrorOrigin, from_body, to_body
from persia._rpc.frame import Failure, decode, encode
from persia._rpc.server import serve
from persia.errors import (
    PersiaError,
    ProtocolError,
    RemoteError,
    ServiceBusy,
    ServiceError,
    ServiceUnavailable,
)
from tests.rpc.support import TOY, ToyService, Wire, make_client

CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, PersiaError)
]
CALLED = ErrorOrigin("embedding-worker", 1, "tcp://a:1", "lookup")


def crossed(error: BaseException) -> PersiaError:
    failure = decode(encode(Failure(1, 1, to_body(error))))
    return from_body(failure.body, CALLED)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_crosses(cls: type[PersiaError]) -> None:
    error = crossed(cls("expected this, got that"))
    assert type(error) is cls
    assert "expected this, got that" in str(error)
    if isinstance(error, ServiceError):
        place = (error.role, error.replica, error.address, error.method)
        assert place == ("embedding-worker", 1, "tcp://a:1", "lookup")
    cause = error.__cause__
    assert isinstance(cause, RemoteError)
    assert (cause.role, cause.replica, cause.address) == ("embedding-worker", 1, "tcp://a:1")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_is_raised_again_by_a_call(cls: type[PersiaError], tmp_path: Any) -> None:
    wire = Wire("memory", tmp_path)
    server = serve(wire.transport, wire.address(), TOY, ToyService())
    with make_client(wire, server, timeout_s=0.4) as client:
        with pytest.raises(cls, match="with its text") as caught:
            client.call("fail", cls.__name__)
        assert type(caught.value) is cls
        if isinstance(caught.value, ServiceError):
            assert caught.value.role == "toy"
            assert caught.value.address == server.address
            assert caught.value.method == "fail"
        assert "in fail" in str(caught.value.__cause__)
    server.stop()


def test_a_place_further_on_is_kept() -> None:
    far = ServiceUnavailable(
        "no peer there", role="embedding-parameter-server", replica=2, address="b", method="m"
    )
    error = crossed(far)
    assert isinstance(error, ServiceUnavailable)
    place = (error.role, error.replica, error.address, error.method)
    assert place == ("embedding-parameter-server", 2, "b", "m")


def test_the_peers_own_error_gets_the_address_it_was_called_by() -> None:
    error = crossed(ServiceBusy("full", role="embedding-worker", method="register"))
    assert isinstance(error, ServiceBusy)
    place = (error.role, error.replica, error.address, error.method)
    assert place == ("embedding-worker", 1, "tcp://a:1", "register")


def test_exceptions_from_elsewhere_are_remote_errors() -> None:
    try:
        _ = dict[str, int]()["a key"]
    except KeyError as exc:
        error = crossed(exc)
    assert type(error) is RemoteError
    assert "KeyError: 'a key'" in str(error)
    assert "embedding-worker 1 at tcp://a:1 failed in lookup" in str(error)
    assert "test_error_codec.py" in str(error.__cause__)


def test_a_class_derived_elsewhere_comes_out_as_its_base() -> None:
    class Fuller(ServiceBusy):
        pass

    assert type(crossed(Fuller("very"))) is ServiceBusy


def test_a_namesake_is_not_mistaken() -> None:
    class ServiceBusy(Exception):
        pass

    assert type(crossed(ServiceBusy("mine"))) is RemoteError


def test_a_class_of_a_later_version() -> None:
    error = from_body(["NewError", "text", "", None, "", "", ""], CALLED)
    assert type(error) is RemoteError
    assert "NewError: text" in str(error)
    # A name in the module that is no exception of ours.
    assert type(from_body(["annotations", "t", "", None, "", "", ""], CALLED)) is RemoteError


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
    error = from_body(body, CALLED)
    assert isinstance(error, PersiaError)
    if type(body) is not list or len(body) != 7:
        assert type(error) is ProtocolError
