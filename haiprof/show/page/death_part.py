"""How the job died, as the page shows it: what became of each rank, and its last seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from haiprof.base.units import NS_PER_S, duration_text
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.last_seconds import RankTimeline, last_seconds, time_range
from haiprof.run_analysis.run_files import RunFiles
from haiprof.show.death_block import WORDS, grouped_fates, memory_lines, start_lines
from haiprof.show.page.tables import PageTable, text_table
from haiprof.show.text import moment_text, printable

_ROWS = 64
_FRAMES = 20
_ORDER = ("cause", "victim", "stopped", "unknown", "clean", "absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """One rank's last seconds: places in percent of the picture's width."""

    name: str
    stretches: tuple[tuple[str, float, float], ...]
    """Phase, left, width."""
    end: float | None
    """Where it ended."""
    role: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathPart:
    """The death of a run."""

    word: str
    certain: bool
    line: str
    source: str
    remedy: str
    facts: tuple[str, ...]
    fates: PageTable
    traceback: tuple[str, ...]
    rows: tuple[TimelineRow, ...]
    left: str
    right: str
    """What the ends of the time axis are."""
    more: int
    """Ranks that are left out of the picture."""


def death_part(files: RunFiles, verdict: Verdict) -> DeathPart | None:
    """The death as the page shows it; None where the job has not died."""
    death = verdict.death
    if death is None:
        return None
    fates = sorted(death.fates, key=lambda f: (_ORDER.index(f.role), f.ended_ns or 0, f.rank))
    rows = [tuple(map(printable, row)) for row in grouped_fates(death)]
    lanes = tuple(_row(row, death) for row in last_seconds(files, death, fates[:_ROWS]))
    facts = [f"at {moment_text(death.died_ns)}; order of ends: {death.clock}"]
    head = ("ranks", "", "what became of them")
    between = time_range(death)
    died = death.died_ns or (between[1] if between else 0)
    before, after = (died - between[0], between[1] - died) if between else (0, 0)
    return DeathPart(
        word=WORDS.get(death.cause, death.cause),
        certain=death.certain,
        line=printable(death.line or ""),
        source=printable(death.source or ""),
        remedy=death.remedy,
        facts=(*facts, *memory_lines(verdict), *start_lines(verdict.starts)),
        fates=text_table("", head, rows, left=head),
        traceback=tuple(map(printable, death.traceback[-_FRAMES:])),
        rows=lanes,
        left=f"{duration_text(before)} before",
        right=f"{duration_text(after)} after",
        more=max(0, len(fates) - _ROWS),
    )


def _row(row: RankTimeline, death: Death) -> TimelineRow:
    between = time_range(death)
    assert between is not None, "rows are only of deaths that have a time"
    begin, end = between
    scale = 100 / max(end - begin, NS_PER_S)

    def position(time_ns: int) -> float:
        return round(min(max((time_ns - begin) * scale, 0.0), 100.0), 2)

    fate = row.fate
    pieces: list[tuple[str, float, float]] = []
    for piece in row.stretches:
        left = position(piece.begin_ns)
        pieces.append((piece.phase, left, max(round(position(piece.end_ns) - left, 2), 0.1)))
    return TimelineRow(
        name=f"rank {fate.rank}",
        stretches=tuple(pieces),
        end=None if fate.ended_ns is None else position(fate.ended_ns),
        role=fate.role,
        what=printable(fate.what),
    )


MARKS: Mapping[str, str] = {"cause": "✖", "victim": "●", "stopped": "■"}
"""How an end is marked in the picture, by its role."""
