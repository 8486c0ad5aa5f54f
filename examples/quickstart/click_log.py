"""A click log made from a seed, with the best AUC that any model can reach on it.

What real click data does to an embedding store, this log does too:

* features of very different size, from ten ids to over a million, drawn from Zipf's law, so
  that a few ids make up most of the log and most ids are met once;
* ids that come and go: a rank of popularity keeps its place, the id that holds it changes;
* samples with several ids, with none, and a sequence whose order of places matters;
* ids without any structure: 48 or 64 bits of a hash, as a log pipeline writes them.

The truth is a logistic model that no column shows. Every id has an effect, drawn from the id
itself by hashing; a candidate that was seen before, or whose category was, is clicked more
often; a few dense numbers matter a little. A click is then a coin with that probability, so
the AUC of the true probability is the best that can be had: the coin cannot be learned.

    time  0 ------------------------------------------ 0.9 ---------- 1
          trained on, in this order, once               held out
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint64]
Floats = NDArray[np.float32]
Ranks = NDArray[np.int64]

HELD_OUT = 0.1  # share of the log, its last part
SEQUENCE_LENGTH = 8  # places of ``recent_categories`` the truth (and the model) looks at


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Who can appear: ``size`` ranks of popularity, each held by one id at a time.

    Attributes:
        size: Number of ranks.
        exponent: Of Zipf's law; a higher one gives popular ids more of the log.
        turnover: Expected changes of a rank's holder over the whole log. The number of ids is
            therefore about ``size * (1 + turnover)``.
        head: Rank around which effects begin to fade: an id that comes only once cannot
            be learned, so little of the truth hangs on it.
        id_bits: Width of the ids.
    """

    size: int
    exponent: float
    turnover: float = 0.0
    head: int = 200
    id_bits: int = 48


VOCABULARIES = {
    "user": Vocabulary(1_500_000, 1.0, turnover=0.5, head=100),
    "item": Vocabulary(200_000, 1.15, turnover=0.3, head=50),
    "category": Vocabulary(1_000, 1.05, head=200),
    "publisher": Vocabulary(10_000, 1.1, turnover=0.1, head=200),
    "word": Vocabulary(100_000, 1.15, head=100),
    "url": Vocabulary(1_000_000, 1.15, turnover=0.3, head=100, id_bits=64),
    "device": Vocabulary(100, 1.0, head=200),
    "country": Vocabulary(10, 0.8, head=200),
}

# Slots named otherwise than their vocabulary.
SLOTS = {"item": "candidate", "category": "candidate_category"}

# Standard deviations of the effects, in units of the logit.
EFFECTS = {
    "user": 0.5,
    "item": 0.9,
    "viewed_items": 0.4,
    "category": 1.0,
    "publisher": 1.0,
    "query_words": 0.5,
    "url": 0.6,
    "device": 0.9,
    "country": 0.6,
}
INTERCEPT = -1.6
SEEN_ITEM = 0.25  # the candidate is among the viewed items
SEEN_CATEGORY = 0.6  # times the logarithm of 1 + how often it is among the recent ones
DENSE_EFFECTS = (0.6, -0.5, 0.3, 0.3)  # age, price, sine and cosine of the hour


