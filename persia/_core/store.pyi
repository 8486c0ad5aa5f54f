from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia._core.initial import Initializer
from persia._core.optim import RowOptimizer

@final
class Batch:
    """One request: its arguments, and its signs in shard order."""

    def serve(self, first: int, end: int) -> None: ...

@final
class EmbeddingStore:
    """Rows by sign, with the least recently used evicted first; safe from many threads.

    Signs are u64 [n]; a request should hold each once. All arrays are C-contiguous. A request
    raises before it changes anything, except for DimMismatch (an earlier part of the request
    may have been served) and MemoryError.

    Args:
        capacity: Rows, divided over the shards; LRU is exact within a shard.
        num_shards: 1..1024, lowered so that each shard has at least 64 rows.
        seed: Keys initial values and admission draws.
        memory_limit: Bytes, divided over the shards; 0 is no limit. A shard that grows beyond
            its part evicts like one that is full.
        num_threads: Threads that serve one request, the caller's included.

    Raises:
        ConfigError: An argument is out of its range.
    """

    num_shards: int
    capacity: int
    seed: int
    memory_limit: int
    num_threads: int
    optimizer: RowOptimizer | None

    def __new__(
        cls,
        capacity: int,
        *,
        num_shards: int = 16,
        seed: int = 0,
        memory_limit: int = 0,
        num_threads: int = 1,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def close(self) -> None:
        """Stop the store's threads; a later request runs on its caller's."""

    def configure(self, optimizer: RowOptimizer) -> None:
        """Set the optimizer of calls that are given none.

        Raises:
            ConfigError: Rows are held whose state has another size than this optimizer's.
        """

    def lookup_train(
        self,
        signs: NDArray[np.uint64],
        initializer: Initializer,
        admit_probability: float,
        batch_id: int,
        rows_out: NDArray[np.float32],
        hints_out: NDArray[np.uint32],
        optimizer: RowOptimizer | None = None,
    ) -> tuple[int, int]:
        """Write each sign's embedding to ``rows_out`` [n, dim] and make it the most recent.

        A missing sign is admitted with ``admit_probability``, drawn from (seed, sign,
        ``batch_id``), and inserted, with the state that ``optimizer`` begins with; a refused
        one gets zeros. ``hints_out`` [n] gets row
        numbers for ``update``.

        Returns:
            How many signs were inserted, and how many were refused.

        Raises:
            NotConfigured: None is given, and the store has no optimizer yet.
            DimMismatch: A sign is stored with another dim or state size.
        """

    def lookup_eval(self, signs: NDArray[np.uint64], rows_out: NDArray[np.float32]) -> int:
        """Write each sign's embedding, or zeros; changes nothing. Returns the number missing.

        Raises:
            DimMismatch: A sign is stored with another dim.
        """

    def update(
        self,
        signs: NDArray[np.uint64],
        hints: NDArray[np.uint32] | None,
        gradients: NDArray[np.float32],
        optimizer: RowOptimizer | None = None,
    ) -> int:
        """Step each sign's row by its gradient [n, dim]; no use in the sense of LRU.

        Hints are checked against the sign before use, so stale ones do no harm.

        Returns:
            How many signs have no row; each skipped exactly its own gradient.

        Raises:
            NotConfigured: None is given, and the store has no optimizer yet.
            DimMismatch: A sign is stored with another dim or state size.
        """

    def read(
        self, signs: NDArray[np.uint64], dim: int, state_words: int | None = None
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.uint32]]:
        """Return which signs are held, their values [n, dim] and states [n, words].

        ``state_words`` defaults to the store's own optimizer's. No use in the sense of LRU.
        """

    def write(
        self,
        signs: NDArray[np.uint64],
        values: NDArray[np.float32],
        states: NDArray[np.uint32] | None,
        optimizer: RowOptimizer | None = None,
    ) -> None:
        """Insert or overwrite rows; each becomes the most recent.

        Without states, rows get initial ones.
        """

    def delete(self, signs: NDArray[np.uint64]) -> int:
        """Drop the rows of these signs; returns how many there were."""

    def clear(self) -> None:
        """Drop every row and give the memory back."""

    def shard_entries(
        self, number: int
    ) -> list[tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.uint32]]]:
        """Return one shard's (signs, values, states), a tuple per shape, oldest first."""

    def iterate(
        self,
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.uint32]]]:
        """Yield ``shard_entries`` of every shard."""

    def stats(self) -> dict[str, int]:
        """Return rows, bytes, entries (of the order of use), and counts since the start.

        The counts are evicted, inserted, refused (admissions) and missing (evaluation lookups
        and updates without a row); ``memory_limited`` is 1 if the limit was ever met.
        """

    def check(self) -> None:
        """Walk every structure.

        Raises:
            InternalError: An invariant does not hold; the message names it.
        """
