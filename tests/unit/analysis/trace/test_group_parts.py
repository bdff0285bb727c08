"""Process groups by the part of the job that they serve, and communication by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.trace_analysis.collectives import part_of
from tests.unit.analysis.trace.shared import Event, kernel, step, traces

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECEIVE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(("description", "part"), [
    ("default_pg", "whole job"),
    ("mesh_dp_replicate", "data parallel"),
    ("mesh_dp_shard_mod_ep", "data parallel"),
    ("mesh_dp_shard_cp", "data and context parallel"),
    ("mesh_tp", "tensor parallel"),
    ("mesh_pp", "pipeline parallel"),
    ("mesh_ep", "expert parallel"),
    ("TENSOR_MODEL_PARALLEL_GROUP", "tensor parallel"),
    ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline parallel"),
    ("EXPERT_MODEL_PARALLEL_GROUP", "expert parallel"),
    ("EXPERT_DATA_PARALLEL_GROUP", "data parallel"),
    ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tensor and expert parallel"),
    ("DATA_PARALLEL_GROUP_WITH_CP", "data and context parallel"),
    ("undefined", None),
    ("mesh_default", None),
    ("metadata_store", None),
    ("", None),
    (None, None),
])  # fmt: skip
def test_part_of_a_group_is_what_its_description_says(
    description: str | None, part: str | None
) -> None:
    assert part_of(description) == part


def of_group(name: str, ts_us: float, dur_us: float, group: str, **more: Any) -> Event:
    kind = "send_recv" if name == SEND_RECEIVE else "allreduce"
    fields = {"Collective name": kind, "Process Group Name": group, **more}
    return kernel(name, ts_us, dur_us, **fields)


def rank_with_groups(folder: Path, rank: int, events: list[Event], groups: list[Any]) -> None:
    content = {
        "distributedInfo": {"rank": rank, "world_size": 4, "pg_config": groups},
        "traceEvents": events,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(content))


def group(name: str, description: str, ranks: list[int]) -> dict[str, Any]:
    return {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}


def test_exposed_time_is_told_by_part_of_the_job(tmp_path: Path) -> None:
    """A stage computes 0-100 and 300-400 us; it receives from 100 to 320 us: 200 us of bubble."""
    events = [
        kernel("gemm", 0, 100), of_group(SEND_RECEIVE, 100, 220, "3"), kernel("gemm", 300, 100),
        of_group(ALL_REDUCE, 350, 150, "1"),
    ]  # fmt: skip
    groups = [group("1", "mesh_dp", [0, 1]), group("3", "mesh_pp", [0, 2])]
    rank_with_groups(tmp_path, 0, events, groups)
    rows = TraceAnalysis(tmp_path).communication_parts().rows_by_key("part", named=True)
    (pipeline,), (data,) = rows["pipeline parallel"], rows["data parallel"]
    assert (pipeline["time_ns"], pipeline["exposed_ns"]) == (220_000, 200_000)
    assert pipeline["exposed_ratio"] == pytest.approx(0.4)
    assert (data["time_ns"], data["exposed_ns"]) == (150_000, 100_000)
    assert data["wait_ns"] is None


def test_late_rank_is_named_within_its_group(tmp_path: Path) -> None:
    """Rank 3 is late among the tensor-parallel ranks 2 and 3; ranks 0 and 1 are not touched."""
    for rank in range(4):
        mates = [0, 1] if rank < 2 else [2, 3]
        said = {"Process Group Ranks": json.dumps(mates), "Group size": 2}
        late = 40 if rank == 3 else 0
        events = [
            of_group(ALL_REDUCE, at + late, 90 - late, f"tp{mates[0]}", Seq=at, **said)
            for at in range(0, 1000, 100)
        ]
        rank_with_groups(tmp_path, rank, events, [group(f"tp{mates[0]}", "mesh_tp", mates)])
    analysis = TraceAnalysis(tmp_path)
    first = analysis.arrival_lateness().row(0, named=True)
    assert (first["rank"], first["part"]) == (3, "tensor parallel")
    assert "its tensor parallel collectives" in first["said"]
    parts = analysis.communication_parts().sort("rank")
    assert parts["wait_ns"].to_list() == [0, 0, 400_000, 0]


def gloo(name: str, ts_us: float, shapes: list[Any], kind: str) -> list[Event]:
    common = {"ph": "X", "pid": 1, "dur": 50}
    args = {"Input Dims": shapes, "Input type": [kind] * len(shapes)}
    return [
        {**common, "cat": "cpu_op", "name": "c10d::allreduce_", "tid": 1, "ts": ts_us, "args": {}},
        {**common, "cat": "user_annotation", "name": name, "tid": 9, "ts": ts_us + 1, "args": args},
    ]


def test_collectives_of_gloo_have_their_sizes_and_group(tmp_path: Path) -> None:
    for rank in range(4):
        rank_with_groups(
            tmp_path, rank, gloo("gloo:all_reduce", 100, [[10, 10], [5]], "double"),
            [group("0", "default_pg", [0, 1, 2, 3])],
        )  # fmt: skip
    (row,) = TraceAnalysis(tmp_path).collectives().rows(named=True)
    assert (row["bytes"], row["group_size"], row["part"]) == (840, 4, "whole job")
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(840 / 50e-6 * 1.5)


def test_gloo_collectives_of_one_among_several_groups_have_no_group(tmp_path: Path) -> None:
    """Threads of gloo do not say whom they work for; the world's size would be a guess."""
    groups = [group("0", "default_pg", [0, 1, 2, 3]), group("1", "mesh_tp", [0, 1])]
    for rank in range(4):
        rank_with_groups(tmp_path, rank, gloo("gloo:all_reduce", 100, [[10]], "float"), groups)
    found = TraceAnalysis(tmp_path).rank_collectives()
    assert found["group_size"].is_null().all()
    assert found["process_group"].is_null().all()
    assert found["bytes"].to_list() == [40] * 4


