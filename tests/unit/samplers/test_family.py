"""Counters of a rank and its workers, on a kernel in small: fork, run, exit, wait, be adopted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.linux.processes import Family, FamilyTotals, ProcessTree
from haiprof.linux.procfs import TICK_NS, ProcessReading, read_process
from tests.fakes import FakeProcess, FakeTree
from tests.sampling import examples


class Kernel:
    """Processes with the kernel's own bookkeeping, and the truth about what a family did."""

    def __init__(self, tmp_path: Path) -> None:
        self.tree = FakeTree(tmp_path)
        self.processes = {10: FakeProcess(pid=10, ticks=5, io=(100, 0, 0, 0))}
        self.table = ProcessTree(tmp_path)
        self.family = Family(10, 1000)
        self.after_read: dict[int, list[FakeProcess]] = {}
        self.waits = True
        self.all_waited = True
        self.tree.process(self.processes[10])

    def fork(self, pid: int, parent: int = 10) -> FakeProcess:
        self.processes[pid] = FakeProcess(pid=pid, parent=parent, start=1000 + pid)
        return self.work(pid, ticks=0, rchar=0)

    def work(self, pid: int, *, ticks: int, rchar: int) -> FakeProcess:
        process = self.processes[pid]
        process.ticks += ticks
        process.faults += 1
        io = process.io or (0, 0, 0, 0)
        process.io = (io[0] + rchar, *io[1:])
        self.tree.process(process)
        return process

    def exit(self, pid: int, *, waited: bool | None = None) -> None:
        waited = self.waits if waited is None else waited
        process = self.processes.pop(pid)
        self.tree.remove(f"proc/{pid}")
        for child in self.processes.values():
            if child.parent == pid:
                child.parent, self.all_waited = 1, False
                self.tree.process(child)
        if not waited or process.parent not in self.processes:
            self.all_waited = False
        else:
            self.processes[process.parent].waits_for(process)
            self.tree.process(self.processes[process.parent])

    def read(self, pid: int) -> ProcessReading | None:
        reading = read_process(self.tree.root, pid)
        for process in self.after_read.pop(pid, ()):
            self.exit(process.pid)
        return reading

    def totals(self) -> FamilyTotals:
        self.table.refresh()
        totals = self.family.update(self.table.children, self.read)
        assert totals is not None
        return totals

    def counters(self) -> tuple[int, int]:
        totals = self.totals()
        assert totals.io_bytes is not None
        return totals.cpu_ns // TICK_NS, totals.io_bytes[0]


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_family_includes_children_and_grandchildren(kernel: Kernel) -> None:
    kernel.fork(11)
    kernel.fork(12, parent=11)
    kernel.work(11, ticks=10, rchar=1000)
    kernel.work(12, ticks=20, rchar=2000)
    totals = kernel.totals()
    assert totals.process_count == 3
    assert totals.cpu_ns == 35 * TICK_NS
    assert totals.cpu_main_ns == 5 * TICK_NS
    assert totals.io_bytes == (3100, 0, 0, 0)
    assert totals.thread_count == 3


def test_family_worker_that_ends_between_two_reads_is_carried_until_the_wait_shows(
    kernel: Kernel,
) -> None:
    worker = kernel.fork(11)
    kernel.work(11, ticks=10, rchar=1000)
    assert kernel.counters() == (15, 1100)
    kernel.after_read[10] = [worker]  # ends right after its parent was read
    assert kernel.counters() == (15, 1100)
    assert kernel.counters() == (15, 1100)
    kernel.work(10, ticks=1, rchar=1)
    assert kernel.counters() == (16, 1101)


def test_family_worker_that_nobody_waits_for_keeps_its_share(kernel: Kernel) -> None:
    kernel.fork(11)
    kernel.work(11, ticks=10, rchar=1000)
    assert kernel.counters() == (15, 1100)
    kernel.exit(11, waited=False)
    kernel.work(10, ticks=50, rchar=5000)  # more than the worker ever did
    assert kernel.counters() == (65, 6100)
    assert kernel.counters() == (65, 6100)
    assert kernel.counters() == (65, 6100)


