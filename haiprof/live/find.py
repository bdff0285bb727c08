"""Which jobs run under haiprof: on this node, and below a log directory."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.base.errors import HaiprofError, RunNotFoundError, UsageError
from haiprof.base.options import ENV_ACTIVE
from haiprof.base.units import NS_PER_S
from haiprof.base.users import other_uid, user_name
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
from haiprof.run_format.layout import MANIFEST_NAME, RunPaths
from haiprof.run_format.manifest import Manifest, find_runs, read_manifest

FRESH_S = 60.0
"""Agents and ranks write once a second, which a file server may show late; a node that was silent
for so long is gone."""
_NAMED = 4
"""Running jobs that an error names at most."""
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
        """The process to signal for the job."""
        return signalled_pid(self.manifest)


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
    jobs = running_jobs(log_dirs, others=others)
    fits = [job for job in jobs if name in (job.id, job.manifest.name)]
    own = [job for job in jobs if not job.manifest.environment.get("attached")]
    fits = fits or [
        job for job in own if any(name in (w, os.path.basename(w)) for w in job.manifest.command)
    ]
    slurm = slurm_number(name)
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
    return UsageError(
        f"{run.root}: a job of another user ({user_name(uid)}): only that user may ask it for "
        "something"
    )


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


def signalled_pid(manifest: Manifest) -> int:
    """The process to signal for a job: its launcher, or the job if it has outlived that."""
    launcher, job = manifest.launcher_pid, manifest.job_pid
    if job is None or not _lives(job, manifest) or _lives(launcher, manifest):
        return launcher
    return job


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
