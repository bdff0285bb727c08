from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from haiprof.agent.samplers.memory_traffic import RemoteMemorySampler, core_events
from haiprof.agent.samplers.table import Node
from haiprof.linux.perf_events import EXCLUDE_KERNEL, INHERIT, TYPE_HARDWARE, TYPE_RAW, Event
from haiprof.linux.readings import Unavailable
from haiprof.linux.topology import read_cpu
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import REMOTE_MEMORY
from tests.fake_pmu import FakePerf, cpu, threads
from tests.fakes import FakeProcess, FakeTree
from tests.unit.samplers.records import Row, opened, rows

HOST = "node1"
INSTRUCTIONS, CYCLES, NEAR, FAR = 1, 0, 0x0844, 0x4044  # configs on Zen 4
CACHE_MISSES, TLB_LOAD_MISSES = 3, 0x10003  # linux/perf_event.h


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    root = tmp_path / "root"
    root.mkdir()
    tree = FakeTree(root)
    tree.write("proc/sys/kernel/perf_event_paranoid", "2\n")
    tree.write("sys/bus/event_source/devices/cpu/type", "4\n")
    cpu(tree, "AuthenticAMD", 25, 17, flags="fpu")
    rank_process(tree, 10, (10, 11))
    return tree


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def rank_process(tree: FakeTree, pid: int, numbers: tuple[int, ...], *, start: int = 1000) -> None:
    tree.process(FakeProcess(pid=pid, start=start))
    threads(tree, pid, numbers)


def report(run: RunPaths, rank: int, pid: int, start: int = 1000) -> None:
    folder = run.rank(rank)
    folder.root.mkdir(parents=True, exist_ok=True)
    content = {"version": 1, "rank": rank, "pid": pid, "start_ticks": start, "host": HOST}
    folder.report.write_text(json.dumps(content))


def sampler_of(
    tree: FakeTree, run: RunPaths, perf: FakePerf, *, spare: int = 1000, pid: int | None = None
) -> RemoteMemorySampler:
    return RemoteMemorySampler(
        Node(run=run, host=HOST, root=tree.root, pid=pid), kernel=perf, spare=lambda: spare
    )


def of_rank(tree: FakeTree, run: RunPaths) -> tuple[RemoteMemorySampler, FakePerf]:
    """The sampler of rank 0, process 10, after its first read."""
    perf = FakePerf(tree)
    sampler = sampler_of(tree, run, perf)
    report(run, 0, 10)
    return opened(sampler), perf


def sampled(sampler: RemoteMemorySampler) -> list[Row]:
    return rows(REMOTE_MEMORY, sampler.sample())


