"""HTA's methods against what HTA printed: docs/hta-differences.md names what is not compared."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import re
from enum import Flag, auto
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError, UsageError
from haiprof.compat.hta import HTA_NAMES, HtaMethods
from haiprof.trace_analysis.pool import Serial
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import (
    REAL_TRACES,
    REPOSITORY,
    WITHOUT_D11,
    as_hta_sees,
    event,
    kernel,
    launch,
    rank_file,
    reference,
    reference_frame,
    step,
    traces,
)

FLOAT_STAMPS = "hta_nsres_v100_r0of1"  # HTA holds its ns as float us since 1970: to 0.25 us
D10 = "hta_diff_test_v100_r1of2"  # overlapping kernels, whose gaps HTA takes for negative
GRAPHS = (D10, "tl_b200_r0of8_nccl")  # launches of CUDA graphs, which HTA does not know (D16)


def as_hta(name: str) -> HtaMethods:
    """HTA's methods over the events that HTA keeps (D20)."""
    pool = Serial()
    pool._traces = {path: as_hta_sees(Trace(path)) for path in trace_files(traces(name))}
    return HtaMethods(TraceAnalysis(traces(name), pool=pool))


def described(name: str, table: str) -> pl.DataFrame:
    """A table of `describe()`, whose header is three lines."""
    path = reference(name) / f"{table}.csv"
    lines = list(csv.reader(path.read_text().splitlines()))
    columns = [*lines[2][:2], *lines[1][2:]]
    return pl.read_csv(path, skip_rows=3, has_header=False, new_columns=columns)


def same(ours: object, theirs: object, tolerance: float) -> None:
    if theirs is None:
        assert ours is None
    else:
        assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.parametrize("name", WITHOUT_D11)
def test_temporal_breakdown(name: str) -> None:
    ours, theirs = (
        as_hta(name).get_temporal_breakdown(),
        reference_frame(name, "get_temporal_breakdown"),
    )
    assert ours.columns == [*theirs.columns, "device"]
    for mine, hta in zip(ours.rows(named=True), theirs.rows(named=True), strict=True):
        for column in theirs.columns:
            same(mine[column], hta[column], 0.1 if column.endswith("(us)") else 0.006)


@pytest.mark.parametrize("name", WITHOUT_D11)
def test_comm_comp_overlap(name: str) -> None:
    ours, theirs = (
        as_hta(name).get_comm_comp_overlap(),
        reference_frame(name, "get_comm_comp_overlap"),
    )
    assert ours.columns == [*theirs.columns, "device"]
    for mine, hta in zip(ours.iter_rows(), theirs.iter_rows(), strict=True):
        same(mine[1], None if hta[1] is None else float(hta[1]), 0.006)


@pytest.mark.parametrize("name", [n for n in WITHOUT_D11 if n not in (D10, FLOAT_STAMPS)])
def test_idle_time_breakdown(name: str) -> None:
    theirs = reference_frame(name, "get_idle_time_breakdown.0")
    ours, spread = as_hta(name).get_idle_time_breakdown(show_idle_interval_stats=True)
    assert ours.columns == [*theirs.columns, "device"]
    assert spread is not None
    assert {"count", "mean", "std", "min", "25%", "50%", "75%", "max"} < set(spread.columns)
    keys = ["rank", "stream", "idle_category"]
    known = ours.join(theirs, on=keys, suffix="_hta")
    unknown = ours.filter(idle_category="unknown").select("rank", "stream")
    for row in known.join(unknown, on=["rank", "stream"], how="anti").iter_rows(named=True):
        same(row["idle_time"], row["idle_time_hta"], 0.5)
        if row["idle_time_ratio"] is not None:  # of no idle time HTA gives every cause none
            same(row["idle_time_ratio"], row["idle_time_ratio_hta"], 0.006)


