from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.trace_analysis.device_time import gaps, gpu_events, idle_breakdown, union_of
from tests.unit.analysis.trace.shared import (
    REAL_TRACES,
    event,
    kernel,
    launch,
    ranks_of,
    trace_of,
)

US = 1000


def streams_trace(folder: Path) -> list[dict[str, object]]:
    """Stream 7: a long kernel, one inside it, then gaps of each category; stream 8: no gap."""
    return [
        launch(1, 0), kernel("long", 10, 90, correlation=1),
        launch(2, 1), kernel("inside", 20, 10, correlation=2),  # HTA: a gap of -80
        launch(3, 90), kernel("soon", 105, 5, correlation=3),  # 5 us after 100: kernel_wait
        launch(4, 91), kernel("late", 160, 10, correlation=4),  # 50 us after 110: other
        launch(5, 190), kernel("host", 200, 10, correlation=5),  # 30 us after 170, 20 of the host
        kernel("no launch", 217, 3, correlation=77),  # 7 us after 210: unknown
        kernel("touching", 220, 5, correlation=78),
        kernel("alone", 0, 5, stream=8),
        event("Stream Sync", "cuda_sync", 100, 5, device=0, stream=7),
    ]  # fmt: skip


def test_idle_time_has_a_row_per_stream_and_category(tmp_path: Path) -> None:
    found = idle_breakdown(trace_of(tmp_path, streams_trace(tmp_path)))
    columns = ("stream", "idle_category", "idle_ns", "idle_ratio", "before_launch_ns", "count")
    assert found.select(columns).rows() == [
        (7, "host_wait", 30 * US, 30 / 92, 20 * US, 1),
        (7, "kernel_wait", 5 * US, 5 / 92, 0, 1),
        (7, "other", 50 * US, 50 / 92, 0, 1),
        (7, "unknown", 7 * US, 7 / 92, None, 1),
        (8, "host_wait", 0, None, 0, 0),
        (8, "kernel_wait", 0, None, 0, 0),
        (8, "other", 0, None, 0, 0),
        (8, "unknown", 0, None, None, 0),
    ]


def test_idle_delay_moves_gaps_between_kernel_wait_and_other(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, streams_trace(tmp_path))
    for delay_us, kernel_wait in ((5, 0), (6, 5), (50, 5), (51, 55)):
        found = idle_breakdown(trace, consecutive_kernel_delay_ns=delay_us * US, streams=[7])
        assert found["idle_ns"].to_list()[1] == kernel_wait * US
        assert found["stream"].unique().to_list() == [7]


def test_idle_statistics_are_of_the_intervals(tmp_path: Path) -> None:
    events = []
    for number, gap_us in enumerate((2, 4, 6, 20)):
        at = 100 * number
        events += [
            launch(2 * number + 1, 0), kernel("a", at, 100 - gap_us, correlation=2 * number + 1),
        ]  # fmt: skip
    events += [launch(99, 0), kernel("end", 400, 1, correlation=99)]
    found = idle_breakdown(trace_of(tmp_path, events)).row(1, named=True)
    assert [found[f"{key}_ns"] for key in ("min", "q25", "median", "q75", "max", "mean")] == [
        2000, 3500, 5000, 9500, 20000, 8000
    ]  # fmt: skip
    assert found["std_ns"] == pytest.approx((((6**2 + 4**2 + 2**2 + 12**2) / 3) ** 0.5) * US)


def test_idle_time_of_a_cpu_trace_is_empty(tmp_path: Path) -> None:
    found = idle_breakdown(trace_of(tmp_path, [event("aten::mm", "cpu_op", 0, 1)]))
    assert found.is_empty()
    assert found.schema["median_ns"] == pl.Float64


@pytest.mark.parametrize("name", REAL_TRACES)
def test_idle_time_and_busy_time_make_each_streams_span(name: str) -> None:
    for trace in ranks_of(name).values():
        found = idle_breakdown(trace).group_by("stream").agg(pl.col("idle_ns").sum())
        idle = dict(found.iter_rows())
        for (stream,), events in gpu_events(trace, None).group_by("stream"):
            busy = union_of(events)
            span = busy.ends[-1] - busy.starts[0]
            assert idle[stream] == span - (busy.ends - busy.starts).sum()


# HTA adds the 31 negative gaps of overlapping kernels (D10), 115 us in all.
# It holds stamps as float us since 1970, a quarter of a us apart: 12 gaps of nsres change sides.
D10_US = {"hta_diff_test_v100_r1of2": 115.5}
FLOAT_STAMPS = "hta_nsres_v100_r0of1"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=12))
def test_gaps_are_the_times_in_which_nothing_runs(pairs: list[tuple[int, int]]) -> None:
    pairs.sort()
    gpu = pl.DataFrame(
        {
            "device": [0] * len(pairs), "stream": [1] * len(pairs),
            "ts_ns": [start for start, _ in pairs], "dur_ns": [length for _, length in pairs],
            "correlation": [None] * len(pairs),
        },
        schema_overrides={"correlation": pl.Int64},
    )  # fmt: skip
    runtime = pl.DataFrame(schema={"correlation": pl.Int64, "ts_ns": pl.Int64})
    found = gaps(gpu, runtime, 10)
    busy = {cell for start, length in pairs for cell in range(start, start + length)}
    end = max(start + length for start, length in pairs)
    idle = set(range(pairs[0][0], end)) - busy
    covered = [
        cell for start, gap in found.select("ts_ns", "gap_ns").iter_rows()
        for cell in range(start - gap, start)
    ]  # fmt: skip
    assert len(covered) == len(set(covered))
    assert set(covered) == idle
