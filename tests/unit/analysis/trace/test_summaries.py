"""Summaries and files of functions: each node reduces its own traces, the answer is the same."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import HaiprofError, MissingDataError, TraceFormatError
from haiprof.diagnosis.function_reports import function_reports
from haiprof.trace_analysis.function_patterns import SIZE_LIMIT_BYTES, reduce_patterns
from haiprof.trace_analysis.report import reduce_traces, standard_report
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
from tests.unit.diagnosis.trace_stories import Story, write_ranks


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (0, 1):
        events = [step(1, 0, 100), step(2, 100, 100), launch(5, 5), launch(6, 105)]
        events += [kernel("gemm", 10, 20 * (rank + 1), correlation=5)]
        rank_file(folder, rank, [*events, kernel("gemm", 110, 30, correlation=6)])
    return folder


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


def test_commands_reduce_and_report(ranks: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    said = run("trace-report", ranks, "--reduce", out)
    assert said.out == ""
    assert f"wrote 2 summaries to {out}" in said.err
    direct = run("trace-report", ranks).out.splitlines()
    assert run("trace-report", out).out.splitlines()[1:] == direct[1:]
    for words in (["critical-path"], ["query", "select 1 from gpu"], ["what-if"]):
        refused = run(words[0], out, *words[1:], status=None)
        assert refused.status in (3, 4)
        assert len(refused.err.splitlines()) <= 2
    run("trace-report", ranks, "--reduce", out, "--rank", "0", status=2)
    (tmp_path / "file").write_text("")
    assert "--reduce" in run("trace-report", ranks, "--reduce", tmp_path / "file", status=2).err


def answer(path: Path) -> dict[str, Any]:
    """All that `functions --json` prints."""
    return function_reports(TraceAnalysis(path).patterns()).as_json()


@pytest.mark.parametrize("name", ONE_TRACE)
def test_real_traces_may_be_discarded(tmp_path: Path, name: str) -> None:
    files = reduce_patterns(traces(name), tmp_path / "out")
    assert max(file.stat().st_size for file in files) <= SIZE_LIMIT_BYTES
    assert answer(tmp_path / "out") == answer(traces(name))
    found, direct = TraceAnalysis(tmp_path / "out"), TraceAnalysis(traces(name))
    assert found.trace_check().equals(direct.trace_check())


def test_nodes_reduce_their_own_ranks(tmp_path: Path) -> None:
    slow = Story(gemm=560, relu=84)
    folder = write_ranks(tmp_path / "t", lambda rank: slow if rank == 3 else Story())
    expected = answer(folder)
    for node in (range(4), range(4, 8)):
        here = tmp_path / f"node{node[0]}"
        here.mkdir()
        for rank in node:
            shutil.move(folder / f"rank{rank}.json", here)
        reduce_patterns(here, tmp_path / "all")
        shutil.rmtree(here)
    found = answer(tmp_path / "all")
    assert found == expected
    assert found["reports"]["gpu-compute"]["slow"] == [3]


def large_rank(folder: Path, rank: int) -> None:
    """4,000 kernels of different names and 6,000 collectives: more than 30 KB hold."""
    events = [step(1, 0, 950_000)]
    for number in range(4_000):
        length = 100 - number % 97 + number / 4_000
        events.append(kernel(f"kernel{number * 7919 % 10_007}", number * 200 + 1, length))
    said = {"Collective name": "allreduce", "Group size": 2, "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]"}  # fmt: skip
    for number in range(6_000):
        start = 150 * number + (number * number * 31 % 37 if rank else 0)
        events.append(kernel("ncclDevKernel_AllReduce", start, 100 + number * number % 13, stream=9,
                             Seq=number, **said))  # fmt: skip
    rank_file(folder, rank, events)


@pytest.mark.proof
def test_what_a_large_rank_leaves_out_is_said(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    for rank in (0, 1):
        large_rank(folder, rank)
    files = reduce_patterns(folder, tmp_path / "out")
    assert max(file.stat().st_size for file in files) <= SIZE_LIMIT_BYTES
    found, whole = answer(tmp_path / "out"), answer(folder)
    assert whole["notes"] == []
    assert [note[:7] for note in found["notes"]] == ["rank 0:", "rank 0:", "rank 1:", "rank 1:"]
    assert "functions that ran for at most 0." in found["notes"][0]
    assert "of 6000 collectives" in found["notes"][1]
    one, other = (each["reports"]["gpu-compute"] for each in (found, whole))
    assert one["utilization"] == other["utilization"]
    assert one["functions"][:50] == other["functions"][:50]
    assert "not in the reduced files" in run("functions", tmp_path / "out").out


def test_files_are_of_the_steps_that_they_were_made_of(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "t", lambda rank: Story(), ranks=2, steps=4)
    reduce_patterns(folder, tmp_path / "out", steps=(1, 3))
    found = TraceAnalysis(tmp_path / "out")
    expected = TraceAnalysis(folder).patterns((1, 3))
    assert found.patterns().functions.equals(expected.functions)
    assert found.patterns((1, 3)).functions.equals(expected.functions)
    with pytest.raises(MissingDataError, match="a summary of steps 1 to before 3"):
        found.patterns((0, 1))
    reduce_patterns(folder / "rank0.json", tmp_path / "out")
    with pytest.raises(HaiprofError, match=r"rank0.*all steps.*rank1.*steps 1 to before 3"):
        found.patterns()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "plain"])
def test_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    folder = write_ranks(tmp_path / "t", lambda rank: Story(), ranks=1)
    (path,) = reduce_patterns(folder, tmp_path / "out")
    text = gzip.decompress(path.read_bytes())
    flipped = text[:-20] + bytes([text[-20] ^ 1]) + text[-19:]
    path.write_bytes({
        "cut": path.read_bytes()[:-30],
        "flipped": gzip.compress(flipped),
        "empty": b"",
        "other": gzip.compress(text.replace(b'"haiprof_functions": 2', b'"haiprof_functions": 7')),
        "plain": b"{}\n",
    }[damage])  # fmt: skip
    with pytest.raises(TraceFormatError, match=path.name):
        TraceAnalysis(tmp_path / "out").patterns()


def test_commands_reduce_and_answer(tmp_path: Path, run: Run) -> None:
    folder = write_ranks(tmp_path / "t", lambda rank: Story(), ranks=2)
    out = tmp_path / "out"
    said = run("functions", folder, "--reduce", out)
    assert said.out == ""
    assert f"wrote 2 files to {out}" in said.err
    assert run("functions", folder).out == run("functions", out).out
    run("functions", folder, "--reduce", out, "--only", "python", status=2)
    for words in (["trace-report"], ["critical-path"], ["query", "select 1 from gpu"]):
        refused = run(words[0], out, *words[1:], status=None)
        assert refused.status in (2, 3, 4)
        assert len(refused.err.splitlines()) <= 4


@pytest.mark.parametrize("reduced", [False, True])
def test_functions_can_be_asked_in_sql(tmp_path: Path, run: Run, reduced: bool) -> None:
    folder = write_ranks(tmp_path / "t", lambda rank: Story(), ranks=2)
    if reduced:
        reduce_patterns(folder, tmp_path / "out")
        folder = tmp_path / "out"
    sql = "select rank, sum(bottleneck_ratio) as r from functions where kind = 'memory' group by 1"
    rows = run("query", folder, sql, "--json").data["rows"]
    expected = TraceAnalysis(folder).patterns().totals
    found = {row["rank"]: row["r"] for row in rows}
    assert found == pytest.approx(dict(expected.select("rank", "memory_ratio").iter_rows()))
    sql = "select l.rank, is_late, host from lateness l join rank_totals t on l.rank = t.rank"
    assert {row["host"] for row in run("query", folder, sql, "--json").data["rows"]} == {"node0"}


def test_trace_without_a_gpu_is_reduced(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    rank_file(folder, 0, [event("aten::mm", "cpu_op", 10, 50), event("aten::add", "cpu_op", 70, 9)])
    reduce_patterns(folder, tmp_path / "out")
    assert answer(tmp_path / "out") == answer(folder)
