"""Pictures of traces: their bars and lines are the numbers of the questions."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.base.units import NS_PER_MS, NS_PER_US
from haiprof.compat.hta import HtaMethods
from haiprof.show.trace_pictures import PICTURES, all_pictures
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, step, traces

DLRM = "dlrm_v100_8ranks"


@pytest.fixture(scope="module")
def dlrm() -> TraceAnalysis:
    return TraceAnalysis(traces(DLRM), compat="hta")


def test_every_picture_of_a_job_of_eight_ranks_is_drawn_or_says_why_not(
    dlrm: TraceAnalysis,
) -> None:
    drawn, missing = all_pictures(dlrm)
    assert set(missing) == {"memory"}
    assert "no memory event" in missing["memory"]
    assert set(drawn) == set(PICTURES) - {"memory"}
    assert all(len(picture.figure.data) for picture in drawn.values())


def test_bars_of_gpu_time_add_up_to_the_span_and_shares_to_the_whole(dlrm: TraceAnalysis) -> None:
    found = dlrm.temporal_breakdown()
    times = PICTURES["temporal"](dlrm).figure
    for row, span_ns in enumerate(found["span_ns"]):
        assert sum(bar.x[row] for bar in times.data) == pytest.approx(span_ns / NS_PER_MS)
    shares = PICTURES["temporal"](dlrm, share=True).figure
    assert [sum(bar.x[row] for bar in shares.data) for row in range(8)] == pytest.approx([100] * 8)
    assert list(times.data[0].y) == [f"rank {rank}" for rank in range(8)]


def test_top_kernels_and_all_others_are_all_time_of_a_rank(dlrm: TraceAnalysis) -> None:
    figure = PICTURES["kernels"](dlrm).figure
    whole = dlrm.kernel_breakdown().filter(pl.col("rank") == 3)["sum_ns"].sum()
    assert sum(bar.x[3] for bar in figure.data) == pytest.approx(whole / NS_PER_MS)
    assert figure.data[-1].name == "all others"


def test_one_kernel_shows_its_mean_with_the_shortest_and_the_longest_call(
    dlrm: TraceAnalysis,
) -> None:
    picture = PICTURES["kernel"](dlrm, kernel="sgemm_128x32_nt")
    (bar,), row = picture.figure.data, picture.frame.sort("rank").row(5, named=True)
    assert bar.y[5] == pytest.approx(row["mean_ns"] / NS_PER_US)
    assert bar.y[5] + bar.error_y.array[5] == pytest.approx(row["max_ns"] / NS_PER_US)
    assert bar.y[5] - bar.error_y.arrayminus[5] == pytest.approx(row["min_ns"] / NS_PER_US)
    with pytest.raises(MissingDataError, match="no kernel with 'no_such'"):
        PICTURES["kernel"](dlrm, kernel="no_such")


def test_launches_are_counted_once_in_each_distribution_and_cut_offs_are_lines(
    dlrm: TraceAnalysis,
) -> None:
    picture = PICTURES["launches"](dlrm, runtime_cutoff_ns=20_000)
    calls, delays, short = picture.figure.data
    assert sum(calls.y) == sum(delays.y) == picture.frame.height
    assert sum(short.y) == picture.frame["is_short"].sum()
    lines = [shape.x0 for shape in picture.figure.layout.shapes]
    assert lines == [20, 100]


def test_lines_of_many_streams_are_the_highest_and_the_title_says_so(dlrm: TraceAnalysis) -> None:
    figure = PICTURES["queue_length"](dlrm).figure
    assert len(figure.data) == 12
    assert "lower lines are left out" in figure.layout.title.text
    highest = dlrm.queue_length()["queue_length"].max()
    assert max(max(line.y) for line in figure.data) == highest
    assert len({(line.line.color, line.line.dash) for line in figure.data}) == 12


def test_a_rank_without_a_gpu_says_how_to_record_one(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [step(4, 0, 200), event("aten::mm", "cpu_op", 0, 20)])
    with pytest.raises(MissingDataError, match="no GPU event"):
        PICTURES["temporal"](TraceAnalysis(tmp_path))


def test_show_prints_a_table_where_there_is_no_notebook(
    dlrm: TraceAnalysis, capsys: pytest.CaptureFixture[str]
) -> None:
    dlrm.show_temporal_breakdown(share=True)
    dlrm.show_critical_path(3)
    shown = capsys.readouterr().out
    assert "GPU time by rank, as shares" in shown
    assert "18.9 ms" in shown  # rank 3's span, as trace-report says it
    assert "cpu_bound" in shown


@pytest.mark.proof
def test_a_page_of_traces_is_one_file_with_pictures_and_tables(
    dlrm: TraceAnalysis, tmp_path: Path
) -> None:
    page = dlrm.write_page(tmp_path / "page.html").read_text()
    for name in ("temporal", "idle", "kernels", "launches", "what-if"):
        assert f'data-figure="trace-{name}"' in page
    assert "no memory event" in page
    assert "Launch queues, the longest first" in page
    assert "http://" not in page.split("<script")[0]


def test_arguments_of_hta_are_taken_and_honoured(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [
        step(4, 0, 200),
        *(event(name, "user_annotation", ts, 10) for name, ts in
          (("part", 10), ("part", 30), ("part", 50), ("rest", 70))),
        launch(1, 12), launch(2, 32), launch(3, 52),
        kernel("void gemm<float>(int)", 20, 5, correlation=1),
        kernel("void gemm<float>(int)", 40, 5, correlation=2),
        kernel("add", 60, 30, correlation=3),
    ])  # fmt: skip
    methods = HtaMethods(TraceAnalysis(tmp_path))
    ranges = methods.get_gpu_user_annotation_breakdown(
        use_gpu_annotation=False, visualize=False, num_kernels=1
    )
    assert ranges.height == 1
    short = methods.get_gpu_kernels_with_user_annotations(0)["s_name"].to_list()
    assert short == ["gemm", "gemm", "add"]
    whole = methods.get_gpu_kernels_with_user_annotations(0, shortern_names=False)["s_name"]
    assert whole[0] == "void gemm<float>(int)"
    first, _ = methods.critical_path_analysis(0, "part", None)
    both, _ = methods.critical_path_analysis(0, "part", (0, 1))
    assert first.window == "part (instance 0)"
    assert both.window == "part (instances 0 to 1)"
    assert both.start_ns == first.start_ns
    assert both.end_ns > first.end_ns


def test_counter_traces_are_written_of_the_ranks_that_were_asked_for(tmp_path: Path) -> None:
    for rank in range(2):
        rank_file(
            tmp_path, rank, [step(4, 0, 200), launch(1, 12), kernel("k", 20, 5, correlation=1)]
        )
    methods = HtaMethods(TraceAnalysis(tmp_path))
    found = methods.generate_trace_with_counters(ranks=[0], folder=tmp_path)
    assert found["rank"].to_list() == [0]
    assert len(list(tmp_path.glob("*_with_counters*"))) == 1
    with pytest.raises(MissingDataError, match="no trace of rank 9"):
        methods.generate_trace_with_counters(ranks=[9], folder=tmp_path)


def test_time_line_shows_streams_gaps_and_the_host_below(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [
        step(3, 0, 1000),
        event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation",
              0, 400),
        event("aten::mm", "cpu_op", 400, 100), launch(1, 410), launch(2, 420),
        kernel("gemm", 430, 300, correlation=1),
        kernel("ncclDevKernel_AllReduce_Sum", 730, 250, correlation=2, stream=20),
        event("aten::add", "cpu_op", 500, 500),
    ])  # fmt: skip
    picture = PICTURES["timeline"](TraceAnalysis(tmp_path))
    lanes = picture.frame["lane"].unique(maintain_order=True).to_list()
    assert lanes == ["stream 7", "stream 20", "GPU idle", "host"]
    rows = {(lane, kind): (start / 1000, long / 1000) for lane, kind, start, long in
            picture.frame.select("lane", "kind", "start_ns", "dur_ns").iter_rows()}  # fmt: skip
    for key, times in {
        ("stream 7", "computation"): (430, 300), ("stream 20", "communication"): (730, 250),
        ("GPU idle", "idle"): (980, 20), ("host", "wait: loader"): (0, 400),
        ("host", "operators"): (500, 500),
    }.items():  # fmt: skip
        assert rows[key] == pytest.approx(times, abs=4), key
    assert picture.says == (
        "Step 3 of rank 0, 1.00 ms: the GPU is idle for 450 µs of it, the longest time 430 µs at "
        "its begin; below is what the host did meanwhile."
    )
    assert [bar.text for bar in picture.figure.data if bar.name == "computes"] == [("gemm",)]
