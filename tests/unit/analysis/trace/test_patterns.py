"""Bottleneck ratios against a sweep that goes from event to event, and on traces known by hand."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.run_analysis.counters import COUNTER_SCHEMA
from haiprof.trace_analysis.function_patterns import (
    KEPT_RATIO,
    RankFunctions,
    function_counters,
    worker_pattern,
)
from haiprof.trace_analysis.kernel_names import (
    PRIORITY,
    PYTHON,
    is_matrix_work,
    transfer_type,
    uses_tensor_cores,
)
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import (
    event,
    kernel,
    launch,
    rank_file,
    raw_events,
    step,
    trace_of,
    traces,
)

US = 1000
Segment = tuple[int, int, str, str]
"""Start, end, kind, function."""

_GPU = {"kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset"}
_RUNTIME = {"cuda_runtime", "cuda_driver", "hip_runtime", "Runtime"}
_HOST = {"cpu_op", "Operator", "python_function"}


def read_by_hand(path: Path) -> list[dict[str, Any]]:
    """Complete events with exact ns, by the standard library alone."""
    found = [e for e in raw_events(path) if e.get("ph") == "X" and "dur" in e]
    for each in found:
        each["start"] = int(each["ts"] * 1000)
        each["end"] = int((each["ts"] + each["dur"]) * 1000)
    python = [e for e in found if e["cat"] == "python_function"]
    first = min((e["end"] for e in python), default=0)
    for each in python:  # it ran when the profiler began: where it went on is not known
        if each["start"] < first < each["end"]:
            each["name"] = re.sub(r"\(\d+\): ", "(?): ", each["name"])
    return found


def device_segments(events: list[dict[str, Any]]) -> list[Segment]:
    found = []
    for each in events:
        name, category = each["name"], each["cat"]
        if category in _GPU:
            copies = category.lower().endswith(("memcpy", "memset"))
            talks = name.startswith("nccl")
            kind = "memory" if copies else "communication" if talks else "gpu-compute"
        elif category in _RUNTIME:
            kind = "runtime"
        else:
            continue
        found.append((each["start"], each["end"], kind, name))
    return found


def host_segments(events: list[dict[str, Any]]) -> list[Segment]:
    """What is innermost on each thread, piece by piece, from a stack machine."""
    works = {(e["pid"], e["tid"]) for e in events
             if e["cat"] in _RUNTIME | {"cpu_op", "Operator"}}  # fmt: skip
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for each in events:
        if each["cat"] in _HOST and not each["name"].startswith("ProfilerStep#"):
            threads[each["pid"], each["tid"]].append(each)
    found: list[Segment] = []
    for thread, calls in threads.items():
        if thread not in works:
            continue
        order = sorted(calls, key=lambda e: (e["start"], -e["end"]))
        stack: list[tuple[int, str]] = []
        at = 0
        for each in order:
            while stack and stack[-1][0] <= each["start"]:
                found.append((at, stack[-1][0], PYTHON, stack[-1][1]))
                at = stack.pop()[0]
            if stack:
                found.append((at, each["start"], PYTHON, stack[-1][1]))
            path = f"{stack[-1][1]}|{plain(each['name'])}" if stack else plain(each["name"])
            stack.append((each["end"], path))
            at = each["start"]
        while stack:
            found.append((at, stack[-1][0], PYTHON, stack[-1][1]))
            at = stack.pop()[0]
    return found


def plain(name: str) -> str:
    head, mark, rest = name.partition(" at 0x")
    return head + rest.lstrip("0123456789abcdefABCDEF") if mark else name


def swept(segments: list[Segment]) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Time of each function and of each kind with nothing above it, boundary by boundary."""
    marks: dict[int, list[tuple[int, str, str]]] = defaultdict(list)
    for start, end, kind, name in segments:
        if end > start:
            marks[start].append((1, kind, name))
            marks[end].append((-1, kind, name))
    active: dict[str, dict[str, int]] = {kind: defaultdict(int) for kind in PRIORITY}
    functions: dict[tuple[str, str], int] = defaultdict(int)
    kinds: dict[str, int] = dict.fromkeys(PRIORITY, 0)
    before = 0
    for at in sorted(marks):
        top = next((kind for kind in PRIORITY if active[kind]), None)
        if top is not None:
            kinds[top] += at - before
            for name, count in active[top].items():
                functions[top, name] += (at - before) * (count if top == PYTHON else 1)
        for change, kind, name in marks[at]:
            active[kind][name] += change
            if not active[kind][name]:
                del active[kind][name]
        before = at
    return functions, kinds


