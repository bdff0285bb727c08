from __future__ import annotations

from pathlib import Path

import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import TraceFormatError
from haiprof.trace_analysis.files import load_notes
from haiprof.trace_format.kineto.events import TABLES
from tests.unit.analysis.trace.shared import event, kernel, rank_file, step, traces

PARTS = (*TABLES, "redundant", "not_used", "bad_time", "lost")


def test_load_report_counts_every_event(tmp_path: Path) -> None:
    events = [
        step(4, 0, 50),
        step(5, 50, 50),
        kernel("gemm", 1, 2),
        kernel("gemm", 3, -2),
        event("->", "ac2g", 1, 1),
        event("mark", "Trace", 1, 1),
    ]
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


def test_two_files_of_one_rank_are_both_named(tmp_path: Path) -> None:
    first = rank_file(tmp_path, 1, [kernel("gemm", 1, 2)])
    (tmp_path / "copy.json").write_text(first.read_text())
    with pytest.raises(TraceFormatError, match=r"rank 1: .*copy\.json and .*rank1\.json"):
        TraceAnalysis(tmp_path).load_report()


@pytest.mark.parametrize("name", ["dlrm_v100_8ranks", "tl_b200_r0of8_nccl", "tb_resnet50_nw0_v100"])
def test_load_report_adds_up_on_real_traces(name: str) -> None:
    for row in TraceAnalysis(traces(name)).load_report().iter_rows(named=True):
        assert row["event_count"] == sum(row[f"{part}_count"] for part in PARTS)
