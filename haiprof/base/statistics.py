"""Statistics of the analyses: tests, intervals, trends; each from a named source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Floats, Ints

CONFIDENCE = 0.99
_WINSOR = 0.05  # outliers do not show how far values are correlated
RUN_RATIO = 0.005
"""What two runs of one job differ by at the least (standard deviation of one, as a share of the
mean): memory layout, clocks, placement. `block_mean` takes more where parts of the runs differ by
more. Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, 2013: what varies between
executions must be counted, and a single one cannot show it; Mytkowicz et al. 2009 found layout
alone to move programs by some percent. The number is our own choice."""
BLOCKS = 10


def mean_error(series: Floats) -> Uncertain:
    """Of the mean of a series: as that of so many independent values as tell as much."""
    count = len(series) / _memory(series)
    return Uncertain(parts=((float(series.var(ddof=1)) / count, max(count - 1, 1.0)),))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMean:
    """The mean of one run's series, and how far it may lie from the mean of all such runs."""

    value: float
    error: Uncertain


def block_mean(series: Floats, *, run_ratio: float) -> BlockMean:
    """A mean with its error by the means of ten blocks, whatever the series remembers within them.

    A machine is faster in some seconds than in others, and between two runs as between two parts of
    one: what blocks differ by beyond the straying of single values does not average out, and is
    added as what one run differs by from the next, of which `run_ratio` is the least. The series
    is in order of time, and has four values at least.

    Source: batch means (Law and Kelton, Simulation Modeling and Analysis, 2000, section 9.5); the
    variance component between groups of a one-way random-effects model (Searle, Casella and
    McCulloch, Variance Components, 1992, section 3.5), which Kalibera and Jones 2013 use for the
    levels of a benchmark.
    """
    blocks = np.array_split(series, min(BLOCKS, len(series) // 2))
    freedom = len(blocks) - 1
    between = float(np.var([block.mean() for block in blocks], ddof=1))
    within = float(np.mean([block.var(ddof=1) / len(block) for block in blocks]))
    value = float(series.mean())
    least = (run_ratio * value) ** 2
    beyond = between - within * _memory(series)
    run = (beyond, freedom) if beyond > least else (least, math.inf)
    return BlockMean(value=value, error=Uncertain(parts=((between / len(blocks), freedom), run)))


def without_trend(series: Floats) -> Floats:
    """A series of the same mean without its linear trend, for `block_mean`.

    What strays about the line is widened by the degree of freedom that the slope takes from the
    means of the blocks.
    """
    place = np.arange(len(series)) - (len(series) - 1) / 2
    mean = series.mean()
    rest = series - mean - place * float(place @ series) / max(float(place @ place), 1.0)
    found: Floats = mean + rest * math.sqrt((BLOCKS - 1) / (BLOCKS - 2))
    return found


def _memory(series: Floats) -> float:
    """How many values tell as much as an independent one, by the lag-1 autocorrelation.

    Source: (1 + r) / (1 - r) of an autoregressive process; r corrected for its bias in short
    series by Marriott and Pope 1954.
    """
    low, high = np.quantile(series, [_WINSOR, 1 - _WINSOR])
    values = np.clip(series, low, high)
    centred = values - values.mean()
    power = float(centred @ centred)
    if power == 0:
        return 1.0
    own = float(centred[1:] @ centred[:-1]) / power
    corrected = min(own + (1 + 4 * own) / len(series), 0.99)
    return max((1 + corrected) / (1 - corrected), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertain:
    """Variance of an estimate, in parts that are known more or less well."""

    parts: tuple[tuple[float, float], ...]
    """(variance, degrees of freedom); infinite freedom where the variance is taken as known."""

    @property
    def sd(self) -> float:
        """Standard error."""
        return math.sqrt(sum(variance for variance, _ in self.parts))

    @property
    def freedom(self) -> float:
        """Degrees of freedom in all. Source: Welch 1947, Satterthwaite 1946."""
        bottom = sum(variance**2 / freedom for variance, freedom in self.parts)
        return self.sd**4 / bottom if bottom > 0 else math.inf

    def half_width(self, confidence: float = CONFIDENCE) -> float:
        """Of the two-sided interval, by Student's t."""
        return self.sd * student_quantile((1 + confidence) / 2, self.freedom)

    def p_value(self, estimate: float) -> float:
        """Two-sided p of the true value being 0."""
        if self.sd == 0:
            return 1.0 if estimate == 0 else 0.0
        return student_p_value(estimate / self.sd, self.freedom)


def student_quantile(probability: float, freedom: float) -> float:
    """Of Student's t, within 2 % from 3 degrees of freedom on. Source: Wallace 1959."""
    z = NormalDist().inv_cdf(probability)
    if math.isinf(freedom):
        return z
    scaled = z * (8 * freedom + 3) / (8 * freedom + 1)
    return math.copysign(math.sqrt(freedom * math.expm1(scaled**2 / freedom)), z)


def student_p_value(t: float, freedom: float) -> float:
    """Two-sided. Source: Wallace 1959."""
    z = abs(t)
    if not math.isinf(freedom):
        z = math.sqrt(freedom * math.log1p(t * t / freedom))
        z *= (8 * freedom + 1) / (8 * freedom + 3)
    return math.erfc(z / math.sqrt(2))


LEAST = 4  # measurements on each side; with three and three no p-value is below 0.1
_EXACT_LIMIT = 40  # measurements on both sides together; beyond, the normal approximation


class Comparison(NamedTuple):
    """One against the other."""

    p_value: float | None  # two-sided; None with fewer than `LEAST` measurements on a side
    greater_probability: float
    """That one of the second side is greater than one of the first; a tie counts half."""


def compare_samples(first: Floats, second: Floats) -> Comparison:
    """Tests two samples for a difference, by the two-sided Mann-Whitney U test.

    Source: Mann and Whitney 1947; ties: Lehmann, Nonparametrics, 1975, section 1.4; the
    probability is Vargha and Delaney's A, 2000.
    """
    ranks = _double_ranks(np.concatenate([first, second]))
    count, both = len(second), len(ranks)
    observed = int(ranks[len(first) :].sum())
    pairs = len(first) * count
    greater = (observed / 2 - count * (count + 1) / 2) / pairs
    if min(len(first), count) < LEAST:
        return Comparison(None, greater)
    off = abs(observed - count * (both + 1))  # of doubled ranks the expected sum
    if both > _EXACT_LIMIT:
        return Comparison(_normal_p(ranks, count, off), greater)
    sums, ways = _distribution(tuple(np.sort(ranks).tolist()), count)
    extreme = ways[np.abs(sums - count * (both + 1)) >= off].sum()
    return Comparison(float(extreme / ways.sum()), greater)


def adjust_p_values(p_values: list[float | None]) -> list[float | None]:
    """p-values of many questions asked at once, so that a share of false finds is bounded."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    found: list[float | None] = [None] * len(p_values)
    least = 1.0
    for rank in range(len(known), 0, -1):
        p, place = known[rank - 1]
        least = min(least, p * len(known) / rank)
        found[place] = least
    return found


def _double_ranks(values: Floats) -> Ints:
    """Twice the rank of each, ties in the middle: whole numbers."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: Ints = (2 * (np.cumsum(counts) - counts) + counts + 1)[place]
    return found


@lru_cache(maxsize=1024)
def _distribution(ranks: tuple[int, ...], count: int) -> tuple[Floats, Floats]:
    """How many choices of so many of the ranks have each sum."""
    ways = np.zeros((count + 1, sum(ranks) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    return np.arange(ways.shape[1], dtype=np.float64), ways[count]


def _normal_p(ranks: Ints, count: int, off: int) -> float:
    """By the normal approximation; `off` is the doubled rank sum's distance from its mean."""
    both = len(ranks)
    _, ties = np.unique(ranks, return_counts=True)
    spread = both + 1 - ((ties**3 - ties).sum() / (both * (both - 1)))
    variance = float(count * (both - count) * spread / 12)  # of the sum of `count` of the ranks
    return math.erfc(max(off / 2 - 0.5, 0.0) / math.sqrt(2 * variance)) if variance > 0 else 1.0


def growth_p_value(values: Floats) -> float:
    """One-sided p of a series not growing.

    Source:
        Mann, Nonparametric Tests Against Trend, 1945; Kendall, Rank Correlation Methods, 1975.
    """
    n = len(values)
    score = float(np.triu(np.sign(values[None, :] - values[:, None]), 1).sum())
    _, ties = np.unique(values, return_counts=True)
    tied = float((ties * (ties - 1) * (2 * ties + 5)).sum())
    variance = (n * (n - 1) * (2 * n + 5) - tied) / 18
    if variance <= 0:
        return 1.0
    z = (score - 1) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


class Excess(NamedTuple):
    """By how much some values of a series are larger than the others, on the mean."""

    mean: float
    low: float
    high: float  # where that lies with 95 % certainty


def excess(series: Floats, chosen: npt.NDArray[np.bool_]) -> Excess | None:
    """Compares the chosen values of a series, some stretches of it, with those around each.

    A stretch and the values up to halfway to the next ones are one difference: so what drifts, and
    neighbours that are alike, count as they should. The interval is by how unlike the differences
    are (Student 1908): None where there are fewer than two.
    """
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    heads, tails = edges[::2], edges[1::2]
    if len(heads) < 2:
        return None
    cycles = np.append(0, (tails[:-1] + heads[1:] + 1) // 2)
    parts = []
    for own in (chosen, ~chosen):
        count = np.add.reduceat(own.astype(np.int64), cycles)
        total = np.add.reduceat(np.where(own, series, 0.0), cycles)
        parts.append((count, total / np.maximum(count, 1)))
    (many, inside), (others, outside) = parts
    whole = others > 0
    if whole.sum() < 2:
        return None
    weight = many[whole] / many[whole].sum()
    difference = (inside - outside)[whole]
    mean, freedom = float(weight @ difference), len(weight) - 1
    error = float(np.sqrt((weight**2 @ (difference - mean) ** 2) * (freedom + 1) / freedom))
    reach = student_quantile(0.975, freedom) * error
    return Excess(mean, mean - reach, mean + reach)
