"""Points of a line: thinned, with gaps where a series pauses; and its colour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Floats
from haiprof.show.figures.style import series_color

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
    none = np.array([], dtype=np.intp)
    if len(starts) < 3:
        return none
    pauses = starts[1:] - (starts if ends is None else ends)[:-1]
    if ends is None and pauses.max() <= _GAP_INTERVALS * pauses.min():
        return none  # as nearly always; of a thousand ranks the rest takes seconds
    usual: npt.NDArray[np.float64] = np.full(len(starts) - 1, np.median(np.diff(starts)))
    if ends is None:
        beside = np.maximum(np.append(pauses[:1], pauses[:-1]), np.append(pauses[1:], pauses[-1:]))
        beside[[0, -1]] = usual[[0, -1]]
        usual = np.maximum(usual, beside)
    return np.flatnonzero(pauses > _GAP_INTERVALS * usual)


def with_gaps(
    kept: npt.NDArray[np.intp], breaks: npt.NDArray[np.intp], columns: Columns, ends: Floats
) -> Columns:
    """The chosen points of each column, and at each break a point without values."""
    if not len(breaks):
        return [columns[0][kept], *(c[kept].astype(np.float64) for c in columns[1:])]
    after = np.searchsorted(kept, breaks, side="right")
    inner = (after > 0) & (after < len(kept))
    places, first = np.unique(after[inner], return_index=True)
    times = np.insert(columns[0][kept], places, ends[breaks[inner][first]])
    values = [np.insert(c[kept].astype(np.float64), places, np.nan) for c in columns[1:]]
    return [times, *values]


_HOST_COLOR_INDEX = 6  # hosts begin at another colour than ranks


def owner_color(owner: Sequence[Any], place: int) -> str:
    """The colour of a rank, or of a host's series by its place."""
    rank = owner[1]
    return series_color(rank if isinstance(rank, int) else _HOST_COLOR_INDEX + place)
