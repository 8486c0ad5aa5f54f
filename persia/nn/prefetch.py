"""``prefetch``: the lookups of the next batches run while the model trains on this one.

    loader --batch--> read ahead -----------------> the user's loop
                          |                             model looks up: rows are there
                          +--ids--> lookup thread ------^

Which tensors of a batch a module looks up is learnt from the batches before: a lookup that was
not ahead is compared by value with what its batch has. A lookup takes rows from ahead only if
its ids are the same; so results depend on staleness alone, and not on what was guessed.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from persia._modules import lookups, requests
from persia._modules.requests import AheadRows, ask_ahead, split_features
from persia._training.inflight import StalenessLimiter
from persia._training.queues import Closed
from persia.errors import ConfigError, ServiceTimeout
from persia.logger import get_logger
from persia.nn.base import RowModule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from persia._modules.requests import GivenIds
    from persia._modules.tables import ModuleTable

_logger = get_logger("persia.nn")

# Bounds of depth="auto": two are needed for a lookup to run beside a step.
_FIRST_DEPTH = 2
_MAX_DEPTH = 4
# Batches over which waits are counted, and how many waits there are when "auto" goes deeper.
_WINDOW = 32
_MANY_WAITS = 8
# Batches after which lookups that are never found in the batch are given up, with a line.
_PATIENCE = 8
# Seconds that a lookup may take before the user's thread does it itself.
_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a module's ids are in a batch: a leaf, or a column of it, and what is added."""

    table: ModuleTable
    padding: int | None
    leaf: int
    column: int | None
    transposed: bool
    addend: int

    def ids(self, leaves: list[NDArray[np.int64] | None]) -> NDArray[np.uint64] | None:
        """Return the ids of a batch, or None if it has none there."""
        if self.leaf >= len(leaves):
            return None
        array = leaves[self.leaf]
        if array is None:
            return None
        if self.column is not None:
            if array.ndim != 2 or self.column >= array.shape[1]:
                return None
            array = array[:, self.column]
        elif self.transposed:
            array = array.T
        flat = np.ascontiguousarray(array).reshape(-1)
        return (flat + self.addend if self.addend else flat).view(np.uint64)


@dataclass(slots=True, eq=False)
class _Item:
    batch: Any
    leaves: list[NDArray[np.int64] | None]
    rows: list[AheadRows] = field(default_factory=list)
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
    if not any(isinstance(module, RowModule) for module in model.modules()):
        raise ConfigError(
            f"prefetch: expected a model with modules of persia.nn, got {type(model).__name__} "
            "with none; convert it first"
        )
    return PrefetchedLoader(loader, depth)


class PrefetchedLoader:
    """What ``prefetch`` returns; it has the length and the attributes of its loader."""

    def __init__(self, loader: Iterable[Any], depth: int | str) -> None:
        self.loader = loader
        self.depth = _FIRST_DEPTH if isinstance(depth, str) else depth
        self._is_auto = isinstance(depth, str)
        self._recipes: dict[tuple[str, int], Recipe] = {}  # by table and place in the batch
        self._num_failed = 0  # batches in which a lookup was not found
        self.num_hits = self.num_misses = 0  # lookups of features

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self).run()

    def note_batch(self, item: _Item, missed: list[tuple[ModuleTable, GivenIds]]) -> None:
        """Learn from a batch that the model is done with."""
        num_ahead = len(item.rows)
        num_unused = 0
        for one in item.rows:
            num_unused += one.give_up()
        self.num_hits += num_ahead - num_unused
        self.num_misses += len(missed)
        if num_unused and missed:
            self._recipes.clear()  # some were wrong: they were equal by chance
        if missed and self._num_failed < _PATIENCE:
            self._learn(item, missed)

    def _learn(self, item: _Item, missed: list[tuple[ModuleTable, GivenIds]]) -> None:
        lost = 0
        counts: dict[str, int] = {}
        for table, given in missed:
            counts[table.key] = counts.get(table.key, 0) + 1
            recipe = _find(table, given, item.leaves)
            if recipe is None:
                lost += 1
            else:
                self._recipes[table.key, counts[table.key]] = recipe
        self._num_failed = self._num_failed + 1 if lost else 0
        if self._num_failed == _PATIENCE:
            _logger.warning(
                "prefetch: ids of %d lookups are not in the batch as they are looked up, and "
                "are not looked up ahead: compute them in the dataset, not in the model",
                lost,
            )

    def recipes(self) -> list[Recipe]:
        """Return where ids are, as far as it is known."""
        return list(self._recipes.values())

    def deepen(self) -> None:
        """Look one batch further ahead, if depth is automatic."""
        if self._is_auto and self.depth < _MAX_DEPTH:
            self.depth += 1


