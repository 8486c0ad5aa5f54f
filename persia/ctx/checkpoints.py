"""Checkpoints of a context: its embeddings at the servers, its dense files, and its trainer.

dump   hold training between two steps -> servers freeze their rows, dense files as bytes
-> training goes on, files are written here or in a thread -> one manifest
load   verify all of it on every server and here -> only then replace what is held
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from persia import env
from persia._files import catalog
from persia._files.manifest import feature_order, number_of
from persia._files.open import folder_url
from persia._training import checkpoint
from persia._training.progress import merge, of_one_pass, random_states, set_random_states
from persia.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from persia._rpc.messages import FeatureOrder
    from persia._training.backward import Rate
    from persia._training.progress import Plain, Progress
    from persia._training.ranks import Ranks
    from persia.ctx.connection import Connection

logger = logging.getLogger("persia.ctx")

T = TypeVar("T")


class Checkpoints:
    """Dumps and loads of one context, one of each at a time."""

    def __init__(
        self, connection: Connection, trains: bool, features: Sequence[str] | None = None
    ) -> None:
        self.connection = connection
        self._trains = trains
        self._features = tuple(features or ())  # that the context was given
        self.writer = checkpoint.CheckpointWriter(connection.worker)
        self.reader = checkpoint.CheckpointReader(connection.worker)

    def dump(
        self,
        dst_dir: str | os.PathLike[str],
        dense: Mapping[str, Any],
        to_script: Mapping[str, Any],
        trainer_state: Callable[[list[Plain]], Plain | None],
        blocking: bool,
        keep_last: int,
    ) -> None:
        """Write rows and dense files, all as they are between two steps; rank 0 for all ranks.

        The dense models and optimizers, and models to write as TorchScript, go by file name.
        ``trainer_state`` returns what a run continues from, given the other ranks' states.
        """
        if env.get_rank():
            return
        keep_last = checkpoint.check_keep_last(keep_last)
        url = folder_url(dst_dir, "dst_dir")
        self.writer.wait()
        self.reader.wait()  # rows that are half replaced are no checkpoint
        # Compiling takes seconds: before training is held.
        scripts = {
            name: checkpoint.scripted(model, "with_jit_model")
            for name, model in to_script.items()
        }
        with self.connection.at_step() as (step, others):

            def files() -> dict[str, bytes]:
                found = {name: checkpoint.state_of(one) for name, one in dense.items()}
                for name, module in scripts.items():
                    found[name] = checkpoint.serialized(module, torch.jit.save)
                state = trainer_state(others) if dense else None
                if state is not None:
                    found[checkpoint.TRAINER] = checkpoint.serialized(state)
                return found

            frozen = self.writer.begin(step, files)
            if self.connection.recorder is not None:
                self.connection.recorder.note_mark("checkpoint")
        folders = self.connection.folders
        self.writer.finish(frozen, url, keep_last, blocking=blocking, job=folders)

    def begin_cut(self, take: Callable[[], T]) -> tuple[checkpoint.Frozen, T]:
        """Begin a cut between two steps, for ``writer.finish``; ``take`` runs in its pause."""
        self.writer.wait()
        self.reader.wait()  # as in ``dump``
        with self.connection.at_step() as (step, _):
            taken = take()
            return self.writer.begin(step, dict), taken

    def load(
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any,
        dense: Mapping[str, Any],
        blocking: bool,
        features: Iterable[str] | None,
        ranks: Ranks | None,
    ) -> Plain | None:
        """Load rows and dense files, all or none of them, on all ``ranks`` or none.

        Returns what the run continues from, if the checkpoint has it and all was loaded.
        """
        self.connection.flush()
        url = folder_url(src_dir, "src_dir")
        names = checkpoint.names_of(features)
        is_speaker = not env.get_rank()  # asks the servers, for all ranks
        opened = _open(url, ranks)
        with _on_all_ranks(ranks):
            order = feature_order(opened.manifest, url)
            # First, because a wrong dim of the embeddings shows in the dense net as well.
            if is_speaker:
                self.reader.verify(opened.id, url, names)
            try:
                states = opened.fitting(dense, map_location)
                if states and order is not None:
                    self._check_features(order, url)
                trainer = opened.trainer() if dense and names is None else None
            except BaseException:
                self.reader.drop()
                raise
        with self.connection.load_lock, _on_all_ranks(ranks):
            if is_speaker:
                self.reader.commit(blocking=blocking or ranks is not None)
        self.connection.num_loads += 1  # what was looked up meanwhile is of before, too
        for name, state in states.items():
            checkpoint.put_dense(dense[name], state, name)
        is_served = not self._trains and self.connection.backward is None
        # Rows alone may be the beginning of another model's training.
        if states or (is_served and names is None):
            # One of the beginning has no order yet.
            self._take_order(order, url, has_trained=trainer is None or trainer["step"] > 0)
        return trainer

    def _check_features(self, order: FeatureOrder, url: str) -> None:
        """Refuse a model that knows the features of this context by other places."""
        given = self._features
        if given and given != order.ids and set(given) == set(order.ids):
            raise CheckpointError(
                f"{url}: its model was trained with the features {', '.join(order.ids)}, in "
                f"this order, and the context was given features={list(given)}: leave it out, "
                "as the checkpoint brings the order"
            )

    def _take_order(self, order: FeatureOrder | None, url: str, *, has_trained: bool) -> None:
        shared = self.connection.order
        if order is not None:
            order = replace(order, ids=self._features or order.ids)
            shared.fix(order, order.__eq__)
        elif has_trained and not self._features and shared.get() is None:
            logger.warning(
                "%s does not have the order in which its model receives features, as an "
                "earlier version wrote it, or servers by themselves: batches keep their own "
                "order until one is trained. Give the context features=[...], in the model's "
                "order",
                url,
            )


@contextlib.contextmanager
def _on_all_ranks(ranks: Ranks | None) -> Iterator[None]:
    """Surround what has to succeed on every rank before any of them continues."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as exc:
        failure = exc  # raised behind the barrier, or the other ranks would wait there
    has_failed = ranks is not None and ranks.any(failure is not None)
    if failure is not None:
        raise failure
    if has_failed:
        raise CheckpointError("another rank could not load the checkpoint: see its output")


