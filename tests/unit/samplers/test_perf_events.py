from __future__ import annotations

import errno
import mmap
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest

from haiprof.base.control_group_limits import parse_cpu_list
from haiprof.linux.perf_events import (
    EXCLUDE_KERNEL,
    INHERIT,
    TYPE_HARDWARE,
    TYPE_RAW,
    TYPE_SOFTWARE,
    Event,
    Kernel,
    ScaledSum,
    paranoid,
    refusal,
)
from haiprof.linux.readings import Unavailable
from haiprof.linux.topology import no_core_pmu, read_cpu
from tests.fake_pmu import FakePerf, cpu, threads
from tests.fakes import FakeTree

RAW = Event(name="raw", type=TYPE_RAW, config=7, bits=EXCLUDE_KERNEL)
PAGE_FAULTS = Event(name="page-faults", type=TYPE_SOFTWARE, config=2, bits=EXCLUDE_KERNEL | INHERIT)
TASK_CLOCK = Event(name="task-clock", type=TYPE_SOFTWARE, config=1, bits=EXCLUDE_KERNEL)
ROOT = Path("/")


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    tree = FakeTree(tmp_path)
    tree.write("proc/sys/kernel/perf_event_paranoid", "2\n")
    threads(tree, 10, (10, 11))
    return tree


def counter(
    perf: Kernel, shares: list[float] | None = None, *, event: Event = RAW, pid: int = 10
) -> ScaledSum:
    counted = ScaledSum(perf, event, [] if shares is None else shares)
    counted.open(pid=pid, cpu=-1)
    return counted


def test_counter_that_always_ran_is_exact(tree: FakeTree) -> None:
    perf, shares = FakePerf(tree), list[float]()
    counted = counter(perf, shares)
    assert counted.read() == 0
    perf.runs(10, 7, 12345)
    perf.runs(11, 7, 99)
    assert (counted.read(), shares) == (12345, [1.0])


def test_counter_that_took_turns_is_scaled_per_interval_and_says_so(tree: FakeTree) -> None:
    perf, shares = FakePerf(tree), list[float]()
    counted = counter(perf, shares)
    perf.runs(10, 7, 1000, share=0.25)
    assert (counted.read(), shares) == (1000, [0.25])
    perf.runs(10, 7, 8000)
    assert (counted.read(), shares) == (9000, [0.25, 1.0])


def test_counter_never_goes_back_when_its_share_of_the_hardware_grows(tree: FakeTree) -> None:
    perf = FakePerf(tree)
    counted = counter(perf)
    seen = []
    for count, share in ((10_000, 0.1), (0, 1.0), (0, 1.0), (5, 0.5)):
        perf.runs(10, 7, count, share=share)
        seen.append(counted.read())
    assert seen == [10_000, 10_000, 10_000, 10_004]


def test_counter_without_hardware_is_missing_and_catches_up(tree: FakeTree) -> None:
    perf = FakePerf(tree)
    counted = counter(perf)
    perf.runs(10, 7, 1000)
    assert counted.read() == 1000
    perf.runs(10, 7, 500, share=0)
    with pytest.raises(Unavailable, match="no hardware counter was free") as caught:
        counted.read()
    assert "other users" in caught.value.remedy
    perf.runs(10, 7, 500)
    assert counted.read() == 2000  # 500 seen in one of the two seconds


def test_sum_scales_each_counter_and_converts_to_bytes(tree: FakeTree) -> None:
    perf, shares = FakePerf(tree), list[float]()
    summed = ScaledSum(perf, RAW, shares, Fraction(64, 9))
    for thread in (10, 11):
        summed.open(pid=thread, cpu=-1)
    perf.runs(10, 7, 10)
    perf.runs(11, 7, 8, share=0.5)
    assert (summed.read(), min(shares)) == (128, 0.5)
    summed.close()
    assert perf.events == {}


def test_counter_that_the_kernel_took_away_is_missing(tree: FakeTree) -> None:
    class Ended(FakePerf):
        def read(self, fd: int) -> bytes:
            return b""

    with pytest.raises(Unavailable, match="took the counter away"):
        counter(Ended(tree)).read()


