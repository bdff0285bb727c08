"""The numbers of one rank over time, computed once for the terminal, figures and `--json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.ledger import POSITIONS
from haiprof.diagnosis.rule_inputs import judged_steps
from haiprof.diagnosis.thresholds import WARM_UP_MAX_STEPS
from haiprof.run_analysis.run_files import number
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.settings import RankSettings
from haiprof.show import summary
from haiprof.show.figures.panel_table import frame_reader
from haiprof.show.figures.style import PHASES
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.series import Series, TimeRange, make_series, time_range

SLOWEST_COUNT = 5
# Spans that are not phases of a step, in the order shown.
EVENT_PHASES = ("gc", "save", "eval", "dataloader_iter", "nograd_forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStat:
    """A phase, or a position, over the steps that count; on the host clock unless named so."""

    phase: str
    median_ns: float | None
    p95_ns: float | None
    max_ns: float | None
    share_ratio: float | None  # Of the mean step, as in the split
    device_median_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep:
    """One of the slowest steps that count."""

    step: int
    start_ns: int
    step_ns: int
    over_median_ratio: float
    split_ns: Mapping[str, float | None]
    longest_excess: str | None  # The phase that exceeds its own median most
    longest_excess_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStat:
    """Spans of one kind that are not a phase: pauses, saves, evaluation."""

    phase: str
    count: int
    total_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRankSummary:
    """One attempt of one rank."""

    run: RunHeader
    span: TimeRange | None
    window: TimeRange | None
    """The time axis of the series: while the steps ran that count, warm and not traced."""
    rank: int
    attempt: int
    other_attempts: tuple[int, ...]
    about: Mapping[str, Any]  # The rank's row of `Analyzer.ranks()`
    step_count: int
    mean_step_ns: float | None
    """Of the steps that the verdict judges, with what is paid between them; so is the split."""
    median_step_ns: float | None  # Of the same steps, without that
    split_ns: Mapping[str, float | None]
    boundary: str | None  # The most frequent kind of step boundary
    confidence: float | None  # Mean confidence in the boundaries of steps
    skipped_step_count: int
    phases: tuple[PhaseStat, ...]
    positions: tuple[PhaseStat, ...]
    """The same time as the verdict divides it: `input`, `prepare`, `forward`, `loss`, ..."""
    slowest: tuple[SlowStep, ...]
    events: tuple[EventStat, ...]
    settings: RankSettings | None  # What it was run with; None where that was not recorded
    phase_series: tuple[Series, ...]
    counter_series: tuple[Series, ...]
    missing: Mapping[str, str]
    notes: tuple[str, ...]


def one_rank_summary(data: RunFrames, rank: int) -> OneRankSummary:
    """The numbers of a rank's last attempt, also while it runs."""
    ranks = data.ranks()
    rows = ranks.filter(pl.col("rank") == rank).sort("attempt")
    if rows.is_empty():
        known = ", ".join(map(str, sorted(ranks["rank"].unique())))
        hint = f"its ranks: {known}" if known else "no process of the job has reported in (yet)"
        raise MissingDataError(f"the run has no rank {rank}", hint=hint)
    about = rows.row(-1, named=True)
    attempt = about["attempt"]
    steps = summary.rank_steps(data.steps(), rank, attempt)
    counters = rank_counters(data, rank, about["host"])
    manifest = manifest_or_none(data.run)
    times = counters["time_ns"]
    span = time_range(steps, None if counters.is_empty() else (times[0], times[-1]))
    settled = summary.select_settled(steps)
    split = summary.phase_split(settled)
    counted = judged_steps(steps)
    samples = summary.select_judged_samples(counters, counted, ranks)
    window = time_range(counted, None) or span
    boundaries = steps["boundary"].drop_nulls().mode().sort()
    over_time = summary.counters_over_time(frame_reader(samples), window) if window else ()
    return OneRankSummary(
        run=run_header(data.run, manifest), span=span, window=window, rank=rank, attempt=attempt,
        other_attempts=tuple(rows["attempt"][:-1]),
        about=about, step_count=about["step_count"] or steps.height,
        mean_step_ns=number(settled[summary.PERIOD].mean()),
        median_step_ns=number(counted["step_ns"].median()),
        split_ns=split, boundary=str(boundaries[0]) if len(boundaries) else None,
        confidence=number(steps["confidence"].mean()),
        skipped_step_count=int(steps["skipped"].sum() or 0),
        phases=tuple(_phase_stat(counted, phase, split) for phase in PHASES),
        positions=_position_stats(data, rank, attempt, counted),
        slowest=slowest_steps(counted, summary.rank_steps(data.slow_steps(), rank, attempt)),
        events=event_stats(summary.rank_steps(data.phases(), rank, attempt)),
        settings=data.settings().get(rank),
        phase_series=tuple(_phase_series(counted, window)) if window else (),
        counter_series=tuple(over_time),
        missing=summary.missing_sources(
            data.run, manifest, counters.select("source", "metric").unique().rows()
        ),
        notes=tuple(data.notes()),
    )  # fmt: skip