def test_family_orphan_stays_a_member(kernel: Kernel) -> None:
    kernel.fork(11)
    kernel.fork(12, parent=11)
    kernel.work(12, ticks=10, rchar=1000)
    assert kernel.counters() == (15, 1100)
    kernel.exit(11)
    kernel.work(12, ticks=10, rchar=1000)
    assert kernel.counters() == (25, 2100)
    kernel.exit(12, waited=False)
    assert kernel.counters() == (25, 2100)
    assert kernel.counters() == (25, 2100)


def test_family_reused_pid_of_a_worker_is_another_process(kernel: Kernel) -> None:
    kernel.fork(11)
    kernel.work(11, ticks=10, rchar=1000)
    assert kernel.counters() == (15, 1100)
    kernel.exit(11)
    stranger = FakeProcess(pid=11, parent=1, start=9999, ticks=7000)
    kernel.tree.process(stranger)
    totals = kernel.totals()
    assert (totals.process_count, totals.cpu_ns) == (1, 15 * TICK_NS)


def test_family_ends_with_its_process(kernel: Kernel) -> None:
    kernel.totals()
    kernel.processes[10].state = "Z"
    kernel.tree.process(kernel.processes[10])
    assert kernel.family.update({}, kernel.read) is None
    kernel.processes[10].state, kernel.processes[10].start = "S", 2000
    kernel.tree.process(kernel.processes[10])
    assert kernel.family.update({}, kernel.read) is None


def test_family_faults_include_those_of_waited_children(kernel: Kernel) -> None:
    worker = kernel.fork(11)
    worker.major_faults = 7
    kernel.work(11, ticks=1, rchar=1)
    before = kernel.totals()
    assert (before.minor_faults, before.major_faults) == (202, 7)
    worker.major_faults = 9  # after the last read
    kernel.work(11, ticks=1, rchar=1)
    kernel.exit(11)
    after = kernel.totals()
    assert (after.minor_faults, after.major_faults) == (203, 9)


def test_family_zombie_worker_counts_its_time_but_not_as_a_process(kernel: Kernel) -> None:
    kernel.fork(11)
    kernel.work(11, ticks=10, rchar=1000)
    kernel.processes[11].state = "Z"
    kernel.tree.process(kernel.processes[11])
    totals = kernel.totals()
    assert (totals.process_count, totals.cpu_ns) == (1, 15 * TICK_NS)


@pytest.mark.parametrize("waited", [11, 12])
def test_family_two_workers_end_and_one_is_waited_for(kernel: Kernel, waited: int) -> None:
    for pid in (11, 12):
        kernel.fork(pid)
        kernel.processes[pid].faults = 20 * pid
        kernel.work(pid, ticks=pid, rchar=pid)
    assert kernel.counters() == (28, 123)
    for pid in (11, 12):
        kernel.exit(pid, waited=pid == waited)
    assert kernel.counters() == (28, 123)
    assert kernel.counters() == (28, 123)


_EVENT = st.tuples(
    st.sampled_from(["fork", "work", "exit", "exit_after_read", "sample"]),
    st.integers(0, 6),
    st.integers(1, 50),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.booleans(), st.lists(_EVENT, max_size=25))
def test_family_counters_never_go_back_and_settle_at_the_truth(
    tmp_path_factory: pytest.TempPathFactory, waits: bool, events: list[tuple[str, int, int]]
) -> None:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    kernel.waits = waits
    truth, last, next_pid = (5, 100), (0, 0), 11
    for event, which, amount in events:
        pid = sorted(kernel.processes)[which % len(kernel.processes)]
        if event == "fork":
            kernel.fork(next_pid, parent=pid)
            next_pid += 1
        elif event == "work":
            kernel.work(pid, ticks=amount, rchar=amount * 10)
            truth = (truth[0] + amount, truth[1] + amount * 10)
        elif event == "sample":
            now = kernel.counters()
            assert all(new >= old for new, old in zip(now, last, strict=True))
            assert all(new <= most for new, most in zip(now, truth, strict=True))
            last = now
        elif pid != 10 and event == "exit_after_read":
            kernel.after_read.setdefault(10, []).append(kernel.processes[pid])
            kernel.counters()
        elif pid != 10:
            kernel.exit(pid)
    settled = kernel.counters(), kernel.counters()
    assert all(now <= most for now, most in zip(settled[1], truth, strict=True))
    if kernel.all_waited:
        assert settled[1] == truth
