"""Damaged, hostile and unfinished files: a stated repair or one clear error, never wrong rows."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format.kineto.text import TraceText
from tests.sampling import examples, first_of, sample
from tests.unit.traces.texts import LAYOUTS, Event, Read, compact, kernel, op, pretty, read, tight

pytestmark = pytest.mark.usefixtures("way")

Layout = Callable[..., str]
# For tests of what is the same both ways, as no event is decoded.
one_way = pytest.mark.parametrize(
    "way", first_of(("compiled", "python"), "compiled"), indirect=True
)

# Looks like events inside of an event.
NESTED = [{"ph": "X", "name": "inner", "cat": "cpu_op", "ts": 1, "dur": 1}, {"name": "b"}, {}]
TRICKY_NAME = 'lambda }, {"ph": "X" ]} "traceEvents": [ \\'


@pytest.mark.sampled
def test_every_cut_keeps_the_whole_events_before_it(file: Path) -> None:
    events = [op("a", ts=1), op(TRICKY_NAME, ts=2, nested=NESTED), kernel("k", ts=3)]
    for layout in LAYOUTS:
        text = layout(events, distributedInfo={"rank": 0}).encode()
        start, ends = text.index(b'"traceEvents"'), []
        decoder = json.JSONDecoder()
        place = text.index(b"{", start)
        for _ in events:
            _, length = decoder.raw_decode(text[place:].decode())
            ends.append(place + length)
            place = text.find(b"{", ends[-1])
        for cut in sample(range(len(text)), every=11):
            if cut <= text.index(b"[", start):
                with pytest.raises(TraceFormatError):
                    read(file, text[:cut])
                continue
            found = read(file, text[:cut])
            whole = sum(end <= cut for end in ends)
            assert found.report.event_count == found.report.kept["ops"] + found.report.kept["gpu"]
            assert found.report.event_count == whole, text[:cut]
            closed = text[ends[-1] : cut].strip().startswith(b"]")
            assert (found.report.truncated_bytes is None) == closed
            assert closed or "cut off" in "".join(found.report.notes)


def test_cut_metadata_behind_the_events_is_said(file: Path) -> None:
    text = compact([op()]).rstrip("}") + ', "distributedInfo": {"rank": 3}, "name": "abc"}'
    whole = read(file, text)
    assert whole.metadata["distributedInfo"] == {"rank": 3}
    found = read(file, text[:-6])
    assert found.column("ops", "ts_ns") == [100_000]
    assert "the metadata behind the events cannot be read" in found.report.notes[0]


@pytest.fixture(scope="module")
def packed() -> bytes:
    noise = random.Random(1)
    events = [op(f"op{noise.random()}", ts=number) for number in range(20_000)]
    return gzip.compress(compact(events).encode(), 6)


@pytest.mark.parametrize("part", [0.01, 0.3, 0.9, 0.9999])
def test_cut_gzip_keeps_what_is_readable(file: Path, packed: bytes, part: float) -> None:
    found = read(file, packed[: int(len(packed) * part)])
    kept = found.column("ops", "ts_ns")
    assert kept == [number * 1000 for number in range(len(kept))]
    assert len(kept) >= 20_000 * (part - 0.05)
    assert "the gzip data ends early" in found.report.notes[0]


def test_wrong_checksum_of_gzip_is_stated(file: Path, packed: bytes) -> None:
    found = read(file, packed[:-8] + bytes(8))
    assert found.report.kept["ops"] == 20_000
    assert "damaged gzip data" in found.report.notes[0]
    middle = len(packed) // 2
    damaged = packed[:middle] + bytes(64) + packed[middle + 64 :]
    found = read(file, damaged)
    assert found.report.event_count > 5000
    assert "damaged gzip data" in found.report.notes[0]


def test_gzip_of_several_members_with_padding_is_one_text(file: Path) -> None:
    text = compact([op(str(number), ts=number) for number in range(5000)]).encode()
    members = [gzip.compress(text[at : at + 999]) for at in range(0, len(text), 999)]
    found = read(file, b"".join(members) + bytes(100_000))
    assert found.report.kept["ops"] == 5000
    assert not found.report.notes


@one_way
def test_gzip_bomb_is_refused_in_bounded_memory(file: Path) -> None:
    packer = zlib.compressobj(9, wbits=31)
    head = packer.compress(b'{"traceEvents": [' + json.dumps(op()).encode())
    head += packer.flush(zlib.Z_FULL_FLUSH)  # what comes next refers to nothing before it
    blank = packer.compress(b"," + b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    file.write_bytes(head + blank * 600)
    tracemalloc.start()
    try:
        with pytest.raises(TraceFormatError, match="without an end of an event"):
            Read(file)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_looks_like_events_inside_an_event_is_none(
    file: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", 1 << 14)
    events = [op(TRICKY_NAME, ts=number, nested=NESTED * 9) for number in range(300)]
    found = read(file, layout(events, other=NESTED))
    assert found.column("ops", "ts_ns") == [number * 1000 for number in range(300)]
    assert found.report.event_count == 300
    assert found.metadata == {"other": NESTED}
    assert not found.report.notes


def test_an_event_larger_than_many_pieces_is_one_event(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", 1 << 14)
    large = op("large", ts=2, nested=NESTED * 4_000)
    found = read(file, compact([op("a", ts=1), large, op("b", ts=3)]))
    assert found.texts("ops") == ["a", "large", "b"]
    assert not found.report.notes


def test_large_metadata_on_either_side_is_kept(file: Path) -> None:
    large = [{"name": "x" * 100, "id": number} for number in range(20_000)]
    for text in (
        compact([op()], before=large),
        compact([op()])[:-1] + f', "b": {json.dumps(large)}}}',
    ):
        found = read(file, text)
        assert found.report.event_count == 1
        assert list(found.metadata.values()) == [large]


def test_endless_metadata_behind_the_events_is_left_out(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.text.EVENT_LIMIT_BYTES", 1 << 20)
    found = read(file, compact([op()])[:-1] + ', "b": "' + "x" * (2 << 20) + '"}')
    assert found.report.event_count == 1
    assert found.metadata == {}
    assert "metadata behind the events were left out" in found.report.notes[0]


def test_duplicate_keys_take_the_last_value(file: Path) -> None:
    text = (
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "ts": 2, "dur": 3}]}'
    )
    assert read(file, text).column("ops", "ts_ns") == [2000]
    text = compact([op("a")])[:-1] + f', "traceEvents": {json.dumps([op("b")])}}}'
    found = read(file, text)
    assert found.texts("ops") == ["a"]
    assert "a second traceEvents was left out" in found.report.notes[0]
    events = [{**op(), "name": name} for name in (7, 1.5, None)]
    assert read(file, compact(events)).texts("ops") == ["7", "1.5", ""]
    without = op("bad")
    del without["dur"]
    assert read(file, compact([op("a"), without])).texts("ops") == ["a"]


NOT_NUMBERS = (
    "NaN", "Infinity", "-Infinity", "nan", "-nan", "inf", "-inf", "nan(ind)", "-nan(ind)",
)  # fmt: skip


@pytest.mark.parametrize("word", NOT_NUMBERS)
def test_what_is_no_number_is_missing_and_changes_no_name(file: Path, word: str) -> None:
    name = f"keeps NaN, {word} : [{word}]"
    text = compact([kernel(name, **{"memory bandwidth (GB/s)": 125}), kernel("k2")])
    found = read(file, text.replace("125", word))
    assert found.texts("gpu") == [name, "k2"]
    assert found.column("gpu", "bandwidth_bytes_per_s") == [None, None]
    assert found.report.repaired_count == 1


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"x"', "1e30", "-9e18", '""', "[1]"])
def test_an_event_without_a_usable_time_is_left_out_and_counted(
    file: Path, field: str, value: str
) -> None:
    text = compact([op("a"), op("bad", **{field: 777}), op("b")])
    found = read(file, text.replace("777", value))
    assert found.texts("ops") == ["a", "b"]
    assert found.report.bad_time_count + found.report.lost_count == 1
    assert found.report.notes


@pytest.mark.parametrize("dur", [-1, -0.001, 7.45e15, (1 << 63) / 1000, 1 << 70])
def test_impossible_durations_are_left_out(file: Path, dur: float) -> None:
    found = read(file, compact([op("a"), kernel("k", dur=dur)]))
    assert found.report.bad_time_count == 1
    assert found.report.kept["gpu"] == 0


def names_of(file: Path, raw_names: list[bytes]) -> Read:
    events = b",".join(
        b'{"ph":"X","cat":"cpu_op","name":"%s","ts":%d,"dur":1}' % (name, at)
        for at, name in enumerate(raw_names)
    )
    return read(file, b'{"traceEvents":[' + events + b"]}")


def test_hostile_names_are_kept_as_far_as_they_are_text(file: Path) -> None:
    names = {
        b"\\u0000\\u001b[31m": "\x00\x1b[31m", b"a\x01b\x00c": "a b c",
        b"line\nbreak\ttab": "line break tab", b"\\ud800 half": "\ufffd half",
        b"half \\udfff": "half \ufffd", b"\\ud800\\ud800": "\ufffd\ufffd",
        b"\\ud83d\\ude00": "\U0001f600", b"\xff\xfe bytes": "\ufffd\ufffd bytes",
        b"\xed\xa0\x80": "\ufffd\ufffd\ufffd", b"C:\\Python\\x41": "C:\\Python\\x41",
        b"two\\\\x": "two\\x", b"\\u12": "\\u12", b'quote\\"d': 'quote"d',
        "\u202eright to left".encode(): "\u202eright to left", b"": "",
    }  # fmt: skip
    found = names_of(file, list(names))
    assert found.texts("ops") == list(names.values())
    assert found.report.repaired_count == 1


def test_a_name_of_a_megabyte_is_a_name(file: Path) -> None:
    found = names_of(file, [b"a", b"x" * (1 << 20), b'}, {\\"ph\\":' * 100_000, b"b"])
    assert [len(name or "") for name in found.texts("ops")] == [1, 1 << 20, 900_000, 1]
    assert not found.report.notes


@pytest.mark.parametrize("name", [{"a": 1}, [1], True])
def test_an_event_of_another_form_is_lost_alone(file: Path, name: object) -> None:
    strange = {**op(nested=NESTED), "name": name}
    found = read(file, compact([op("a"), strange, op("b"), kernel("k")]))
    assert found.texts("ops") == ["a", "b"]
    assert found.report.kept["gpu"] == found.report.lost_count == 1
    assert "1 events cannot be read" in found.report.notes[0]


DAMAGE = {
    "no comma": '{"ph": "X" "cat": "cpu_op", "name": "bad"}',
    "no end": '{"ph": "X", "cat": "cpu_op", "name": "bad", "args": {"a": 1}',
    "no beginning": '"ph": "X", "cat": "cpu_op", "name": "bad"}',
    "one bracket more": '{"ph": "M", "name": "x"}}',
    "wrong bracket": '{"ph": "X", "args": {"a": [1}}, "name": "bad"}',
    "open quote": '{"ph": "X", "cat": "cpu_op", "name": "bad, "ts": 1}',
    "quote in a name": '{"ph": "X", "cat": "cpu_op", "name": "say "bad"", "ts": 1}',
    "nothing": "",
    "a word": "bad",
    "zeros": "\x00" * 50,
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.proof), 3])
def test_events_around_damage_are_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", 1 << 15)
    good = [json.dumps(op(str(number), ts=number)) for number in range(900)]
    for place in range(count):
        good.insert(1 + 300 * place, DAMAGE[kind])
    found = read(file, '{"traceEvents": [' + ", ".join(good) + "]}")
    kept = set(found.column("ops", "ts_ns"))
    missing = {number * 1000 for number in range(900)} - kept
    assert len(missing) <= 2 * count  # its neighbours, at most
    assert "bad" not in found.texts("ops")
    assert found.report.lost_count or kind in ("nothing", "zeros", "one bracket more")


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_nesting_costs_one_event(file: Path, opening: str) -> None:
    closing = "".join(
        "]" if bracket == "[" else "}" for bracket in reversed(opening) if bracket in "[{"
    )
    deep = opening * 100_000 + "1" + closing * 100_000
    events = [
        json.dumps(op("a")),
        json.dumps(op("deep", x=777)).replace("777", deep),
        json.dumps(op("b")),
    ]
    found = read(file, '{"traceEvents": [' + ",".join(events) + "]}")
    assert found.texts("ops") == ["a", "b"]
    assert found.report.lost_count == 1
    with pytest.raises(TraceFormatError):
        read(file, '{"a": ' + deep + "}")
    with pytest.raises(TraceFormatError):
        read(file, "[" * 1_000_000)


def test_text_without_an_end_of_an_event_is_refused_in_bounded_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.text.EVENT_LIMIT_BYTES", 4 << 20)
    for text in ('{"traceEvents": [{"name": "' + "x" * (9 << 20), "{" + " " * (9 << 20)):
        with pytest.raises(TraceFormatError, match="without an end of an event"):
            read(file, text)


@one_way
def test_many_damaged_events_are_passed_by(file: Path) -> None:
    """Were each searched to the end of the file, pytest's timeout would end this."""
    bad = '{"ph": "X", "name": "a "quote" and \\" and {"a": [}, {"ph": 1}'
    found = read(
        file, '{"traceEvents": [' + ",".join([bad] * 10_000) + "," + json.dumps(op()) + "]}"
    )
    assert found.report.event_count > 1000


