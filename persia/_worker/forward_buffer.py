"""The batches in flight at an embedding-worker, by ref.

    registered ---lookup (training)---> looked up ---update, all servers---> acknowledged
        |                                   |
        +--------- release, expiry ---------+----> released, expired

A ref is a handle that may be used again until it is retired, which the right side is. As many
acknowledged ones as there may be in flight are remembered, with their report, so that an update
whose answer was lost is answered again.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from persia._rpc.messages import IDFeatures, Numbers, UpdateReply, UpdateReport
from persia._worker.packing import PackedBatch
from persia._worker.pooling import Maxima
from persia.config import EmbeddingWorkerConfig
from persia.errors import ServiceBusy, UnknownRef
from persia.logger import get_logger

_logger = get_logger("persia.embedding_worker")

ROLE = "embedding-worker"


@dataclass(slots=True)
class BufferedBatch:
    """One ref."""

    ref: int
    batch_id: int
    requires_grad: bool
    packed: PackedBatch
    used_at: float  # monotonic seconds; guarded by the lock of ``ForwardBuffer``
    # Hints by table of the plan, in the order of its signs, and maxima by feature: what an
    # update needs from the last training lookup. One value, so that a lookup that is repeated
    # beside an update replaces both or none.
    looked_up: tuple[tuple[Numbers, ...], Maxima] | None = None
    # One update at a time; the fields below are the update's.
    updating: threading.Lock = field(default_factory=threading.Lock)
    update_id: tuple[int, int] | None = None
    acknowledged: dict[int, UpdateReply] = field(default_factory=dict)  # by server
    report: UpdateReport | None = None  # set when all servers have acknowledged


class ForwardBuffer:
    """Registers, finds and retires refs; any thread may call it.

    Args:
        settings: ``forward_buffer_size`` bounds the refs, ``buffered_data_expired_sec`` how
            long one may lie unused.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: EmbeddingWorkerConfig, clock: Callable[[], float]) -> None:
        self._max_in_flight = settings.forward_buffer_size
        self._expiry_s = float(settings.buffered_data_expired_sec)
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        # Upper bits are this worker's incarnation: a ref of one that died must not mean
        # another batch to its successor.
        self._next_ref = secrets.randbits(31) << 32
        # Least recently used first.
        self._in_flight: OrderedDict[int, BufferedBatch] = OrderedDict()
        self._ref_of_batch: dict[int, int] = {}  # batch id -> latest registered ref
        self._retired: OrderedDict[int, tuple[tuple[int, int], UpdateReport]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def add(
        self, features: IDFeatures, packed: PackedBatch, *, is_repeatable: bool
    ) -> tuple[BufferedBatch, bool]:
        """Take a batch; return it, and whether it is new.

        Args:
            features: What the caller sent.
            packed: The same, packed.
            is_repeatable: Whether the same batch again has the same ref.

        Raises:
            ServiceBusy: If ``forward_buffer_size`` batches are in flight.
        """
        with self._lock:
            now = self._clock()
            self._expire(now)
            if is_repeatable:
                known = self._in_flight.get(self._ref_of_batch.get(features.batch_id, -1))
                if (
                    known is not None
                    and known.requires_grad is features.requires_grad
                    and known.packed.has_same_ids(packed)
                ):
                    self._counts["registered_again"] += 1
                    known.used_at = now
                    self._in_flight.move_to_end(known.ref)
                    return known, False
            if len(self._in_flight) >= self._max_in_flight:
                self._counts["refused_busy"] += 1
                raise ServiceBusy(
                    f"{len(self._in_flight)} batches are in flight, expected fewer than "
                    f"forward_buffer_size = {self._max_in_flight}; try again when one is done",
                    role=ROLE,
                    method="register",
                )
            ref = self._next_ref
            self._next_ref += 1
            batch = BufferedBatch(ref, features.batch_id, features.requires_grad, packed, now)
            self._in_flight[ref] = batch
            if is_repeatable:
                self._ref_of_batch[features.batch_id] = ref
            self._counts["registered"] += 1
        return batch, True

    def find(self, ref: int, method: str) -> BufferedBatch:
        """Return a batch in flight, and count this as a use of it.

        Raises:
            UnknownRef: If there is none.
        """
        with self._lock:
            return self._find(ref, method)

    def find_for_update(
        self, ref: int, update_id: tuple[int, int]
    ) -> BufferedBatch | UpdateReport:
        """Return a batch in flight, or what this very update was answered before.

        Raises:
            UnknownRef: If there is neither.
        """
        with self._lock:
            retired = self._retired.get(ref)
            if retired is not None and retired[0] == update_id:
                self._counts["updates_again"] += 1
                return retired[1]
            return self._find(ref, "update")

    def _find(self, ref: int, method: str) -> BufferedBatch:
        now = self._clock()
        self._expire(now)
        batch = self._in_flight.get(ref)
        if batch is None:
            raise self.unknown_ref(ref, method)
        batch.used_at = now
        self._in_flight.move_to_end(ref)
        return batch

    def unknown_ref(self, ref: int, method: str) -> UnknownRef:
        """Make the error that says that a ref is not in flight."""
        return UnknownRef(
            f"no batch in flight has ref {ref}: it was acknowledged, released, unused for "
            f"{self._expiry_s:g} s (buffered_data_expired_sec), or is another worker's; "
            f"register the batch again",
            role=ROLE,
            method=method,
        )

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; nothing if it is retired already."""
        with self._lock:
            if self._retire(ref):
                self._counts["released"] += 1

    def acknowledge(
        self, batch: BufferedBatch, update_id: tuple[int, int], report: UpdateReport
    ) -> None:
        """Retire a batch whose update is applied, and remember its report."""
        with self._lock:
            self._retire(batch.ref)
            self._retired[batch.ref] = update_id, report
            if len(self._retired) > self._max_in_flight:
                self._retired.popitem(last=False)

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, ``in_flight``, the refs now, and how many may be."""
        with self._lock:
            self._expire(self._clock())
            now = {
                "in_flight": len(self._in_flight),
                "forward_buffer_size": self._max_in_flight,
            }
            return {**self._counts, **now}

    def measure(self) -> tuple[int, int, int]:
        """Return how many batches wait for a lookup, how many for an update, and their bytes.

        An update that is under way has not ended.
        """
        with self._lock:
            batches = list(self._in_flight.values())
        # Outside the lock: these are some dozen arrays of each.
        looked_up = sum(batch.looked_up is not None for batch in batches)
        num_bytes = sum(batch.packed.num_bytes() for batch in batches)
        return len(batches) - looked_up, looked_up, num_bytes

    # --- the lock is held -------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """Retire what lies unused for too long."""
        num_expired = 0
        while self._in_flight:
            oldest = next(iter(self._in_flight.values()))
            if now - oldest.used_at < self._expiry_s:
                break
            self._retire(oldest.ref)
            num_expired += 1
        if num_expired:
            self._counts["expired"] += num_expired
            _logger.warning(
                "%d batches expired: no lookup and no gradients of them for %g s",
                num_expired,
                self._expiry_s,
            )

    def _retire(self, ref: int) -> bool:
        """Forget a ref; False if it was not in flight."""
        batch = self._in_flight.pop(ref, None)
        if batch is None:
            return False
        if self._ref_of_batch.get(batch.batch_id) == ref:
            del self._ref_of_batch[batch.batch_id]
        return True
