from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.files import load_notes
from haiprof.trace_analysis.pool import Serial
from haiprof.trace_analysis.report import SECTIONS, TraceReport, standard_report
from haiprof.trace_format.kineto.events import TABLES
from tests.commands import Run
from tests.unit.analysis.trace.shared import (
    ONE_TRACE,
    event,
    kernel,
    launch,
    rank_file,
    step,
    traces,
)

METHODS = {
    "files": "load_report", "temporal": "temporal_breakdown", "overlap": "overlap",
    "kernel_types": "kernel_type_breakdown", "idle": "idle_time_breakdown",
    "launches": "launch_summary", "memory_bandwidth": "memory_bandwidth_summary",
    "process_groups": "process_groups", "stragglers": "stragglers",
    "clock_offsets": "clock_offsets",
}  # fmt: skip


def two_ranks(folder: Path, *, launches_of: Sequence[int] = (0, 1)) -> Path:
    for rank in (0, 1):
        calls = [launch(5, 1), launch(6, 101)] if rank in launches_of else []
        work = [kernel("gemm", 10, 20, correlation=5), kernel("gemm", 110, 20, correlation=6)]
        rank_file(folder, rank, [step(1, 0, 100), step(2, 100, 100), *calls, *work])
    return folder


@pytest.mark.parametrize("name", ONE_TRACE)
def test_tables_are_those_of_the_facade_and_plain(name: str) -> None:
    """No Enum reaches people, whose printed schema would be megabytes."""
    report, analysis = standard_report(traces(name)), TraceAnalysis(traces(name))
    assert set(report.tables) | set(report.missing) >= set(SECTIONS)
    for table in set(report.tables) & set(METHODS):
        assert_frame_equal(report.tables[table], getattr(analysis, METHODS[table])())
    assert report.tables["queue"].columns[-1] == "full_ns"
    assert report.tables["kernels"]["sum_ns"].is_sorted(descending=True)
    plain = {pl.Int64, pl.Float64, pl.String, pl.Boolean}
    for table, frame in report.tables.items():
        assert set(frame.dtypes) <= plain, (table, frame.schema)


def test_steps_narrow_every_table(tmp_path: Path) -> None:
    report = standard_report(two_ranks(tmp_path), steps=(2, 3))
    assert report.tables["temporal"]["compute_ns"].to_list() == [20_000] * 2
    assert report.tables["steps"]["step"].to_list() == [2, 2]
    assert report.tables["kernels"]["count"].to_list() == [2]
    assert report.tables["launches"]["launch_count"].to_list() == [1, 1]
    assert report.as_json()["steps"] == [2, 3]


def test_one_rank_keeps_its_number(tmp_path: Path) -> None:
    report = standard_report(two_ranks(tmp_path), rank=1)
    assert report.ranks == (1,)
    assert report.tables["temporal"]["rank"].to_list() == [1]
    assert "several" in report.missing["stragglers"]
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps([event("aten::add", "cpu_op", 0, 5)]))
    assert standard_report(tmp_path, rank=1).ranks == (1,)


def test_what_one_rank_lacks_is_named_and_the_others_stay(tmp_path: Path) -> None:
    report = standard_report(two_ranks(tmp_path, launches_of=[0]))
    assert report.tables["queue"]["rank"].to_list() == [0]
    assert "no call that launched" in report.missing["queue, rank 1"]
    assert report.tables["temporal"]["rank"].to_list() == [0, 1]
    report = standard_report(two_ranks(tmp_path, launches_of=[]))
    assert "queue" not in report.tables
    assert "no call that launched" in report.missing["queue"]


def test_a_trace_without_gpu_events_says_so(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [event("aten::add", "cpu_op", 0, 5)])
    report = standard_report(tmp_path)
    assert report.tables["temporal"]["idle_ns"].to_list() == [None]
    assert "rank0.json: no GPU event in it" in report.notes[0]


def test_steps_and_ranks_that_are_not_there_are_errors(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="it has 1 to 2"):
        standard_report(two_ranks(tmp_path), steps=(7, 8))
    with pytest.raises(MissingDataError, match="no trace of rank 5"):
        standard_report(two_ranks(tmp_path), rank=5)