@pytest.mark.parametrize(
    "name",
    first_of(
        ["dlrm_v100_8ranks", "tl_h100_qwen05_mem_stack", "tl_mi300_ddp_resnet18"],
        "tl_mi300_ddp_resnet18",
    ),
)
def test_real_traces_give_what_a_sweep_from_event_to_event_gives(name: str) -> None:
    for path in trace_files(traces(name)):
        found = worker_pattern(Trace(path))
        events = read_by_hand(path)
        functions, kinds = swept(device_segments(events) + host_segments(events))
        row = found.totals.row(0, named=True)
        for kind in PRIORITY:
            own = row[f"{kind.replace('-', '_')}_ratio"] * row["window_ns"]
            assert own == pytest.approx(kinds[kind], abs=1), (path.name, kind)
        ours: dict[tuple[str, str], int] = defaultdict(int)
        for kind, label, ns in found.functions.select("kind", "name", "bottleneck_ns").rows():
            ours[kind, label] += ns
        device = {key: ns for key, ns in ours.items() if key[0] != PYTHON}
        assert device == {key: functions[key] for key in device}
        # Calls that touch at a whole microsecond nest either way: sums agree, single stacks nearly.
        apart = sum(abs(ns - functions[key]) for key, ns in ours.items())
        assert apart <= 0.002 * row["window_ns"], path.name
        least = 2 * KEPT_RATIO * row["window_ns"]
        lost = [key for key, ns in functions.items() if ns > least and key not in ours]
        assert not lost, (path.name, lost[:3])


def pattern(folder: Path, events: list[Any], **metadata: Any) -> RankFunctions:
    return worker_pattern(trace_of(folder, events, **metadata))


def row_of(found: RankFunctions, kind: str) -> dict[str, Any]:
    return found.functions.filter(pl.col("kind") == kind).row(0, named=True)


def test_what_something_above_hides_costs_nothing(tmp_path: Path) -> None:
    found = pattern(tmp_path, [
        event("train.py(3): step", "python_function", 0, 100),
        launch(1, 10, 20),
        kernel("gemm", 15, 30, correlation=1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 20, stream=9),
        kernel("Memcpy HtoD (Pageable -> Device)", 50, 20, category="gpu_memcpy", stream=3,
               bytes=20_000),
    ])  # fmt: skip
    own = {kind: row_of(found, kind)["bottleneck_ns"] / US for kind in PRIORITY}
    assert own == {"gpu-compute": 30, "communication": 15, "memory": 10, "runtime": 5, "python": 40}
    assert sum(own.values()) * US == found.totals["window_ns"][0]
    shares = {kind: row_of(found, kind)["covered_ns"] / US for kind in PRIORITY}
    assert shares == {
        "gpu-compute": 30, "communication": 20, "memory": 20, "runtime": 20, "python": 100
    }  # fmt: skip
    assert row_of(found, "communication")["type"] == "ring all_reduce"
    assert row_of(found, "memory")["bandwidth_bytes_per_s"] == pytest.approx(1e9)
    assert found.totals["overlap_ratio"][0] == pytest.approx(5 / 20)


def test_time_outside_of_the_chosen_steps_does_not_count(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        step(1, 0, 100), step(2, 100, 100), kernel("a", 50, 100), kernel("b", 210, 5),
    ])  # fmt: skip
    found = worker_pattern(trace, steps=(2, 3))
    assert found.totals["window_ns"][0] == 100 * US
    assert found.functions.select("name", "bottleneck_ns", "total_ns").rows() == [
        ("a", 50 * US, 100 * US)
    ]
    with pytest.raises(MissingDataError, match="no step from 7"):
        worker_pattern(trace, steps=(7, 8))


