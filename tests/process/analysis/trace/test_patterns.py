"""Patterns of all ranks, found by a pool of processes as by one."""

from __future__ import annotations

from pathlib import Path

from haiprof import TraceAnalysis
from haiprof.trace_analysis.pool import LocalProcesses, Serial
from tests.unit.analysis.trace.shared import kernel, launch, rank_file


def test_every_pool_gives_the_same(tmp_path: Path) -> None:
    for rank in range(2):
        rank_file(tmp_path, rank, [launch(1, 0, 5), kernel("a", 10, 5 + rank, correlation=1)])
    here = TraceAnalysis(tmp_path, pool=Serial()).patterns()
    there = TraceAnalysis(tmp_path, pool=LocalProcesses(2)).patterns()
    assert here.functions.equals(there.functions)
    assert here.totals.equals(there.totals)
