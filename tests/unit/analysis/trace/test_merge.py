"""The clocks of a merged trace, and what a run's records become in it."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.collectives import (
    ASSUMED,
    CONFIRMED,
    MOVED,
    UNCHECKED,
    UNKNOWN,
    RankClock,
    rank_clocks,
)
from haiprof.trace_analysis.merge import MergeOptions, default_output, merge_traces
from haiprof.trace_format.kineto.events import LANE
from haiprof.trace_format.merge_inputs import merge_files, merge_inputs
from tests.unit.analysis.trace.shared import Event, kernel, launch, step, traces, write_trace

BASE_NS = 1_790_857_026_000_000_000
COLLECTIVES = 9


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def clocks_of(*sources: Path) -> dict[int, RankClock]:
    inputs = merge_inputs(merge_files(sources, None)[0])
    return {each.rank: each for each in rank_clocks(inputs)}


def rank_trace(
    folder: Path,
    rank: int,
    *,
    ahead_us: float = 0,
    host: str | None = None,
    jitter_us: Sequence[float] = (0,),
    base_ns: int | None = BASE_NS,
    world_size: int = 4,
) -> Path:
    """A rank that ends all-reduces together with the others, as its own clock tells."""
    events: list[Event] = []
    for number in range(COLLECTIVES):
        late = ahead_us + jitter_us[number % len(jitter_us)]
        end = 1_000_000.0 + 10_000 * number + late
        events.append(launch(number + 1, end - 900))
        events.append(
            kernel(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL", end - 500, 500, correlation=number + 1
            )
        )
    metadata: dict[str, Any] = {"distributedInfo": {"rank": rank, "world_size": world_size}}
    metadata |= {} if base_ns is None else {"baseTimeNanoseconds": base_ns}
    metadata |= {} if host is None else {"host_name": host}
    return write_trace(folder / f"rank{rank}.json", events, metadata)


def test_a_host_that_is_ahead_is_moved_and_its_ranks_together(tmp_path: Path) -> None:
    for rank, (host, ahead) in enumerate([("a", 0), ("a", 12), ("b", 3000), ("b", 3020)]):
        rank_trace(tmp_path, rank, host=host, ahead_us=ahead, jitter_us=(0, 3, -3))
    clocks = clocks_of(tmp_path)
    assert {each.method for each in clocks.values()} == {MOVED}
    assert clocks[0].moved_ns == clocks[1].moved_ns
    assert clocks[2].moved_ns == clocks[3].moved_ns
    apart = clocks[2].moved_ns - clocks[0].moved_ns
    assert abs(apart - 3_004_000) < 20_000
    assert all((each.residual_ns or 0) < 10_000 for each in clocks.values())


def test_without_hosts_each_rank_is_moved_for_itself(tmp_path: Path) -> None:
    for rank, ahead in enumerate([0, 0, 0, 5000]):
        rank_trace(tmp_path, rank, ahead_us=ahead)
    clocks = clocks_of(tmp_path)
    assert [clocks[rank].method for rank in range(4)] == [*[CONFIRMED] * 3, MOVED]
    assert clocks[3].moved_ns == 5_000_000
    assert [clocks[rank].moved_ns for rank in range(3)] == [0, 0, 0]
    as_is = merge_traces([tmp_path], tmp_path / "out.json", MergeOptions(by_collectives=False))
    assert {each.moved_ns for each in as_is.clocks} == {0}


def test_a_rank_that_differs_from_its_host_is_moved_alone(tmp_path: Path) -> None:
    for rank, ahead in enumerate([0, 0, 0, 700]):
        rank_trace(tmp_path, rank, host="one", ahead_us=ahead)
    moved = {rank: each.moved_ns for rank, each in clocks_of(tmp_path).items()}
    assert moved == {0: 0, 1: 0, 2: 0, 3: 700_000}


@pytest.mark.parametrize(
    ("ahead_us", "jitter_us"),
    [(90, (0,)), (400, (0, 300, -300)), (0, (0, 50_000, -50_000))],
    ids=["below 100 us", "below five times its spread", "all noise"],
)
def test_no_shift_is_invented(tmp_path: Path, ahead_us: float, jitter_us: Sequence[float]) -> None:
    for rank in range(3):
        rank_trace(tmp_path, rank, host="one")
    rank_trace(tmp_path, 3, host="one", ahead_us=ahead_us, jitter_us=jitter_us)
    clocks = clocks_of(tmp_path)
    assert [each.moved_ns for each in clocks.values()] == [0, 0, 0, 0]


def test_without_collectives_wall_clocks_are_taken_and_it_is_said(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_trace(
            tmp_path / f"rank{rank}.json",
            [step(1, 10 + rank, 5)],
            {"distributedInfo": {"rank": rank}, "baseTimeNanoseconds": BASE_NS + rank * 10**9},
        )
    report = merge_traces([tmp_path], tmp_path / "out.json.gz", MergeOptions())
    assert [each.method for each in report.clocks] == [UNCHECKED] * 2
    assert [each.residual_ns for each in report.clocks] == [None, None]
    assert any("not compared by collectives" in note for note in report.notes)
    content = load(report.path)
    times = [
        content["baseTimeNanoseconds"] + round(each["ts"] * 1000)
        for each in content["traceEvents"]
        if each["ph"] == "X"
    ]
    assert times == [BASE_NS + 10_000, BASE_NS + 10**9 + 11_000]  # each file's own base
    assert content["haiprof_ranks"][1]["clock"]["method"] == UNCHECKED


def test_a_trace_without_unix_time_is_placed_and_it_is_said(tmp_path: Path) -> None:
    rank_trace(tmp_path, 0)
    rank_trace(tmp_path, 1)
    write_trace(tmp_path / "rank2.json", [step(1, 3, 5)], {"distributedInfo": {"rank": 2}})
    report = merge_traces([tmp_path], tmp_path / "out.json.gz", MergeOptions())
    assert [each.method for each in report.clocks] == [CONFIRMED, CONFIRMED, UNKNOWN]
    assert any("rank 2: no wall clock" in note for note in report.notes)
    starts = [rank.range_ns[0] for rank in report.merged.ranks if rank.range_ns]
    assert starts[0] == starts[1] == starts[2]


def test_traces_of_no_clock_keep_their_times(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_trace(tmp_path / f"rank{rank}.json", [step(1, 3 + rank, 5)])
    report = merge_traces([tmp_path], tmp_path / "out.json.gz", MergeOptions())
    assert {each.method for each in report.clocks} == {ASSUMED}
    assert [e["ts"] for e in load(report.path)["traceEvents"] if e["ph"] == "X"] == [3, 4]


def test_steps_take_what_they_launched_and_nothing_else(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [event for at in range(4) for event in (
            step(at, 100 * at, 99), launch(at + 1, 100 * at + 5),
            kernel("gemm", 100 * at + 95, 20, correlation=at + 1))]  # fmt: skip
        write_trace(tmp_path / f"rank{rank}.json", events, {"distributedInfo": {"rank": rank}})
    report = merge_traces([tmp_path], tmp_path / "out.json.gz", MergeOptions(steps=(1, 3)))
    names = [e["name"] for e in load(report.path)["traceEvents"] if e["ph"] == "X"]
    assert names.count("ProfilerStep#1") == names.count("ProfilerStep#2") == 2
    assert "ProfilerStep#0" not in names
    # Step 0's kernel still runs when step 1 begins; step 2's runs into step 3.
    assert names.count("gemm") == 2 * 3
    assert [rank.event_count - rank.passed_count for rank in report.merged.ranks] == [3, 3]
    paths = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    with pytest.raises(MissingDataError, match="no step from 7"):
        merge_traces(paths, tmp_path / "b.json", MergeOptions(steps=(7, 8)))


def ends_by_rank(paths: Sequence[Path]) -> dict[int, list[int]]:
    """Ends of the collectives of each rank in us, by the standard library alone."""
    found = {}
    for content in map(load, paths):
        talking = [e for e in content["traceEvents"] if str(e.get("name")).startswith("ncclKernel")]
        talking = [e for e in talking if "Broadcast" not in e["name"]]
        ends = sorted(e["ts"] + e["dur"] for e in talking)
        found[content["distributedInfo"]["rank"]] = ends
    return found


def test_real_ranks_of_one_host_are_found_on_one_clock(tmp_path: Path) -> None:
    paths = sorted(traces("dlrm_v100_8ranks").glob("worker*.gz"))[:3]
    report = merge_traces(paths, tmp_path / "out.json.gz", MergeOptions())
    ends = ends_by_rank(paths)
    count = {len(each) for each in ends.values()}
    assert len(count) == 1
    middles = [statistics.median(each[n] for each in ends.values()) for n in range(count.pop())]
    for clock in report.clocks:
        by_hand = statistics.median(
            end - middle for end, middle in zip(ends[clock.rank], middles, strict=True)
        )
        assert clock.offset_ns is not None
        assert abs(clock.offset_ns - by_hand * 1000) < 1500
        assert (clock.method, clock.moved_ns) == (CONFIRMED, 0)
        assert clock.collective_count == len(middles)
    content = load(report.path)
    assert len(content["traceEvents"]) == report.merged.event_count
    passed = sum(len(load(path)["traceEvents"]) for path in paths)
    assert report.merged.event_count == passed + sum(r.added_count for r in report.merged.ranks)


def badly_nested(events: list[Event]) -> list[str]:
    """Slices that begin within another one of their lane and end after it: viewers drop them."""
    lanes: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}
    for each in events:
        if each["ph"] == "X":
            span = (each["ts"], -each["ts"] - each["dur"], each["cat"])
            lanes.setdefault((each["pid"], each["tid"]), []).append(span)
    found = []
    for spans in lanes.values():
        open_ends: list[float] = []
        for start, end, category in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if open_ends and open_ends[-1] < -end:
                found.append(category)
            else:
                open_ends.append(-end)
    return found


@pytest.mark.proof
def test_kernels_that_overlap_in_part_get_lanes_and_nothing_is_lost(tmp_path: Path) -> None:
    """They ran by programmatic dependent launch; 38 of them would not be shown."""
    report = merge_traces([traces("tl_b200_r0of8_nccl")], tmp_path / "m.json.gz", MergeOptions())
    (rank,) = report.merged.ranks
    assert rank.passed_count == rank.event_count == 24_656
    (source,) = traces("tl_b200_r0of8_nccl").iterdir()
    before, after = load(source)["traceEvents"], load(report.path)["traceEvents"]
    assert (badly_nested(before).count("kernel"), badly_nested(after).count("kernel")) == (38, 0)
    kept = [sorted((e["name"], e["dur"]) for e in events if e["ph"] == "X")
            for events in (before, after)]  # fmt: skip
    assert kept[0] == kept[1]


def test_an_arrow_follows_its_kernel_to_its_lane(tmp_path: Path) -> None:
    arrow = {"cat": "ac2g", "name": "ac2g", "bp": "e"}
    events = [
        launch(1, 0), launch(2, 5), kernel("a", 10, 10, correlation=1),
        kernel("b", 15, 10, correlation=2), kernel("inside", 16, 2, correlation=1),
        kernel("c", 18, 10),
        {**arrow, "ph": "s", "id": 2, "pid": 1, "tid": 1, "ts": 5},
        {**arrow, "ph": "f", "id": 2, "pid": 0, "tid": 7, "ts": 15},
        {**arrow, "ph": "f", "id": 1, "pid": 0, "tid": 7, "ts": 10},
    ]  # fmt: skip
    write_trace(tmp_path / "rank0.json", events)
    report = merge_traces([tmp_path], tmp_path / "merged.json.gz", MergeOptions())
    merged = load(report.path)["traceEvents"]
    lanes = {e["name"]: e["tid"] for e in merged if e["ph"] == "X" and e["cat"] == "kernel"}
    beside = LANE + 7
    assert lanes == {"a": 7, "b": beside, "inside": 7, "c": 2 * LANE + 7}
    assert [e["tid"] for e in merged if e["ph"] == "f"] == [beside, 7]
    names = {e["tid"]: e["args"]["name"] for e in merged if e["name"] == "thread_name"}
    assert names == {beside: "stream 7, overlapping", 2 * LANE + 7: "stream 7, overlapping 2"}
    assert report.merged.event_count == len(merged)


def test_the_output_stands_in_the_run_unless_another_place_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    target = run / "merged.json.gz"
    trace = run / "traces" / "rank0.json"
    for source in (run, run / "traces", trace):
        assert default_output([source]) == target
    assert default_output([tmp_path]) == Path("merged.json.gz")
