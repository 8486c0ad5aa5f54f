r"""Metrics of a stream of batches: ``update`` and ``reset`` here, ``compute`` over ranks.

Of clicks as a whole: ``AUC``, ``LogLoss``, ``NormalizedEntropy`` and ``Calibration``. Of each
user, session or query by itself: ``GAUC``, ``RecallAtK`` and ``NDCG``.

``AUC`` counts clicks and others by bins of the score. A bin is a stretch of float32 numbers in
their own order, narrow where scores are small, so probabilities and logits need no range: the
bits of a score are an integer that orders like it, and their first log2(bins) are the bin.
Pairs of one bin count half, see ``AUC.error_bound``.

Metrics by group need the scores of each group together. They keep them, up to a bound; beyond
it whole groups go, those whose hash is above a threshold that falls: what stays is a fair
sample of groups, the same ones on every rank. See ``GAUC.standard_error``.

The order of equal scores is chance, on which no metric depends: each is the mean over all such
orders.

The methods are those of torchmetrics, whose base class would be a second way for state to
travel between ranks, where one addition of counts is enough.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
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

__all__ = [
    *("AUC", "GAUC", "NDCG", "Calibration", "LogLoss", "NormalizedEntropy", "RecallAtK"),
]

_FLOAT_BITS = 32
_HASHES = 1 << 64


class _Metric(ABC):
    """What all share: being called, and when ranks are asked."""

    def __init__(self, sync_on_compute: bool, process_group: Any) -> None:
        self.sync_on_compute = sync_on_compute
        self.process_group = process_group

    @abstractmethod
    def reset(self) -> None:
        """Forget every sample."""

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """Return the value over all samples so far, of all ranks: f64 []."""

    if TYPE_CHECKING:  # the arguments differ

        def update(self, *args: Any, **kwargs: Any) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Count a batch as ``update`` does; return the value of it alone, of this rank."""
        self.update(*args, **kwargs)
        alone = copy.copy(self)
        alone.sync_on_compute = False
        alone.reset()
        alone.update(*args, **kwargs)
        return alone.compute()

    __call__ = forward

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


