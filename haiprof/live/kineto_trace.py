"""Traces processes through Kineto: sends the request, waits for the files, completes them."""

from __future__ import annotations

import itertools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.agent.kineto_protocol import WARMUP_S, KinetoWindow, NoAgentError, ask_agent
from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.options import safe_name
from haiprof.base.safe_files import (
    PRIVATE,
    make_folder,
    make_named_folder,
    remove_file,
    remove_folder,
    whole_file,
)
from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import environment
from haiprof.live import kineto_processes as dynolog
from haiprof.live.kineto_processes import KinetoProcess, KinetoTraces, ProcessTrace
from haiprof.live.trace_now import next_window, wait_until
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import TRACE_SUFFIX, RunPaths
from haiprof.run_format.phase_ranges import NAMES, PhaseRange
from haiprof.run_format.raw_traces import Part, parse_stem
from haiprof.run_format.reader import try_read_json
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
        target = _as_part(request, process, raw, content, stem, steps, phases, said)
    else:
        target = request.folder / f"{stem}{TRACE_SUFFIX}"
        with whole_file(target, below=request.below) as file:
            write_complete(
                raw, file, metadata=content, steps=steps, phases=phases, pid=process.own_pid,
                packed=True,
            )  # fmt: skip
    remove_file(path, below=path.parent)
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
        report = try_read_json(paths.report)
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
    world = report.get("world_size", process.world_size)
    shared = {"rank": process.rank, "world_size": world, "backend": report.get("backend")}
    own = {
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
    return {**({} if process.rank is None else {"distributedInfo": shared}), "haiprof": own}


def _as_part(
    request: Request, process: KinetoProcess, raw: RawTrace, content: Mapping[str, Any], name: str,
    steps: list[Step], phases: list[PhaseRange], report: Mapping[str, Any],
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


ASK_EVERY_S = 5.0
"""How often a process asks. Source: libkineto, ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS."""
WAIT_S = 120.0
GRACE_S = 30.0
"""Time after the first trace: ranks of one job step together, and get a request within 5 s."""
COMPRESS_S = 60.0
ATTEMPTS = 4
FIRST_ROUNDUP = 10
_SPREADS = 8  # roundup in steps per time between the first and the last rank that gets the request
_TRACE_POLL_S = 0.1
_SETTLE_S = 2.0
_AGAIN = ("the ranks did not begin at the same step", "no training was in the window")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A trace request."""

    steps: int = 5
    time_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Switches as in `agent.kineto_protocol.trace_config`."""
    timeout_s: float | None = None
    endpoint: tuple[str, int] | None = None
    """Of a dynolog daemon; None asks haiprof's own agent."""
    start_wall_ns: int = 0
    """Unix time from which on it begins, the same on all nodes; 0 is at once."""
    roundup: int = 0
    """Iterations begin at a multiple of it; 0 lets haiprof choose."""


@dataclass(slots=True)
class _Asked:
    """A pending request."""

    id: str
    folder: Path
    processes: Sequence[KinetoProcess]
    endpoint: tuple[str, int] | None
    start_wall_ns: int = 0
    """When the window begins; before it a process that has the request still asks for the next."""
    refused: dict[int, str] = field(default_factory=dict)
    """Why a process will not be traced, by pid."""
    over_s: dict[int, float] = field(default_factory=dict)
    """Since when a process asks for the next request, by pid."""
    states: dict[int, str] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)

    def file(self, process: KinetoProcess) -> Path:
        """Where the process puts its trace, by one rename."""
        return self.folder / f"{self.id}_{process.own_pid}.json"

    def waiting(self) -> list[KinetoProcess]:
        """Processes that may still write a trace."""
        last = time.monotonic() - _SETTLE_S
        return [
            process
            for process in self.processes
            if process.pid not in self.refused
            and self.over_s.get(process.pid, last + 1) > last
            and not self.file(process).exists()
        ]


def trace_processes(
    processes: Sequence[KinetoProcess],
    trace_request: TraceRequest,
    *,
    run: RunPaths | None,
    output: Path | None,
    progress: Callable[[str], None] = lambda _: None,
) -> KinetoTraces:
    """Traces processes, and waits for the traces.

    Ranks begin at the same iteration: at the next multiple of a number. Where one rank got the
    request before that iteration and another after it, it is repeated with a larger number.
    """
    if not processes:
        raise MissingDataError(
            "no rank on this node speaks Kineto's protocol",
            hint="haiprof --kineto train.py, or KINETO_USE_DAEMON=1",
        )
    if run is None and output is None:
        raise UsageError("a job that does not run under haiprof has no run directory: name -o DIR")
    folder = (output or (run.traces if run is not None else Path())).absolute()
    roundup = trace_request.roundup or (FIRST_ROUNDUP if len(processes) > 1 else 1)
    if not trace_request.time_s:  # Kineto begins iterations at no time of its own
        wait_until(trace_request.start_wall_ns, ASK_EVERY_S, progress)
    for attempt in range(ATTEMPTS):
        request = Request(
            id=f"kineto-{time.time_ns() // 1_000_000:x}-{os.urandom(2).hex()}",
            backend="dynolog" if trace_request.endpoint else "kineto",
            options=trace_request.options, folder=folder, run=run, into_run=output is None,
            needs_steps=not trace_request.time_s,
            window=0 if run is None else next_window(run),
        )  # fmt: skip
        found, spread_ns = _trace_once(processes, trace_request, request, roundup, progress)
        missed = any(each.optimizer_step_count == 0 for each in found.processes)
        apart = found.aligned is False and not trace_request.time_s
        if not (missed or apart) or attempt == ATTEMPTS - 1:
            break
        _remove(found)
        if apart:
            # A roundup of which all processes will most probably hear in time.
            steps = [each.step_ns for each in found.done if each.step_ns]
            needed = _SPREADS * spread_ns / min(steps) if steps else 0
            roundup = max(2 * roundup, math.ceil(needed))
        progress(f"{_AGAIN[missed]}: again, at a multiple of {roundup}")
    return _await_compression(found, request, progress)


def _trace_once(
    processes: Sequence[KinetoProcess],
    trace_request: TraceRequest,
    request: Request,
    roundup: int,
    progress: Callable[[str], None],
) -> tuple[KinetoTraces, int]:
    """One attempt, and the time between the processes' receipt of it in ns."""
    with _raw_folder(request) as raw:
        start_ns = _start(trace_request, processes)
        asked = _Asked(request.id, raw, processes, trace_request.endpoint, start_ns)
        window = KinetoWindow(
            steps=trace_request.steps, roundup=roundup, time_s=trace_request.time_s,
            options=trace_request.options, start_wall_ns=start_ns,
        )  # fmt: skip
        ahead_s = max((trace_request.start_wall_ns - time.time_ns()) / NS_PER_S, 0.0)
        limit_s = ahead_s + (trace_request.timeout_s or WAIT_S + 3 * trace_request.time_s)
        _ask(asked, window.text(str(raw / f"{request.id}.json")), limit_s)
        progress(f"asked {len(processes)} processes, which look every 5 s: up to {limit_s:.0f} s")
        try:
            _wait(asked, limit_s, progress)
        finally:
            _cancel(asked)
        if len(asked.waiting()) < len(processes):
            progress("completing the traces")
        ends = [_as_ended(process, asked, request) for process in processes]
    heard = list(asked.delivered.values())
    spread_ns = max(heard) - min(heard) if heard else round(ASK_EVERY_S * NS_PER_S)
    return KinetoTraces(
        folder=str(request.folder), backend=request.backend, processes=tuple(ends)
    ), spread_ns


@contextmanager
def _raw_folder(request: Request) -> Iterator[Path]:
    """The folder that the processes write to: beside the traces, for this request only."""
    if request.run is not None and request.into_run:
        parent, below = request.run.trace_parts, request.run.root
    else:
        parent = below = request.folder
        make_named_folder(parent)
    folder = parent / f".{request.id}"
    make_folder(folder, below=below, mode=PRIVATE, new=True)
    try:
        yield folder
    finally:
        with suppress(OSError):
            remove_folder(folder, below=below)  # a trace that is written late stays


def _start(trace_request: TraceRequest, processes: Sequence[KinetoProcess]) -> int:
    """When a window of seconds begins: once all have received it, and have warmed up."""
    alone = len(processes) == 1 and trace_request.endpoint is None
    if not trace_request.time_s or (alone and not trace_request.start_wall_ns):
        return 0
    soonest = time.time_ns() + round((ASK_EVERY_S + WARMUP_S + 1.0) * NS_PER_S)
    return max(soonest, trace_request.start_wall_ns)


def _ask(asked: _Asked, text: str, limit_s: float) -> None:
    if asked.endpoint is not None:
        jobs = {_job(process.pid) for process in asked.processes}
        for job in jobs:
            pids = [process.pid for process in asked.processes if _job(process.pid) == job]
            matched, triggered = dynolog.trigger(asked.endpoint, text, job=job, pids=pids)
            for pid in set(pids) - triggered:
                asked.refused[pid] = (
                    "dynolog knows it, and another trace of it is under way"
                    if pid in matched
                    else "dynolog does not know it: it was started before the daemon, or elsewhere"
                )
        return
    for address in {process.address for process in asked.processes}:
        question = {
            "do": "trace", "id": asked.id, "text": text,
            "pids": [p.pid for p in asked.processes if p.address == address],
            "expires_wall_ns": time.time_ns() + round(limit_s * NS_PER_S),
        }  # fmt: skip
        ask_agent(address, question)


def _job(pid: int) -> int:
    text = environment(pid).get("SLURM_JOB_ID", "")
    return int(text) if text.isdecimal() else 0


def _wait(asked: _Asked, limit_s: float, progress: Callable[[str], None]) -> None:
    """Waits until all have written their trace, or none is expected any more."""
    limit, told, look = time.monotonic() + limit_s, 0, 0.0
    while waiting := asked.waiting():
        now = time.monotonic()
        done = len(asked.processes) - len(asked.refused) - len(waiting)
        if done > told:
            told, limit = done, min(limit, now + GRACE_S) if told == 0 else limit
            progress(f"{done} of {len(asked.processes)} traces are complete")
        if now > limit or not any(Path(f"/proc/{p.pid}").exists() for p in waiting):
            return
        if asked.endpoint is None and now > look:
            look = now + 1.0
            _look(asked)
        time.sleep(_TRACE_POLL_S)
    _look(asked)


def _look(asked: _Asked) -> None:
    """Asks the agents how far they are."""
    if asked.endpoint is not None:
        return
    for address in {process.address for process in asked.processes}:
        with suppress(NoAgentError):  # the job has ended, and its launcher with it
            said = ask_agent(address, {"do": "state", "id": asked.id})
            asked.states |= {int(pid): str(state) for pid, state in said["states"].items()}
            for pid, state in asked.states.items():
                if state == "over" and time.time_ns() > asked.start_wall_ns:
                    asked.over_s.setdefault(pid, time.monotonic())
            asked.delivered |= {int(p): int(ns) for p, ns in said["delivered_wall_ns"].items()}


def _cancel(asked: _Asked) -> None:
    """Withdraws the request from processes that have not received it yet."""
    if asked.endpoint is not None or not asked.waiting():
        return
    for address in {process.address for process in asked.processes}:
        with suppress(NoAgentError):
            ask_agent(address, {"do": "cancel", "id": asked.id})


def _as_ended(process: KinetoProcess, asked: _Asked, request: Request) -> ProcessTrace:
    silent = ProcessTrace(
        rank=process.rank, host=socket.gethostname(), pid=process.pid, state="silent"
    )
    if process.pid in asked.refused:
        return replace(silent, state="failed", reason=asked.refused[process.pid])
    path = asked.file(process)
    if not path.exists():
        dropped = 0 if asked.states.get(process.pid) == "over" else None
        return replace(silent, reason=_why_silent(process, asked), optimizer_step_count=dropped)
    try:
        return finish_trace(process, path, request)
    except EmptyTraceError:
        remove_file(path, below=path.parent)
        why = "no optimizer stepped in the window"
        return replace(silent, state="failed", reason=why, optimizer_step_count=0)
    except (HaiprofError, OSError) as error:
        return replace(silent, state="failed", reason=f"{error}; as it came: {path}")


def _why_silent(process: KinetoProcess, asked: _Asked) -> str:
    if not Path(f"/proc/{process.pid}").exists():
        return "it has ended"
    if asked.endpoint is not None:
        return "dynolog passed the request on, and no trace came"
    state = asked.states.get(process.pid, "waiting")
    if state == "busy":
        return "a profiler of its own is on: the request was kept back"
    if state == "over":
        return "it dropped the request: a profiler of its own began before the window did"
    if state == "delivered":
        return "it has the request, and made no trace: no optimizer stepped, or not often enough"
    return "it did not ask the agent"


def _remove(found: KinetoTraces) -> None:
    """Removes the traces of an attempt whose ranks are at different steps."""
    for each in found.done:
        path = Path(each.path or "")
        stem = parse_stem(path.name)
        if stem is not None and path.parent.name == "traces":
            part = Part(RunPaths(path.parent.parent), stem)
            for file in (part.sidecar, part.raw):
                remove_file(file, below=part.run.root)
        remove_file(path, below=path.parent)


def _await_compression(
    found: KinetoTraces, request: Request, progress: Callable[[str], None]
) -> KinetoTraces:
    """The same, once the run's launcher has compressed the traces; raw where it does not."""
    limit = time.monotonic() + COMPRESS_S
    waiting = [Path(each.path) for each in found.done if each.path]
    if request.into_run and any(not path.exists() for path in waiting):
        progress("the traces are being compressed")
    while any(not path.exists() for path in waiting) and time.monotonic() < limit:
        time.sleep(_TRACE_POLL_S)
    return replace(found, processes=tuple(_locate(each) for each in found.processes))


def _locate(each: ProcessTrace) -> ProcessTrace:
    path = Path(each.path or "")
    stem = parse_stem(path.name)
    if each.path is None or path.exists() or stem is None:
        return each
    return replace(each, path=str(Part(RunPaths(path.parent.parent), stem).raw))
