"""Starts of a job's ranks, why each ended, what lay between them, and the goodput of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.process_ends import ProcessEnd
from haiprof.run_analysis.run_files import RunFiles
from haiprof.run_format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the ranks: the first one, or a restart."""

    generation: int
    began_ns: int | None
    """Unix time at which its first rank began to be recorded."""
    ended_ns: int | None
    """Unix time of its death; None for the last one, or where it is not known."""
    why: str | None
    """How it ended."""
    step_count: int
    """Steps of the rank that has most."""
    kept_ns: int
    """Time in steps that counted: those after the last save of a start that died were done again
    or lost."""
    lost_ns: int
    """Time in steps after the last save of a start that died."""
    until_next_ns: int | None
    """From its death to the first step of the next start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What of the wall time was steps that counted."""

    ratio: float | None
    """None where the run's length is not known, or no steps were recorded."""
    wall_ns: int | None
    kept_ns: int
    lost_ns: int
    between_ns: int
    """Between the death of one start and the first step of the next."""


def find_starts(
    ends: Sequence[ProcessEnd],
    deaths: Sequence[Death],
    steps: pl.DataFrame,
    saves: pl.DataFrame,
) -> list[Start]:
    """The starts of a run in order."""
    own = [end for end in ends if end.rank is not None and not end.helper]
    generations = sorted({end.generation for end in own})
    died = {death.generation: death for death in deaths}
    # The attempt number of each generation's rank folders: the order of those with a report.
    begun = sorted({end.generation for end in own if end.started_ns is not None})
    attempts = {generation: place for place, generation in enumerate(begun)}
    found: list[Start] = []
    for generation in generations:
        death = died.get(generation)
        part = _of_attempt(steps, attempts.get(generation, generation))
        saved = _of_attempt(saves, attempts.get(generation, generation))
        began = [e.started_ns for e in own if e.generation == generation and e.started_ns]
        dies = death is not None and (not death.final)
        kept, lost = _kept_and_lost(part, saved, dies=dies)
        found.append(
            Start(
                generation=generation,
                began_ns=min(began, default=None),
                ended_ns=None if death is None else death.died_ns,
                why=None if death is None else death.own_end or death.headline,
                step_count=_count(part),
                kept_ns=kept,
                lost_ns=lost,
                until_next_ns=None,
            )
        )
    return _with_gaps(found, steps, attempts)


def goodput(files: RunFiles, starts: Sequence[Start]) -> Goodput:
    """The share of the run's wall time in steps that counted."""
    manifest = files.manifest
    wall = None
    if manifest is not None and manifest.end_wall_ns and manifest.start_wall_ns:
        wall = manifest.end_wall_ns - manifest.start_wall_ns
    kept = sum(start.kept_ns for start in starts)
    return Goodput(
        ratio=min(kept / wall, 1.0) if wall and wall > 0 and kept else None,
        wall_ns=wall,
        kept_ns=kept,
        lost_ns=sum(start.lost_ns for start in starts),
        between_ns=sum(start.until_next_ns or 0 for start in starts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTime:
    """When one attempt of one rank was recorded and trained, Unix time in ns."""

    record_start_ns: int | None
    first_step_ns: int
    last_end_ns: int
    record_end_ns: int | None
    inside_ns: Mapping[str, int]
    """From the first step's begin to the last one's end, by position."""


_APART = ("evaluation", "checkpoint", "compile")
"""Positions that are no training."""


def run_time(manifest: Manifest | None, attempts: Sequence[AttemptTime]) -> dict[str, int]:
    """The run's wall time from start to end by what passed; the parts add up to it exactly."""
    if manifest is None or not manifest.end_wall_ns or not attempts:
        return {}
    found: dict[str, int] = {}
    at, last = manifest.start_wall_ns, manifest.end_wall_ns

    def spend(name: str, until_ns: int) -> None:
        nonlocal at
        until_ns = min(max(until_ns, at), last)
        if until_ns > at:
            found[name] = found.get(name, 0) + until_ns - at
        at = until_ns

    for place, attempt in enumerate(attempts):
        if attempt.record_start_ns is not None:
            spend("restart" if place else "start and import", attempt.record_start_ns)
        spend("before the first step", attempt.first_step_ns)
        begun = at
        spend("training", attempt.last_end_ns)
        for name in _APART:
            part = min(attempt.inside_ns.get(name, 0), at - begun, found.get("training", 0))
            if part:
                found[name] = found.get(name, 0) + part
                found["training"] -= part
        if attempt.record_end_ns is not None:
            spend("after the last step", attempt.record_end_ns)
    spend("end", last)
    return found


def _of_attempt(frame: pl.DataFrame, attempt: int) -> pl.DataFrame:
    return frame.filter(pl.col("attempt") == attempt)


def _count(steps: pl.DataFrame) -> int:
    most = steps["rank"].value_counts()["count"].max() if steps.height else 0
    return most if isinstance(most, int) else 0


def _kept_and_lost(steps: pl.DataFrame, saves: pl.DataFrame, *, dies: bool) -> tuple[int, int]:
    """Time in steps up to the last save and after it; of the rank with most steps."""
    if not steps.height:
        return 0, 0
    sizes = steps.group_by("rank").len().sort("len", "rank", descending=[True, False])
    own = steps.filter(pl.col("rank") == sizes["rank"][0])
    whole = int(own["step_ns"].sum())
    if not dies:
        return whole, 0
    saved = (saves["start_ns"] + saves["duration_ns"]).max() if saves.height else None
    before = own.filter(pl.col("start_ns") < saved) if isinstance(saved, int) else own.clear()
    kept = int(before["step_ns"].sum())
    return kept, whole - kept


def _with_gaps(
    starts: Sequence[Start], steps: pl.DataFrame, attempts: dict[int, int]
) -> list[Start]:
    found = []
    for place, start in enumerate(starts):
        gap = None
        if place + 1 < len(starts) and start.ended_ns is not None:
            later = _of_attempt(steps, attempts.get(starts[place + 1].generation, -1))
            first = later["start_ns"].min()
            gap = max(0, first - start.ended_ns) if isinstance(first, int) else None
        found.append(replace(start, until_next_ns=gap))
    return found