class _Pass:
    """One pass over the loader.

    A batch takes a permit when its lookup begins, here or in the model, and gives it back when
    no gradient of it is left to be stepped: after a step, or when the next batch is asked for.
    """

    def __init__(self, owner: PrefetchedLoader) -> None:
        self._owner = owner
        self._limiter = StalenessLimiter(owner.depth, on_demand=False)
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards ``is_begun`` of items
        self._thread: threading.Thread | None = None
        self._num_handed_out = 0  # whose permits are not given back
        self._waits: deque[bool] = deque(maxlen=_WINDOW)

    def run(self) -> Iterator[Any]:
        """Yield the batches."""
        items: deque[_Item] = deque()
        source = iter(self._owner.loader)
        current: _Item | None = None
        requests.start_recording()
        lookups.after_step.append(self._give_back)
        is_over = False
        try:
            while True:
                if current is not None:
                    self._owner.note_batch(current, requests.take_missed())
                self._give_back()
                while not is_over and len(items) <= self._owner.depth:
                    is_over = not self._read(source, items)
                if not items:
                    return
                current = items.popleft()
                self._await(current)
                yield current.batch
        finally:
            lookups.after_step.remove(self._give_back)
            self._close(current, items)

    def _give_back(self) -> None:
        """Give the permits of batches back that have nothing left to be stepped."""
        tables = {recipe.table for recipe in self._owner.recipes()}
        if any(lookups.has_pending(table) for table in tables):
            return
        count, self._num_handed_out = self._num_handed_out, 0
        for _ in range(count):
            self._limiter.return_permit()

    def _read(self, source: Iterator[Any], items: deque[_Item]) -> bool:
        """Read one batch and have it looked up; False at the end."""
        try:
            batch = next(source)
        except StopIteration:
            return False
        item = _Item(batch, [_integers(leaf) for leaf in pytree.tree_leaves(batch)])
        items.append(item)
        if self._owner.recipes():
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
            is_mine = not item.is_begun and (not item.is_queued or self._limiter.is_exhausted())
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
            self._limiter.staleness = self._owner.depth
        if item.failure is not None:
            raise item.failure

    def _close(self, current: _Item | None, items: deque[_Item]) -> None:
        self._limiter.close()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_WAIT_S)
        missed = requests.take_missed(goes_on=False)
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
                item.rows = self._look_up(item)
            except BaseException as exc:
                item.failure = exc
            item.done.set()

    def _look_up(self, item: _Item) -> list[AheadRows]:
        features = []
        for recipe in self._owner.recipes():
            ids = recipe.ids(item.leaves)
            if ids is not None and len(ids):
                (given,) = split_features([recipe.table], ids, None, None, recipe.padding)
                features.append((recipe.table, given))
        return ask_ahead(features) if features else []


def _integers(leaf: Any) -> NDArray[np.int64] | None:
    """Return a leaf of a batch as integers, if it may hold ids."""
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.device.type != "cpu" or leaf.dim() == 0 or leaf.is_complex():
            return None
        leaf = leaf.detach().numpy()
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iuf" or leaf.ndim == 0:
        return None
    with np.errstate(invalid="ignore"):
        return leaf.astype(np.int64, copy=False)


def _find(
    table: ModuleTable, given: GivenIds, leaves: list[NDArray[np.int64] | None]
) -> Recipe | None:
    """Return where the ids of a lookup are in its batch, equal or all shifted by one number."""
    values = given.values.view(np.int64)
    shifted: Recipe | None = None
    for place, array in enumerate(leaves):
        if array is None or not len(values):
            continue
        views: list[tuple[int | None, bool, NDArray[np.int64]]] = []
        if array.size == len(values):
            views.append((None, False, array.reshape(-1)))
            if array.ndim == 2:
                views.append((None, True, array.T.reshape(-1)))
        if array.ndim == 2 and len(array) == len(values):
            views += [(column, False, array[:, column]) for column in range(array.shape[1])]
        for column, transposed, view in views:
            addend = int(values[0] - view[0])
            if (addend and shifted is not None) or not np.array_equal(values, view + addend):
                continue
            found = Recipe(table, given.padding, place, column, transposed, addend)
            if not addend:
                return found
            shifted = found
    return shifted