@pytest.mark.parametrize("name", WITHOUT_D11)
def test_gpu_kernel_breakdown(name: str) -> None:
    types = reference_frame(name, "get_gpu_kernel_breakdown_all.0")
    theirs = reference_frame(name, "get_gpu_kernel_breakdown_all.1")
    by_type, by_name = as_hta(name).get_gpu_kernel_breakdown(duration_ratio=None, num_kernels=None)
    assert by_type.columns == types.columns
    assert by_name.columns == theirs.columns
    assert set(by_type["kernel_type"]) <= set(types["kernel_type"])
    assert by_type["percentage"].sum() == pytest.approx(100)
    keys = ["kernel_type", "name", "rank"]
    joined = by_name.join(theirs, on=keys, suffix="_hta")
    assert joined.height == by_name.height == theirs.height
    for column in theirs.columns:
        if column not in keys:
            alone = (
                (pl.col("mean (us)") == pl.col("sum (us)")) if column == "stddev" else pl.lit(False)
            )
            worst = joined.filter(~alone).select(
                (pl.col(column) - pl.col(f"{column}_hta")).abs().max()
            )
            assert (worst.item() or 0) < 0.01, column


@pytest.mark.parametrize(
    "name", [n for n in REAL_TRACES if n.startswith("tl_h100") or n.startswith("tl_mi300")]
)
def test_gpu_user_annotation_breakdown(name: str) -> None:
    theirs = reference_frame(name, "get_gpu_user_annotation_breakdown")
    ours = as_hta(name).get_gpu_user_annotation_breakdown()
    assert ours.columns == theirs.columns
    joined = ours.join(theirs, on=["name", "rank"], suffix="_hta")
    assert joined.height == ours.height == theirs.height
    for column in ("sum (us)", "max (us)", "min (us)", "mean (us)"):
        worst = joined.select((pl.col(column) - pl.col(f"{column}_hta")).abs().max()).item()
        assert worst < 0.5


@pytest.mark.parametrize("name", [n for n in REAL_TRACES if n not in GRAPHS])
def test_queue_length_summary(name: str) -> None:
    theirs = described(name, "get_queue_length_summary")
    ours = as_hta(name).get_queue_length_summary()
    assert ours.columns == [*theirs.columns, "device"]
    columns = ["rank", "stream", "count", "min", "25%", "50%", "75%", "max"]
    assert ours.select(columns).rows() == theirs.select(columns).rows()


@pytest.mark.parametrize(
    "name", ["dlrm_v100_8ranks", "hta_cp_simple_add_a100", "tb_resnet50_nw0_v100"]
)
def test_memory_bw_summary(name: str) -> None:
    theirs = described(name, "get_memory_bw_summary").sort("rank", "name")
    ours = as_hta(name).get_memory_bw_summary()
    assert ours.columns == [*theirs.columns, "device"]
    assert ours.select("rank", "name", "count").rows() == [
        (rank, name, int(count))
        for rank, name, count in theirs.select("rank", "name", "count").rows()
    ]
    for column in ("mean", "std", "max"):
        for mine, hta in zip(ours[column], theirs[column], strict=True):
            same(mine, hta, 1e-9)


@pytest.mark.parametrize(
    "name", ["dlrm_v100_8ranks", "hta_sampled_2ranks_ws128", "tl_h100_qwen05_mem_stack"]
)
def test_cuda_kernel_launch_stats(name: str) -> None:
    theirs = reference_frame(name, "get_cuda_kernel_launch_stats.rank0")
    ours = as_hta(name).get_cuda_kernel_launch_stats(ranks=[0])[0]
    assert ours.columns == theirs.columns
    joined = ours.join(theirs, on="correlation", suffix="_hta")
    assert joined.height == theirs.height
    for column in theirs.columns[1:]:
        worst = joined.select((pl.col(column) - pl.col(f"{column}_hta")).abs().max()).item()
        assert worst < 0.002


@pytest.mark.parametrize("name", REAL_TRACES)
def test_profiler_steps_are_those_of_hta_and_the_last(name: str) -> None:
    text = re.sub(
        r"np\.int64\((\d+)\)", r"\1", (reference(name) / "get_profiler_steps.txt").read_text()
    )
    theirs = ast.literal_eval(text)
    ours = as_hta(name).get_profiler_steps()
    assert ours[: len(theirs)] == theirs
    assert len(ours) - len(theirs) == (1 if len(ours) > 1 else 0)


