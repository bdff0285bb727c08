"""Counters become rates, gauges stay, and what is missing has no row."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.rundir import schema
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.tables.gpu import GPU
from haiprof.rundir.tables.host import HOST
from haiprof.rundir.tables.process import PROCESS
from haiprof.units import NS_PER_S
from tests.analysis.recorded import (
    WALL_OFFSET_NS,
    row_of,
    spans_of,
    write_rank,
    write_records,
    write_run,
)

NULL = schema.NULL_I64


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path / "run")


def values(run: RunPaths, source: str, metric: str) -> list[tuple[float, float]]:
    """(seconds since the first sample, value), in order."""
    counters = Analyzer(run.root).counters()
    rows = counters.filter(source=source, metric=metric).select("time_ns", "value").rows()
    return [((time - WALL_OFFSET_NS) / NS_PER_S, value) for time, value in rows]


def host_row(second: int, **counts: int) -> list[float]:
    return row_of(HOST, time_ns=second * NS_PER_S, **counts)


def cpu(user: int, system: int, idle: int) -> dict[str, int]:
    return {
        "cpu_user_ns": user * NS_PER_S,
        "cpu_system_ns": system * NS_PER_S,
        "cpu_idle_ns": idle * NS_PER_S,
    }


def test_cpu_use_is_the_share_of_all_cpus(run: RunPaths) -> None:
    rows = [host_row(1, **cpu(0, 0, 0)), host_row(2, **cpu(2, 1, 1)), host_row(3, **cpu(2, 1, 5))]
    write_records(run.node("node0").records("host"), HOST, rows)
    assert values(run, "host", "cpu_utilization_ratio") == [(2.0, 0.75), (3.0, 0.0)]
    assert values(run, "host", "cpu_steal_ratio") == []


def test_counter_that_went_backwards_is_a_gap(run: RunPaths) -> None:
    rows = [host_row(i + 1, disk_read_bytes=v) for i, v in enumerate([100, 300, 50, 60, NULL, 99])]
    write_records(run.node("node0").records("host"), HOST, rows)
    assert values(run, "host", "disk_read_bytes_per_s") == [(2.0, 200.0), (3.0, None), (4.0, 10.0)]


def test_process_counters_carry_their_rank(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O"), rank=4)
    rows = [
        row_of(PROCESS, time_ns=s * NS_PER_S, pid=pid, start_ticks=7, cpu_ns=s * 2 * NS_PER_S)
        for s in (1, 2)
        for pid in (104, 999)
    ]
    write_records(run.node("node0").records("process"), PROCESS, rows)
    counters = Analyzer(run.root).counters().filter(metric="cpu_cores")
    assert counters.select("rank", "value", "unit").rows() == [
        (4, 2.0, "cores"),
        (None, 2.0, "cores"),
    ]


def test_gpu_counters_carry_the_rank_that_alone_uses_the_gpu(run: RunPaths) -> None:
    for rank, uuid in enumerate(["GPU-A", "GPU-B", "GPU-B"]):
        write_rank(run, spans_of("D F B O"), rank=rank, gpu_uuid=uuid)
    rows = [row_of(GPU, time_ns=NS_PER_S, gpu=gpu, utilization_ratio=0.5) for gpu in (0, 1, 2)]
    gpus = [
        {"key": [0], "name": "gpu 0", "uuid": "gpu-b"},
        {"key": [2], "name": "gpu 2", "uuid": "GPU-a"},
    ]
    write_records(run.node("node0").records("gpu"), GPU, rows, entities=gpus)
    counters = Analyzer(run.root).counters()
    found = counters.filter(metric="utilization_ratio").select("gpu", "rank", "value").rows()
    assert found == [(0, None, 0.5), (1, None, 0.5), (2, 0, 0.5)]
    assert counters.filter(metric="power_watts").height == 0


def test_run_without_counters_has_an_empty_frame(run: RunPaths) -> None:
    counters = Analyzer(run.root).counters()
    assert counters.height == 0
    assert counters.columns[-2:] == ["value", "flag"]
