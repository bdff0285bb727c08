"""Traces processes through Kineto: asks, waits, completes; and what dynolog's `dyno` asks for."""

from __future__ import annotations

import gzip
import itertools
import math
import os
import re
import shutil
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.agent.kineto_daemon import (
    ABSTRACT,
    SWITCHES,
    WARMUP_S,
    NoAgentError,
    TraceRequest,
    ask_agent,
    shown_address,
)
from haiprof.base import safe_files
from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.options import safe_name
from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import environment
from haiprof.live.find import Progress
from haiprof.live.kineto_processes import (
    DynologError,
    KinetoProcess,
    KinetoTraces,
    ProcessTrace,
    all_processes,
    call,
    clients_of,
    kineto_addresses,
    trigger,
)
from haiprof.live.trace_now import next_window, wait_for_files, wait_until
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import TRACE_SUFFIX, RunPaths
from haiprof.run_format.phase_ranges import NAMES, PhaseRange
from haiprof.run_format.raw_traces import Part, parse_stem
from haiprof.run_format.reader import try_read_json
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.writer import write_json
from haiprof.trace_format.kineto import complete

STEPS_WAIT_S = 5.0  # A rank writes its steps down about once a second
_POLL_S = 0.5
_INSIDE_RATIO = 0.9  # Share of a step within the window from which it is marked. Own choice.


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


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One attempt at a request, the same for all processes, and what is known of each of them."""

    id: str
    request: TraceRequest
    processes: Sequence[KinetoProcess]
    run: RunPaths | None
    """The run that the job records into; None where it does not run under haiprof."""
    window: int  # Number of the window in the run
    folder: Path  # Where finished traces go
    into_run: bool  # Whether the traces become windows of that run
    raw: Path = Path()  # Where the processes put their traces
    start_wall_ns: int = 0
    """When the window begins; before it a process that has the request still asks for the next."""
    refused: dict[int, str] = field(default_factory=dict)
    """Why a process will not be traced, by pid."""
    over_s: dict[int, float] = field(default_factory=dict)
    """Since when a process asks for the next request, by pid."""
    states: dict[int, str] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)

    @property
    def agents(self) -> set[str]:
        """Addresses of haiprof's agents that pass it on; none where dynolog does."""
        return set() if self.request.endpoint else {each.address for each in self.processes}

    def file(self, process: KinetoProcess) -> Path:
        """Where the process puts its trace, by one rename."""
        return self.raw / f"{self.id}_{process.own_pid}.json"

    def waiting(self) -> list[KinetoProcess]:
        """Processes that may still write a trace."""
        last = time.monotonic() - _SETTLE_S
        over = {pid for pid, since in self.over_s.items() if since <= last}
        left = [each for each in self.processes if each.pid not in over | self.refused.keys()]
        return [each for each in left if not self.file(each).exists()]


