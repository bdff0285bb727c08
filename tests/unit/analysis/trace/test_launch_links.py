"""Kernels and launches of traces without correlations: by which number, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from benchmarks import treacherous as made
from haiprof.trace_analysis.attribution import kernel_operators
from haiprof.trace_analysis.operator_efficiency import operator_efficiency
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import Event, event, kernel, launch, trace_of

EXTERNAL = "External id"


@pytest.mark.parametrize("numbered", [made.external_ids, made.ids_of_calls, made.arrows])
def test_each_number_names_the_operator_that_the_correlation_names(
    numbered: Callable[[], list[Event]], tmp_path: Path
) -> None:
    right, found = (
        kernel_operators(trace_of(tmp_path, events())).select("ts_ns", "operator_event", "call")
        for events in (made.sound, numbered)
    )
    assert found.rows() == right.rows()
    assert found["operator_event"].null_count() == 0


def test_numbers_of_calls_name_no_operator_where_the_call_is_in_none(tmp_path: Path) -> None:
    """The call of the last kernel stands outside of operators; its number is that of another."""
    events: list[Event] = []
    for at in range(4):
        events += [
            event("aten::mm", "cpu_op", 20 * at, 10, **{EXTERNAL: at + 1}),
            event("cudaLaunchKernel", "cuda_runtime", 20 * at + (12 if at == 3 else 1), 2,
                  **{EXTERNAL: at + 101 if at < 3 else 2}),
            event("gemm", "kernel", 100 + 20 * at, 15, pid=0, tid=7,
                  **{EXTERNAL: at + 101 if at < 3 else 2}),
        ]  # fmt: skip
    found = kernel_operators(trace_of(tmp_path, events))
    assert found["operator"].to_list() == ["aten::mm"] * 3 + [None]


def test_numbers_that_contradict_time_join_nothing(tmp_path: Path) -> None:
    events = [
        event("cudaLaunchKernel", "cuda_runtime", 100 + at, 1, **{EXTERNAL: at}) for at in range(4)
    ] + [event("gemm", "kernel", 10 * at, 5, pid=0, tid=7, **{EXTERNAL: at}) for at in range(4)]
    trace = trace_of(tmp_path, events)
    (found,) = (each for each in trace.findings if each.check == "no_launch_known")
    assert found.is_fault
    assert trace.gpu["correlation"].null_count() == 4


def test_the_first_operator_is_in_the_window_of_a_trace_without_steps(tmp_path: Path) -> None:
    types = {"Input type": ["Float", "c10::BFloat16"], "Input Dims": [[64, 64], [64, 64]]}
    events = [
        event("aten::mm", "cpu_op", 0, 10, **types),
        launch(1, 2), kernel("gemm", 20, 10, correlation=1),
    ]  # fmt: skip
    found = operator_efficiency(trace_of(tmp_path, events))
    assert found.select("count", "flops", "time_ns", "precision").rows() == [
        (1, 2 * 64**3, 10_000, "fp32")
    ]


def test_a_call_without_a_kernel_has_no_time_and_no_rate(tmp_path: Path) -> None:
    types = {"Input type": ["float", "float"], "Input Dims": [[64, 64], [64, 64]]}
    events = [
        event("aten::mm", "cpu_op", 0, 10, **types),
        launch(1, 2), kernel("gemm", 20, 10, correlation=1),
        event("aten::mm", "cpu_op", 40, 10, **types),
        event("aten::addmm", "cpu_op", 60, 10, **{
            "Input type": ["float"] * 3, "Input Dims": [[64], [64, 64], [64, 64]],
        }),
    ]  # fmt: skip
    found = operator_efficiency(trace_of(tmp_path, events))
    assert found.select("operator", "count", "time_ns").rows() == [
        ("aten::mm", 1, 10_000), ("aten::addmm", 1, None), ("aten::mm", 1, None),
    ]  # fmt: skip
    assert found["flops_per_s"].to_list() == [pytest.approx(2 * 64**3 / 10e-6), None, None]


def test_a_stored_trace_is_linked_like_a_new_one(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, made.external_ids())
    first = kernel_operators(trace)
    assert kernel_operators(Trace(trace.path)).equals(first)
    assert Trace(trace.path).runtime["correlation"].null_count() == 1  # the wait launches nothing
    assert len(trace.gpu.filter(pl.col("correlation") > 0)) == made.COUNT


def test_a_few_correlations_that_meet_by_chance_do_not_count(tmp_path: Path) -> None:
    """One kernel of forty has a correlation that a call has, too; External ids join all."""
    events = made.external_ids()
    events[1]["args"]["correlation"] = 77
    events[5]["args"]["correlation"] = 77
    found = kernel_operators(trace_of(tmp_path, events))
    right = kernel_operators(trace_of(tmp_path, made.sound()))
    assert found["operator_event"].to_list() == right["operator_event"].to_list()