@dataclass(frozen=True, slots=True)
class Ragged:
    """Ids of many samples: sample ``i`` has ``values[offsets[i]:offsets[i + 1]]``."""

    values: Ids
    offsets: NDArray[np.int64]

    def rows(self, start: int, stop: int) -> Ragged:
        """Return samples ``start`` to ``stop`` as views, with offsets from 0."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])


@dataclass(frozen=True, slots=True)
class ClickLog:
    """The log in the order of time.

    Attributes:
        single: Features with one id a sample, by name: u64 [n].
        ragged: Features with any number of ids a sample, by name.
        dense: f32 [n, 4].
        clicks: f32 [n, 1], 0 or 1.
        probability: f64 [n], the truth: no model sees it.
        num_train: Samples before this one are trained on, the others held out.
    """

    single: dict[str, Ids]
    ragged: dict[str, Ragged]
    dense: Floats
    clicks: Floats
    probability: NDArray[np.float64]
    num_train: int

    def __len__(self) -> int:
        return len(self.clicks)

    def best_auc(self) -> float:
        """Return the AUC of the true probability on the held-out samples."""
        held_out = slice(self.num_train, None)
        return auc(self.clicks[held_out, 0], self.probability[held_out])


def generate(num_samples: int, seed: int) -> ClickLog:
    """Draw a click log; equal arguments give equal logs.

    Args:
        num_samples: Length of the log, held-out part included.
        seed: Draws the log and the truth behind it.
    """
    rng = np.random.default_rng(seed)
    time = np.arange(num_samples) / num_samples
    ranks = {
        name: _zipf_ranks(rng, vocabulary, num_samples)
        for name, vocabulary in VOCABULARIES.items()
        if name != "word"
    }
    ids = {name: _ids(name, rank, time, seed) for name, rank in ranks.items()}

    viewed = _offsets(_basket_lengths(rng, num_samples))
    viewed_time = np.repeat(time, np.diff(viewed))
    viewed_ranks = _zipf_ranks(rng, VOCABULARIES["item"], int(viewed[-1]))
    viewed_ids = _ids("item", viewed_ranks, viewed_time, seed)
    seen = _plant(rng, 0.2, viewed, np.diff(viewed))
    viewed_ranks[seen.places], viewed_ids[seen.places] = (
        ranks["item"][seen.samples],
        ids["item"][seen.samples],
    )

    recent = _offsets(rng.integers(0, 13, num_samples))
    recent_ranks = _zipf_ranks(rng, VOCABULARIES["category"], int(recent[-1]))
    recent_ids = _ids("category", recent_ranks, np.repeat(time, np.diff(recent)), seed)
    seen = _plant(rng, 0.4, recent, np.minimum(np.diff(recent), SEQUENCE_LENGTH))
    recent_ids[seen.places] = ids["category"][seen.samples]

    words = _offsets(_basket_lengths(rng, num_samples))
    word_ranks = _zipf_ranks(rng, VOCABULARIES["word"], int(words[-1]))
    word_ids = _ids("word", word_ranks, np.repeat(time, np.diff(words)), seed)

    hour = rng.uniform(0, 2 * np.pi, num_samples)
    dense = np.stack(
        [
            rng.normal(size=num_samples),
            rng.normal(size=num_samples),
            np.sin(hour),
            np.cos(hour),
        ],
        axis=1,
    ).astype(np.float32)

    logit = INTERCEPT + dense @ np.array(DENSE_EFFECTS)
    for name, rank in ranks.items():
        logit += _effects(name, name, ids[name], rank, seed)
    logit += _mean_effect(
        _effects("viewed_items", "item", viewed_ids, viewed_ranks, seed), viewed
    )
    logit += _mean_effect(_effects("query_words", "word", word_ids, word_ranks, seed), words)
    logit += SEEN_ITEM * (_matches(viewed_ids, viewed, ids["item"], None) > 0)
    logit += SEEN_CATEGORY * np.log1p(
        _matches(recent_ids, recent, ids["category"], SEQUENCE_LENGTH)
    )

    probability = 1 / (1 + np.exp(-logit))
    clicks = (rng.random(num_samples) < probability).astype(np.float32)
    return ClickLog(
        single={SLOTS.get(name, name): values for name, values in ids.items()},
        ragged={
            "viewed_items": Ragged(viewed_ids, viewed),
            "recent_categories": Ragged(recent_ids, recent),
            "query_words": Ragged(word_ids, words),
        },
        dense=dense,
        clicks=clicks[:, None],
        probability=probability,
        num_train=num_samples - int(num_samples * HELD_OUT),
    )


def auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """Return the area under the ROC curve.

    It is the share of (positive, negative) pairs in which the positive scores higher, an
    equal pair counting half, and so follows from the ranks of the positives alone.

    Args:
        labels: [n], above 0.5 is positive.
        scores: [n], any monotone score.
    """
    positive = np.asarray(labels) > 0.5
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if num_positive == 0 or num_negative == 0:
        raise ValueError(
            f"AUC needs both classes, got {num_positive} positive and {num_negative} negative"
        )
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2  # ties share the mean of their ranks
    rank_sum = mean_rank[group][positive].sum()
    return float(
        (rank_sum - num_positive * (num_positive + 1) / 2) / num_positive / num_negative
    )


# --- drawing ids ------------------------------------------------------------------------------


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out, one to one."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(*words: int | str) -> np.uint64:
    """Fold names and numbers into one 64-bit key."""
    key = np.zeros(1, np.uint64)
    for word in words:
        number = word if isinstance(word, int) else int.from_bytes(word.encode(), "little")
        while True:
            key = _mix(key ^ np.uint64(number & (2**64 - 1)))
            number >>= 64
            if not number:
                break
    return key[0]


def _uniform(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Turn hashes into uniform numbers in (0, 1)."""
    return ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53


