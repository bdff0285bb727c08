"""Device time of steps: device.rec, joined by the optimizer spans that closed its records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Floats, Ints
from haiprof.run_analysis.nesting import Bools, kind_table
from haiprof.run_analysis.steps import PHASES, Segmentation
from haiprof.run_format import schema

_PASSES = kind_table(schema.EVAL, schema.NOGRAD)


def device_ns(records: Mapping[str, npt.NDArray[Any]], found: Segmentation) -> Floats:
    """Device time per phase and step.

    A record covers the time since the previous optimizer span; a pass without gradients starts
    it anew. A step has values only where all its records are there and complete and cover the
    step: not after a step that the scaler skipped, not with such a pass inside. The first step
    after an evaluation has no other time, as that of the evaluation's end would be in it.
    """
    count = len(found.steps.start_ns)
    spans = found.nested.spans
    if not count:
        return np.empty((len(PHASES) + 1, 0))
    closing = np.flatnonzero((spans.kind == schema.OPTIMIZER) & (found.step >= 0))
    step, end = found.step[closing], np.sort(spans.end_ns[closing])
    row, there = _matching(np.asarray(records["end_ns"]), end)
    columns = [f"{phase}_ns" for phase in PHASES] + ["interval_ns"]
    values = np.stack([np.asarray(records[name], dtype=np.float64)[row] for name in columns])
    values[:, ~there | (np.asarray(records["missing_count"])[row] > 0)] = np.nan
    sums = np.zeros((len(columns), count))
    for place, value in enumerate(values):
        np.add.at(sums[place], step, value)
    covered, apart = _find_covered_steps(found, step, end)
    sums[:, ~covered] = np.nan
    sums[-1, ~apart] = np.nan
    sums[-1] -= sums[:-1].sum(axis=0)
    return np.where(np.isfinite(sums) & (sums >= 0) & (sums < 2.0**62), sums, np.nan)


def _matching(keys: Ints, wanted: Ints) -> tuple[Ints, Bools]:
    """Row of each wanted key, and whether it is there."""
    if not len(keys):
        raise ValueError("no device records")
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    row = order[place]
    return row, keys[row] == wanted


def _find_covered_steps(found: Segmentation, step: Ints, end: Ints) -> tuple[Bools, Bools]:
    """Steps whose records cover them alone; steps with no evaluation just before them."""
    count = len(found.steps.start_ns)
    closed = np.bincount(step, minlength=count) > 0
    last = np.zeros(count, dtype=np.int64)
    last[step] = end  # ascending: the last one of each step stays
    spans = found.nested.spans
    passes = spans.start_ns[_PASSES[spans.kind]]
    inside = np.searchsorted(passes, last) > np.searchsorted(passes, found.steps.start_ns)
    before = np.append(found.steps.start_ns[:1], last[:-1])
    begun = found.evaluation_start_ns
    apart: Bools = np.searchsorted(begun, last) <= np.searchsorted(begun, before)
    covered: Bools = closed & np.append(True, closed[:-1])[:count] & ~inside
    return covered, apart
