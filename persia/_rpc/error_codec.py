"""Exceptions as scalars: the one place that turns them into a reply, and back.

Body of an error: ``[class, text, role, replica, address, method, detail]``. The class is a
name in ``persia/errors.py``; of an exception from elsewhere, type and text travel as a
RemoteError. A ServiceError keeps the place it names: one that an embedding-worker passes on
from a parameter server is the parameter server's. ``detail`` is the traceback over there.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from persia import errors
from persia.errors import PersiaError, ProtocolError, RemoteError, ServiceError

# Characters; a header has room for far more, but nobody reads it.
_MAX_TEXT = 8192
_MAX_DETAIL = 16384

_CLASSES: dict[str, type[PersiaError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, PersiaError)
}


@dataclass(frozen=True, slots=True)
class ErrorOrigin:
    """Who was asked what, and where; the parts of a ServiceError beside its message."""

    role: str = ""
    replica: int | None = None
    address: str = ""
    method: str = ""

    def __str__(self) -> str:
        who = self.role or "service"
        who = who if self.replica is None else f"{who} {self.replica}"
        return f"{who} at {self.address}" if self.address else who

    def fields(self) -> dict[str, Any]:
        """The keyword arguments of a ServiceError."""
        return {
            "role": self.role,
            "replica": self.replica,
            "address": self.address,
            "method": self.method,
        }


def to_body(error: BaseException) -> list[Any]:
    """Return the body of the error message for what a handler raised."""
    detail = _printable("".join(traceback.format_exception(error))[-_MAX_DETAIL:], _MAX_DETAIL)
    for cls in type(error).__mro__:
        # By identity: another package may have a class of the same name.
        if _CLASSES.get(cls.__name__) is cls:
            place = ErrorOrigin()
            if isinstance(error, ServiceError):
                place = ErrorOrigin(error.role, error.replica, error.address, error.method)
            return [cls.__name__, _printable(str(error), _MAX_TEXT), *_list(place), detail]
    text = f"{type(error).__name__}: {error}"
    return ["RemoteError", _printable(text, _MAX_TEXT), *_list(ErrorOrigin()), detail]


def _list(place: ErrorOrigin) -> list[Any]:
    return [place.role, place.replica, place.address, place.method]


def _printable(text: str, limit: int) -> str:
    """At most ``limit`` characters that UTF-8 can carry; a lone surrogate cannot be."""
    return text[:limit].encode("utf-8", "backslashreplace").decode("utf-8")


def from_body(body: Any, called: ErrorOrigin) -> PersiaError:
    """Return the exception to raise, for a call that ``called`` describes.

    Its cause is a RemoteError with the traceback over there. What cannot be read gives a
    ProtocolError, a class this version does not know a RemoteError.
    """
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
    place = ErrorOrigin(role, replica, address, method) if role else called
    if place.role == called.role and place.replica in (None, called.replica):
        # The peer's own error: it does not know by which address it was called.
        place = ErrorOrigin(
            called.role,
            called.replica,
            place.address or called.address,
            place.method or called.method,
        )
    cls = _CLASSES.get(name)
    if cls is None:
        cls, text = RemoteError, f"{name}: {text}"
    error: PersiaError
    if issubclass(cls, ServiceError):
        if cls is RemoteError:
            text = f"{called} failed in {called.method}: {text}"
        error = cls(text, **place.fields())
    else:
        error = cls(text)
    error.__cause__ = RemoteError(
        f"raised by {called} in {called.method}; over there:\n{detail}", **called.fields()
    )
    return error
