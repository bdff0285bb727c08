"""Records a running job for a while: on request, by injection, or sampled from outside."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from haiprof.agent.node_agent import Agent
from haiprof.agent.trace_finisher import Finisher
from haiprof.base.errors import HaiprofError, MissingDataError, MissingExtraError, UsageError
from haiprof.base.options import Options
from haiprof.base.safe_files import make_folder, write_file
from haiprof.launch.run_directories import RunCopies, create_run, find_open_folder
from haiprof.linux.processes import Process
from haiprof.live.external_sampling import (
    NO_SPY,
    SampledStacks,
    dump_threads,
    find_spy,
    sample_stacks,
    why_not_enter,
)
from haiprof.live.find import Progress, RunningJob, as_member, ask, members, recording_has_ended
from haiprof.live.trace_now import TraceNow, collect, trace_now, wait
from haiprof.run_analysis.run_files import objects
from haiprof.run_format.boot import BOOT_FOLDER
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.run_format.reader import try_read_json
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.secrets import mask_command
from haiprof.run_format.writer import write_json

RISKS = (
    "--inject runs haiprof's hook inside the process, at a place that the process does not choose. "
    "It stops for about 0.1 s; a job whose other ranks wait notices as much. A process that "
    "loads a library at that moment can die of it, and its job with it (haiprof waits until none "
    "was loaded for some seconds): do not do this to what you cannot afford to lose."
)
ANSWER_S = 30.0
_POLL_S = 0.05
_SETTLED_S = 5.0
"""Injecting while the process imported torch crashed it (SIGSEGV, one of two): the dynamic loader
was active. Steady loops survived, 18 of 18 (research/spikes.md E5)."""
_SETTLE_LIMIT_S = 60.0
_SETTLE_POLL_S = 0.5
_IMPORTING = ("importlib", "ctypes/__init__.py")
_CALL_TIMEOUT_S = 60.0
_REMOTE_EXEC_FROM = 14
_EXTRA = "hypno"
_PAYLOAD = str(BOOT_FOLDER.parent / "payload.py")
_PROGRAM = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
_INJECT = "import sys, hypno; hypno.inject_py(int(sys.argv[1]), sys.argv[2])"
# Leaves no name in the job's __main__, and prints nothing, whatever happens.
_CODE = (
    "try:\n exec(compile(open({path!r}).read(), {path!r}, 'exec'), {{'__name__': 'haiprof_attach', "
    "'__file__': {path!r}, 'run_dir': {run!r}, 'owner': {owner}}})\nexcept BaseException:\n pass\n"
)


def check_injection(process: Process) -> str | None:
    """Why a process cannot be entered; None where it can. Nothing is changed."""
    reason = why_not_enter(process.pid)
    if reason is None and process.python is None:
        reason = "its Python version cannot be determined"
    if reason is None and not _by_remote_exec(process) and not importlib.util.find_spec(_EXTRA):
        raise MissingExtraError(
            f"--inject into Python 3.{process.python} needs the package {_EXTRA}",
            hint="pip install 'haiprof[attach]'",
        )
    return reason


def write_payload(run: RunPaths) -> None:
    """Writes the script into the run directory: remote_exec takes a file without arguments."""
    open_folder = find_open_folder(run.root.parent)
    if open_folder:
        raise UsageError(
            f"--inject: every user can rename what is in {open_folder}",
            hint=f"chmod +t {open_folder}, or another --log-dir",
        )
    write_file(run.boot_enter, _code(run).encode(), below=run.root, replace=False)


def _code(run: RunPaths) -> str:
    root = os.path.realpath(run.root)
    return _CODE.format(path=_PAYLOAD, run=root, owner=os.stat(root).st_uid)


def inject(process: Process, run: RunPaths) -> str | None:
    """Has the process execute the payload, and waits for its answer.

    The reason why the hook is not in; None where it is.
    """
    command = [sys.executable, "-c", _INJECT, str(process.pid), _code(run)]
    if _by_remote_exec(process):
        interpreter = os.path.realpath(f"/proc/{process.pid}/exe")
        entry = str(run.boot_enter)
        command = [interpreter, "-I", "-S", "-c", _PROGRAM, str(process.pid), entry]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CALL_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    limit = time.monotonic() + ANSWER_S
    while time.monotonic() < limit:
        if answer := try_read_json(run.injection_result(process.pid)):  # whole by now
            return None if answer.get("state") == "done" else str(answer.get("reason"))
        time.sleep(_POLL_S)
    return "no answer: its main thread runs no Python code (it waits inside a C function)"


def are_settled(processes: Sequence[Process]) -> bool:
    """Waits until no process has mapped a new library for some seconds, or imports anything."""
    pids = [process.pid for process in processes if not _by_remote_exec(process)]
    limit = time.monotonic() + _SETTLE_LIMIT_S
    mapped, since = [_libraries(pid) for pid in pids], time.monotonic()
    while pids and time.monotonic() < limit:
        time.sleep(_SETTLE_POLL_S)
        if (now := [_libraries(pid) for pid in pids]) != mapped:
            mapped, since = now, time.monotonic()
        elif time.monotonic() > since + _SETTLED_S and not any(_imports(pid) for pid in pids):
            return True
    return not pids


def _libraries(pid: int) -> frozenset[str]:
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return frozenset()
    return frozenset(line.split(None, 5)[-1] for line in text.splitlines() if ".so" in line)


def _imports(pid: int) -> bool:
    """Whether a thread is in an import, by py-spy; False without py-spy."""
    command = find_spy()
    threads = [] if command is None else dump_threads(command, pid, "--nonblocking")
    frames = [frame for thread in objects(threads) for frame in objects(thread.get("frames"))]
    return any(word in str(frame.get("filename")) for frame in frames for word in _IMPORTING)


def _by_remote_exec(process: Process) -> bool:
    return process.python is not None and process.python >= _REMOTE_EXEC_FROM


TICK_S = 0.1
_STOP_WAIT_S = 10.0


@contextmanager
def _attached_agent(
    run: RunPaths, manifest: Manifest, options: Options,
    copies: Callable[[RunPaths], RunCopies] | None,
) -> Iterator[list[str]]:  # fmt: skip
    """Samples this node and relays requests meanwhile, in threads; gives why it stopped early."""
    agent, stop, failures = Agent(run, options), threading.Event(), list[str]()
    finisher, kept = Finisher(run, agent.host), copies(run) if copies is not None else None

    def serve() -> None:
        try:
            while not stop.wait(TICK_S):
                agent.serve()
                if kept is not None:
                    kept.tick()
                if run.trace_parts.is_dir():
                    finisher.tick()
        except OSError as error:  # the run directory is gone, or the disk is full
            failures.append(str(error))

    agent.start()
    thread = threading.Thread(target=serve, name="haiprof-agent", daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        stop.set()
        thread.join(_STOP_WAIT_S)
        agent.close()
        nobody_asks = threading.Event()
        finisher.finish(lambda: nobody_asks.wait(TICK_S), quiet=True)
        ended = replace(manifest, end_wall_ns=time.time_ns())
        write_manifest(run, replace(ended, ranks=agent.reported_ranks()))


_RunAndAgent = tuple[RunPaths, AbstractContextManager[list[str]]]
REPORT_S = 60.0  # A rank reports in within a second of its next training step; steps may be long
ASK_S = 10.0
LATE_S = 30.0  # Slack beyond the requested time: the recording ends with a whole step
RECORDED, RESUMED, INJECTED, OUTSIDE = "recorded", "resumed", "injected", "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The result of attaching."""

    run: str  # The run directory that holds the recording
    how: str  # `recorded` (it was recorded anyway), `resumed`, `injected`, or `outside`
    between: tuple[int, int]  # First and last Unix time in ns
    ranks: tuple[int, ...]  # Ranks that were recorded
    refused: Mapping[str, str] = field(default_factory=dict)  # Why others were not, by their name
    trace: TraceNow | None = None
    seen: tuple[SampledStacks, ...] = ()  # Shares of sampled stacks, where the job was only sampled

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {**asdict(self), "trace": None if self.trace is None else self.trace.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """The options of an attached recording."""

    time_s: float
    trace: Mapping[str, Any] | None = None
    """Options of a trace window (`count`, switches); None traces nothing."""
    log_dir: Path | None = None
    """Where a new run directory goes; None puts it beside the job's, else into the default."""
    copies: Callable[[RunPaths], RunCopies] | None = None
    """Of a run, what puts it at an address while it is recorded; None where it stays here."""


def attach_job(job: RunningJob, request: AttachRequest, progress: Progress) -> Attached:
    """Records a job that runs under haiprof, whether its recording goes on or has ended."""
    if not members(job.run):
        raise MissingDataError(
            f"{job.id}: no rank has reported in", hint="a rank reports in at its first step"
        )
    replies = ask(job.run, "status", timeout_s=ASK_S).replies.values()
    if not replies:
        raise MissingDataError(
            f"{job.id}: no rank answers", hint=f"haiprof snapshot {job.id} shows what they do"
        )
    if any(reply.get("recording") is True for reply in replies):
        # The job is being recorded: waits for the time, whose part is then judged.
        progress("it is recorded already")
        between, trace = collect(job.run, request.time_s, trace=request.trace, progress=progress)
        ranks = tuple(member.rank for member in members(job.run))
        return Attached(
            run=str(job.run.root), how=RECORDED, between=between, ranks=ranks, trace=trace
        )
    # Its recording has ended: its ranks install the hooks again, with a new run directory.
    old = job.manifest
    run, agent = _new_run(
        job.run.root.parent, request, name=old.name, command=old.command, cwd=old.cwd,
        environment=old.environment,
    )  # fmt: skip
    with agent as failures:
        progress("asking its ranks to record again")
        answers = ask(job.run, "activate", {"name": run.root.name}, timeout_s=ASK_S)
        said = answers.replies
        refused = {n: str(r.get("reason")) for n, r in said.items() if r.get("state") != "done"}
        refused |= {member.name: "no answer" for member in answers.silent}
        count = len(said.keys() - refused.keys())
        return _record(run, failures, request, RESUMED, count, refused, progress)


def attach_injecting(
    processes: Sequence[Process], request: AttachRequest, progress: Progress
) -> Attached:
    """Puts the hook into processes that were not started under haiprof."""
    barred = {str(p.pid): why for p in processes if (why := check_injection(p)) is not None}
    if barred:
        reasons = "; ".join(f"process {pid}: {why}" for pid, why in barred.items())
        raise HaiprofError(
            f"cannot enter: {reasons}",
            hint="nothing was changed; without --inject, stacks are sampled",
        )
    progress(RISKS)
    if not are_settled(processes):
        raise HaiprofError(
            "cannot enter: a process loads libraries all the time, and would not survive another",
            hint="nothing was changed; try again when it trains steadily",
        )
    run, agent = _new_run_of(processes[0], request)
    with agent as failures:
        write_payload(run)
        refused = {str(p.pid): why for p in processes if (why := inject(p, run)) is not None}
        count = len(processes) - len(refused)
        return _record(run, failures, request, INJECTED, count, refused, progress)


def attach_sampling(
    processes: Sequence[Process], request: AttachRequest, progress: Progress
) -> Attached:
    """Samples counters and stacks of processes from outside, without changing them."""
    run, agent = _new_run_of(processes[0], request)
    ranks = tuple(at if each.rank is None else each.rank for at, each in enumerate(processes))
    why = "not recorded: it does not run under haiprof (haiprof attach --inject)"
    for rank, process in zip(ranks, processes, strict=True):
        # The report that the rank would have written, for the samplers.
        make_folder(run.rank(rank).root, below=run.root, new=True)
        content = {
            "version": SCHEMA_VERSION, "rank": rank, "attempt": 0, "restart": 0, "local_rank": None,
            "world_size": process.world_size,
            "pid": process.pid, "ppid": process.parent, "start_ticks": process.start_ticks,
            "host": socket.gethostname(), "argv": mask_command(process.command),
            "clock": {"wall_ns": time.time_ns(), "mono_ns": time.perf_counter_ns()},
            "phases": dict.fromkeys(("dataloader", "forward", "backward", "optimizer"), why),
        }  # fmt: skip
        write_json(run.rank(rank).report, content, below=run.root)
    with agent:
        began = time.time_ns()
        named = "; ".join(f"{p.pid} ({shlex.join(p.command)[:60]})" for p in processes[:4])
        more = f" and {len(processes) - 4} more" if len(processes) > 4 else ""
        only = "" if find_spy() else f", at counters alone: {NO_SPY}"
        progress(f"looking from outside for {request.time_s:g} s at {named}{more}{only}")
        until_s = time.monotonic() + request.time_s
        seen = sample_stacks(processes, run, seconds=request.time_s)
        time.sleep(max(until_s - time.monotonic(), 0.0))  # without stacks there are the counters
        stacks = {"version": 1, "seen": [asdict(each) for each in seen]}
        write_json(run.external_samples_json, stacks, below=run.root)
    between = began, time.time_ns()
    return Attached(run=str(run.root), how=OUTSIDE, between=between, ranks=ranks, seen=tuple(seen))


def _new_run_of(first: Process, request: AttachRequest) -> _RunAndAgent:
    try:
        cwd = os.readlink(f"/proc/{first.pid}/cwd")
    except OSError:
        cwd = ""
    scripts = [word for word in first.command[1:] if word.endswith(".py")]
    name = Path(scripts[0]).stem if scripts else str(first.pid)
    folder, command = request.log_dir or Options.log_dir, list(first.command)
    return _new_run(folder, request, name=name, command=command, cwd=cwd, environment={})


def _new_run(
    log_dir: Path, request: AttachRequest, *, name: str, command: list[str], cwd: str,
    environment: Mapping[str, Any],
) -> _RunAndAgent:  # fmt: skip
    """The run directory of an attached recording, `attach-<name>-<time>-<id>`, and its agent."""
    options = Options(time_s=request.time_s, log_dir=log_dir, quiet=True)
    run, manifest, _ = create_run(options, command=command, name=f"attach-{name}", environ={})
    manifest = replace(manifest, cwd=cwd, environment={**environment, "attached": True})
    write_manifest(run, manifest)
    return run, _attached_agent(run, manifest, options, request.copies)


def _record(
    run: RunPaths, failures: Sequence[str], request: AttachRequest, how: str, count: int,
    refused: Mapping[str, str], progress: Progress,
) -> Attached:  # fmt: skip
    """Waits for the ranks that have the hook now, until their time is up."""
    if not count:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise HaiprofError(
            f"no rank is recorded: {reasons}", hint="haiprof snapshot shows what they do"
        )
    progress(f"recording {count} rank{'s' * (count != 1)} for {request.time_s:g} s into {run.root}")
    began = time.time_ns()
    wait(lambda: len(_reported_ranks(run)) >= count, time.monotonic() + REPORT_S, progress)
    if not _reported_ranks(run):
        raise MissingDataError(
            f"{run.root}: no step within {REPORT_S:.0f} s", hint="haiprof snapshot JOB"
        )
    limit = time.monotonic() + request.time_s + LATE_S
    trace = trace_now(run, request.trace, progress=progress) if request.trace is not None else None
    wait(lambda: all(_is_over(paths) for paths in _reported_ranks(run).values()), limit, progress)
    for failure in failures:
        progress(f"the node's agent stopped: {failure}")
    return Attached(
        run=str(run.root), how=how, between=(began, time.time_ns()), refused=refused, trace=trace,
        ranks=tuple(sorted(_reported_ranks(run))),
    )  # fmt: skip


def _reported_ranks(run: RunPaths) -> dict[int, RankPaths]:
    return {rank: paths for rank, _, paths in run.rank_folders() if paths.report.exists()}


def _is_over(paths: RankPaths) -> bool:
    """Whether a rank has ended its recording, or is gone."""
    report = try_read_json(paths.report)
    return bool(report) and (recording_has_ended(paths) or as_member("", 0, report).has_ended)
