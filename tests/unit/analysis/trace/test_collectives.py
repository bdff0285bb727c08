"""Collectives across ranks: matching, waiting, bandwidth, clocks and stragglers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.diagnosis.function_reports import function_reports
from haiprof.show.views.causes import what_if_answers
from haiprof.show.views.trace_report import shown_tables
from haiprof.trace_analysis.collectives import collective_kernels, kind_of
from haiprof.trace_analysis.report import standard_report
from haiprof.trace_analysis.what_if.replay import rank_as_others
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import (
    ALL_REDUCE,
    Event,
    all_reduce,
    analysis_of,
    event,
    kernel,
    launch,
    rank_file,
    step,
    trace_of,
    traces,
    write_trace,
)


def test_wait_and_transfer_are_told_apart(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, [[all_reduce(100, 400, seq=1)], [all_reduce(300, 401, seq=1)]])
    waits = found.collective_waits()
    assert waits["wait_ns"].to_list() == [200_000, 0]
    assert waits["transfer_ns"].to_list() == [100_000, 101_000]
    assert waits["arrived_last"].to_list() == [False, True]
    (row,) = found.collectives().rows(named=True)
    assert row["matched_by"] == "sequence"
    assert row["confidence"] == 1.0
    assert (row["start_skew_ns"], row["transfer_ns"], row["last_rank"]) == (200_000, 101_000, 1)
    # nccl-tests: 4 MB in 101 us, and 2 (n - 1) / n = 1 for two ranks.
    assert row["bytes"] == 4_000_000
    assert row["algorithm_bandwidth_bytes_per_s"] == pytest.approx(4e6 / 101e-6)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(4e6 / 101e-6)


@pytest.mark.parametrize(("name", "counts", "total", "factor"), [
    ("allreduce", (1000, 1000), 4000, 1.5),
    ("_allgather_base", (1000, 4000), 16000, 0.75),
    ("_reduce_scatter_base", (4000, 1000), 16000, 0.75),
    ("all_to_all", (4000, 4000), 16000, 0.75),
])  # fmt: skip
def test_bus_bandwidth_is_that_of_nccl_tests(
    tmp_path: Path, name: str, counts: tuple[int, int], total: int, factor: float
) -> None:
    said = {"Collective name": name, "In msg nelems": counts[0], "Out msg nelems": counts[1],
            "Group size": 4}  # fmt: skip
    found = analysis_of(tmp_path, [[all_reduce(0, 10, seq=1, **said)]] * 4)
    (row,) = found.process_groups().rows(named=True)
    assert (row["bytes"], row["timed_count"]) == (total, 1)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(total / 10e-6 * factor)


@pytest.mark.parametrize(("gpu", "devices", "peak"), [
    ("NVIDIA H100 80GB HBM3", (0, 1), 450e9),
    ("Tesla V100-SXM2-32GB", (0, 1), 150e9),
    ("AMD Instinct MI300X", (0, 1), 448e9),
    ("NVIDIA H100 PCIe", (0, 1), None),
    ("NVIDIA A100-PG509-200", (0, 1), None),
    ("NVIDIA H100 80GB HBM3", (0, 0), None),  # a GPU each of two nodes, or one visible each
    (None, (0, 1), None),
])  # fmt: skip
def test_bus_bandwidth_is_held_against_the_link_where_that_is_known(
    tmp_path: Path, gpu: str | None, devices: tuple[int, int], peak: float | None
) -> None:
    for rank, device in enumerate(devices):
        said: dict[str, object] = {}
        if gpu:
            said["deviceProperties"] = [{"id": device, "name": gpu}]
        said["distributedInfo"] = {"rank": rank, "world_size": 2}
        write_trace(tmp_path / f"rank{rank}.json", [all_reduce(0, 100, seq=1, device=device)], said)
    (row,) = TraceAnalysis(tmp_path).process_groups().rows(named=True)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(40e9)
    assert row["link_bytes_per_s"] == peak
    assert row["link_ratio"] == (peak and pytest.approx(40e9 / peak))
    assert (row["link_source"] is None) == (peak is None)


def test_order_is_not_believed_where_times_contradict_it(tmp_path: Path) -> None:
    """Rank 1 lacks the first kernel and has one more at the end."""
    plain = dict.fromkeys(("Process Group Name", "Process Group Ranks", "Group size"))
    first = [all_reduce(at, at + 90, **plain) for at in (1000, 3000, 5000)]
    second = [all_reduce(at, at + 90, **plain) for at in (3000, 5000, 7000)]
    found = analysis_of(tmp_path, [first, second]).collectives()
    assert found["matched_by"].to_list() == ["end", "end"]
    assert found["start_ns"].to_list() == [3_000_000, 5_000_000]
    assert set(found["start_skew_ns"]) == {0}


def gloo(spans_us: Iterable[tuple[float, float]]) -> list[Event]:
    """All-reduces of gloo: who asked, and what its thread did from when until when."""
    events = []
    for start, end in spans_us:
        events.append(event("c10d::allreduce_", "cpu_op", start - 50, 20))
        events.append(event("gloo:all_reduce", "user_annotation", start, end - start, tid=2))
    return events


def test_ranks_of_gloo_match_in_order_though_their_ends_are_ms_apart(tmp_path: Path) -> None:
    """Two ranks of one host, as torch 2 recorded them: clocks moved by such ends are wrong."""
    first = [(100, 124_415), (130_736, 131_148), (132_693, 143_840), (145_412, 148_684),
             (150_092, 155_513)]  # fmt: skip
    second = [(123_806, 124_450), (128_522, 131_209), (135_037, 139_799), (143_755, 145_696),
              (149_443, 150_381)]  # fmt: skip
    waits = analysis_of(tmp_path, [gloo(first), gloo(second)]).collective_waits()
    assert waits["matched_by"].to_list() == ["order"] * 10
    assert waits.filter(pl.col("rank") == 0)["wait_ns"][0] == 123_706_000


def test_what_contradicts_is_told_and_a_lost_one_is_passed_over(tmp_path: Path) -> None:
    first = [all_reduce(at, at + 90, seq=at) for at in (1000, 3000, 5000)]
    found = analysis_of(tmp_path, [first, first[1:]]).collectives()
    assert found["sequence"].to_list() == [3000, 5000]
    other = all_reduce(0, 10, seq=1, **{"In msg nelems": 5})
    found = analysis_of(tmp_path, [[all_reduce(0, 10, seq=1)], [other]]).collectives()
    assert found["confidence"].to_list() == [0.5]
    ranks = [[all_reduce(0, 100, seq=1)], [all_reduce(9000, 9100, seq=1)]]
    (row,) = analysis_of(tmp_path, ranks).collectives().rows(named=True)
    assert row["transfer_ns"] is None
    assert "clocks differ" in row["missing"]


def test_missing_rank_makes_waiting_unknown(tmp_path: Path) -> None:
    """The rank without trace may be the one that all waited for."""
    said = {"Group size": 8}
    ranks = [[all_reduce(0, 10, seq=1, **said)], [all_reduce(5, 10, seq=1, **said)]]
    found = analysis_of(tmp_path, ranks)
    (row,) = found.collectives().rows(named=True)
    assert row["transfer_ns"] is None
    assert row["bus_bandwidth_bytes_per_s"] is None
    assert row["missing"] == "2 of 8 ranks traced"
    assert found.stragglers().is_empty()


def test_clocks_of_hosts_are_compared_by_ends(tmp_path: Path) -> None:
    """Rank 1's clock is 7 ms ahead; it arrives last, by 50 us, every time."""
    ahead = 7000
    first = [all_reduce(at, at + 100, seq=at) for at in range(0, 5000, 1000)]
    second = [all_reduce(at + 50 + ahead, at + 100 + ahead, seq=at) for at in range(0, 5000, 1000)]
    found = analysis_of(tmp_path, [first, second])
    offsets = found.clock_offsets()
    assert offsets["offset_ns"].to_list() == [-3_500_000, 3_500_000]
    assert offsets["residual_ns"].to_list() == [0, 0]
    assert offsets["corrected"].all()
    assert set(found.collectives()["start_skew_ns"]) == {50_000}
    assert found.stragglers()["rank"].to_list() == [1, 0]


