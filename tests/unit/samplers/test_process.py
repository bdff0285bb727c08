from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.agent.samplers.ranks import ProcessSampler
from haiprof.agent.samplers.table import Node
from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import PAGE_BYTES, TICK_NS
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import PROCESS
from haiprof.run_format.writer import RecordWriter
from tests.fakes import FakeProcess, FakeTree
from tests.unit.analysis.recorded import CLOCK, spans_of, write_rank, write_run
from tests.unit.samplers.records import Row, opened, rows

HOST = "node1"
IO_COLUMNS = ["read_bytes", "write_bytes", "storage_read_bytes", "storage_write_bytes"]


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    root = tmp_path / "root"
    root.mkdir()
    return FakeTree(root)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def report(run: RunPaths, rank: int, pid: int, start: int, *, host: str = HOST) -> None:
    folder = run.rank(rank)
    folder.root.mkdir(parents=True, exist_ok=True)
    content = {"version": 1, "rank": rank, "pid": pid, "start_ticks": start, "host": host}
    folder.report.write_text(json.dumps(content))


def sampled(sampler: ProcessSampler) -> list[Row]:
    return rows(PROCESS, sampler.sample())


def test_process_sample_has_one_record_per_rank_of_this_host(tree: FakeTree, run: RunPaths) -> None:
    rank = FakeProcess(pid=10, ticks=5, threads=4, io=(1, 2, 3, 4), major_faults=2)
    tree.process(rank)
    tree.process(FakeProcess(pid=11, parent=10, ticks=7, rss_pages=5, io=(10, 20, 30, 40)))
    tree.process(FakeProcess(pid=20, start=2000))
    report(run, 0, 10, 1000)
    report(run, 1, 20, 2000)
    report(run, 2, 20, 2000, host="node2")
    clock = iter(range(0, 1000, 10))
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root, clock=lambda: next(clock)))
    assert sampler.open() == []
    first, second = sampled(sampler)
    assert first == {
        "time_ns": 40, "read_ns": 10, "pid": 10, "start_ticks": 1000, "process_count": 2,
        "cpu_ns": 12 * TICK_NS, "cpu_main_ns": 5 * TICK_NS, "cpu_main_system_ns": 3 * TICK_NS,
        "memory_rss_bytes": 15 * PAGE_BYTES,
        "read_bytes": 11, "write_bytes": 22, "storage_read_bytes": 33, "storage_write_bytes": 44,
        "thread_count": 5, "page_fault_count": 202, "major_page_fault_count": 2,
        "run_queue_wait_ns": 5000, "context_switch_count": 24,
        "involuntary_context_switch_count": 4,
    }  # fmt: skip
    assert second["pid"] == 20
    assert sampler.missing.drain() == []


def test_process_without_ranks_gives_no_records(tree: FakeTree, run: RunPaths) -> None:
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    assert not sampler.urgent()
    assert sampler.sample() == b""
    assert ProcessSampler(Node(run=run, host=HOST, root=tree.root)).states() == []
    (missing,) = ProcessSampler(Node(run=run, host=HOST, pid=77, root=tree.root)).open()
    assert (missing.metric, missing.reason) == ("all", "no process 77")


def test_process_new_rank_is_urgent_once(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10))
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    run.rank(0).root.mkdir(parents=True)
    assert not sampler.urgent()  # the folder is there, the report is not
    report(run, 0, 10, 1000)
    assert sampler.urgent()
    assert len(sampled(sampler)) == 1
    assert not sampler.urgent()


def test_process_with_a_reused_pid_is_never_read(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10, start=5555))
    report(run, 0, 10, 1000)
    report(run, 1, 77, 1000)
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    assert sampler.sample() == b""
    reused, gone = sampler.missing.drain()
    assert {entity.name for entity in sampler.entities} == set()
    assert reused.metric == "rank 0"
    assert reused.reason.startswith("process 10 is not the one")
    assert gone.metric == "rank 1"
    assert gone.reason.startswith("no process 77")


def test_process_rank_that_ends_gives_no_more_records(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10))
    report(run, 0, 10, 1000)
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    assert len(sampled(sampler)) == 1
    tree.remove("proc/10")
    assert sampler.sample() == b""
    tree.process(FakeProcess(pid=10, start=9999))
    assert sampler.sample() == b""
    assert sampler.missing.drain() == []


def test_process_unreadable_bytes_are_null_with_the_reason(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10, io=None))
    report(run, 0, 10, 1000)
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    (row,) = sampled(sampler)
    assert row["read_bytes"] is None
    assert row["storage_write_bytes"] is None
    assert row["cpu_ns"] == 0
    said = sampler.missing.drain()
    assert [missing.metric for missing in said] == IO_COLUMNS
    assert all(missing.reason.startswith("rank 0: /proc/PID/io: No such file") for missing in said)
    sampler.sample()
    assert sampler.missing.drain() == []


