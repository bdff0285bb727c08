"""Kernels by name, kind and launch geometry."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.diagnosis.function_reports import function_reports
from haiprof.trace_analysis.device_time import (
    COMMUNICATION,
    COMPUTATION,
    GEOMETRY,
    LAUNCH,
    MEMORY,
    kernels,
    with_kind,
)
from haiprof.trace_analysis.function_patterns import reduce_patterns
from haiprof.trace_analysis.kernel_names import block_counts
from tests.commands import Run
from tests.unit.analysis.trace.shared import (
    Event,
    kernel,
    launch,
    rank_file,
    step,
    trace_of,
    write_trace,
)

US = 1000


def calls(**durations_us: list[int]) -> list[Event]:
    """Kernels one after the other."""
    found: list[Event] = []
    for name, each in durations_us.items():
        for duration in each:
            found.append(kernel(name, 1000 * len(found), duration))
    return found


def test_kernels_are_counted_and_timed_by_kind_and_name(tmp_path: Path) -> None:
    found = kernels(trace_of(tmp_path, [
        *calls(a=[10, 20, 30], b=[40]), kernel("copy", 9000, 5, category="gpu_memcpy"),
    ]))  # fmt: skip
    assert found.drop(*GEOMETRY, *LAUNCH).rows() == [
        (0, "computation", "a", 3, 60_000, 10_000, 30_000, 20_000, 10_000, 0.6, 1),
        (0, "computation", "b", 1, 40_000, 40_000, 40_000, 40_000, None, 0.4, 1),
        (0, "memory", "copy", 1, 5_000, 5_000, 5_000, 5_000, None, 1.0, 1),
    ]
    assert found.schema["name"] == pl.String


def test_a_limit_leaves_one_row_of_others_over_all_their_events(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, calls(a=[50, 50], b=[30, 10], c=[7], d=[3], others=[1]))
    found = kernels(trace, num_kernels=2)
    assert found["name"].to_list() == ["a", "b", "others"]
    rest = found.row(2, named=True)
    assert (rest["count"], rest["sum_ns"], rest["min_ns"], rest["max_ns"], rest["name_count"]) == (
        3, 11 * US, 1 * US, 7 * US, 3
    )  # fmt: skip
    assert rest["mean_ns"] == pytest.approx(mean([7, 3, 1]) * US)
    assert rest["std_ns"] == pytest.approx(stdev([7, 3, 1]) * US)
    trace = trace_of(tmp_path, calls(a=[60], b=[30]))
    assert kernels(trace, num_kernels=2, duration_ratio=1.0).equals(kernels(trace))


@pytest.mark.parametrize(
    ("ratio", "count"), [(0.0, 0), (0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.91, 3), (1.0, 3)]
)
def test_duration_ratio_keeps_the_fewest_kernels_that_make_the_share(
    tmp_path: Path, ratio: float, count: int
) -> None:
    trace = trace_of(tmp_path, calls(a=[60], b=[30], c=[10]))
    found = kernels(trace, duration_ratio=ratio)
    assert found.filter(pl.col("name") != "others").height == count


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(0, 50), min_size=1)),
       st.integers(0, 7), st.floats(0, 1))  # fmt: skip
def test_limits_never_lose_time(durations: dict[str, list[int]], many: int, share: float) -> None:
    work = [(name, length) for name, each in durations.items() for length in each]
    with TemporaryDirectory() as folder:
        trace = trace_of(Path(folder), [kernel(name, 0, length) for name, length in work])
        found = kernels(trace, num_kernels=many, duration_ratio=share)
    assert found["sum_ns"].sum() == sum(length for _, length in work) * US
    assert found["count"].sum() == len(work)
    assert found["name_count"].sum() == len(durations)
    assert found.height <= many + 1


def test_the_same_kernel_across_ranks_names_the_slowest(tmp_path: Path) -> None:
    for rank, pace in enumerate((10, 11, 30, 9)):
        rank_file(tmp_path, rank, [kernel("gemm", 100 * at, pace) for at in range(4)], 4)
    extra = kernel("once", 0, 5)
    rank_file(tmp_path, 4, [extra], 5)
    found = TraceAnalysis(tmp_path).kernels_across_ranks()
    gemm, once = found.row(0, named=True), found.row(1, named=True)
    assert (gemm["name"], gemm["rank_count"], gemm["count"]) == ("gemm", 4, 16)
    assert (gemm["slowest_rank"], gemm["fastest_rank"]) == (2, 3)
    assert (gemm["others_median_ns"], gemm["distance_ratio"]) == (10 * US, 2.0)
    assert gemm["excess_ns"] == 4 * 20 * US
    assert gemm["mean_ns"] == mean([10, 11, 30, 9]) * US
    assert gemm["std_ns"] == pytest.approx(stdev([10, 11, 30, 9]) * US)
    assert (once["rank_count"], once["slowest_rank"]) == (1, 4)
    assert [once[key] for key in ("std_ns", "others_median_ns", "distance_ratio", "excess_ns")] == [
        None
    ] * 4


@pytest.mark.parametrize(("name", "category", "kind"), [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "kernel", COMMUNICATION),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", "kernel", COMMUNICATION),
    ("ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16", "kernel", COMMUNICATION),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*"
     ", unsigned long, unsigned int**, unsigned long, unsigned long)", "kernel", COMMUNICATION),
    ("void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 4>", "kernel",
     COMMUNICATION),
    ("void c10d::symmetric_memory::two_shot_all_reduce_kernel_inplace<float, 8>", "kernel",
     COMMUNICATION),
    ("void c10d::intra_node_comm::oneShotAllReduceKernel<8u, true>(...)", "kernel",
     COMMUNICATION),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::"
     "RankSignals", "kernel", COMMUNICATION),
    ("void aiter::cross_device_reduce_2stage<__half, 4>", "kernel", COMMUNICATION),
    ("void quickreduce::allreduce_prototype_twoshot<...>", "kernel", COMMUNICATION),
    ("nvshmemi_transfer_rma_nbi", "kernel", COMMUNICATION),
    ("void deep_ep::intranode::dispatch<8, 768, 8192>", "kernel", COMMUNICATION),
    ("mscclpp::allreduce7<__half>", "kernel", COMMUNICATION),
    ("rcclGenericKernel", "kernel", COMMUNICATION),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "kernel",
     COMPUTATION),
    ("triton_red_fused_all_reduce_add_0", "kernel", COMPUTATION),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>",
     "kernel", COMPUTATION),
    ("hcom_allReduce_", "kernel", COMMUNICATION), ("mcclKernel", "kernel", COMMUNICATION),
    ("ncclSymkDevKernel_AllGather_LL", "kernel", COMMUNICATION),
    ("void cub::DeviceReduceSingleTileKernel", "kernel", COMPUTATION),
    ("void fused_dma_kernel<Sync>", "kernel", COMPUTATION),
    ("triton_poi_fused_Memset_0", "kernel", COMPUTATION),
    ("hipcub_scan", "kernel", COMPUTATION),
    ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", MEMORY),
    ("hipMemcpyDtoH", "gpu_memcpy", MEMORY),
    ("Memset (Device)", "Memset", MEMORY),
    ("DMA_H2D", "mtia_ccp_events", MEMORY),
    ("dma copy", "mtia_ccp_events", MEMORY),
    ("dmatmul", "mtia_ccp_events", COMPUTATION),
    ("fc_kernel", "mtia_ccp_events", COMPUTATION),
])  # fmt: skip
def test_kind_goes_by_category_first_and_by_name_second(
    tmp_path: Path, name: str, category: str, kind: str
) -> None:
    trace = trace_of(tmp_path, [kernel(name, 0, 1, category=category)])
    assert with_kind(trace.gpu)["kind"].to_list() == [kind]


def test_a_kernel_with_a_collectives_arguments_is_communication(tmp_path: Path) -> None:
    named = {"Collective name": "allreduce"}
    trace = trace_of(tmp_path, [kernel("own_kernel", 0, 1, **named), kernel("own_kernel", 2, 1)])
    assert with_kind(trace.gpu)["kind"].to_list() == [COMMUNICATION, COMPUTATION]


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


def test_commands_tell_geometries_apart(tmp_path: Path, run: Run) -> None:
    before = write_ranks(tmp_path / "a", grid_of_last=8)
    after = write_ranks(tmp_path / "b", grid_of_last=16)
    assert "cutlass::gemm <<<8x4, 256>>>" in run("functions", before, "--geometry").out
    words = ["trace-diff", str(before), str(after), "--json"]
    for more in ([], ["--short-names"]):
        assert "<<<" not in run(*words, *more).out
        assert "gemm" in (text := run(*words, *more, "--geometry").out)
        assert "<<<16x4, 256>>>" in text


def test_blocks_of_a_damaged_grid_are_not_known() -> None:
    grids = ["[8, 4, 1]", "[2147483647, 2147483647, 2147483647]", "[0, 1]", "[[1]]", "x", None]
    found = block_counts(pl.DataFrame({"grid": grids}, schema={"grid": pl.String}))
    assert found.to_list() == [32, None, None, None, None, None]


def test_kernels_say_how_their_longest_call_fills_the_gpu(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of eight warps on multiprocessors with room for 64; ROCm's profiler tells less."""
    short, long = kernel("a", 0, 10), kernel("a", 20, 30)
    long["args"] |= {"grid": [594, 1, 1], "block": [256, 1, 1], "blocks per SM": 4.5,
                     "warps per SM": 36, "est. achieved occupancy %": 50}  # fmt: skip
    gpu = {"id": 0, "name": "H100", "maxThreadsPerMultiprocessor": 2048, "warpSize": 32}
    told = write_trace(tmp_path / "told.json", [short, long], {"deviceProperties": [gpu]})
    monkeypatch.setenv("COLUMNS", "80")
    out = run("trace", "tables", "kernels", told).out
    assert "longest" in out, "no heading is cut"
    assert "no room for" in out
    assert "waves" in out.partition("no room for")[2]
    monkeypatch.setenv("COLUMNS", "140")
    row = TraceAnalysis(told).kernel_breakdown().row(0, named=True)
    assert (row["grid"], row["block"], row["waves"]) == ("[594, 1, 1]", "[256, 1, 1]", 1.125)
    assert (row["blocks_per_sm"], row["occupancy_ratio"]) == (4.5, 0.5)
    for command in (["trace", "tables", "kernels"], ["trace", "report"]):
        assert "blocks/SM" in run(*command, told).out
    bare = write_trace(tmp_path / "bare.json", [kernel("a", 0, 10)])
    for command in (["trace", "tables", "kernels"], ["trace", "report"]):
        out = run(*command, bare).said
        assert "blocks/SM" not in out
        assert "the profiler did not record blocks per SM" in out
