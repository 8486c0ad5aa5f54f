"""Threads that share the work of one call."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from typing_extensions import Self

_T = TypeVar("_T")

@final
class ThreadPool:
    """Runs the parts of a call at the same time; several callers may share one.

    Args:
        num_threads: Threads of a call, the caller's own included.
        name: Of the others, which are those of all pools with this name and number.

    Raises:
        ConfigError: If ``num_threads`` is not in 1..1024.
    """

    num_threads: int

    def __new__(cls, num_threads: int, name: str = "persia-threads") -> Self: ...
    def run(self, call: Callable[[_T], Any], parts: Sequence[_T]) -> None:
        """Call ``call`` with each part and return when all have ended.

        Raises:
            BaseException: What the first part that failed raised, once all have ended.
        """

    def close(self) -> None:
        """Let the threads go; later calls run on their caller's thread."""

@final
class Helpers:
    """The threads of pools beside their callers."""

    def __new__(cls, count: int, name: bytes) -> Self: ...

@final
class Calls:
    """The parts of a call to a Python function."""
