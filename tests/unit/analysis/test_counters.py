"""Counters become rates, gauges stay, what is missing has no row; traffic of links."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis.counter_sources import link_traffic
from haiprof.run_analysis.counters import COUNTER_SCHEMA
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import Column, Table
from haiprof.run_format.tables import GPU, HOST, PROCESS
from haiprof.run_format.writer import LineWriter
from tests.unit.analysis.recorded import (
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
    counts = {"cpu_user_ns": user, "cpu_system_ns": system, "cpu_idle_ns": idle}
    return {name: count * NS_PER_S for name, count in counts.items()}


def test_run_of_a_haiprof_without_the_newest_counters_has_the_others(run: RunPaths) -> None:
    older = Table(HOST.name, HOST.columns[:-2])
    rows = [row_of(older, time_ns=n * NS_PER_S, **cpu(3 * n, 0, n)) for n in (1, 2)]
    write_records(run.node("node0").records("host"), older, rows)
    assert values(run, "host", "cpu_utilization_ratio") == [(2.0, 0.75)]
    assert not Analyzer(run.root).notes()


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


# -- counters that wrap, stop and are set back -------------------------------------------------

ODD = Table(
    HOST.name,
    (
        *HOST.columns,
        Column("packet_count", "i64", "count", "counter32", "goes on at 0 after 32 bits"),
        Column("error_count", "i64", "count", "sticky8", "stops at 255"),
    ),
)


def odd_rates(run: RunPaths, metric: str, counts: Sequence[int]) -> list[tuple[float | None, str]]:
    """(rate, flag) of each second after the first, of a counter with these values."""
    rows = [row_of(ODD, time_ns=(i + 1) * NS_PER_S, **{metric: v}) for i, v in enumerate(counts)]
    write_records(run.node("node0").records("host"), ODD, rows)
    counters = Analyzer(run.root).counters().filter(metric=f"{metric}_per_s")
    return counters.select("value", "flag").rows()


FULL = (None, "saturated")


@pytest.mark.parametrize(
    ("metric", "counts", "rates"),
    [
        ("packet_count", [1_000_000, 5, 25], [(None, "reset"), (20.0, None)]),
        ("error_count", [250, 252, 255, 255, 3, 4],
         [(2.0, None), FULL, FULL, (None, "reset"), (1.0, None)]),
    ],
    ids=["one of 32 bits that was set back is no wrap", "one that stops at its end has no rate"],
)  # fmt: skip
def test_rates_of_a_counter_that_goes_back_or_stops(
    run: RunPaths, metric: str, counts: list[int], rates: list[tuple[float | None, str]]
) -> None:
    assert odd_rates(run, metric, counts) == rates


def test_counter_of_64_bits_keeps_its_last_digit(run: RunPaths) -> None:
    huge = (1 << 62) + 1
    rows = [host_row(i + 1, disk_read_bytes=huge + 3 * i) for i in range(2)]
    write_records(run.node("node0").records("host"), HOST, rows)
    assert values(run, "host", "disk_read_bytes_per_s") == [(2.0, 3.0)]


def test_counter_of_a_restarted_rank_starts_anew(run: RunPaths) -> None:
    rows = [
        row_of(PROCESS, time_ns=s * NS_PER_S, pid=104, start_ticks=start, read_bytes=count)
        for s, start, count in ((1, 7, 100), (2, 7, 300), (3, 8, 400), (4, 8, 450))
    ]
    write_records(run.node("node0").records("process"), PROCESS, rows)
    assert values(run, "process", "read_bytes_per_s") == [(2.0, 200.0), (4.0, 50.0)]


def test_entity_that_came_later_has_its_name(run: RunPaths) -> None:
    rows = [row_of(GPU, time_ns=NS_PER_S, gpu=gpu, power_watts=1.0) for gpu in (0, 1)]
    node = run.node("node0")
    write_records(node.records("gpu"), GPU, rows, entities=[{"key": [0], "name": "gpu 0"}])
    lines = LineWriter(node.events)
    lines.append({"type": "entity", "source": "gpu", "key": [1], "name": "late gpu"})
    lines.close()
    counters = Analyzer(run.root).counters().filter(metric="power_watts")
    assert counters["entity"].to_list() == ["gpu 0", "late gpu"]


GROWTH = st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=30)


@given(start=st.integers(0, (1 << 32) - 1), growth=GROWTH)
def test_counter_of_32_bits_shows_the_true_growth_across_wraps(
    start: int, growth: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = write_run(tmp_path_factory.mktemp("run") / "run")
    true = [start + sum(growth[:n]) for n in range(len(growth) + 1)]
    found = odd_rates(run, "packet_count", [count % (1 << 32) for count in true])
    assert [rate for rate, _ in found] == growth
    wraps = [after >> 32 > before >> 32 for before, after in itertools.pairwise(true)]
    assert [flag == "wrap" for _, flag in found] == wraps


def rows(source: str, entity: str | None, metric: str, *values: float) -> pl.DataFrame:
    gpu = 0 if source.startswith(("gpu", "burst")) else None
    unit = "ratio" if metric.endswith("_ratio") else "bytes/s"
    content = [
        {"time_ns": at, "host": "node0", "source": source, "entity": entity, "rank": gpu,
         "gpu": gpu, "metric": metric, "unit": unit, "value": value, "flag": None}
        for at, value in enumerate(values)
    ]  # fmt: skip
    return pl.DataFrame(content, schema=COUNTER_SCHEMA)


def test_port_has_the_share_of_its_rate() -> None:
    found = link_traffic(pl.concat([
        rows("infiniband", "mlx5_0/1", "transmit_bytes_per_s", 5e9, 15e9),
        rows("infiniband_health", "mlx5_0/1", "link_rate_bytes_per_s", 25e9),
        rows("host", None, "network_receive_bytes_per_s", 1e6),
    ]))  # fmt: skip
    by_source = {row["source"]: row for row in found.rows(named=True)}
    assert by_source["infiniband"]["mean_ratio"] == pytest.approx(0.4)
    assert by_source["host"]["mean_ratio"] is None
    assert "rate was not recorded" in by_source["host"]["missing"]
    found = link_traffic(pl.concat([
        rows("gpu", "gpu 0", "pcie_receive_bytes_per_s", 10e9, 20e9),
        rows("gpu", "gpu 0", "pcie_transmit_bytes_per_s", 1e9, 1e9),
        rows("gpu_health", "gpu 0", "pcie_generation_max", 4),
        rows("gpu_health", "gpu 0", "pcie_lane_max_count", 16),
    ]))  # fmt: skip
    received, sent = found.rows(named=True)
    assert (received["link"], received["direction"], sent["direction"]) == (
        "PCIe", "received", "sent",
    )  # fmt: skip
    # PCIe 4.0 x16: 16 GT/s, 128b/130b, 16 lanes: 31.5 GB/s each way.
    assert received["peak_bytes_per_s"] == pytest.approx(31.508e9, rel=1e-4)
    assert received["mean_ratio"] == pytest.approx(15e9 / 31.508e9, rel=1e-4)
    assert received["max_ratio"] == pytest.approx(20e9 / 31.508e9, rel=1e-4)
    assert received["missing"] is None


def test_link_without_a_known_peak_has_no_share_but_a_burst_has() -> None:
    counters = rows("gpu", "gpu 0", "nvlink_transmit_bytes_per_s", 100e9)
    bursts = rows("burst", "gpu 0", "nvlink_transmit_ratio", 0.2, 0.6)
    burst, counted = link_traffic(counters, bursts).rows(named=True)
    assert (counted["mean_bytes_per_s"], counted["mean_ratio"]) == (100e9, None)
    assert "`--burst` tells the share" in counted["missing"]
    assert (burst["link"], burst["direction"]) == ("NVLink", "sent")
    assert burst["mean_ratio"] == pytest.approx(0.4)
    assert burst["max_ratio"] == 0.6
    (row,) = link_traffic(rows("gpu", "gpu 0", "pcie_receive_bytes_per_s", 1e9)).rows(named=True)
    assert row["mean_ratio"] is None
    assert row["missing"] == "the PCIe link's generation and lanes were not recorded"