def test_resources_are_means_over_time_with_their_deviation(tmp_path: Path) -> None:
    found = pattern(tmp_path, [
        kernel("a", 0, 30, **{"est. achieved occupancy %": 10, "blocks per SM": 0.5}),
        kernel("a", 50, 10, **{"est. achieved occupancy %": 50, "blocks per SM": 4}),
    ])  # fmt: skip
    row = row_of(found, "gpu-compute")
    assert row["occupancy_ratio"] == pytest.approx(0.2)
    assert row["occupancy_std"] == pytest.approx((0.75 * 0.1**2 + 0.25 * 0.3**2) ** 0.5)
    assert row["median_ns"] == 20 * US
    totals = found.totals.row(0, named=True)
    assert totals["sm_efficiency_ratio"] == pytest.approx((30 * 0.5 + 10) / 60)
    assert totals["utilization_ratio"] == pytest.approx(40 / 60)


def test_without_gpu_events_of_a_gpu_job_nobody_knows_what_ran_beside(tmp_path: Path) -> None:
    calls = [event("aten::mm", "cpu_op", 0, 10)]
    blind = pattern(tmp_path, calls, deviceProperties=[{"id": 0, "name": "H100"}])
    assert row_of(blind, PYTHON)["bottleneck_ratio"] is None
    assert row_of(blind, PYTHON)["share_ratio"] == 1.0
    assert blind.totals.row(0, named=True)["gpu_compute_ratio"] is None
    cpu = pattern(tmp_path, calls)
    assert row_of(cpu, PYTHON)["bottleneck_ratio"] == 1.0


def test_a_thread_that_only_waits_bounds_nothing(tmp_path: Path) -> None:
    found = pattern(tmp_path, [
        event("train.py(1): main", "python_function", 0, 10),
        event("aten::mm", "cpu_op", 2, 3),
        event("threading.py(5): wait", "python_function", 0, 100, tid=2),
    ])  # fmt: skip
    names = found.functions["name"].to_list()
    assert names == ["train.py(1): main", "train.py(1): main|aten::mm"]


def test_calls_shorter_than_the_traces_resolution_are_counted(tmp_path: Path) -> None:
    calls = [event("aten::lift_fresh", "cpu_op", at, at % 2) for at in range(1, 11)]
    rank_file(tmp_path, 0, [event("aten::mm", "cpu_op", 20, 80), *calls], 1)
    found = TraceAnalysis(tmp_path).patterns().functions
    row = found.filter(pl.col("name") == "aten::lift_fresh").row(0, named=True)
    assert row["count"] == 10
    assert row["total_ns"] == 5 * US
    assert row["median_ns"] == US / 2


@pytest.mark.parametrize(("name", "matrix", "tensor"), [
    ("volta_sgemm_128x32_nt", True, False),
    ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nt", True, True),
    ("sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize160x128x32_tensor16x8x16_kern", True, True),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_ffma_aligna4", True, False),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>", True, False),
    ("void gemmSN_TN_kernel<float, cublasGemmSmallNParams<float>>", True, None),
    ("nvjet_tst_192x8_64x8_4x1_v_bz_TNT", True, True),
    ("bmm_Bfloat16_MxE2m1Bfloat16_Fp32_t128x32x256u2_s4_et64x32_m64x32x16", True, None),
    ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", True, None),
    ("void at::native::vectorized_elementwise_kernel<4, sqrt>", False, None),
    ("void moe::topkGatingSoftmax<float, 8>", False, None),
])  # fmt: skip
def test_kernels_on_and_off_tensor_cores(name: str, *, matrix: bool, tensor: bool | None) -> None:
    assert is_matrix_work(name) is matrix
    assert uses_tensor_cores(name) is tensor


