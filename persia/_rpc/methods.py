"""What each role can be asked: its Protocol in ``messages``, as tables of coders.

A method's request is a list of its arguments, its reply the value it returns. Which methods
may be repeated is said here, one by one: a call of another kind is sent at most once.
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
    """Who a server is. Every server answers the method ``hello`` with this, at any time.

    ``incarnation`` is drawn anew by each process, so another number means that whatever the
    one before held is gone. ``schema_fingerprint`` is empty for a role without a schema.
    """

    role: str
    replica_index: int
    replica_size: int
    incarnation: int
    version: str
    schema_fingerprint: str


@dataclass(frozen=True, slots=True)
class Method:
    """One method: how arguments and result travel, whether it may be repeated, and by whom."""

    name: str
    arguments: tuple[tuple[str, Coder], ...]  # (method.argument, coder)
    result: Coder
    is_repeatable: Callable[[Sequence[Any]], bool]
    needs_control: bool = False  # of callers that have keys, only for the control key's

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


# What tells a server what to do, rather than giving it batches and asking for rows.
CONFIGURE = "configure"

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
    """Return the table of a Protocol's methods; its properties are what ``hello`` says.

    Args:
        name: The role.
        protocol: A class whose methods are fully annotated.
        repeatable: For each method whether a call with such arguments may be sent again
            without knowing what became of the first.

    Raises:
        InternalError: If ``repeatable`` names other methods than the Protocol has.
    """
    methods = _methods_of(protocol, repeatable)
    if methods.keys() != repeatable.keys():
        raise InternalError(
            f"{name}: expected a word on repeating for each of {sorted(methods)}, "
            f"got {sorted(repeatable)}"
        )
    return Role(name, {**methods, **COMMON})


def _methods_of(
    protocol: type, repeatable: Mapping[str, Callable[[Sequence[Any]], bool]]
) -> dict[str, Method]:
    methods = {}
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
        methods[method] = Method(method, arguments, result, is_repeatable, method in _CONTROL)
    return methods


# What every server answers, whatever its role.
COMMON: Mapping[str, Method] = {
    HELLO.name: HELLO,
    **_methods_of(messages.Job, {"finish_job": _always, "job_status": _always}),
}


@functools.cache
def parameter_server() -> Role:
    """The role of ``messages.ParameterServer``."""
    return role_of(
        "embedding-parameter-server",
        messages.ParameterServer,
        {
            # The same settings again change nothing.
            "configure": _always,
            "register_optimizer": _always,
            "ready_for_serving": _always,
            # A repeated training lookup draws the same admissions, by its batch id.
            "lookup": _always,
            # Applied once, by its update id.
            "update": _always,
            # Late repetitions of these two could undo what came after the first.
            "set_embedding": _never,
            "clear_embeddings": _never,
            "read_embedding": _always,
            "get_embedding_size": _always,
            # A cut and a load have a number that their caller drew.
            "begin_cut": _always,
            "write_cut": _always,
            "cut_status": _always,
            "end_cut": _always,
            "load": _always,
            "stats": _always,
        },
    )


@functools.cache
def embedding_worker() -> Role:
    """The role of ``messages.EmbeddingWorker``."""
    return role_of(
        "embedding-worker",
        messages.EmbeddingWorker,
        {
            # The same batch has the same ref as long as it is in flight.
            "register": _always,
            "lookup": _always,
            # With gradients to follow, each call makes a ref that somebody has to retire.
            "lookup_direct": lambda arguments: not arguments[0].requires_grad,
            "update": _always,
            "release": _always,
            "configure": _always,
            "register_optimizer": _always,
            "tables_at_rate": _always,
            "ready_for_serving": _always,
            "set_embedding": _never,
            "clear_embeddings": _never,
            "get_embedding_size": _always,
            # A cut and a load have a number that their caller drew.
            "begin_cut": _always,
            "write_cut": _always,
            "cut_status": _always,
            "end_cut": _always,
            "load": _always,
            "stats": _always,
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
            # Each says what shall be, by stream and batch id; said again it changes nothing.
            "open_stream": _always,
            "deliver": _always,
            "relocate": _always,
            "end_stream": _always,
            "poll": _always,
        },
    )


def schema_text() -> str:
    """Say in lines of text what every message is; ``docs/protocol.md`` holds the same.

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
