from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.trace_analysis.memory_timeline import (
    memory_allocations,
    memory_at_peak,
    memory_by_category,
    memory_by_operator,
    memory_timeline,
)
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.commands import Run
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    raw_events,
    step,
    trace_of,
    trace_path,
)


def memory(ts_us: float, size: int, address: int, total: int | None = None, **more: Any) -> Event:
    """A memory event of GPU 0 with the total after it; the old format without one."""
    args: dict[str, Any] = {"Device Type": 1, "Device Id": 0, "Bytes": size}
    if total is not None:
        args |= {"Addr": address, "Total Allocated": total, "Total Reserved": 4096}
    found = event("[memory]", "cpu_instant_event", ts_us, 0, **{"tid": 1, **more})
    return {**found, "ph": "i", "s": "t", "args": {**args, **found["args"]}}


def window() -> list[Event]:
    """100 bytes are there before; outer calls inner, and frees what another thread allocated."""
    return [
        step(1, 0, 100),
        event("outer", "cpu_op", 10, 40),
        event("inner", "cpu_op", 20, 10),
        event("inner", "cpu_op", 22, 4),
        memory(12, 30, 1, 130),
        memory(23, 50, 2, 180),
        memory(30, -50, 2, 130),  # inner has ended at 30: this is outer's
        memory(31, 8, 3, 138, tid=2),
        memory(60, 70, 2, 208),
        memory(61, -30, 1, 178),
        memory(62, -40, 9, 138),
    ]


def test_timeline_has_totals_and_changes(tmp_path: Path) -> None:
    found = memory_timeline(trace_of(tmp_path, window()))
    assert found["device_type"].unique().to_list() == ["cuda"]
    assert found["allocated_bytes"].to_list() == [130, 180, 130, 138, 208, 178, 138]
    assert found["since_start_bytes"].to_list() == [30, 80, 30, 38, 108, 78, 38]
    assert found["reserved_bytes"].unique().to_list() == [4096]


def test_blocks_have_lifetime_size_and_operators(tmp_path: Path) -> None:
    rows = memory_allocations(trace_of(tmp_path, window())).drop("device_type", "device").rows()
    assert rows == [
        (1, 30, 12_000, 61_000, 49_000, "outer", None),
        (2, 50, 23_000, 30_000, 7_000, "inner", "outer"),
        (3, 8, 31_000, None, None, None, None),
        (2, 70, 60_000, None, None, None, None),
        (9, 40, None, 62_000, None, None, None),
    ]


def test_increase_holds_inner_operators_and_counts_recursion_once(tmp_path: Path) -> None:
    found = memory_by_operator(trace_of(tmp_path, window()))
    rows = {row["operator"]: row for row in found.iter_rows(named=True)}
    assert rows["inner"]["self_increase_bytes"] == rows["inner"]["increase_bytes"] == 50
    assert rows["outer"]["allocated_bytes"] == 30
    assert rows["outer"]["freed_bytes"] == 50
    assert rows["outer"]["increase_bytes"] == 30
    nowhere = rows[None]
    assert (nowhere["allocation_count"], nowhere["free_count"]) == (2, 2)
    assert (nowhere["kept_count"], nowhere["kept_bytes"]) == (2, 78)
    assert found["self_increase_bytes"].sum() == 38


def test_peak_adds_up_with_what_was_there_before(tmp_path: Path) -> None:
    found = memory_at_peak(trace_of(tmp_path, window()))
    assert found["peak_bytes"].unique().to_list() == [208]
    rows = {(row["origin"], row["operator"]): row for row in found.iter_rows(named=True)}
    assert rows["before", None]["size_bytes"] == 100
    assert rows["before", None]["block_count"] is None
    assert rows["window", "outer"]["size_bytes"] == 30
    assert (rows["window", None]["block_count"], rows["window", None]["size_bytes"]) == (2, 78)
    assert found["ratio"].sum() == pytest.approx(1)


