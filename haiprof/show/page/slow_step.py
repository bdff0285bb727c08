"""The slowest step as a timeline: what each rank did in it, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from haiprof.base.units import duration_text
from haiprof.run_analysis.records import number
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.figures.style import PHASES
from haiprof.show.text import number_text

_RANK_LIMIT = 16
_DRAWN = (*PHASES, "gc", "save", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLane:
    """One rank in the step."""

    name: str
    what: str
    """Its phases with their times, as text."""
    begin: float
    """Percent of the axis, as `length`."""
    length: float
    stretches: tuple[tuple[str, float, float], ...]
    """(phase, begin, length)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStepPart:
    """The step that took longest on one rank, on all ranks that have it."""

    title: str
    lanes: tuple[SlowLane, ...]
    span: str
    """Length of the axis."""
    notes: tuple[str, ...]


def slow_step_part(analyzer: RunFrames, counted: pl.DataFrame) -> SlowStepPart | None:
    """The slowest of the steps that count; None where there is none."""
    if counted.is_empty():
        return None
    order = ["step_ns", "rank", "step"]
    slowest = counted.sort(order, descending=[True, False, False]).row(0, named=True)
    same = (pl.col("step") == slowest["step"]) & (pl.col("attempt") == slowest["attempt"])
    of_all = counted.filter(same).sort("rank")
    shown = _select_ranks(of_all)
    spans = analyzer.phases(shown["rank"].to_list()).filter(same)
    apart = analyzer.ranks()["host"].n_unique() > 1
    usual = number(counted.filter(pl.col("rank") == slowest["rank"])["step_ns"].median()) or 1.0
    times = number_text(round(slowest["step_ns"] / usual, 2))
    notes = ["each rank from its own begin: clocks of hosts differ"] if apart else []
    notes += [f"{len(shown)} of {len(of_all)} ranks"] if len(shown) < len(of_all) else []
    lanes, span_ns = _lanes(shown, spans, apart=apart)
    return SlowStepPart(
        title=f"Step {slowest['step']}: {duration_text(slowest['step_ns'])} on rank "
        f"{slowest['rank']}, {times}x its median step",
        lanes=lanes,
        span=duration_text(span_ns),
        notes=tuple(notes),
    )


def _select_ranks(steps: pl.DataFrame) -> pl.DataFrame:
    """All ranks, or the slowest and the fastest of many."""
    if len(steps) <= _RANK_LIMIT:
        return steps
    ordered = steps.sort("step_ns", "rank", descending=[True, False])
    half = _RANK_LIMIT // 2
    return pl.concat([ordered.head(half), ordered.tail(half)]).sort("rank")


def _lanes(
    steps: pl.DataFrame, spans: pl.DataFrame, *, apart: bool
) -> tuple[tuple[SlowLane, ...], int]:
    """One lane per rank, and the length of the axis in ns."""
    own = spans.partition_by("rank", as_dict=True)
    ends = {
        row["rank"]: max([row["start_ns"] + row["step_ns"], *_ends(own.get((row["rank"],)))])
        for row in steps.iter_rows(named=True)
    }
    first = int(steps["start_ns"].to_numpy().min())
    begins = {
        rank: start if apart else first for rank, start in steps.select("rank", "start_ns").rows()
    }
    span_ns = max(1, *(ends[rank] - begins[rank] for rank in ends))
    lanes = []
    for row in steps.iter_rows(named=True):
        rank = row["rank"]
        drawn = _stretches(own.get((rank,)), begins[rank], span_ns)
        begin = 100 * (row["start_ns"] - begins[rank]) / span_ns
        lanes.append(
            SlowLane(
                name=f"rank {rank}", what=_phases_text(row), begin=round(begin, 3),
                length=round(100 * (ends[rank] - row["start_ns"]) / span_ns, 3), stretches=drawn,
            )
        )  # fmt: skip
    return tuple(lanes), span_ns


def _ends(spans: pl.DataFrame | None) -> Sequence[int]:
    return [] if spans is None else (spans["start_ns"] + spans["duration_ns"]).to_list()


def _stretches(
    spans: pl.DataFrame | None, begin_ns: int, span_ns: int
) -> tuple[tuple[str, float, float], ...]:
    """Outer spans first, so that inner ones are drawn over them."""
    if spans is None:
        return ()
    drawn = spans.filter(pl.col("phase").is_in(_DRAWN)).sort("start_ns", "duration_ns",
                                                             descending=[False, True])  # fmt: skip
    return tuple(
        (phase, round(100 * (start - begin_ns) / span_ns, 3), round(100 * length / span_ns, 3))
        for phase, start, length in drawn.select("phase", "start_ns", "duration_ns").rows()
    )


def _phases_text(step: dict[str, int | None]) -> str:
    """`dataloader 1.2 ms, forward 3.4 ms`."""
    times = [(phase, step[f"{phase}_host_ns"]) for phase in PHASES]
    return ", ".join(f"{phase} {duration_text(ns)}" for phase, ns in times if ns)
