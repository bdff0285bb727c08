"""Jobs of a node that come and go, in a process table of the test's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import TICK_NS
from haiprof.live.node import JobWatch
from haiprof.run_analysis.node_history import HeldGpu, held_gpus, seen_jobs
from haiprof.run_format.layout import RunPaths


class Node:
    """A fake /proc, clocks and holders of GPUs."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.proc.mkdir()
        self.now_s = 1000.0
        self.holders: dict[int, set[int]] = {}
        self.lines: list[dict[str, object]] = []
        self.watch = JobWatch(
            holders=lambda: self.holders, proc=self.proc, clock=lambda: self.now_s,
            boot_clock=lambda: int(self.now_s * NS_PER_S),
            wall_clock=lambda: int((5e8 + self.now_s) * NS_PER_S),
        )  # fmt: skip

    def start(
        self, pid: int, *words: str, parent: int = 1, group: int | None = None,
        torch: bool = True, run: str = "",
    ) -> None:  # fmt: skip
        folder = self.proc / str(pid)
        folder.mkdir()
        ticks = int(self.now_s * NS_PER_S) // TICK_NS
        fields = ["S", str(parent), str(group or pid), "1", *["0"] * 15, str(ticks), *["0"] * 30]
        (folder / "stat").write_text(f"{pid} (pt main) {' '.join(fields)}")
        (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")
        (folder / "environ").write_bytes(f"HAIPROF_ACTIVE_RUN={run}\0A=b\0".encode())
        (folder / "maps").write_text("")
        if torch:
            self.load_torch(pid)

    def load_torch(self, pid: int) -> None:
        (self.proc / str(pid) / "maps").write_text("7f r-xp 0 0 0 /x/torch/lib/libtorch_cpu.so\n")

    def end(self, *pids: int) -> None:
        for pid in pids:
            shutil.rmtree(self.proc / str(pid))

    def scan(self, after_s: float = 5.0) -> list[tuple[object, ...]]:
        self.now_s += after_s
        found = self.watch.scan()
        wall_ns = int((5e8 + self.now_s) * NS_PER_S)
        self.lines += [{"wall_ns": wall_ns, **line} for line in found]
        return [(line["type"], line.get("command") or line.get("pid") or line.get("process_count"))
                for line in found]  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_job_without_haiprof_is_one_job_of_many_processes(node: Node) -> None:
    node.start(10, "bash", torch=False)
    node.start(20, "torchrun", "train.py", "--token=hf_secretsecretsecret", parent=10)
    node.start(21, "python", "train.py", parent=20, group=21)
    node.start(22, "python", "train.py", parent=20, group=22)
    node.start(23, "python", "train.py", parent=21, group=21)  # a DataLoader worker
    [(kind, command)] = node.scan()
    assert kind == "job_start"
    assert str(command).startswith("torchrun train.py --token=")
    assert "hf_secret" not in str(command)
    assert node.scan() == []
    node.end(20, 21)
    assert node.scan() == [], "two of its processes are left"
    node.end(22, 23)
    assert node.scan() == [("job_end", 4)]
    [job] = seen_jobs(node.lines)
    assert (job.run, job.uid, job.process_count) == (None, os.getuid(), 4)
    assert job.start_wall_ns is not None
    assert job.end_wall_ns is not None
    assert job.end_wall_ns - job.start_wall_ns == 20 * NS_PER_S


def test_run_of_haiprof_is_named_and_two_jobs_are_two(node: Node) -> None:
    node.start(30, "python", "a.py", run="/logs/a-1", torch=False)
    node.start(31, "python", "a.py", run="/logs/a-1", parent=30)
    node.start(40, "python", "b.py")
    node.scan()
    assert [(job.run, job.command) for job in seen_jobs(node.lines)] == [
        ("/logs/a-1", "python a.py"), (None, "python b.py"),
    ]  # fmt: skip


def test_torch_that_is_loaded_late_is_seen_later(node: Node) -> None:
    node.start(50, "jupyter", torch=False)
    for _ in range(20):
        assert node.scan(60.0) == []
    node.load_torch(50)
    found = [line for _ in range(11) for line in node.scan(60.0)]
    assert found == [("job_start", "jupyter")]


def test_number_of_a_process_that_is_taken_by_another_is_another_job(node: Node) -> None:
    node.start(60, "python", "a.py")
    node.scan()
    node.end(60)
    node.now_s += 1
    node.start(60, "python", "b.py")
    assert node.scan() == [("job_end", 1), ("job_start", "python b.py")]


def test_agent_that_starts_again_sees_the_same_job(node: Node) -> None:
    node.start(70, "python", "a.py")
    node.scan()
    node.watch = JobWatch(
        proc=node.proc, clock=lambda: node.now_s,
        boot_clock=lambda: int(node.now_s * NS_PER_S),
        wall_clock=lambda: int((5e8 + node.now_s) * NS_PER_S),
    )  # fmt: skip
    node.scan()
    assert len(seen_jobs(node.lines)) == 1


def test_gpus_that_are_held_are_joined_to_who_holds_them(node: Node, tmp_path: Path) -> None:
    node.start(80, "python", "a.py")
    node.holders = {0: {80, 999}, 1: set()}
    found = node.scan()
    assert ("gpu_held", "python a.py") in found
    assert ("gpu_held", 999) in found, "of a container: only its number is known"
    node.holders = {0: {999}, 1: set()}
    assert node.scan() == [("gpu_released", 80)]
    paths = RunPaths(tmp_path / "logs").node("node1")
    by_pid: Mapping[int, HeldGpu] = {each.pid: each for each in held_gpus(paths, node.lines)}
    assert by_pid[999].end_wall_ns is None
    assert by_pid[80].end_wall_ns == by_pid[80].start_wall_ns + 5 * NS_PER_S
    assert by_pid[80].utilization_max_ratio is None, "nothing was measured: neither used nor unused"
    assert not by_pid[80].unused
