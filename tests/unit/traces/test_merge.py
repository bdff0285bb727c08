"""Merged traces against an oracle: the standard library's JSON, fractions, and nothing of ours."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.merge import (
    ID_STRIDE,
    MergedTrace,
    RankPlan,
    Track,
    ranked_id,
    shift_time,
    us_text,
    write_merged,
)
from haiprof.trace_format.merge_inputs import merge_files, merge_inputs
from tests.sampling import examples
from tests.unit.traces.texts import LAYOUTS, Event, kernel, op

PROCESS_EVENTS = {"process_name", "process_labels", "process_sort_index"}


def merge(
    target: Path,
    sources: Sequence[Path],
    *,
    shifts: Mapping[int, int] = {},
    base_ns: int = 0,
    tracks: Sequence[Track] = (),
) -> tuple[MergedTrace, dict[str, Any]]:
    """What was written, and what the standard library reads of it."""
    inputs = merge_inputs(merge_files(sources, None)[0])
    plans = [
        RankPlan(source=each, rank=rank, shift_ns=shifts.get(rank, 0), between=None, clock={})
        for rank, each in inputs.items()
    ]
    merged = write_merged(target, plans, base_ns=base_ns, about={}, tracks=lambda _: tracks)
    return merged, load(target)


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    found: dict[str, Any] = json.loads(text, parse_float=Fraction)
    return found


def ranks_in(folder: Path, events: Sequence[Sequence[Event]], **metadata: Any) -> list[Path]:
    paths = []
    for rank, own in enumerate(events):
        path = folder / f"rank{rank}.json"
        info = {"distributedInfo": {"rank": rank, "world_size": len(events)}, **metadata}
        path.write_text(json.dumps({**info, "traceEvents": list(own)}))
        paths.append(path)
    return paths


def named(pid: Any, name: str, label: str | None = None) -> list[Event]:
    """As Kineto names a process."""
    base = {"ph": "M", "ts": 5, "pid": pid, "tid": 0}
    found: list[Event] = [{**base, "name": "process_name", "args": {"name": name}}]
    if label is not None:
        found.append({**base, "name": "process_labels", "args": {"labels": label}})
    found.append({**base, "name": "process_sort_index", "args": {"sort_index": 7}})
    return found


def names(content: Mapping[str, Any]) -> dict[int, str]:
    return {
        each["pid"]: each["args"]["name"]
        for each in content["traceEvents"]
        if each["ph"] == "M" and each["name"] == "process_name"
    }


def test_every_rank_has_lanes_of_its_own_named_and_in_order(tmp_path: Path) -> None:
    own = [*named(4711, "python", "CPU"), *named(0, "python", "GPU 0"), op(), kernel()]
    own = [{**each, "pid": 4711} if each.get("cat") == "cpu_op" else each for each in own]
    paths = ranks_in(tmp_path, [own, own, own])
    _, content = merge(tmp_path / "out.json", paths[::-1])
    found = names(content)
    assert sorted(found.values()) == sorted(
        f"rank {rank}: {lane}" for rank in range(3) for lane in ("CPU (python 4711)", "GPU 0")
    )
    order = {
        each["pid"]: each["args"]["sort_index"]
        for each in content["traceEvents"]
        if each["name"] == "process_sort_index"
    }
    shown = [found[pid] for pid in sorted(found, key=order.__getitem__)]
    assert [name.split(":")[0] for name in shown] == [f"rank {rank}" for rank in (0, 0, 1, 1, 2, 2)]
    assert [name.endswith("GPU 0") for name in shown] == [False, True] * 3
    by_name = {each["name"]: each["pid"] for each in content["traceEvents"] if each["ph"] == "X"}
    assert found[by_name["gemm"]] == "rank 2: GPU 0"


def test_processes_without_a_name_get_one_and_texts_become_numbers(tmp_path: Path) -> None:
    spans = {"ph": "X", "name": "s", "cat": "Trace", "pid": "Spans", "tid": "x", "ts": 1, "dur": 1}
    nobody = {"ph": "i", "name": "mark", "ts": 2, "s": "g"}
    merged, content = merge(tmp_path / "out.json", ranks_in(tmp_path, [[spans, op(), nobody]] * 2))
    assert all(type(each["pid"]) is int for each in content["traceEvents"])
    assert sorted(names(content).values()) == sorted(
        f"rank {rank}: {name}" for rank in (0, 1) for name in ("Spans", "process 1", "no process")
    )
    assert merged.event_count == len(content["traceEvents"]) == 2 * (3 + 2 * 3)


def test_arrows_stay_within_their_rank_and_ids_can_be_read(tmp_path: Path) -> None:
    arrows = [
        {"ph": phase, "id": 4711, "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 3}
        for phase in "sf"
    ]
    tied = op(correlation=4711)
    _, content = merge(tmp_path / "out.json", ranks_in(tmp_path, [[*arrows, tied]] * 3))
    ids: dict[int, set[int]] = {}
    for each in content["traceEvents"]:
        if each["ph"] in "sf":
            ids.setdefault(each["pid"], set()).add(each["id"])
    assert list(ids.values()) == [{4711}, {10_000_004_711}, {20_000_004_711}]
    assert [e["args"] for e in content["traceEvents"] if e.get("cat") == "cpu_op"] == [
        {"External id": 1, "correlation": 4711}
    ] * 3


@given(
    first=st.tuples(st.integers(0, 500), st.integers(0, 2**70)),
    second=st.tuples(st.integers(0, 500), st.integers(0, 2**70)),
    quoted=st.booleans(),
)
def test_ids_are_equal_only_where_rank_and_id_are(
    first: tuple[int, int], second: tuple[int, int], quoted: bool
) -> None:
    def new(rank: int, value: int) -> Any:
        text = f'"{value}"' if quoted else str(value)
        return json.loads(ranked_id(rank, text.encode()))

    assert (new(*first) == new(*second)) == (first == second)
    rank, value = first
    if value < ID_STRIDE:
        assert new(rank, value) == rank * ID_STRIDE + value
    else:
        assert 0 <= int(new(rank, value), 16) < 2**64


TIMES = st.one_of(
    st.integers(-(2**50), 2**60).map(str),
    st.tuples(st.integers(0, 2**55), st.integers(0, 999)).map(lambda t: f"{t[0]}.{t[1]:03}"),
    st.from_regex(r"-?(0|[1-9][0-9]{0,15})\.[0-9]{1,12}", fullmatch=True),
    st.from_regex(r"[1-9][0-9]{0,8}\.[0-9]{1,6}[eE][-+]?[0-9]", fullmatch=True),
)
SHIFTS = st.integers(-(2**62), 2**62)


@settings(max_examples=examples(500))
@given(us=TIMES, shift_ns=SHIFTS)
def test_times_are_moved_exactly(us: str, shift_ns: int) -> None:
    moved = shift_time(us.encode(), shift_ns)
    assert Fraction(moved.decode()) == Fraction(us) + Fraction(shift_ns, 1000)
    assert json.loads(moved, parse_float=Fraction, parse_int=Fraction) == Fraction(moved.decode())


@pytest.mark.parametrize(
    "odd", [b"null", b'"soon"', b"[1]", b"1e400", b"9" * 60, b"true", b'"\xff"']
)
def test_what_is_no_time_stays(odd: bytes) -> None:
    assert shift_time(odd, 1_000_000) == odd


@given(ns=st.integers(-(2**62), 2**62))
def test_ns_are_written_as_us(ns: int) -> None:
    assert Fraction(us_text(ns)) == Fraction(ns, 1000)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PIDS = st.one_of(
    st.integers(0, 5), st.sampled_from(["Spans", "Traces", "", "4", "rank 1", '"', "\\"]), st.none()
)


@st.composite
def any_event(draw: st.DrawFn) -> Event:
    """What a profiler might write, and what nobody would."""
    found: Event = {"ph": draw(st.sampled_from("XXXisfCbenM")), "name": draw(st.text(max_size=10))}
    if found["ph"] == "M":
        found["name"] = draw(st.sampled_from([*sorted(PROCESS_EVENTS), "thread_name"]))
    for key, values in (
        ("pid", PIDS), ("tid", PIDS), ("id", st.integers(0, 2**40) | st.text("0123456789abcdefx")),
        ("ts", st.integers(0, 2**52)), ("dur", st.integers(0, 2**40)),
        ("cat", st.sampled_from(["cpu_op", "kernel", "ac2g"])), ("cname", st.text(max_size=5)),
        ("args", st.dictionaries(st.text(max_size=8) | st.sampled_from(["pid", "ts", "id", "name"]),
                                 JSON_VALUES, max_size=4)),
    ):  # fmt: skip
        if draw(st.integers(0, 9)):
            found[key] = draw(values)
    return found


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.lists(st.lists(any_event(), max_size=8), min_size=1, max_size=3),
    layout=st.sampled_from(LAYOUTS),
    shift_ns=st.integers(-(10**15), 10**15),
)
def test_any_events_pass_with_only_their_process_id_and_time_changed(
    ranks: list[list[Event]], layout: Any, shift_ns: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    paths = []
    for rank, events in enumerate(ranks):
        path = folder / f"rank{rank}.json"
        path.write_text(layout(events, distributedInfo={"rank": rank}))
        paths.append(path)
    merged, content = merge(folder / "out.json.gz", paths, shifts={0: shift_ns})
    found = content["traceEvents"]
    assert merged.event_count == len(found)
    processes: dict[int, tuple[int, str]] = {}
    at = 0
    for rank, events in enumerate(ranks):
        held = [e for e in events if e["ph"] == "M" and e["name"] in PROCESS_EVENTS]
        in_order = [e for e in events if e not in held] + held
        for before in in_order:
            after = found[at]
            at += 1
            expected = {**before, "pid": after["pid"]}
            if "id" in before and before not in held:
                expected["id"] = json.loads(ranked_id(rank, json.dumps(before["id"]).encode()))
            if "ts" in before and rank == 0 and shift_ns:
                expected["ts"] = before["ts"] + Fraction(shift_ns, 1000)
            if before in held and before["name"] != "process_labels":
                key = "name" if before["name"] == "process_name" else "sort_index"
                args = after.pop("args")
                args.pop(key)
                old = expected.pop("args", {})
                assert args == {k: v for k, v in old.items() if k != key}
            assert after == expected
            pid = before.get("pid", "")
            who = (rank, "null" if pid is None else str(pid))
            assert processes.setdefault(after["pid"], who) == who
        added = merged.ranks[rank].added_count
        assert all(e["ph"] == "M" for e in found[at : at + added])
        at += added
    assert at == len(found)
    assert len(set(processes.values())) == len(processes)


def test_whatever_the_layout_the_result_is_the_same(tmp_path: Path) -> None:
    events = [op("a", ts=1.5), kernel(ts=2.25, note='}, {"ph": "X", "pid": 9, "traceEvents": [')]
    results = []
    for layout in LAYOUTS:
        path = tmp_path / "rank0.json"
        path.write_text(layout(events, distributedInfo={"rank": 0}))
        results.append(merge(tmp_path / "out.json", [path])[1]["traceEvents"])
    assert results[0] == results[1] == results[2]


def test_metadata_of_every_rank_is_kept(tmp_path: Path) -> None:
    for rank in (0, 1):
        written: dict[str, Any] = {
            "schemaVersion": 1, "distributedInfo": {"rank": rank, "backend": "nccl"},
            "deviceProperties": [{"id": rank}], "own": {"é": [rank, None]},
            "traceEvents": [op()], "traceName": f"behind {rank}",
        }  # fmt: skip
        (tmp_path / f"{rank}.json").write_text(json.dumps(written))
    _, content = merge(tmp_path / "out.json", [tmp_path], base_ns=77)
    assert (content["schemaVersion"], content["displayTimeUnit"]) == (1, "ms")
    assert content["baseTimeNanoseconds"] == 77
    for rank, said in enumerate(content["haiprof_ranks"]):
        assert said["rank"] == rank
        assert said["distributedInfo"] == {"rank": rank, "backend": "nccl"}
        assert said["deviceProperties"] == [{"id": rank}]
        assert said["metadata"]["own"] == {"é": [rank, None]}
        assert said["metadata"]["traceName"] == f"behind {rank}"


def test_damaged_files_give_what_can_be_read_and_say_what_not(tmp_path: Path) -> None:
    whole, broken = ranks_in(tmp_path, [[op("a"), op("b")], [op("c"), op("d"), op("e")]])
    text = broken.read_text().replace('"External id": 1', '"External id": NaN', 1)
    broken.write_text(text[: text.rindex("{", 0, text.index('"e"')) + 12])
    packed = tmp_path / "rank2.json.gz"
    data = gzip.compress(whole.read_bytes().replace(b'"rank": 0', b'"rank": 2'))
    packed.write_bytes(data[:-12])
    merged, content = merge(tmp_path / "out.json.gz", [tmp_path])
    assert [rank.event_count for rank in merged.ranks[:2]] == [2, 2]
    notes = [" ".join(rank.notes) for rank in merged.ranks]
    assert notes[0] == ""
    assert "cut off" in notes[1]
    assert "NaN" in notes[1]
    assert "gzip data" in notes[2]
    assert all(str(path) in note for path, note in zip([broken, packed], notes[1:], strict=True))
    values = [
        e["args"]["External id"] for e in content["traceEvents"] if e.get("name") in ("c", "d")
    ]
    assert values == [None, 1]
    assert merged.event_count == len(content["traceEvents"])


def test_of_duplicate_keys_the_last_counts_as_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "rank3.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "ph": "i", "pid": 1, "ts": 5, "pid": 2, "ts": 6}]}'
    )
    _, content = merge(tmp_path / "out.json", [path], shifts={3: 1500})
    event = content["traceEvents"][0]
    assert (event["ph"], event["ts"]) == ("i", Fraction("7.5"))
    assert names(content) == {event["pid"]: "rank 3: process 2"}


def test_hostile_names_are_data(tmp_path: Path) -> None:
    name = '"}], "x": [{"\\u2028<script>\x00\n\\'
    events = [*named(name, name, name), {**op(name), "pid": name}]
    _, content = merge(tmp_path / "out.json", ranks_in(tmp_path, [events, events]))
    assert names(content) == {1002: f"rank 0: {name}", 2002: f"rank 1: {name}"}
    assert [e["name"] for e in content["traceEvents"] if e["ph"] == "X"] == [name, name]
    events = [{**op(), "pid": pid} for pid in range(1500)]
    _, content = merge(tmp_path / "out.json", ranks_in(tmp_path, [events, events]))
    pids = [each["pid"] for each in content["traceEvents"] if each["ph"] == "X"]
    assert len(set(pids)) == 3000


def test_a_merged_trace_is_taken_for_no_ranks_trace(tmp_path: Path) -> None:
    target = tmp_path / "all.json.gz"
    merge(target, ranks_in(tmp_path, [[op()], [op()]]))
    with pytest.raises(TraceFormatError, match="merged trace already"):
        merge_inputs([target])
    trace = Trace(target)
    assert trace.ops.height == 2  # it loads, for SQL and the like
    with pytest.raises(TraceFormatError, match="several ranks"):
        _ = trace.rank
    target.rename(tmp_path / "merged.json.gz")
    assert [path.name for path in merge_files([tmp_path], None)[0]] == ["rank0.json", "rank1.json"]


def test_a_trace_that_breaks_half_way_leaves_nothing(tmp_path: Path) -> None:
    good, bad = ranks_in(tmp_path, [[op()], [op()]])
    inputs = merge_inputs([good, bad])
    plans = [
        RankPlan(source=each, rank=rank, shift_ns=0, between=None, clock={})
        for rank, each in inputs.items()
    ]
    bad.unlink()
    target = tmp_path / "out.json.gz"
    target.write_bytes(b"as it was")
    with pytest.raises(TraceFormatError):
        write_merged(target, plans, base_ns=0, about={})
    assert target.read_bytes() == b"as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json.gz", "rank0.json"]


def test_tracks_are_drawn_at_their_exact_times(tmp_path: Path) -> None:
    start = 1_795_288_700_123_456_789
    track = Track(
        pid=5,
        name="rank 0: haiprof phases",
        sort_index=1,
        threads=("steps",),
        spans=pl.DataFrame({
            "thread": [0], "name": ["forward"], "start_ns": [start], "duration_ns": [1001],
            "of": [None],
        }),
        counters=pl.DataFrame({
            "time_ns": [start, start + 1],
            "name": ["cpu"] * 2,
            "unit": ["cores", None],
            "value": [0.5, None],
        }),
    )  # fmt: skip
    merged, content = merge(
        tmp_path / "out.json", ranks_in(tmp_path, [[op()]]), base_ns=start - 2_000_000,
        tracks=[track],
    )  # fmt: skip
    own = [each for each in content["traceEvents"] if each["pid"] == 5]
    assert merged.track_event_count == len(own) == 5
    span = next(each for each in own if each["ph"] == "X")
    assert (span["name"], span["ts"], span["dur"], span["args"]) == (
        "forward",
        2000,
        Fraction("1.001"),
        {},
    )
    counters = [each for each in own if each["ph"] == "C"]
    assert [(each["ts"], each["args"]) for each in counters] == [(2000, {"cores": Fraction("0.5")})]
