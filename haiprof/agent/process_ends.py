"""How each process of the job on this node ended: a thread asleep until one does.

The launcher is the parent of the job's first process alone. Of the ranks below torchrun, accelerate
or srun the kernel tells everybody who holds a pidfd that they are over; from Linux 6.15 on also
how, before that their zombie does, until their parent has asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from haiprof.agent.job_output import JobOutput
from haiprof.agent.relay import LiveRank
from haiprof.linux.cgroups import (
    MEMORY_LIMIT,
    Cgroup,
    KernelLog,
    memory_cgroup,
    oom_kill_count,
    tightest_limit,
)
from haiprof.linux.processes import ProcessExit, ProcessTree, WatchedProcess
from haiprof.linux.procfs import command_line, environment
from haiprof.run_format.environment import RANK_VARIABLES, find_number
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import append_line, note_line

FIRST_SCAN_S, SCAN_GROWTH, MAX_SCAN_S = 0.5, 1.4, 10.0
WATCHED_LIMIT = 1024
"""So many processes at the most: each takes a descriptor."""
OTHERS_LIMIT = 64
"""So many lines about processes that are no ranks."""
TOGETHER_S = 0.03
"""So soon after the job those have ended that were killed with it."""
SETTLE_S = 0.3
"""So long the last ends may take to be read."""
OOM_WAIT_S = 0.2
"""So long the kernel's log may be behind the death that it tells of."""
SLURM_WAIT_S = 3.0
_OF_KILL = ("anonymous_bytes", "file_bytes", "shared_bytes", "in_cgroup")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ProcessEnds:
    """Watches the processes of the job on this node."""

    def __init__(
        self,
        run: RunPaths,
        host: str,
        job_pid: int,
        *,
        root: Path = Path("/"),
        on_end: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._on_end = on_end
        self._events = run.node(host).events
        self._job_pid, self._root = job_pid, root
        self._tree = ProcessTree(root)
        self._scan_at, self._scan_gap_s = 0.0, FIRST_SCAN_S
        self._watched: dict[int, WatchedProcess] = {}
        self._seen: set[int] = set()
        self._labels: dict[int, int] = {}
        self._reported: dict[int, tuple[int, int]] = {}
        self._cgroups: dict[int, Cgroup] = {}
        self._output = JobOutput(self._events, root / "proc", self._rank_of)
        self._address_limits: dict[int, int | None] = {}
        """Bytes of address space that a process may have (`ulimit -v`), by process id; None where
        there is no limit, also where an earlier process of that id had one."""
        self._kills: dict[Path, int] = {}
        self._log = KernelLog()
        self._others = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="haiprof-ends", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()
        self._output.start()

    def tick(self, ranks: Iterable[LiveRank]) -> None:
        """Takes up the ranks that have reported in, and looks for new processes now and then."""
        for rank in ranks:
            attempt = int(rank.paths.root.name.partition(".")[2] or 0)
            self._reported[rank.pid] = (rank.rank, attempt)
            self._watch(rank.pid)
        now = time.monotonic()
        if now >= self._scan_at:
            self._tree.refresh()
            found = self._tree.below(self._job_pid)
            for pid in found:
                if pid not in self._seen:
                    self._watch(pid)
            for pid in list(self._watched):  # a shell redirects its output before it runs the job
                self._output.find(pid)
                self._find_address_limit(pid)
            self._seen &= {*found, *self._watched}
            self._scan_at = now + self._scan_gap_s
            self._scan_gap_s = min(self._scan_gap_s * SCAN_GROWTH, MAX_SCAN_S)

    def close(self) -> None:
        """Ends it, once the ends that have happened are written."""
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(SETTLE_S + 1.0)
        self._output.close(SETTLE_S + 1.0)
        for process in self._watched.values():
            process.close()
        self._watched.clear()
        self._epoll.close()
        os.close(self._wake)
        self._log.close()

    def _watch(self, pid: int) -> None:
        if pid in self._watched or len(self._watched) >= WATCHED_LIMIT:
            return
        self._seen.add(pid)
        try:
            process = WatchedProcess(pid, root=self._root)
        except OSError:
            return
        label = find_number(environment(pid, proc=self._root / "proc"), RANK_VARIABLES)
        if label is not None:
            self._labels[pid] = label
        self._output.find(pid)
        self._find_address_limit(pid)
        cgroup = memory_cgroup(pid, root=self._root)
        if cgroup is not None:
            self._cgroups[pid] = cgroup
            self._kills.setdefault(cgroup.folder, oom_kill_count(cgroup) or 0)
        self._watched[pid] = process
        self._epoll.register(process.fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _find_address_limit(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            limit, _ = resource.prlimit(pid, resource.RLIMIT_AS)
            self._address_limits[pid] = None if limit == resource.RLIM_INFINITY else limit

    def _wait(self) -> None:
        while not self._stop.is_set():
            self._take(None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(self._wake)
        while self._watched and self._take(TOGETHER_S):
            pass

    def _take(self, wait_s: float | None) -> bool:
        """Writes down who ends within a time; whether somebody did."""
        ended: list[WatchedProcess] = []
        with contextlib.suppress(OSError, ValueError):
            ready = {fd for fd, _ in self._epoll.poll(wait_s)}
            ended = [process for process in list(self._watched.values()) if process.fd in ready]
            exits = [(process, process.read_exit(), time.time_ns(), time.perf_counter_ns())
                     for process in ended]  # fmt: skip
            for line in [self._line(*each) for each in exits]:
                if line is not None:
                    append_line(self._events, line)
                    if self._on_end is not None:
                        self._on_end(line)
            for process in ended:
                del self._watched[process.pid]
                process.close()
            if ended:
                self._scan_gap_s = FIRST_SCAN_S
        return bool(ended)

    def _line(
        self, process: WatchedProcess, how: ProcessExit, wall_ns: int, mono_ns: int
    ) -> dict[str, Any] | None:
        """The line about one end; None where it is of no interest."""
        pid = process.pid
        rank, attempt = self._rank_of(pid), self._reported.get(pid, (None, None))[1]
        above = self._rank_of(process.parent or 0)
        helper = attempt is None and rank is not None and above == rank
        if (rank is None and pid != self._job_pid) or helper:
            if how.signal is None or self._others >= OTHERS_LIMIT:
                return None
            self._others += 1
        line: dict[str, Any] = {
            "type": "process_end", "time_ns": mono_ns, "wall_ns": wall_ns, "pid": pid,
            "start_ticks": process.start_ticks, "parent": process.parent,
            "rank": rank, "attempt": attempt, "helper": helper,
            "status": how.status, "signal": how.signal, "core": how.core, "source": how.source,
        }  # fmt: skip
        if how.signal == signal.SIGKILL or how.source == "gone":
            line["oom"] = self._oom(pid)
        failed = how.signal is not None or bool(how.status)
        if failed:
            line["shm"] = _shared_memory()
            line["address_limit_bytes"] = self._address_limits.get(pid)
        return line | self._output.last_lines(pid, rank, failed=failed)

    def _rank_of(self, pid: int) -> int | None:
        return self._reported.get(pid, (self._labels.get(pid),))[0]

    def _oom(self, pid: int) -> dict[str, Any] | None:
        """What the kernel says of a kill for want of memory; None where it says nothing of one."""
        cgroup = self._cgroups.get(pid)
        until = time.monotonic() + OOM_WAIT_S
        while True:
            kills = self._log.new_oom_kills()
            own = next((kill for kill in kills if kill.pid == pid), None)
            count = oom_kill_count(cgroup) if cgroup is not None else None
            grown = 0 if count is None or cgroup is None else count - self._kills[cgroup.folder]
            if own or grown > 0 or time.monotonic() > until:
                break
            time.sleep(OOM_WAIT_S / 10)
        if cgroup is not None and count is not None:
            self._kills[cgroup.folder] = count
        if own is None and grown <= 0:
            return None
        return {
            "limit_bytes": None if cgroup is None else _limit(cgroup),
            "cgroup": None if cgroup is None else str(cgroup.path), "kills": max(grown, 0),
            **{name: getattr(own, name) for name in _OF_KILL if own is not None}}  # fmt: skip


def note_job_end(
    run: RunPaths, host: str, *, pid: int, status: int | None, ended_by: int | None
) -> None:
    """How the job's first process on this node ended, as its launcher has it from the kernel."""
    note_line(run.node(host).events, {
        "type": "job_end", "time_ns": time.perf_counter_ns(), "wall_ns": time.time_ns(), "pid": pid,
        "launcher_pid": os.getppid(), "status": status, "signal": ended_by,
    })  # fmt: skip


def note_signal(run: RunPaths, host: str, said: Mapping[str, Any], *, ask_slurm: bool) -> None:
    """A signal that came to the launcher: which, and who sent it."""
    sender = said.get("pid") or 0
    command = " ".join(command_line(sender))[:200] if sender else ""
    job = os.environ.get("SLURM_JOB_ID")
    ending = said.get("arrived") in _ENDING
    state = _slurm_state(job) if job and ending and ask_slurm else None
    note_line(run.node(host).events, {
        "type": "signal", "wall_ns": said.get("wall_ns"),
        "signal": said.get("arrived"), "code": said.get("code"), "to_group": said.get("to_group"),
        "from_pid": sender or None, "from_uid": said.get("uid"), "from_command": command or None,
        "slurm_job": job, "slurm_state": state,
        "slurm_end_s": find_number(os.environ, ("SLURM_JOB_END_TIME",)),
    })  # fmt: skip


def _slurm_state(job: str) -> str | None:
    """What Slurm says of a job that it ends: `TIMEOUT`, `REQUEUED`, `PREEMPTED`, ...; or None."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", job, "-o"],
            capture_output=True, text=True, timeout=SLURM_WAIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    ran, limit = (_slurm_seconds(done.stdout, name) for name in ("RunTime", "TimeLimit"))
    if ran is not None and limit is not None and ran >= limit:
        return "TIMEOUT"  # a job that is being ended is `COMPLETING`, whatever the reason
    restarts = re.search(r"\bRestarts=(\d+)", done.stdout)  # counted before the job is ended
    if restarts and int(restarts[1]) > int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return "REQUEUED"
    match = re.search(r"\bJobState=([A-Z_]+)", done.stdout)
    return match[1] if match else None


def _slurm_seconds(said: str, name: str) -> int | None:
    """`1-02:03:04` of a field in seconds; None where it holds something else."""
    match = re.search(rf"\b{name}=(?:(\d{{1,6}})-)?(\d\d):(\d\d):(\d\d)\b", said)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def note_launcher_gone(run: RunPaths, host: str) -> None:
    """The launcher was killed; the job goes on."""
    times = {"time_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()}
    note_line(run.node(host).events, {"type": "launcher_gone", **times})


def _limit(place: Cgroup) -> float | None:
    """The tightest limit of a control group and those above it; None where there is none."""
    limit = tightest_limit(MEMORY_LIMIT, place)
    try:
        return limit.read()
    except (OSError, ValueError):
        return None
    finally:
        limit.close()


def _shared_memory() -> dict[str, int] | None:
    """How full /dev/shm is; None where it is not there."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    total, free = found.f_blocks * found.f_frsize, found.f_bfree * found.f_frsize
    return {"used_bytes": total - free, "total_bytes": total}
