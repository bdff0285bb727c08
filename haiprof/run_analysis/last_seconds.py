"""What every rank did in the last seconds before a death, as stretches of phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from haiprof.base.errors import RunFormatError
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis.deaths import Death, Fate
from haiprof.run_analysis.run_files import RankFiles, RunFiles
from haiprof.run_analysis.step_frame import read_spans
from haiprof.run_format import schema

SECONDS = 30
AFTER_NS = 2 * NS_PER_S
_TAIL_RECORDS = 20_000
_PIECES = 300
"""So many stretches per rank at the most: what is shorter than a part of the picture is joined."""
_PHASES = {
    schema.DATA: "dataloader", schema.DATA_END: "dataloader", schema.DATA_ITER: "dataloader",
    schema.FORWARD: "forward", schema.FORWARD_EVAL: "forward", schema.EVAL: "other",
    schema.NOGRAD: "other", schema.BACKWARD: "backward", schema.OPTIMIZER: "optimizer",
    schema.SCALER: "optimizer", schema.SAVE: "other",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One phase, or several of a kind close together."""

    phase: str
    begin_ns: int
    """Unix time."""
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank before the death."""

    fate: Fate
    stretches: tuple[Stretch, ...]


def time_range(death: Death) -> tuple[int, int] | None:
    """The Unix times between which the ranks are shown; None where the death has no time."""
    ends = [fate.ended_ns for fate in death.fates if fate.ended_ns is not None]
    last = max([*ends, death.died_ns or 0])
    if not last:
        return None
    end = min(last, (death.died_ns or last) + 60 * NS_PER_S) + AFTER_NS
    begin = (death.died_ns or last) - SECONDS * NS_PER_S
    return begin, end


def last_seconds(files: RunFiles, death: Death, fates: Sequence[Fate]) -> list[RankTimeline]:
    """The last seconds of some ranks."""
    between = time_range(death)
    if between is None:
        return []
    own = {(text_of(rank, "host"), rank.report.get("pid")): rank for rank in files.ranks}
    found = []
    for fate in fates:
        rank = own.get((fate.host, fate.pid))
        pieces = [] if rank is None else list(_stretches(rank, between))
        found.append(RankTimeline(fate=fate, stretches=tuple(pieces)))
    return found


def text_of(rank: RankFiles, name: str) -> str | None:
    """A text of a rank's report; None where it holds something else."""
    value = rank.report.get(name)
    return value if isinstance(value, str) else None


def _stretches(rank: RankFiles, between: tuple[int, int]) -> Iterator[Stretch]:
    try:
        spans, clock, _ = read_spans(rank.paths.phases, first=-_TAIL_RECORDS)
    except RunFormatError:
        return
    offset = clock.wall_ns - clock.mono_ns
    begin, end = (time - offset for time in between)
    inside = (spans.end_ns > begin) & (spans.start_ns < end) & (spans.kind != schema.GC)
    order = np.argsort(spans.start_ns[inside], kind="stable")
    rows = zip(spans.kind[inside][order].tolist(), spans.start_ns[inside][order].tolist(),
               spans.end_ns[inside][order].tolist(), strict=True)  # fmt: skip
    least = (end - begin) // _PIECES
    phase, since, until = "", 0, 0
    for kind, first, last in rows:
        name = _PHASES.get(kind, "other")
        if phase and (name == phase or until - since < least) and first - until < least:
            until = max(until, last)
            continue
        if phase:
            yield Stretch(phase=phase, begin_ns=since + offset, end_ns=until + offset)
        phase, since, until = name, max(first, begin), last
    if phase:
        yield Stretch(phase=phase, begin_ns=since + offset, end_ns=min(until, end) + offset)
