"""The last moment of each rank process, as far as it was recorded: how it ended, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from haiprof.base.errors import RunFormatError
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, text
from haiprof.run_analysis.step_frame import read_spans
from haiprof.run_format.schema import KIND_NAMES

_TAIL_RECORDS = 256
_PHASES = frozenset(KIND_NAMES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LastMoment:
    """How far one process of a rank came. Times are Unix times."""

    rank: int
    attempt: int
    host: str | None
    pid: int | None
    end: str | None
    """`exit`: it ended in order; `time`: the recording's time was up before; `hook_error`: haiprof
    broke before; `unclean`: it was killed, or ended itself without Python's own end; None: it still
    runs, or nobody was there to see its end."""
    last_span_ns: int | None
    """End of the last span in the file; None where there is none."""
    open_phases: tuple[tuple[str, int], ...]
    """Phases that were under way when it was killed, with their start, in the order of their
    starts: the last one is the innermost. Empty where that is not known."""
    optimizer_steps: int | None
    """Since its recording began; None where that is not known."""
    added_span_count: int
    """Spans that the process could not write any more and that its node's agent has added."""
    lost_span_count: int | None
    """Spans of the end that are lost; None where nobody knows."""
    reason: str | None
    """Why they are, where that is known."""


def last_moments(run: RunFiles) -> list[LastMoment]:
    """The last moment of each process of each rank, in order of rank and attempt."""
    return [_last_moment(rank) for rank in run.ranks]


def _last_moment(rank: RankFiles) -> LastMoment:
    line = _last_of(rank, "unclean_end")
    end = _end(rank, line)
    last_ns, offset_ns = _last_span(rank)
    clean = end is not None and end != "unclean"
    lost = 0 if clean else integer(line.get("lost_span_count"))
    return LastMoment(
        rank=rank.rank,
        attempt=rank.attempt,
        host=text(rank.report.get("host")),
        pid=integer(rank.report.get("pid")),
        end=end,
        last_span_ns=last_ns,
        open_phases=_open_phases(line.get("open_ns"), offset_ns),
        optimizer_steps=integer(line.get("optimizer_steps")),
        added_span_count=integer(line.get("added_span_count")) or 0,
        lost_span_count=lost,
        reason=text(line.get("reason")) or _no_ring(rank, end),
    )


def _last_of(rank: RankFiles, line_type: str) -> Mapping[str, Any]:
    return next(reversed(rank.of_type(line_type)), {})


def _end(rank: RankFiles, unclean: Mapping[str, Any]) -> str | None:
    if rank.of_type("hook_error"):
        return "hook_error"
    if rank.of_type("record_end"):
        return text(_last_of(rank, "record_end").get("reason"))
    return "unclean" if unclean else None


def _no_ring(rank: RankFiles, end: str | None) -> str | None:
    """Why the end is not known, where it is not."""
    return text(_last_of(rank, "no_ring").get("reason")) if end is None else None


def _open_phases(content: object, offset_ns: int | None) -> tuple[tuple[str, int], ...]:
    if not isinstance(content, dict) or offset_ns is None:
        return ()
    starts = {name: integer(start) for name, start in content.items() if name in _PHASES}
    found = [(name, start + offset_ns) for name, start in starts.items() if start is not None]
    return tuple(sorted(found, key=lambda phase: phase[1]))


def _last_span(rank: RankFiles) -> tuple[int | None, int | None]:
    """End of the last span, and Unix time minus the clock of the spans."""
    try:
        spans, clock, _ = read_spans(rank.paths.phases, first=-_TAIL_RECORDS)
    except RunFormatError:
        return None, None
    offset_ns = clock.wall_ns - clock.mono_ns
    if not len(spans.end_ns):
        return None, offset_ns
    return int(np.max(spans.end_ns)) + offset_ns, offset_ns