def _finish_trace(process: KinetoProcess, attempt: _Attempt) -> ProcessTrace:
    """Completes one trace and removes the raw one."""
    path, run, host = attempt.file(process), attempt.run, socket.gethostname()
    raw = complete.read_raw(path)
    if not attempt.request.time_s and not raw.optimizer_ends_wall_ns:
        raise complete.EmptyTraceError(f"{path}: no optimizer stepped in it")
    report = {} if run is None else _report(run, process)
    steps, why_not = _steps(run, report, raw)
    phases = _phases(run, report, raw) if steps and run is not None else []
    numbers = (min(steps), max(steps) + 1) if steps else None
    known = "" if process.rank is None else f"rank{process.rank}_"
    stem = f"{known}{safe_name(host)}_{process.pid}.{raw.start_wall_ns}"
    part, below, target = None, attempt.folder, attempt.folder / f"{stem}{TRACE_SUFFIX}"
    if attempt.into_run and run is not None:
        below, part = run.root, _part_of(run.traces / stem) if known else None
    facts = {
        "rank": process.rank, "world_size": report.get("world_size", process.world_size),
        "host": host, "pid": process.pid, "gpu_uuid": report.get("gpu_uuid"),
        "window": attempt.window, "steps": numbers, "reason": "request",
        "recorded_by": attempt.request.backend, "start_wall_ns": raw.start_wall_ns,
    }  # fmt: skip
    with safe_files.whole_file(target if part is None else part.raw, below=below) as file:
        complete.write_complete(
            raw, file, metadata=_metadata(facts, report, run, why_not),
            ranges=[*steps.values(), *phases], pid=process.own_pid, packed=part is None,
        )  # fmt: skip
    if part is not None:  # the run's launcher compresses it, as a rank's own raw trace
        target = part.trace
        clock, recorded = report.get("clock") or {}, (raw.start_wall_ns, raw.end_wall_ns)
        is_known = {"wall_ns", "mono_ns"} <= set(clock)
        start_ns, end_ns = (
            ns - (clock["wall_ns"] - clock["mono_ns"]) if is_known else None for ns in recorded
        )
        content = {
            "version": SCHEMA_VERSION, "stem": part.stem.text, **facts,
            **{key: report.get(key) for key in ("attempt", "restart", "local_rank")},
            "start_mono_ns": start_ns, "end_mono_ns": end_ns,
            "request": attempt.id, "options": dict(attempt.request.options),
            "event_count": raw.event_count, "raw_bytes": part.raw.stat().st_size,
            **dict.fromkeys(("cut", "setup_ns", "start_ns", "stop_ns", "export_ns", "et_bytes")),
        }  # fmt: skip
        write_json(part.sidecar, content, below=below)
    safe_files.remove_file(path, below=path.parent)
    ends = raw.optimizer_ends_wall_ns
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    return ProcessTrace(
        rank=process.rank, host=host, pid=process.pid, state="done", path=str(target),
        steps=numbers, steps_reason=why_not, optimizer_step_count=len(ends),
        start_wall_ns=raw.start_wall_ns, end_wall_ns=raw.end_wall_ns,
        first_optimizer_wall_ns=ends[0] if ends else None,
        step_ns=round(statistics.median(gaps)) if gaps else None,
    )  # fmt: skip


def _report(run: RunPaths, process: KinetoProcess) -> dict[str, Any]:
    """rank.json of the process, with its attempt; empty where it has not reported in."""
    own = [(n, paths) for rank, n, paths in run.rank_folders() if rank == process.rank]
    told = ({**try_read_json(paths.report), "attempt": n} for n, paths in reversed(own))
    return next((report for report in told if report.get("pid") == process.pid), {})


def _steps(
    run: RunPaths | None, report: Mapping[str, Any], raw: complete.RawTrace
) -> tuple[dict[int, PhaseRange], str | None]:
    """The steps that haiprof recorded within the window by number, or why there are none."""
    if run is None:
        return {}, "the job does not run under haiprof, which counts the steps"
    limit = time.monotonic() + STEPS_WAIT_S
    rows: Sequence[tuple[int, int, int]] = []
    end_ns = (pl.col("start_ns") + pl.col("step_ns")).alias("end_ns")
    while True:
        with suppress(HaiprofError):
            steps_of = RunFrames(run.root).steps().filter(_is_of(report))
            rows = steps_of.select("step", "start_ns", end_ns).rows()
        last = max((end for _, _, end in rows), default=0)
        if last >= raw.end_wall_ns or time.monotonic() > limit:
            break
        time.sleep(_POLL_S)
    if not rows:
        return {}, "haiprof has recorded no step of this rank"
    low, high = raw.start_wall_ns, raw.end_wall_ns
    inside = ((number, max(start, low), min(end, high), end - start) for number, start, end in rows)
    steps = {
        number: PhaseRange(
            name=f"ProfilerStep#{number}", start_wall_ns=first, duration_ns=last - first
        )
        for number, first, last, step_ns in inside
        if last - first > _INSIDE_RATIO * step_ns
    }
    return steps, None if steps else "haiprof has recorded no whole step within the window"


def _is_of(report: Mapping[str, Any]) -> pl.Expr:
    rank, attempt = report.get("rank", -1), report.get("attempt", 0)
    return pl.col("rank").eq(rank) & pl.col("attempt").eq(attempt)


def _phases(run: RunPaths, report: Mapping[str, Any], raw: complete.RawTrace) -> list[PhaseRange]:
    """The forward and backward passes that haiprof recorded, whole ones within the window."""
    try:
        spans = RunFrames(run.root).phases({report.get("rank", -1)})
    except HaiprofError:
        return []
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    inside = (start >= raw.start_wall_ns) & (end <= raw.end_wall_ns)
    own = spans.filter(_is_of(report), pl.col("phase").is_in(NAMES), inside)
    rows = own.select(name="phase", start_wall_ns="start_ns", duration_ns="duration_ns")
    return [PhaseRange(**row) for row in rows.iter_rows(named=True)]


