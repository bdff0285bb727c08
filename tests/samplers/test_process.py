from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from haiprof.rundir.layout import RunPaths
from haiprof.rundir.tables.process import PROCESS
from haiprof.samplers.process import ProcessSampler
from haiprof.samplers.procfs import PAGE_BYTES, TICK_NS, read_process
from tests.fakes import FakeProcess, FakeTree
from tests.samplers.records import Row, rows

HOST = "node1"


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
    tree.process(FakeProcess(pid=10, ticks=5, threads=4, io=(1, 2, 3, 4)))
    tree.process(FakeProcess(pid=11, parent=10, ticks=7, rss_pages=5, io=(10, 20, 30, 40)))
    tree.process(FakeProcess(pid=20, start=2000))
    report(run, 0, 10, 1000)
    report(run, 1, 20, 2000)
    report(run, 2, 20, 2000, host="node2")
    clock = iter(range(0, 1000, 10))
    sampler = ProcessSampler(run, HOST, root=tree.root, clock=lambda: next(clock))
    assert sampler.open() == []
    first, second = sampled(sampler)
    assert first == {
        "time_ns": 0,
        "read_ns": 10,
        "pid": 10,
        "process_count": 2,
        "cpu_ns": 12 * TICK_NS,
        "cpu_main_ns": 5 * TICK_NS,
        "memory_rss_bytes": 15 * PAGE_BYTES,
        "read_bytes": 11,
        "write_bytes": 22,
        "storage_read_bytes": 33,
        "storage_write_bytes": 44,
        "thread_count": 5,
    }
    assert second["pid"] == 20
    assert sampler.drain_missing() == []


def test_process_without_ranks_gives_no_records(tree: FakeTree, run: RunPaths) -> None:
    sampler = ProcessSampler(run, HOST, root=tree.root)
    assert not sampler.urgent()
    assert sampler.sample() == b""


def test_process_new_rank_is_urgent_once(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10))
    sampler = ProcessSampler(run, HOST, root=tree.root)
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
    sampler = ProcessSampler(run, HOST, root=tree.root)
    assert sampler.sample() == b""
    reused, gone = sampler.drain_missing()
    assert reused.metric == "rank 0"
    assert reused.reason.startswith("process 10 is not the one")
    assert gone.metric == "rank 1"
    assert gone.reason.startswith("no process 77")


def test_process_rank_that_ends_gives_no_more_records(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10))
    report(run, 0, 10, 1000)
    sampler = ProcessSampler(run, HOST, root=tree.root)
    assert len(sampled(sampler)) == 1
    tree.remove("proc/10")
    assert sampler.sample() == b""
    tree.process(FakeProcess(pid=10, start=9999))
    assert sampler.sample() == b""
    assert sampler.drain_missing() == []


def test_process_unreadable_bytes_are_null_with_the_reason(tree: FakeTree, run: RunPaths) -> None:
    tree.process(FakeProcess(pid=10, io=None))
    report(run, 0, 10, 1000)
    sampler = ProcessSampler(run, HOST, root=tree.root)
    (row,) = sampled(sampler)
    assert row["read_bytes"] is None
    assert row["storage_write_bytes"] is None
    assert row["cpu_ns"] == 0
    metrics = [missing.metric for missing in sampler.drain_missing()]
    assert metrics == ["read_bytes", "write_bytes", "storage_read_bytes", "storage_write_bytes"]
    sampler.sample()
    assert sampler.drain_missing() == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"host": "node1", "pid": "x"}'])
def test_process_damaged_report_is_said_and_the_others_go_on(
    tree: FakeTree, run: RunPaths, content: str
) -> None:
    tree.process(FakeProcess(pid=10))
    report(run, 0, 10, 1000)
    run.rank(1).root.mkdir()
    run.rank(1).report.write_text(content)
    sampler = ProcessSampler(run, HOST, root=tree.root)
    assert len(sampled(sampler)) == 1
    (missing,) = sampler.drain_missing()
    assert missing.metric == "rank 1"


WORKERS = """
import os, sys, time
def work(path):
    data = open(path, "rb").read()
    with open(path + str(os.getpid()), "wb") as out:
        out.write(data)
    end = time.process_time() + 0.15
    while time.process_time() < end:
        pass
def fork(path):
    pid = os.fork()
    if not pid:
        work(path)
        time.sleep(60)
        os._exit(0)
    return pid
path = sys.argv[1]
workers = [fork(path), fork(path)]
work(path)
print("ready", flush=True)
sys.stdin.readline()
for pid in workers:
    os.kill(pid, 15)
    os.waitpid(pid, 0)
print("waited", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    source = tmp_path / "data"
    source.write_bytes(b"x" * 3_000_000)
    command = [sys.executable, "-c", WORKERS, str(source)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.timeout(60)
def test_process_live_children_agree_with_psutil(run: RunPaths, job: subprocess.Popen[str]) -> None:
    assert job.stdout is not None
    assert job.stdin is not None
    assert job.stdout.readline() == "ready\n"
    children = psutil.Process(job.pid).children(recursive=True)
    _until_idle([psutil.Process(job.pid), *children])
    reading = read_process(Path("/"), job.pid)
    assert reading is not None
    report(run, 0, job.pid, reading.start_ticks)
    sampler = ProcessSampler(run, HOST)
    (row,) = sampled(sampler)
    everyone = [psutil.Process(job.pid), *children]
    cpu_s = sum(sum(process.cpu_times()[:2]) for process in everyone)
    assert row["process_count"] == 3
    assert number(row["cpu_ns"]) / 1e9 == pytest.approx(cpu_s, abs=0.02)
    assert number(row["cpu_ns"]) >= 0.4e9
    assert row["read_bytes"] == sum(p.io_counters().read_chars for p in everyone)
    assert row["write_bytes"] == sum(p.io_counters().write_chars for p in everyone)
    assert number(row["write_bytes"]) >= 9_000_000
    assert row["memory_rss_bytes"] == sum(p.memory_info().rss for p in everyone)
    assert row["thread_count"] == 3
    job.stdin.write("\n")
    job.stdin.flush()
    assert job.stdout.readline() == "waited\n"
    (after,) = sampled(sampler)
    assert after["process_count"] == 1
    for column in ("cpu_ns", "read_bytes", "write_bytes"):
        assert number(row[column]) <= number(after[column]), column
    assert number(after["write_bytes"]) == number(row["write_bytes"]) + len("waited\n")
    assert number(after["cpu_ns"]) <= number(row["cpu_ns"]) + 0.1e9


def number(value: float | None) -> float:
    assert value is not None
    return value


def _until_idle(processes: list[psutil.Process]) -> None:
    """Waits until the children have done their work and sleep."""
    last = None
    for _ in range(200):
        now = [process.cpu_times()[:2] for process in processes]
        writes = [process.io_counters().write_chars for process in processes]
        if now == last and min(writes) >= 3_000_000:
            return
        last = now
        processes[0].cpu_percent(interval=0.1)