def rank_counters(data: RunFrames, rank: int, host: str | None) -> pl.DataFrame:
    """Counters of the rank itself and those of its host, without other ranks and GPUs."""
    ranks = data.ranks()
    hosts = set(ranks.filter(pl.col("rank") == rank)["host"])
    counters = data.host_counters(None if None in hosts else hosts)
    own = pl.col("rank") == rank
    nobodys = pl.col("rank").is_null() & pl.col("gpu").is_null() & (pl.col("source") != "process")
    return counters.filter(own | (nobodys & (pl.col("host") == host)))


def slowest_steps(steps: pl.DataFrame, folded: pl.DataFrame) -> tuple[SlowStep, ...]:
    """The slowest steps, slowest first, each with the phase that exceeds its median most."""
    median = number(steps["step_ns"].median())
    if not median:
        return ()
    medians = {phase: number(steps[f"{phase}_host_ns"].median()) for phase in PHASES}
    every = pl.concat([steps, folded.filter(pl.col("step") >= WARM_UP_MAX_STEPS)])
    slowest = every.sort("step_ns", descending=True).head(SLOWEST_COUNT)
    found = []
    for row in slowest.iter_rows(named=True):
        split = {phase: row[f"{phase}_host_ns"] for phase in PHASES}
        excess = {p: ns - (medians[p] or 0.0) for p, ns in split.items() if ns is not None}
        worst = max(excess, key=lambda p: excess[p], default=None)
        found.append(SlowStep(
            **{name: row[name] for name in ("step", "start_ns", "step_ns")},
            over_median_ratio=row["step_ns"] / median, split_ns=split, longest_excess=worst,
            longest_excess_ns=excess[worst] if worst else None,
        ))  # fmt: skip
    return tuple(found)


def event_stats(phases: pl.DataFrame) -> tuple[EventStat, ...]:
    """Count, total and longest of the spans that are not phases of a step."""
    duration = pl.col("duration_ns")
    found = phases.group_by("phase").agg(
        count=pl.len(), total_ns=duration.sum(), max_ns=duration.max()
    )
    rows = found.rows_by_key("phase", named=True, unique=True, include_key=True)
    return tuple(EventStat(**rows[phase]) for phase in EVENT_PHASES if phase in rows)


def _phase_stat(steps: pl.DataFrame, phase: str, split: Mapping[str, float | None]) -> PhaseStat:
    times = steps[f"{phase}_host_ns"]
    mine, total = split[phase], sum(ns or 0.0 for ns in split.values())
    return PhaseStat(
        phase=phase, median_ns=number(times.median()), p95_ns=number(times.quantile(0.95)),
        max_ns=number(times.max()),
        share_ratio=mine / total if mine is not None and total else None,
        device_median_ns=number(steps[f"{phase}_device_ns"].median()),
    )  # fmt: skip


def _position_stats(
    data: RunFrames, rank: int, attempt: int, steps: pl.DataFrame
) -> tuple[PhaseStat, ...]:
    if steps.is_empty():
        return ()
    plain, collected = data.position_times(rank, attempt)
    cells = data.cells(rank, attempt).of_steps(steps["step"].to_numpy())
    whole = (plain + collected)[:, cells.column]
    total = int(whole.sum())
    device = {name: number(steps[f"{name}_device_ns"].median()) for name in PHASES}
    return tuple(
        PhaseStat(
            phase=name, median_ns=float(np.median(ns)), p95_ns=float(np.quantile(ns, 0.95)),
            max_ns=float(ns.max()), share_ratio=float(ns.sum()) / total,
            device_median_ns=device.get(name),
        )
        for name, ns in zip(POSITIONS, whole, strict=True)
        if ns.any()
    )  # fmt: skip


def _phase_series(steps: pl.DataFrame, span: TimeRange) -> Iterator[Series]:
    yield from summary.step_series(steps, span)
    for phase in PHASES:
        own = summary.lasting_values(steps, f"{phase}_host_ns")
        yield from make_series(own, title=phase, label=phase, unit="ns", span=span)