def test_full_queues_of_every_stream() -> None:
    theirs = reference("tl_b200_r0of8_nccl/get_time_spent_blocked_on_full_queue.csv")
    methods = as_hta("tl_b200_r0of8_nccl")
    ours = methods.get_time_spent_blocked_on_full_queue(methods.get_queue_length_time_series())
    assert ours.columns == theirs.read_text().strip().split(",")[1:]
    assert methods.get_time_spent_blocked_on_full_queue(max_queue_length=1).height > 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks; rank 1 enters the second all-reduce 30 us late."""
    for rank in (0, 1):
        late = 30 * rank
        rank_file(
            tmp_path,
            rank,
            [
                step(4, 0, 200),
                event("aten::mm", "cpu_op", 0, 20),
                launch(1, 5),
                launch(2, 30),
                launch(3, 60 + late),
                kernel("gemm", 10, 20, correlation=1),
                kernel("ncclDevKernel_AllReduce", 40, 10, stream=9, correlation=2),
                kernel("ncclDevKernel_AllReduce", 100 + late, 60 - late, stream=9, correlation=3),
                event("forward", "gpu_user_annotation", 5, 50, pid=0, tid=7),
            ],
        )
    return tmp_path


def test_names_of_hta_work_where_they_are_asked_for(folder: Path) -> None:
    analysis = TraceAnalysis(folder, compat="hta")
    for name in HTA_NAMES:
        assert callable(getattr(analysis, name))
    frame = analysis.get_temporal_breakdown(visualize=True)  # type: ignore[attr-defined]
    assert frame["compute_time(us)"].to_list() == [20.0, 20.0]
    with pytest.raises(AttributeError, match="compat='hta'"):
        TraceAnalysis(folder).get_temporal_breakdown  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="get_nothing"):
        analysis.get_nothing  # type: ignore[attr-defined]  # noqa: B018


def test_arguments_of_htas_constructor_name_the_traces(folder: Path, tmp_path: Path) -> None:
    expected = TraceAnalysis(folder, compat="hta").get_temporal_breakdown()  # type: ignore[attr-defined]
    first, second = (folder / f"rank{rank}.json" for rank in (0, 1))
    (folder / "not a rank.json").write_text(
        first.read_text()
    )  # which a folder would be refused for
    ways: list[dict[str, Any]] = [
        {"trace_files": {1: str(second), 0: first}},
        {"trace_files": {0: "rank0.json", 1: "rank1.json"}, "trace_dir": str(folder)},
        {"trace_files": [str(second), str(first)], "include_last_profiler_step": True},
    ]
    for way in ways:
        analysis = TraceAnalysis(**way)
        assert analysis.get_temporal_breakdown().equals(expected)  # type: ignore[attr-defined]
        assert list(analysis.files) == [0, 1]
    page = TraceAnalysis(**ways[0]).write_page(tmp_path / "page.html").read_text()
    assert "2 ranks" in page
    (folder / "not a rank.json").unlink()
    by_folder = TraceAnalysis(trace_dir=str(folder))
    assert by_folder.get_temporal_breakdown().equals(expected)  # type: ignore[attr-defined]
    assert list(TraceAnalysis({5: first}).kernel_breakdown()["rank"].unique()) == [5]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({}, "no traces given"),
        ({"path": "a", "trace_dir": "b"}, "both path and HTA's arguments"),
        ({"trace_files": {}}, "expected files"),
        ({"trace_files": "rank0.json"}, "expected files"),
        ({"trace_dir": "b", "include_last_profiler_step": False}, "no step is left out"),
    ],
)
def test_arguments_that_name_no_traces_are_told(way: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TraceAnalysis(**way)


def test_methods_without_a_table_of_hta(folder: Path) -> None:
    methods = HtaMethods(TraceAnalysis(folder))
    assert methods.get_potential_stragglers(num_candidates=1) == [1]
    assert methods.get_potential_stragglers(profiler_steps=[99]) == []
    assert methods.get_queue_length_time_series([0])[0].columns == [
        "ts",
        "stream",
        "queue_length",
        "device",
    ]
    assert methods.get_memory_bw_time_series() == {}
    delays = methods.get_aten_op_kernels_and_delay()[0]
    assert delays.row(0) == ("aten::mm", "gemm", 1, 5.0, 5.0)
    assert methods.get_op_kernels_and_delay("mm$", ranks=[1])[1].equals(delays)
    series = methods.get_queue_length_time_series([1])
    summary = methods.get_queue_length_summary_from_time_series(series)
    assert summary["rank"].unique().to_list() == [1]
    sequences = methods.get_frequent_cuda_kernel_sequences("aten::mm", "out", min_pattern_len=1)
    assert sequences.row(0) == ("aten::mm|gemm", 1, 20.0, 20.0)
    annotated = methods.get_gpu_kernels_with_user_annotations(1)
    assert annotated["s_user_annotation"].to_list() == ["forward", None, None]
    path, success = methods.critical_path_analysis(0, "ProfilerStep", 0)
    assert success
    assert path.summary().height > 0


class TimeSeriesTypes(Flag):
    """As HTA has it."""

    QUEUE_LENGTH = auto()
    MEMCPY_BANDWIDTH = auto()


def counter_names(path: Path) -> set[str]:
    content = json.loads(gzip.decompress(path.read_bytes()))
    return {e["name"].split()[0] for e in content["traceEvents"] if e["ph"] == "C"}


def test_counter_traces_have_the_series_and_the_name_that_were_asked_for(folder: Path) -> None:
    copy = kernel("Memcpy HtoD", 10, 5, correlation=1, category="gpu_memcpy", bytes=2000)
    rank_file(folder, 0, [launch(1, 5, name="cudaMemcpyAsync"), copy])
    methods = HtaMethods(TraceAnalysis(folder))
    both = TimeSeriesTypes.QUEUE_LENGTH | TimeSeriesTypes.MEMCPY_BANDWIDTH
    for series, suffix, expected in (
        (TimeSeriesTypes.QUEUE_LENGTH, "_queues", {"Queue"}),
        (TimeSeriesTypes.MEMCPY_BANDWIDTH, "_copies", {"Bandwidth"}),
        (both, None, {"Queue", "Bandwidth"}),
        (None, "", {"Queue", "Bandwidth"}),
    ):
        written = methods.generate_trace_with_counters(series, [0], suffix)
        path = Path(written["path"].item())
        assert path.name == f"rank0{suffix or '_with_counters'}.json.gz"
        assert counter_names(path) == expected
    assert list(TraceAnalysis(folder).files) == [0, 1]  # copies are no ranks, whatever their name
    with pytest.raises(UsageError, match="TimeSeriesTypes"):
        methods.generate_trace_with_counters("queues")


def test_overlay_holds_the_path_alone_if_asked(folder: Path, tmp_path: Path) -> None:
    methods = HtaMethods(TraceAnalysis(folder))
    path, _ = methods.critical_path_analysis(0, "ProfilerStep", 0)
    counts = []
    for only in (False, True):
        written = methods.overlay_critical_path_analysis(0, path, tmp_path, only)
        content = json.loads(gzip.decompress(Path(written).read_bytes()))
        events = [each for each in content["traceEvents"] if each["ph"] == "X"]
        assert any("critical" in each["args"] for each in events)
        assert only == all("critical" in each["args"] for each in events)
        counts.append(len(events))
    assert counts[1] < counts[0]


def test_steps_narrow_the_answers(folder: Path) -> None:
    with pytest.raises(MissingDataError, match="it has 4"):
        HtaMethods(TraceAnalysis(folder), steps=(9, 10)).get_temporal_breakdown()
    found = HtaMethods(TraceAnalysis(folder), steps=(4, 5)).get_temporal_breakdown()
    assert found.height == 2


def test_a_rank_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(MissingDataError, match="no trace of rank 7"):
        HtaMethods(TraceAnalysis(folder)).get_queue_length_summary([0, 7])


def test_every_method_and_every_defect_is_in_the_document() -> None:
    text = (REPOSITORY / "docs" / "hta-differences.md").read_text()
    assert all(f"`{name}" in text for name in HTA_NAMES)
    assert all(re.search(rf"\bD{number}\b", text) for number in range(1, 25))