def test_json_has_stable_keys(tmp_path: Path) -> None:
    report: TraceReport = standard_report(two_ranks(tmp_path))
    found = report.as_json()
    assert list(found) == ["path", "ranks", "steps", "tables", "missing", "notes"]
    assert found["tables"]["temporal"][0]["span_ns"] == 120_000


def test_a_trace_of_the_cpu_alone_has_its_operators_by_shape(tmp_path: Path, run: Run) -> None:
    one, other = {"Input Dims": [[8, 4], [4, 2]]}, {"Input Dims": [[8, 4], [4, 9]]}
    rank_file(tmp_path, 0, [
        event("aten::linear", "cpu_op", 0, 50, **one), event("aten::mm", "cpu_op", 10, 30, **one),
        event("aten::mm", "cpu_op", 60, 25, **other), event("aten::mm", "cpu_op", 90, 10, **one),
    ])  # fmt: skip
    found = TraceAnalysis(tmp_path).host_operators()
    rows = [(name, json.loads(shapes), *rest) for _, name, shapes, *rest in found.iter_rows()]
    assert rows == [
        ("aten::mm", [[8, 4], [4, 2]], 2, 40_000, 40_000),
        ("aten::mm", [[8, 4], [4, 9]], 1, 25_000, 25_000),
        ("aten::linear", [[8, 4], [4, 2]], 1, 20_000, 50_000),
    ]
    shown = run("trace-report", tmp_path).out
    assert "Operators by self time" in shown
    assert "computes" not in shown  # the head of the table of GPU time
    shown = run("functions", tmp_path).out
    assert "abnormal" not in shown
    assert "CUDA runtime: no call of the CUDA runtime in any trace" in " ".join(shown.split())


def test_a_trace_with_a_gpu_has_no_table_of_host_operators() -> None:
    assert TraceAnalysis(traces("hta_nsres_v100_r0of1")).host_operators().is_empty()


def test_a_trace_is_not_read_again_after_the_report_on_its_file(tmp_path: Path) -> None:
    analysis = TraceAnalysis(two_ranks(tmp_path))
    trace = analysis.traces[1]
    assert isinstance(analysis._pool, Serial)
    assert analysis._pool.trace(analysis.files[1].path) is trace


def test_a_merged_trace_beside_its_ranks_is_left_out_under_any_name(
    tmp_path: Path, run: Run
) -> None:
    folder = two_ranks(tmp_path)
    run("merge", folder, "-o", folder / "all_of_it.json.gz")
    assert list(TraceAnalysis(folder).files) == [0, 1]
    (folder / "alone").mkdir()
    (folder / "all_of_it.json.gz").rename(folder / "alone" / "all_of_it.json.gz")
    assert "it holds several ranks" in run("trace-report", folder / "alone", status=4).err


PARTS = (*TABLES, "redundant", "not_used", "bad_time", "lost")


def test_load_report_counts_every_event(tmp_path: Path) -> None:
    events = [
        step(4, 0, 50), step(5, 50, 50), kernel("gemm", 1, 2), kernel("gemm", 3, -2),
        event("->", "ac2g", 1, 1), event("mark", "Trace", 1, 1),
    ]  # fmt: skip
    rank_file(tmp_path, 3, events, world_size=8)
    analysis = TraceAnalysis(tmp_path)
    row = analysis.load_report().row(0, named=True)
    assert (row["rank"], row["world_size"], row["file"]) == (3, 8, "rank3.json")
    assert (row["first_step"], row["last_step"]) == (4, 5)
    assert row["event_count"] == 6 == sum(row[f"{part}_count"] for part in PARTS)
    assert (row["gpu_count"], row["bad_time_count"], row["redundant_count"]) == (1, 1, 1)
    assert row["truncated_bytes"] is None
    assert "1 events without a usable time" in load_notes(analysis.files)[0]


def test_load_report_of_a_trace_without_steps_or_job(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    row = TraceAnalysis(tmp_path).load_report().row(0, named=True)
    assert row["rank"] == 0
    assert [row[name] for name in ("world_size", "first_step", "last_step")] == [None] * 3
