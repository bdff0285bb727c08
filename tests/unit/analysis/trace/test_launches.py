from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.launches import launch_statistics, launch_summary
from tests.unit.analysis.trace.shared import (
    event,
    kernel,
    launch,
    ranks_of,
    reference,
    step,
    trace_of,
)

# What HTA takes for a launch (D16); the Linux clock of some traces is beyond a float's ns.
HTA_CALLS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync")
TOLERANCE_US = {"hta_nsres_v100_r0of1": 0.51}


def test_amd_launches_are_counted_where_hta_finds_none() -> None:
    assert len(reference("tl_mi300_ddp_resnet18/get_cuda_kernel_launch_stats.rank0.csv")
               .read_text().splitlines()) == 1  # D16  # fmt: skip
    found = launch_summary(ranks_of("tl_mi300_ddp_resnet18")[0])
    assert dict(found.select("call", "launch_count").rows()) == {
        "hipExtModuleLaunchKernel": 1510,
        "hipLaunchKernel": 850,
        "hipMemsetAsync": 10,
        "hipMemcpyWithStream": 5,
    }


def test_a_graph_launch_is_one_launch_of_many_kernels() -> None:
    found = launch_summary(ranks_of("hta_diff_test_v100_r1of2")[1])
    graph = found.filter(pl.col("call") == "cudaGraphLaunch").row(0, named=True)
    assert (graph["launch_count"], graph["kernel_count"]) == (12, 5046)
    alone = found.filter(pl.col("call").is_null()).row(0, named=True)
    assert (alone["kernel_count"], alone["launch_count"]) == (614, None)
    assert found["kernel_count"].sum() == 15632


def test_one_launch_by_hand(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            launch(1, 0, 4),
            kernel("quick", 10.5, 2, correlation=1),
            launch(2, 20, 60.001, name="cuLaunchKernelEx"),
            kernel("early", 30, 100, correlation=2),
            launch(3, 100, 1, name="cudaGraphLaunch"),
            kernel("node", 300, 5, correlation=3),
            kernel("node", 310, 5, correlation=3, stream=9),
            launch(4, 400, 1, name="cudaMemcpyAsync"),
            kernel("Memcpy HtoD", 402, 5, correlation=4, category="gpu_memcpy"),
        ],
    )
    found = launch_statistics(trace)
    part = found.select(
        "correlation", "call", "kernel", "kernel_count", "cpu_duration_ns", "gpu_duration_ns",
        "launch_delay_ns", "is_short", "is_runtime_outlier", "is_launch_delay_outlier",
    )  # fmt: skip
    assert part.rows() == [
        (1, "cudaLaunchKernel", "quick", 1, 4000, 2000, 6500, True, False, False),
        (2, "cuLaunchKernelEx", "early", 1, 60001, 100_000, 0, False, True, False),
        (3, "cudaGraphLaunch", "node", 2, 1000, 10_000, 199_000, False, False, True),
        (4, "cudaMemcpyAsync", "Memcpy HtoD", 1, 1000, 5000, 1000, False, False, False),
    ]
    assert len(launch_statistics(trace, include_memory_events=False)) == 3
    late = launch_statistics(trace, runtime_cutoff_ns=60_001, launch_delay_cutoff_ns=199_000)
    assert not late["is_runtime_outlier"].any()
    assert not late["is_launch_delay_outlier"].any()


def test_of_two_calls_with_one_correlation_the_outermost_counts(tmp_path: Path) -> None:
    inner = event("cuLaunchKernel", "cuda_driver", 2, 3, correlation=1)
    trace = trace_of(tmp_path, [inner, launch(1, 1, 9), kernel("a", 20, 1, correlation=1)])
    assert launch_statistics(trace).select("call", "launch_delay_ns").rows() == [
        ("cudaLaunchKernel", 10_000)
    ]


def test_steps_and_correlations_of_zero(tmp_path: Path) -> None:
    events = [
        step(1, 0, 50),
        step(2, 50, 50),
        launch(1, 10),
        kernel("a", 60, 1, correlation=1),
        launch(2, 70),
        kernel("b", 80, 1, correlation=2),
        launch(0, 5, name="cudaEventQuery"),
        kernel("c", 90, 1, correlation=0),
    ]
    trace = trace_of(tmp_path, events)
    assert launch_statistics(trace)["correlation"].to_list() == [1, 2]
    assert launch_statistics(trace, steps=(1, 2))["correlation"].to_list() == [1]
    assert launch_summary(trace)["call"].to_list() == ["cudaLaunchKernel", None]


def test_gpu_events_without_any_launch_say_what_to_record(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [kernel("a", 0, 1, correlation=1)])
    with pytest.raises(MissingDataError, match="1 GPU events and no call"):
        launch_statistics(trace)


@pytest.mark.parametrize("category", ["xpu_runtime", "xpu_driver", "privateuse1_driver"])
def test_calls_of_other_devices_are_launches(category: str, tmp_path: Path) -> None:
    events = [
        event("urEnqueueKernelLaunch", category, 0, 5, correlation=1),
        kernel("gemm", 10, 5, correlation=1),
    ]
    (call,) = launch_statistics(trace_of(tmp_path, events))["call"]
    assert call == "urEnqueueKernelLaunch"


def test_a_trace_of_the_cpu_alone_has_no_launches(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event("aten::relu", "cpu_op", 0, 1)])
    assert launch_statistics(trace).is_empty()
    assert launch_summary(trace).is_empty()
