"""What a checkpoint says of the trainer: the position over all ranks, random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from persia._training.inflight import Plain, Watermark, count_done, to_position
from persia.errors import CheckpointError


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
    return to_position("stream", num_loaders, series)


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
                _check_counts(count_done(position), len(position["kind"]))
        if not trainer["ranks"] or not isinstance(trainer["scaler"], dict | None):
            raise ValueError("expected a state of each rank, and one of the scaler or none")
    except Exception as exc:
        raise CheckpointError(f"{file}: expected the state of a trainer: {exc!r}") from exc


def _check_counts(*numbers: Any) -> None:
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ValueError(f"expected a count, got {number!r}")