class _Probabilities(_Metric):
    """What is computed from sums over samples of a probability and a target.

    Args:
        from_logits: Whether ``preds`` are logits, as models of ``BCEWithLogitsLoss`` give
            them, and not probabilities.
        sync_on_compute: As of ``AUC``.
        process_group: As of ``AUC``.
    """

    def __init__(
        self,
        *,
        from_logits: bool = False,
        sync_on_compute: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(sync_on_compute, process_group)
        self.from_logits = from_logits
        self.reset()

    def reset(self) -> None:
        """Forget every sample."""
        self._sums: torch.Tensor | None = None  # f64 [6], as ``_Sums`` names them

    def update(self, preds: Values, target: Values) -> None:
        """Count the samples of a batch.

        Args:
            preds: Probabilities, or logits, of any shape, on any device.
            target: As many, above 0.5 for the positive ones.

        Raises:
            DataError: If the numbers of elements differ.
        """
        scores, targets = _flat(preds), _flat(target)
        _check_lengths(preds=scores, target=targets)
        positive, wide = (targets > 0.5).to(scores.device), scores.double()
        if self.from_logits:
            # log(1 + e^-x) of a positive one, log(1 + e^x) of others: no digit is lost.
            losses = torch.logaddexp(torch.where(positive, -wide, wide), torch.zeros_like(wide))
            wide, outside = wide.sigmoid(), torch.zeros_like(positive)
        else:
            # A certain prediction that is wrong would cost infinitely much.
            least = torch.finfo(scores.dtype if scores.is_floating_point() else wide.dtype).eps
            inside = wide.clamp(least, 1 - least)
            losses = -torch.where(positive, inside, 1 - inside).log()
            outside = (wide < 0) | (wide > 1)
        columns = torch.ones_like(wide), positive, wide, losses, wide.isnan(), outside
        # Counted without waiting for the device; ``compute`` says what was wrong.
        sums = torch.stack([column.sum(dtype=torch.float64) for column in columns])
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums

    def merge_state(self, other: Self) -> None:
        """Add the samples of another one, which stays as it is."""
        if other._sums is not None:
            mine = torch.zeros_like(other._sums) if self._sums is None else self._sums
            self._sums = mine + other._sums.to(mine)

    def compute(self) -> torch.Tensor:
        """Return the value over all samples so far, of all ranks: f64 [], NaN without any.

        Raises:
            DataError: If a prediction was NaN, or no probability where one is expected.
        """
        mine = np.zeros(6) if self._sums is None else self._sums.cpu().numpy()
        if self._is_shared():
            mine = self._gathered(mine).reshape(-1, len(mine)).sum(0)
        sums = _Sums(*mine.tolist())
        _check_no_nan(int(sums.num_nan))
        if sums.num_outside:
            raise DataError(
                f"preds: expected probabilities in 0..1, got {int(sums.num_outside)} others; "
                f"of logits write {type(self).__name__}(from_logits=True)"
            )
        return torch.tensor(self._value(sums), dtype=torch.float64)

    @abstractmethod
    def _value(self, sums: _Sums) -> float:
        """Return the metric."""


class _Sums(NamedTuple):
    """Sums over samples."""

    num: float
    positives: float
    predicted: float  # of probabilities
    loss: float  # of -log(probability of the target), in nats
    num_nan: float
    num_outside: float  # no probabilities


class LogLoss(_Probabilities):
    """Mean of -log(probability of the target), in nats: the binary cross entropy.

    Probabilities of 0 and 1 are moved inside by the smallest difference that their dtype has
    at 1, as scikit-learn does; logits are taken as they are.

    Example:
        >>> metric = LogLoss()
        >>> metric.update([0.5, 0.5], [0, 1])
        >>> round(float(metric.compute()), 4)
        0.6931
    """

    def _value(self, sums: _Sums) -> float:
        return sums.loss / sums.num if sums.num else float("nan")


class NormalizedEntropy(_Probabilities):
    """The log loss, divided by that of predicting the mean of the targets for each sample.

    1 is as good as knowing nothing but the rate of clicks, 0 is perfect; unlike the log loss
    it can be compared between data of different rates. NaN without both targets. The formula is
    that of He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook" (2014).

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update([0.25, 0.25, 0.25, 0.25], [0, 0, 0, 1])
        >>> float(metric.compute())
        1.0
    """

    def _value(self, sums: _Sums) -> float:
        if not 0 < sums.positives < sums.num:
            return float("nan")
        rate = sums.positives / sums.num
        entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
        return float(sums.loss / sums.num / entropy)


class Calibration(_Probabilities):
    """The sum of the predicted probabilities, divided by the number of positive targets.

    1 is calibrated on the whole; above, the model promises more clicks than come. NaN without
    a positive target.

    Example:
        >>> metric = Calibration()
        >>> metric.update([0.5, 0.25, 0.25, 0.5], [0, 0, 0, 1])
        >>> float(metric.compute())
        1.5
    """

    def _value(self, sums: _Sums) -> float:
        return sums.predicted / sums.positives if sums.positives else float("nan")


class _ByGroup(_Metric):
    """The mean of a value of each group, of all of them up to ``max_samples`` kept."""

    _target_dtype: type[np.generic] = np.bool_

    def __init__(self, max_samples: int, sync_on_compute: bool, process_group: Any) -> None:
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
        # Of groups that were whole in their batch: how many, and the sum of their values.
        self._whole = np.zeros(2)

    @property
    def fraction(self) -> float:
        """The share of groups that this rank still keeps; 1 is all of them."""
        return self._below / _HASHES

    def compute(self) -> torch.Tensor:
        """Return the mean over all groups so far, of all ranks: f64 [], NaN without any."""
        return torch.tensor(self._estimate()[0], dtype=torch.float64)

    def standard_error(self) -> float:
        """Return the standard error of ``compute``: 0 until groups are sampled.

        All ranks call it.
        """
        return self._estimate()[1]

    def merge_state(self, other: Self) -> None:
        """Add the samples of another one, which stays as it is."""
        self._below = min(self._below, other._below)
        self._whole = self._whole + other._whole
        for piece in other._pieces:
            self._keep(piece)

    @abstractmethod
    def _values(self, samples: _Samples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the weights and values of the groups that have one, f64 [groups] each."""

    def _add(self, preds: torch.Tensor, targets: torch.Tensor, groups: Values) -> None:
        """Keep the samples of a batch, checked."""
        scores, of = _flat(preds), _flat(groups)
        _check_lengths(preds=scores, target=targets, groups=of)
        _check_no_nan(int(torch.isnan(scores).sum()))
        if of.is_floating_point():
            raise DataError(f"groups: expected integers, got {of.dtype}")
        self._keep(
            _Samples(
                of.to(torch.int64).cpu().numpy().view(np.uint64),
                scores.double().cpu().numpy(),
                targets.cpu().numpy().astype(self._target_dtype, copy=False),
            )
        )

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
        samples, below, whole = _joined(self._pieces), self._below, self._whole
        if self._is_shared():
            # In units of 2**-32: a threshold is 2**64 divided by a power of two.
            below = int(self._gathered(np.array([below >> 32])).min()) << 32
            samples = samples.of_groups_below(below)
            samples = _Samples(
                self._gathered(samples.groups.view(np.int64)).view(np.uint64),
                self._gathered(samples.scores),
                self._gathered(samples.targets.astype(self._target_dtype, copy=False)),
            )
            whole = self._gathered(whole).reshape(-1, 2).sum(0)
        weights, values = self._values(samples)
        fraction = below / _HASHES  # each group kept stands for 1 / fraction of them
        num_whole, sum_whole = whole * fraction
        total = float(weights.sum()) + num_whole
        if not total:
            return float("nan"), 0.0
        mean = (float((weights * values).sum()) + sum_whole) / total
        spread = float(((weights * (values - mean)) ** 2).sum()) * (1 - fraction)
        return float(mean), float(
            np.sqrt(spread * len(values) / max(len(values) - 1, 1)) / total
        )


class GAUC(_ByGroup):
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
        super().__init__(max_samples, sync_on_compute, process_group)

    def update(self, preds: Values, target: Values, groups: Values) -> None:
        """Keep the samples of a batch.

        Args:
            preds: Scores of any shape; only their order within a group matters.
            target: As many, above 0.5 for the positive ones.
            groups: As many integers, one a sample.

        Raises:
            DataError: If the numbers of elements differ, or a score is NaN.
        """
        self._add(torch.as_tensor(preds), _flat(target) > 0.5, groups)

    def _values(self, samples: _Samples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return _group_aucs(samples)


class _Ranked(_ByGroup):
    """The gain of the ``k`` best candidates of each group, as a share of what it could be.

    Args:
        k: Candidates of a group that count, the best by score.
        max_samples: Samples kept of groups that are given by ``groups``, as of ``GAUC``.
        sync_on_compute: As of ``AUC``.
        process_group: As of ``AUC``.
    """

    def __init__(
        self,
        k: int | None,
        max_samples: int = 1 << 22,
        *,
        sync_on_compute: bool = True,
        process_group: Any = None,
    ) -> None:
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise ConfigError(f"k must be a whole number, at least 1, got {k!r}")
        super().__init__(max_samples, sync_on_compute, process_group)
        self.k = k

    def update(self, preds: Values, target: Values, groups: Values | None = None) -> None:
        """Count the candidates of a batch.

        Args:
            preds: Scores; only their order within a group matters. Without ``groups`` of
                [queries, candidates]: each row is a group, of which only a sum is kept.
            target: As many: what each candidate is worth.
            groups: As many integers: the user, session or query of each candidate. The
                candidates of a group may come in several batches, and to several ranks.

        Raises:
            DataError: If the numbers of elements differ, a score is NaN, or a target is none.
        """
        scores = torch.as_tensor(preds).detach()
        gains = self._gains(torch.as_tensor(target).detach())
        if groups is not None:
            self._add(scores, gains.reshape(-1), groups)
            return
        if scores.dim() != 2 or scores.shape != gains.shape:
            raise DataError(
                "expected preds and target of [queries, candidates] each, or groups=, got "
                f"{list(scores.shape)} and {list(gains.shape)}"
            )
        _check_no_nan(int(torch.isnan(scores).sum()))
        num = scores.shape[1] if self.k is None else min(self.k, scores.shape[1])
        most = self._most_of_rows(gains, num).cpu().numpy()
        has_any = most > 0
        values = self._of_rows(scores, gains.to(scores.device), num)[has_any] / most[has_any]
        self._whole = self._whole + np.array([len(values), values.sum()])

    def merge_state(self, other: Self) -> None:
        """Add the samples of another one, which stays as it is.

        Raises:
            ConfigError: If it has another k.
        """
        if other.k != self.k:
            name = type(self).__name__
            raise ConfigError(f"k: expected another {name} of {self.k}, got {other.k}")
        super().merge_state(other)

    @abstractmethod
    def _gains(self, target: torch.Tensor) -> torch.Tensor:
        """Return what each candidate is worth, checked."""

    @abstractmethod
    def _discounts(self, num: int) -> torch.Tensor:
        """Return what a gain counts at each of the first places: f64 [num]."""

    @abstractmethod
    def _most_of_rows(self, gains: torch.Tensor, num: int) -> torch.Tensor:
        """Return the discounted gain that each row could have: f64 [queries]."""

    @abstractmethod
    def _most(self, samples: _Samples, num: int) -> NDArray[np.float64]:
        """Return the same of each group, in ascending order."""

    def _of_rows(
        self, scores: torch.Tensor, gains: torch.Tensor, num: int
    ) -> NDArray[np.float64]:
        """Return the discounted gain of each row's best: f64 [queries]."""
        top, places = scores.topk(num, dim=1)
        picked = gains.double().gather(1, places)
        if 0 < num < scores.shape[1]:
            # Which of those that are equal at the end ``topk`` has picked is chance.
            is_last = scores == top[:, -1:]
            mean = (gains.double() * is_last).sum(1, keepdim=True) / is_last.sum(
                1, keepdim=True
            )
            picked = torch.where(top == top[:, -1:], mean, picked)
        rows = np.repeat(np.arange(len(scores), dtype=np.uint64), num)
        flat = (_flat(column.double()).cpu().numpy() for column in (top, picked))
        found = _discounted(_Samples(rows, *flat), self._discounts(num).numpy())
        return found if num else np.zeros(len(scores))

    def _values(self, samples: _Samples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        largest = int(np.unique(samples.groups, return_counts=True)[1].max(initial=0))
        num = largest if self.k is None else min(self.k, largest)
        found, most = (
            _discounted(samples, self._discounts(num).numpy()),
            self._most(samples, num),
        )
        has_any = most > 0
        return np.ones(int(has_any.sum())), found[has_any] / most[has_any]


class RecallAtK(_Ranked):
    """Mean share of the relevant candidates of a group that are among its ``k`` best.

    With one relevant candidate each it is the hit rate. Groups without any are left out.

    Raises:
        ConfigError: If ``k`` or ``max_samples`` is below 1.

    Example:
        >>> metric = RecallAtK(2)
        >>> metric.update([[0.9, 0.5, 0.1], [0.1, 0.5, 0.9]], [[1, 0, 1], [0, 0, 1]])
        >>> float(metric.compute())
        0.75
    """

    def __init__(
        self,
        k: int,
        max_samples: int = 1 << 22,
        *,
        sync_on_compute: bool = True,
        process_group: Any = None,
    ) -> None:
        if k is None:
            raise ConfigError("k must be a whole number, at least 1, got None")
        super().__init__(
            k, max_samples, sync_on_compute=sync_on_compute, process_group=process_group
        )

    def _gains(self, target: torch.Tensor) -> torch.Tensor:
        return target > 0.5

    def _discounts(self, num: int) -> torch.Tensor:
        return torch.ones(num, dtype=torch.float64)

    def _most_of_rows(self, gains: torch.Tensor, num: int) -> torch.Tensor:
        return gains.double().sum(1)

    def _most(self, samples: _Samples, num: int) -> NDArray[np.float64]:
        places = np.unique(samples.groups, return_inverse=True)[1]
        return np.bincount(places, samples.targets).astype(np.float64)


class NDCG(_Ranked):
    """Normalised discounted cumulative gain: a candidate's worth counts less further down.

    At place 1, 2, ... of a group it counts 1 / log2(place + 1), up to place ``k`` (None: all),
    and the sum is divided by that of the best order (Jarvelin and Kekalainen, 2002). Targets
    are gains as they are, as in scikit-learn; give 2**grade - 1 for the other usual form.
    Groups in which nothing is worth anything are left out.

    Raises:
        ConfigError: If ``k`` or ``max_samples`` is below 1.

    Example:
        >>> metric = NDCG()
        >>> metric.update([0.9, 0.5, 0.1, 0.2, 0.3], [0, 1, 0, 0, 2], groups=[7, 7, 7, 8, 8])
        >>> round(float(metric.compute()), 4)
        0.8155
    """

    _target_dtype = np.float64  # 24 bytes a sample

    def __init__(
        self,
        k: int | None = None,
        max_samples: int = 1 << 22,
        *,
        sync_on_compute: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            k, max_samples, sync_on_compute=sync_on_compute, process_group=process_group
        )

    def _gains(self, target: torch.Tensor) -> torch.Tensor:
        gains = target.double()
        num_wrong = int((~((gains >= 0) & gains.isfinite())).sum())
        if num_wrong:
            raise DataError(
                f"target: expected finite numbers from 0 on, got {num_wrong} others"
            )
        return gains

    def _discounts(self, num: int) -> torch.Tensor:
        return 1 / torch.log2(torch.arange(2, num + 2, dtype=torch.float64))

    def _most_of_rows(self, gains: torch.Tensor, num: int) -> torch.Tensor:
        return gains.topk(num, dim=1).values @ self._discounts(num).to(gains.device)

    def _most(self, samples: _Samples, num: int) -> NDArray[np.float64]:
        by_gain = samples._replace(scores=samples.targets)
        return _discounted(by_gain, self._discounts(num).numpy())


class _Samples(NamedTuple):
    """Samples of groups, parallel."""

    groups: NDArray[np.uint64]
    scores: NDArray[np.float64]
    targets: NDArray[Any]  # whether positive, or a gain

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
    order, first_of_group, first_of_score, group_of_score = _stretches(
        samples.groups, samples.scores
    )
    positive = samples.targets[order].astype(np.float64)
    negative = 1 - positive
    negatives = np.add.reduceat(negative, first_of_score)
    positives = np.add.reduceat(positive, first_of_score)
    num = np.diff(np.append(first_of_group, len(order))).astype(np.float64)
    num_negative = np.add.reduceat(negative, first_of_group)
    num_positive = num - num_negative
    before_group = np.cumsum(num_negative) - num_negative
    below = np.cumsum(negatives) - negatives - before_group[group_of_score]
    won = np.bincount(group_of_score, positives * (below + negatives / 2), len(num))
    both = (num_negative > 0) & (num_positive > 0)
    return num[both], won[both] / num_positive[both] / num_negative[both]


def _discounted(samples: _Samples, discounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each group's gains by its best scores, discounted: f64 [groups].

    Equal scores share what their places count, as over all orders of them in the mean.
    """
    if not len(samples.scores):
        return np.empty(0)
    order, first_of_group, first_of_score, group_of_score = _stretches(
        samples.groups, -samples.scores
    )
    lengths = np.diff(np.append(first_of_group, len(order)))
    places = np.arange(len(order)) - np.repeat(first_of_group, lengths)
    counts = np.append(discounts, 0.0)[np.minimum(places, len(discounts))]
    gains = np.add.reduceat(samples.targets[order].astype(np.float64), first_of_score)
    lengths = np.diff(np.append(first_of_score, len(order)))
    shares = gains / lengths * np.add.reduceat(counts, first_of_score)
    return np.bincount(group_of_score, shares, len(first_of_group)).astype(np.float64)


def _stretches(
    groups: NDArray[np.uint64], scores: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Return the order by group and score, and in it where groups and equal scores begin.

    The last array has the number of the group of each stretch of equal scores.
    """
    order = np.lexsort((scores, groups))
    groups, scores = groups[order], scores[order]
    is_new_group = np.append(True, groups[1:] != groups[:-1])
    is_new_score = is_new_group | np.append(True, scores[1:] != scores[:-1])
    first_of_group, first_of_score = np.flatnonzero(is_new_group), np.flatnonzero(is_new_score)
    return order, first_of_group, first_of_score, np.cumsum(is_new_group)[first_of_score] - 1


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
