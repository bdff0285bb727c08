"""The frame of ranks: who reported in, what was recorded, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl

from haiprof.run_analysis.compilations import compile_columns
from haiprof.run_analysis.nesting import MODULE_KINDS, Bools, kind_table
from haiprof.run_analysis.run_files import RankFiles, integer, number, text
from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_analysis.step_tokens import BY_MARK
from haiprof.run_analysis.steps import NOGRAD_PHASE, PHASES, Segmentation

RANK_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "rank": pl.Int64,
    "attempt": pl.Int64,
    "host": pl.String,
    "pid": pl.Int64,
    "local_rank": pl.Int64,
    "world_size": pl.Int64,
    "python": pl.String,
    "torch": pl.String,
    "device": pl.String,
    "gpu_uuid": pl.String,
    "step_count": pl.Int64,
    "eval_ns": pl.Int64,
    "nograd_ns": pl.Int64,
    "compile_ns": pl.Int64,
    "eval_compile_ns": pl.Int64,
    "unfinished_micro_step_count": pl.Int64,
    "record_start_ns": pl.Int64,
    "record_end_ns": pl.Int64,
    "recording_ended": pl.String,
    "cost_ns_per_step": pl.Float64,
    "cost_ratio": pl.Float64,
    "notes": pl.List(pl.String),
}


def rank_frame(rows: Iterable[Mapping[str, object]]) -> pl.DataFrame:
    """Ranks of the run, by rank and attempt."""
    return pl.DataFrame(list(rows), schema=RANK_SCHEMA, orient="row")


def rank_row(files: RankFiles, segments: RankSegments | None) -> dict[str, object]:
    """The row of one rank; without segments where its spans cannot be read."""
    report = files.report
    row: dict[str, object] = {"rank": files.rank, "attempt": files.attempt}
    row.update({n: integer(report.get(n)) for n in ("pid", "local_rank", "world_size")})
    row.update({n: text(report.get(n)) for n in ("host", "python", "torch", "device", "gpu_uuid")})
    if segments is not None:
        found = segments.found
        row["step_count"] = len(found.steps.start_ns)
        row["eval_ns"] = int((found.evaluation_end_ns - found.evaluation_start_ns).sum())
        row["nograd_ns"] = int(found.nested.self_ns[_is_nograd(found)].sum())
        row |= compile_columns(
            files,
            found.evaluation_start_ns,
            found.evaluation_end_ns,
            wall_offset_ns=segments.wall_offset_ns,
        )
        row["unfinished_micro_step_count"] = found.unfinished_micro_step_count
    row.update(_recording(files, segments))
    row.update(_cost(files, segments))
    row["notes"] = list(_rank_notes(files, segments))
    return row


def _is_nograd(found: Segmentation) -> Bools:
    """Calls without gradients in a training step, which are no evaluation."""
    inside: Bools = (found.phase == NOGRAD_PHASE) & (found.step >= 0)
    return inside


def _recording(files: RankFiles, segments: RankSegments | None) -> dict[str, object]:
    offset = files.clock_offset_ns if segments is None else segments.wall_offset_ns
    marks: dict[str, object] = {}
    for name in ("record_start", "record_end"):
        lines = files.of_type(name)
        line = lines[0 if name == "record_start" else -1] if lines else {}
        time = integer(line.get("time_ns"))
        known = time is not None and offset is not None
        marks[f"{name}_ns"] = integer((time or 0) + (offset or 0)) if known else None
        marks["recording_ended"] = text(line.get("reason"))
    return marks


def _cost(files: RankFiles, segments: RankSegments | None) -> dict[str, object]:
    """From the last cost line, whose numbers are cumulative."""
    lines = files.of_type("cost")
    steps = segments.found.steps.step_ns if segments is not None else None
    if not lines or segments is None or steps is None or not len(steps):
        return {"cost_ns_per_step": None, "cost_ratio": None}
    spent = _spent_ns(lines[-1], _inner_calls(files, segments))
    per_step = None if spent is None else spent / len(steps)
    mean = float(steps.mean())
    return {
        "cost_ns_per_step": per_step,
        "cost_ratio": per_step / mean if per_step is not None and mean else None,
    }


def _spent_ns(line: Mapping[str, Any], calls: int) -> float | None:
    """Calibrated time of all spans and module calls, and the CPU time of draining and sampling."""
    names = ("event_count", "event_ns", "module_call_ns", "drain_cpu_ns", "sampling_cpu_ns")
    events, event_ns, call_ns, *beside = (number(line.get(name)) for name in names)
    if events is None or event_ns is None:
        return None
    return events * event_ns + calls * (call_ns or 0.0) + sum(ns or 0.0 for ns in beside)


def _inner_calls(files: RankFiles, segments: RankSegments) -> int:
    """Calls of modules inside the roots, about: each passes through the hook's first line."""
    spans = segments.found.nested.spans
    roots = np.bincount(spans.tag[kind_table(*MODULE_KINDS)[spans.kind]].astype(np.int64))
    inner = {integer(x.get("tag")): integer(x.get("module_count")) for x in files.of_type("root")}
    return sum(int(roots[t]) * ((inner.get(t) or 1) - 1) for t in np.flatnonzero(roots).tolist())


def _rank_notes(files: RankFiles, segments: RankSegments | None) -> tuple[str, ...]:
    """Everything that a reader of this rank's numbers should know."""
    notes = list(files.notes)
    if segments is not None:
        notes += segments.notes
        left = segments.found.unfinished_micro_step_count
        if left:
            count = "1 micro-step" if left == 1 else f"{left} micro-steps"
            verb = "belongs" if left == 1 else "belong"
            notes.append(f"{count} after the last step {verb} to no step")
        notes += [
            f"{phase}: {reason}"
            for phase, seen in zip(PHASES, segments.seen.tolist(), strict=True)
            if not seen and not _is_untrained(segments)
            for reason in [_why_missing(files, phase)]
        ]
    patches = files.of_type("patch_failed")
    notes += [f"{line.get('phase')} is not measured: {line.get('reason')}" for line in patches]
    faults = files.of_type("hook_error")
    notes += [f"fault in the hook ({line.get('where')}): {line.get('reason')}" for line in faults]
    notes += [_lost_text(line) for line in files.of_type("descriptor_lost")]
    dropped = [integer(line.get("dropped_bytes")) or 0 for line in files.of_type("cost")[-1:]]
    notes += [f"{count} bytes of records did not fit on the disk" for count in dropped if count]
    return tuple(text(note) or "" for note in notes)


def _is_untrained(segments: RankSegments) -> bool:
    """Whether steps are no training, which lacks phases by its nature."""
    boundary = segments.found.steps.boundary
    return len(boundary) > 0 and int(boundary[0]) >= BY_MARK


def _lost_text(line: Mapping[str, Any]) -> str:
    went_on = line.get("reopened") is True
    return f"the job closed haiprof's descriptor of {line.get('file')}: " + (
        "it was opened again, nothing is missing" if went_on else "what came after is missing"
    )


def _why_missing(files: RankFiles, phase: str) -> str:
    """Why a phase is null in this rank."""
    phases = files.report.get("phases")
    reason = text(phases.get(phase)) if isinstance(phases, dict) else None
    if reason and reason != "ok":
        return reason
    return {
        "dataloader": "no torch DataLoader ran in a training step",
        "forward": "no module call seen in a training step (compiled whole, or plain functions)",
        "backward": "no call of the autograd engine seen in a training step",
        "optimizer": "no torch optimizer stepped (compiled whole, or another library's)",
    }[phase]
