"""A running job recorded for a while: asked to, entered, or looked at from outside."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haiprof.config import Options
from haiprof.errors import HaiprofError, MissingDataError, RunFormatError
from haiprof.jobs.ask import ask, members
from haiprof.jobs.collect import Progress, collect, wait
from haiprof.jobs.find import RunningJob
from haiprof.jobs.inject import RISKS, are_settled, check_injection, inject, write_payload
from haiprof.jobs.outside import Seen, sample_stacks
from haiprof.jobs.trace_now import TraceNow, trace_now
from haiprof.launch.beside import Beside, create_attached
from haiprof.rundir.layout import RankPaths, RunPaths
from haiprof.rundir.reader import read_json, read_lines
from haiprof.rundir.schema import SCHEMA_VERSION
from haiprof.rundir.writer import write_json
from haiprof.samplers.training import Process

REPORT_S = 60.0
"""A rank reports in within a second of its next training step; steps may be long."""
ASK_S = 10.0
LATE_S = 30.0
"""Beyond the asked time: the recording ends with a whole step."""
RECORDED, RESUMED, INJECTED, OUTSIDE = "recorded", "resumed", "injected", "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What came of it."""

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
    seen: tuple[Seen, ...]
    """What stacks say, where there was nothing but them."""

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
class Wish:
    """What is asked of an attached recording."""

    time_s: float
    trace: Mapping[str, Any] | None = None
    """Options of a trace window (`count`, switches); null traces nothing."""
    log_dir: Path | None = None
    """Where a new run directory goes; null puts it beside the job's, else into the default."""


def attach_job(job: RunningJob, wish: Wish, progress: Progress) -> Attached:
    """Records a job that runs under haiprof, whether its recording goes on or has ended.

    Raises:
        MissingDataError: No rank has reported in, or none answers.
        HaiprofError: No rank could be recorded again.
        OSError: The run directory is gone, read-only or full.
    """
    if not members(job.run):
        raise MissingDataError(
            f"{job.id}: no rank has reported in",
            hint="a rank reports in at its first training step",
        )
    replies = ask(job.run, "status", timeout_s=ASK_S).replies.values()
    if not replies:
        raise MissingDataError(
            f"{job.id}: no rank answers", hint=f"haiprof snapshot {job.id} shows what they do"
        )
    if any(reply.get("recording") is True for reply in replies):
        return _wait_for_part(job.run, wish, progress)
    return _resume(job, wish, progress)


def _wait_for_part(run: RunPaths, wish: Wish, progress: Progress) -> Attached:
    """The job records anyway: the time is waited for, and its part judged."""
    progress("it is recorded already")
    between, trace = collect(run, wish.time_s, trace=wish.trace, progress=progress)
    return Attached(
        run=str(run.root),
        how=RECORDED,
        between=between,
        ranks=tuple(member.rank for member in members(run)),
        refused={},
        trace=trace,
        seen=(),
    )


def _resume(job: RunningJob, wish: Wish, progress: Progress) -> Attached:
    """Its recording has ended: its ranks put the hooks in again, into a new run directory."""
    manifest = job.manifest
    options = Options(time_s=wish.time_s, log_dir=job.run.root.parent, quiet=True)
    run, new = create_attached(
        options, name=manifest.name, command=manifest.command, cwd=manifest.cwd,
        environment=manifest.environment,
    )  # fmt: skip
    beside = Beside(run, new, options)
    beside.start()
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
        return _record(run, beside, wish, RESUMED, count, refused, progress)
    finally:
        beside.stop(quiet=True)


def attach_inside(processes: Sequence[Process], wish: Wish, progress: Progress) -> Attached:
    """Puts the hook into processes that were not started under haiprof.

    Raises:
        HaiprofError: None may be entered; nothing was changed.
        MissingExtraError: The package that it takes is not installed.
        OSError: The run directory is gone, read-only or full.
    """
    barred = {str(p.pid): why for p in processes if (why := check_injection(p)) is not None}
    if barred:
        said = "; ".join(f"process {pid}: {why}" for pid, why in barred.items())
        raise HaiprofError(
            f"cannot enter: {said}",
            hint="nothing was changed; without --inject, stacks are sampled",
        )
    progress(RISKS)
    if not are_settled(processes):
        raise HaiprofError(
            "cannot enter: a process loads libraries all the time, and would not survive another",
            hint="nothing was changed; try again when it trains steadily",
        )
    run, beside = _new_run(processes, wish)
    beside.start()
    try:
        write_payload(run)
        refused = {str(p.pid): why for p in processes if (why := inject(p, run)) is not None}
        return _record(
            run, beside, wish, INJECTED, len(processes) - len(refused), refused, progress
        )
    finally:
        beside.stop(quiet=True)


