from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.intervals import total
from haiprof.trace_analysis.device_time import (
    KINDS,
    _combinations,
    gpu_events,
    kernel_types,
    overlap,
    union_of,
)
from tests.unit.analysis.trace.shared import (
    REAL_TRACES,
    covered_by_hand,
    event,
    events_of,
    exact_intervals,
    kernel,
    ranks_of,
    trace_of,
)
from tests.unit.analysis.trace.test_intervals import PAIRS, cells
from tests.unit.analysis.trace.test_intervals import union_of as union_of_pairs

US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def test_overlap_is_the_hidden_share_of_communication(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        kernel(NCCL, 0, 10, stream=20), kernel("gemm", 4, 3), kernel("gemm", 8, 10),
        kernel("gemm", 5, 3, stream=9), kernel("alone", 0, 5, device=1),
    ])  # fmt: skip
    assert overlap(trace).rows() == [
        (0, 14 * US, 10 * US, 6 * US, 0.6),
        (1, 5 * US, 0, 0, None),
    ]


def test_overlap_of_a_cpu_trace_is_a_row_of_nulls(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event("aten::mm", "cpu_op", 0, 1)])
    assert overlap(trace).rows() == [(None,) * 5]
    assert kernel_types(trace).is_empty()


def talks(name: str) -> bool:
    """The reference knows NCCL's kernels alone (D25), and hides nothing of the others."""
    return name.startswith("nccl") or "multimem_all_reduce" in name


@pytest.mark.parametrize("name", REAL_TRACES)
def test_overlap_is_exact_on_real_traces(name: str) -> None:
    theirs = exact_intervals(name)
    for rank, trace in ranks_of(name).items():
        kernels = [each for each in events_of(trace.path) if "kernel" in each.category.lower()]
        talk = [each for each in kernels if talks(each.name)]
        compute = [each for each in kernels if not talks(each.name)]
        parts = covered_by_hand(compute), covered_by_hand(talk)
        both = sum(parts) - covered_by_hand(kernels)
        found = overlap(trace).row(0, named=True)
        assert (found["compute_ns"], found["communication_ns"], found["overlap_ns"]) == (
            *parts, both
        )  # fmt: skip
        if talk and any(not each.name.startswith("nccl") for each in talk):
            assert found["overlap_ratio"] == both / parts[1]
        elif talk:
            published = theirs[rank]["comm_comp_overlap_us"] / theirs[rank]["comm_us"]
            assert found["overlap_ratio"] == pytest.approx(published, abs=5e-6)
        else:
            assert found["overlap_ratio"] is None


@pytest.mark.parametrize("name", REAL_TRACES)
def test_kernel_types_add_up_to_the_busy_time(name: str) -> None:
    for trace in ranks_of(name).values():
        found = kernel_types(trace)
        assert found.height == 7
        assert found["time_ns"].sum() == total(union_of(gpu_events(trace, None)))
        assert found["time_ratio"].sum() == pytest.approx(1)


@given(st.tuples(PAIRS, PAIRS, PAIRS))
def test_combinations_are_those_of_sets(
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    found = dict(_combinations({
        kind: union_of_pairs(own) for kind, own in zip(KINDS, pairs, strict=True)
    }))  # fmt: skip
    inside = {kind: cells(own) for kind, own in zip(KINDS, pairs, strict=True)}
    expected = dict.fromkeys(found, 0)
    for cell in set.union(*inside.values()):
        expected[" overlapping ".join(kind for kind in KINDS if cell in inside[kind])] += 1
    assert found == expected
