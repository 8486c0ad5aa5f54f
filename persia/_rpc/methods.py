"""The methods of each role: its Protocol in ``messages``, as tables of coders.

A method's request is a list of its arguments, its reply the value it returns. The tables list
for each method whether its calls are repeatable; other calls are sent at most once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from persia._rpc import messages
from persia._rpc.codec import ArrayReader, Coder, coder_of
from persia._rpc.frame import Array
from persia.errors import InternalError, ProtocolError


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of a server, with which it answers ``hello`` at any time.

    Each process draws its ``incarnation``: another number means that the state of the process
    before is lost. ``schema_fingerprint`` is empty for a role without a schema.
    """

    role: str
    replica_index: int
    replica_size: int
    incarnation: int
    version: str
    schema_fingerprint: str


@dataclass(frozen=True, slots=True)
class Method:
    """One method: the coders of its arguments and result, and how it may be called."""

    name: str
    arguments: tuple[tuple[str, Coder], ...]  # (method.argument, coder)
    result: Coder
    is_repeatable: Callable[[Sequence[Any]], bool]
    needs_control: bool = False  # of callers with keys, only the control key's may call it

    def write_arguments(self, values: Sequence[Any]) -> tuple[list[Any], tuple[Array, ...]]:
        """Return body and arrays of a request.

        Raises:
            DataTypeError: If an argument is not what the Protocol declares.
        """
        arrays: list[Array] = []
        if len(values) != len(self.arguments):
            raise InternalError(
                f"{self.name}: expected {len(self.arguments)} arguments, got {len(values)}"
            )
        body = [
            coder.write(value, where, arrays)
            for (where, coder), value in zip(self.arguments, values, strict=True)
        ]
        return body, tuple(arrays)

    def read_arguments(self, body: Any, arrays: Sequence[Array]) -> list[Any]:
        """Return the arguments of a request.

        Raises:
            ProtocolError: If they are not what the Protocol declares.
        """
        if type(body) is not list or len(body) != len(self.arguments):
            raise ProtocolError(
                f"{self.name}: expected a list of {len(self.arguments)} arguments, "
                f"got {body!r:.80}",
                method=self.name,
            )
        reader = ArrayReader(arrays)
        values = [
            coder.read(one, where, reader)
            for (where, coder), one in zip(self.arguments, body, strict=True)
        ]
        reader.check_all_taken(self.name)
        return values

    def write_result(self, value: Any) -> tuple[Any, tuple[Array, ...]]:
        """Return body and arrays of a reply.

        Raises:
            DataTypeError: If the result is not what the Protocol declares.
        """
        arrays: list[Array] = []
        return self.result.write(value, f"{self.name}'s result", arrays), tuple(arrays)

    def read_result(self, body: Any, arrays: Sequence[Array]) -> Any:
        """Return the value of a reply.

        Raises:
            ProtocolError: If it is not what the Protocol declares.
        """
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


HELLO = Method("hello", (), coder_of(Hello), _always)


CONFIGURE = "configure"

# Methods that configure, save, load or end, as opposed to those for batches and rows. A method
# that is missing here can be called with a data-loader's key.
_CONTROL = frozenset(
    {
        CONFIGURE,
        "register_optimizer",
        "set_embedding",
        "clear_embeddings",
        "begin_cut",
        "write_cut",
        "cut_status",
        "end_cut",
        "load",
        "finish_job",
    }
)


def role_of(
    name: str, protocol: type, repeatable: Mapping[str, Callable[[Sequence[Any]], bool]]
) -> Role:
    """Return the table of a Protocol's methods; ``hello`` answers its properties.

    Args:
        name: The role.
        protocol: A class whose methods are fully annotated.
        repeatable: For each method, whether a call with given arguments may be sent again when
            it is unknown if the first was executed.

    Raises:
        InternalError: If ``repeatable`` names other methods than the Protocol has.
    """
    methods = _methods_of(protocol, repeatable)
    # No default: a new method needs a decision, as a wrong one corrupts rows.
    if methods.keys() != repeatable.keys():
        raise InternalError(
            f"{name}: expected whether it is repeatable for each of {sorted(methods)}, "
            f"got {sorted(repeatable)}"
        )
    return Role(name, {**methods, **COMMON})