def test_lost_free_ends_a_block_when_its_address_is_used_again(tmp_path: Path) -> None:
    events = [memory(1, 10, 1, 10), memory(2, 20, 1, 20), memory(3, 5, 2, 25)]
    trace = trace_of(tmp_path, events)
    assert memory_allocations(trace)["freed_ns"].null_count() == 3
    assert memory_at_peak(trace)["size_bytes"].sum() == 25
    assert memory_by_operator(trace)["kept_bytes"].to_list() == [25]
    with pytest.raises(MissingDataError, match="no memory event") as error:
        memory_timeline(trace_of(tmp_path, [kernel("k", 0, 1)]))
    assert "profile_memory" in error.value.hint


def test_old_events_hold_changes_alone(tmp_path: Path) -> None:
    events = [event("op", "Operator", 0, 5), memory(1, 10, 0), memory(9, -10, 0)]
    for entry in events[1:]:
        del entry["cat"]
    trace = trace_of(tmp_path, events)
    found = memory_timeline(trace)
    assert found["since_start_bytes"].to_list() == [10, 0]
    assert found["allocated_bytes"].null_count() == 2
    by_operator = memory_by_operator(trace)
    assert by_operator.filter(operator="op")["increase_bytes"].to_list() == [10]
    assert by_operator["kept_bytes"].null_count() == 2
    for question in (memory_allocations, memory_at_peak):
        with pytest.raises(MissingDataError, match="no addresses"):
            question(trace)


def test_real_peak_agrees_with_a_walk_over_the_json() -> None:
    name = "tl_h100_qwen05_mem_stack"
    alive: dict[int, int] = {}
    best: tuple[int, dict[int, int]] = (0, {})
    changes = [e for e in raw_events(trace_path(name)) if e.get("name") == "[memory]"]
    for entry in sorted(changes, key=lambda entry: entry["ts"]):
        args = entry["args"]
        if args["Device Type"] != 1:
            continue
        if args["Bytes"] > 0:
            alive[args["Addr"]] = args["Bytes"]
        else:
            alive.pop(args["Addr"], None)
        if args["Total Allocated"] > best[0]:
            best = (args["Total Allocated"], dict(alive))
    found = memory_at_peak(Trace(trace_path(name))).filter(device_type="cuda")
    assert found["peak_bytes"][0] == best[0] == found["size_bytes"].sum()
    window = found.filter(origin="window")
    assert window["size_bytes"].sum() == sum(best[1].values())
    assert window["block_count"].sum() == len(best[1])


def test_real_totals_follow_from_the_changes() -> None:
    found = memory_timeline(Trace(trace_path("tl_h100_qwen05_mem_stack")))
    for _, device in found.group_by("device_type"):
        before = device["allocated_bytes"] - device["change_bytes"]
        assert (before[1:] == device["allocated_bytes"][:-1]).all()
    trace = Trace(trace_path("tb_resnet50_nw0_v100"))
    found = memory_timeline(trace)
    sums = found.group_by("device_type").agg(pl.col("change_bytes").sum())
    per_operator = memory_by_operator(trace).group_by("device_type")
    own = per_operator.agg(pl.col("self_increase_bytes").sum())
    assert sorted(sums.rows()) == sorted(own.rows()) == [("cpu", 19267840), ("cuda", 0)]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[[1,2,3,9]]", b"\x1f\x8bbroken", b"[[1],[[0,1]]]"]
)
def test_category_file_of_another_kind_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.raw.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError):
        memory_by_category(path)


def test_command_shows_categories_of_either_form(tmp_path: Path, run: Run) -> None:
    (tmp_path / "x.raw.json").write_text("[[-1,1,1048576,0],[9000,2,3145728,4],[10000,4,8,4]]")
    levels = [[0, 1 << 20, *[0] * 7], [0, 1 << 20, 0, 0, 0, 3 << 20, 0, 0, 0]]
    (tmp_path / "x.json").write_text(json.dumps([[8, 9], levels]))
    for name in ("x.raw.json", "x.json"):
        said = run("memory-timeline", tmp_path / name).out
        assert "4.00 MiB at the peak" in said
        assert "activation" in said
