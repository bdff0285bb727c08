"""Links between execution traces and timelines, checked by names, nesting and times."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.cli.app import run_command
from haiprof.trace_analysis.execution_link import Linked, align_names, link, pairs
from haiprof.trace_format.execution import load_execution_trace
from haiprof.trace_format.find import trace_files
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import event, kernel, launch, step, traces, write_trace
from tests.unit.traces.execution import node, write_execution

DLRM, DLRM_ET = "dlrm_v100_8ranks", "dlrm_v100_8ranks_et"


def events_of(linked: Linked) -> list[dict[str, Any]]:
    """The timeline's events by the standard library alone."""
    data = linked.pair.trace.path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def hosts(linked: Linked) -> list[dict[str, Any]]:
    rows = linked.nodes.iter_rows(named=True)
    return [row for row in rows if row["category"] is None and row["ts_ns"] is not None]


def check_links(linked: Linked) -> None:
    """Each linked node has an event of its name, time and thread, and no two have the same."""
    left: dict[tuple[Any, ...], int] = {}
    for each in events_of(linked):
        if each.get("cat") in ("cpu_op", "user_annotation") and each.get("ph") == "X":
            key = (each["name"], round(each["ts"] * 1000), round(each["dur"] * 1000), each["tid"])
            left[key] = left.get(key, 0) + 1
    for row in hosts(linked):
        # A double of microseconds since the start of the clock holds some hundred ns.
        same = [key for key in left if (key[0], key[3]) == (row["name"], row["host_tid"])]
        told = (row["ts_ns"], row["dur_ns"])
        near = [
            key
            for key in same
            if all(abs(a - b) < 600 for a, b in zip(key[1:3], told, strict=True))
        ]
        assert near, row["name"]
        best = min(near, key=lambda key: abs(key[1] - row["ts_ns"]))
        left[best] -= 1
        if not left[best]:
            del left[best]


def check_nesting(linked: Linked, allowed: int = 0) -> None:
    """Nodes begin within their caller, where both are on one thread."""
    rows = {row["node"]: row for row in hosts(linked)}
    outside = [
        row["name"] for row in rows.values()
        if (above := rows.get(row["parent"])) and above["host_tid"] == row["host_tid"]
        and not above["ts_ns"] - 1000 <= row["ts_ns"] <= above["ts_ns"] + above["dur_ns"] + 1000
    ]  # fmt: skip
    assert len(outside) <= allowed, outside


@pytest.mark.parametrize("rank", first_of([0, 1, 6], 1))
def test_dlrm_is_linked_by_order_as_its_ids_count_something_else(rank: int) -> None:
    found, _ = pairs(traces(DLRM), traces(DLRM_ET), rank=rank)
    linked = link(found[0])
    share = linked.share
    assert (share.linked_by, share.linked_count, share.linkable_count) == ("order", 1672, 1672)
    assert share.operators_not_linked == {"ProfilerStep#10": 1}
    assert "79 of 1637" in " ".join(share.notes)  # equal ids of other operators
    assert linked.pair.execution.pid == linked.pair.trace.ops["pid"][0]
    check_links(linked)
    check_nesting(linked)


def timeline(ids: str, shift: int = 0) -> list[dict[str, Any]]:
    """forward { add, mul } sum, whose ids are what is asked for."""
    spans = (
        ("forward", 0, 100),
        ("aten::add", 10, 20),
        ("aten::mul", 40, 20),
        ("aten::sum", 200, 9),
    )
    return [event(name, "cpu_op", ts, dur, **{ids: number + shift})
            for number, (name, ts, dur) in enumerate(spans, start=3)]  # fmt: skip


NODES = [
    node(1, "[pytorch|profiler|execution_trace|process]", 1, rf_id=0, tid=0),
    node(2, "[pytorch|profiler|execution_trace|thread]", 1, rf_id=0), node(3, "forward", 2),
    node(4, "aten::add", 3), node(5, "aten::mul", 3), node(6, "aten::sum", 2),
]  # fmt: skip


