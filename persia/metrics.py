r"""AUC and GAUC of a stream of batches: ``update`` and ``reset`` here, ``compute`` over ranks.

``AUC`` counts clicks and others by bins of the score. A bin is a stretch of float32 numbers in
their own order, narrow where scores are small, so probabilities and logits need no range: the
bits of a score are an integer that orders like it, and their first log2(bins) are the bin.
Pairs of one bin count half, see ``AUC.error_bound``.

``GAUC`` needs the scores of each group together. It keeps them, up to a bound; beyond it whole
groups go, those whose hash is above a threshold that falls: what stays is a fair sample of
groups, the same ones on every rank. See ``GAUC.standard_error``.

The methods are those of torchmetrics, whose base class would be a second way for state to
travel between ranks, where one addition of counts is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist

from persia._core.base.hashing import mix64_array
from persia.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

    Values = torch.Tensor | ArrayLike

__all__ = ["AUC", "GAUC"]

_FLOAT_BITS = 32
_HASHES = 1 << 64


class _Metric:
    """What AUC and GAUC share: being called, and when ranks are asked."""

    def __init__(self, sync_on_compute: bool, process_group: Any) -> None:
        self.sync_on_compute = sync_on_compute
        self.process_group = process_group

    def _is_shared(self) -> bool:
        """Whether other ranks have counts of their own."""
        return (
            self.sync_on_compute
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size(self.process_group) > 1
        )

    def _gathered(self, mine: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays of all ranks, one after the other."""
        device = _meeting_place(self.process_group)

        def gather(own: NDArray[Any]) -> list[NDArray[Any]]:
            tensor = torch.from_numpy(own).to(device)
            parts = [torch.empty_like(tensor) for _ in range(num_ranks)]
            dist.all_gather(parts, tensor, group=self.process_group)
            return [part.cpu().numpy() for part in parts]

        num_ranks = dist.get_world_size(self.process_group)
        sizes = [int(size) for (size,) in gather(np.array([len(mine)]))]
        room = np.zeros(max(sizes), mine.dtype)  # collectives take equal shapes only
        room[: len(mine)] = mine
        parts = zip(gather(room), sizes, strict=True)
        return np.concatenate([part[:size] for part, size in parts])


