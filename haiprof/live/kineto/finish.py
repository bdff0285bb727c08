"""Completes a trace that Kineto wrote like haiprof's own: rank, host, steps, name."""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import HaiprofError
from haiprof.base.options import safe_name
from haiprof.base.safe_files import remove_file, whole_file
from haiprof.live.kineto.processes import KinetoProcess
from haiprof.live.kineto.result import ProcessTrace
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import TRACE_SUFFIX, RunPaths
from haiprof.run_format.phase_ranges import NAMES, PhaseRange
from haiprof.run_format.raw_traces import Part, parse_stem
from haiprof.run_format.reader import read_json
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.writer import write_json
from haiprof.trace_format.kineto.complete import (
    EmptyTraceError,
    RawTrace,
    Step,
    read_raw,
    write_complete,
)

STEPS_WAIT_S = 5.0
"""A rank writes its steps down about once a second."""
_POLL_S = 0.5
_INSIDE_RATIO = 0.9
"""Share of a step within the window from which it is marked. Own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, the same for all processes."""

    id: str
    backend: str
    options: Mapping[str, Any]
    folder: Path
    """Where finished traces go."""
    run: RunPaths | None
    """The run that the job records into; None where it does not run under haiprof."""
    window: int
    """Number of the window in the run."""
    needs_steps: bool
    """Whether steps were asked for, not seconds."""
    into_run: bool
    """Whether the traces become windows of that run."""

    @property
    def below(self) -> Path:
        """The boundary of `safe_files`: the run, or the folder that the user named."""
        return self.run.root if self.run is not None and self.into_run else self.folder


def finish_trace(process: KinetoProcess, path: Path, request: Request) -> ProcessTrace:
    """Completes one trace and removes the raw one."""
    raw = read_raw(path)
    if request.needs_steps and not raw.optimizer_ends_wall_ns:
        raise EmptyTraceError(f"{path}: no optimizer stepped in it")
    said = {} if request.run is None else _report(request.run, process)
    steps, why_not = _steps(request.run, said, raw)
    phases = _phases(request.run, said, raw) if steps and request.run is not None else []
    host = socket.gethostname()
    known = process.rank is not None
    owner = f"rank{process.rank}_{safe_name(host)}_{process.pid}" if known else None
    stem = f"{owner or f'{safe_name(host)}_{process.pid}'}.{raw.start_wall_ns}"
    content = _metadata(process, request, raw, said, steps=steps, why_not=why_not)
    if request.into_run and request.run is not None and known:
        target = _as_part(request, process, raw, content, stem, steps, phases)
    else:
        target = request.folder / f"{stem}{TRACE_SUFFIX}"
        with whole_file(target, below=request.below) as file:
            write_complete(
                raw, file, metadata=content, steps=steps, phases=phases, pid=process.own_pid,
                packed=True,
            )  # fmt: skip
    remove_file(path, below=path.parent)
    return _result(process, raw, host=host, target=target, steps=steps, why_not=why_not)


def _result(
    process: KinetoProcess, raw: RawTrace, *, host: str, target: Path, steps: list[Step],
    why_not: str | None,
) -> ProcessTrace:  # fmt: skip
    ends = raw.optimizer_ends_wall_ns
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    return ProcessTrace(
        rank=process.rank,
        host=host,
        pid=process.pid,
        state="done",
        path=str(target),
        steps=(steps[0].number, steps[-1].number + 1) if steps else None,
        steps_reason=why_not,
        optimizer_step_count=len(ends),
        start_wall_ns=raw.start_wall_ns,
        end_wall_ns=raw.end_wall_ns,
        first_optimizer_wall_ns=ends[0] if ends else None,
        step_ns=round(statistics.median(gaps)) if gaps else None,
    )


def _report(run: RunPaths, process: KinetoProcess) -> dict[str, Any]:
    """rank.json of the process, with its attempt; empty where it has not reported in."""
    for rank, attempt, paths in reversed(run.rank_folders()):
        try:
            report = read_json(paths.report)
        except HaiprofError:
            continue
        if rank == process.rank and report.get("pid") == process.pid:
            return {**report, "attempt": attempt}
    return {}