def linked_by_hand(folder: Path, events: list[dict[str, Any]], nodes: list[Any]) -> Linked:
    write_trace(folder / "a.pt.trace.json", events)
    write_execution(folder / "a.et.json", nodes)
    return link(pairs(folder)[0][0])


@pytest.mark.parametrize(
    ("ids", "shift", "by"),
    [("Record function id", 0, "record_function_id"), ("External id", 0, "external_id"),
     ("External id", 1, "order"), ("Ev Idx", 0, "order")],
)  # fmt: skip
def test_how_a_link_was_made_is_said(tmp_path: Path, ids: str, shift: int, by: str) -> None:
    linked = linked_by_hand(tmp_path, timeline(ids, shift), NODES)
    assert linked.share.linked_by == by
    times = linked.nodes.select("node", "ts_ns", "self_ns").rows()
    assert times[2:] == [
        (3, 0, 60_000),
        (4, 10_000, 20_000),
        (5, 40_000, 20_000),
        (6, 200_000, 9000),
    ]
    assert linked.nodes["linked_by"].to_list()[2:] == [by] * 4


def test_one_id_with_another_name_is_no_link(tmp_path: Path) -> None:
    events = [
        event(f"op{n}", "cpu_op", n * 10, 5, **{"Record function id": n}) for n in range(3, 30)
    ]
    nodes = NODES[:2] + [node(n, f"op{n}" if n != 9 else "other", 2) for n in range(3, 30)]
    linked = linked_by_hand(tmp_path, events, nodes)
    share = linked.share
    assert (share.linked_count, share.linkable_count) == (26, 27)
    assert share.not_linked["nodes: other name with the same id"] == 1
    assert (share.nodes_not_linked, share.operators_not_linked) == ({"other": 1}, {"op9": 1})


def test_kernels_hang_on_their_launch_and_waits_on_the_kernel(tmp_path: Path) -> None:
    events = [
        *timeline("Record function id"), launch(1, 15), kernel("gemm", 30, 100, correlation=1),
        event("cudaDeviceSynchronize", "cuda_runtime", 110, 30),
        launch(2, 300), kernel("alone", 310, 5, correlation=2),
        kernel("lost", 400, 5, correlation=9),
    ]  # fmt: skip
    linked = linked_by_hand(tmp_path, [*events, step(1, 0, 1000)], NODES)
    gpu = linked.nodes.filter(linked.nodes["category"].is_not_null())
    assert gpu.select("node", "parent", "name", "stream").rows() == [(7, 4, "gemm", 7)]
    waits = dict(linked.nodes.select("node", "sync_dependencies").iter_rows())
    assert waits[6] == [7]  # aten::sum is the first after the call that waited for gemm
    assert sum(map(len, waits.values())) == 1
    assert linked.share.not_linked["GPU events launched outside of operators"] == 1
    assert linked.share.not_linked["GPU events whose launch is not in the trace"] == 1


def test_another_thread_is_waited_for_after_a_gap(tmp_path: Path) -> None:
    spans = (("a", 0, 10, 1), ("b", 20, 900, 2), ("c", 2000, 5, 1), ("d", 2010, 5, 1))
    events = [event(name, "cpu_op", ts, dur, tid=tid, **{"Record function id": number})
              for number, (name, ts, dur, tid) in enumerate(spans, start=3)]  # fmt: skip
    nodes = [*NODES[:2], node(3, "a", 2), node(4, "b", 2), node(5, "c", 2), node(6, "d", 2)]
    linked = linked_by_hand(tmp_path, events, nodes)
    waits = dict(linked.nodes.select("node", "thread_dependency").iter_rows())
    assert waits == {1: None, 2: None, 3: None, 4: 3, 5: 4, 6: None}


