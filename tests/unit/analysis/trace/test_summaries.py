"""Summaries: each node reduces its own traces, the report on them is the report on the traces."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal

from haiprof.base.errors import HaiprofError, MissingDataError, TraceFormatError
from haiprof.cli import main
from haiprof.trace_analysis.report import reduce_traces, standard_report
from tests.unit.analysis.trace.shared import kernel, launch, rank_file, step, traces


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (0, 1):
        events = [step(1, 0, 100), step(2, 100, 100), launch(5, 5), launch(6, 105)]
        events += [kernel("gemm", 10, 20 * (rank + 1), correlation=5)]
        rank_file(folder, rank, [*events, kernel("gemm", 110, 30, correlation=6)])
    return folder


def test_report_of_real_traces_needs_their_summaries_alone(tmp_path: Path) -> None:
    folder = traces("dlrm_v100_8ranks")
    here, there = tmp_path / "node", tmp_path / "all"
    here.mkdir()
    for half in (range(4), range(4, 8)):  # two nodes, each with its own ranks
        for rank in half:
            (trace,) = folder.glob(f"worker{rank}_*")
            shutil.copy(trace, here)
        reduce_traces(here, there)
        for trace in here.glob("worker*"):
            trace.unlink()
    direct, reduced = standard_report(folder), standard_report(there)
    assert (reduced.ranks, reduced.missing, reduced.notes) == (
        direct.ranks, direct.missing, direct.notes,
    )  # fmt: skip
    assert list(reduced.tables) == list(direct.tables)
    for name, table in direct.tables.items():
        assert_frame_equal(reduced.tables[name], table, check_exact=True)
    sizes = sum(path.stat().st_size for path in there.iterdir())
    assert sizes < sum(path.stat().st_size for path in folder.iterdir())
    (one,) = standard_report(there, rank=3).ranks
    assert one == 3


def test_summary_is_of_the_steps_that_it_was_made_of(ranks: Path, tmp_path: Path) -> None:
    reduce_traces(ranks, tmp_path / "out", steps=(2, 3))
    report = standard_report(tmp_path / "out")
    assert report.steps == (2, 3)
    assert report.tables["temporal"]["compute_ns"].to_list() == [30_000, 30_000]
    with pytest.raises(MissingDataError, match="a summary of steps 2 to before 3"):
        standard_report(tmp_path / "out", steps=(1, 2))


def test_summaries_of_different_steps_are_not_mixed(ranks: Path, tmp_path: Path) -> None:
    reduce_traces(ranks / "rank0.json", tmp_path / "out", steps=(2, 3))
    reduce_traces(ranks / "rank1.json", tmp_path / "out")
    with pytest.raises(HaiprofError, match=r"rank0.*steps 2 to before 3.*rank1.*all steps"):
        standard_report(tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_damaged_summary_is_named(ranks: Path, tmp_path: Path, damage: str) -> None:
    path = reduce_traces(ranks, tmp_path / "out")[0]
    data = path.read_bytes()
    path.write_bytes({
        "cut": data[: len(data) // 2],
        "flipped": data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
        "empty": b"",
        "other": data.replace(b'"haiprof_summary": 1', b'"haiprof_summary": 7'),
    }[damage])  # fmt: skip
    with pytest.raises(TraceFormatError, match=path.name):
        standard_report(tmp_path / "out")


def test_commands_reduce_and_report(
    ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["trace-report", str(ranks), "--reduce", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert f"wrote 2 summaries to {out}" in said.err
    assert main(["trace-report", str(ranks)]) == 0
    direct = capsys.readouterr().out.splitlines()
    assert main(["trace-report", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == direct[1:]
    for words in (["critical-path"], ["query", "select 1 from gpu"], ["what-if"]):
        assert main([words[0], str(out), *words[1:]]) in (3, 4)
        assert len(capsys.readouterr().err.splitlines()) <= 2
    assert main(["trace-report", str(ranks), "--reduce", str(out), "--rank", "0"]) == 2
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    assert main(["trace-report", str(ranks), "--reduce", str(tmp_path / "file")]) == 2
    assert "--reduce" in capsys.readouterr().err
