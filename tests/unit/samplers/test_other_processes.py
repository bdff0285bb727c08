"""Who else on the node uses its cores."""

from __future__ import annotations

import json
import os
from pathlib import Path

from haiprof.agent.node_agent import LiveRank
from haiprof.agent.process_ends import OtherProcesses
from haiprof.run_format.layout import RunPaths
from tests.fakes import FakeProcess, FakeTree


def test_busiest_processes_that_are_not_the_jobs_are_noted(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    tree, now = FakeTree(tmp_path / "root"), [100.0]
    run = RunPaths(tmp_path / "run")
    run.node("n0").root.mkdir(parents=True)
    others = OtherProcesses(run, "n0", 800, root=tree.root, clock=lambda: now[0])
    torchrun = FakeProcess(pid=800)
    unknown = FakeProcess(pid=899, parent=torchrun.pid)  # a rank that has not reported itself yet
    rank = FakeProcess(pid=900, parent=torchrun.pid)
    ranks = [LiveRank(0, rank.pid, run.rank(0, 0), 0)]
    mine = [FakeProcess(pid=os.getpid()), rank, FakeProcess(pid=901, parent=rank.pid)]
    mine += [torchrun, unknown]
    theirs = [FakeProcess(pid=pid, name=f"p{pid}") for pid in (50, 51, 52)]
    for process in (*mine, *theirs):
        tree.process(process)
        tree.write(f"proc/{process.pid}/comm", f"{process.name}\n")
    others.tick(ranks)
    for process, cores in zip(
        (*mine, *theirs), (1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 0.02, 0.5), strict=True
    ):
        process.ticks = round(cores * 100 * os.sysconf("SC_CLK_TCK"))
        tree.process(process)
    tree.process(FakeProcess(pid=53, ticks=25 * os.sysconf("SC_CLK_TCK")))  # it began meanwhile
    tree.write("proc/53/comm", "new\n")
    now[0] += 1.0
    others.tick(ranks)  # too early
    now[0] += 99.0
    others.tick(ranks)
    (line,) = map(json.loads, run.node("n0").events.read_text().split("\n")[:1])
    named = {each["name"]: each["cores"] for each in line["processes"]}
    assert named == {"p50": 1.5, "p52": 0.5, "new": 0.25}
    assert line["elapsed_ns"] == 100e9
    started = [(each["pid"], each["cores"]) for each in line["started"]]
    assert started == [(901, 1.0)], "by the rank"
