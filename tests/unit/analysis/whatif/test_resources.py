"""What-if where others set the pace: a loader's workers, collectives of the CPU, blocking calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from haiprof.trace_analysis.what_if.replay import (
    faster_collective,
    faster_kernel,
    faster_loader,
    faster_network,
    faster_operator,
    rank_as_others,
    together,
)
from haiprof.trace_format.launch_checks import BLOCKING
from tests.unit.analysis.trace.shared import Event, analysis_of, event, step
from tests.unit.analysis.whatif.test_predict import SYNC, gpu_bound, predicted, two_ranks

WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
STEPS, MS = 6, 1_000


def loads(wait_ms: int, work_ms: int) -> list[Event]:
    """Each step waits for a batch of workers, then computes."""
    found: list[Event] = []
    for number in range(STEPS):
        at = number * (wait_ms + work_ms) * MS
        found += [
            step(number, at, (wait_ms + work_ms) * MS),
            event(WORKERS, "user_annotation", at, wait_ms * MS),
            event("aten::mm", "cpu_op", at + wait_ms * MS, work_ms * MS),
        ]
    return found


def test_faster_workers_help_until_training_is_the_limit_and_operators_do_not(
    tmp_path: Path,
) -> None:
    found = analysis_of(tmp_path, [loads(60, 40)])
    # Batches come every 100 ms whatever training does; that the window's last step is over sooner
    # makes no step shorter.
    assert predicted(found, faster_operator("aten::mm", 2)) == [100 * MS]
    half, none = predicted(found, faster_loader(2), faster_loader())
    # A batch every 50 ms, or as fast as training is.
    assert half == 50 * MS
    assert none == 40 * MS


@pytest.mark.parametrize("count", [8, 7])
def test_batches_that_come_in_pairs_are_counted_in_pairs(tmp_path: Path, count: int) -> None:
    """Two workers hand over two batches at once; the window ends between two of them, or not."""
    found: list[Event] = []
    for number in range(count):
        at = (number // 2 * 200 + number % 2 * 160) * MS
        wait, whole = (120, 160) if number % 2 == 0 else (0.1, 40)
        found += [
            step(number, at, whole * MS),
            event(WORKERS, "user_annotation", at, wait * MS),
            event("aten::mm", "cpu_op", at + wait * MS, (whole - wait) * MS),
        ]
    changes = faster_operator("aten::mm", 2), faster_loader(2)
    rows = analysis_of(tmp_path, [found]).what_if(*changes)
    assert rows["saved_ratio"].to_list() == pytest.approx([0, 0.5], abs=0.001)


def varying(factor: float) -> list[Event]:
    """Steps of 100 ms, of which an operator takes now more and now less, another one the rest."""
    found: list[Event] = []
    for number in range(12):
        at, own = number * 100 * MS, (20 + 5 * (number * 7 % 11 % 4) * factor) * MS
        found += [
            step(number, at, 100 * MS),
            event("aten::mm", "cpu_op", at, own),
            event("aten::add", "cpu_op", at + own, 100 * MS - own),
        ]
    return found


def test_a_prediction_says_how_sure_it_is(tmp_path: Path) -> None:
    widths = []
    for number, factor in enumerate((0.0, 1.0, 2.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (row,) = analysis_of(folder, [varying(factor)]).what_if(faster_operator("mm", 2)).rows(
            named=True
        )  # fmt: skip
        own = 20 + 5 * factor * sum(number * 7 % 11 % 4 for number in range(12)) / 12
        assert row["predicted_step_ns"] == pytest.approx((100 - own / 2) * 1e6, rel=1e-3)
        assert row["low_step_ns"] < row["predicted_step_ns"] < row["high_step_ns"]
        widths.append((row["high_step_ns"] - row["low_step_ns"]) / own)
    assert widths[0] < widths[1] < widths[2]


def test_few_steps_say_nothing_of_how_sure(tmp_path: Path) -> None:
    (row,) = (
        analysis_of(tmp_path, [varying(1.0)[:9]]).what_if(faster_operator("mm", 2)).rows(named=True)
    )
    assert (row["low_step_ns"], row["high_step_ns"]) == (None, None)


@pytest.mark.parametrize("poll_ms", [0.1, 3, 8])
def test_workers_that_are_ahead_show_no_pace_and_that_is_said(
    tmp_path: Path, poll_ms: float
) -> None:
    ready = [one for one in loads(60, 40) if one["name"] != WORKERS]
    ready += [
        event(WORKERS, "user_annotation", number * 100 * MS, poll * MS)
        for number, poll in enumerate((poll_ms, poll_ms, 0.1, poll_ms, 0.1, 0.1))
    ]
    (row,) = analysis_of(tmp_path, [ready]).what_if(faster_operator("aten::mm", 2)).rows(named=True)
    assert row["ahead_count"] == 1
    assert row["predicted_step_ns"] == 80_000_000


def gloo(late_ms: int) -> list[Event]:
    """A rank that computes, asks gloo for an all-reduce, and waits for it until 50 ms."""
    found: list[Event] = []
    for number in range(STEPS):
        at = number * 100 * MS
        asked = at + (10 + late_ms) * MS
        end = at + 50 * MS
        found += [
            step(number, at, 100 * MS),
            event("aten::mm", "cpu_op", at, (10 + late_ms) * MS - 100),
            event("c10d::allreduce_", "cpu_op", asked, 50),
            event("gloo:all_reduce", "user_annotation", asked + 60, end - asked - 60, tid=9),
            event("aten::add", "cpu_op", end + 10, 40 * MS),
        ]
    return found


def test_ranks_wait_for_each_other_in_collectives_of_the_cpu(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, [gloo(0), gloo(30)])
    (row,) = found.what_if(rank_as_others(1)).rows(named=True)
    assert row["collective_count"] == STEPS
    assert row["error_ratio"] == 0.0
    # 30 ms of rank 1's operator less in each step; the transfer takes 10 ms from 40 ms on.
    assert row["predicted_step_ns"] == pytest.approx(70_000_000, rel=0.02)
    (row,) = found.what_if(faster_network(2)).rows(named=True)
    assert row["predicted_step_ns"] == pytest.approx(95_000_000, rel=0.01)


def test_the_late_rank_is_named_from_collectives_of_the_cpu(tmp_path: Path) -> None:
    rows = analysis_of(tmp_path, [gloo(0), gloo(30)]).arrival_lateness()
    assert (rows["rank"][0], rows["is_late"][0], rows["late_ns"][0]) == (1, True, 30_000_000)


def test_collectives_are_found_by_their_names(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, two_ranks())
    same = [faster_network(2), faster_kernel("nccl", 2), faster_collective("all_reduce", 2)]
    assert predicted(found, *same) == [475, 475, 475]
    rows = found.what_if(*same, faster_collective("all_gather"), rank_as_others())
    assert [count > 0 for count in rows["changed_count"]] == [True, True, True, False, True]


def test_changes_together_count_both(tmp_path: Path) -> None:
    both = together(faster_kernel("gemm", 2), faster_operator("aten::add"))
    assert predicted(analysis_of(tmp_path, [gpu_bound()]), both) == [240]


@pytest.mark.parametrize("name", ["cudaMemcpy2D", "hipMemcpyWithStream", "cuCtxSynchronize"])
def test_a_call_that_waits_is_the_same_call_everywhere(tmp_path: Path, name: str) -> None:
    events = [{**one, "name": name} if one["name"] == SYNC else one for one in gpu_bound()]
    found = analysis_of(tmp_path, [events])
    assert predicted(found, faster_kernel("gemm", 2), faster_kernel("relu", 4)) == [300, 325]


@pytest.mark.parametrize(("name", "waits"), [
    ("cudaMemcpy", True), ("cudaMemcpy2D", True), ("hipMemcpyWithStream", True),
    ("cudaStreamSynchronize_v3020", True), ("cuEventSynchronize", True),
    ("cuMemcpyDtoH_v2", True), ("hipDeviceSynchronize", True),
    ("cudaMemcpyAsync", False), ("cudaEventQuery", False), ("cudaLaunchKernel", False),
    ("cuMemcpyDtoHAsync_v2", False), ("cudaMemset", False), ("cudaFree", False),
])  # fmt: skip
def test_calls_that_always_wait(name: str, waits: bool) -> None:
    assert bool(re.search(BLOCKING, name)) is waits
