from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from typing_extensions import Self

_T = TypeVar("_T")

@final
class ThreadPool:
    """Runs the parts of a call at the same time; several callers may share one.

    ``num_threads``, 1..1024, are those of a call, the caller's own included; the others are
    those of all pools with this name and number.
    """

    num_threads: int

    def __new__(cls, num_threads: int, name: str = "persia-threads") -> Self: ...
    def run(self, call: Callable[[_T], Any], parts: Sequence[_T]) -> None:
        """Call ``call`` with each part; once all have ended, raise what the first raised."""

    def close(self) -> None:
        """Let the threads go; later calls run on their caller's thread."""

@final
class Helpers:
    """The threads of pools beside their callers."""

    def __new__(cls, count: int, name: bytes) -> Self: ...

def prefer_thread() -> None:
    """Have this thread run as soon as it wakes, where others compute; it answers requests.

    Threads that it starts are like it. It takes no more of the processors than before. Linux
    from 6.12 on obeys; elsewhere nothing changes.
    """
