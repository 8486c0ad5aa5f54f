"""Every exception PERSIA raises on purpose.

The root is a ``RuntimeError`` because the original raised that for everything, so an old
``except RuntimeError`` keeps working. Each leaf also inherits the builtin that a Python user
would reach for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PersiaError(RuntimeError):
    """Root of everything PERSIA raises on purpose."""


class ConfigError(PersiaError, ValueError):
    """A YAML key, an environment variable or an argument cannot be used; names it."""


class DataError(PersiaError, ValueError):
    """A batch the user built has another form than expected; names the feature."""


class DataTypeError(DataError, TypeError):
    """A batch holds values of a type or dtype that PERSIA does not take."""


class StoreError(PersiaError):
    """An embedding store refused an operation."""


class DimMismatch(StoreError, ValueError):
    """A sign is stored with another dim, or another state width, than the one asked for.

    A server checks tables before it touches rows. Asked directly, a store may have served an
    earlier part of the request; no row was served wrongly.
    """


class KernelError(StoreError):
    """A kernel of a user failed for rows, which are as they were; names kernel and sign."""


class RowsReplaced(StoreError):
    """An update is of rows that a load has replaced since their lookup; it changed nothing."""


class NotConfigured(StoreError):
    """A training lookup or an update came before the optimizer or the settings."""


class ServiceError(PersiaError):
    """A role could not do what it was asked; says which role, where, and for which call."""

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        replica: int | None = None,
        address: str = "",
        method: str = "",
    ) -> None:
        super().__init__(message)
        self.role = role
        self.replica = replica
        self.address = address
        self.method = method


class ServiceUnavailable(ServiceError, ConnectionError):
    """No process answers at the address."""


class ServiceTimeout(ServiceError, TimeoutError):
    """A deadline passed; the message names the peer, and how long it waited."""


class ServiceBusy(ServiceError):
    """A bounded buffer is full; the call changed nothing and may be repeated."""


class WrongReplica(ServiceBusy):
    """Another replica than the one meant is at the address; the call changed nothing."""


class NotReady(ServiceBusy):
    """A server that the peer needs does not answer; names it, and nothing was changed.

    Another peer, whose servers do, may be asked at once.
    """


class NotAllowed(ServiceError, PermissionError):
    """The key that the caller showed is not one for this call, which changed nothing."""


class UnknownRef(ServiceError, LookupError):
    """No batch or lookup has this ref: it has ended, was released, expired, or is another's."""


class UnknownModel(ServiceError, LookupError):
    """No model, or no version of it, that is served has this name."""


class UnknownStream(ServiceError, LookupError):
    """The nn-worker has no such stream: it was restarted, or another loader took over."""


class StreamRewound(ServiceError):
    """An nn-worker goes on from a checkpoint, and needs the batches behind it once more."""


class JobFinished(ServiceError):
    """The job has ended, and with it the need for what was asked.

    ``status`` is its exit status, where it is known.
    """

    status: int | None = None


class ProtocolError(ServiceError):
    """Bytes that this version cannot read."""


class RemoteError(ServiceError):
    """The peer's handler failed with an exception of its own."""


class CheckpointError(PersiaError, OSError):
    """A file or directory is not what a checkpoint needs; names the path."""


class LogNotReady(CheckpointError):
    """A change log has not the rows of every server of one job yet; it may be asked again."""


class ExtensionError(PersiaError, ImportError):
    """Native code cannot be compiled or loaded on this machine; names the module and why."""


class InternalError(PersiaError):
    """A broken invariant inside PERSIA: please report it, with the numbers in the message."""


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``", did you mean 'x'?"`` for the known name nearest to ``name``, or ``""``.

    ``cutoff`` is the least similarity, from 0 to 1; more for names that all begin alike.
    """
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f", did you mean {found[0]!r}?" if found else ""
