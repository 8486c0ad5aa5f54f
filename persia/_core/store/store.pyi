from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._core.store.snapshot import Snapshot, Watch

MAX_SIDE_BYTES: int
MAX_LOG_BYTES: int

@final
class EmbeddingStore:
    """Rows by sign, of which those that their policies rank last go; safe from many threads.

    Signs are u64 [n]; a request should hold each once. All arrays are C-contiguous.
    ``optimizer`` of a call is that of its rows, None the store's own; ``dtype`` is how rows
    keep their values, as in ``halves.DTYPES``. A request raises before it changes anything,
    except for DimMismatch (a sign is stored with another dim, dtype or state size; an earlier
    part of the request may have been served) and MemoryError. NotConfigured: there is no
    optimizer at all.

    Args:
        capacity: Rows, divided over the shards; LRU is exact within a shard.
        num_shards: 1..1024, lowered so that each shard has at least 64 rows.
        seed: Keys initial values and admission draws.
        memory_limit: Bytes, divided over the shards; 0 is no limit. A shard that grows beyond
            its part evicts like one that is full.
        num_threads: Threads that serve one request, the caller's included.
        policies: Of eviction, numbered from 1; 0 is LRU without expiry. Each is (``"lru"`` or
            ``"lfu"`` or the name of a loaded library, clock, ttl). A row expires when it was
            not used for ``ttl`` times of the clock, ``"milliseconds"`` or ``"steps"``, or up to
            a sixteenth later. Without expiry the clock is None and the ttl 0.
        sketch_bytes: Of the counts of ids that are not admitted yet, divided over the shards;
            0 is no admission by count.
        state_file: Descriptor of a state file that is locked and long enough, in which all of
            it outlives the process; see ``persia._server.state_file``.
        attach: Take up what another process left there, with the same other arguments.

    Raises:
        ConfigError: An argument is out of its range.
        StoreError: What is in the state file is not whole; it is best removed then.
    """

    num_shards: int
    capacity: int
    seed: int
    memory_limit: int
    num_threads: int
    sketch_bytes: int
    policies: tuple[tuple[str, str | None, int], ...]
    optimizer: RowOptimizer | None
    watch: Watch

    def __new__(
        cls,
        capacity: int,
        *,
        num_shards: int = 16,
        seed: int = 0,
        memory_limit: int = 0,
        num_threads: int = 1,
        policies: Sequence[tuple[str, str | None, int]] = (),
        sketch_bytes: int = 0,
        state_file: int | None = None,
        attach: bool = False,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def close(self) -> None:
        """Let the store's threads go; a later request runs on its caller's."""

    def state_is_void(self) -> bool:
        """Whether the state file ran out of memory, so that no process can take it up."""

    def clock_times(self) -> tuple[int, int]:
        """Milliseconds and steps, as last set."""

    def reseed(self, seed: int) -> None:
        """Have rows begin with another seed; ConfigError where there are rows."""

    def crash_after(self, points: int) -> None:
        """For tests: end the process at that point, counted where it writes to its file."""

    def configure(self, optimizer: RowOptimizer) -> None:
        """Set the optimizer of calls that are given none, of the size of state of rows held."""

    def lookup_train(
        self,
        signs: NDArray[np.uint64],
        initializer: Initializer,
        admit_probability: float,
        batch_id: int,
        rows_out: NDArray[np.float32],
        hints_out: NDArray[np.uint32],
        optimizer: RowOptimizer | None = None,
        *,
        policy: int = 0,
        admit_at: int = 1,
        repeated: bool = False,
        dtype: str = "float32",
    ) -> tuple[int, int]:
        """Write each sign's embedding to ``rows_out`` [n, dim] and use its row.

        A missing sign (or one whose row has expired) is admitted with ``admit_probability``,
        drawn from (seed, sign, ``batch_id``), and inserted, with values of ``initializer``, of
        two bytes the nearest ones, and the state that ``optimizer`` begins with; a refused one
        gets zeros. ``hints_out`` [n] gets row numbers for ``update``, 2**32 - 1 of a refused
        sign. With ``admit_at`` above 1, to 255, which needs ``sketch_bytes``, it is admitted at
        this appearance instead, or before if it shares its counters; ``repeated`` says that the
        same request came before, so that its appearances were counted. ``policy`` evicts these
        rows from now on.

        Returns:
            How many signs were inserted, and how many were refused.

        Raises:
            KernelError: A user's kernel has no first values for a sign, which gets no row. What
                the request has done of others stays, as if they had come alone.
        """

    def lookup_eval(
        self,
        signs: NDArray[np.uint64],
        rows_out: NDArray[np.float32],
        *,
        dtype: str = "float32",
    ) -> int:
        """Write each sign's embedding, or zeros; changes nothing. Returns how many miss."""

    def update(
        self,
        signs: NDArray[np.uint64],
        hints: NDArray[np.uint32] | None,
        gradients: NDArray[np.float32],
        optimizer: RowOptimizer | None = None,
        *,
        dtype: str = "float32",
        number: int = 0,
        slot: int = 0,
        tag: int = 0,
    ) -> int:
        """Step each sign's row by its gradient [n, dim]; no use in the sense of a policy.

        Hints are checked against the sign before use, so stale ones do no harm. Values of two
        bytes are rounded by chance, keyed by (seed, sign, ``number``): a number that is never
        the same twice running, as that of the batch, keeps small steps from being lost.

        In a state file an update is noted under ``slot`` (1..256), its own until it is applied,
        and ``tag``, greater than any before in that slot. One that takes several calls makes
        them in the same order under growing tags. If it is cut short, the same calls in
        another process go on where it was; a row is never stepped by half. StoreError: it goes
        on with an update that had other signs.

        Returns:
            How many signs have no row; each skipped exactly its own gradient. After an update
            was cut short: of those that were left.
        """

    def read(
        self,
        signs: NDArray[np.uint64],
        dim: int,
        state_words: int | None = None,
        *,
        dtype: str = "float32",
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.uint32]]:
        """Return which signs are held, their values [n, dim] and states [n, words]; no use.

        ``state_words`` defaults to the store's own optimizer's.
        """

    def write(
        self,
        signs: NDArray[np.uint64],
        values: NDArray[np.float32],
        states: NDArray[np.uint32] | None,
        optimizer: RowOptimizer | None = None,
        *,
        policy: int = 0,
        dtype: str = "float32",
        keep_states: bool = False,
    ) -> None:
        """Insert or overwrite rows, which is a use; without states, rows get initial ones.

        With ``keep_states``, and without states, only new rows do, and others keep theirs.
        Values of two bytes are rounded to nearest, so what was read is written unchanged.
        """

    def expect(self, num_rows: int, share: int = 0, num_shares: int = 1) -> None:
        """Prepare for about this many rows that will be restored, which then come faster.

        Of n calls, each with its own ``share`` in 0..n - 1, each is for every n-th shard, so
        that threads may divide the work. MemoryError: there is no room for notes on them.
        """

    def restore(self, block: RowBlock, optimizer: RowOptimizer | None = None) -> int:
        """Insert or overwrite the rows of a block, bit for bit; returns how many.

        Blocks may come in any sequence. Until ``end_restore`` their rows stand in the order in
        which they came; if not all fit, those that came first go. Initial states of
        ``optimizer`` take the place of the block's, if it is given.
        """

    def end_restore(self, share: int = 0, num_shares: int = 1) -> None:
        """Put the rows restored since the last call in their order, each at its time.

        They become the most recently used ones of the store: changes are restored after what
        they changed, with a call in between. Shares are those of ``expect``.
        """

    def sketch(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Return the counts of ids not admitted yet, by shard, and how far counting is."""

    def restore_sketch(self, counts: NDArray[np.uint8], numbers: NDArray[np.uint64]) -> None:
        """Take the place of all counts of ids not admitted yet, of as many shards and bytes."""

    def delete(self, signs: NDArray[np.uint64]) -> int:
        """Drop the rows of these signs; returns how many there were."""

    def scan(
        self,
        prefix: int,
        prefix_bits: int,
        dim: int,
        state_words: int,
        *,
        dtype: str = "float32",
        cursor: int = 0,
        max_rows: int = 65536,
        with_states: bool = False,
    ) -> tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.uint32] | None, int | None]:
        """Return rows whose signs have this prefix, in no order: a piece of all of them.

        Rows of another format are passed over. The pieces of ``cursor`` 0, of the one that this
        returned, and so on to None, have each row once that is there from the first to the last
        call, with its values at some moment between; others may be among them or not. A piece
        has at most ``max_rows``, and may be empty.

        Returns:
            Signs [k], values [k, dim], states [k, words] if asked for, and the next cursor.
        """

    def count(
        self,
        prefix: int,
        prefix_bits: int,
        dim: int,
        state_words: int,
        *,
        dtype: str = "float32",
    ) -> int:
        """Return how many rows ``scan`` would have; it looks at each of their format."""

    def clear(self, *, reuse: bool = False) -> None:
        """Drop every row and every count of an appearance, and give the memory back.

        With ``reuse`` it is kept for rows that are restored next, and ``end_restore`` gives
        back what they did not need; that of a state file is given back at once.
        """

    def open_changes(self, name: str, *, max_bytes: int = ...) -> None:
        """Begin to note changes for a consumer; its first snapshot has all rows.

        The log of all consumers takes at most ``max_bytes``, divided over shards. A consumer
        that asks for changes which it had to give up gets all rows instead. StoreError: the
        name is taken.
        """

    def close_changes(self, name: str) -> None:
        """Forget a consumer; without any, changes are not noted. StoreError: there is none."""

    def begin_snapshot(
        self,
        changes: str | None = None,
        *,
        full: bool = False,
        side_bytes: int = ...,
        wait_seconds: float = 10.0,
    ) -> Snapshot:
        """Keep the rows of this moment for a reader, who comes later; about 10 ns a row.

        Of one moment across shards only if the caller holds requests back meanwhile. Rows that
        have expired are not in it; a snapshot of changes drops them first and has them among
        the deleted.

        Args:
            changes: A consumer: only what changed since its last committed snapshot. None: all
                rows.
            full: All rows all the same; the consumer goes on from here.
            side_bytes: Copies of rows that change before they are read may take so much,
                beside those of requests being served; then requests wait for the reader.
            wait_seconds: How long a request waits for it before the snapshot is given up.
        """

    def set_clocks(self, milliseconds: int, steps: int) -> None:
        """Say what time it is, for the requests to come; a time before the last is ignored."""

    def stats(self) -> dict[str, int]:
        """Return rows, bytes, entries (of the order of use), and counts since the start.

        The counts are evicted (as evicted_lru, evicted_lfu and evicted_native too), expired,
        inserted, refused (admissions) and missing (evaluation lookups and updates without a
        row);
        ``memory_limited`` is 1 if the limit was ever met.
        Rows that have expired are rows until a training lookup meets or sweeps them.
        """

    def policy_stats(self) -> list[dict[str, int]]:
        """Return rows, evicted and expired of each policy, and draining: see ``eviction``."""

    def check(self) -> None:
        """Walk every structure; InternalError names an invariant that does not hold."""