@pytest.mark.parametrize(("kind", "name", "expected"), [
    ("all_reduce", "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevComm*)", "ring all_reduce"),
    ("all_reduce", "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL128", "tree all_reduce"),
    ("all_gather", "ncclDevKernel_AllGather_NVLS", "NVLS all_gather"),
    ("send_receive", "ncclDevKernel_SendRecv(ncclDevComm*)", "send/recv"),
    ("all_to_all", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send/recv all_to_all"),
    ("all_reduce", "rcclGenericKernel", "all_reduce"),
])  # fmt: skip
def test_types_of_transfer(kind: str, name: str, expected: str) -> None:
    assert transfer_type(kind, name) == expected


def test_bus_bandwidth_counts_from_the_last_rank_on(tmp_path: Path) -> None:
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    more = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000,
            "Out msg nelems": 1000, "Group size": 2, "Process Group Name": "0", "Seq": 1,
            "Process Group Ranks": "[0, 1]"}  # fmt: skip
    rank_file(tmp_path, 0, [kernel("a", 0, 5), kernel(name, 10, 30, **more)])
    rank_file(tmp_path, 1, [kernel("a", 0, 5), kernel(name, 30, 10, **more)])
    found = TraceAnalysis(tmp_path).patterns().functions
    rows = found.filter(pl.col("kind") == "communication").to_dicts()
    assert [row["transfer_ns"] for row in rows] == [10 * US, 10 * US]
    assert [row["wait_ns"] for row in rows] == [20 * US, 0]
    assert rows[0]["bandwidth_bytes_per_s"] == pytest.approx(4000 / 10e-6)  # 2(n-1)/n is 1


BASE_NS = 1_700_000_000_000_000_000
GEMM, NCCL = "gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def samples(every_us: int, values: dict[str, list[tuple[int, int, float]]]) -> pl.DataFrame:
    """Each metric by (from, to, value) in us, sampled at the end of each interval."""
    rows = []
    for metric, parts in values.items():
        for at in range(0, 1001, every_us):
            value = next((v for first, last, v in parts if first < at <= last), 0.0)
            rows.append({"time_ns": BASE_NS + at * 1000, "host": "node0", "source": "burst",
                         "entity": "gpu 0", "rank": 0, "gpu": 0, "metric": metric,
                         "unit": "ratio", "value": value, "flag": None})  # fmt: skip
    return pl.DataFrame(rows, schema=COUNTER_SCHEMA)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """A product from 0 to 400 us, an all-reduce from 400 to 700, and a short kernel at 900."""
    events = [
        launch(1, 0), kernel(GEMM, 0, 400, correlation=1),
        kernel(NCCL, 400, 300, stream=9), kernel("relu", 910, 20), kernel("end", 995, 5),
    ]  # fmt: skip
    return trace_of(tmp_path, events, baseTimeNanoseconds=BASE_NS)


def test_samples_tell_what_the_hardware_did_while_a_function_ran(trace: Trace) -> None:
    found = function_counters(trace, samples(100, {
        "sm_active_ratio": [(0, 400, 0.9), (400, 700, 0.1), (700, 1000, 0.3)],
        "nvlink_transmit_ratio": [(400, 500, 0.2), (500, 700, 0.5)],
    }))  # fmt: skip
    by_name = found.rows_by_key(["name", "metric"], named=True, unique=True)
    assert by_name[GEMM, "sm_active_ratio"]["mean"] == pytest.approx(0.9)
    assert by_name[GEMM, "sm_active_ratio"]["sample_count"] == 4
    link = by_name[NCCL, "nvlink_transmit_ratio"]
    assert (link["kind"], link["type"]) == ("communication", "ring all_reduce")
    assert link["mean"] == pytest.approx(0.4)
    assert (link["min"], link["max"], link["interval_ns"]) == (0.2, 0.5, 100_000)
    assert link["std"] == pytest.approx(0.02**0.5)
    kinds = found.filter(pl.col("name").is_null())
    assert set(kinds["kind"]) == {"gpu-compute", "communication"}
    assert "relu" not in set(found["name"])  # 20 of 100 us: the sample is not its own


def test_samples_that_are_too_far_apart_say_nothing(trace: Trace) -> None:
    wide = samples(1000, {"sm_active_ratio": [(0, 1000, 0.5)]})
    assert function_counters(trace, wide).is_empty()
    assert function_counters(trace, wide.clear()).is_empty()


def test_samples_of_another_time_are_not_joined(trace: Trace) -> None:
    later = samples(100, {"sm_active_ratio": [(0, 1000, 0.5)]}).with_columns(
        pl.col("time_ns") + 10**9
    )
    assert function_counters(trace, later).is_empty()
