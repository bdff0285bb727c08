"""By how much the work of a step grew: larger inputs, more passes, model phases that grew alike."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.rule_inputs import RuleInputs, typical_rank
from haiprof.diagnosis.thresholds import DRIFT_RATIO, LIKE_RATIO

MOST_POWER = 2
"""Time by the size of the input: a batch makes it longer in proportion, attention by the square of
a sequence's length (Vaswani et al. 2017, table 1)."""
_LOOK_NS = NS_PER_S
_STAYS_RATIO = 0.5
"""An optimizer that grew by less than half as much as the model does the same work as before."""


def work_growth(inputs: RuleInputs) -> float | None:
    """Work of the typical rank's last third of steps by that of the first; None: not known.

    Work is what a step's passes are called with: numbers in the inputs of the root module with the
    largest ones, times passes. Medians, as of the steps that are judged. Looks are a second apart,
    so that a size may be as much older than its line: the larger growth of both readings counts.
    """
    rank = typical_rank(inputs)
    sizes = inputs.last_attempts.input_sizes.filter(pl.col("rank") == rank)
    if sizes.is_empty():
        return None
    main = sizes.sort("number_count", "root")["root"][-1]
    own = sizes.filter(pl.col("root") == main).sort("time_ns")
    steps = inputs.of_rank(rank).select("start_ns", "micro_step_count").sort("start_ns")
    first, _ = _thirds(_work(steps, own))
    _, last = _thirds(_work(steps, own.with_columns(pl.col("time_ns") - _LOOK_NS)))
    return last / first if first else None


def _work(steps: pl.DataFrame, sizes: pl.DataFrame) -> pl.Series:
    """Numbers in the inputs of each step, all passes together."""
    known = steps.join_asof(sizes, left_on="start_ns", right_on="time_ns")
    size = known["number_count"].fill_null(int(sizes["number_count"][0]))
    return size.cast(pl.Float64) * known["micro_step_count"]


def grew_like_work(series: pl.DataFrame) -> bool:
    """Whether forward and backward became longer by the same factor, and the optimizer did not.

    That is how more work per step looks: parameters stay as many as they were. A machine that slows
    down hits the optimizer too, and code that keeps something hits one phase.
    """
    factors = {}
    for phase in ("forward", "backward", "optimizer"):
        first, last = _thirds(series[f"{phase}_host_ns"])
        if not first:
            return False
        factors[phase] = last / first
    less, more = sorted((factors["forward"], factors["backward"]))
    stays = factors["optimizer"] - 1 < _STAYS_RATIO * (less - 1)
    return less >= 1 + DRIFT_RATIO and more < LIKE_RATIO * less and stays


def _thirds(values: pl.Series) -> tuple[float, float]:
    """Medians of the first and of the last third."""
    numbers = values.fill_null(0).to_numpy().astype(np.float64)
    third = max(len(numbers) // 3, 1)
    return float(np.median(numbers[:third])), float(np.median(numbers[-third:]))
