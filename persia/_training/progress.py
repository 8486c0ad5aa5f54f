"""How far training is: passes, batches that are done, random numbers; and a file of all that.

    place    0 ............... floor | floor + 1 ......................
             all done                | done, or in flight, or not read

A dataset's places are the numbers of its batches; a data-loader's are its batch ids. A batch
is done once its update is acknowledged, or once it is certain that it has none. A resumed run
leaves it out; what was looked up ahead and is not done is read again.
"""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persia.errors import CheckpointError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What travels in files: text, numbers, lists and maps of them.
Plain = dict[str, Any]


# Of a stream of which nothing is trained, whatever data-loaders have sent to another process.
BEGINNING: Plain = {"kind": "stream", "num_loaders": None, "floors": {}, "above": {}}


@dataclass(slots=True)
class Watermark:
    """Places that are done: all below ``floor``, and ``above``. Guarded by its owner's lock."""

    floor: int = 0
    step: int = 1  # from one place to the next
    above: set[int] = field(default_factory=set)

    def mark_done(self, place: int) -> None:
        """Note that a batch is done; idempotent."""
        if place < self.floor:
            return
        self.above.add(place)
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += self.step


@dataclass(frozen=True, slots=True)
class Position:
    """How far a training run was when its checkpoint was made."""

    passes: int = 0
    """Passes over the data that had ended."""

    batches: int = 0
    """Batches of the pass after them that were trained; of all data-loaders and ranks."""


class Progress:
    """The passes of one training context; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._passes = 0
        # Of the source of the pass that trains now: returns its position.
        self._position: Callable[[], Plain | None] | None = None
        self._resumed: Plain | None = None  # of a checkpoint, until a pass begins there
        self._before: Plain | None = None  # where the last pass ended
        self._next: Plain | None = None  # where the one after it begins; None at 0
        self._next_number = 0
        self._size = 0  # samples of the largest batch; the last one of a pass may be smaller
        self._size_before = 0  # that of a checkpoint, until it has been compared
        self._sizes: list[int] = []  # of the first batches after a checkpoint

    def begin(self, position: Callable[[], Plain | None]) -> None:
        """Note that the pass with this source's ``position`` has a batch to train."""
        with self._lock:
            if self._position == position:  # bound methods are equal if their objects are one
                return
            if self._position is not None:
                self._passes += 1  # the one before was left
                self._before = self._position()
            self._position = position
            self._resumed = self._next = None

    def end(
        self,
        position: Callable[[], Plain | None],
        end: Plain | None = None,
        following: Plain | None = None,
        *,
        is_empty: bool = False,
    ) -> None:
        """Note that a pass has given out all its batches, and where it ended.

        The next one begins at ``following``. One ``is_empty`` that began behind what was
        trained of it, and nothing was left.
        """
        with self._lock:
            if self._position == position or (is_empty and self._position is None):
                self._position = None
                self._before, self._next = end, following
                self._passes += 1
                self._resumed = None
                self._size_before = 0

    def is_between_passes(self) -> bool:
        """Whether the last pass has given out all its batches, and no other has begun."""
        with self._lock:
            return self._position is None and self._passes > 0

    def mark_done(self, number: int, at_source: Callable[[], None] | None, size: int) -> None:
        """Note that the training batch with this running number is done, and at its source.

        ``size`` is its number of samples.
        """
        with self._lock:
            if number >= self._next_number:
                self._next_number = number + 1
            self._compare_size(size)
            self._size = max(self._size, size)
        if at_source is not None:
            at_source()

    def _compare_size(self, size: int) -> None:
        """Warn once if batches are of another size than those that a checkpoint has counted."""
        if not self._size_before:
            return
        self._sizes.append(size)
        largest = max(self._sizes)
        # One smaller batch may be the last of its pass.
        if largest <= self._size_before and len(self._sizes) < 2:
            return
        if largest != self._size_before:
            logger.warning(
                "batches have %d samples and those before the checkpoint had %d: a position in "
                "the data is a number of batches, so this pass does not go on where training "
                "was; take batches of %d until it ends",
                largest,
                self._size_before,
                self._size_before,
            )
        self._size_before = 0

    def snapshot(self) -> Plain:
        """Return how far training is, for a file."""
        with self._lock:
            between = self._resumed or self._next
            here = between if self._position is None else self._position()
            return {
                "passes": self._passes,
                "position": here,
                "before": self._before,
                "next_number": self._next_number,
                "size": self._size,
            }

    def resume(
        self, passes: int, position: Plain | None, next_number: int, size: int = 0
    ) -> None:
        """Restore what a checkpoint says; the next pass begins there.

        ``size`` is the number of samples of its batches, 0 if it does not say.
        """
        with self._lock:
            self._size = size
            self._size_before = size if position is not None and count_done(position) else 0
            self._sizes = []
            self._passes = passes
            self._resumed = position
            self._before = self._next = None
            self._position = None
            self._next_number = next_number

    def resumed(self, kind: str) -> Plain | None:
        """Return where a pass that is opened now begins; None at its beginning."""
        with self._lock:
            here = self._resumed
        if here is not None and here["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint was made in a pass over a {here['kind']}, and this one is "
                f"over a {kind}: its position there cannot be used here"
            )
        return here

    def where(self) -> Position:
        """Return passes, and batches of the one after them, as the checkpoint had them."""
        with self._lock:
            if self._resumed is None:
                return Position(self._passes)
            return Position(self._passes, count_done(self._resumed))


