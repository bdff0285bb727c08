"""Jobs of a node as they come and go, also those without haiprof, and which processes hold GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from haiprof.agent.samplers.nvml import Nvml
from haiprof.base.options import ENV_ACTIVE
from haiprof.base.units import NS_PER_S, shorten
from haiprof.linux.procfs import (
    TICK_NS,
    boot_ns,
    command_line,
    environment,
    has_mapped,
    process_ids,
    read_start_ticks,
    read_stat,
    user_id,
)
from haiprof.linux.readings import Clock, Unavailable
from haiprof.run_format.secrets import mask_command

SCAN_S = 5.0
_LONGEST_S = 600.0
"""Between two looks at a process that has not loaded torch; each waits twice the process's age, as
the maps of hundreds of processes at every scan would cost more than all counters."""
Holders = Mapping[int, Collection[int]]
Line = dict[str, object]


@dataclass(slots=True, kw_only=True)
class _Job:
    id: str
    run: str | None
    group: int
    members: dict[int, int] = field(default_factory=dict)
    """Start ticks by process."""
    most: int = 0


def gpu_holders(nvml: Nvml) -> dict[int, set[int]]:
    """Processes with memory on each GPU, as the driver numbers them; of no GPU without NVML."""
    found: dict[int, set[int]] = {}
    try:
        for gpu in range(nvml.call("nvmlDeviceGetCount")):
            handle = nvml.call("nvmlDeviceGetHandleByIndex", gpu)
            held = nvml.call("nvmlDeviceGetComputeRunningProcesses", handle)
            found[gpu] = {int(process.pid) for process in held}
    except Unavailable:
        return found
    return found


def open_nvml(module: ModuleType | None = None) -> Nvml | None:
    """NVML, ready to be asked; None where there is none."""
    nvml = Nvml(module)
    try:
        nvml.open()
    except Unavailable:
        return None
    return nvml


class JobWatch:
    """Finds processes that run under haiprof or have torch loaded, and joins them to jobs.

    A job is a run of haiprof, or a process with torch, its descendants with torch and what else of
    its process group has it. Of other users' processes only root can look into the maps.
    """

    def __init__(
        self,
        *,
        holders: Callable[[], Holders] = dict,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
        boot_clock: Clock = boot_ns,
        wall_clock: Clock = time.time_ns,
    ) -> None:
        self._holders, self._proc, self._clock = holders, proc, clock
        self._boot_clock, self._wall_clock = boot_clock, wall_clock
        self._due_s: dict[int, float] = {}
        self._jobs: dict[str, _Job] = {}
        self._held: dict[int, Collection[int]] = {}

    def scan(self) -> list[Line]:
        """What came and went since the last call, as lines for `NodePaths.seen`."""
        alive, now_s = set(process_ids(self._proc)), self._clock()
        lines = [*self._find_ended(alive)]
        members = self._members()
        self._due_s = {pid: due for pid, due in self._due_s.items() if pid in alive}
        for pid in sorted(alive - members.keys()):
            if self._due_s.get(pid, 0.0) <= now_s:
                lines += self._look(pid, now_s)
        return [*lines, *self._find_holders()]

    def _members(self) -> dict[int, _Job]:
        return {pid: job for job in self._jobs.values() for pid in job.members}

    def _find_ended(self, alive: Collection[int]) -> Iterator[Line]:
        root = self._proc.parent
        for job in list(self._jobs.values()):
            for pid, ticks in list(job.members.items()):
                if pid not in alive or read_start_ticks(root, pid) != ticks:
                    del job.members[pid]
                    self._due_s.pop(pid, None)  # its number may be another's by now
            if not job.members:
                del self._jobs[job.id]
                yield {"type": "job_end", "job": job.id, "process_count": job.most}

    def _look(self, pid: int, now_s: float) -> Iterator[Line]:
        """A line where a process begins a job."""
        fields = read_stat(self._proc.parent, pid)
        if fields is None:
            return
        ticks = int(fields[19])
        age_ns = max(0, self._boot_clock() - ticks * TICK_NS)
        self._due_s[pid] = now_s + min(max(2 * age_ns / NS_PER_S, SCAN_S), _LONGEST_S)
        run = environment(pid, proc=self._proc).get(ENV_ACTIVE) or None
        if run is None and not has_mapped(pid, b"libtorch", proc=self._proc):
            return
        parent, group = int(fields[1]), int(fields[2])
        job = self._job_of(run, parent, group)
        if job is None:
            job = _Job(id=f"{pid}-{ticks}", run=run, group=group)
            self._jobs[job.id] = job
            yield {
                "type": "job_start", "job": job.id, "run": run, **self._describe(pid),
                "start_wall_ns": self._wall_clock() - age_ns,
            }  # fmt: skip
        job.members[pid] = ticks
        job.most = max(job.most, len(job.members))

    def _job_of(self, run: str | None, parent: int, group: int) -> _Job | None:
        for job in self._jobs.values():
            if job.run == run and (run is not None or parent in job.members or job.group == group):
                return job
        return None

    def _find_holders(self) -> Iterator[Line]:
        held, members = {gpu: set(pids) for gpu, pids in self._holders().items()}, self._members()
        for gpu in sorted(held.keys() | self._held.keys()):
            before, now = set(self._held.get(gpu, ())), held.get(gpu, set())
            for pid in sorted(before - now):
                yield {"type": "gpu_released", "gpu": gpu, "pid": pid}
            for pid in sorted(now - before):
                job = members[pid].id if pid in members else None
                yield {"type": "gpu_held", "gpu": gpu, "job": job, **self._describe(pid)}
        self._held = dict(held)

    def _describe(self, pid: int) -> Line:
        command = " ".join(mask_command(command_line(pid, proc=self._proc)))
        return {"pid": pid, "uid": user_id(pid, proc=self._proc), "command": shorten(command)}