def test_distinct_names_without_end_are_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.columns._NAME_LIMIT_BYTES", 100_000)
    with pytest.raises(TraceFormatError, match="distinct names"):
        read(file, compact([op(str(number)) for number in range(1000)]))


def test_what_is_no_file_is_an_error_at_once(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo.json", tmp_path / "link.json"
    os.mkfifo(fifo)
    link.symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        for path in (tmp_path, fifo, link, tmp_path / "s", Path("/dev/zero"), tmp_path / "a\0b"):
            with pytest.raises(TraceFormatError):
                Read(path)


def test_file_that_may_not_be_read_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(compact([op()]))
    file.chmod(0)
    if os.geteuid():
        with pytest.raises(TraceFormatError, match="Permission denied"):
            Read(file)
    file.chmod(0o600)
    denied = PermissionError(13, "Permission denied")

    def refuse(*_: Any, **__: Any) -> None:
        raise denied

    monkeypatch.setattr("haiprof.trace_format.kineto.text.open", refuse, raising=False)
    with pytest.raises(TraceFormatError, match="Permission denied"):
        Read(file)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False)
    | st.text(max_size=8) | st.sampled_from(['}, {"ph":', "]", "[", "{"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    args=st.lists(st.dictionaries(st.text(max_size=6), json_values, max_size=4), max_size=6),
    piece=st.integers(16, 400),
)
def test_pieces_of_any_size_hold_the_same_events(
    tmp_path_factory: pytest.TempPathFactory, args: list[dict[str, Any]], piece: int
) -> None:
    events: list[Event] = [
        op(str(number), ts=number, more=each) for number, each in enumerate(args)
    ]
    file = tmp_path_factory.mktemp("any") / "trace.json"
    for layout in (compact, pretty, tight):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", piece)
            found = read(file, layout(events, last=args))
        assert found.texts("ops") == [str(number) for number in range(len(args))]
        assert found.report.event_count == len(args)
        assert list(found.metadata) == ["last"]


def test_text_of_a_trace_is_passed_on_piece_by_piece(file: Path) -> None:
    file.write_text(compact([op(str(number)) for number in range(5000)]))
    text = TraceText(file)
    pieces = [len(piece) for piece in text.pieces()]
    assert max(pieces) < 1 << 20
    assert len(pieces) > 1
