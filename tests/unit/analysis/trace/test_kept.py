"""Answers that are kept about a trace: a second report opens none, and none is ever stale."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

import haiprof
from haiprof.trace_analysis import report, report_cache
from haiprof.trace_analysis.report import TraceReport, standard_report
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import (
    ONE_TRACE,
    Counting,
    kernel,
    launch,
    rank_file,
    step,
    traces,
)


def asked(path: Path, **options: Any) -> tuple[TraceReport, int]:
    """A report, and how many files were opened for it."""
    pool = Counting()
    return standard_report(path, pool=pool, **options), len(pool.asked)


def assert_same(found: TraceReport, expected: TraceReport) -> None:
    assert list(found.tables) == list(expected.tables)
    for name, table in expected.tables.items():
        assert_frame_equal(found.tables[name], table, check_exact=True)
    assert (found.ranks, found.missing, found.notes) == (
        expected.ranks, expected.missing, expected.notes,
    )  # fmt: skip


def job(folder: Path, *, gemm_us: int = 20, ranks: int = 2) -> Path:
    """Two steps of two ranks; the second rank has no launches."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        calls = [] if rank else [launch(5, 1), launch(6, 101)]
        work = [kernel("gemm", 10, gemm_us, correlation=5), kernel("gemm", 110, 20, correlation=6)]
        rank_file(folder, rank, [step(1, 0, 100), step(2, 100, 100), *calls, *work])
    return folder


def answers(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.answers"))


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", ONE_TRACE)
def test_a_second_report_opens_no_trace_and_says_the_same(name: str) -> None:
    first, count = asked(traces(name))
    assert count == len(first.ranks)
    again, count = asked(traces(name))
    assert count == 0
    assert_same(again, first)


def test_what_one_rank_lacks_is_kept_as_well(tmp_path: Path) -> None:
    first, _ = asked(job(tmp_path))
    assert "no call that launched" in first.missing["queue, rank 1"]
    assert_same(asked(tmp_path)[0], first)


def test_a_changed_trace_is_opened_again_and_all_by_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(job(tmp_path))
    job(tmp_path, gemm_us=70, ranks=1)
    found, count = asked(tmp_path)
    assert count == 1
    assert found.tables["temporal"]["compute_ns"].to_list() == [90_000, 40_000]
    monkeypatch.setattr(report_cache, "code_version", lambda: "another")
    assert asked(tmp_path)[1] == 2


def test_a_trace_that_changes_during_the_visit_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit: Callable[..., Any] = report._visit

    def changed(trace: Any, **options: Any) -> Any:
        found = visit(trace, **options)
        job(tmp_path, gemm_us=70, ranks=1)
        return found

    job(tmp_path, ranks=1)
    monkeypatch.setattr(report, "_visit", changed)
    asked(tmp_path)
    assert not answers(tmp_path)
    monkeypatch.setattr(report, "_visit", visit)
    assert asked(tmp_path)[0].tables["temporal"]["compute_ns"].to_list() == [90_000]


def test_other_steps_are_another_question(tmp_path: Path) -> None:
    whole, _ = asked(job(tmp_path))
    found, count = asked(tmp_path, steps=(2, 3))
    assert count == 2
    assert found.tables["temporal"]["compute_ns"].to_list() == [20_000] * 2
    assert asked(tmp_path, steps=(2, 3))[1] == 0
    assert_same(asked(tmp_path)[0], whole)


def test_every_source_of_the_questions_is_in_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(str(haiprof.__file__)).parent
    copy = tmp_path / "haiprof"
    for part in ("trace_analysis", "trace_format"):
        shutil.copytree(package / part, copy / part)
    monkeypatch.setattr(report_cache, "PACKAGE", copy)
    before = report_cache.code_version.__wrapped__()
    assert report_cache.code_version.__wrapped__() == before
    for question in (*report._OF_FILE, *report._OF_STEPS):
        source = copy / Path(sys.modules[question.__module__].__file__ or "").relative_to(package)
        text = source.read_text()
        source.write_text(text + "#")
        assert report_cache.code_version.__wrapped__() != before
        source.write_text(text)


@pytest.mark.parametrize("damage", first_of(["cut", "flipped", "empty", "other"], "flipped"))
def test_damaged_answers_are_worked_out_anew(tmp_path: Path, damage: str) -> None:
    first, _ = asked(job(tmp_path))
    for path in answers(tmp_path):
        data = path.read_bytes()
        path.write_bytes({
            "cut": data[:-20], "empty": b"", "other": b"no answers at all",
            "flipped": data[:300] + bytes([data[300] ^ 1]) + data[301:],
        }[damage])  # fmt: skip
    found, count = asked(tmp_path)
    assert count == 2
    assert_same(found, first)
    assert asked(tmp_path)[1] == 0


def test_large_answers_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_cache, "_SIZE_LIMIT_BYTES", 1000)
    asked(job(tmp_path))
    assert not answers(tmp_path)


def test_a_trace_under_two_names_is_of_the_rank_that_each_name_says(
    tmp_path: Path, empty_home: Path
) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "M"}]}')
    for rank in (1, 2):
        folder = tmp_path / f"of {rank}"
        folder.mkdir()
        (folder / f"rank-{rank}.json").symlink_to(tmp_path / "trace.json")
    for rank in (1, 2, 1, 2):
        found = kept_files(tmp_path / f"of {rank}")
        assert found == [(rank, f"rank-{rank}.json")]
    assert len(answers(empty_home)) == 2


def kept_files(folder: Path) -> list[tuple[int, str]]:
    files = asked(folder)[0].tables["files"]
    return list(zip(files["rank"].to_list(), files["file"].to_list(), strict=True))


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "traces")
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    first, count = asked(tmp_path / "traces")
    assert count == 2
    found, count = asked(tmp_path / "traces")
    assert count == 2
    assert_same(found, first)