def test_straggler_has_the_shortest_collectives(tmp_path: Path) -> None:
    ranks = []
    for late in (0, 300, 20):
        events: list[Event] = []
        for number in range(4):
            at = number * 1000
            events += [step(number, at, 1000), launch(number + 1, at + late, 5)]
            said = {"Group size": 3, "correlation": number + 1}
            events.append(all_reduce(at + late + 10, at + 500, seq=number, **said))
        ranks.append(events)
    found = analysis_of(tmp_path, ranks).stragglers()
    worst = found.row(0, named=True)
    assert (worst["rank"], worst["last_count"], worst["last_ratio"]) == (1, 4, 1.0)
    assert worst["held_up_ns_per_step"] == 280_000
    assert worst["collective_ns"] == found["collective_ns"].min()
    assert found.filter(pl.col("rank") == 0)["waited_ns_per_step"].item() == 300_000
    by_step = analysis_of(tmp_path, ranks).stragglers(by_step=True)
    assert by_step.height == 12


@pytest.mark.parametrize(("name", "kind"), [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
    ("ncclDevKernel_AllGather_RING_LL", "all_gather"),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send_receive"),
    ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
    ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "other"),
    ("nccl:all_to_all", "all_to_all"),
    ("nccl:send 0->1", "send"),
    ("allgather_into_tensor_coalesced", "all_gather"),
])  # fmt: skip
def test_kind_is_told_by_names_of_every_era(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_dlrm_stragglers_are_those_that_arrive_last() -> None:
    """HTA says 2 and 7: it drops kernels below 1 % of the step, those of who arrives last."""
    found = TraceAnalysis(traces("dlrm_v100_8ranks")).stragglers()
    assert found["rank"].head(3).to_list() == [7, 5, 4]
    assert found["last_count"].head(3).to_list() == [5, 2, 1]


def test_trace_without_collectives_has_no_rows() -> None:
    found = TraceAnalysis(traces("tb_resnet50_nw0_v100"))
    assert found.collectives().is_empty()
    assert found.stragglers().is_empty()
    assert found.process_groups().is_empty()
    two = TraceAnalysis(traces("hta_sampled_2ranks_ws128")).collectives()
    assert two.height == 5
    assert two["transfer_ns"].null_count() == 5  # 126 ranks have no trace


def test_collectives_of_one_rank_have_sizes_and_bandwidths_that_hold_the_waiting(
    tmp_path: Path,
) -> None:
    found = analysis_of(tmp_path, [[all_reduce(100, 300, seq=1), all_reduce(400, 600, seq=2)]])
    (row,) = found.rank_collectives().rows(named=True)
    assert (row["kind"], row["group_size"], row["collective_count"]) == ("all_reduce", 2, 2)
    assert (row["bytes"], row["sized_count"], row["time_ns"]) == (8_000_000, 2, 400_000)
    assert row["algorithm_bandwidth_bytes_per_s"] == pytest.approx(8e6 / 400e-6)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(8e6 / 400e-6)


@pytest.mark.parametrize(("said", "count", "dtype"), [
    ({"Input Dims": [[8, 4]], "Input type": ["float"]}, 32, "float"),
    ({"Input Dims": [[8], [4]], "Input type": ["c10::Half", "c10::Half"]}, 12, "c10::Half"),
    ({"Input Dims": [[8, 4]]}, 32, None),
    ({"Input Dims": [[]]}, None, None),
    ({"Input Dims": [["x"]], "Input type": []}, None, None),
    ({}, None, None),
])  # fmt: skip
@pytest.mark.parametrize("category", ["cpu_op", "user_annotation"])
def test_sizes_are_read_from_the_span_around_the_launch(
    category: str, said: dict[str, Any], count: int | None, dtype: str | None, tmp_path: Path
) -> None:
    trace = trace_of(tmp_path, [
        event("nccl:all_reduce", category, 5, 10, **said), launch(1, 8),
        kernel("ncclDevKernel", 20, 10, correlation=1),
    ])  # fmt: skip
    found = collective_kernels(trace).select("kind", "in_count", "dtype").row(0)
    assert found == ("all_reduce", count, dtype)


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "ncclx", "rccl", "xccl", "hccl", "mccl"])
def test_kinds_are_known_by_the_span_of_each_backend(backend: str, tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        event(f"{backend}:all_reduce", "user_annotation", 5, 10), launch(1, 8),
        kernel("ncclDevKernel_Generic_4", 20, 10, correlation=1),
    ])  # fmt: skip
    assert collective_kernels(trace)["kind"].to_list() == ["all_reduce"]


