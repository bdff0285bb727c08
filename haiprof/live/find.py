"""Which jobs run under haiprof, and what their ranks answer; who has not reported in."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, RunNotFoundError, UsageError
from haiprof.base.options import ENV_ACTIVE
from haiprof.base.units import NS_PER_S, ranks_text
from haiprof.base.users import other_uid, user_name
from haiprof.linux.processes import ranks_below
from haiprof.linux.procfs import (
    TICK_NS,
    boot_ns,
    environment,
    is_mine,
    own_pids,
    process_ids,
    read_stat,
    user_id,
)
from haiprof.run_format.control import (
    ANSWERED,
    Request,
    new_request,
    post_request,
    read_members,
    read_replies,
)
from haiprof.run_format.layout import MANIFEST_NAME, RankPaths, RunPaths
from haiprof.run_format.manifest import Manifest, find_runs, read_manifest
from haiprof.run_format.reader import try_read_json, try_read_lines

FRESH_S = 60.0
"""Agents and ranks write once a second, which a file server may show late; a node that was silent
for so long is gone."""
_NAMED = 4  # Running jobs that an error names at most
_START_SLACK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that runs under haiprof now."""

    run: RunPaths
    manifest: Manifest
    uid: int | None = None
    """Whose it is, where it is another user's: it may be read, and not asked for anything."""

    @property
    def id(self) -> str:
        """The name of its run directory."""
        return self.run.root.name

    @property
    def user(self) -> str | None:
        """The name of that user; None for one's own."""
        return None if self.uid is None else user_name(self.uid)

    @property
    def pid(self) -> int:
        """The process to signal for the job: its launcher, or the job if it has outlived that."""
        launcher, job = self.manifest.launcher_pid, self.manifest.job_pid
        if job is None or not _lives(job, self.manifest) or _lives(launcher, self.manifest):
            return launcher
        return job


def running_jobs(log_dirs: Iterable[Path], *, others: bool = False) -> list[RunningJob]:
    """Jobs with processes on this node, and those below the log directories.

    With `others` also those of other users, as far as this one may read them.
    """
    pids = process_ids(Path("/proc")) if others else own_pids()
    roots = {root for pid in pids if (root := _run_of_process(pid, others=others)) is not None}
    for log_dir in log_dirs:
        with contextlib.suppress(HaiprofError):
            roots.update(path.absolute() for path in find_runs(log_dir))
    found = []
    for run in map(RunPaths, roots):
        with contextlib.suppress(HaiprofError, OSError):
            job = RunningJob(run=run, manifest=read_manifest(run), uid=other_uid(run.manifest))
            if is_running(run, job.manifest) and (others or job.uid is None):
                found.append(job)
    return sorted(found, key=lambda job: (job.manifest.start_wall_ns, job.id))


def find_job(
    name: str, log_dirs: Iterable[Path], *, others: bool = False, reads: bool = False
) -> RunningJob:
    """A job by its id, name, script, a process's id, `slurm:NUMBER`, or its run directory.

    With `others` and `reads`, where it is only looked at, it may be another user's.
    """
    if os.path.lexists(Path(name) / MANIFEST_NAME):
        run = RunPaths(Path(name).absolute())
        manifest = read_manifest(run)
        uid = other_uid(run.manifest)
        if uid is not None and not (others and reads):
            raise _not_own(run, uid)
        if not is_running(run, manifest):
            raise RunNotFoundError(
                f"{run.root}: this job does not run any more", hint=f"haiprof verdict {run.root}"
            )
        return RunningJob(run=run, manifest=manifest, uid=uid)
    jobs, slurm = running_jobs(log_dirs, others=others), slurm_number(name)
    fits = [job for job in jobs if name in (job.id, job.manifest.name)]
    own = [job for job in jobs if not job.manifest.environment.get("attached")]
    fits = fits or [
        job for job in own if any(name in (w, os.path.basename(w)) for w in job.manifest.command)
    ]
    if slurm is not None:
        fits = [job for job in jobs if job.manifest.environment.get("slurm_job") == str(slurm)]
    if not fits and name.isdigit():
        root = _run_of_process(int(name), others=others)
        fits = [j for j in jobs if j.run.root == root or j.manifest.launcher_pid == int(name)]
    fits = [job for job in fits if job.uid is None] or fits
    if len(fits) == 1:
        if fits[0].uid is not None and not reads:
            raise _not_own(fits[0].run, fits[0].uid)
        return fits[0]
    known = job_names(fits or jobs)
    if fits:
        raise UsageError(f"{name!r} is the name of several running jobs: {known}")
    if is_unrecorded(name):
        raise RunNotFoundError(
            f"process {name} runs, but haiprof does not record it", hint=f"haiprof attach {name}"
        )
    raise RunNotFoundError(
        f"no running job {name!r}" + (f"; running: {known}" if known else ""),
        hint="haiprof ls --live lists them; name a run directory for one on another node",
    )


