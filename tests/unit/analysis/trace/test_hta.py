"""HTA's methods against what HTA printed: docs/hta-differences.md names what is not compared."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import re
from collections.abc import Sequence
from enum import Flag, auto
from functools import cache
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
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import (
    FEW_TRACES,
    REAL_TRACES,
    REPOSITORY,
    WITHOUT_D11,
    as_hta_sees,
    event,
    events_of,
    kernel,
    launch,
    rank_file,
    reference,
    reference_frame,
    step,
    traces,
)

FLOAT_STAMPS = "hta_nsres_v100_r0of1"  # HTA holds its ns as float us since 1970: to 0.25 us
D10 = "hta_diff_test_v100_r1of2"  # its 31 overlapping kernels are gaps of -115 us in all for HTA
CHOSEN = ("hta_sampled_2ranks_ws128", "tl_h100_qwen05_mem_stack", "tl_mi300_ddp_resnet18")
GRAPHS = (D10, "tl_b200_r0of8_nccl")  # launches of CUDA graphs, which HTA does not know (D16)
WITHOUT_D16 = [name for name in REAL_TRACES if name not in GRAPHS]
LAUNCHES_OF_CUDA = [name for name in REAL_TRACES if "diff" not in name and "mi300" not in name]


@cache
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


def assert_same(
    ours: pl.DataFrame, theirs: pl.DataFrame, keys: Sequence[str], **tolerance: float
) -> None:
    """Every row of HTA's is in ours; `tolerance` by the end of a column's name, else 0.01."""
    assert ours.columns[: theirs.width] == theirs.columns
    one_call = pl.col("^stddev$").fill_null(0)  # HTA has null or 0 for the deviation of one call
    joined = theirs.with_columns(one_call).join(
        ours.with_columns(one_call), on=keys, suffix="_ours"
    )
    assert joined.height == theirs.height
    for column in theirs.columns:
        if column not in keys:
            near = next((v for end, v in tolerance.items() if column.endswith(end)), 0.01)
            expected, found = (joined[name].cast(pl.Float64).to_list()
                               for name in (column, f"{column}_ours"))  # fmt: skip
            for hta, mine in zip(expected, found, strict=True):
                assert mine == (None if hta is None else pytest.approx(hta, abs=near)), column


@pytest.mark.parametrize("name", first_of(WITHOUT_D11, *CHOSEN))
def test_temporal_breakdown(name: str) -> None:
    ours = as_hta(name).get_temporal_breakdown()
    assert_same(ours, reference_frame(name, "get_temporal_breakdown"), ["rank"], pctg=0.006,
                **{"(us)": 0.1})  # fmt: skip


@pytest.mark.parametrize("name", first_of(WITHOUT_D11, *CHOSEN))
def test_comm_comp_overlap(name: str) -> None:
    ours = as_hta(name).get_comm_comp_overlap()
    assert_same(ours, reference_frame(name, "get_comm_comp_overlap"), ["rank"], pctg=0.006)


@pytest.mark.parametrize("name", first_of(WITHOUT_D11, *CHOSEN))
def test_idle_time_breakdown(name: str) -> None:
    theirs = reference_frame(name, "get_idle_time_breakdown.0")
    ours, spread = as_hta(name).get_idle_time_breakdown(show_idle_interval_stats=True)
    assert spread is not None
    assert {"count", "mean", "std", "min", "25%", "50%", "75%", "max"} < set(spread.columns)
    keys = ["rank", "stream"]
    sums = [each.group_by(keys).agg(pl.col("idle_time").sum()) for each in (ours, theirs)]
    ranks = pl.col("rank").is_in(theirs["rank"].unique().to_list())
    assert_same(sums[0].filter(ranks), sums[1], keys, idle_time=115.5 if name == D10 else 0.5)
    # What has no launch has the time of the file's first event in HTA, so any category; there
    # gaps of FLOAT_STAMPS change sides, and no idle time at all gives every cause none.
    unknown = ours.filter(idle_category="unknown")
    known = theirs.join(unknown, on=keys, how="anti").filter(pl.col("idle_time") > 0)
    if name not in (D10, FLOAT_STAMPS):
        keys.append("idle_category")
        assert_same(ours, known, keys, idle_time=0.5, ratio=0.006)


@pytest.mark.parametrize("name", first_of(WITHOUT_D11, *CHOSEN))
def test_gpu_kernel_breakdown(name: str) -> None:
    types = reference_frame(name, "get_gpu_kernel_breakdown_all.0")
    theirs = reference_frame(name, "get_gpu_kernel_breakdown_all.1")
    by_type, by_name = as_hta(name).get_gpu_kernel_breakdown(duration_ratio=None, num_kernels=None)
    assert by_type.columns == types.columns
    assert by_type["percentage"].sum() == pytest.approx(100)
    events = [each for path in trace_files(traces(name)) for each in events_of(path)]
    in_us = all(each.start % 1000 == 0 and each.end % 1000 == 0 for each in events)
    lost_us = 0 if in_us else len(events)  # HTA cuts each piece to whole us (D3)
    times = {kind.lower(): us for kind, us in by_type.select("kernel_type", "sum").iter_rows()}
    for kind, time_us in types.select("kernel_type", "sum").iter_rows():
        assert time_us - 0.5 < times.get(kind.lower(), 0) < time_us + 0.5 + 2 * lost_us
    assert by_name.height == theirs.height
    assert_same(by_name, theirs, ["kernel_type", "name", "rank"])


@pytest.mark.parametrize(
    "name", first_of([n for n in REAL_TRACES if n.startswith("tl_") or "nsres" in n], *CHOSEN)
)
def test_gpu_user_annotation_breakdown(name: str) -> None:
    theirs = reference_frame(name, "get_gpu_user_annotation_breakdown")
    ours = as_hta(name).get_gpu_user_annotation_breakdown()
    assert ours.height == theirs.height
    assert_same(ours, theirs, ["name", "rank"])


@pytest.mark.parametrize("name", first_of(WITHOUT_D16, *CHOSEN))
def test_queue_length_summary(name: str) -> None:
    """HTA leaves the order of changes within one us to chance, and so its mean and deviation."""
    theirs = described(name, "get_queue_length_summary")
    ours = as_hta(name).get_queue_length_summary()
    assert ours.columns == [*theirs.columns, "device"]
    columns = ["rank", "stream", "count", "min", "25%", "50%", "75%", "max"]
    assert ours.select(columns).rows() == theirs.select(columns).rows()
    assert ours["std"].to_list() == pytest.approx(theirs["std"].to_list(), rel=0.05)
    assert ((ours["mean"] - theirs["mean"]) > -1e-3).all()


@pytest.mark.parametrize("name", first_of([n for n in REAL_TRACES if n != D10], *CHOSEN))
def test_memory_bw_summary(name: str) -> None:
    theirs = described(name, "get_memory_bw_summary").fill_nan(None)
    ours = as_hta(name).get_memory_bw_summary()
    assert ours.height == theirs.height
    every = ("mean", "std", "min", "%", "max", "count")
    assert_same(ours, theirs, ["rank", "name"], **dict.fromkeys(every, 1e-9))


@pytest.mark.parametrize("name", first_of(LAUNCHES_OF_CUDA, *CHOSEN))
def test_cuda_kernel_launch_stats(name: str) -> None:
    theirs = reference_frame(name, "get_cuda_kernel_launch_stats.rank0")
    ours = as_hta(name).get_cuda_kernel_launch_stats(ranks=[0])[0]
    delay = 0.51 if name == FLOAT_STAMPS else 0.001
    assert_same(ours, theirs, ["correlation"], duration=1e-6, delay=delay)


@pytest.mark.parametrize("name", FEW_TRACES)
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
        rank_file(tmp_path, rank, [
            step(4, 0, 200), event("aten::mm", "cpu_op", 0, 20),
            launch(1, 5), launch(2, 30), launch(3, 60 + late),
            kernel("gemm", 10, 20, correlation=1),
            kernel("ncclDevKernel_AllReduce", 40, 10, stream=9, correlation=2),
            kernel("ncclDevKernel_AllReduce", 100 + late, 60 - late, stream=9, correlation=3),
            event("forward", "gpu_user_annotation", 5, 50, pid=0, tid=7),
        ])  # fmt: skip
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


@pytest.mark.proof
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


@pytest.mark.parametrize(("way", "message"), [
    ({}, "no traces given"),
    ({"path": "a", "trace_dir": "b"}, "both path and HTA's arguments"),
    ({"trace_files": {}}, "expected files"),
    ({"trace_files": "rank0.json"}, "expected files"),
    ({"trace_dir": "b", "include_last_profiler_step": False}, "no step is left out"),
])  # fmt: skip
def test_arguments_that_name_no_traces_are_told(way: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TraceAnalysis(**way)


def test_methods_without_a_table_of_hta(folder: Path) -> None:
    methods = HtaMethods(TraceAnalysis(folder))
    assert methods.get_potential_stragglers(num_candidates=1) == [1]
    assert methods.get_potential_stragglers(profiler_steps=[99]) == []
    assert methods.get_queue_length_time_series([0])[0].columns == [
        "ts", "stream", "queue_length", "device",
    ]  # fmt: skip
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
