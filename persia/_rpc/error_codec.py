"""Exceptions as the body of an error message, and back.

The body is ``[class, text, role, replica, address, method, detail]``. The class is a name in
``persia/errors.py``; any other exception travels as a RemoteError with its type and text. A
ServiceError keeps its origin: one that an embedding-worker passes on from a parameter server
names the parameter server. ``detail`` is the server's traceback.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from persia import errors
from persia.errors import PersiaError, ProtocolError, RemoteError, ServiceError

# Characters. A header has room for far more, but no reader for it.
_MAX_TEXT = 8192
_MAX_DETAIL = 16384

_CLASSES: dict[str, type[PersiaError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, PersiaError)
}


@dataclass(frozen=True, slots=True)
class ErrorOrigin:
    """The server and method that an error comes from: a ServiceError's attributes."""

    role: str = ""
    replica: int | None = None
    address: str = ""
    method: str = ""

    def __str__(self) -> str:
        name = self.role or "service"
        name = name if self.replica is None else f"{name} {self.replica}"
        return f"{name} at {self.address}" if self.address else name

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of a ServiceError."""
        return {
            "role": self.role,
            "replica": self.replica,
            "address": self.address,
            "method": self.method,
        }


def to_body(error: BaseException) -> list[Any]:
    """Return the body for an exception that a method raised."""
    detail = _printable("".join(traceback.format_exception(error))[-_MAX_DETAIL:], _MAX_DETAIL)
    # A subclass defined elsewhere travels as its nearest class in persia/errors.py.
    for cls in type(error).__mro__:
        # By identity: another package may have a class of the same name.
        if _CLASSES.get(cls.__name__) is cls:
            origin = ErrorOrigin()
            if isinstance(error, ServiceError):
                origin = ErrorOrigin(error.role, error.replica, error.address, error.method)
            return [cls.__name__, _printable(str(error), _MAX_TEXT), *_list(origin), detail]
    text = f"{type(error).__name__}: {error}"
    return ["RemoteError", _printable(text, _MAX_TEXT), *_list(ErrorOrigin()), detail]


def _list(origin: ErrorOrigin) -> list[Any]:
    return [origin.role, origin.replica, origin.address, origin.method]


def _printable(text: str, limit: int) -> str:
    """Return at most ``limit`` characters, lone surrogates escaped: UTF-8 has none."""
    return text[:limit].encode("utf-8", "backslashreplace").decode("utf-8")


# What comes is a peer's: a class is looked up by name in errors.py, never imported.
def from_body(body: Any, called: ErrorOrigin) -> PersiaError:
    """Return the exception to raise for a call of the server and method in ``called``.

    Its cause is a RemoteError with the server's traceback. An unreadable body gives a
    ProtocolError, and a class that this version does not know a RemoteError.
    """
    # Exact types: bool is an int, and the body comes from a peer.
    kinds = [(str,), (str,), (str,), (int, type(None)), (str,), (str,), (str,)]
    if (
        type(body) is not list
        or len(body) != len(kinds)
        or any(type(one) not in kind for one, kind in zip(body, kinds, strict=True))
    ):
        return ProtocolError(
            f"{called}: unreadable error in answer to {called.method}: {body!r:.80}",
            **called.fields(),
        )
    name, text, role, replica, address, method, detail = body
    # Without a role the error is no ServiceError, or one raised by the method itself.
    origin = ErrorOrigin(role, replica, address, method) if role else called
    if origin.role == called.role and origin.replica in (None, called.replica):
        # The server's own error: it does not know the address that it was called by.
        origin = ErrorOrigin(
            called.role,
            called.replica,
            origin.address or called.address,
            origin.method or called.method,
        )
    # A closed table: a peer cannot have an arbitrary class constructed.
    cls = _CLASSES.get(name)
    if cls is None:
        cls, text = RemoteError, f"{name}: {text}"
    error: PersiaError
    if issubclass(cls, ServiceError):
        if cls is RemoteError:
            text = f"{called} failed in {called.method}: {text}"
        error = cls(text, **origin.fields())
    else:
        error = cls(text)
    # As a cause, so that a log shows the server's traceback above the caller's.
    error.__cause__ = RemoteError(
        f"raised by {called} in {called.method}; over there:\n{detail}", **called.fields()
    )
    return error
