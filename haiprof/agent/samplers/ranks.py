"""Rank processes from outside: CPU, memory, faults, bytes, and where each of them runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from haiprof.agent.samplers.table import Node, RankProcess, RankReports, TableSampler
from haiprof.base.control_group_limits import parse_cpu_list
from haiprof.base.errors import RunFormatError
from haiprof.linux import procfs, topology
from haiprof.linux.memory import MovePages, PageSample, move_pages
from haiprof.linux.processes import Family, ProcessTree
from haiprof.linux.procfs import file_reading
from haiprof.linux.readings import Entity, EntityGone, Reading, Unavailable, Value
from haiprof.run_format.tables import PLACEMENT, PROCESS

_OTHER_NAMESPACE = "run haiprof where the rank runs, in the same container"


class RankSampler(TableSampler):
    """Samples a table with the keys `pid, start_ticks`; a subclass gives the readings."""

    recorder = "process"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._reports = node.reports or RankReports(node.run.ranks, clock=node.clock)
        self._host, self._pid = node.host, node.pid
        self._read_folders: set[str] = set()

    def readings(self, process: RankProcess) -> tuple[Reading, ...]:
        """What is read of one process."""
        raise NotImplementedError

    def find(self) -> Iterable[Entity]:
        """The process that was asked for; ranks come with `refresh`."""
        if not (self.root / "proc").is_dir():
            raise Unavailable(f"{self.root / 'proc'}: no such folder")
        if self._pid is None:
            return []
        if (start_ticks := procfs.read_start_ticks(self.root, self._pid)) is None:
            raise Unavailable(f"no process {self._pid}")
        name = f"process {self._pid}"
        return [self._entity(RankProcess(name=name, pid=self._pid, start_ticks=start_ticks))]

    def refresh(self) -> None:
        """Adds the ranks that have reported in since."""
        for folder in sorted(self._new_folders()):
            self._find_rank(folder)

    def urgent(self) -> bool:
        """Whether a rank has reported in since the last sample."""
        return any(self._reports.is_there(folder) for folder in self._new_folders())

    def _new_folders(self) -> frozenset[str]:
        return self._reports.folders() - self._read_folders

    def _find_rank(self, folder: str) -> None:
        """Adds the process of a rank folder; a folder without a report waits."""
        if not self._reports.is_there(folder):
            return
        self._read_folders.add(folder)
        rank, _, attempt = folder.partition(".")
        name = f"rank {rank}" + (f" attempt {attempt}" if attempt else "")
        try:
            content = self._reports.content(folder)
            if content["host"] != self._host:
                return
            uuid = content.get("gpu_uuid")
            process = RankProcess(
                name=name, pid=int(content["pid"]), start_ticks=int(content["start_ticks"]),
                gpu_uuid=uuid if isinstance(uuid, str) else None,
            )  # fmt: skip
        except (RunFormatError, KeyError, TypeError, ValueError) as error:
            self.missing.note(name, Unavailable(f"its report cannot be used: {error!r}"))
            return
        # A restarted rank and a reused pid have another key, so that no rate spans both. The first
        # reading of a rank has to raise `EntityGone` when the process has ended.
        pid, start_ticks = process.pid, procfs.read_start_ticks(self.root, process.pid)
        if start_ticks is None:
            reason = f"no process {pid} (it has ended, or it runs in another PID namespace)"
            self.missing.note(name, Unavailable(reason, remedy=_OTHER_NAMESPACE))
        elif start_ticks != process.start_ticks:
            reason = f"process {pid} is not the one that reported in (it started at another time)"
            self.missing.note(name, Unavailable(reason))
        elif (pid, start_ticks) not in {entity.key for entity in self.entities}:
            self.add(self._entity(process))

    def _entity(self, process: RankProcess) -> Entity:
        key = (process.pid, process.start_ticks)
        return Entity(key=key, name=process.name, readings=self.readings(process))


_IO_COLUMNS = PROCESS.names("read_bytes", "storage_write_bytes")
_FAMILY_COLUMNS = PROCESS.names("process_count", "major_page_fault_count")
_SWITCH_COLUMNS = ("context_switch_count", "involuntary_context_switch_count")


class ProcessSampler(RankSampler):
    """One record per rank process of this host; ranks are found as they report in.

    Resident memory is summed over processes: pages that workers share with the rank count for
    each of them. Reads through mmap, GPUDirect storage and RDMA are not in the byte counters.
    Run-queue wait and context switches are those of the main thread alone, which runs the training
    loop: the kernel has no sum over threads (`/proc/PID/schedstat` and `status` are the main
    thread's), and a sum over `/proc/PID/task` costs as many reads as there are threads and steps
    back whenever one of them ends. As time of one thread, the wait is a share of its time.
    """

    table = PROCESS

    _rank_pids: Collection[int] = ()

    @cached_property
    def _tree(self) -> ProcessTree:
        return ProcessTree(self.root)

    def refresh(self) -> None:
        """Adds new ranks, and updates the process tree."""
        super().refresh()
        self._rank_pids = {entity.key[0] for entity in self.entities}
        if self._rank_pids:
            self._tree.refresh()

    def readings(self, process: RankProcess) -> tuple[Reading, ...]:
        """The process with its children, then its main thread."""
        folder = self.root / "proc" / str(process.pid)
        family = Family(process.pid, process.start_ticks)
        return (
            Reading(columns=_FAMILY_COLUMNS, read=partial(self._read_family, process, family),
                    origin=f"{folder}/{{io,statm,stat}} and those of its children"),
            file_reading(
                folder / "schedstat", ("run_queue_wait_ns",), parse_run_queue_wait,
                lacking="the kernel does not count it",
                remedy="a kernel with CONFIG_SCHEDSTATS, or sysctl kernel.task_delayacct=1",
            ),
            file_reading(folder / "status", _SWITCH_COLUMNS, parse_context_switches),
        )  # fmt: skip

    def _read_family(self, process: RankProcess, family: Family) -> tuple[Value | Unavailable, ...]:
        read = partial(procfs.read_process, self.root)
        if (totals := family.update(self._tree.children, read, others=self._rank_pids)) is None:
            raise EntityGone
        if (why := totals.child_io_missing) is not None:
            for column in _IO_COLUMNS:
                self.missing.note(column, why, of=f"{process.name}: a child is left out")
        io_bytes: tuple[int | Unavailable | None, ...] = totals.io_bytes or (totals.io_missing,) * 4
        return (
            totals.process_count, totals.cpu_ns, totals.cpu_main_ns, totals.cpu_main_system_ns,
            totals.rss_bytes, *io_bytes,
            totals.thread_count, totals.minor_faults + totals.major_faults, totals.major_faults,
        )  # fmt: skip


def parse_run_queue_wait(content: bytes) -> tuple[int | None]:
    """Time in ns in which a thread could run and had no CPU, from its schedstat."""
    # A kernel that does not count writes `0 0 0`, which a thread that ever ran cannot have.
    # Source: Linux Documentation/scheduler/sched-stats.rst, fs/proc/base.c proc_pid_schedstat().
    ran_ns, waited_ns, run_count = map(int, content.split())
    return (waited_ns if ran_ns or waited_ns or run_count else None,)


def parse_context_switches(content: bytes) -> tuple[int | None, int | None]:
    """All context switches of a thread and the involuntary ones, from its status."""
    voluntary = procfs.last_number(content, b"\nvoluntary_ctxt_switches:")
    involuntary = procfs.last_number(content, b"\nnonvoluntary_ctxt_switches:")
    if voluntary is None or involuntary is None:
        return (None, involuntary)
    return (voluntary + involuntary, involuntary)


FEWEST_PAGES = 16  # a share of fewer pages is noise
_SHARE_STEP = 0.1  # a memory share that changed by more is worth a new line
_THREADS_STEP = 0.25  # and so is such a part of the thread count
_HZ_PER_KHZ = 1000
_ALLOWED = b"\nCpus_allowed_list:"


class PlacementSampler(RankSampler):
    """One record per rank process, and an event line whenever its placement changes.

    The line has `type: placement`, `pid`, `start_ticks`, `allowed_cpus` (as the kernel prints
    them), `thread_count`, `cpu_nodes` (NUMA nodes of the allowed CPUs), `memory_nodes` (sampled
    pages in memory by node), `gpu_uuid`, `gpu_bus_id`, `gpu_node`, `gpu_cpus` (CPUs near to the
    GPU) and `nics` (`name`, `node`, and `near_gpu`: whether it shares the nearest PCIe switch
    with the GPU). What is not known is null. Affinity and CPU are the main thread's.
    """

    every = 10
    table = PLACEMENT

    def __init__(self, node: Node, *, ask: MovePages = move_pages) -> None:
        super().__init__(node)
        self._ask = ask
        self._nodes: Mapping[int, int] | None = None
        self._places: dict[tuple[int, ...], _ProcessPlacement] = {}
        self._told: dict[tuple[int, ...], Mapping[str, Any]] = {}

    def readings(self, process: RankProcess) -> tuple[Reading, ...]:
        """Its CPU, affinity, frequency and pages."""
        if self._nodes is None:
            self._nodes = topology.node_of_cpu(self.root)
        place = _ProcessPlacement(process, self.root, self._nodes, self._ask)
        self._places[process.pid, process.start_ticks] = place
        return place.readings()

    def sample(self) -> bytes:
        """One record per rank; what changed is kept as a line."""
        data = super().sample()
        for entity in self.entities:
            line, old = self._places[entity.key].line(), self._told.get(entity.key)
            if old is None or is_other_placement(old, line):
                self._told[entity.key] = line
                self.note_line(line)
        return data

    def drop(self, key: tuple[int, ...]) -> None:
        """Forgets a process that has ended."""
        super().drop(key)
        del self._places[key]
        self._told.pop(key, None)


def is_other_placement(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a line differs by more than usual fluctuation."""
    moving = ("thread_count", "memory_nodes")
    if any(old[name] != value for name, value in new.items() if name not in moving):
        return True
    if abs(new["thread_count"] - old["thread_count"]) > _THREADS_STEP * old["thread_count"]:
        return True
    before, after = _shares(old["memory_nodes"]), _shares(new["memory_nodes"])
    if before is None or after is None:
        return before is not after
    nodes = before.keys() | after.keys()
    return any(abs(after.get(n, 0) - before.get(n, 0)) > _SHARE_STEP for n in nodes)


def _shares(pages: Mapping[str, int] | None) -> dict[str, float] | None:
    """By node; null where too few pages are known."""
    if pages is None or sum(pages.values()) < FEWEST_PAGES:
        return None
    return {node: count / sum(pages.values()) for node, count in pages.items()}


@dataclass
class _ProcessPlacement:
    """The placement of one rank process; its reads store what the event line needs."""

    process: RankProcess
    root: Path
    nodes: Mapping[int, int]
    ask: MovePages
    _cpu: int = 0
    _thread_count: int = 0
    _allowed: str | None = None
    _pages: Mapping[int, int] | None = None
    _hardware: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._folder = self.root / "proc" / str(self.process.pid)
        self._sample = PageSample(self.process.pid, root=self.root, ask=self.ask)

    def readings(self) -> tuple[Reading, ...]:
        """In this order: the first one sees whether the process is still the same."""
        no_nodes = "no NUMA nodes in /sys/devices/system/node: a kernel without CONFIG_NUMA"
        return (
            Reading(columns=("last_cpu", "cpu_node"), origin=f"{self._folder}/stat",
                    read=self._read_cpu, lacking=no_nodes),
            file_reading(self._folder / "status", ("allowed_cpu_count",), self._parse_status),
            Reading(columns=("cpu_frequency_hz",), read=self._read_frequency,
                    origin="/sys/devices/system/cpu/cpuN/cpufreq/scaling_cur_freq",
                    lacking="no frequency scaling, as in virtual machines"),
            Reading(columns=("sampled_page_count", "local_page_ratio"), read=self._read_pages,
                    origin=f"move_pages(2), {self._folder}/maps"),
        )  # fmt: skip

    def line(self) -> dict[str, Any]:
        uuid = self.process.gpu_uuid
        if self._hardware is None or (uuid is not None and self._hardware["gpu_bus_id"] is None):
            self._hardware = _hardware(self.root, uuid)
        pages = self._pages
        return {
            "type": "placement", "pid": self.process.pid, "start_ticks": self.process.start_ticks,
            "allowed_cpus": self._allowed, "thread_count": self._thread_count,
            "cpu_nodes": sorted(self._allowed_nodes()) or None,
            "memory_nodes": None if pages is None else {str(n): pages[n] for n in sorted(pages)},
            **self._hardware,
        }  # fmt: skip

    def _read_cpu(self) -> tuple[int, int | None]:
        fields = procfs.read_stat(self.root, self.process.pid)
        if fields is None or int(fields[19]) != self.process.start_ticks or fields[0] in b"ZXx":
            raise EntityGone
        self._thread_count = int(fields[17])
        self._cpu = int(fields[36])
        return self._cpu, self.nodes.get(self._cpu)

    def _parse_status(self, content: bytes) -> tuple[int | None]:
        self._allowed = None
        at = content.find(_ALLOWED)
        if at < 0:
            return (None,)
        allowed = content[at + len(_ALLOWED) :].split(b"\n", 1)[0].strip().decode("ascii")
        count = len(parse_cpu_list(allowed))
        self._allowed = allowed
        return (count,)

    def _allowed_nodes(self) -> set[int]:
        return {self.nodes[cpu] for cpu in parse_cpu_list(self._allowed or "") if cpu in self.nodes}

    def _read_frequency(self) -> tuple[int]:
        """Of one CPU only: some kernels sleep for 10 ms at each (node_exporter issue 2966)."""
        file = self.root / f"sys/devices/system/cpu/cpu{self._cpu}/cpufreq/scaling_cur_freq"
        return (int(file.read_text()) * _HZ_PER_KHZ,)

    def _read_pages(self) -> tuple[int, float | Unavailable]:
        self._pages = None
        try:
            self._pages = self._sample.pages_by_node()
        except ProcessLookupError:
            raise EntityGone from None
        count, near = sum(self._pages.values()), self._allowed_nodes()
        if not near:
            why = "the nodes of the allowed CPUs are not known"
            return count, Unavailable(why, status="unsupported")
        if count < FEWEST_PAGES:
            why = f"fewer than {FEWEST_PAGES} of the sampled pages are in memory"
            return count, Unavailable(why)
        return count, sum(self._pages.get(node, 0) for node in near) / count


def _hardware(root: Path, gpu_uuid: str | None) -> dict[str, Any]:
    """The part of the line about the GPU and the network adapters."""
    bus_id = None if gpu_uuid is None else topology.gpu_bus_id(root, gpu_uuid)
    gpu = None if bus_id is None else topology.pci_device(root, bus_id)
    found = topology.adapters(root)
    nearest = set() if gpu is None else topology.nearest_adapters(gpu, found)
    nics = [
        {"name": each.name, "node": each.pci and each.pci.node,
         "near_gpu": gpu and each.name in nearest}
        for each in found
    ]  # fmt: skip
    return {
        "gpu_uuid": gpu_uuid, "gpu_bus_id": bus_id, "gpu_node": gpu and gpu.node,
        "gpu_cpus": gpu and gpu.cpus, "nics": nics,
    }  # fmt: skip
