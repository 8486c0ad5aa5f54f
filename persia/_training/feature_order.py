"""The order in which a model receives features, kept by name.

A model knows its inputs by their places. Which name has which place is fixed by the first batch
that is trained, or by ``features=`` of its context. The embedding-workers keep that order for
all ranks and for evaluation, and checkpoints have it; every later batch is put into it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import FeatureOrder, IDFeatures
from persia._training.batch import NamedList
from persia.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from persia._rpc.messages import EmbeddingWorker, SlotOutput
    from persia._training.batch import PersiaTrainingBatch
    from persia._training.ranks import Ranks

T = TypeVar("T")


class SharedOrder:
    """The order of all contexts that ask one embedding-worker; any thread may call it."""

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker
        self._known: FeatureOrder | None = None  # replaced whole, and never by None

    def get(self) -> FeatureOrder | None:
        """Return the order, or None as long as no batch has been trained."""
        if self._known is None:
            found = self._worker.feature_order()
            self._known = self._known or found  # another thread may have fixed it meanwhile
        return self._known

    def fix(self, order: FeatureOrder, keeps: Callable[[FeatureOrder], bool]) -> None:
        """Fix an order, unless there is one, of another rank, that ``keeps`` is true of."""
        fixed = self._worker.fix_feature_order(order, None)
        while not keeps(fixed):
            fixed = self._worker.fix_feature_order(order, fixed)
        self._known = fixed


class Arranger:
    """Puts the batches of one context into the order.

    ``features`` are the names that the context was given, None for those of the first batch;
    zeros take the place of those in ``allow_missing`` that a batch does not have.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        shared: SharedOrder,
        features: Sequence[str] | None,
        allow_missing: Sequence[str],
    ) -> None:
        self._worker = worker
        self._shared = shared
        self._features = tuple(features or ())
        self._allow_missing = frozenset(allow_missing)
        self._first: FeatureOrder | None = None  # of the batch that was taken first
        self._has_fixed = False

    def note(self, batch: PersiaTrainingBatch, features: Sequence[FeatureBatch]) -> None:
        """Note the names of a training batch when it is taken: lookups end in any order."""
        if self._first is None:
            self._first = _order_of(batch, tuple([feature.name for feature in features]))

    def arrange(
        self, batch: PersiaTrainingBatch, outputs: tuple[SlotOutput, ...], trains: bool
    ) -> tuple[SlotOutput, ...]:
        """Return the outputs of a batch in the order; put its dense tensors and labels into it.

        Raises:
            DataError: If the batch has not the features, or not those only, that are trained.
        """
        names = tuple([output.name for output in outputs])
        if trains and not self._has_fixed:
            self._fix(batch, names)
        order = self._shared.get()
        if order is not None:
            dense = batch.non_id_type_tensors
            if dense:
                batch.non_id_type_tensors = _in_order("dense feature", dense, order.dense)
            else:  # legal to read rows; a model that is trained with some is not called
                batch.missing_dense = order.dense
            if batch.labels is not None:
                batch.labels = _in_order("label", batch.labels, order.labels)
        expected = self._features or (names if order is None else order.ids)
        if names == expected:
            return outputs
        found = {output.name: output for output in outputs}
        absent = [name for name in expected if name not in found]
        if absent or len(found) > len(expected):
            check_names("feature", names, expected, self._allow_missing)
            found |= {zeros.name: zeros for zeros in self._zeros(absent, batch.batch_size)}
            batch.absent = frozenset(absent)
        return tuple([found[name] for name in expected])

    def _fix(self, batch: PersiaTrainingBatch, names: tuple[str, ...]) -> None:
        """Fix the order by a training batch that was looked up, if there is none yet."""
        order, first = _order_of(batch, names), self._first
        # The first one's, unless its lookup may have failed for what it has or lacks.
        if first is not None and (
            set(first.ids) - self._allow_missing <= set(names) <= set(first.ids)
        ):
            order = first
        if self._features:
            check_names("feature", names, self._features, self._allow_missing)
            order = replace(order, ids=self._features)
        self._shared.fix(order, lambda found: found.ids == (self._features or found.ids))
        self._has_fixed = True

    def _zeros(self, names: Sequence[str], batch_size: int) -> tuple[SlotOutput, ...]:
        """Return the outputs of features of which no sample has an id."""
        ids, offsets = np.empty(0, np.uint64), np.zeros(batch_size + 1, np.int64)
        features = [FeatureBatch.from_csr(name, ids, offsets, None) for name in names]
        return self._worker.lookup_direct(IDFeatures(tuple(features), 0, False)).outputs


def check_ranks(ranks: Ranks, features: Sequence[str] | None) -> None:
    """Refuse ranks whose contexts were given features in other orders; all of them ask."""
    codes = ranks.agree(zlib.crc32(repr(features).encode()))
    others = [str(rank) for rank, code in enumerate(codes) if code != codes[0]]
    if others:
        raise ConfigError(
            f"features: expected the same list on every rank, got {features} here, and rank "
            f"{', '.join(others)} has another than rank 0; give sorted(...) of what is in a "
            "set, whose order differs from process to process"
        )


def _order_of(batch: PersiaTrainingBatch, names: tuple[str, ...]) -> FeatureOrder:
    labels = () if batch.labels is None else batch.labels.names
    return FeatureOrder(names, batch.non_id_type_tensors.names, labels)


def _in_order(what: str, given: NamedList[T], expected: tuple[str, ...]) -> NamedList[T]:
    """Return arrays in the order of these names, if there are any; one alone needs no name."""
    if given.names == expected or not expected:
        return given
    if not given.names and len(given) == len(expected):
        if len(given) == 1:
            return given
        raise DataError(
            f"{what}s: expected names, as the model is trained with {', '.join(expected)}; got "
            f"{len(given)} without a name of their own, whose places may be others; give each "
            f"its own by name={expected[0]!r}"
        )
    check_names(what, given.names, expected)
    return NamedList([given[name] for name in expected], expected)


def check_names(
    what: str,
    names: Sequence[str],
    expected: Sequence[str],
    allow_missing: frozenset[str] = frozenset(),
) -> None:
    """Refuse a batch without one of the names that the model is trained with, or with more."""
    absent = [name for name in expected if name not in names and name not in allow_missing]
    more = [name for name in names if name not in expected]
    is_feature = what == "feature"
    if absent:
        todo = f"; allow_missing=[{absent[0]!r}] gives zeros in its place" if is_feature else ""
        raise DataError(
            f"{what} {absent[0]!r}: expected in every batch, as the model is trained with it; "
            f"got {', '.join(names) or 'none by name'}{did_you_mean(absent[0], more)}{todo}"
        )
    if more:
        todo = ", or give the context features=[...] with it" if is_feature else ""
        raise DataError(
            f"{what} {more[0]!r}: expected only what the model is trained with, which is "
            f"{', '.join(expected)}; leave it out{todo}"
        )
