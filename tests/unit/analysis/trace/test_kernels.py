from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.trace_analysis.device_time import across_ranks, kernels, limit_kernels
from tests.unit.analysis.trace.shared import (
    FEW_TRACES,
    Event,
    event,
    events_of,
    kernel,
    rank_file,
    ranks_of,
    reference_frame,
    trace_of,
)

US = 1000


def calls(**durations_us: list[int]) -> list[Event]:
    """Kernels one after the other."""
    found: list[Event] = []
    for name, each in durations_us.items():
        for duration in each:
            found.append(kernel(name, 1000 * len(found), duration))
    return found


def test_kernels_are_counted_and_timed_by_kind_and_name(tmp_path: Path) -> None:
    found = kernels(trace_of(tmp_path, [
        *calls(a=[10, 20, 30], b=[40]), kernel("copy", 9000, 5, category="gpu_memcpy"),
    ]))  # fmt: skip
    assert found.rows() == [
        (0, "computation", "a", 3, 60_000, 10_000, 30_000, 20_000, 10_000, 0.6, 1),
        (0, "computation", "b", 1, 40_000, 40_000, 40_000, 40_000, None, 0.4, 1),
        (0, "memory", "copy", 1, 5_000, 5_000, 5_000, 5_000, None, 1.0, 1),
    ]
    assert found.schema["name"] == pl.String


def test_a_limit_leaves_one_row_of_others_over_all_their_events(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, calls(a=[50, 50], b=[30, 10], c=[7], d=[3], others=[1]))
    found = kernels(trace, num_kernels=2)
    assert found["name"].to_list() == ["a", "b", "others"]
    rest = found.row(2, named=True)
    assert (rest["count"], rest["sum_ns"], rest["min_ns"], rest["max_ns"], rest["name_count"]) == (
        3, 11 * US, 1 * US, 7 * US, 3
    )  # fmt: skip
    assert rest["mean_ns"] == pytest.approx(mean([7, 3, 1]) * US)
    assert rest["std_ns"] == pytest.approx(stdev([7, 3, 1]) * US)


@pytest.mark.parametrize(
    ("ratio", "count"), [(0.0, 0), (0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.91, 3), (1.0, 3)]
)
def test_duration_ratio_keeps_the_fewest_kernels_that_make_the_share(
    tmp_path: Path, ratio: float, count: int
) -> None:
    trace = trace_of(tmp_path, calls(a=[60], b=[30], c=[10]))
    found = kernels(trace, duration_ratio=ratio)
    assert found.filter(pl.col("name") != "others").height == count


def test_a_limit_above_the_number_of_kernels_changes_nothing(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, calls(a=[60], b=[30]))
    assert kernels(trace, num_kernels=2, duration_ratio=1.0).equals(kernels(trace))


def test_kernels_of_a_cpu_trace_are_an_empty_frame(tmp_path: Path) -> None:
    found = kernels(trace_of(tmp_path, [event("aten::mm", "cpu_op", 0, 1)]), num_kernels=3)
    assert found.is_empty()
    assert "std_ns" in found.columns


@pytest.mark.parametrize("name", FEW_TRACES)
def test_kernels_are_those_of_the_file(name: str) -> None:
    for trace in ranks_of(name).values():
        expected: dict[str, list[int]] = {}
        for each in events_of(trace.path):
            expected.setdefault(each.name, []).append(each.end - each.start)
        found = kernels(trace).group_by("name").agg(pl.col("count", "sum_ns").sum())
        assert {row[0]: row[1:] for row in found.iter_rows()} == {
            key: (len(each), sum(each)) for key, each in expected.items()
        }


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(0, 50), min_size=1)),
       st.integers(0, 7), st.floats(0, 1))  # fmt: skip
def test_limits_never_lose_time(durations: dict[str, list[int]], many: int, share: float) -> None:
    gpu = pl.DataFrame(
        [(0, "computation", name, length) for name, each in durations.items() for length in each],
        schema={"device": pl.Int64, "kind": pl.String, "name": pl.String, "dur_ns": pl.Int64},
        orient="row",
    )
    found = limit_kernels(gpu, num_kernels=many, duration_ratio=share)
    assert found["sum_ns"].sum() == gpu["dur_ns"].sum()
    assert found["count"].sum() == gpu.height
    assert found["name_count"].sum() == len(durations)
    assert found.height <= many + 1


def test_the_same_kernel_across_ranks_names_the_slowest(tmp_path: Path) -> None:
    for rank, pace in enumerate((10, 11, 30, 9)):
        rank_file(tmp_path, rank, [kernel("gemm", 100 * at, pace) for at in range(4)], 4)
    extra = kernel("once", 0, 5)
    rank_file(tmp_path, 4, [extra], 5)
    found = TraceAnalysis(tmp_path).kernels_across_ranks()
    gemm, once = found.row(0, named=True), found.row(1, named=True)
    assert (gemm["name"], gemm["rank_count"], gemm["count"]) == ("gemm", 4, 16)
    assert (gemm["slowest_rank"], gemm["fastest_rank"]) == (2, 3)
    assert (gemm["others_median_ns"], gemm["distance_ratio"]) == (10 * US, 2.0)
    assert gemm["excess_ns"] == 4 * 20 * US
    assert gemm["mean_ns"] == mean([10, 11, 30, 9]) * US
    assert gemm["std_ns"] == pytest.approx(stdev([10, 11, 30, 9]) * US)
    assert (once["rank_count"], once["slowest_rank"]) == (1, 4)
    assert [once[key] for key in ("std_ns", "others_median_ns", "distance_ratio", "excess_ns")] == [
        None
    ] * 4


def test_kernels_across_ranks_of_real_ranks_hold_every_call() -> None:
    parts = [
        kernels(trace).with_columns(rank=pl.lit(rank))
        for rank, trace in ranks_of("dlrm_v100_8ranks").items()
    ]
    found = across_ranks(pl.concat(parts))
    assert found["count"].sum() == sum(part["count"].sum() for part in parts)
    nccl = found.filter(pl.col("name").str.starts_with("ncclKernel_AllReduce")).row(0, named=True)
    theirs = reference_frame("dlrm_v100_8ranks", "get_gpu_kernel_breakdown_all.1").filter(
        pl.col("name").str.starts_with("ncclKernel_AllReduce")
    )
    assert nccl["slowest_mean_ns"] / US == pytest.approx(theirs["mean (us)"].max())
    assert nccl["slowest_rank"] == theirs.sort("mean (us)")["rank"].to_list()[-1]