def test_collectives_of_one_rank_without_sizes_have_no_bandwidth(tmp_path: Path) -> None:
    unsized = kernel(ALL_REDUCE, 100, 50)
    (row,) = analysis_of(tmp_path, [[unsized]]).rank_collectives().rows(named=True)
    assert row["time_ns"] == 50_000
    assert row["bytes"] is None
    assert row["bus_bandwidth_bytes_per_s"] is None


STEPS, RANKS = 6, 4


def write_ranks(
    folder: Path, late_us: Callable[[int, int], float], begin_us: Callable[[int], float] = float
) -> TraceAnalysis:
    """A collective per step at 1000 us, `late_us(rank, step)` later, from which all leave."""
    folder.mkdir(exist_ok=True)
    for rank in range(RANKS):
        events: list[Event] = []
        for number in range(STEPS):
            at = 10_000.0 * number
            begin = at + (begin_us(rank) if number == 0 else 0)
            end = at + 1_000 + max(late_us(other, number) for other in range(RANKS)) + 50
            if number == 0:
                end = max(end, 10_050)
            events += [
                step(number, begin, at + 10_000 - begin),
                launch(number, begin + 1),
                all_reduce(
                    max(at + 1_000 + late_us(rank, number), begin), end, ranks=RANKS, seq=number
                ),
            ]
        rank_file(folder, rank, events, RANKS)
    return TraceAnalysis(folder)