def _zipf_ranks(rng: np.random.Generator, vocabulary: Vocabulary, count: int) -> Ranks:
    """Draw ranks 0 .. size - 1 with probability close to ``(rank + 1) ** -exponent``.

    Inverts the distribution function of the continuous law on [1, size + 1), which takes no
    table, whatever the size.
    """
    power = 1 - vocabulary.exponent
    span = vocabulary.size + 1.0
    u = rng.random(count)
    x = span**u if power == 0 else (1 + u * (span**power - 1)) ** (1 / power)
    return np.minimum(x.astype(np.int64), vocabulary.size) - 1


def _ids(name: str, ranks: Ranks, time: NDArray[np.float64], seed: int) -> Ids:
    """Return who holds each rank at each time (0 to 1): the id of holder number 0, 1, ..."""
    vocabulary = VOCABULARIES[name]
    key = _key("id", name, seed)
    rank = ranks.astype(np.uint64)
    phase = _uniform(_mix(rank ^ key))
    holder = (phase + time * vocabulary.turnover).astype(np.uint64)
    ids = _mix((rank | holder << np.uint64(40)) ^ key)
    return ids >> np.uint64(64 - vocabulary.id_bits)


def _effects(
    effect: str, vocabulary: str, ids: Ids, ranks: Ranks, seed: int
) -> NDArray[np.float64]:
    """Return the effect of each id: normal, drawn from the id, fading towards the tail."""
    hashes = _mix(ids ^ _key("effect", effect, seed))
    radius = np.sqrt(-2 * np.log(_uniform(hashes)))
    normal = radius * np.cos(2 * np.pi * _uniform(_mix(hashes)))
    return EFFECTS[effect] * normal / (1 + ranks / VOCABULARIES[vocabulary].head)


# --- samples with several ids ----------------------------------------------------------------


def _basket_lengths(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draw lengths of mean 5; every tenth sample is empty."""
    return np.where(rng.random(count) < 0.1, 0, 1 + rng.poisson(4.55, count))


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


@dataclass(frozen=True, slots=True)
class _Planted:
    samples: NDArray[np.int64]
    places: NDArray[np.int64]  # in the feature's values


def _plant(
    rng: np.random.Generator, share: float, offsets: NDArray[np.int64], room: NDArray[np.int64]
) -> _Planted:
    """Choose a place among the first ``room`` of a ``share`` of the samples that have any."""
    chosen = rng.random(len(room)) < share
    place = offsets[:-1] + (rng.random(len(room)) * room).astype(np.int64)
    samples = np.flatnonzero(chosen & (room > 0))
    return _Planted(samples, place[samples])


def _mean_effect(
    effects: NDArray[np.float64], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Sum the effects of each sample and divide by the root of its length."""
    sums = np.concatenate([np.zeros(1), np.cumsum(effects)])
    lengths = np.diff(offsets)
    return (sums[offsets[1:]] - sums[offsets[:-1]]) / np.sqrt(np.maximum(lengths, 1))


def _matches(
    values: Ids, offsets: NDArray[np.int64], wanted: Ids, limit: int | None
) -> NDArray[np.int64]:
    """Count, per sample, its ids equal to ``wanted``, among its first ``limit``."""
    lengths = np.diff(offsets)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    equal = values == wanted[sample]
    if limit is not None:
        equal &= np.arange(len(values)) - offsets[sample] < limit
    return np.bincount(sample[equal], minlength=len(lengths))