LAYERS, STEPS, COMPUTE_US, SLOW_US = 4, 6, 100, 50


def write_tensor_and_data_parallel(
    folder: Path, *, slow: int | None, with_ranks: bool = True
) -> Path:
    """8 ranks, TP2 x DP4: a TP all-reduce after each layer, a DP all-reduce after each step."""
    folder.mkdir()
    events: dict[int, list[Event]] = {rank: [] for rank in range(8)}
    now = dict.fromkeys(range(8), 0.0)
    sequences: dict[tuple[int, str], int] = {}

    def reduce_over(ranks: list[int], name: str, length: float) -> None:
        end = max(now[rank] for rank in ranks) + length
        for rank in ranks:
            at = sequences[rank, name] = sequences.get((rank, name), 0) + 1
            members = {"Process Group Ranks": json.dumps(ranks), "Group size": len(ranks)}
            said = {"Seq": at, **(members if with_ranks else {})}
            stream = 20 if name.startswith("tp") else 30
            events[rank].append(of_group(
                ALL_REDUCE, now[rank], end - now[rank], name, stream=stream, **said
            ))  # fmt: skip
            now[rank] = end

    for number in range(STEPS):
        begun = dict(now)
        for layer in range(LAYERS):
            for rank in range(8):
                length = COMPUTE_US + (SLOW_US if rank == slow else 0) + (number + layer) % 3
                events[rank].append(kernel("gemm", now[rank], length))
                now[rank] += length
            for tp in range(0, 8, 2):
                reduce_over([tp, tp + 1], "tp", 10)
        for first in (0, 1):
            reduce_over(list(range(first, 8, 2)), "dp", 40)
        for rank in range(8):
            events[rank].append(step(number, begun[rank], now[rank] - begun[rank]))
    for rank in range(8):
        mates = [rank - rank % 2, rank - rank % 2 + 1]
        groups = [
            group("tp", "mesh_tp", mates),
            group("dp", "mesh_dp", list(range(rank % 2, 8, 2))),
        ]
        rank_with_groups(folder, rank, events[rank], groups)
    return folder


@pytest.mark.parametrize("with_ranks", [True, False])
def test_slow_rank_is_late_and_its_group_only_passes_that_on(
    tmp_path: Path, *, with_ranks: bool
) -> None:
    """Rank 4 comes late to its data-parallel group, for it waited for rank 5 in every layer."""
    folder = write_tensor_and_data_parallel(tmp_path / "t", slow=5, with_ranks=with_ranks)
    analysis = TraceAnalysis(folder)
    late = analysis.arrival_lateness()
    assert late.filter("is_late")["rank"].to_list() == [5]
    first = late.row(0, named=True)
    assert first["part"] == "tensor parallel"
    # Of the first step's four collectives the first of the group does not count.
    assert first["late_ns"] == round((LAYERS * STEPS - 1) * SLOW_US * 1000 / STEPS)
    assert "more ranks are late" not in first["said"]
    stragglers = analysis.stragglers()
    assert stragglers["held_up_ns"].dtype == pl.Int64
    held = dict(stragglers.select("rank", "held_up_ns").iter_rows())
    assert held.pop(5) > 0
    assert set(held.values()) == {0}
    waits = analysis.communication_parts().filter(pl.col("wait_ns") > 0)
    by_part = {part: sorted(rows["rank"]) for (part,), rows in waits.group_by("part")}
    assert by_part == {"tensor parallel": [4], "data parallel": [0, 1, 2, 3, 6, 7]}


def test_equal_ranks_of_several_groups_have_nobody_late(tmp_path: Path) -> None:
    analysis = TraceAnalysis(write_tensor_and_data_parallel(tmp_path / "t", slow=None))
    assert not analysis.arrival_lateness()["is_late"].any()
    assert analysis.stragglers()["held_up_ns"].to_list() == [0] * 8
    found = TraceAnalysis(traces("tl_b200_r0of8_nccl")).communication_parts()
    assert found["part"].to_list() == [None]