def answers_of_all_commands(path: Path) -> set[str]:
    """What trace-report, functions and what-if say about who is late."""
    report = standard_report(path)
    tables = [view for view, _ in shown_tables(report) if view.title.startswith("Who is late")]
    said = tables[0].legend if tables else report.missing["lateness"]
    talk = function_reports(TraceAnalysis(path).patterns(), "communication").reports[0]
    lines = [line for line in talk.meaning if line.startswith(("who is", "rank", "no rank"))]
    what_if = what_if_answers(path, [rank_as_others(0)])
    assert what_if.late is not None
    return {said, lines[0], what_if.late}


@pytest.mark.parametrize(
    "name", first_of(["dlrm_v100_8ranks", "hta_sampled_2ranks_ws128"], "hta_sampled_2ranks_ws128")
)
def test_all_commands_answer_alike_on_real_ranks(name: str) -> None:
    assert len(answers_of_all_commands(traces(name))) == 1


def test_one_step_names_nobody_and_says_what_was_seen_in_it() -> None:
    found = TraceAnalysis(traces("dlrm_v100_8ranks")).arrival_lateness()
    assert not found["is_late"].any()
    assert found["low_ns"].null_count() == 8
    # 5, 4 and 7 are within 9 % of each other: three definitions named three of them.
    assert found["rank"].head(3).to_list() == [5, 4, 7]
    assert found["late_ns"].head(3).to_list() == [1_959_000, 1_835_000, 1_801_000]
    said = found["said"][0]
    assert "cannot be told from 1 step" in said
    assert "7.62 ms apart, rank 1 first and rank 7 last" in said  # unequal steps, and why


def test_a_late_rank_is_named_alike_everywhere_with_its_interval(tmp_path: Path) -> None:
    wobble = (0, 20, -20, 10, -10, 0)
    found = write_ranks(
        tmp_path / "t", lambda rank, number: 300 + wobble[number] if rank == 2 else 5 * rank
    )
    rows = found.arrival_lateness()
    first = rows.row(0, named=True)
    assert (first["rank"], first["is_late"], rows["is_late"].sum()) == (2, True, 1)
    assert first["late_ns"] == pytest.approx(295_000, abs=1_000)
    assert first["low_ns"] < first["late_ns"] < first["high_ns"] < 400_000
    (said,) = answers_of_all_commands(tmp_path / "t")
    assert said.startswith("rank 2 begins its collectives 295 µs per step later than the others")


def test_chance_names_nobody(tmp_path: Path) -> None:
    found = write_ranks(tmp_path, lambda rank, number: (rank * 7 + number * 5) % 11 * 30)
    rows = found.arrival_lateness()
    assert not rows["is_late"].any()
    assert rows["said"][0].startswith("no rank is late beyond chance")


def test_a_rank_whose_window_begins_later_is_not_called_late(tmp_path: Path) -> None:
    found = write_ranks(
        tmp_path, lambda rank, number: 5 * rank, lambda rank: 9_000 if rank == 3 else 0
    )
    rows = found.arrival_lateness()
    assert max(rows["late_ns"].to_list()) < 20_000
    assert "rank 3 last: that comes from before the traces" in rows["said"][0]


def test_ranks_of_which_others_lack_say_why_nobody_is_named() -> None:
    with pytest.raises(MissingDataError, match="size of the group not recorded"):
        TraceAnalysis(traces("hta_sampled_2ranks_ws128")).arrival_lateness()
