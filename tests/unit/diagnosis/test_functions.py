"""The five reports: the abnormal rank is named and no other, and nothing on equal ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.base.errors import UsageError
from haiprof.cli.app import run_command
from haiprof.diagnosis.function_reports import function_reports
from haiprof.diagnosis.gpu_functions import FunctionReport, differs, with_distance
from haiprof.trace_analysis.function_patterns import Patterns
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, traces
from tests.unit.diagnosis.trace_stories import ALL_REDUCE, ALL_TO_ALL, GEMM, Story, write_ranks


def reports(patterns: Patterns) -> dict[str, FunctionReport]:
    return {report.kind: report for report in function_reports(patterns).reports}


def of(folder: Path) -> dict[str, FunctionReport]:
    return reports(TraceAnalysis(folder).patterns())


def named(found: dict[str, FunctionReport]) -> dict[str, list[int]]:
    """Ranks that each report calls abnormal by comparison."""
    talk = found["communication"].facts
    return {
        "slow": found["gpu-compute"].facts["slow"],
        "utilization": found["gpu-compute"].facts["abnormal_utilization"],
        "copies": found["memory"].facts["slow"],
        "links": talk["slow_links"],
        "late": talk["late"],
        "python": found["python"].facts["far"],
    }


NOBODY: dict[str, list[int]] = {
    key: [] for key in ("slow", "utilization", "copies", "links", "late", "python")
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(1, 6))]
)
@pytest.mark.parametrize("collective", first_of([ALL_REDUCE, ALL_TO_ALL], ALL_TO_ALL))
def test_equal_ranks_have_no_abnormal_one(tmp_path: Path, seed: int, collective: str) -> None:
    folder = write_ranks(
        tmp_path / "t", lambda rank: Story(), seed=seed, noise=0.03, collective=collective
    )
    found = of(folder)
    assert named(found) == NOBODY
    assert found["gpu-compute"].tables["abnormal"].is_empty()


def test_the_rank_with_slow_kernels_is_named_and_no_other(tmp_path: Path) -> None:
    slow = Story(gemm=560, relu=84)
    found = of(write_ranks(tmp_path / "t", lambda rank: slow if rank == 3 else Story()))
    assert named(found) == {**NOBODY, "slow": [3], "utilization": [3], "late": [3]}
    report = found["gpu-compute"]
    row = report.tables["abnormal"].row(0, named=True)
    assert (row["rank"], row["name"]) == (3, GEMM)
    assert row["slower_ratio"] == pytest.approx(0.4, abs=0.02)
    assert row["excess_ns"] == pytest.approx(24 * 160_000, rel=0.05)
    assert set(report.tables["abnormal"]["rank"]) == {3}
    assert report.meaning[0].startswith("rank 3 computes slowly: its kernels take 1.4")


def test_one_slow_kernel_does_not_make_a_slow_gpu(tmp_path: Path) -> None:
    found = of(write_ranks(tmp_path / "t", lambda rank: Story(relu=150 if rank == 6 else 60)))
    report = found["gpu-compute"]
    assert report.tables["abnormal"].select("rank", "name").rows() == [(6, "relu")]


@pytest.mark.parametrize(
    ("odd", "named_as", "kind", "row"),
    [
        (Story(copy=900), "copies", "memory",
         {"why": "slower than elsewhere",
          "bandwidth_bytes_per_s": pytest.approx(3_000_000 / 900e-6, rel=0.05),
          "others_bandwidth_bytes_per_s": pytest.approx(1e10, rel=0.05)}),
        (Story(transfer=1200), "links", "communication",
         {"why": "slow link", "type": "send/recv all_to_all",
          "bandwidth_bytes_per_s": pytest.approx(8e6 * 7 / 8 / 1.2e-3, rel=0.03)}),
        (Story(host=900), "python", "python", {"name": "train.py(10): step", "is_far": True}),
    ],
    ids=["copies", "link", "host"],
)  # fmt: skip
def test_the_rank_that_differs_is_named_and_no_other(
    tmp_path: Path, odd: Story, named_as: str, kind: str, row: dict[str, object]
) -> None:
    found = of(write_ranks(tmp_path / "t", lambda rank: odd if rank == 5 else Story()))
    told = named(found)
    assert told.pop(named_as) == [5]
    assert told["slow"] == told.get("copies", []) == told.get("links", []) == []
    first = found[kind].tables["abnormal"].row(0, named=True)
    assert {name: first[name] for name in ("rank", *row)} == {"rank": 5, **row}
    if kind == "communication":
        normal = found[kind].tables["functions"].row(0, named=True)
        assert (normal["normal_rank"] != 5, normal["different_count"]) == (True, 1)
        assert found[kind].facts["link"] == "within one host"


def test_a_link_that_is_always_slow_may_be_a_clock_where_hosts_are_not_known(
    tmp_path: Path,
) -> None:
    slow = Story(transfer=1200)
    found = of(write_ranks(tmp_path / "t", lambda r: slow if r == 5 else Story(), host=None))
    assert named(found)["links"] == []
    missing = " ".join(found["communication"].missing)
    assert "the clock of rank 5 was taken to be another host's" in missing


def test_of_two_ranks_none_is_called_abnormal_and_that_is_said(tmp_path: Path) -> None:
    slow = Story(gemm=800, copy=900)
    found = of(write_ranks(tmp_path / "t", lambda rank: slow if rank else Story(), ranks=2))
    assert named(found) == NOBODY
    for kind in ("gpu-compute", "memory", "communication", "runtime", "python"):
        assert any(why.startswith("2 ranks: ") for why in found[kind].missing), kind


@pytest.mark.parametrize("count", [64, 1000])
def test_noise_of_many_ranks_names_nobody(count: int) -> None:
    random = np.random.default_rng(count)
    rows = pl.DataFrame({
        "type": "", "rank": np.tile(np.arange(count), 40),
        "name": np.repeat(np.arange(40), count).astype(str),
        "median_ns": 100 * (1 + 0.05 * random.standard_normal(40 * count)),
    })  # fmt: skip
    found = with_distance(rows, "median_ns")
    assert found.filter(pl.col("is_far") & differs("median_ns", high=True)).is_empty()


def test_a_thousand_ranks_with_one_far() -> None:
    random = np.random.default_rng(3)
    cost = 100 * (1 + 0.02 * random.standard_normal(1000))
    cost[617] = 140
    rows = pl.DataFrame({"type": "", "name": "k", "rank": np.arange(1000), "median_ns": cost})
    found = with_distance(rows, "median_ns")
    off = pl.col("is_far") & differs("median_ns", high=True)
    assert found.filter(off)["rank"].to_list() == [617]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), min_size=1, max_size=12))
def test_distance_is_the_mean_manhattan_distance_to_all_others(
    values: list[tuple[float, float]],
) -> None:
    rows = pl.DataFrame(values, schema=["a", "b"], orient="row").with_columns(
        type=pl.lit(""), name=pl.lit("f"), rank=pl.int_range(pl.len())
    )
    found = with_distance(rows, "a", "b").sort("rank")
    table = np.array(values)
    top = table.max(axis=0)
    scaled = np.divide(table, top, out=np.zeros_like(table), where=top > 0)
    apart = np.abs(scaled[:, None] - scaled[None]).sum(axis=(1, 2)) / max(len(values) - 1, 1)
    assert found["distance"].to_list() == pytest.approx(apart.tolist(), abs=1e-9)
    assert found["is_far"].null_count() == (len(values) if len(values) < 4 else 0)


def test_equal_values_with_one_other_have_no_mad_and_still_one_far() -> None:
    rows = pl.DataFrame({"type": "", "name": "f", "rank": range(8), "a": [10.0] * 7 + [20.0]})
    found = with_distance(rows, "a")
    assert found.filter("is_far")["rank"].to_list() == [7]
    near = rows.with_columns(pl.Series("a", [10.0] * 7 + [10.5]))
    assert with_distance(near, "a")["is_far"].to_list() == [False] * 8


def test_what_is_not_in_a_trace_is_said_with_the_option_that_records_it(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [event("aten::mm", "cpu_op", 0, 10)], 1)
    found = of(tmp_path)
    assert "--trace" in found["gpu-compute"].missing[0]
    assert found["gpu-compute"].facts["utilization"] == {"min": None, "median": None, "max": None}
    assert "no copy or set" in found["memory"].missing[0]
    assert "no communication kernel" in found["communication"].missing[0]
    assert "no call of the CUDA runtime" in found["runtime"].missing[0]
    assert any("--trace-stacks" in why for why in found["python"].missing)


def test_runtime_calls_above_one_percent_are_listed_with_both_shares(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [launch(1, 0, 50), kernel("k", 40, 60, correlation=1)], 1)
    row = of(tmp_path)["runtime"].tables["abnormal"].row(0, named=True)
    assert (row["name"], row["bottleneck_ratio"], row["share_ratio"]) == (
        "cudaLaunchKernel", pytest.approx(0.4), pytest.approx(0.5)
    )  # fmt: skip


def test_what_few_ranks_run_counts_for_the_whole_job(tmp_path: Path) -> None:
    for rank in range(4):
        own = [kernel("everywhere", 0, 30), kernel("Memcpy HtoD (Pageable -> Device)", 40, 10,
                                                   category="gpu_memcpy", bytes=1000)]  # fmt: skip
        own += [kernel("rare", 60, 40)] if rank == 0 else [kernel("filler", 99, 1)]
        rank_file(tmp_path, rank, own if rank < 2 else [own[0], own[-1]], 4)
    found = of(tmp_path)
    kernels = found["gpu-compute"].tables["functions"]
    ratios = dict(kernels.select("name", "bottleneck_ratio").rows())
    assert ratios["everywhere"] == pytest.approx(0.3)
    assert ratios["rare"] == pytest.approx(0.4 / 4)
    assert kernels["name"][0] == "everywhere"
    copies = found["memory"].tables["functions"].row(0, named=True)
    assert copies["rank_count"] == 2
    assert copies["bottleneck_ratio"] == pytest.approx(0.1 * 2 / 4)


def test_json_has_every_function_of_one_rank_as_an_example(tmp_path: Path) -> None:
    rank_file(tmp_path, 3, [launch(1, 0, 50), kernel("k", 40, 60, correlation=1)], 8)
    data = function_reports(TraceAnalysis(tmp_path).patterns()).as_json()
    assert data["example"]["rank"] == 3
    by_kind = {row["kind"]: row for row in data["example"]["functions"]}
    assert set(by_kind) == {"gpu-compute", "runtime"}
    assert by_kind["gpu-compute"]["bottleneck_ratio"] == pytest.approx(0.6)
    assert by_kind["runtime"]["share_ratio"] == pytest.approx(0.5)


def test_real_ranks_have_the_five_reports() -> None:
    found = of(traces("dlrm_v100_8ranks"))
    assert found["gpu-compute"].facts["slow"] == []
    assert found["gpu-compute"].facts["utilization"]["median"] == pytest.approx(0.0677, abs=1e-3)
    # One step does not tell a late rank from chance.
    assert found["communication"].facts["late"] == []
    assert found["runtime"].tables["functions"]["name"][0] == "cudaLaunchKernel"


def test_command_shows_the_abnormal_first_and_writes_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Story(gemm=560, relu=84)
    folder = write_ranks(tmp_path / "t", lambda rank: slow if rank == 3 else Story())
    assert run_command(["functions", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.index("rank 3 computes slowly") < out.index("over all ranks")
    assert run_command(["functions", str(folder), "--only", "gpu-compute", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["reports"]["gpu-compute"]["slow"] == [3]
    assert list(data["reports"]) == ["gpu-compute"]
    assert run_command(["functions", str(folder), "--csv", str(tmp_path / "csv")]) == 0
    assert (tmp_path / "csv" / "communication_ranks.csv").read_text().startswith("rank,type")
    capsys.readouterr()
    assert run_command(["functions", str(folder), "--only", "nothing"]) == 2


def test_an_unknown_report_is_an_error_that_lists_them(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [kernel("k", 0, 1)], 1)
    with pytest.raises(UsageError, match="no report x"):
        function_reports(TraceAnalysis(tmp_path).patterns(), "x")


@pytest.mark.parametrize(("kernel_us", "is_short"), [(10, True), (400, False)])
def test_fewer_launches_are_advised_where_kernels_are_short(
    tmp_path: Path, kernel_us: int, is_short: bool
) -> None:
    events = []
    for number in range(10):
        at = number * (kernel_us + 20)
        events.append(launch(number + 1, at, 15))
        events.append(kernel("k", at + 20, kernel_us, correlation=number + 1))
    rank_file(tmp_path, 0, events, 1)
    (line,) = of(tmp_path)["runtime"].meaning
    assert "it waits for launches" in line
    assert ("CUDA graphs" in line) is is_short
