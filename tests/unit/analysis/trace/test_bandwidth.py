from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.trace_analysis.launches import memory_bandwidth, memory_bandwidth_summary
from tests.sampling import examples
from tests.unit.analysis.trace.shared import (
    Event,
    as_hta_sees,
    event,
    kernel,
    ranks_of,
    reference,
    trace_of,
)

GB_PER_S = "memory bandwidth (GB/s)"
HTA_COLUMNS = ["rank", "name", "count", "mean", "std", "min", "25%", "50%", "75%", "max"]
CHANGES = ["count", "mean", "std", "min", "q25", "q50", "q75", "max"]
COPIES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(1, 9)), min_size=1, max_size=12
)


def copy(at: float, duration: float, **more: object) -> Event:
    named = {"name": "Memcpy HtoD (Pinned -> Device)", "category": "gpu_memcpy", **more}
    return kernel(str(named.pop("name")), at, duration, **named)


def test_residues_of_float_sums_are_no_bandwidth_as_in_hta() -> None:
    """HTA counts 7674 values from 2.8e-14 GB/s on where 3840 copies ran, and adds up neighbours."""
    path = reference("hta_diff_test_v100_r1of2/get_memory_bw_summary.csv")
    said = pl.read_csv(path, skip_rows=3, has_header=False, new_columns=HTA_COLUMNS)
    theirs = said.row(by_predicate=pl.col("name") == "Memcpy DtoD", named=True)
    found = memory_bandwidth_summary(as_hta_sees(ranks_of("hta_diff_test_v100_r1of2")[1]))
    ours = found.row(by_predicate=pl.col("copy_kind") == "Memcpy DtoD", named=True)
    assert theirs["min"] < 1e-12
    assert ours["change_min"] > 1e3
    assert ours["change_count"] == ours["copy_count"] < theirs["count"]
    assert ours["change_max"] / 1e9 < theirs["max"]


@settings(max_examples=examples(60))
@given(COPIES)
def test_bandwidth_equals_brute_force(copies: list[tuple[int, int, int]]) -> None:
    events = [copy(at, length, bytes=rate * length * 1000) for at, length, rate in copies]
    with TemporaryDirectory() as folder:
        trace = trace_of(Path(folder), events)
        series, summary = memory_bandwidth(trace), memory_bandwidth_summary(trace)
    for when, value in dict(series.select("ts_ns", "bandwidth_bytes_per_s").rows()).items():
        running = [rate for at, length, rate in copies if at <= when / 1000 < at + length]
        assert value == pytest.approx(sum(running) * 1e9)
        assert running or value == 0
    row = summary.row(0, named=True)
    cells = {cell for at, length, _ in copies for cell in range(at, at + length)}
    assert row["busy_ns"] == 1000 * len(cells)
    moved = sum(rate * length * 1000 for _, length, rate in copies)
    assert row["bytes"] == moved
    mean = row["mean_bandwidth_bytes_per_s"]
    assert mean == pytest.approx(moved / row["busy_ns"] * 1e9) if cells else mean is None


def test_recorded_bandwidth_comes_before_bytes_and_duration(tmp_path: Path) -> None:
    events = [
        copy(0, 1, bytes=1000, **{GB_PER_S: 2.5}),
        copy(10, 2, bytes=1000),
        kernel("Memset (Device)", 20, 1, category="gpu_memset"),
        kernel("compute", 30, 1),
    ]
    trace = trace_of(tmp_path, events)
    assert memory_bandwidth(trace).rows() == [
        (0, "Memcpy HtoD", 0, 2.5e9),
        (0, "Memcpy HtoD", 1000, 0.0),
        (0, "Memcpy HtoD", 10_000, 5e8),
        (0, "Memcpy HtoD", 12_000, 0.0),
    ]
    known, unknown = memory_bandwidth_summary(trace).rows(named=True)
    assert (known["bytes"], known["unsized_count"], known["busy_ns"]) == (2000, 0, 3000)
    assert unknown["copy_kind"] == "Memset"
    assert (unknown["bytes"], unknown["mean_bandwidth_bytes_per_s"]) == (None, None)
    assert (unknown["unsized_count"], unknown["unrated_count"], unknown["change_count"]) == (
        1,
        1,
        0,
    )


def test_one_copy_without_a_size_makes_the_sum_unknown(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [copy(0, 1, bytes=1000), copy(5, 1)])
    row = memory_bandwidth_summary(trace).row(0, named=True)
    assert (row["copy_count"], row["unsized_count"], row["bytes"]) == (2, 1, None)
    assert row["change_count"] == 1


def test_copies_back_to_back_do_not_add_up(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [copy(0, 1, bytes=1000), copy(1, 1, bytes=3000)])
    assert memory_bandwidth(trace)["bandwidth_bytes_per_s"].to_list() == [1e9, 0.0, 3e9, 0.0]


def test_a_trace_of_the_cpu_alone_has_no_bandwidth(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event("aten::relu", "cpu_op", 0, 1)])
    assert memory_bandwidth(trace).is_empty()
    assert memory_bandwidth_summary(trace).is_empty()
