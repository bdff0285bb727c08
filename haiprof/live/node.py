"""The agent of a node without a job: counters for months, jobs that come and go, GPUs held."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.agent.node_history import NodeHistory
from haiprof.agent.samplers.loop import SamplingLoop
from haiprof.agent.samplers.nvml import Nvml
from haiprof.base.errors import UsageError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_ACTIVE, Options
from haiprof.base.safe_files import (
    file_size,
    make_folder,
    make_named_folder,
    open_to_append,
    rename,
)
from haiprof.base.units import NS_PER_S, bytes_text, shorten
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
from haiprof.run_format.layout import NodePaths, RunPaths
from haiprof.run_format.node_history import TIERS
from haiprof.run_format.secrets import mask_command
from haiprof.run_format.writer import note_line

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


def open_nvml() -> Nvml | None:
    """NVML, ready to be asked; None where there is none."""
    nvml = Nvml()
    try:
        nvml.open()
    except Unavailable:
        return None
    return nvml


@dataclass
class JobWatch:
    """Finds processes that run under haiprof or have torch loaded, and joins them to jobs.

    A job is a run of haiprof, or a process with torch, its descendants with torch and what else of
    its process group has it. Of other users' processes only root can look into the maps.
    """

    holders: Callable[[], Holders] = dict
    proc: Path = Path("/proc")
    clock: Callable[[], float] = time.monotonic
    boot_clock: Clock = boot_ns
    wall_clock: Clock = time.time_ns
    _due_s: dict[int, float] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _held: dict[int, Collection[int]] = field(default_factory=dict)

    def scan(self) -> list[Line]:
        """What came and went since the last call, as lines for `NodePaths.seen`."""
        alive, now_s = set(process_ids(self.proc)), self.clock()
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
        root = self.proc.parent
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
        fields = read_stat(self.proc.parent, pid)
        if fields is None:
            return
        ticks = int(fields[19])
        age_ns = max(0, self.boot_clock() - ticks * TICK_NS)
        self._due_s[pid] = now_s + min(max(2 * age_ns / NS_PER_S, SCAN_S), _LONGEST_S)
        run = environment(pid, proc=self.proc).get(ENV_ACTIVE) or None
        if run is None and not has_mapped(pid, b"libtorch", proc=self.proc):
            return
        parent, group = int(fields[1]), int(fields[2])
        job = self._job_of(run, parent, group)
        if job is None:
            job = _Job(id=f"{pid}-{ticks}", run=run, group=group)
            self._jobs[job.id] = job
            yield {
                "type": "job_start", "job": job.id, "run": run, **self._describe(pid),
                "start_wall_ns": self.wall_clock() - age_ns,
            }  # fmt: skip
        job.members[pid] = ticks
        job.most = max(job.most, len(job.members))

    def _job_of(self, run: str | None, parent: int, group: int) -> _Job | None:
        for job in self._jobs.values():
            if job.run == run and (run is not None or parent in job.members or job.group == group):
                return job
        return None

    def _find_holders(self) -> Iterator[Line]:
        held, members = {gpu: set(pids) for gpu, pids in self.holders().items()}, self._members()
        for gpu in sorted(held.keys() | self._held.keys()):
            before, now = set(self._held.get(gpu, ())), held.get(gpu, set())
            for pid in sorted(before - now):
                yield {"type": "gpu_released", "gpu": gpu, "pid": pid}
            for pid in sorted(now - before):
                job = members[pid].id if pid in members else None
                yield {"type": "gpu_held", "gpu": gpu, "job": job, **self._describe(pid)}
        self._held = dict(held)

    def _describe(self, pid: int) -> Line:
        command = " ".join(mask_command(command_line(pid, proc=self.proc)))
        return {"pid": pid, "uid": user_id(pid, proc=self.proc), "command": shorten(command)}


RECORDERS = ("host", "gpu", "infiniband", "numa", "filesystem")
"""What is sampled: all that needs no rank."""
_DAY_S, _COST_S = 86_400.0, 600.0
_LINES_BYTES = 4 << 20
"""Of what was seen, and of events: the same once more is kept of what was before."""
_SETTLED_S = 3.0
"""After so long every source was sampled."""
_SAID = {
    "disk_full": "{reason}: counters are dropped until there is room",
    "disk_again": "there is room again: counters are kept",
    "clock_set": "the clock was set, or the machine slept: {by_ns:+} ns",
}


def run_node_agent(
    folder: Path, *, limit_bytes: int, options: Options, stop: threading.Event
) -> None:
    """Records this node into its own folder below `folder`, until it is told to stop."""
    make_named_folder(folder, mode=0o700)
    node = RunPaths(folder.absolute()).node(socket.gethostname())
    make_folder(node.root, below=node.run_root)
    with _only_agent(node):
        _Agent(node, limit_bytes, options).run(stop)


@contextmanager
def _only_agent(node: NodePaths) -> Iterator[None]:
    """Holds a lock that the kernel releases when this process ends."""
    fd = open_to_append(node.lock, below=node.run_root)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{node.root}: a node agent already records this node",
                hint="haiprof node --show shows what it has",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


@dataclass
class _Agent:
    """Counters in a thread; jobs, holders of GPUs and its own cost in the main thread."""

    node: NodePaths
    limit_bytes: int
    options: Options
    _loop: SamplingLoop | None = None
    _cost_s: float = 0.0

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        node, nvml = self.node, open_nvml()
        watch = JobWatch(holders=dict if nvml is None else lambda: gpu_holders(nvml))
        self._say_what_is_kept()
        self._note({"type": "agent_start", "pid": os.getpid(), "uid": os.getuid()})
        scrape = None
        if self.options.prometheus_port:
            from haiprof.agent.prometheus_endpoint import Scrape

            run = RunPaths(node.run_root)
            scrape = Scrape(
                run, node.root.name, self.options, lambda: self._loop.streams if self._loop else ()
            )
            scrape.start()
        try:
            while not stop.is_set():
                self._record(watch, stop)
        finally:
            if scrape is not None:
                scrape.stop()
            if nvml is not None:
                nvml.close()
            self._note_cost()
            self._note({"type": "agent_end"})

    def _record(self, watch: JobWatch, stop: threading.Event) -> None:
        """One day: then sources are found anew, and what is known of those that went is dropped."""
        node, over = self.node, threading.Event()
        _put_away(node, node.events)
        limit_bytes = max(0, self.limit_bytes - 4 * _LINES_BYTES)
        history = NodeHistory(node, limit_bytes, note=self._note)
        run = RunPaths(node.run_root)
        loop = SamplingLoop(run, node.root.name, self.options, open_writer=history.open_source)
        self._loop = loop
        thread = threading.Thread(target=loop.run, args=(over,), name="haiprof-sampler")
        thread.start()
        begun_s = time.monotonic()
        try:
            stop.wait(_SETTLED_S)
            self._say_sizes(history)
            while (
                time.monotonic() - begun_s < _DAY_S and (file_size(node.events) or 0) < _LINES_BYTES
            ):
                for line in watch.scan():
                    self._note(line)
                if time.monotonic() - self._cost_s > _COST_S:
                    self._note_cost()
                if loop.failure or stop.wait(SCAN_S):
                    break
        finally:
            over.set()
            thread.join()
        if loop.failure:
            print_message(f"{loop.failure}: trying again in a minute")
            stop.wait(60.0)

    def _note(self, line: Mapping[str, object]) -> None:
        """Writes a line of what was seen; on a full disk it is lost."""
        said = _SAID.get(str(line["type"]))
        if said is not None:
            print_message(said.format_map(line))
        _put_away(self.node, self.node.seen, at_bytes=_LINES_BYTES)
        note_line(self.node.seen, {"wall_ns": time.time_ns(), **line})

    def _note_cost(self) -> None:
        self._cost_s = time.monotonic()
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cpu_ns = time.process_time_ns()
        self._note({"type": "agent_cost", "cpu_ns": cpu_ns, "peak_rss_bytes": peak_bytes})

    def _say_what_is_kept(self) -> None:
        kept = ", ".join(f"{tier.name} for {tier.kept_text}" for tier in TIERS)
        limit = bytes_text(self.limit_bytes)
        print_message(f"recording this node into {self.node.root}: {kept}; at most {limit}")
        if os.geteuid():
            print_message(
                "not root: other users' jobs without haiprof are seen only where they hold a GPU; "
                "haiprof doctor lists the counters that need more"
            )

    def _say_sizes(self, history: NodeHistory) -> None:
        """How much it will be, by the rows that this node has."""
        tiers = [
            sum(files[place].most_bytes for files in history.files.values())
            for place in range(len(TIERS))
        ]
        whole = sum(tiers)
        sizes = ", ".join(
            f"{tier.name} {bytes_text(size)}" for tier, size in zip(TIERS, tiers, strict=True)
        )
        cut = f"; the oldest goes at {bytes_text(self.limit_bytes)}"
        print_message(
            f"when full {bytes_text(whole)} ({sizes})" + (cut if whole > self.limit_bytes else "")
        )
        self._note({"type": "sizes", "whole_bytes": whole, "limit_bytes": self.limit_bytes})


def _put_away(node: NodePaths, path: Path, *, at_bytes: int = 0) -> None:
    """Moves a file of lines to the place of the one before, where it has so many bytes."""
    if (file_size(path) or 0) > at_bytes:
        with suppress(OSError):
            rename(path, node.earlier(path), below=node.run_root)