def _metadata(
    facts: Mapping[str, Any], report: Mapping[str, Any], run: RunPaths | None, why_not: str | None
) -> dict[str, Any]:
    """The top-level metadata of haiprof's own traces."""
    own = {
        **facts, "run": None if run is None else run.root.name, "steps_reason": why_not,
        **{key: report.get(key) for key in ("clock", "torch")},
    }  # fmt: skip
    if facts["rank"] is None:
        return {"haiprof": own}
    shared = {key: facts[key] for key in ("rank", "world_size")}
    return {"distributedInfo": {**shared, "backend": report.get("backend")}, "haiprof": own}


def trace_processes(
    processes: Sequence[KinetoProcess], trace_request: TraceRequest, *, run: RunPaths | None,
    output: Path | None, progress: Progress = lambda _: None,
) -> KinetoTraces:  # fmt: skip
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
    folder = (output or (run.traces if run else Path())).absolute()
    roundup = trace_request.roundup or (FIRST_ROUNDUP if len(processes) > 1 else 1)
    if not trace_request.time_s:  # Kineto begins iterations at no time of its own
        wait_until(trace_request.start_wall_ns, ASK_EVERY_S, progress)
    for tries in range(ATTEMPTS):
        attempt = _Attempt(
            id=f"kineto-{time.time_ns() // 1_000_000:x}-{os.urandom(2).hex()}",
            request=trace_request, processes=processes, run=run, folder=folder,
            window=0 if run is None else next_window(run), into_run=output is None,
        )  # fmt: skip
        found, spread_ns = _trace_once(attempt, roundup, progress)
        missed = any(each.optimizer_step_count == 0 for each in found.processes)
        apart = found.aligned is False and not trace_request.time_s
        if not (missed or apart) or tries == ATTEMPTS - 1:
            break
        # The traces of an attempt whose ranks are at different steps are removed.
        for path in (Path(each.path) for each in found.done if each.path):
            if path.parent.name == "traces" and (part := _part_of(path)) is not None:
                for file in (part.sidecar, part.raw):
                    safe_files.remove_file(file, below=part.run.root)
            safe_files.remove_file(path, below=path.parent)
        if apart:
            # A roundup of which all processes will most probably hear in time.
            steps = [each.step_ns for each in found.done if each.step_ns]
            needed = _SPREADS * spread_ns / min(steps) if steps else 0
            roundup = max(2 * roundup, math.ceil(needed))
        progress(f"{_AGAIN[missed]}: again, at a multiple of {roundup}")
    if output is not None:
        return found
    wait_for_files([Path(each.path) for each in found.done if each.path], COMPRESS_S, progress)
    located = []
    for each in found.processes:  # raw where the run's launcher has not compressed it
        part = None if each.path is None or Path(each.path).exists() else _part_of(Path(each.path))
        located.append(each if part is None else replace(each, path=str(part.raw)))
    return replace(found, processes=tuple(located))


def _part_of(trace: Path) -> Part | None:
    """The part of a run's window that a trace there becomes; None for other names."""
    stem = parse_stem(trace.name)
    return None if stem is None else Part(RunPaths(trace.parent.parent), stem)


def _trace_once(attempt: _Attempt, roundup: int, progress: Progress) -> tuple[KinetoTraces, int]:
    """One attempt, and the time between the processes' receipt of it in ns."""
    request, processes = attempt.request, attempt.processes
    with _raw_folder(attempt):
        attempt.start_wall_ns = _start(request, processes)
        window = replace(request, roundup=roundup, start_wall_ns=attempt.start_wall_ns)
        ahead_s = max((request.start_wall_ns - time.time_ns()) / NS_PER_S, 0.0)
        limit_s = ahead_s + (request.timeout_s or WAIT_S + 3 * request.time_s)
        _ask(attempt, window.text(str(attempt.raw / f"{attempt.id}.json")), limit_s)
        progress(f"asked {len(processes)} processes, which look every 5 s: up to {limit_s:.0f} s")
        try:
            _wait(attempt, limit_s, progress)
        finally:
            if attempt.waiting():  # withdrawn from those that have not received it yet
                _ask_agents(attempt, "cancel")
        if len(attempt.waiting()) < len(processes):
            progress("completing the traces")
        ends = tuple(_as_ended(process, attempt) for process in processes)
    heard = list(attempt.delivered.values())
    spread_ns = max(heard) - min(heard) if heard else round(ASK_EVERY_S * NS_PER_S)
    folder = str(attempt.folder)
    return KinetoTraces(folder=folder, backend=request.backend, processes=ends), spread_ns


