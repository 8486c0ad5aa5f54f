"""The methods of each role: its Protocol in ``messages``, as tables of coders.

A method's request is a list of its arguments, its reply the value it returns. Each method is
listed as repeatable or not: a call that is not repeatable is sent at most once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from persia._rpc import messages
from persia._rpc.codec import FLOAT32, ArrayReader, ArrayWriter, Coder, coder_of
from persia._rpc.frame import Array, unexpected
from persia._rpc.messages import WireDtypes
from persia.errors import InternalError


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of a server, with which it answers ``hello`` at any time."""

    role: str
    replica_index: int
    replica_size: int
    incarnation: int  # drawn by each process; another one: the state of that before is lost
    version: str
    schema_fingerprint: str  # empty for a role without a schema
    wire: WireDtypes  # how it sends rows, and wants gradients


@dataclass(frozen=True, slots=True)
class Method:
    """One method: the coders of its arguments and result, and how it may be called."""

    name: str
    arguments: tuple[tuple[str, Coder], ...]  # (method.argument, coder)
    result: Coder
    is_repeatable: Callable[[Sequence[Any]], bool]
    needs_control: bool = False  # of callers with keys, only the control key's may call it
    # A call with these arguments changes nothing: callers with a key for serving may make it.
    # None is no call.
    reads_only: Callable[[Sequence[Any]], bool] | None = None

    def write_arguments(
        self, values: Sequence[Any], wire: WireDtypes = FLOAT32
    ) -> tuple[list[Any], tuple[Array, ...]]:
        """Return body and arrays of a request; DataTypeError if they do not fit."""
        arrays = ArrayWriter(wire)
        if len(values) != len(self.arguments):
            raise InternalError(
                f"{self.name}: expected {len(self.arguments)} arguments, got {len(values)}"
            )
        pairs = zip(self.arguments, values, strict=True)
        body = [coder.write(value, where, arrays) for (where, coder), value in pairs]
        return body, tuple(arrays)

    def read_arguments(self, body: Any, arrays: Sequence[Array]) -> list[Any]:
        """Return the arguments of a request; ProtocolError if they do not fit."""
        if type(body) is not list or len(body) != len(self.arguments):
            raise unexpected(self.name, f"a list of {len(self.arguments)} arguments", body)
        reader = ArrayReader(arrays)
        pairs = zip(self.arguments, body, strict=True)
        values = [coder.read(one, where, reader) for (where, coder), one in pairs]
        reader.check_all_taken(self.name)
        return values

    def write_result(
        self, value: Any, wire: WireDtypes = FLOAT32
    ) -> tuple[Any, tuple[Array, ...]]:
        """Return body and arrays of a reply; DataTypeError if they do not fit."""
        arrays = ArrayWriter(wire)
        return self.result.write(value, f"{self.name}'s result", arrays), tuple(arrays)

    def read_result(self, body: Any, arrays: Sequence[Array]) -> Any:
        """Return the value of a reply; ProtocolError if it does not fit."""
        reader = ArrayReader(arrays)
        value = self.result.read(body, f"{self.name}'s result", reader)
        reader.check_all_taken(f"{self.name}'s result")
        return value


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of server: its name and methods."""

    name: str
    methods: Mapping[str, Method]


def _always(arguments: Sequence[Any]) -> bool:
    return True


def _never(arguments: Sequence[Any]) -> bool:
    return False


HELLO = Method("hello", (), coder_of(Hello), _always, reads_only=_always)
CONFIGURE = "configure"

# Methods that configure, save, load or end, as opposed to those for batches and rows. A method
# that is missing here can be called with a data-loader's key.
_CONTROL = frozenset(
    f"{CONFIGURE} register_optimizer fix_feature_order set_embedding clear_embeddings "
    "write_rows delete_rows begin_cut write_cut cut_status end_cut load finish_job".split()
)

_NO_READS: Mapping[str, Callable[[Sequence[Any]], bool]] = {}


def role_of(
    name: str,
    protocol: type,
    *,
    always: str,
    never: str = "",
    depends: Mapping[str, Callable[[Sequence[Any]], bool]] | None = None,
    reads: Mapping[str, Callable[[Sequence[Any]], bool]] = _NO_READS,
) -> Role:
    """Return the table of a Protocol's methods, all annotated; ``hello`` has its properties.

    Calls of those named in ``always`` may be sent again when it is unknown if the first was
    executed, of those in ``never`` not; ``depends`` decides by the arguments for the others.
    ``reads`` says likewise which calls change nothing, see ``Method``; others do.
    """
    repeatable = {
        **dict.fromkeys(always.split(), _always),
        **dict.fromkeys(never.split(), _never),
        **(depends or {}),
    }
    methods = {}
    # Argument names do not travel: a call is a list in the order of declaration.
    for method, function in inspect.getmembers(protocol, inspect.isfunction):
        if method.startswith("_"):
            continue
        # No default: a new method needs a decision, as a wrong one corrupts rows.
        is_repeatable = repeatable.pop(method, None)
        if is_repeatable is None:
            raise InternalError(f"{name}: {method} is not listed as repeatable or not")
        hints = get_type_hints(function)
        result = coder_of(hints.pop("return"), f"{method}.result")
        arguments = tuple(
            (f"{method}.{argument}", coder_of(hint, f"{method}.{argument}"))
            for argument, hint in hints.items()
        )
        methods[method] = Method(
            *(method, arguments, result, is_repeatable),
            needs_control=method in _CONTROL,
            reads_only=reads.get(method),
        )
    if repeatable:
        raise InternalError(f"{name}: has no methods {', '.join(repeatable)}")
    return Role(name, methods | COMMON)


# The methods of every server, whatever its role.
COMMON: dict[str, Method] = {HELLO.name: HELLO}
COMMON |= role_of("all", messages.Job, always="finish_job job_status").methods

# Of the methods that a parameter server and an embedding-worker share. The same settings again
# change nothing; those of a cut or load are idempotent by the id that the caller drew for it.
_SHARED = (
    "configure register_optimizer ready_for_serving get_embedding_size begin_cut write_cut "
    "cut_status end_cut load stats "
)
# Late repetitions of these could undo what came after the first.
_SHARED_NEVER = "set_embedding clear_embeddings delete_rows"
# The state of a server. Not job_status, for whose callers a server waits before it ends.
_SHARED_READS = dict.fromkeys(("ready_for_serving", "get_embedding_size", "stats"), _always)
# Of rows, without the optimizer's state.
_ROW_READS: dict[str, Callable[[Sequence[Any]], bool]] = {
    "read_rows": lambda arguments: not arguments[0].with_states,
    "scan_rows": lambda arguments: not arguments[0].with_states,
    "count_rows": _always,
}


@functools.cache
def parameter_server() -> Role:
    """The role of ``messages.ParameterServer``."""
    return role_of(
        "embedding-parameter-server",
        messages.ParameterServer,
        # A repeated training lookup draws the same admissions, as the draw is by batch id; and
        # updates are deduplicated by their id.
        always=_SHARED + "lookup update read_embedding read_rows scan_rows count_rows",
        never=_SHARED_NEVER,
        # Not read_embedding, which has the optimizer's state too.
        reads={
            **_SHARED_READS,
            **_ROW_READS,
            "lookup": lambda arguments: not arguments[0].is_training,
        },
    )


@functools.cache
def embedding_worker() -> Role:
    """The role of ``messages.EmbeddingWorker``."""
    return role_of(
        "embedding-worker",
        messages.EmbeddingWorker,
        # A batch keeps its ref as long as it is in flight; updates as above. The order that is
        # fixed stays, or is replaced by the same once more.
        always=_SHARED
        + "register lookup update release tables_at_rate server_stats feature_stats "
        + "feature_order fix_feature_order table_info read_rows scan_rows count_rows",
        never=_SHARED_NEVER + " write_rows",
        # With gradients to follow, each call makes a ref that must be retired.
        depends={"lookup_direct": lambda arguments: not arguments[0].requires_grad},
        reads={
            **_SHARED_READS,
            **_ROW_READS,
            **dict.fromkeys(
                ("server_stats", "feature_stats", "feature_order", "tables_at_rate"), _always
            ),
            "table_info": _always,
            "lookup_direct": lambda arguments: not arguments[0].requires_grad,
        },
    )


@functools.cache
def nn_worker() -> Role:
    """The role of ``messages.NNWorker``."""
    return role_of(
        "nn-worker",
        messages.NNWorker,
        # Idempotent by stream and batch id.
        always="open_stream deliver relocate end_stream poll",
    )