def attach_outside(processes: Sequence[Process], wish: Wish, progress: Progress) -> Attached:
    """Counters and sampled stacks of processes, which do not notice it.

    Raises:
        OSError: The run directory is gone, read-only or full.
    """
    run, beside = _new_run(processes, wish)
    for place, process in enumerate(processes):
        _report_for(run, place if process.rank is None else process.rank, process)
    beside.start()
    began = time.time_ns()
    try:
        progress(f"looking at {len(processes)} processes from outside for {wish.time_s:g} s")
        began_s = time.monotonic()
        seen = sample_stacks(processes, run, seconds=wish.time_s)
        left = wish.time_s - (time.monotonic() - began_s)
        if left > 0:  # without stacks there are still the counters
            time.sleep(left)
        write_json(run.outside_json, {"version": 1, "seen": [asdict(each) for each in seen]})
    finally:
        beside.stop(quiet=True)
    return Attached(
        run=str(run.root),
        how=OUTSIDE,
        between=(began, time.time_ns()),
        ranks=tuple(p.rank if p.rank is not None else i for i, p in enumerate(processes)),
        refused={},
        trace=None,
        seen=tuple(seen),
    )


def _new_run(processes: Sequence[Process], wish: Wish) -> tuple[RunPaths, Beside]:
    first = processes[0]
    options = Options(time_s=wish.time_s, log_dir=wish.log_dir or Path("haiprof-logs"), quiet=True)
    try:
        cwd = os.readlink(f"/proc/{first.pid}/cwd")
    except OSError:
        cwd = ""
    scripts = [word for word in first.command[1:] if word.endswith(".py")]
    name = Path(scripts[0]).stem if scripts else str(first.pid)
    run, manifest = create_attached(
        options, name=name, command=list(first.command), cwd=cwd, environment={}
    )
    return run, Beside(run, manifest, options)


def _report_for(run: RunPaths, rank: int, process: Process) -> None:
    """What a rank would have said of itself, for those who sample it."""
    paths = run.rank(rank)
    paths.root.mkdir(parents=True)
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
            "argv": list(process.command),
            "clock": {"wall_ns": time.time_ns(), "mono_ns": time.perf_counter_ns()},
            "phases": dict.fromkeys(("dataloader", "forward", "backward", "optimizer"), why),
        },
    )


def _record(
    run: RunPaths, beside: Beside, wish: Wish, how: str, count: int, refused: Mapping[str, str],
    progress: Progress,
) -> Attached:  # fmt: skip
    """Waits for the ranks that have the hook now, until their time is up."""
    if not count:
        said = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise HaiprofError(
            f"no rank is recorded: {said}", hint="haiprof snapshot shows what they do"
        )
    progress(f"recording {count} ranks for {wish.time_s:g} s into {run.root}")
    began = time.time_ns()
    wait(lambda: len(_reported(run)) >= count, time.monotonic() + REPORT_S, progress)
    if not _reported(run):
        raise MissingDataError(
            f"{run.root}: no training step within {REPORT_S:.0f} s", hint="haiprof snapshot JOB"
        )
    limit = time.monotonic() + wish.time_s + LATE_S
    trace = trace_now(run, wish.trace, progress=progress) if wish.trace is not None else None
    wait(lambda: all(_is_over(paths) for paths in _reported(run).values()), limit, progress)
    if beside.failure is not None:
        progress(f"the node's agent stopped: {beside.failure}")
    return Attached(
        run=str(run.root),
        how=how,
        between=(began, time.time_ns()),
        ranks=tuple(sorted(_reported(run))),
        refused=refused,
        trace=trace,
        seen=(),
    )


def _reported(run: RunPaths) -> dict[int, RankPaths]:
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