@contextmanager
def _raw_folder(attempt: _Attempt) -> Iterator[None]:
    """The folder that the processes write to: beside the traces, for this attempt only."""
    if attempt.run is not None and attempt.into_run:
        parent, below = attempt.run.trace_parts, attempt.run.root
    else:
        parent = below = attempt.folder
        safe_files.make_named_folder(parent)
    attempt.raw = parent / f".{attempt.id}"
    safe_files.make_folder(attempt.raw, below=below, mode=safe_files.PRIVATE, new=True)
    try:
        yield
    finally:
        with suppress(OSError):
            safe_files.remove_folder(attempt.raw, below=below)  # a trace that is written late stays


def _start(trace_request: TraceRequest, processes: Sequence[KinetoProcess]) -> int:
    """When a window of seconds begins: once all have received it, and have warmed up."""
    alone = len(processes) == 1 and trace_request.endpoint is None
    if not trace_request.time_s or (alone and not trace_request.start_wall_ns):
        return 0
    soonest = time.time_ns() + round((ASK_EVERY_S + WARMUP_S + 1.0) * NS_PER_S)
    return max(soonest, trace_request.start_wall_ns)


def _ask(attempt: _Attempt, text: str, limit_s: float) -> None:
    if attempt.request.endpoint is not None:
        jobs = {_job(process.pid) for process in attempt.processes}
        for job in jobs:
            pids = [process.pid for process in attempt.processes if _job(process.pid) == job]
            matched, triggered = trigger(attempt.request.endpoint, text, job=job, pids=pids)
            for pid in set(pids) - triggered:
                attempt.refused[pid] = (
                    "dynolog knows it, and another trace of it is under way"
                    if pid in matched
                    else "dynolog does not know it: it was started before the daemon, or elsewhere"
                )
    for address in attempt.agents:
        question = {
            "do": "trace", "id": attempt.id, "text": text,
            "pids": [p.pid for p in attempt.processes if p.address == address],
            "expires_wall_ns": time.time_ns() + round(limit_s * NS_PER_S),
        }  # fmt: skip
        ask_agent(address, question)


def _job(pid: int) -> int:
    text = environment(pid).get("SLURM_JOB_ID", "")
    return int(text) if text.isdecimal() else 0


def _wait(attempt: _Attempt, limit_s: float, progress: Progress) -> None:
    """Waits until all have written their trace, or none is expected any more."""
    limit, told, look = time.monotonic() + limit_s, 0, 0.0
    while waiting := attempt.waiting():
        now = time.monotonic()
        done = len(attempt.processes) - len(attempt.refused) - len(waiting)
        if done > told:
            told, limit = done, min(limit, now + GRACE_S) if told == 0 else limit
            progress(f"{done} of {len(attempt.processes)} traces are complete")
        if now > limit or not any(Path(f"/proc/{p.pid}").exists() for p in waiting):
            return
        if now > look:
            look = now + 1.0
            _look(attempt)
        time.sleep(_TRACE_POLL_S)
    _look(attempt)


def _look(attempt: _Attempt) -> None:
    """Asks the agents how far they are."""
    for said in _ask_agents(attempt, "state"):
        attempt.states |= {int(pid): str(state) for pid, state in said["states"].items()}
        for pid, state in attempt.states.items():
            if state == "over" and time.time_ns() > attempt.start_wall_ns:
                attempt.over_s.setdefault(pid, time.monotonic())
        attempt.delivered |= {int(p): int(ns) for p, ns in said["delivered_wall_ns"].items()}


