"""Records a running job for a while: on request, by injection, or sampled from outside."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, MissingDataError, RunFormatError
from haiprof.base.options import Options
from haiprof.base.safe_files import make_folder
from haiprof.launch.run_copies import RunCopies
from haiprof.linux.training_processes import Process
from haiprof.live.ask import ask, members
from haiprof.live.attached_agent import AttachedAgent, create_attached
from haiprof.live.collect import Progress, collect, wait
from haiprof.live.external_sampling import SampledStacks, sample_stacks
from haiprof.live.find import RunningJob
from haiprof.live.inject import RISKS, are_settled, check_injection, inject, write_payload
from haiprof.live.trace_now import TraceNow, trace_now
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.reader import read_json, read_lines
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.secrets import mask_command
from haiprof.run_format.writer import write_json

REPORT_S = 60.0
"""A rank reports in within a second of its next training step; steps may be long."""
ASK_S = 10.0
LATE_S = 30.0
"""Slack beyond the requested time: the recording ends with a whole step."""
RECORDED, RESUMED, INJECTED, OUTSIDE = "recorded", "resumed", "injected", "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The result of attaching."""

    run: str
    """The run directory that holds the recording."""
    how: str
    """`recorded` (it was recorded anyway), `resumed`, `injected`, or `outside`."""
    between: tuple[int, int]
    """First and last Unix time in ns."""
    ranks: tuple[int, ...]
    """Ranks that were recorded."""
    refused: Mapping[str, str]
    """Why others were not, by their name."""
    trace: TraceNow | None
    seen: tuple[SampledStacks, ...]
    """Shares of sampled stacks, where the job was only sampled."""

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            **{name: getattr(self, name) for name in ("run", "how")},
            "between": list(self.between),
            "ranks": list(self.ranks),
            "refused": dict(self.refused),
            "trace": self.trace.as_json() if self.trace is not None else None,
            "seen": [asdict(seen) for seen in self.seen],
        }


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
            f"{job.id}: no rank has reported in",
            hint="a rank reports in at its first step",
        )
    replies = ask(job.run, "status", timeout_s=ASK_S).replies.values()
    if not replies:
        raise MissingDataError(
            f"{job.id}: no rank answers", hint=f"haiprof snapshot {job.id} shows what they do"
        )
    if any(reply.get("recording") is True for reply in replies):
        return _wait_for_part(job.run, request, progress)
    return _resume(job, request, progress)


def _wait_for_part(run: RunPaths, request: AttachRequest, progress: Progress) -> Attached:
    """The job is being recorded: waits for the time, whose part is then judged."""
    progress("it is recorded already")
    between, trace = collect(run, request.time_s, trace=request.trace, progress=progress)
    return Attached(
        run=str(run.root),
        how=RECORDED,
        between=between,
        ranks=tuple(member.rank for member in members(run)),
        refused={},
        trace=trace,
        seen=(),
    )


def _resume(job: RunningJob, request: AttachRequest, progress: Progress) -> Attached:
    """Its recording has ended: its ranks install the hooks again, with a new run directory."""
    manifest = job.manifest
    options = Options(time_s=request.time_s, log_dir=job.run.root.parent, quiet=True)
    run, new = create_attached(
        options, name=manifest.name, command=manifest.command, cwd=manifest.cwd,
        environment=manifest.environment,
    )  # fmt: skip
    agent = AttachedAgent(run, new, options, copies=request.copies)
    agent.start()
    try:
        progress("asking its ranks to record again")
        answers = ask(job.run, "activate", {"name": run.root.name}, timeout_s=ASK_S)
        refused = {
            member: str(reply.get("reason"))
            for member, reply in answers.replies.items()
            if reply.get("state") != "done"
        }
        refused |= {member.name: "no answer" for member in answers.silent}
        count = len(answers.replies) - sum(name in answers.replies for name in refused)
        return _record(run, agent, request, RESUMED, count, refused, progress)
    finally:
        agent.stop(quiet=True)


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
    run, agent = _new_run(processes, request)
    agent.start()
    try:
        write_payload(run)
        refused = {str(p.pid): why for p in processes if (why := inject(p, run)) is not None}
        return _record(
            run, agent, request, INJECTED, len(processes) - len(refused), refused, progress
        )
    finally:
        agent.stop(quiet=True)