def is_unrecorded(name: str) -> bool:
    """Whether it is the id of an own process that runs, and not in a recorded job."""
    if not name.isdecimal() or not is_mine(int(name)):
        return False
    fields = read_stat(Path("/"), int(name))
    lives = fields is not None and fields[0] not in b"ZX"
    return lives and _run_of_process(int(name), others=False) is None


def _not_own(run: RunPaths, uid: int) -> UsageError:
    of = f"a job of another user ({user_name(uid)})"
    return UsageError(f"{run.root}: {of}: only that user may ask it for something")


def slurm_number(name: str) -> int | None:
    """12 for `slurm:12`, a job of Slurm; None for other names."""
    system, _, number = name.partition(":")
    fits = system == "slurm" and number.isascii() and number.isdigit() and len(number) < 12
    return int(number) if fits else None


def is_running(run: RunPaths, manifest: Manifest) -> bool:
    """Whether a run is active: launcher or job live here, or files of other nodes still grow."""
    if manifest.end_wall_ns is not None:
        return False
    here, pids = socket.gethostname(), (manifest.launcher_pid, manifest.job_pid)
    if manifest.host == here and any(_lives(pid, manifest) for pid in pids):
        return True
    folders = [paths.root for host, paths in run.node_folders() if host != here]
    if manifest.host not in ("", here):
        folders += [paths.root for _, _, paths in run.rank_folders()]
    now_ns = time.time_ns()
    return any(now_ns - time_ns < FRESH_S * NS_PER_S for time_ns in write_times_ns(folders))


def write_times_ns(folders: Iterable[Path]) -> list[int]:
    """Unix times of the last changes to the files in some folders."""
    found: list[int] = []
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:  # it may go away
            found += [entry.stat(follow_symlinks=False).st_mtime_ns for entry in entries]
    return found


def job_names(jobs: Sequence[RunningJob]) -> str:
    """`train-20261121-201146-0ac3 (pid 4711); ...`: what names running jobs, a few of them."""
    names = [f"{job.id} (pid {job.pid})" for job in jobs[:_NAMED]]
    return "; ".join([*names, f"and {len(jobs) - _NAMED} more"] if len(jobs) > _NAMED else names)


def _lives(pid: int | None, manifest: Manifest) -> bool:
    """Whether a process runs that is as old as the run."""
    fields = read_stat(Path("/"), pid) if pid is not None and pid > 0 else None
    if fields is None or fields[0] in b"ZX":
        return False
    started_ns = time.time_ns() - boot_ns() + int(fields[19]) * TICK_NS
    return started_ns <= manifest.start_wall_ns + _START_SLACK_S * NS_PER_S


def _run_of_process(pid: int, *, others: bool) -> Path | None:
    """The run directory that a process carries in its environment; root can read that of others."""
    uid = user_id(pid)
    if uid is None or not (others or uid == os.getuid()):
        return None
    root = environment(pid).get(ENV_ACTIVE)
    with contextlib.suppress(OSError, ValueError):
        if root and (uid == os.getuid() or os.stat(root).st_uid == uid):  # not what it only names
            return Path(root)
    return None


POLL_S = 0.05
Progress = Callable[[str], None]  # What is told while something is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank that reported in and, as far as this node can tell, has not ended."""

    name: str  # The name in its replies: `3`, `3.1` for its second attempt
    rank: int
    host: str | None
    pid: int | None

    @property
    def here(self) -> bool:
        """Whether it runs on this node."""
        return self.host == socket.gethostname()

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone, as far as this node can tell."""
        return self.here and self.pid is not None and not Path(f"/proc/{self.pid}").exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The replies to a request."""

    request: Request
    replies: Mapping[str, Mapping[str, Any]]
    """The last reply of each rank that answered, by the rank's name."""
    silent: tuple[Member, ...]  # Ranks that gave no final answer in time


def members(run: RunPaths) -> list[Member]:
    """The latest attempt of each rank, without those whose process has ended on this node."""
    return [member for member in _latest(run) if not member.has_ended]


def lost_members(run: RunPaths) -> list[Member]:
    """Ranks of this node whose process is gone without an orderly end: killed."""
    ended = (member for member in _latest(run) if member.has_ended)
    return [m for m in ended if not recording_has_ended(RankPaths(run.ranks / m.name))]


