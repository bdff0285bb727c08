"""Per-rank CPU, memory, faults and read/write bytes, children included, read from outside."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from haiprof.agent.samplers.rank_reports import RankProcess, RankReports
from haiprof.agent.samplers.ranks import RankSampler
from haiprof.linux.process_family import Family
from haiprof.linux.process_tree import ProcessTree
from haiprof.linux.procfs import file_reading, read_process
from haiprof.linux.readings import Clock, EntityGone, Reading, Unavailable, Value
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables.process import PROCESS

_IO_COLUMNS = ("read_bytes", "write_bytes", "storage_read_bytes", "storage_write_bytes")
_FAMILY_COLUMNS = (
    "process_count",
    "cpu_ns",
    "cpu_main_ns",
    "memory_rss_bytes",
    "thread_count",
    "page_fault_count",
    "major_page_fault_count",
    *_IO_COLUMNS,
)
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

    name = "process"
    table = PROCESS

    def __init__(
        self,
        run: RunPaths,
        host: str,
        *,
        pid: int | None = None,
        root: Path = Path("/"),
        clock: Clock = time.perf_counter_ns,
        reports: RankReports | None = None,
    ) -> None:
        super().__init__(run, host, pid=pid, root=root, clock=clock, reports=reports)
        self._tree = ProcessTree(root)
        self._rank_pids: set[int] = set()

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
            Reading(
                columns=_FAMILY_COLUMNS,
                origin=f"{folder}/{{io,statm,stat}} and those of its children",
                read=partial(self._read_family, process, family),
            ),
            file_reading(
                folder / "schedstat",
                ("run_queue_wait_ns",),
                parse_run_queue_wait,
                lacking="the kernel does not count it",
                remedy="a kernel with CONFIG_SCHEDSTATS, or sysctl kernel.task_delayacct=1",
            ),
            file_reading(folder / "status", _SWITCH_COLUMNS, parse_context_switches),
        )

    def _read_family(self, process: RankProcess, family: Family) -> tuple[Value | Unavailable, ...]:
        read = partial(read_process, self.root)
        totals = family.update(self._tree.children, read, others=self._rank_pids)
        if totals is None:
            raise EntityGone
        if totals.child_io_missing is not None:
            self._note_child(process, totals.child_io_missing)
        io_bytes: tuple[int | Unavailable | None, ...] = totals.io_bytes or (totals.io_missing,) * 4
        return (
            totals.process_count,
            totals.cpu_ns,
            totals.cpu_main_ns,
            totals.rss_bytes,
            totals.thread_count,
            totals.minor_faults + totals.major_faults,
            totals.major_faults,
            *io_bytes,
        )

    def _note_child(self, process: RankProcess, why: Unavailable) -> None:
        for column in _IO_COLUMNS:
            reason = f"{process.name}: a child is left out: {why.reason}"
            self.missing.note(column, reason, why.status, why.remedy)


def parse_run_queue_wait(content: bytes) -> tuple[int | None]:
    """Time in ns in which a thread could run and had no CPU, from its schedstat.

    A kernel that does not count writes `0 0 0`, which a thread that ever ran cannot have.

    Source: Linux Documentation/scheduler/sched-stats.rst, fs/proc/base.c proc_pid_schedstat().
    """
    ran_ns, waited_ns, run_count = map(int, content.split())
    return (waited_ns if ran_ns or waited_ns or run_count else None,)


def parse_context_switches(content: bytes) -> tuple[int | None, int | None]:
    """All context switches of a thread and the involuntary ones, from its status."""
    voluntary = _status_number(content, b"\nvoluntary_ctxt_switches:")
    involuntary = _status_number(content, b"\nnonvoluntary_ctxt_switches:")
    if voluntary is None or involuntary is None:
        return (None, involuntary)
    return (voluntary + involuntary, involuntary)


def _status_number(content: bytes, name: bytes) -> int | None:
    at = content.find(name)
    return None if at < 0 else int(content[at + len(name) :].split(None, 1)[0])
