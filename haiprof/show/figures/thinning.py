"""Thins a long series for a picture; the highest and lowest of each stretch stay."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from haiprof.base.arrays import Floats

POINT_LIMIT = 5000
_FIGURE_POINT_LIMIT = 200_000
_LEAST_POINTS = 200

Columns = list[Floats]
_GAP_INTERVALS = 5.0


def thin_points(
    values: npt.NDArray[np.float64], *, limit: int = POINT_LIMIT
) -> npt.NDArray[np.intp]:
    """Which points to draw: all of a short series, else the extremes of equal stretches."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, limit // 2 - 1) + 1).astype(np.intp)
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        stretch = values[start:end]
        kept.update((int(start + stretch.argmin()), int(start + stretch.argmax())))
    return np.array(sorted(kept), dtype=np.intp)


def points_per_series(series_count: int) -> int:
    """Points for each of many series, so that a figure of a thousand ranks still opens."""
    return max(_LEAST_POINTS, min(POINT_LIMIT, _FIGURE_POINT_LIMIT // max(1, series_count)))


def gap_starts(
    starts: npt.NDArray[np.float64], ends: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.intp]:
    """Where a line must break: indices before a pause much longer than the usual interval.

    Samples that come more slowly from some time on, as on a node without a free core, are no
    pauses: a pause is much longer than those beside it, too.
    """
    if len(starts) < 3:
        return np.array([], dtype=np.intp)
    usual: npt.NDArray[np.float64] = np.full(len(starts) - 1, np.median(np.diff(starts)))
    pauses = starts[1:] - (starts if ends is None else ends)[:-1]
    if ends is None:
        beside = np.maximum(np.append(pauses[:1], pauses[:-1]), np.append(pauses[1:], pauses[-1:]))
        beside[[0, -1]] = usual[[0, -1]]
        usual = np.maximum(usual, beside)
    return np.flatnonzero(pauses > _GAP_INTERVALS * usual)


def with_gaps(
    kept: npt.NDArray[np.intp], breaks: npt.NDArray[np.intp], columns: Columns, ends: Floats
) -> Columns:
    """The chosen points of each column, and at each break a point without values."""
    after = np.searchsorted(kept, breaks, side="right")
    inner = (after > 0) & (after < len(kept))
    places, first = np.unique(after[inner], return_index=True)
    times = np.insert(columns[0][kept], places, ends[breaks[inner][first]])
    values = [np.insert(c[kept].astype(np.float64), places, np.nan) for c in columns[1:]]
    return [times, *values]