def test_a_run_without_execution_traces_says_how_to_record_them(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", timeline("External id"))
    with pytest.raises(MissingDataError, match="no execution trace") as caught:
        pairs(tmp_path)
    assert "--execution-trace" in caught.value.hint


@pytest.mark.proof
def test_execution_traces_may_stand_among_the_timelines_under_any_name(tmp_path: Path) -> None:
    for name in ("dlrm_v100_8ranks", "dlrm_v100_8ranks_et"):
        for path in traces(name).iterdir():
            (tmp_path / path.name).symlink_to(path)
    assert len(trace_files(tmp_path)) == 8
    found, alone = pairs(tmp_path)
    assert [pair.rank for pair in found] == list(range(8))
    assert alone == []
    for path in trace_files(tmp_path):
        path.unlink()
    with pytest.raises(TraceFormatError, match="no trace") as caught:
        trace_files(tmp_path)
    assert "execution trace" in caught.value.hint


def test_files_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_trace(tmp_path / f"{name}.json", timeline("External id"))
        write_execution(tmp_path / f"other{name}.et.json", NODES, pid=5)
    with pytest.raises(TraceFormatError, match="nothing says whose"):
        pairs(tmp_path)


def test_command_writes_one_file_per_rank_and_reports_the_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two").mkdir()
    for path in (*traces(DLRM).glob("worker[35]_*"), *traces(DLRM_ET).glob("dlrm_eg_[35].*")):
        (tmp_path / "two" / path.name).symlink_to(path)
    target = tmp_path / "linked.json.gz"
    assert run_command(["link", str(tmp_path / "two"), "--json", "-o", str(target)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["linked_ratio"] for each in said["ranks"]] == [1.0] * 2
    names = sorted(path.name for path in tmp_path.glob("*.gz"))
    assert names == [f"linked.rank{rank}.json.gz" for rank in (3, 5)]
    again = load_execution_trace(tmp_path / "linked.rank5.json.gz")
    direct = link(pairs(traces(DLRM), traces(DLRM_ET), rank=5)[0][0])
    kept = [
        "node", "parent", "name", "ts_ns", "dur_ns", "self_ns", "host_tid", "stream", "category",
    ]  # fmt: skip
    assert again.nodes["ts_ns"].is_not_null().any()
    assert again.nodes.select(kept).equals(direct.nodes.select(kept))
    assert again.header["rank"] == 5


def test_command_fails_and_writes_nothing_where_nothing_was_linked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = traces("hta_cp_simple_add_a100")
    notes = next(traces(DLRM_ET).glob("*_0.json.gz"))
    target = tmp_path / "linked.json.gz"
    assert run_command(["link", str(other), "--et", str(notes), "-o", str(target)]) == 5
    assert "nothing was linked" in capsys.readouterr().err
    assert not target.exists()


def test_command_ends_with_one_line_on_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "a.json", timeline("External id"))
    (tmp_path / "a.et.json").write_text('{"nodes": [')
    assert run_command(["link", str(tmp_path)]) == 4
    error = capsys.readouterr().err
    assert "a.et.json" in error
    assert "Traceback" not in error


names = st.lists(st.integers(0, 3), max_size=12)


@given(names, names)
def test_alignment_is_a_longest_common_order(first: list[int], second: list[int]) -> None:
    left, right = align_names(np.array(first, dtype=np.int64), np.array(second, dtype=np.int64))
    assert [first[at] for at in left] == [second[at] for at in right]
    assert (np.diff(left) > 0).all()
    assert (np.diff(right) > 0).all()
    best = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            best[i + 1][j + 1] = (
                best[i][j] + 1 if one == other else max(best[i][j + 1], best[i + 1][j])
            )
    assert len(left) == best[-1][-1]


def test_alignment_of_other_programs_gives_up_in_bounded_time() -> None:
    chance = random.Random(0)
    first, second = (np.array([chance.randrange(40) for _ in range(5000)]) for _ in range(2))
    left, _ = align_names(first, second)
    assert len(left) < 10
