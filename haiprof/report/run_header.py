"""What stands above every view: the run's name, command, times, state and outcome."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from haiprof.errors import RunFormatError
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest, read_manifest
from haiprof.units import NS_PER_S

RUNNING, ENDED, KILLED = "running", "ended", "killed"

# Agents write once a second by default; a run seen from another host is taken for dead after this.
_SILENT_S = 60.0
_START_SLACK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The run as a whole."""

    name: str
    """The job's name."""
    path: str
    """The run directory."""
    command: tuple[str, ...]
    """The job's command line."""
    host: str
    """Host of the launcher."""
    start_wall_ns: int | None
    """Unix time of the start; null where run.json is damaged."""
    duration_ns: int | None
    """From start to end, or until now while it runs; null where the end is not known."""
    state: str
    """`running`, `ended`, or `killed` when nobody could write an end."""
    exit_status: int | None
    """The job's exit status."""
    signal: str | None
    """The signal that ended the job."""

    @property
    def outcome(self) -> str:
        """State and exit for people: `running`, `ended, exit 0`, `ended by SIGKILL`."""
        if self.state != ENDED:
            return self.state
        return f"ended by {self.signal}" if self.signal else f"ended, exit {self.exit_status}"


def run_header(run: RunPaths, manifest: Manifest | None) -> RunHeader:
    """The header of a run, also of one that still runs or whose run.json is damaged.

    Args:
        run: Its paths; file times tell whether a run of another host is alive.
        manifest: Its run.json, None where that cannot be read.
    """
    if manifest is None:
        manifest = Manifest(haiprof_version="", name=run.root.name, command=[])
    state = run_state(run, manifest)
    start_ns = manifest.start_wall_ns or None
    end_ns = manifest.end_wall_ns
    if end_ns is None:
        end_ns = time.time_ns() if state == RUNNING else last_write_ns(run)
    return RunHeader(
        name=manifest.name,
        path=str(run.root),
        command=tuple(map(str, manifest.command)),
        host=manifest.host,
        start_wall_ns=start_ns,
        duration_ns=max(0, end_ns - start_ns) if start_ns and end_ns else None,
        state=state,
        exit_status=manifest.exit_status,
        signal=manifest.signal,
    )


def manifest_or_none(run: RunPaths) -> Manifest | None:
    """Its run.json; None where it is damaged, which the Analyzer's notes tell.

    Raises:
        RunNotFoundError: There is none.
    """
    try:
        return read_manifest(run)
    except RunFormatError:
        return None


def run_state(run: RunPaths, manifest: Manifest, *, proc: Path = Path("/proc")) -> str:
    """`running`, `ended` or `killed`.

    Args:
        run: Its paths.
        manifest: Its run.json; an end in it settles the question.
        proc: Where processes of this host are listed.

    Returns:
        `killed` where no end was written, and the launcher is gone (on this host) or its files
        have not grown for a minute (on another host).
    """
    if manifest.end_wall_ns is not None:
        return ENDED
    if manifest.host == socket.gethostname():
        alive = _launcher_lives(manifest, proc)
    else:
        written_ns = last_write_ns(run)
        alive = written_ns is not None and time.time_ns() - written_ns < _SILENT_S * NS_PER_S
    return RUNNING if alive else KILLED


def last_write_ns(run: RunPaths) -> int | None:
    """Unix time of the newest change to a file of a rank or node; None where there is no file."""
    folders = [paths.root for _, _, paths in run.rank_folders()]
    folders += [paths.root for _, paths in run.node_folders()]
    return max((t for folder in folders for t in _file_times_ns(folder)), default=None)


def _file_times_ns(folder: Path) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            return [e.stat(follow_symlinks=False).st_mtime_ns for e in entries]
    except OSError:  # the folder went away while it was listed: no file times
        return []


def _launcher_lives(manifest: Manifest, proc: Path) -> bool:
    """Whether the launcher's pid is taken by a process that is as old as the run."""
    if manifest.launcher_pid <= 0:
        return False
    started_s = _process_start_s(manifest.launcher_pid, proc)
    return started_s is not None and started_s <= manifest.start_wall_ns / NS_PER_S + _START_SLACK_S


def _process_start_s(pid: int, proc: Path) -> float | None:
    """Unix time at which a process started; None where it is gone or a zombie."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
        boot = (proc / "stat").read_text()
        after_name = stat.rpartition(")")[2].split()
        boot_s = float(boot.split("btime ", 1)[1].split(None, 1)[0])
        started_s = boot_s + int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return None if after_name[0] in "ZX" else started_s