def _steps(
    run: RunPaths | None, report: Mapping[str, Any], raw: RawTrace
) -> tuple[list[Step], str | None]:
    """The steps that haiprof recorded within the window, or why there are none."""
    if run is None:
        return [], "the job does not run under haiprof, which counts the steps"
    limit = time.monotonic() + STEPS_WAIT_S
    while True:
        frame = _frame(run, report)
        last = None if frame is None or frame.is_empty() else frame["end_ns"].max()
        if (isinstance(last, int) and last >= raw.end_wall_ns) or time.monotonic() > limit:
            break
        time.sleep(_POLL_S)
    if frame is None or frame.is_empty():
        return [], "haiprof has recorded no step of this rank"
    inside = pl.min_horizontal("end_ns", pl.lit(raw.end_wall_ns)) - pl.max_horizontal(
        "start_ns", pl.lit(raw.start_wall_ns)
    )
    own = frame.filter(inside > _INSIDE_RATIO * (pl.col("end_ns") - pl.col("start_ns")))
    steps = [
        Step(
            number=number,
            start_wall_ns=max(start, raw.start_wall_ns),
            end_wall_ns=min(end, raw.end_wall_ns),
        )
        for number, start, end in own.select("step", "start_ns", "end_ns").rows()
    ]
    return steps, None if steps else "haiprof has recorded no whole step within the window"


def _phases(run: RunPaths, report: Mapping[str, Any], raw: RawTrace) -> list[PhaseRange]:
    """The forward and backward passes that haiprof recorded, whole ones within the window."""
    try:
        spans = RunFrames(run.root).phases({report.get("rank", -1)})
    except HaiprofError:
        return []
    own = spans.filter(
        (pl.col("attempt") == report.get("attempt", 0))
        & pl.col("phase").is_in(NAMES)
        & (pl.col("start_ns") >= raw.start_wall_ns)
        & (pl.col("start_ns") + pl.col("duration_ns") <= raw.end_wall_ns)
    )
    return [
        PhaseRange(name=name, start_wall_ns=start, duration_ns=duration)
        for name, start, duration in own.select("phase", "start_ns", "duration_ns").rows()
    ]


def _frame(run: RunPaths, report: Mapping[str, Any]) -> pl.DataFrame | None:
    try:
        steps = RunFrames(run.root).steps()
    except HaiprofError:
        return None
    own = steps.filter(
        (pl.col("rank") == report.get("rank", -1)) & (pl.col("attempt") == report.get("attempt", 0))
    )
    return own.with_columns(end_ns=pl.col("start_ns") + pl.col("step_ns"))


def _metadata(
    process: KinetoProcess, request: Request, raw: RawTrace, report: Mapping[str, Any], *,
    steps: list[Step], why_not: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The top-level metadata of haiprof's own traces."""
    content: dict[str, Any] = {}
    world = report.get("world_size", process.world_size)
    if process.rank is not None:
        content["distributedInfo"] = {
            "rank": process.rank, "world_size": world, "backend": report.get("backend"),
        }  # fmt: skip
    content["haiprof"] = {
        "run": None if request.run is None else request.run.root.name,
        "rank": process.rank,
        "world_size": world,
        "host": socket.gethostname(),
        "pid": process.pid,
        "gpu_uuid": report.get("gpu_uuid"),
        "window": request.window,
        "steps": [steps[0].number, steps[-1].number + 1] if steps else None,
        "steps_reason": why_not,
        "clock": report.get("clock"),
        "reason": "request",
        "recorded_by": request.backend,
        "torch": report.get("torch"),
        "start_wall_ns": raw.start_wall_ns,
    }
    return content


def _as_part(
    request: Request, process: KinetoProcess, raw: RawTrace, content: Mapping[str, Any], name: str,
    steps: list[Step], phases: list[PhaseRange],
) -> Path:  # fmt: skip
    """Stores it like a rank's own raw trace, which the run's launcher compresses."""
    stem = parse_stem(name)
    assert stem is not None, name
    assert request.run is not None, name
    part = Part(request.run, stem)
    with whole_file(part.raw, below=part.run.root) as file:
        write_complete(
            raw, file, metadata=content, steps=steps, phases=phases, pid=process.own_pid,
            packed=False,
        )  # fmt: skip
    report = _report(request.run, process)
    clock = report.get("clock") or {}
    offset = clock["wall_ns"] - clock["mono_ns"] if {"wall_ns", "mono_ns"} <= set(clock) else None
    sidecar: dict[str, Any] = {
        "version": SCHEMA_VERSION, "stem": name, "rank": process.rank,
        **{key: report.get(key) for key in (
            "attempt", "restart", "local_rank", "world_size", "host", "pid", "gpu_uuid")},
        "window": request.window, "reason": "request", "request": request.id,
        "recorded_by": request.backend,
        "steps": content["haiprof"]["steps"],
        "start_mono_ns": None if offset is None else raw.start_wall_ns - offset,
        "end_mono_ns": None if offset is None else raw.end_wall_ns - offset,
        "start_wall_ns": raw.start_wall_ns,
        "options": dict(request.options),
        "event_count": raw.event_count, "cut": None,
        "setup_ns": None, "start_ns": None, "stop_ns": None, "export_ns": None,
        "raw_bytes": part.raw.stat().st_size, "et_bytes": None,
    }  # fmt: skip
    write_json(part.sidecar, sidecar, below=part.run.root)
    return part.trace
