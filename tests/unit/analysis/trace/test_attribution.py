from __future__ import annotations

from pathlib import Path

from haiprof.trace_analysis.attribution import kernel_operators, operator_kernels
from tests.unit.analysis.trace.shared import Event, event, kernel, launch, step, trace_of

EXTERNAL = "External id"


def model() -> list[Event]:
    """A linear layer in a module, a recursive operator, and a kernel of nobody."""
    return [
        step(1, 0, 1000),
        event("## forward ##", "user_annotation", 5, 80),
        event("nn.Module: Net_0", "python_function", 8, 60),
        event("nn.Module: Linear_0", "python_function", 9, 40),
        event("aten::linear", "cpu_op", 10, 30),
        event("aten::addmm", "cpu_op", 12, 20),
        launch(1, 14, 2),
        kernel("gemm", 20, 5, correlation=1),
        launch(2, 18, 2),
        kernel("bias", 25, 1, correlation=2),
        event("aten::to", "cpu_op", 50, 10),
        event("aten::to", "cpu_op", 51, 8),
        launch(3, 52, 2, name="cudaMemcpyAsync"),
        kernel("Memcpy DtoH", 60, 7, correlation=3, category="gpu_memcpy"),
        launch(4, 200, 1),
        kernel("alone", 300, 3, correlation=4),
        launch(5, 15, 1, tid=2),
        kernel("other_thread", 310, 1, correlation=5),
        kernel("before_the_trace", 0, 2, correlation=99),
    ]


def test_each_kernel_names_what_launched_it(tmp_path: Path) -> None:
    found = kernel_operators(trace_of(tmp_path, model()))
    rows = found.select("name", "operator", "top_operator", "matched_by", "module", "annotation")
    linear = ("aten::linear", "nesting", "Linear_0", "## forward ##")
    assert rows.rows() == [
        ("before_the_trace", None, None, None, None, None),
        ("gemm", "aten::addmm", *linear),
        ("bias", "aten::addmm", *linear),
        ("Memcpy DtoH", "aten::to", "aten::to", "nesting", "Net_0", "## forward ##"),
        ("alone", None, None, None, None, None),
        ("other_thread", None, None, None, None, None),
    ]
    assert found["launch_delay_ns"].to_list() == [None, 4000, 5000, 6000, 99_000, 294_000]


def test_operators_sum_up_to_all_gpu_time(tmp_path: Path) -> None:
    found = operator_kernels(trace_of(tmp_path, model()))
    rows = {row["operator"]: row for row in found.rows(named=True)}
    linear, inner, copy, nobody = (
        rows[name] for name in ("aten::linear", "aten::addmm", "aten::to", None)
    )
    assert (linear["kernel_count"], linear["gpu_self_ns"], linear["gpu_total_ns"]) == (0, 0, 6000)
    assert (linear["cpu_self_ns"], linear["cpu_total_ns"]) == (10_000, 30_000)
    assert linear["launch_delay_mean_ns"] is None
    assert (inner["kernel_count"], inner["gpu_self_ns"], inner["gpu_total_ns"]) == (2, 6000, 6000)
    assert (inner["launch_delay_mean_ns"], inner["launch_delay_max_ns"]) == (4500.0, 5000)
    assert (copy["call_count"], copy["cpu_total_ns"], copy["kernel_total_count"]) == (2, 10_000, 1)
    assert (nobody["kernel_count"], nobody["gpu_self_ns"], nobody["call_count"]) == (3, 6000, None)
    assert found["gpu_self_ns"].sum() == 19_000


def test_steps_narrow_operators_and_kernels(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100), step(2, 100, 100), event("aten::relu", "cpu_op", 10, 5), launch(1, 11),
        kernel("a", 150, 1, correlation=1), event("aten::relu", "cpu_op", 110, 5), launch(2, 111),
        kernel("b", 160, 2, correlation=2),
    ]  # fmt: skip
    trace = trace_of(tmp_path, events)
    found = operator_kernels(trace, steps=(1, 2))
    assert found.select("operator", "call_count", "gpu_self_ns").rows() == [("aten::relu", 1, 1000)]


def test_external_ids_stand_in_where_nothing_is_around_the_call(tmp_path: Path) -> None:
    events = [
        event("aten::mm", "cpu_op", 0, 10, tid=5, **{EXTERNAL: 7}),
        launch(1, 2, tid=9, **{EXTERNAL: 7}),
        kernel("gemm", 20, 1, correlation=1, **{EXTERNAL: 7}),
        kernel("without_its_call", 30, 1, correlation=2, **{EXTERNAL: 7}),
    ]
    found = kernel_operators(trace_of(tmp_path, events))
    assert found.select("operator", "matched_by", "call").rows() == [
        ("aten::mm", "external_id", "cudaLaunchKernel"),
        ("aten::mm", "external_id", None),
    ]
    events = [
        event("aten::mm", "cpu_op", 0, 10, tid=5, **{EXTERNAL: 7}),
        launch(7, 2, tid=9, **{EXTERNAL: 7}),
        kernel("gemm", 20, 1, correlation=7, **{EXTERNAL: 7}),
    ]
    assert kernel_operators(trace_of(tmp_path, events))["operator"].to_list() == [None]


def test_marks_of_steps_are_no_operators_in_old_traces(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#3", "Operator", 0, 100),
        event("aten::mm", "Operator", 5, 10),
        event("cudaLaunchKernel", "Runtime", 6, 1, correlation=1),
        event("cudaLaunchKernel", "Runtime", 50, 1, correlation=2),
        kernel("gemm", 20, 1, correlation=1, category="Kernel"),
        kernel("alone", 70, 1, correlation=2, category="Kernel"),
    ]
    found = kernel_operators(trace_of(tmp_path, events))
    assert found.select("operator", "top_operator").rows() == [
        ("aten::mm", "aten::mm"),
        (None, None),
    ]


def test_a_trace_of_the_cpu_alone_has_operators_without_kernels(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event("aten::relu", "cpu_op", 0, 1)])
    assert kernel_operators(trace).is_empty()
    assert operator_kernels(trace).select("operator", "kernel_count", "gpu_total_ns").rows() == [
        ("aten::relu", 0, 0)
    ]
    trace = trace_of(tmp_path, [kernel("a", 0, 1, correlation=1)])
    assert kernel_operators(trace)["operator"].to_list() == [None]
    assert operator_kernels(trace).select("operator", "gpu_self_ns").rows() == [(None, 1000)]
