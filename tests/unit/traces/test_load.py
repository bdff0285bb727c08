"""Every event is in a table, or counted with the reason why it is not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format.kineto.columns import exact_ns
from haiprof.trace_format.kineto.load import LoadReport
from tests.unit.traces.texts import LAYOUTS, Event, compact, kernel, op, pretty, read

pytestmark = pytest.mark.usefixtures("way")

Layout = Callable[..., str]


def counted(report: LoadReport) -> int:
    parts = [report.kept, report.redundant, report.not_used]
    return sum(sum(part.values()) for part in parts) + report.bad_time_count + report.lost_count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_events_become_rows_in_every_layout(file: Path, layout: Layout) -> None:
    events = [op("a", ts=1.5, dur=2.25), kernel("k", ts=3), op("b", ts=4, dur=0)]
    found = read(file, layout(events, schemaVersion=1, traceName="x"))
    assert found.texts("ops") == ["a", "b"]
    assert found.column("ops", "ts_ns") == [1500, 4000]
    assert found.column("ops", "dur_ns") == [2250, 0]
    assert found.column("gpu", "event") == [1]
    assert found.metadata == {"schemaVersion": 1, "traceName": "x"}
    assert not found.report.notes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metadata_is_read_from_before_and_behind_the_events(file: Path, layout: Layout) -> None:
    text = layout([op()])
    behind = text.rstrip("}").rstrip() + ', "distributedInfo": {"rank": 3}, "list": [{}, {}]}'
    found = read(file, behind)
    assert found.metadata == {"distributedInfo": {"rank": 3}, "list": [{}, {}]}
    assert not found.report.notes


def test_bare_array_is_a_trace(file: Path) -> None:
    assert read(file, json.dumps([op("a"), op("b")])).texts("ops") == ["a", "b"]
    text = b"\xef\xbb\xbf \r\n" + compact([op("a")]).encode() + b"\r\n\r\n"
    found = read(file, text)
    assert found.texts("ops") == ["a"]
    assert not found.report.notes
    events = [{"sf": 1, **op(ts=number)} for number in range(9000)]
    assert len(read(file, compact(events)).column("ops", "ts_ns")) == 9000


def test_trace_without_events_is_empty_and_says_so(file: Path) -> None:
    for text in ('{"traceEvents": []}', '{"traceEvents": [ ], "a": 1}', "[]"):
        found = read(file, text)
        assert found.report.event_count == 0
        assert found.report.notes == [f"{file}: it holds no events"]


def test_report_counts_every_event(file: Path) -> None:
    events: list[Any] = [
        op(), kernel(), {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "id": 1, "ts": 1},
        {"ph": "s", "cat": "fwdbwd", "id": 4, "ts": 1},
        op(dur=-1), {"ph": "C", "cat": "new", "name": "x", "ts": 1}, 7,
    ]  # fmt: skip
    report = read(file, compact(events)).report
    assert report.event_count == len(events) == counted(report)
    assert {table: count for table, count in report.kept.items() if count} == {
        "ops": 1, "gpu": 1, "links": 1,
    }  # fmt: skip
    assert report.redundant == {"ac2g": 1}
    assert report.not_used == {"M": 1, "C new": 1}
    assert (report.bad_time_count, report.lost_count) == (1, 1)


def test_halves_of_events_are_counted_and_left_out(file: Path) -> None:
    halves = [{**op("half", at), "ph": phase} for at, phase in enumerate("EBb")]
    found = read(file, compact([op("whole"), *halves]))
    assert found.texts("ops") == ["whole"]
    assert found.report.not_used == {"B cpu_op": 1, "E cpu_op": 1, "b cpu_op": 1}
    assert counted(found.report) == found.report.event_count == 4


def test_memory_events_of_old_profilers_have_no_category(file: Path) -> None:
    args = {"Device Type": 1, "Device Id": 0, "Addr": 5, "Bytes": -512, "Total Allocated": 9}
    old = {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": 7, "args": args}
    found = read(file, pretty([op(), old, {**old, "cat": "cpu_instant_event", "ts": 8}, kernel()]))
    assert found.column("memory", "bytes") == [-512, -512]
    assert found.column("memory", "ts_ns") == [7000, 8000]
    assert found.column("memory", "dur_ns") == [0, 0]
    assert found.column("memory", "event") == [1, 2]
    assert found.column("memory", "address") == [5, 5]


def test_old_categories_and_spellings_go_to_the_same_tables(file: Path) -> None:
    events = [
        {**op("conv", **{"external id": 6}), "cat": "Operator"},
        {**kernel("k", **{"external id": 6}), "cat": "Kernel", "tid": "stream 7"},
        {**kernel("m"), "cat": "Memcpy"},
    ]
    del events[0]["args"]["External id"]
    found = read(file, compact(events))
    assert found.column("ops", "external_id") == [6]
    assert found.column("gpu", "external_id") == [6, None]
    assert found.column("gpu", "tid") == [7, 7]


def test_numbers_as_texts_are_numbers(file: Path) -> None:
    event = {**op("a", ts="1712170316123456.123", dur="0.001"), "pid": "12", "tid": "34"}
    found = read(file, compact([event, {**op("b"), "tid": "PyTorch Profiler"}]))
    assert found.column("ops", "ts_ns") == [1712170316123456123, 100_000]
    assert found.column("ops", "dur_ns")[0] == 1
    assert found.column("ops", "pid") == [12, 1]
    assert found.column("ops", "tid") == [34, None]


def test_missing_arguments_are_null(file: Path) -> None:
    bare = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1}
    nothing = [{**bare, "args": None}, {**bare, "args": {}}, {**bare, "args": {"stream": None}}]
    copied: dict[str, Any] = {"memory bandwidth (GB/s)": 2.5}
    found = read(file, compact([bare, *nothing, kernel(**copied)]))
    assert found.column("gpu", "stream") == [None] * 4 + [7]
    assert found.column("gpu", "bandwidth_bytes_per_s") == [None] * 4 + [2.5e9]
    assert found.column("gpu", "pid") == [None] * 4 + [0]
    assert found.texts("gpu", "collective") == [None] * 5
    assert not found.report.notes


def test_arguments_of_a_wrong_type_are_missing_and_said(file: Path) -> None:
    odd = kernel("odd", stream=[7], correlation={"a": 1}, device=True)
    found = read(file, compact([kernel("fine"), odd, {**kernel("list"), "args": [1]}]))
    assert found.texts("gpu") == ["fine", "odd", "list"]
    assert found.column("gpu", "stream") == [7, None, None]
    assert found.column("gpu", "device") == [0, None, None]
    assert found.report.odd_arguments_count == 2
    assert "2 events had arguments of a wrong type" in found.report.notes[0]


def test_numbers_that_are_not_whole_or_too_large_are_missing_in_integer_columns(file: Path) -> None:
    events = [kernel(bytes=value) for value in (7.0, 7.5, 1 << 63, (1 << 63) - 1, "x", 1e300)]
    assert read(file, compact(events)).column("gpu", "bytes") == [
        7, None, None, (1 << 63) - 1, None, None,
    ]  # fmt: skip


def test_json_arguments_are_kept_as_text(file: Path) -> None:
    values: list[Any] = [[[1, 2], []], "[0, 1]", None, "plain"]
    found = read(file, pretty([op(**{"Input Dims": value}) for value in values]))
    assert found.texts("ops", "input_dims") == ["[ [ 1, 2 ], [] ]", "[0, 1]", None, "plain"]


def test_several_devices_graphs_and_triton_are_kept_apart(file: Path) -> None:
    events = [
        kernel("k", device=device, correlation=9, **{"graph node id": node})
        for device, node in ((0, 1), (0, 2), (1, 3))
    ]
    launcher = op("triton_kernel", stream=7, kernel_backend="triton")
    found = read(file, compact([*events, launcher]))
    assert found.column("gpu", "device") == [0, 0, 1]
    assert found.column("gpu", "correlation") == [9, 9, 9]
    assert found.column("gpu", "graph_node") == [1, 2, 3]
    assert found.texts("ops") == ["triton_kernel"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_many_pieces_is_read_whole_and_in_order(
    file: Path, layout: Layout, packed: bool
) -> None:
    events: list[Event] = []
    for number in range(9000):
        events += [op(f"op{number % 7}", ts=number * 10, dur=number), kernel(ts=number * 10 + 1)]
    text = layout(events, distributedInfo={"rank": 1}).encode()
    found = read(file, gzip.compress(text, 1) if packed else text)
    assert found.column("ops", "dur_ns") == [number * 1000 for number in range(9000)]
    assert found.column("gpu", "event") == list(range(1, 18000, 2))
    assert found.report.text_bytes == len(text)
    assert not found.report.notes


OTHERS = {
    "execution trace": '{"schema": "1.0.2-chakra.0.0.4", "nodes": [{"id": 1, "name": "x"}]}',
    "memory snapshot": '{"segments": [{"device": 0}], "device_traces": []}', "object": '{"a": 1}',
    "numbers": "[1, 2, 3]", "records": '[{"a": 1}, {"a": 2}]',
    "events no list": '{"traceEvents": {"a": 1}}', "text": "hello", "nothing": "", "blank": "  \n ",
    "null": "null", "nested key": '{"a": {"traceEvents": [{"ph": "X"}]}}',
    "key in a text": '{"a": "\\"traceEvents\\": [", "b": 2}', "binary": "\x00\x01\x02\x03",
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_an_error_that_names_them(file: Path, kind: str) -> None:
    with pytest.raises(TraceFormatError) as error:
        read(file, OTHERS[kind])
    assert str(file) in str(error.value)
    assert error.value.hint


def ns_of(text: str) -> int:
    return int((Decimal(text) * 1000).to_integral_value())


@pytest.mark.parametrize("stamp", [
    "0", "0.001", "1.5", "68.0", "1365627949885.185", "1365627949885", "1694128201426556",
    "1712170316123456.789", "1712170316123456.7", "1712170316123456.100", "4398046511104.001",
    "4398046511103.999", "1e3", "1.5e15", "123456789.1234", "1305516305009.771",
])  # fmt: skip
def test_stamp_is_read_to_the_nanosecond(file: Path, stamp: str) -> None:
    for neighbour in ("1", "2.5", "1712170316123456.001"):
        text = compact([op(ts="TS", dur="DUR"), kernel(ts="TS2")])
        for word, value in (("TS", stamp), ("DUR", "7.001"), ("TS2", neighbour)):
            text = text.replace(f'"{word}"', value)
        found = read(file, text)
        assert found.column("ops", "ts_ns") == [ns_of(stamp)]
        assert found.column("ops", "dur_ns") == [7001]
        assert found.column("gpu", "ts_ns") == [ns_of(neighbour)]


def test_a_single_coarse_stamp_late_in_the_file_is_exact(file: Path) -> None:
    events = [op(ts=number) for number in range(9000)] + [op(ts="END")]
    for layout in LAYOUTS:
        text = layout(events).replace('"END"', "1712170316123456.100")
        assert read(file, text).column("ops", "ts_ns")[-1] == 1712170316123456100


def test_exact_stamps_of_instants_and_bad_ones_stand_beside_each_other(file: Path) -> None:
    instant = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 888, "args": {}}
    text = compact([op(ts=777), instant, op(ts=None), op(dur="x"), kernel(ts=-3)])
    exact = "1712170316123456.789"
    found = read(file, text.replace("777", exact).replace("888", exact))
    assert found.column("ops", "ts_ns") == found.column("memory", "ts_ns") == [ns_of(exact)]
    assert found.column("memory", "dur_ns") == [0]
    assert found.column("gpu", "ts_ns") == [-3000]
    assert found.report.bad_time_count == 2


def ns_or_none(text: str) -> int | None:
    try:
        return ns_of(text.strip('"'))
    except ArithmeticError:
        return None


numbers = st.decimals(min_value=-(10**14), max_value=10**15, places=3, allow_nan=False).map(str)
junk = st.sampled_from(
    ["null", '"1.5"', "1e3", "-1", "1.", ".5", "", "x", "1.2.3", '"a\n"', "[1,\n2]"]
)


@given(st.lists(numbers | junk, max_size=30))
def test_texts_of_any_form_are_read_like_decimals(texts: list[str]) -> None:
    found, good = exact_ns([text.encode() for text in texts])
    for text, ns, is_good in zip(texts, found.tolist(), good.tolist(), strict=True):
        expected = ns_or_none(text)
        assert is_good == (expected is not None)
        assert ns == (expected or 0)