def _methods_of(
    protocol: type, repeatable: Mapping[str, Callable[[Sequence[Any]], bool]]
) -> dict[str, Method]:
    methods = {}
    # Argument names do not travel: a call is a list in the order of declaration.
    for method, function in inspect.getmembers(protocol, inspect.isfunction):
        if method.startswith("_"):
            continue
        hints = get_type_hints(function)
        result = coder_of(hints.pop("return"), f"{method}.result")
        arguments = tuple(
            (f"{method}.{argument}", coder_of(hint, f"{method}.{argument}"))
            for argument, hint in hints.items()
        )
        is_repeatable = repeatable.get(method, _never)
        # A method that is missing from ``repeatable`` is refused by role_of; until then the
        # safe value holds.
        methods[method] = Method(method, arguments, result, is_repeatable, method in _CONTROL)
    return methods


# The methods of every server, whatever its role.
COMMON: Mapping[str, Method] = {
    HELLO.name: HELLO,
    **_methods_of(messages.Job, {"finish_job": _always, "job_status": _always}),
}


# Of the methods that a parameter server and an embedding-worker share.
_SHARED = {
    # The same settings again change nothing.
    "configure": _always,
    "register_optimizer": _always,
    "ready_for_serving": _always,
    # Late repetitions of these two could undo what came after the first.
    "set_embedding": _never,
    "clear_embeddings": _never,
    "get_embedding_size": _always,
    # Idempotent by the id that the caller drew for the cut or load.
    "begin_cut": _always,
    "write_cut": _always,
    "cut_status": _always,
    "end_cut": _always,
    "load": _always,
    "stats": _always,
}


@functools.cache
def parameter_server() -> Role:
    """The role of ``messages.ParameterServer``."""
    return role_of(
        "embedding-parameter-server",
        messages.ParameterServer,
        {
            **_SHARED,
            # A repeated training lookup draws the same admissions, as the draw is by batch id.
            "lookup": _always,
            # The server deduplicates by update id.
            "update": _always,
            "read_embedding": _always,
        },
    )


@functools.cache
def embedding_worker() -> Role:
    """The role of ``messages.EmbeddingWorker``."""
    return role_of(
        "embedding-worker",
        messages.EmbeddingWorker,
        {
            **_SHARED,
            # A batch keeps its ref as long as it is in flight.
            "register": _always,
            "lookup": _always,
            # With gradients to follow, each call makes a ref that must be retired.
            "lookup_direct": lambda arguments: not arguments[0].requires_grad,
            # Deduplicated by update id.
            "update": _always,
            "release": _always,
            "tables_at_rate": _always,
            "server_stats": _always,
            "feature_stats": _always,
        },
    )


@functools.cache
def nn_worker() -> Role:
    """The role of ``messages.NNWorker``."""
    return role_of(
        "nn-worker",
        messages.NNWorker,
        {
            # Idempotent by stream and batch id.
            "open_stream": _always,
            "deliver": _always,
            "relocate": _always,
            "end_stream": _always,
            "poll": _always,
        },
    )


def schema_text() -> str:
    """Return the fields of every message and method as text, as ``docs/protocol.md`` has it.

    A change of this text is a change of the protocol.
    """
    lines = []
    for cls in (*_message_classes(), Hello):
        hints = inspect.get_annotations(cls)
        names = ", ".join(f"{f.name}: {hints[f.name]}" for f in fields(cls))
        lines.append(f"{cls.__name__}({names})")
    for room, names_of, protocol in (
        ("all", COMMON.keys() - {HELLO.name}, messages.Job),
        *(
            (role.name, role.methods.keys() - COMMON.keys(), protocol)
            for role, protocol in (
                (parameter_server(), messages.ParameterServer),
                (embedding_worker(), messages.EmbeddingWorker),
                (nn_worker(), messages.NNWorker),
            )
        ),
    ):
        lines.append(f"[{room}]")
        for name in sorted(names_of):
            function = getattr(protocol, name)
            hints = dict(inspect.get_annotations(function))
            result = hints.pop("return")
            names = ", ".join(f"{key}: {hint}" for key, hint in hints.items())
            lines.append(f"{name}({names}) -> {result}")
    return "\n".join(lines)


def _message_classes() -> list[Any]:
    return [
        value
        for value in vars(messages).values()
        if isinstance(value, type)
        and value.__module__ == messages.__name__
        and hasattr(value, "__dataclass_fields__")
    ]
