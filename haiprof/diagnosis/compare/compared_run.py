"""One of the two runs: its steps after warm-up as one series, and what each is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Floats
from haiprof.diagnosis.rule_inputs import judged_steps
from haiprof.diagnosis.thresholds import DEVICE_COVERAGE_RATIO
from haiprof.run_analysis.phases import GC_PHASE, SAVE_PHASE
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import STEP_PHASES
from haiprof.run_format.manifest import Manifest

HOST_PHASES = tuple(f"{phase}_host_ns" for phase in STEP_PHASES)
DEVICE_PHASES = tuple(f"{phase}_device_ns" for phase in STEP_PHASES)
PAUSES = ("gc_ns", "save_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """What is compared of one run."""

    analyzer: RunFrames
    manifest: Manifest | None
    """Null where run.json is damaged."""
    steps: pl.DataFrame
    """Steps after warm-up of each rank's last attempt, columns of `step_frame`."""
    series: pl.DataFrame
    """One row per step that all ranks have: `step`, `step_ns` (median over ranks), phases on both
    clocks and `mean_step_ns` (means over ranks), and `gc_ns`, `save_ns` in that step."""
    evaluation_ratio: float | None
    """Evaluation's share of evaluation and training together, of all ranks."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.analyzer.run.root

    @property
    def step_ns(self) -> Floats:
        """Step times in order."""
        return self.series["step_ns"].to_numpy().astype(np.float64)

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks with steps."""
        return tuple(self.steps["rank"].unique().sort().to_list())

    def columns(self, names: tuple[str, ...]) -> tuple[Floats, Floats] | None:
        """Step times and these columns, shape (n, k), of the steps that have all of them.

        Returns:
            None where most steps lack one.
        """
        known = self.series.drop_nulls(list(names))
        if not known.height or known.height < DEVICE_COVERAGE_RATIO * self.series.height:
            return None
        return (
            known["step_ns"].to_numpy().astype(np.float64),
            known.select(names).to_numpy().astype(np.float64),
        )

    def of_ranks(self) -> Mapping[int, Floats]:
        """Step times of each rank, in order."""
        ranks = self.steps.filter(pl.col("step_ns") > 0).partition_by("rank", as_dict=True)
        return {
            rank: frame["step_ns"].to_numpy().astype(np.float64)
            for (rank,), frame in sorted(ranks.items())
        }


def open_compared_run(path: Path) -> ComparedRun:
    """Reads one run, as `side_of`."""
    return compared_run_of(RunFrames(path))


def compared_run_of(analyzer: RunFrames) -> ComparedRun:
    """What is compared of a run.

    The time of a step is the median over ranks. Ranks of a synchronous job wait for each other, so
    that a slow one makes the steps of all longer, and they are one measurement, not many; where
    a step ends on each rank jitters, and the slowest of many ranks would be their largest jitter.

    Raises:
        RunNotFoundError: There is no run.
        RunFormatError: Nothing in it can be read.
    """
    steps = analyzer.steps()
    last = steps.filter(pl.col("attempt") == pl.col("attempt").max().over("rank"))
    judged = [judged_steps(frame) for frame in last.partition_by("rank", maintain_order=True)]
    warm = pl.concat([last.clear(), *judged])
    try:
        manifest = analyzer.manifest()
    except RunFormatError:
        manifest = None
    return ComparedRun(
        analyzer=analyzer,
        manifest=manifest,
        steps=warm,
        series=_series(warm, _pauses(analyzer.phases())),
        evaluation_ratio=_evaluation_ratio(analyzer.ranks(), last),
    )


def _series(steps: pl.DataFrame, pauses: pl.DataFrame) -> pl.DataFrame:
    ranks = steps["rank"].n_unique()
    joined = steps.join(pauses, on=["rank", "attempt", "step"], how="left").with_columns(
        pl.col(PAUSES).fill_null(0)
    )
    whole = joined.group_by("step").agg(
        pl.col("step_ns").median(),
        pl.col("step_ns").mean().alias("mean_step_ns"),
        *(pl.when(pl.col(name).null_count() == 0).then(pl.col(name).mean()).alias(name)
          for name in (*HOST_PHASES, *DEVICE_PHASES, *PAUSES)),
        pl.len().alias("rank_count"),
    )  # fmt: skip
    return whole.filter((pl.col("rank_count") == ranks) & (pl.col("step_ns") > 0)).sort("step")


def _pauses(phases: pl.DataFrame) -> pl.DataFrame:
    """`gc_ns` and `save_ns` of each step that has some."""
    inside = phases.filter(pl.col("step").is_not_null())
    return inside.group_by("rank", "attempt", "step").agg(
        pl.col("duration_ns").filter(pl.col("phase") == phase).sum().alias(name)
        for phase, name in ((GC_PHASE, "gc_ns"), (SAVE_PHASE, "save_ns"))
    )


def _evaluation_ratio(ranks: pl.DataFrame, steps: pl.DataFrame) -> float | None:
    if not steps.height or ranks["eval_ns"].null_count() == ranks.height:
        return None
    evaluated = float(ranks["eval_ns"].sum()) - float(ranks["eval_compile_ns"].sum())
    return evaluated / max(evaluated + float(steps["step_ns"].sum()), 1.0)