def why(tree: FakeTree, code: int, *, allowing: int = 2, virtual: str = "") -> Unavailable:
    error = OSError(code, os.strerror(code))
    return refusal(error, RAW, tree.root, allowing=allowing, virtual=virtual)


def test_refusal_though_the_sysctl_allows_it_points_at_the_container(tree: FakeTree) -> None:
    denied = why(tree, errno.EPERM)
    assert denied.status == "denied"
    assert "seccomp" in denied.reason
    assert "seccomp" in denied.remedy
    assert "seccomp" in why(tree, errno.ENOSYS).reason
    assert why(tree, errno.ENOENT).status == "unsupported"
    assert "no such event" in why(tree, errno.ENOENT).reason
    assert "a virtual machine" in why(tree, errno.ENOENT, virtual="a virtual machine").reason
    assert why(tree, errno.EMFILE).remedy == "a higher ulimit -n"


def test_cpu_is_read_from_cpuinfo_of_x86_and_arm(tree: FakeTree) -> None:
    cpu(tree, "GenuineIntel", 6, 143, flags="fpu hypervisor")
    intel = read_cpu(tree.root)
    assert (intel.vendor, intel.family, intel.model) == ("GenuineIntel", 6, 143)
    assert intel.virtual
    tree.write(
        "proc/cpuinfo",
        "processor\t: 0\nFeatures\t: fp sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n",
    )
    grace = read_cpu(tree.root)
    assert (grace.vendor, grace.model, grace.virtual) == ("0x41", 0xD4F, False)
    tree.remove("proc/cpuinfo")
    assert read_cpu(tree.root).vendor == ""


def test_cpu_lists_are_read_as_the_kernel_prints_them(tree: FakeTree) -> None:
    assert parse_cpu_list("0-3,8\n") == [0, 1, 2, 3, 8]
    assert parse_cpu_list("\n") == []
    assert paranoid(tree.root) == 2
    tree.remove("proc/sys/kernel/perf_event_paranoid")
    assert paranoid(tree.root) is None
    assert "not shown" in why(tree, errno.EACCES).reason


def test_machine_with_a_core_pmu_is_told_from_one_without(tree: FakeTree) -> None:
    cpu(tree, "AuthenticAMD", 25, 17, flags="fpu hypervisor")
    assert "virtual machine has no hardware PMU" in no_core_pmu(tree.root, read_cpu(tree.root))
    tree.write("sys/bus/event_source/devices/cpu/type", "4\n")
    assert no_core_pmu(tree.root, read_cpu(tree.root)) == ""


def live(event: Event) -> ScaledSum:
    try:
        return counter(Kernel(), event=event, pid=0)
    except OSError as error:
        pytest.skip(f"perf_event_open is refused here: {error}")


def touch(page_count: int) -> None:
    with mmap.mmap(-1, page_count * mmap.PAGESIZE) as memory:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(page_count):
            memory[page * mmap.PAGESIZE] = 1


def test_live_page_faults_are_counted() -> None:
    counted = live(PAGE_FAULTS)
    before = counted.read()
    touch(2000)
    after = counted.read()
    counted.close()
    assert 2000 <= after - before < 4000


def test_live_task_clock_agrees_with_the_thread_clock() -> None:
    counted = live(TASK_CLOCK)
    before, began = counted.read(), time.thread_time_ns()
    while time.thread_time_ns() - began < 50_000_000:
        pass
    took, used = counted.read() - before, time.thread_time_ns() - began
    counted.close()
    assert took == pytest.approx(used, rel=0.05)


def test_live_hardware_event_of_a_machine_without_pmu_is_unsupported_with_the_reason() -> None:
    machine = no_core_pmu(ROOT, read_cpu(ROOT))
    if not machine:
        pytest.skip("this machine has a hardware PMU")
    event = Event(name="cycles", type=TYPE_HARDWARE, config=0, bits=EXCLUDE_KERNEL)
    with pytest.raises(OSError) as caught:  # noqa: PT011  whatever the kernel answers
        counter(Kernel(), event=event, pid=0)
    refused = refusal(caught.value, event, ROOT, allowing=2, virtual=machine)
    if refused.status == "denied":
        pytest.skip("perf_event_open is refused here")
    assert refused.status == "unsupported"
    assert "no hardware PMU" in refused.reason
