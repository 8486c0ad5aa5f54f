"""How often ids come, and ids to compare with: what a loss over sampled negatives needs.

A two-tower model is trained to tell the item of a sample from those of other samples. These are
sampled in proportion to their frequency q, so the softmax over them learns log p(item | user) -
log q(item), and popular items rank too low; ``score - log q`` in the loss corrects that.

``FrequencyEstimator`` gives log q, ``NegativeSampler`` more negatives. Both are for the code
that makes batches, which in every mode is where ids are. ``docs/how-to/two-tower.md`` has a
program.

The counts that servers keep to choose rows give no log q. That of LFU is a power of two by
chance, is halved as it ages, is lost with the row, and counts batches: an id that is ten times
in each counts as one that is once. That of admission ends when the row is created.
"""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from persia._core.base.hashing import mix64_array
from persia.embedding.data import Label, PersiaBatch
from persia.errors import ConfigError, DataError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

__all__ = ["FrequencyEstimator", "NegativeSampler"]


class FrequencyEstimator:
    """Estimates the share of each id among the samples of a stream, in fixed memory.

    After X. Yi et al., *Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations*, RecSys 2019, section 4: the share of an id is 1 / (mean number of samples
    from one of its occurrences to the next). There intervals are steps, so that no id can come
    more than once in each; here they are samples. An id that comes c times within d samples has
    c intervals of d / c:

        interval += (d / c - interval) * c / (uses + c)     uses = min(uses + c, window)

    So the mean is exact up to ``window`` occurrences and fades from then on. An id has one cell
    in each of ``num_hashes`` tables. Ids that share a cell shorten its interval, so the longest
    of an id's intervals counts. An id that was never seen counts as seen once.

    Not for several threads at a time: use one in each process or dataset that makes batches.

    Args:
        num_cells: Cells in each table, of 20 bytes; at least twice the ids that matter.
        num_hashes: Tables.
        window: Occurrences of an id that its mean covers: fewer follow trends faster, with a
            relative error of about 1 / sqrt(2 * window).
        seed: Of the hashes.

    Attributes:
        num_samples: Ids observed so far.

    Example:
        >>> frequency = FrequencyEstimator()
        >>> for _ in range(100):
        ...     log_q = frequency.observe([7, 7, 7, 8])
        >>> np.exp(log_q).round(2).tolist()
        [0.75, 0.75, 0.75, 0.25]
    """

    def __init__(
        self, num_cells: int = 1 << 20, num_hashes: int = 2, window: int = 1000, seed: int = 0
    ) -> None:
        _at_least_one(num_cells=num_cells, num_hashes=num_hashes, window=window)
        self.window = window
        self.num_samples = 0
        first = mix64_array(np.array([seed % 2**64], np.uint64))
        self._keys = mix64_array(np.arange(num_hashes, dtype=np.uint64) + first[0])
        shape = num_hashes, num_cells
        # Zeros cost memory only where they are written to.
        self._last = np.zeros(shape, np.int64)  # samples observed when the cell was last used
        self._interval = np.zeros(shape, np.float64)
        self._uses = np.zeros(shape, np.int32)

    def observe(self, ids: ArrayLike) -> NDArray[np.float32]:
        """Count the ids of a batch, one of each sample, and return their log q.

        Args:
            ids: Integers [B]; signed ones count by their bits.

        Returns:
            The natural logarithm of each id's share, f32 [B].

        Raises:
            DataTypeError: If they are not integers.
        """
        checked = _ids("FrequencyEstimator", ids)
        self.num_samples += len(checked)
        for table, cells in enumerate(self._cells(checked)):
            used, counts = np.unique(cells, return_counts=True)
            uses = self._uses[table, used]
            gaps = (self.num_samples - self._last[table, used]) / counts
            interval = self._interval[table, used]
            interval += (gaps - interval) * counts / (uses + counts)
            self._interval[table, used] = interval
            self._uses[table, used] = np.minimum(uses + counts, self.window)
            self._last[table, used] = self.num_samples
        return self.log_q(checked)

    def log_q(self, ids: ArrayLike) -> NDArray[np.float32]:
        """Return log q as ``observe`` does, and count nothing."""
        checked = _ids("FrequencyEstimator", ids)
        interval = np.zeros(len(checked))
        for table, cells in enumerate(self._cells(checked)):
            interval = np.maximum(interval, self._interval[table, cells])
            interval[self._uses[table, cells] == 0] = max(self.num_samples, 1)
        return (-np.log(interval)).astype(np.float32)

    def attach(self, batch: PersiaBatch, feature: str, name: str = "log_q") -> PersiaBatch:
        """Return the batch with one more label, the log q f32 [B] of a feature's ids.

        A batch with ``requires_grad=False`` is not counted. The label reaches the loss as
        ``labels["log_q"]`` if the batch's other labels have names too.

        Args:
            batch: With one id of the feature in each sample.
            feature: The feature's name.
            name: The label's name.

        Raises:
            DataError: If the batch has not that feature, or a sample not one id of it.
        """
        names = [each.name for each in batch.features]
        if feature not in names:
            raise DataError(
                f"feature {feature!r}: expected one of the batch's, got {', '.join(names)}"
            )
        found = batch.features[names.index(feature)]
        if found.offsets is not None and (found.lengths() != 1).any():
            sample = int(np.argmax(found.lengths() != 1))
            raise DataError(
                f"feature {feature!r}: expected one id in each sample to attach log q, got "
                f"{found.lengths()[sample]} in sample {sample}"
            )
        ids = found.distinct[found.inverse]
        log_q = self.observe(ids) if batch.requires_grad else self.log_q(ids)
        return PersiaBatch(
            batch.id_type_features,  # type: ignore[arg-type]  # as a batch takes them back
            batch.non_id_type_features,  # type: ignore[arg-type]
            [*batch.labels, Label(log_q, name)],
            batch.batch_size,
            batch.requires_grad,
            batch.meta,
        )

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return what it holds as arrays, to be kept by ``np.savez(path, **state)``."""
        return {
            "num_samples": np.array(self.num_samples),
            "keys": self._keys.copy(),
            "last": self._last.copy(),
            "interval": self._interval.copy(),
            "uses": self._uses.copy(),
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take what ``state_dict`` of an estimator with the same arguments has returned.

        Raises:
            ConfigError: If it is of another size or seed, or is no such state.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ConfigError(
                f"FrequencyEstimator: expected a state with {', '.join(own)}; got "
                f"{', '.join(state) or 'none'}"
            )
        shape = np.shape(state["last"])
        if shape != self._last.shape or not np.array_equal(state["keys"], self._keys):
            raise ConfigError(
                "FrequencyEstimator: expected the state of one with the same num_hashes, "
                f"num_cells and seed, {self._last.shape}; got {shape}, or another seed"
            )
        self.num_samples = int(state["num_samples"])
        self._last = np.array(state["last"], np.int64)
        self._interval = np.array(state["interval"], np.float64)
        self._uses = np.array(state["uses"], np.int32)

    def _cells(self, ids: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
        """Return the cells of ids in each table."""
        num_cells = np.uint64(self._last.shape[1])
        return [mix64_array(ids ^ key) % num_cells for key in self._keys]


class NegativeSampler:
    """Draws ids from a catalog, with replacement, and says how probable each was.

    Args:
        candidates: The ids, integers [N]; or N for the ids 0 to N - 1.
        weights: Of each candidate, finite numbers [N] that are not negative. None is uniform;
            ``"log_uniform"`` is for candidates in order of falling frequency: the one at place
            k has a probability of log((k + 2) / (k + 1)) / log(N + 1).
        seed: Of the draws: an integer, or a ``numpy.random.Generator`` of your own.

    Raises:
        ConfigError: If there is no candidate, or weights do not fit.
        DataTypeError: If candidates are not integers.

    Example:
        >>> ids, log_q = NegativeSampler(1000, "log_uniform").sample(64)
        >>> ids.dtype, log_q.dtype, len(ids)
        (dtype('uint64'), dtype('float32'), 64)
    """

    def __init__(
        self,
        candidates: int | ArrayLike,
        weights: str | ArrayLike | None = None,
        seed: int | np.random.Generator = 0,
    ) -> None:
        if isinstance(candidates, Integral):
            candidates = np.arange(candidates, dtype=np.uint64)
        self._ids = _ids("NegativeSampler", candidates).copy()
        self._rng = np.random.default_rng(seed)
        if not len(self._ids):
            raise ConfigError("NegativeSampler: expected at least one candidate, got none")
        self.reweigh(weights)

    def reweigh(self, weights: str | ArrayLike | None) -> None:
        """Draw with other weights from now on, such as ``np.exp(frequency.log_q(items))``."""
        num = len(self._ids)
        if weights is None:
            weights = np.ones(num)
        elif isinstance(weights, str):
            if weights != "log_uniform":
                raise ConfigError(
                    f"NegativeSampler: expected weights, or 'log_uniform', got {weights!r}"
                )
            weights = np.log1p(1 / np.arange(1, num + 1))
        checked = np.asarray(weights, np.float64)
        is_usable = checked.shape == (num,) and (checked >= 0).all() and checked.sum() > 0
        if not is_usable or not np.isfinite(checked.sum()):
            raise ConfigError(
                f"NegativeSampler: expected {num} weights, one of each candidate, finite, not "
                f"negative and not all 0; got shape {checked.shape}"
            )
        share = checked / checked.sum()
        # Below the last bound lies every draw of [0, 1), whatever was rounded.
        self._bounds = np.cumsum(share)
        self._bounds /= self._bounds[-1]
        with np.errstate(divide="ignore"):  # of a candidate that is never drawn
            self._log_q = np.log(share).astype(np.float32)

    def sample(self, num: int) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return ids u64 [num], and log q of each, f32 [num]."""
        # The first bound above the draw: a candidate of weight 0 has none of its own.
        places = np.searchsorted(self._bounds, self._rng.random(num), side="right")
        return self._ids[places], self._log_q[places]


def _ids(what: str, given: ArrayLike) -> NDArray[np.uint64]:
    ids = np.asarray(given)
    if not ids.size:
        return np.empty(0, np.uint64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise DataTypeError(
            f"{what}: expected ids as integers [n], got {ids.dtype} {list(ids.shape)}"
        )
    is_signed = ids.dtype.kind == "i"
    return ids.astype(np.int64 if is_signed else np.uint64).view(np.uint64)


def _at_least_one(**numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Integral) or number < 1:
            raise ConfigError(
                f"FrequencyEstimator: {name} must be an integer of at least 1, got {number!r}"
            )