def attach_sampling(
    processes: Sequence[Process], request: AttachRequest, progress: Progress
) -> Attached:
    """Samples counters and stacks of processes from outside, without changing them."""
    run, agent = _new_run(processes, request)
    for place, process in enumerate(processes):
        _report_for(run, place if process.rank is None else process.rank, process)
    agent.start()
    began = time.time_ns()
    try:
        progress(f"looking at {len(processes)} processes from outside for {request.time_s:g} s")
        began_s = time.monotonic()
        seen = sample_stacks(processes, run, seconds=request.time_s)
        left = request.time_s - (time.monotonic() - began_s)
        if left > 0:  # without stacks there are still the counters
            time.sleep(left)
        content = {"version": 1, "seen": [asdict(each) for each in seen]}
        write_json(run.external_samples_json, content, below=run.root)
    finally:
        agent.stop(quiet=True)
    return Attached(
        run=str(run.root),
        how=OUTSIDE,
        between=(began, time.time_ns()),
        ranks=tuple(p.rank if p.rank is not None else i for i, p in enumerate(processes)),
        refused={},
        trace=None,
        seen=tuple(seen),
    )


def _new_run(
    processes: Sequence[Process], request: AttachRequest
) -> tuple[RunPaths, AttachedAgent]:
    first = processes[0]
    options = Options(time_s=request.time_s, log_dir=request.log_dir or Options.log_dir, quiet=True)
    try:
        cwd = os.readlink(f"/proc/{first.pid}/cwd")
    except OSError:
        cwd = ""
    scripts = [word for word in first.command[1:] if word.endswith(".py")]
    name = Path(scripts[0]).stem if scripts else str(first.pid)
    run, manifest = create_attached(
        options, name=name, command=list(first.command), cwd=cwd, environment={}
    )
    return run, AttachedAgent(run, manifest, options, copies=request.copies)


def _report_for(run: RunPaths, rank: int, process: Process) -> None:
    """Writes the report that a rank would have written, for the samplers."""
    paths = run.rank(rank)
    make_folder(paths.root, below=run.root, new=True)
    why = "not recorded: it does not run under haiprof (haiprof attach --inject)"
    world = process.environ.get("WORLD_SIZE", "")
    write_json(
        paths.report,
        {
            "version": SCHEMA_VERSION,
            "rank": rank,
            "attempt": 0,
            "restart": 0,
            "local_rank": None,
            "world_size": int(world) if world.isascii() and world.isdigit() else None,
            "pid": process.pid,
            "ppid": process.parent,
            "start_ticks": process.start_ticks,
            "host": socket.gethostname(),
            "argv": mask_command(process.command),
            "clock": {"wall_ns": time.time_ns(), "mono_ns": time.perf_counter_ns()},
            "phases": dict.fromkeys(("dataloader", "forward", "backward", "optimizer"), why),
        },
        below=run.root,
    )


def _record(
    run: RunPaths, agent: AttachedAgent, request: AttachRequest, how: str, count: int,
    refused: Mapping[str, str], progress: Progress,
) -> Attached:  # fmt: skip
    """Waits for the ranks that have the hook now, until their time is up."""
    if not count:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise HaiprofError(
            f"no rank is recorded: {reasons}", hint="haiprof snapshot shows what they do"
        )
    progress(f"recording {count} ranks for {request.time_s:g} s into {run.root}")
    began = time.time_ns()
    wait(lambda: len(_reported_ranks(run)) >= count, time.monotonic() + REPORT_S, progress)
    if not _reported_ranks(run):
        raise MissingDataError(
            f"{run.root}: no step within {REPORT_S:.0f} s", hint="haiprof snapshot JOB"
        )
    limit = time.monotonic() + request.time_s + LATE_S
    trace = trace_now(run, request.trace, progress=progress) if request.trace is not None else None
    wait(lambda: all(_is_over(paths) for paths in _reported_ranks(run).values()), limit, progress)
    if agent.failure is not None:
        progress(f"the node's agent stopped: {agent.failure}")
    return Attached(
        run=str(run.root),
        how=how,
        between=(began, time.time_ns()),
        ranks=tuple(sorted(_reported_ranks(run))),
        refused=refused,
        trace=trace,
        seen=(),
    )


def _reported_ranks(run: RunPaths) -> dict[int, RankPaths]:
    return {rank: paths for rank, _, paths in run.rank_folders() if paths.report.exists()}


def _is_over(paths: RankPaths) -> bool:
    """Whether a rank has ended its recording, or is gone."""
    try:
        lines, _ = read_lines(paths.events)
        report = read_json(paths.report)
    except RunFormatError:
        return False
    if any(line.get("type") in ("record_end", "hook_error") for line in lines):
        return True
    here = report.get("host") == socket.gethostname()
    return here and not Path(f"/proc/{report.get('pid')}").exists()