class AUC(_Metric):
    """Area under the ROC curve of binary targets.

    Args:
        bins: A power of two from 2 to 2**32, 16 bytes each; more make the error bound smaller.
            None keeps every score, and is exact.
        sync_on_compute: Whether ``compute`` is of all ranks of ``torch.distributed``, where it
            is initialised; all of them call it then.
        process_group: Of these ranks; None is all.

    Raises:
        ConfigError: If ``bins`` is something else.

    Example:
        >>> metric = AUC()
        >>> metric.update([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        >>> float(metric.compute())
        0.75
    """

    def __init__(
        self,
        bins: int | None = 1 << 18,
        *,
        sync_on_compute: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(sync_on_compute, process_group)
        if bins is not None and (not 2 <= bins <= 1 << _FLOAT_BITS or bins & (bins - 1)):
            raise ConfigError(f"bins must be None or a power of 2 in 2..2**32, got {bins!r}")
        self.bins = bins
        self.reset()

    def reset(self) -> None:
        """Forget every sample."""
        self._counts: torch.Tensor | None = None  # i64 [2 * bins]: targets 0, then targets 1
        self._num_nan: torch.Tensor | int = 0
        self._scores: list[NDArray[np.float64]] = []
        self._targets: list[NDArray[np.bool_]] = []

    def update(self, preds: Values, target: Values) -> None:
        """Count the samples of a batch.

        Args:
            preds: Scores of any shape, on any device; only their order matters.
            target: As many, above 0.5 for the positive ones.

        Raises:
            DataError: If the numbers of elements differ.
        """
        scores, targets = _flat(preds), _flat(target)
        _check_lengths(preds=scores, target=targets)
        is_positive = targets > 0.5
        # Counted without waiting for the device; ``compute`` says so.
        self._num_nan = self._num_nan + torch.isnan(scores).sum()
        if self.bins is None:
            self._scores.append(scores.double().cpu().numpy())
            self._targets.append(is_positive.cpu().numpy())
            return
        if self._counts is None:
            self._counts = torch.zeros(2 * self.bins, dtype=torch.int64)
        self._counts = self._counts.to(scores.device)
        places = _bin_of(scores, self.bins) + is_positive * self.bins
        self._counts.index_add_(0, places, torch.ones_like(places))

    def compute(self) -> torch.Tensor:
        """Return the AUC of all samples so far, of all ranks: f64 [], NaN without both targets.

        Raises:
            DataError: If a score was NaN.
        """
        negative, positive = self._histogram()
        return torch.tensor(_auc(negative, positive), dtype=torch.float64)

    def error_bound(self) -> float:
        """Return how far ``compute`` can be from the exact AUC: half the pairs in one bin.

        Rounding scores to float32 is included. All ranks call it.
        """
        if self.bins is None:
            return 0.0
        negative, positive = self._histogram()
        pairs = float(negative.sum()) * float(positive.sum())
        return float((negative * positive).sum()) / 2 / pairs if pairs else 0.0

    def forward(self, preds: Values, target: Values) -> torch.Tensor:
        """Count a batch, and return the AUC of it alone, of this rank."""
        self.update(preds, target)
        own = AUC(self.bins, sync_on_compute=False)
        own.update(preds, target)
        return own.compute()

    __call__ = forward

    def merge_state(self, other: Self) -> None:
        """Add the samples of another one, which stays as it is.

        Raises:
            ConfigError: If it has other bins.
        """
        if other.bins != self.bins:
            raise ConfigError(f"bins: expected another AUC of {self.bins}, got {other.bins}")
        self._num_nan = self._num_nan + other._num_nan
        self._scores += other._scores
        self._targets += other._targets
        if other._counts is not None:
            mine = torch.zeros_like(other._counts) if self._counts is None else self._counts
            self._counts = mine + other._counts.to(mine)

    def _histogram(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return how many negatives and positives there are of each score, ascending."""
        num_nan = int(self._num_nan)
        is_shared = self._is_shared()
        if is_shared:
            num_nan = int(self._gathered(np.array([num_nan])).sum())
        _check_no_nan(num_nan)
        if self.bins is None:
            scores = np.concatenate([np.empty(0), *self._scores])
            targets = np.concatenate([np.empty(0, np.bool_), *self._targets])
            if is_shared:
                scores, targets = self._gathered(scores), self._gathered(targets)
            distinct, places = np.unique(scores, return_inverse=True)
            negative, positive = (
                np.bincount(places[of], minlength=len(distinct)).astype(np.float64)
                for of in (~targets, targets)
            )
            return negative, positive
        counts = self._counts
        if counts is None:
            counts = torch.zeros(2 * self.bins, dtype=torch.int64)
        if is_shared:
            counts = counts.clone().to(_meeting_place(self.process_group))
            dist.all_reduce(counts, group=self.process_group)
        negative, positive = counts.cpu().numpy().reshape(2, -1).astype(np.float64)
        return negative, positive


class GAUC(_Metric):
    """Mean AUC of the groups (users, sessions), weighted by their numbers of samples.

    Groups without both targets have no AUC and are left out, as usual.

    Args:
        max_samples: Samples kept, 17 bytes each; exact up to this number. Beyond, groups are
            sampled.
        sync_on_compute: As of ``AUC``.
        process_group: As of ``AUC``.

    Raises:
        ConfigError: If ``max_samples`` is below 1.

    Example:
        >>> metric = GAUC()
        >>> metric.update([0.1, 0.4, 0.9, 0.2], [0, 1, 0, 1], groups=[7, 7, 9, 9])
        >>> float(metric.compute())
        0.5
    """

    def __init__(
        self,
        max_samples: int = 1 << 22,
        *,
        sync_on_compute: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(sync_on_compute, process_group)
        if max_samples < 1:
            raise ConfigError(f"max_samples must be at least 1, got {max_samples!r}")
        self.max_samples = max_samples
        self.reset()

    def reset(self) -> None:
        """Forget every sample."""
        # Kept are the groups whose hash is below; 2**64 keeps all.
        self._below = _HASHES
        self._pieces: list[_Samples] = []
        self._num_held = 0

    @property
    def fraction(self) -> float:
        """The share of groups that this rank still keeps; 1 is all of them."""
        return self._below / _HASHES

    def update(self, preds: Values, target: Values, groups: Values) -> None:
        """Keep the samples of a batch.

        Args:
            preds: Scores of any shape; only their order within a group matters.
            target: As many, above 0.5 for the positive ones.
            groups: As many integers, one a sample.

        Raises:
            DataError: If the numbers of elements differ, or a score is NaN.
        """
        scores, targets, of = _flat(preds), _flat(target), _flat(groups)
        _check_lengths(preds=scores, target=targets, groups=of)
        _check_no_nan(int(torch.isnan(scores).sum()))
        if of.is_floating_point():
            raise DataError(f"groups: expected integers, got {of.dtype}")
        self._keep(
            _Samples(
                of.to(torch.int64).cpu().numpy().view(np.uint64),
                scores.double().cpu().numpy(),
                (targets > 0.5).cpu().numpy(),
            )
        )

    def compute(self) -> torch.Tensor:
        """Return the GAUC of all samples so far, of all ranks: f64 [], NaN without any pair."""
        return torch.tensor(self._estimate()[0], dtype=torch.float64)

    def standard_error(self) -> float:
        """Return the standard error of ``compute``: 0 until groups are sampled.

        All ranks call it.
        """
        return self._estimate()[1]

    def forward(self, preds: Values, target: Values, groups: Values) -> torch.Tensor:
        """Keep a batch, and return the GAUC of it alone, of this rank."""
        self.update(preds, target, groups)
        own = GAUC(self.max_samples, sync_on_compute=False)
        own.update(preds, target, groups)
        return own.compute()

    __call__ = forward

    def merge_state(self, other: Self) -> None:
        """Add the samples of another one, which stays as it is."""
        self._below = min(self._below, other._below)
        for piece in other._pieces:
            self._keep(piece)

    def _keep(self, samples: _Samples) -> None:
        if self._below < _HASHES:
            samples = samples.of_groups_below(self._below)
        self._pieces.append(samples)
        self._num_held += len(samples.scores)
        while self._num_held > self.max_samples:
            whole = _joined(self._pieces)
            if len(np.unique(whole.groups)) == 1:
                raise DataError(
                    f"group {whole.groups[0]} alone has {self._num_held} samples, expected at "
                    f"most max_samples = {self.max_samples}"
                )
            self._below //= 2
            self._pieces = [whole.of_groups_below(self._below)]
            self._num_held = len(self._pieces[0].scores)

    def _estimate(self) -> tuple[float, float]:
        samples, below = _joined(self._pieces), self._below
        if self._is_shared():
            # In units of 2**-32: a threshold is 2**64 divided by a power of two.
            below = int(self._gathered(np.array([below >> 32])).min()) << 32
            samples = samples.of_groups_below(below)
            samples = _Samples(
                self._gathered(samples.groups.view(np.int64)).view(np.uint64),
                self._gathered(samples.scores),
                self._gathered(samples.targets),
            )
        weights, aucs = _group_aucs(samples)
        if not len(aucs):
            return float("nan"), 0.0
        total = float(weights.sum())
        mean = float((weights * aucs).sum()) / total
        missing = 1 - below / _HASHES
        spread = float(((weights * (aucs - mean)) ** 2).sum()) * missing
        return mean, float(np.sqrt(spread * len(aucs) / max(len(aucs) - 1, 1))) / total


class _Samples(NamedTuple):
    """Samples of groups, parallel."""

    groups: NDArray[np.uint64]
    scores: NDArray[np.float64]
    targets: NDArray[np.bool_]

    def of_groups_below(self, below: int) -> _Samples:
        """Return those of groups whose hash is below a threshold."""
        if below >= _HASHES:
            return self
        keep = mix64_array(np.ascontiguousarray(self.groups)) < np.uint64(below)
        return _Samples(*(column[keep] for column in self))


def _joined(pieces: list[_Samples]) -> _Samples:
    none = _Samples(np.empty(0, np.uint64), np.empty(0), np.empty(0, np.bool_))
    return _Samples(*map(np.concatenate, zip(none, *pieces, strict=True)))


def _auc(negative: NDArray[np.float64], positive: NDArray[np.float64]) -> float:
    """Return the AUC of counts by ascending score; pairs of one score count half."""
    num_negative, num_positive = float(negative.sum()), float(positive.sum())
    if not num_negative or not num_positive:
        return float("nan")
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum()) / num_positive / num_negative


def _group_aucs(samples: _Samples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the numbers of samples, and the AUCs, of the groups that have both targets."""
    if not len(samples.scores):
        return np.empty(0), np.empty(0)
    order = np.lexsort((samples.scores, samples.groups))
    groups, scores = samples.groups[order], samples.scores[order]
    positive = samples.targets[order].astype(np.float64)
    negative = 1 - positive
    is_new_group = np.append(True, groups[1:] != groups[:-1])
    is_new_score = is_new_group | np.append(True, scores[1:] != scores[:-1])
    # By stretches of one score, then by groups of such stretches.
    first_of_score, first_of_group = np.flatnonzero(is_new_score), np.flatnonzero(is_new_group)
    negatives = np.add.reduceat(negative, first_of_score)
    positives = np.add.reduceat(positive, first_of_score)
    group_of_score = np.cumsum(is_new_group)[first_of_score] - 1
    num = np.diff(np.append(first_of_group, len(groups))).astype(np.float64)
    num_negative = np.add.reduceat(negative, first_of_group)
    num_positive = num - num_negative
    before_group = np.cumsum(num_negative) - num_negative
    below = np.cumsum(negatives) - negatives - before_group[group_of_score]
    won = np.bincount(group_of_score, positives * (below + negatives / 2), len(num))
    both = (num_negative > 0) & (num_positive > 0)
    return num[both], won[both] / num_positive[both] / num_negative[both]


def _bin_of(scores: torch.Tensor, bins: int) -> torch.Tensor:
    """Return the bin of each score, i64; bins ascend as scores do."""
    # + 0.0 makes one zero of the two.
    bits = (scores.float() + 0.0).view(torch.int32).to(torch.int64)
    ascending = torch.where(bits < 0, -bits - 1, bits + (1 << (_FLOAT_BITS - 1)))
    return ascending >> (_FLOAT_BITS - (bins.bit_length() - 1))


def _flat(values: Values) -> torch.Tensor:
    return torch.as_tensor(values).detach().reshape(-1)


def _check_no_nan(num_nan: int) -> None:
    if num_nan:
        raise DataError(f"preds: expected numbers, got {num_nan} NaN")


def _check_lengths(**arrays: torch.Tensor) -> None:
    lengths = {name: array.numel() for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"expected as many elements of each, got {counts}")


def _meeting_place(process_group: Any) -> torch.device:
    """Return where tensors have to be for the ranks to exchange them."""
    is_nccl = dist.get_backend(process_group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