def recording_has_ended(paths: RankPaths) -> bool:
    """Whether a rank's recording has an end, which a killed process does not write."""
    return has_end(try_read_lines(paths.events))


def has_end(lines: Iterable[Mapping[str, Any]]) -> bool:
    """The same of its lines in events.jsonl."""
    return any(line.get("type") in ("record_end", "hook_error") for line in lines)


def _latest(run: RunPaths) -> list[Member]:
    latest: dict[int, Member] = {}
    for rank, attempt, paths in run.rank_folders():
        if report := try_read_json(paths.report):  # else it has not reported in yet
            latest[rank] = as_member(f"{rank}.{attempt}" if attempt else str(rank), rank, report)
    for name, told in read_members(run).items():
        latest.setdefault(told["rank"], as_member(name, told["rank"], told))
    return list(latest.values())


def as_member(name: str, rank: int, told: Mapping[str, Any]) -> Member:
    """A rank by what it has told, which may be anything."""
    from haiprof.run_analysis.run_files import integer, text  # numpy, which finding has no use for

    return Member(name=name, rank=rank, host=text(told.get("host")), pid=integer(told.get("pid")))


def ask(
    run: RunPaths, kind: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float,
    ranks: tuple[int, ...] | None = None, progress: Callable[[int, int], None] | None = None,
) -> Answers:  # fmt: skip
    """Posts a request and waits; `progress` gets how many have answered, of how many."""
    asked = [m for m in members(run) if ranks is None or m.rank in ranks]
    request = new_request(kind, arguments, valid_s=timeout_s, ranks=ranks)
    limit, told = time.monotonic() + timeout_s, 0
    post_request(run, request)
    while True:
        replies = read_replies(run, request.id)
        silent = tuple(m for m in asked if replies.get(m.name, {}).get("state") not in ANSWERED)
        done = len(asked) - len(silent)
        if progress is not None and done != told:
            progress(done, len(asked))
        told = done
        if not silent or time.monotonic() > limit:
            return Answers(request=request, replies=replies, silent=silent)
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRanks:
    """Ranks that have not reported in."""

    late: tuple[Member, ...] = ()
    """Ranks of nodes that write to this run directory: they have not begun to train."""
    unknown: tuple[int, ...] = ()  # Ranks about which nothing is known here

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on all of them, for people."""
        found = [self.note] if self.note else []
        if self.late:
            ranks = ranks_text([member.rank for member in self.late], "has", "have")
            found.insert(0, f"{ranks} not begun to train")
        return tuple(found)

    @property
    def note(self) -> str | None:
        """A note on the unknown ones, for people; None if there are none."""
        if not self.unknown:
            return None
        return (
            f"{ranks_text(self.unknown, 'is', 'are')} not known here: not under haiprof, or of a "
            "node that writes to another disk (with --reach, ask on the node that it names)"
        )


def find_missing_ranks(run: RunPaths, known: Sequence[Member] | None = None) -> MissingRanks:
    """Finds late processes of this node, and ranks that the world size lacks on others.

    A missing rank is late if a node writes to this run directory and has fewer ranks than the
    fullest one; if no node has room for it, it may train elsewhere.
    """
    if read_manifest(run).environment.get("attached"):
        return MissingRanks()  # of such a job only some ranks may be recorded
    known = members(run) if known is None else known
    host = socket.gethostname()
    reports = {rank: try_read_json(paths.report) for rank, _, paths in run.rank_folders()}
    pids = [report.get("pid") for report in reports.values() if report.get("host") == host]
    job = try_read_json(run.node(host).agent).get("job_pid")
    here = [p for p in (ranks_below(job) if type(job) is int else []) if p.pid not in pids]
    late = {
        rank: Member(name=str(rank), rank=rank, host=host, pid=process.pid)
        for process in here
        if (rank := process.rank or 0) not in {member.rank for member in known}
    }
    hosts = {rank: report.get("host") for rank, report in reports.items()}
    hosts |= {member.rank: member.host for member in (*known, *late.values())}
    sizes = [*(r.get("world_size") for r in reports.values()), *(p.world_size for p in here)]
    world = max((size for size in sizes if type(size) is int), default=0)
    lacking = [rank for rank in range(world) if rank not in hosts]
    # How many ranks the nodes lack until all have as many as the fullest one.
    count = Counter(host for host in hosts.values() if host is not None)
    fullest = max(count.values(), default=0)
    if len(lacking) <= sum(fullest - count[node] for node, _ in run.node_folders()):
        late |= {rank: Member(name=str(rank), rank=rank, host=None, pid=None) for rank in lacking}
        lacking = []
    return MissingRanks(late=tuple(late[rank] for rank in sorted(late)), unknown=tuple(lacking))
