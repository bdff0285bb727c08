"""Trace windows of a run: what was recorded, where it is, and why the rest was not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Bools
from haiprof.base.safe_files import file_size
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, read_record, text
from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_format.raw_traces import Part, complete_parts, parse_stem
from haiprof.trace_format.frame_columns import Columns, types_of

TRIGGERS = ("option", "slow", "request")  # what a window was recorded for
NOT_REACHED = "not reached"
TRACED_RATIO = 0.01
"""A step is traced where a window, with the stalls at its ends, takes this share of it: a window
is cut at a step's end, and the two clock readings there differ by microseconds. Own choice."""
LEAD_STEPS = 3  # `haiprof.in_job.windows.step_plan.LEAD_STEPS`
Key = tuple[int, int]  # rank and attempt
_STALLS = ("setup_ns", "start_ns", "stop_ns", "export_ns")

WINDOW_COLUMNS: Columns = {
    "rank": (pl.Int64, "of the process"),
    "attempt": (pl.Int64, "restart of the rank, from 0"),
    "window": (pl.Int64, "of that attempt, from 0"),
    # cut: ended early, and kept
    "state": (pl.String, "recorded, cut, refused, failed, dropped or not reached"),
    "trigger": (pl.String, "option, slow or request"),
    "reason": (pl.String, "why it is not just recorded"),
    "first_step": (pl.Int64, "in it"),
    "end_step": (pl.Int64, "the one after its last"),
    "start_ns": (pl.Int64, "Unix time"),
    "end_ns": (pl.Int64, "Unix time"),
    "stall_ns": (pl.Int64, "how long the training thread was stopped"),
    "path": (pl.String, "of the trace; null: there is none"),
    "bytes": (pl.Int64, "of that file"),
    "raw_bytes": (pl.Int64, "before compression"),
    "et_path": (pl.String, "of the execution trace"),
    "et_bytes": (pl.Int64, "of that file"),
    "event_count": (pl.Int64, "in the trace"),
    "stem": (pl.String, "of the file's name"),
}
WINDOW_SCHEMA = types_of(WINDOW_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWindow:
    """One window of one rank."""

    rank: int
    attempt: int
    window: int | None = None
    state: str
    trigger: str | None = None
    reason: str | None = None
    first_step: int | None = None
    end_step: int | None = None
    start_mono_ns: int | None = None
    end_mono_ns: int | None = None
    lead_ns: int = 0  # what the training thread stood still for right before it began
    tail_ns: int = 0  # the same right after it ended
    stall_ns: int | None = None
    path: Path | None = None
    raw_bytes: int | None = None
    et_path: Path | None = None
    event_count: int | None = None
    stem: str | None = None


def recorded_windows(files: RunFiles) -> list[TraceWindow]:
    """What ranks and agents said of windows, also of those that were refused or failed."""
    # What ranks said of their windows in sidecars, by stem; finished ones first.
    written, dropped = (
        [line for node in files.nodes for line in node.of_type(kind)]
        for kind in ("trace_written", "trace_dropped")
    )
    parts: dict[str, Mapping[str, Any]] = {
        text(line.get("stem")) or "": line["part"]
        for line in written if isinstance(line.get("part"), dict)
    }  # fmt: skip
    for waiting in complete_parts(files.paths):
        with contextlib.suppress(RunFormatError):  # damaged: the rank's own line is what there is
            parts.setdefault(waiting.stem.text, waiting.sidecar_content())
    said = {stem: facts for stem, facts in parts.items() if parse_stem(stem)}
    found = [_window(files, line, said, rank=rank.rank, attempt=rank.attempt)
             for rank in files.ranks for line in rank.of_type("trace_window")]  # fmt: skip
    seen = {window.stem for window in found}
    silent = dict(said)
    for line in dropped:
        silent.setdefault(text(line.get("stem")) or "", {**line, "state": "failed"})
    for stem, line in silent.items():
        name = parse_stem(stem)
        if stem not in seen and name is not None:  # the rank was killed before it could say so
            attempts = [r.attempt for r in files.ranks
                        if r.rank == name.rank and r.report.get("pid") == name.pid]  # fmt: skip
            attempt = attempts[-1] if attempts else integer(line.get("attempt")) or 0
            own = {**line, "stem": stem}
            found.append(_window(files, own, said, rank=name.rank, attempt=attempt))
    return found


def all_windows(
    files: RunFiles, recorded: Sequence[TraceWindow], step_counts: Mapping[Key, int]
) -> list[TraceWindow]:
    """Windows of all ranks, by rank, attempt and number; also those that were never reached."""
    told = {(window.rank, window.attempt) for window in recorded}
    found = [*recorded, *_not_reached(files, step_counts, told)]
    return sorted(found, key=lambda w: (w.rank, w.attempt, w.window or 0))


def window_frame(windows: Iterable[TraceWindow], offsets_ns: Mapping[Key, int]) -> pl.DataFrame:
    """Trace windows of all ranks."""
    rows = []
    for each in windows:
        offset = offsets_ns.get((each.rank, each.attempt))
        row = {name: getattr(each, name, None) for name in WINDOW_SCHEMA}
        row |= {"start_ns": _sum(each.start_mono_ns, offset),
                "end_ns": _sum(each.end_mono_ns, offset)}  # fmt: skip
        for path, size in (("path", "bytes"), ("et_path", "et_bytes")):
            if (file := getattr(each, path)) is not None:
                row |= {path: str(file), size: file_size(file)}
        rows.append(row)
    return pl.DataFrame(rows, schema=WINDOW_SCHEMA)


def traced_steps(rank: RankSegments, windows: Sequence[TraceWindow]) -> Bools:
    """Which steps of a rank a window touched, with what it made the training thread wait.

    Of a window that was planned also the `LEAD_STEPS` before it, in which torch.profiler is
    rehearsed and warmed up.
    """
    steps = rank.found.steps
    traced = np.zeros(len(steps.start_ns), dtype=np.bool_)
    # Whether steps were recorded from the first one on, so that their numbers are the window's.
    start = rank.files.first("record_start")
    counts_all = bool(start) and not integer(start.get("optimizer_steps_before"))
    for each in windows:
        if each.start_mono_ns is not None and each.end_mono_ns is not None:
            begin, end = each.start_mono_ns - each.lead_ns, each.end_mono_ns + each.tail_ns
            inside = np.minimum(steps.end_ns, end) - np.maximum(steps.start_ns, begin)
            touched = inside > TRACED_RATIO * np.maximum(steps.end_ns - steps.start_ns, 1)
            lead = LEAD_STEPS if each.trigger in ("option", "request") else 0
            if len(at := np.flatnonzero(touched)):
                touched[max(int(at[0]) - lead, 0) : at[0]] = True
            traced |= touched
        elif each.first_step is not None and each.end_step is not None and counts_all:
            first, end = each.first_step - LEAD_STEPS, each.end_step + 1  # and the one that waits
            traced[max(first - rank.first_step, 0) : max(end - rank.first_step, 0)] = True
    return traced


def _window(
    files: RunFiles, line: Mapping[str, Any], said: Mapping[str, Mapping[str, Any]], *, rank: int,
    attempt: int,
) -> TraceWindow:  # fmt: skip
    """From a rank's line, and what its sidecar adds."""
    stem = text(line.get("stem"))
    facts = said.get(stem or "", {})
    both = {**line, **facts}
    reason, cut = text(line.get("reason")), text(facts.get("cut"))
    trigger = next((r for r in (text(both.get("trigger")), text(facts.get("reason")), reason)
                    if r in TRIGGERS), None)  # fmt: skip
    steps = both.get("steps")
    first, end = steps if isinstance(steps, list) and len(steps) == 2 else (None, None)
    stalls = {name: integer(both.get(name)) for name in _STALLS}
    known = [ns for ns in stalls.values() if ns is not None]
    said_ns = integer(line.get("stall_ns"))  # with what the rehearsal before it took
    trace, execution = _trace_files(files, stem)
    return read_record(
        TraceWindow, both, rank=rank, attempt=attempt,
        state=text(line.get("state")) or ("cut" if cut else "recorded"), trigger=trigger,
        reason=cut if reason in (None, *TRIGGERS) else reason, first_step=integer(first),
        end_step=integer(end), lead_ns=stalls["start_ns"] or 0,
        tail_ns=(stalls["stop_ns"] or 0) + (stalls["export_ns"] or 0),
        stall_ns=sum(known) if said_ns is None and known else said_ns, stem=stem, path=trace,
        et_path=execution,
    )  # fmt: skip


def _trace_files(files: RunFiles, stem: str | None) -> tuple[Path | None, Path | None]:
    """The trace and the execution trace that there are: finished, or raw with a sidecar."""
    name = parse_stem(stem or "")
    if name is None or name.text != stem:
        return None, None
    part = Part(files.paths, name)
    has_raw = part.sidecar.exists()
    trace, execution = (
        whole if whole.is_file() else raw if has_raw and raw.is_file() else None
        for whole, raw in ((part.trace, part.raw), (part.et, part.et_raw))
    )
    return trace, execution


def _not_reached(
    files: RunFiles, step_counts: Mapping[Key, int], told: set[Key]
) -> Iterator[TraceWindow]:
    """Ranks that ended before their window began, where one was asked for."""
    if files.about.options.get("trace") is not True:
        return
    steps = files.about.options.get("steps")
    head = steps.partition(":")[0] if isinstance(steps, str) else ""
    first = int(head) if head.isdecimal() and len(head) < 10 else None
    for rank in files.ranks:
        ended = files.about.end_wall_ns is not None or rank.of_type("record_end")
        if (rank.rank, rank.attempt) not in told and ended:
            why = _why_not_reached(rank, step_counts.get((rank.rank, rank.attempt)), first)
            yield TraceWindow(rank=rank.rank, attempt=rank.attempt, state=NOT_REACHED, reason=why)


def _why_not_reached(rank: RankFiles, step_count: int | None, first: int | None) -> str:
    if fault := rank.first("hook_error"):
        return f"a fault in the hook: {text(fault.get('reason'))}"
    if step_count is None:
        return "the rank ended, and its steps cannot be read"
    before = integer(rank.first("record_start").get("optimizer_steps_before")) or 0
    where = f"step {first}" if first is not None else "the window began"
    return f"the job ended at step {step_count + before}, before {where}"


def _sum(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else integer(left + right)