def _open(url: str, ranks: Ranks | None) -> checkpoint.Checkpoint:
    """Open the newest checkpoint, on all ranks that which rank 0 finds.

    A folder need not look the same from everywhere: file systems of a network keep old lists.
    """
    if ranks is None:
        return checkpoint.Checkpoint(url)
    found: list[checkpoint.Checkpoint] = []
    with _on_all_ranks(ranks):
        if not ranks.rank:
            found.append(checkpoint.Checkpoint(url))
    identity = found[0].id if found else ""
    number, token = number_of(identity) if identity else (0, "0")
    number, bits = ranks.from_first(number), ranks.from_first(int(token, 16))
    with _on_all_ranks(ranks):
        if not found:
            identity = catalog.id_of(number, bits) if number else ""
            found.append(checkpoint.Checkpoint(url, identity))
    return found[0]


class TrainerState:
    """What a run continues from besides rows and files: generators, scaler, position, rates."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._random: Plain = {}  # of a rank that rank 0 asks, after its last step

    def note_step(self) -> None:
        """Keep the states of the generators, on a rank that rank 0 can ask for them."""
        self._random = random_states()

    def of_rank(self, progress: Progress) -> Plain:
        """Return this rank's part; called by another thread on ranks other than 0."""
        return {"random": self._random, "progress": progress.snapshot()}

    def of_all(
        self,
        step: int,
        scaler: torch.amp.GradScaler | None,
        progress: Progress,
        others: list[Plain],
        rates: list[Rate],
    ) -> Plain:
        """Return the state for a file, with the parts of the other ranks."""
        self._random = random_states()
        ranks = [self.of_rank(progress), *others]
        passes, positions = of_one_pass([rank["progress"] for rank in ranks])
        return {
            "step": step,
            "scaler": None if scaler is None else scaler.state_dict(),
            "ranks": ranks,
            "passes": passes,
            "stream": merge(positions),
            "rates": [list(rate) for rate in rates],
        }

    def restore(self, state: Plain, progress: Progress) -> int:
        """Continue where a checkpoint was made; return the number of the next batch."""
        ranks = state["ranks"]
        is_same = len(ranks) == self._world_size
        mine = ranks[self._rank if is_same else 0]
        position, next_number = state["stream"], mine["progress"]["next_number"]
        passes = mine["progress"]["passes"] if position is None else state["passes"]
        if not is_same:
            next_number = max(rank["progress"]["next_number"] for rank in ranks)
            logger.warning(
                "the checkpoint is of %d ranks and there are %d: random numbers start over%s",
                len(ranks),
                self._world_size,
                "" if position else ", and so does the pass over the data",
            )
        elif position is None:
            position = mine["progress"]["position"]
        progress.resume(passes, position, next_number, mine["progress"].get("size", 0))
        if is_same and mine["random"]:
            self._random = mine["random"]  # until the next step, if this is not rank 0
            set_random_states(self._random)
        return int(next_number)
