"""Kernels by name, grid and block: another launch geometry is another function, if asked."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.cli import main
from haiprof.diagnosis.function_reports import function_reports
from haiprof.trace_analysis.kernel_names import block_counts
from haiprof.trace_analysis.pattern_file import reduce_patterns
from tests.unit.analysis.trace.shared import Event, kernel, launch, rank_file, step, traces

RANKS = 4
GEMM = "void cutlass::gemm<float, 4>(int)"


def write_ranks(folder: Path, *, grid_of_last: int) -> Path:
    """Five steps of two products; on the last rank one of them has another grid and takes twice."""
    folder.mkdir()
    for rank in range(RANKS):
        other = rank == RANKS - 1 and grid_of_last != 8
        events: list[Event] = []
        for number in range(5):
            at = 1000 * number
            long = 200 if other else 100
            grid = grid_of_last if rank == RANKS - 1 else 8
            events += [
                step(number, at, 900), launch(2 * number, at + 1), launch(2 * number + 1, at + 3),
                kernel(GEMM, at + 10, long, correlation=2 * number, grid=[grid, 4, 1],
                       block=[256, 1, 1]),
                kernel(GEMM, at + 400, 300, correlation=2 * number + 1, grid=[64, 1, 1],
                       block=[256, 1, 1]),
                kernel("Memcpy HtoD", at + 800, 5, category="gpu_memcpy"),
            ]  # fmt: skip
        rank_file(folder, rank, events, RANKS)
    return folder


def kernels_of(folder: Path, *, geometry: bool) -> set[str]:
    found = TraceAnalysis(folder).patterns(geometry=geometry).functions
    return set(found.filter(found["kind"] == "gpu-compute")["name"])


def test_another_geometry_is_another_function(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "t", grid_of_last=16)
    assert kernels_of(folder, geometry=False) == {GEMM}
    expected = {f"{GEMM} <<<{grid}, 256>>>" for grid in ("8x4", "16x4", "64")}
    assert kernels_of(folder, geometry=True) == expected
    reduce_patterns(folder, tmp_path / "out", geometry=True)
    assert kernels_of(tmp_path / "out", geometry=True) == expected
    reduce_patterns(folder / "rank0.json", tmp_path / "out")
    with pytest.raises(MissingDataError, match=r"rank0.*kernels by name alone"):
        kernels_of(tmp_path / "out", geometry=False)


def test_rank_with_other_shapes_has_more_work_and_no_slow_gpu(tmp_path: Path) -> None:
    analysis = TraceAnalysis(write_ranks(tmp_path / "t", grid_of_last=16))
    reports = [
        function_reports(analysis.patterns(geometry=geometry), "gpu-compute").reports[0]
        for geometry in (False, True)
    ]
    assert [report.facts["slow"] for report in reports] == [[], []]
    assert [report.facts["more_work"] for report in reports] == [[3], []]
    assert "rank 3 has more work: its kernels have" in reports[0].meaning[0]
    assert all(report.tables["abnormal"].is_empty() for report in reports)


def test_rank_that_is_slower_than_its_work_explains_is_slow(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "t", grid_of_last=9)
    report = function_reports(TraceAnalysis(folder).patterns(), "gpu-compute").reports[0]
    assert (report.facts["slow"], report.facts["more_work"]) == ([3], [])


def test_commands_tell_geometries_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_ranks(tmp_path / "a", grid_of_last=8)
    after = write_ranks(tmp_path / "b", grid_of_last=16)
    assert main(["functions", str(before), "--geometry"]) == 0
    assert "cutlass::gemm <<<8x4, 256>>>" in capsys.readouterr().out
    words = ["trace-diff", str(before), str(after), "--json"]
    for more in ([], ["--short-names"]):
        assert main([*words, *more]) == 0
        assert "<<<" not in capsys.readouterr().out
        assert main([*words, *more, "--geometry"]) == 0
        assert "gemm" in (text := capsys.readouterr().out)
        assert "<<<16x4, 256>>>" in text


@pytest.mark.parametrize("name", ["hta_nsres_v100_r0of1", "tl_b200_r0of8_nccl"])
def test_geometries_of_real_kernels_add_up_to_them(name: str) -> None:
    analysis = TraceAnalysis(traces(name))
    plain, asked = (
        analysis.patterns(geometry=geometry).functions.with_columns(
            pl.col("name").str.split(" <<<").list.first()
        )
        for geometry in (False, True)
    )
    assert asked.height > plain.height
    sums = [
        frame.group_by("kind", "name").agg(pl.col("count", "total_ns").sum()).sort("kind", "name")
        for frame in (plain, asked)
    ]
    assert sums[0].equals(sums[1])


def test_blocks_of_a_damaged_grid_are_not_known() -> None:
    grids = ["[8, 4, 1]", "[2147483647, 2147483647, 2147483647]", "[0, 1]", "[[1]]", "x", None]
    found = block_counts(pl.DataFrame({"grid": grids}, schema={"grid": pl.String}))
    assert found.to_list() == [32, None, None, None, None, None]