def test_process_bytes_of_another_user_are_denied_with_a_remedy(
    tree: FakeTree, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.process(FakeProcess(pid=10))
    tree.process(FakeProcess(pid=11, parent=10, io=(500, 0, 0, 0)))
    report(run, 0, 10, 1000)
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    deny(monkeypatch, tree.root / "proc/11/io")
    (row,) = sampled(sampler)
    assert row["read_bytes"] == 0
    child = sampler.missing.drain()
    assert [missing.metric for missing in child] == IO_COLUMNS
    assert "a child is left out" in child[0].reason
    deny(monkeypatch, tree.root / "proc/10/io")
    (row,) = sampled(sampler)
    assert row["read_bytes"] is None
    denied = sampler.missing.drain()[0]
    assert (denied.status, denied.remedy) == ("denied", "run haiprof as the user of the job")


@pytest.mark.parametrize("schedstat", [None, (0, 0, 0)])
def test_process_wait_that_the_kernel_does_not_count_is_null_not_zero(
    tree: FakeTree, run: RunPaths, schedstat: tuple[int, int, int] | None
) -> None:
    tree.process(FakeProcess(pid=10, schedstat=schedstat))
    report(run, 0, 10, 1000)
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    (row,) = sampled(sampler)
    assert row["run_queue_wait_ns"] is None
    assert row["context_switch_count"] == 24
    (missing,) = sampler.missing.drain()
    assert missing.metric == "run_queue_wait_ns"
    assert "task_delayacct" in missing.remedy


def test_process_states_show_a_process_that_is_no_rank(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10, ticks=5, io=None))
    sampler = opened(ProcessSampler(Node(run=run, host=HOST, pid=10, root=tree.root)))
    states = {state.metric: state for state in sampler.states()}
    assert states.keys() == {column.name for column in PROCESS.metrics}
    assert states["cpu_ns"].value == 5 * TICK_NS
    assert states["cpu_ns"].entity == "process 10"
    assert states["cpu_ns"].read_ns is not None
    assert (states["read_bytes"].status, states["read_bytes"].value) == ("absent", None)
    assert states["involuntary_context_switch_count"].value == 4


def test_process_rate_never_crosses_a_restart_of_a_rank(tree: FakeTree, tmp_path: Path) -> None:
    """Attempt 1 has the reused pid of attempt 0, attempt 2 another, each with higher counts."""
    run = write_run(tmp_path / "run")
    now = itertools.count(NS_PER_S, NS_PER_S // 2)  # half a second per reading of the clock
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root, clock=lambda: next(now)))
    data = b""
    for attempt, (pid, start) in enumerate([(10, 1000), (10, 2000), (20, 3000)]):
        write_rank(run, spans_of("D F B O"), attempt=attempt, pid=pid, start_ticks=start, host=HOST)
        for sample in range(3):
            ticks = 1000 * attempt + 50 * sample
            tree.process(FakeProcess(pid=pid, start=start, ticks=ticks, io=(ticks, 0, 0, 0)))
            data += sampler.sample()
        if attempt == 1:
            tree.remove(f"proc/{pid}")
    run.node(HOST).root.mkdir(parents=True)
    records = RecordWriter(run.node(HOST).records("process"), PROCESS, clock=CLOCK, extra={})
    records.append(data)
    records.close()
    counters = Analyzer(run.root).counters().filter(rank=0)
    reads = counters.filter(metric="read_bytes_per_s")
    cpu = counters.filter(metric="cpu_cores")
    assert reads["value"].to_list() == [50.0] * 6  # two gaps of three samples, thrice
    assert cpu["value"].to_list() == [50 * TICK_NS / NS_PER_S] * 6
    assert set(counters["flag"]) == {None}


def deny(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """As for another user; the file's mode would not stop root."""
    real = os.open

    def opened(name: str, *args: int) -> int:
        if os.fspath(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return real(name, *args)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"host": "node1", "pid": "x"}'])
def test_process_damaged_report_is_said_and_the_others_go_on(
    tree: FakeTree, run: RunPaths, content: str
) -> None:
    tree.process(FakeProcess(pid=10))
    report(run, 0, 10, 1000)
    run.rank(1).root.mkdir()
    run.rank(1).report.write_text(content)
    sampler = ProcessSampler(Node(run=run, host=HOST, root=tree.root))
    assert len(sampled(sampler)) == 1
    (missing,) = sampler.missing.drain()
    assert missing.metric == "rank 1"