def test_rank_is_counted_over_its_threads_and_what_they_start(
    tree: FakeTree, run: RunPaths
) -> None:
    perf = FakePerf(tree)
    sampler = sampler_of(tree, run, perf)
    assert sampler.open() == []
    assert sampled(sampler) == []
    report(run, 0, 10)
    assert sampler.urgent()
    assert sampled(sampler)[0]["instruction_count"] == 0
    threads(tree, 10, (12,))
    perf.starts(11, 12)
    perf.starts(12, 500)  # a DataLoader worker
    for thread, count in ((10, 1000), (11, 200), (12, 30), (500, 4), (999, 7)):
        perf.runs(thread, INSTRUCTIONS, count)
        perf.runs(thread, CYCLES, 2 * count)
        perf.runs(thread, NEAR, count // 2)
        perf.runs(thread, FAR, count // 4)
        perf.runs(thread, CACHE_MISSES, 3 * count)
        perf.runs(thread, TLB_LOAD_MISSES, 5 * count)
    (row,) = sampled(sampler)
    assert sampler.header()["entities"] == [{"key": [10, 1000], "name": "rank 0"}]
    assert {name: value for name, value in row.items() if not name.endswith("_ns")} == {
        "pid": 10, "start_ticks": 1000, "instruction_count": 1234, "cycle_count": 2468,
        "local_dram_bytes": (500 + 100 + 15 + 2) * 64, "remote_dram_bytes": (250 + 50 + 7 + 1) * 64,
        "counted_ratio": 1.0, "cache_miss_count": 3 * 1234, "tlb_miss_count": 5 * 1234,
    }  # fmt: skip
    sampler.close()
    assert perf.events == {}


def test_rank_header_names_what_fills_the_columns(tree: FakeTree, run: RunPaths) -> None:
    sampler = opened(sampler_of(tree, run, FakePerf(tree)))
    events = sampler.header()["events"]
    assert isinstance(events, Mapping)
    assert events["remote_dram_bytes"] == "ls_any_fills_from_sys.dram_io_far"


def test_rank_threads_that_start_while_counters_are_opened_are_counted_once(
    tree: FakeTree, run: RunPaths
) -> None:
    class Busy(FakePerf):
        """Thread 11 starts 12 at once: too late for its own counters, or inherited from 11's."""

        def open(self, attr: bytes, pid: int, cpu: int) -> int:
            fd = super().open(attr, pid, cpu)
            if pid == 11 and not (tree.root / "proc/10/task/12").exists():
                threads(tree, 10, (12,))
                self.starts(11, 12)
            return fd

    perf = Busy(tree)
    sampler = sampler_of(tree, run, perf)
    report(run, 0, 10)
    sampler.open()
    perf.runs(12, INSTRUCTIONS, 100)
    perf.runs(12, NEAR, 10)
    (row,) = sampled(sampler)
    sampler.close()
    assert (row["instruction_count"], row["local_dram_bytes"]) == (100, 640)
    assert perf.events == {}


def test_rank_that_starts_threads_without_end_is_missing_until_it_stops(
    tree: FakeTree, run: RunPaths
) -> None:
    class Restless(FakePerf):
        restless = True

        def open(self, attr: bytes, pid: int, cpu: int) -> int:
            fd = super().open(attr, pid, cpu)
            if self.restless and pid == 10:
                threads(tree, 10, (1000 + fd,))
            return fd

    perf = Restless(tree)
    sampler = sampler_of(tree, run, perf)
    report(run, 0, 10)
    missing = sampler.open()
    assert "threads start faster" in missing[0].reason
    assert sampled(sampler)[0]["instruction_count"] is None
    assert perf.events == {}
    perf.restless = False
    assert sampled(sampler)[0]["instruction_count"] == 0


def test_rank_thread_that_ends_meanwhile_is_left_out(tree: FakeTree, run: RunPaths) -> None:
    perf = FakePerf(tree, refused={11: errno.ESRCH})
    sampler = sampler_of(tree, run, perf)
    report(run, 0, 10)
    assert sampler.open() == []
    perf.runs(10, INSTRUCTIONS, 5)
    assert sampled(sampler)[0]["instruction_count"] == 5


def test_rank_with_more_threads_than_files_is_missing_not_partial(
    tree: FakeTree, run: RunPaths
) -> None:
    perf = FakePerf(tree)
    sampler = sampler_of(tree, run, perf, spare=7)
    report(run, 0, 10)
    missing = sampler.open()
    (row,) = sampled(sampler)
    assert {each.metric for each in missing} >= {"instruction_count", "remote_dram_bytes"}
    assert "2 threads need 12 open files, haiprof may open 7" in missing[0].reason
    assert missing[0].remedy == "a higher ulimit -n"
    assert row["instruction_count"] is None


def test_rank_of_another_user_is_denied_and_still_seen_to_end(
    tree: FakeTree, run: RunPaths
) -> None:
    perf = FakePerf(tree, refused={10: errno.EACCES, 11: errno.EACCES})
    sampler = sampler_of(tree, run, perf)
    report(run, 0, 10)
    missing = sampler.open()
    assert {each.status for each in missing} == {"denied"}
    assert sampled(sampler)[0]["instruction_count"] is None
    assert sampler.missing.drain() == []
    tree.remove("proc/10")
    assert sampled(sampler) == []


def test_rank_that_ends_frees_its_counters_and_a_reused_pid_is_not_it(
    tree: FakeTree, run: RunPaths
) -> None:
    sampler, perf = of_rank(tree, run)
    assert len(perf.events) == 12
    rank_process(tree, 10, (10,), start=2000)
    assert sampled(sampler) == []
    assert perf.events == {}


def test_rank_counts_that_took_turns_are_marked(tree: FakeTree, run: RunPaths) -> None:
    sampler, perf = of_rank(tree, run)
    perf.runs(10, INSTRUCTIONS, 1000, share=0.5)
    perf.runs(10, CYCLES, 1000)
    (row,) = sampled(sampler)
    assert (row["instruction_count"], row["counted_ratio"]) == (1000, 0.5)


def test_event_that_this_cpu_lacks_leaves_the_others(tree: FakeTree, run: RunPaths) -> None:
    perf = FakePerf(tree, known={(TYPE_HARDWARE, 0), (TYPE_HARDWARE, 1), (TYPE_RAW, NEAR)})
    sampler = sampler_of(tree, run, perf)
    report(run, 0, 10)
    missing = sampler.open()
    (row,) = sampled(sampler)
    lacking = {"remote_dram_bytes", "cache_miss_count", "tlb_miss_count"}
    assert {each.metric for each in missing} == lacking
    assert {each.status for each in missing} == {"unsupported"}
    assert row["remote_dram_bytes"] is None
    assert row["local_dram_bytes"] == 0


def test_events_denied_by_sysctl_give_its_value_and_remedy(tree: FakeTree, run: RunPaths) -> None:
    tree.write("proc/sys/kernel/perf_event_paranoid", "4\n")
    (missing,) = sampler_of(tree, run, FakePerf(tree)).open()
    assert (missing.metric, missing.status) == ("all", "denied")
    assert "kernel.perf_event_paranoid is 4" in missing.reason
    assert missing.remedy == "sysctl kernel.perf_event_paranoid=2, or CAP_PERFMON for haiprof"


def test_events_in_a_virtual_machine_without_pmu_are_unsupported(
    tree: FakeTree, run: RunPaths
) -> None:
    cpu(tree, "AuthenticAMD", 25, 17, flags="fpu hypervisor")
    tree.remove("sys/bus/event_source/devices/cpu")
    (missing,) = sampler_of(tree, run, FakePerf(tree, known=set())).open()
    assert missing.status == "unsupported"
    assert "this virtual machine has no hardware PMU" in missing.reason


def test_fills_that_a_hypervisor_filters_are_no_zeros(tree: FakeTree, run: RunPaths) -> None:
    cpu(tree, "AuthenticAMD", 25, 17, flags="fpu hypervisor")
    sampler, perf = of_rank(tree, run)
    perf.runs(10, INSTRUCTIONS, 10**9)
    (row,) = sampled(sampler)
    assert row["instruction_count"] == 10**9
    assert (row["local_dram_bytes"], row["remote_dram_bytes"]) == (None, None)
    assert "its host filters" in sampler.missing.drain()[0].reason
    perf.runs(10, NEAR, 5)
    (row,) = sampled(sampler)
    assert (row["local_dram_bytes"], row["remote_dram_bytes"]) == (320, 0)


@pytest.mark.parametrize(("vendor", "family", "model", "remote"), [
    ("GenuineIntel", 6, 143, (0x012A, 0x730004477)),
    ("GenuineIntel", 6, 106, (0x01B7, 0x730000477)),
    ("GenuineIntel", 6, 85, (0x02D3, 0)),
    ("AuthenticAMD", 26, 2, (0x4044, 0)),
    ("AuthenticAMD", 23, 49, (0x4043, 0)),
])  # fmt: skip
def test_core_events_by_model(
    tree: FakeTree, vendor: str, family: int, model: int, remote: tuple[int, int]
) -> None:
    cpu(tree, vendor, family, model)
    event = core_events(read_cpu(tree.root))["remote_dram_bytes"]
    assert isinstance(event, Event)
    assert (event.config, event.config1) == remote
    assert event.bits == EXCLUDE_KERNEL | INHERIT


def test_core_events_of_an_unknown_model_are_instructions_and_cycles_alone(tree: FakeTree) -> None:
    cpu(tree, "GenuineIntel", 6, 999)
    events = core_events(read_cpu(tree.root))
    assert isinstance(events["instruction_count"], Event)
    why = events["local_dram_bytes"]
    assert isinstance(why, Unavailable)
    assert "model 999" in why.reason


# -- this machine -------------------------------------------------------------------------------