def _ask_agents(attempt: _Attempt, what: str) -> list[dict[str, Any]]:
    """The answers of those that still listen: where the job has ended, its launcher has, too."""
    found = []
    for address in attempt.agents:
        with suppress(NoAgentError):
            found.append(ask_agent(address, {"do": what, "id": attempt.id}))
    return found


def _as_ended(process: KinetoProcess, attempt: _Attempt) -> ProcessTrace:
    pid, path = process.pid, attempt.file(process)
    silent = ProcessTrace(rank=process.rank, host=socket.gethostname(), pid=pid, state="silent")
    if pid in attempt.refused:
        return replace(silent, state="failed", reason=attempt.refused[pid])
    if not path.exists():
        state = attempt.states.get(pid, "")
        why = _WHY_SILENT.get(state, "it did not ask the agent")
        if attempt.request.endpoint is not None:
            why = "dynolog passed the request on, and no trace came"
        if not Path(f"/proc/{pid}").exists():
            why = "it has ended"
        dropped = 0 if state == "over" else None
        return replace(silent, reason=why, optimizer_step_count=dropped)
    try:
        return _finish_trace(process, attempt)
    except complete.EmptyTraceError:
        safe_files.remove_file(path, below=path.parent)
        why = "no optimizer stepped in the window"
        return replace(silent, state="failed", reason=why, optimizer_step_count=0)
    except (HaiprofError, OSError) as error:
        return replace(silent, state="failed", reason=f"{error}; as it came: {path}")


_WHY_SILENT = {
    "busy": "a profiler of its own is on: the request was kept back",
    "over": "it dropped the request: a profiler of its own began before the window did",
    "delivered": "it has the request, and made no trace: no optimizer stepped, or not often enough",
}