def count_done(position: Plain) -> int:
    """Return how many batches of its pass are done at a position."""
    above: int = sum(len(places) for places in position["above"].values())
    step: int = position["num_loaders"] or 1
    floors: dict[str, int] = position["floors"]
    begins: dict[str, int] = position.get("begins", {})
    return above + sum(
        -(-(floor - begins.get(name, int(name))) // step) for name, floor in floors.items()
    )


def to_position(
    kind: str,
    num_loaders: int,
    series: Mapping[int, Watermark],
    epoch: int = 0,
    begins: Mapping[str, int] = {},
) -> Plain:
    """Return a position for a file: of a ``stream`` by data-loader, of a ``dataset`` at 0.

    A stream goes on over epochs, each of which is a pass: ``begins`` are the places of the
    first batches of this ``epoch``. Both are absent where it is the first.
    """
    of_epoch = {"epoch": epoch, "begins": dict(begins)} if epoch else {}
    return of_epoch | {
        "kind": kind,
        "num_loaders": num_loaders,
        "floors": {str(number): one.floor for number, one in series.items()},
        "above": {str(number): sorted(one.above) for number, one in series.items()},
    }


# --- over all ranks ------------------------------------------------------------------------


def of_one_pass(ranks: list[Plain]) -> tuple[int, list[Plain | None]]:
    """Return the pass that some rank is in still, and where each rank is in it.

    At the end of a step some ranks may stand behind the last batch of a pass, while others have
    found that there are no more, or begun the next pass, of which nothing is trained yet.
    """
    first = min(rank["passes"] for rank in ranks)
    return first, [
        rank["position"] if rank["passes"] == first else rank["before"] for rank in ranks
    ]


def merge(positions: list[Plain | None]) -> Plain | None:
    """Return the position in a stream over all ranks, each of which has its share of the ids.

    Batch ``id`` of data-loader ``id % num_loaders`` is rank ``id % world_size``'s. None where
    the batches are not those of data-loaders.
    """
    known = [one for one in positions if one is not None]
    if not known or known[0]["kind"] != "stream":
        return None
    world_size = len(positions)
    num_loaders = known[0]["num_loaders"]
    series: dict[int, Watermark] = {}
    for loader in range(num_loaders):
        name = str(loader)
        floors = {
            rank: one["floors"][name]
            for rank, one in enumerate(positions)
            if one is not None and name in one["floors"]
        }
        # Where a rank's pass has not begun nothing of it is done.
        floors.update({rank: loader for rank, one in enumerate(positions) if one is None})
        above = {place for one in known for place in one["above"].get(name, ())}
        if not floors:
            continue
        merged = Watermark(min(floors.values()), num_loaders)
        for place in range(merged.floor, max(*floors.values(), *above, 0) + 1, num_loaders):
            if place < floors.get(place % world_size, 0) or place in above:
                merged.mark_done(place)
        series[loader] = merged
    begins: dict[str, int] = {}
    for one in known:
        for name, place in one.get("begins", {}).items():
            begins[name] = min(place, begins.get(name, place))
    return to_position("stream", num_loaders, series, known[0].get("epoch", 0), begins)


# --- random numbers -------------------------------------------------------------------------


def random_states() -> Plain:
    """Return the states of the generators that a script draws from."""
    version, internal, gauss = random.getstate()
    numbers: Any = np.random.get_state(legacy=True)
    name, keys, place, has_gauss, cached = numbers
    states: Plain = {
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), place, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Plain) -> None:
    """Go on drawing where ``random_states`` was taken."""
    _set(states, random, np.random, torch.default_generator)
    if "cuda" in states and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _set(states: Plain, python: Any, numpy: Any, generator: torch.Generator) -> None:
    version, internal, gauss = states["python"]
    python.setstate((version, tuple(internal.tolist()), gauss))
    name, keys, place, has_gauss, cached = states["numpy"]
    numpy.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))
    generator.set_state(states["torch"])


# --- what a file has of all that ------------------------------------------------------------


def check_trainer(trainer: Any, file: str) -> None:
    """Raise CheckpointError if a run could not go on from what a file holds."""
    try:
        _check_counts(trainer["step"], trainer["passes"])
        positions = [trainer["stream"]]
        for rank in trainer["ranks"]:
            progress = rank["progress"]
            _check_counts(progress["passes"], progress["next_number"])
            positions.append(progress["position"])
            if rank["random"]:
                generators = random.Random(), np.random.RandomState(0), torch.Generator()
                _set(rank["random"], *generators)
        for position in positions:
            if position is not None:
                _check_counts(
                    count_done(position), len(position["kind"]), position.get("epoch", 0)
                )
        for group, rate in trainer.get("rates", []):
            if not (isinstance(group, str | None) and isinstance(rate, float)):
                raise ValueError(f"expected a group and its rate, got {group!r}: {rate!r}")
        if not trainer["ranks"] or not isinstance(trainer["scaler"], dict | None):
            raise ValueError("expected a state of each rank, and one of the scaler or none")
    except Exception as exc:
        raise CheckpointError(f"{file}: expected the state of a trainer: {exc!r}") from exc


def _check_counts(*numbers: Any) -> None:
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ValueError(f"expected a count, got {number!r}")
