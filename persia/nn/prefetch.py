"""``prefetch``: the lookups of the next batches run while the model trains on this one.

    loader --batch--> read ahead -----------------> the user's loop
                          |                             model looks up: rows are there
                          +--ids--> lookup thread ------^

Which tensors of a batch a module looks up is learnt from the batches before, see recipes.py.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from persia._modules import lookups, requests
from persia._training.inflight import StalenessLimiter
from persia._training.queues import Closed
from persia.errors import ConfigError, ServiceTimeout
from persia.logger import get_logger
from persia.nn.base import RowModule
from persia.nn.recipes import PATIENCE, Leaves, Recipes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from persia._modules.requests import Missed
    from persia._modules.tables import ModuleTable
    from persia.nn.recipes import Ahead

_logger = get_logger("persia.nn")

# Bounds of depth="auto": two are needed for a lookup to run beside a step.
_FIRST_DEPTH = 2
_MAX_DEPTH = 4
# Batches over which waits are counted, and how many waits there are when "auto" goes deeper.
_WINDOW = 32
_MANY_WAITS = 8
# Seconds that a lookup may take before the user's thread does it itself.
_WAIT_S = 300.0


@dataclass(slots=True, eq=False)
class _Item:
    batch: Any
    leaves: Leaves
    rows: list[Ahead] = field(default_factory=list)
    is_queued: bool = False  # for the lookup thread
    is_begun: bool = False  # by the lookup thread, or by the user's, which does without
    done: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None


def prefetch(
    loader: Iterable[Any], model: torch.nn.Module, depth: int | str = "auto"
) -> PrefetchedLoader:
    """Return a loader of the same batches, whose lookups are under way before the model's.

    Args:
        loader: A ``DataLoader`` or anything else that yields batches; tensors and arrays in
            them, also inside of lists, tuples and dicts, are looked through for ids.
        model: With modules of ``persia.nn``.
        depth: Most batches between lookup and step, as ``embedding_staleness`` of PERSIA's own
            DataLoader. With 1 results are those without ``prefetch``, bit for bit; with 2 the
            rows of a batch may lack the step of the batch before. ``"auto"`` begins with 2, and
            goes to 4 where a step takes less time than a lookup.
    """
    if depth != "auto" and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise ConfigError(f"depth: expected 'auto' or a number of at least 1, got {depth!r}")
    if not hasattr(model, "modules"):
        raise ConfigError(
            "prefetch: expected a loader and a model, in this order, got "
            f"{type(loader).__name__} and {type(model).__name__}"
        )
    if not any(isinstance(module, RowModule) for module in model.modules()):
        raise ConfigError(
            f"prefetch: expected a model with modules of persia.nn, got {type(model).__name__} "
            "with none; convert it first"
        )
    return PrefetchedLoader(loader, model, depth)


class PrefetchedLoader:
    """What ``prefetch`` returns; it has the length and the attributes of its loader."""

    def __init__(self, loader: Iterable[Any], model: torch.nn.Module, depth: int | str) -> None:
        self.loader = loader
        self.model = model
        self.depth = _FIRST_DEPTH if isinstance(depth, str) else depth
        self._is_auto = isinstance(depth, str)
        self.recipes = Recipes()
        self.num_hits = self.num_misses = 0  # lookups of features

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("loader", "model"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self).run()

    def note_batch(self, item: _Item, missed: list[Missed]) -> None:
        """Learn from a batch that the model is done with."""
        num_failed = self.recipes.num_failed
        num_unused = self.recipes.note_batch(item.leaves, item.rows, missed)
        self.num_hits += sum([one.num_features for one in item.rows]) - num_unused
        self.num_misses += sum([len(one.features) for one in missed])
        if num_failed < self.recipes.num_failed == PATIENCE:
            _logger.warning(
                "prefetch: ids of lookups are not in the batch as they are looked up, and are "
                "not looked up ahead: compute them in the dataset, not in the model, or leave "
                "modules of few ids torch's; tables %s",
                ", ".join(sorted({x.name for one in missed for x, _ in one.features})),
            )

    def deepen(self) -> None:
        """Look one batch further ahead, if depth is automatic."""
        if self._is_auto and self.depth < _MAX_DEPTH:
            self.depth += 1


class _Pass:
    """One pass over the loader.

    A batch takes a permit when its lookup begins, here or in the model. It gives it back when
    none of its gradients is left to be stepped: after its step, or when the next batch is asked
    for.
    """

    def __init__(self, owner: PrefetchedLoader) -> None:
        self._owner = owner
        modules = [one for one in owner.model.modules() if isinstance(one, RowModule)]
        self._tables = {table for module in modules for table in module._tables}
        self._limiter = StalenessLimiter(owner.depth, on_demand=False)
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards ``is_begun`` of items
        self._thread: threading.Thread | None = None
        self._num_handed_out = 0  # whose permits are not given back
        self._waits: deque[bool] = deque(maxlen=_WINDOW)
        self._num_lookups = 0  # of the model, before it was given this batch
        # What it has missed of this batch before the batch's step; None before that.
        self._num_before_step: int | None = None
        self._has_more_steps = False  # a step is not the end of a batch

    def run(self) -> Iterator[Any]:
        """Yield the batches."""
        items: deque[_Item] = deque()
        source = iter(self._owner.loader)
        current: _Item | None = None
        requests.start_recording()
        lookups.after_step.append(self._note_step)
        is_over = False
        try:
            while True:
                if current is not None:
                    self._owner.note_batch(current, self._missed())
                    current = None
                self._give_back()
                while not is_over and len(items) <= self._owner.depth:
                    is_over = not self._read(source, items)
                if not items:
                    return
                current = items.popleft()
                self._await(current)
                self._num_lookups = lookups.num_lookups(self._tables)
                yield current.batch
        finally:
            lookups.after_step.remove(self._note_step)
            self._close(current, items)

    def _missed(self, *, goes_on: bool = True) -> list[Missed]:
        """Return what can be looked up ahead of a batch: what is looked up before its step."""
        missed = self._own(requests.take_missed(goes_on=goes_on))
        count, self._num_before_step = self._num_before_step, None
        if count is not None and len(missed) > count:
            self._has_more_steps = True
        return missed[:count]

    def _own(self, missed: Sequence[Missed]) -> list[Missed]:
        """Return those lookups that are of the model."""
        return [one for one in missed if one.features[0][0] in self._tables]

    def _note_step(self, stepped: Sequence[ModuleTable]) -> None:
        """Give permits back if a step has left nothing of a batch to be stepped."""
        if self._tables.isdisjoint(stepped):
            return
        if any(map(lookups.awaits_gradient, self._tables)):
            return
        if lookups.num_lookups(self._tables) == self._num_lookups:
            self._give_back(num_kept=1)  # a step of the batches before
            return
        if self._num_before_step is None:
            self._num_before_step = len(self._own(requests.missed()))
        if not self._has_more_steps:
            self._give_back()

    def _give_back(self, num_kept: int = 0) -> None:
        """Give the permits of batches back that have nothing left to be stepped."""
        if any(map(lookups.has_pending, self._tables)):
            return
        count = self._num_handed_out - num_kept
        for _ in range(count):
            self._num_handed_out -= 1
            self._limiter.return_permit()

    def _read(self, source: Iterator[Any], items: deque[_Item]) -> bool:
        """Read one batch and have it looked up; False at the end."""
        try:
            batch = next(source)
        except StopIteration:
            return False
        item = _Item(batch, Leaves(batch))
        items.append(item)
        if len(self._owner.recipes):
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_up_all, name="persia-prefetch", daemon=True
                )
                self._thread.start()
            # Those read before the places of ids were known come first: a permit that a later
            # batch had before them would let it miss their steps.
            for one in items:
                if not one.is_queued:
                    one.is_queued = True
                    self._queue.put(one)
        return True

    def _await(self, item: _Item) -> None:
        """Wait for the rows of a batch, unless its lookup waits for a step to come."""
        with self._lock:
            # Not by permits that are taken: one may be of this batch, about to be looked up.
            awaits_step = self._num_handed_out >= self._owner.depth
            is_mine = not item.is_begun and (not item.is_queued or awaits_step)
            if is_mine:
                item.is_begun = True  # the model asks itself
        self._num_handed_out += 1
        if is_mine:
            self._limiter.take()
            return
        has_waited = not item.done.is_set()
        if not item.done.wait(_WAIT_S):
            raise ServiceTimeout(
                f"waited {_WAIT_S:g} s for a lookup ahead", role="nn-worker", method="prefetch"
            )
        self._waits.append(has_waited)
        if len(self._waits) == _WINDOW and sum(self._waits) > _MANY_WAITS:
            self._waits.clear()
            self._owner.deepen()
            self._limiter.widen(self._owner.depth)
        if item.failure is not None:
            raise item.failure

    def _close(self, current: _Item | None, items: deque[_Item]) -> None:
        self._limiter.close()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_WAIT_S)
        missed = self._missed(goes_on=False)
        if current is not None:
            self._owner.note_batch(current, missed)
        for item in items:
            self._owner.note_batch(item, [])

    # --- the lookup thread --------------------------------------------------------------------

    def _look_up_all(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._limiter.acquire(needs_permit=True)
            except Closed:
                item.done.set()
                continue
            with self._lock:
                is_mine, item.is_begun = not item.is_begun, True
            if not is_mine:
                self._limiter.return_permit()
                continue
            try:
                item.rows = self._owner.recipes.look_up(item.leaves)
            except BaseException as exc:
                item.failure = exc
            item.done.set()