AHEAD_MS = 10_000
"""Several nodes begin together so long from now. Source: unitrace.py, --start-time-delay."""
_AT_ONCE = 32
_HOST_LIMIT = 65_536
_KEYS = {name: SWITCHES[name] for name in ("shapes", "memory", "stacks", "flops", "modules")}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrace:
    """The options of `dyno gputrace`."""

    log_file: str
    job_id: int = 0
    pids: tuple[int, ...] = ()  # Only these; empty takes all
    duration_ms: int = 500
    iterations: int = -1  # In place of the duration, where it is more than 0
    start_ms: int = 0  # Unix time at which a duration begins; 0 is at once
    roundup: int = 0  # Iterations begin at a multiple of it; 0 was not given
    limit: int = 0  # Of processes on a node; 0 takes all (dynolog's own default takes three)
    switches: tuple[str, ...] = ()  # Of `shapes`, `memory`, `stacks`, `flops`, `modules`

    def config(self) -> str:
        """As dynolog hands it to Kineto."""
        lines = [f"ACTIVITIES_LOG_FILE={self.log_file}"]
        if self.iterations > 0:
            lines += ["PROFILE_START_ITERATION=0",
                      f"PROFILE_START_ITERATION_ROUNDUP={self.roundup or 1}",
                      f"ACTIVITIES_ITERATIONS={self.iterations}"]  # fmt: skip
        else:
            lines += [f"PROFILE_START_TIME={self.start_ms}",
                      f"ACTIVITIES_DURATION_MSECS={self.duration_ms}"]  # fmt: skip
        on = {name: str(name in self.switches).lower() for name in _KEYS}
        return "\n".join([*lines, *(f"{key}={on[name]}" for name, key in _KEYS.items())])

    def file_of(self, pid: int) -> str:
        """Where Kineto puts the trace of a process: `trace_4711.json`."""
        return self.log_file.replace(".json", f"_{pid}.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What the daemon of one node said."""

    host: str
    answer: Mapping[str, Any] | None = None
    error: str | None = None
    matched: tuple[int, ...] = ()
    triggered: tuple[int, ...] = ()
    files: tuple[str, ...] = ()  # On that node, or in a folder that it shares


def expand_hosts(text: str) -> list[str]:
    """`n[1-3,7],login` as Slurm writes it, in order."""
    parts = re.split(r",(?![^\[\]]*\])", text)
    found = [host for part in parts for host in _expand(part)]
    if not found or len(found) > _HOST_LIMIT or not all(found):
        raise UsageError(f"--hostname {text}: expected hosts, such as n1 or n[01-16,20]")
    return list(dict.fromkeys(found))


def _expand(part: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", part)
    if match is None:
        yield part if re.fullmatch(r"[\w.:-]+", part) else ""
        return
    for each in match[2].split(","):
        first, _, last = each.partition("-")
        width = len(first)
        low, high = int(first or -1), int(last or first or -1)
        if not 0 <= low <= high < low + _HOST_LIMIT:
            yield ""
            return
        for number in range(low, high + 1):
            yield from _expand(f"{match[1]}{number:0{width}d}{match[3]}")


def has_daemon(port: int) -> bool:
    """Whether dynolog answers on this machine."""
    return ask_daemons(["localhost"], port, {"fn": "getStatus"})[0].error is None


def ask_daemons(
    hosts: Sequence[str], port: int, question: Mapping[str, Any] | GpuTrace
) -> list[NodeAnswer]:
    """Asks the daemons of all nodes at the same time; traces of several nodes begin together."""
    if isinstance(question, GpuTrace) and len(hosts) > 1 and not question.start_ms:
        question = replace(question, start_ms=time.time_ns() // 1_000_000 + AHEAD_MS)

    def ask(host: str) -> NodeAnswer:
        try:
            if not isinstance(question, GpuTrace):
                return NodeAnswer(host=host, answer=call((host, port), question))
            matched, triggered = trigger((host, port), question.config(), job=question.job_id,
                                         pids=question.pids, limit=question.limit)  # fmt: skip
        except DynologError as error:
            return NodeAnswer(host=host, error=str(error))
        files = tuple(question.file_of(pid) for pid in sorted(triggered))
        return NodeAnswer(host=host, matched=tuple(sorted(matched)), files=files,
                          triggered=tuple(sorted(triggered)))  # fmt: skip

    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(ask, hosts))


def trace_here(wish: GpuTrace, progress: Progress) -> KinetoTraces:
    """The same of haiprof's agent on this node, whose traces are waited for and completed.

    They are put where dynolog's user expects them: `FILE_PID.json`.
    """
    processes = all_processes(progress, slurm_job=wish.job_id, pids=wish.pids)
    chosen = processes[: wish.limit or None]
    if len(chosen) < len(processes):
        progress(f"--process-limit {wish.limit}: {len(processes) - len(chosen)} are left out")
    folder = Path(wish.log_file).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--log-file {wish.log_file}: {folder} is no folder")
    request = TraceRequest(
        steps=max(wish.iterations, 1), roundup=wish.roundup,
        time_s=0.0 if wish.iterations > 0 else wish.duration_ms / 1000,
        options=dict.fromkeys(wish.switches, True), start_wall_ns=wish.start_ms * 1_000_000,
    )  # fmt: skip
    found = trace_processes(chosen, request, run=None, output=folder, progress=progress)
    return replace(found, processes=tuple(_unpack(each, wish, folder) for each in found.processes))


def _unpack(trace: ProcessTrace, wish: GpuTrace, folder: Path) -> ProcessTrace:
    """The trace where dynolog's user looks for it."""
    if trace.path is None:
        return trace
    place = folder / Path(wish.file_of(trace.pid)).name
    with gzip.open(trace.path) as packed, safe_files.whole_file(place, below=folder) as plain:
        shutil.copyfileobj(packed, plain)
    safe_files.remove_file(Path(trace.path), below=folder)
    return replace(trace, path=str(place))


def agents_here() -> dict[str, list[int] | str]:
    """By address, the processes that haiprof's agents on this node know, or why they do not say."""

    def ask(address: str) -> list[int] | str:
        try:
            return sorted(clients_of(address))
        except NoAgentError as error:
            return str(error)

    return {shown_address(each): ask(each) for each in sorted({ABSTRACT, *kineto_addresses()})}


def check_answers(answers: Sequence[NodeAnswer], *, needs_process: bool) -> None:
    """Fails where a daemon was not reached, or, if asked for, knew no process."""
    lost = [each.host for each in answers if each.error]
    if lost:
        raise HaiprofError(f"{len(lost)} of {len(answers)} nodes did not answer: {lost[0]}, ..."
                           if len(lost) > 1 else f"{lost[0]} did not answer")  # fmt: skip
    if needs_process and any(not each.matched for each in answers):
        raise HaiprofError("no process was matched")
