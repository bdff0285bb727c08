"""Traces processes through Kineto: sends the request, waits for the files, completes them."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from haiprof.agent.kineto_protocol import WARMUP_S, KinetoWindow, NoAgentError, ask_agent
from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.safe_files import (
    PRIVATE,
    make_folder,
    make_named_folder,
    remove_file,
    remove_folder,
)
from haiprof.linux.procfs import environment
from haiprof.live.kineto import dynolog
from haiprof.live.kineto.finish import Request, finish_trace
from haiprof.live.kineto.processes import KinetoProcess
from haiprof.live.kineto.result import KinetoTraces, ProcessTrace
from haiprof.live.trace_now import next_window
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.raw_traces import Part, parse_stem
from haiprof.trace_format.kineto.complete import EmptyTraceError

ASK_EVERY_S = 5.0
"""How often a process asks. Source: libkineto, ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS."""
WAIT_S = 120.0
GRACE_S = 30.0
"""Time after the first trace: ranks of one job step together, and get a request within 5 s."""
COMPRESS_S = 60.0
ATTEMPTS = 4
FIRST_ROUNDUP = 10
_SPREADS = 8  # roundup in steps per time between the first and the last rank that gets the request
_POLL_S = 0.1
_SETTLE_S = 2.0
_AGAIN = ("the ranks did not begin at the same step", "no training was in the window")
_NS_PER_S = 1_000_000_000


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


@dataclass(slots=True)
class _Asked:
    """A pending request."""

    id: str
    folder: Path
    processes: Sequence[KinetoProcess]
    endpoint: tuple[str, int] | None
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
    roundup = FIRST_ROUNDUP if len(processes) > 1 else 1
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
            roundup = _larger(roundup, found, spread_ns)
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
        asked = _Asked(request.id, raw, processes, trace_request.endpoint)
        window = KinetoWindow(
            steps=trace_request.steps, roundup=roundup, time_s=trace_request.time_s,
            options=trace_request.options, start_wall_ns=_start(trace_request, processes),
        )  # fmt: skip
        limit_s = trace_request.timeout_s or WAIT_S + 3 * trace_request.time_s
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
    spread_ns = max(heard) - min(heard) if heard else round(ASK_EVERY_S * _NS_PER_S)
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
    if not trace_request.time_s or (len(processes) == 1 and trace_request.endpoint is None):
        return 0
    return time.time_ns() + round((ASK_EVERY_S + WARMUP_S + 1.0) * _NS_PER_S)


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
            "expires_wall_ns": time.time_ns() + round(limit_s * _NS_PER_S),
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
        time.sleep(_POLL_S)
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
                if state == "over":
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


def _larger(roundup: int, found: KinetoTraces, spread_ns: int) -> int:
    """A roundup of which all processes will most probably hear in time."""
    steps = [each.step_ns for each in found.done if each.step_ns]
    needed = _SPREADS * spread_ns / min(steps) if steps else 0
    return max(2 * roundup, math.ceil(needed))


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
        time.sleep(_POLL_S)
    return replace(found, processes=tuple(_locate(each) for each in found.processes))


def _locate(each: ProcessTrace) -> ProcessTrace:
    path = Path(each.path or "")
    stem = parse_stem(path.name)
    if each.path is None or path.exists() or stem is None:
        return each
    return replace(each, path=str(Part(RunPaths(path.parent.parent), stem).raw))
