"""The compiled scanner: it takes what profilers write, and reads it as Python does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format.kineto import load as native
from haiprof.trace_format.kineto.events import TABLE_OF_CATEGORY, TABLES
from haiprof.trace_format.kineto.load import LoadReport, NativeColumns
from tests.sampling import examples
from tests.unit.analysis.trace.shared import FEW_TRACES, traces
from tests.unit.traces.texts import LAYOUTS, Event, Read, compact, kernel, op, read

pytestmark = pytest.mark.skipif(not native.is_compiled(), reason="the scanner was not built")


class Taken:
    """Counts pieces that the scanner takes and refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces = {True: 0, False: 0}
        scan = NativeColumns.scan

        def counted(
            columns: NativeColumns, piece: bytes, first: int
        ) -> tuple[tuple[int, ...], bool] | None:
            found = scan(columns, piece, first)
            self.pieces[found is not None] += 1
            return found

        monkeypatch.setattr(NativeColumns, "scan", counted)


def read_in_python(path: Path) -> Read | TraceFormatError:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_compiled", None)
        return outcome(path)


def outcome(path: Path) -> Read | TraceFormatError:
    try:
        return Read(path)
    except TraceFormatError as error:
        return error


def assert_same(path: Path) -> LoadReport | None:
    """Both ways give the same, to the order of the texts; the report where the file is a trace."""
    found, expected = outcome(path), read_in_python(path)
    if isinstance(expected, TraceFormatError):
        assert str(found) == str(expected)
        return None
    assert isinstance(found, Read)
    assert found.report == expected.report
    assert found.metadata == expected.metadata
    assert found._texts == expected._texts
    for table in TABLES:
        assert found.table(table).equals(expected.table(table)), table
    return found.report


@pytest.mark.parametrize("name", FEW_TRACES)
def test_real_traces_are_read_alike_and_mostly_compiled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Taken(monkeypatch)
    for path in sorted(traces(name).glob("*.json.gz"))[:2]:
        assert_same(path)
    compiled, refused = taken.pieces[True], taken.pieces[False] // 2  # Python refuses all of them
    assert compiled >= 0.9 * (compiled + refused) or compiled + refused < 200


@pytest.mark.parametrize("layout", LAYOUTS)
def test_events_of_every_category_are_taken(
    file: Path, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", 1000)
    taken = Taken(monkeypatch)
    events = [event_of(category, place) for place, category in enumerate(TABLE_OF_CATEGORY)]
    found = read(file, layout(events * 20))
    assert taken.pieces[True] > 5
    assert taken.pieces[False] == 0
    assert sum(found.report.kept.values()) == len(events) * 20
    assert_same(file)


def event_of(category: str, place: int = 0) -> Event:
    phase = {"fwdbwd": "s", "cpu_instant_event": "i", "gpu_counter": "C"}.get(category, "X")
    args = {
        key: value
        for column in TABLES[TABLE_OF_CATEGORY[category]]
        if column.field[:1] != "."
        for key, value in [(column.field.split("|")[0], _value(column.type, place))]
        if key
    }
    return {"ph": phase, "cat": category, "name": f"name of {place}", "pid": place,
            "tid": "stream 7", "ts": 1_712_195_495_519_689 + place + 0.5, "dur": place + 0.25,
            "id": place,
            "args": {**args, "Ev Idx": place, "grid": [1, 2, {"x": None}]}}  # fmt: skip


def _value(kind: str, place: int) -> object:
    return {"i64": place - 3, "f64": place / 7, "str": f"text {place % 3}"}[kind]


numbers = st.sampled_from(
    ["0", "-0", "1", "-1", "007", "1.", ".5", "1.5", "1.50", "1.2345", "0.001", "1e3", "1E-5",
     "1e400", "9007199254740993", "9223372036854775807", "9223372036854775808",
     "-9223372036854775808",
     "1712195495519689.047", "17121954955196890.0471", "2305843009213692.999", "2305843009213693",
     "2251799813685.247", "2251799813685.248", "0.1234567890123456789", "12345678901234567890.5",
          "NaN", "-inf", "null", "true", '"7"', '"stream 12"', '"stream "', '"1.5"',
     '""', '"x"', "[]", "{}"]
)  # fmt: skip
strings = st.sampled_from(
    ['"a"', '""', "null", '"\\n"', '"a\\/b"', '"a/b"', '"\\u0041"', '"\\ud800"', '"\\x"', '"é"',
     '"\t"',
     "1", "1.0", "[1, 2]", '["a", "\\""]', '{"a": [{}]}', '"\\\\"', "[" * 70 + "]" * 70,
     "tru", '"a']
)  # fmt: skip
fields = {
    **dict.fromkeys(("ts", "dur", "pid", "tid", "id"), numbers),
    **dict.fromkeys(("name", "cat", "ph", "unknown", '\\"odd'), strings),
    "cat": st.sampled_from(
        [*(f'"{each}"' for each in TABLE_OF_CATEGORY), '"ac2g"', '"Trace"', "null"]
    ),
    "ph": st.sampled_from(['"X"', '"i"', '"s"', '"f"', '"B"', '""', '"XX"', "null", "1"]),
}
arguments = {
    column.field.split("|")[-1]: numbers if column.type != "str" else strings
    for columns in TABLES.values()
    for column in columns
    if column.field[:1] not in (".", "")
} | {"External id": numbers, "other": strings}


@st.composite
def event_texts(draw: st.DrawFn) -> str:
    """An event as JSON, nearly always; some of its values are odd, a key may stand twice."""
    event = event_of(draw(st.sampled_from(list(TABLE_OF_CATEGORY))), draw(st.integers(0, 3)))
    args = {key: json.dumps(value) for key, value in event.pop("args").items()}
    own = {key: json.dumps(value) for key, value in event.items()}
    pairs = list(own.items())
    for key in draw(st.lists(st.sampled_from(list(fields)), max_size=1)):
        odd = (key, draw(fields[key]))
        pairs = [odd if each == key else (each, value) for each, value in pairs]
        pairs += [odd] if draw(st.booleans()) else []
    inside = list(args.items())
    for key in draw(st.lists(st.sampled_from(list(arguments)), max_size=1)):
        odd = (key, draw(arguments[key]))
        inside = [odd if each == key else (each, value) for each, value in inside]
        inside += [odd] if draw(st.booleans()) else []
    pairs.append(("args", "{" + ", ".join(f'"{key}": {value}' for key, value in inside) + "}"))
    if draw(st.booleans()) and draw(st.booleans()):
        pairs = draw(st.permutations(pairs))
    return "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(event_texts(), min_size=1, max_size=8), piece=st.sampled_from([64, 1500]))
def test_odd_values_are_read_alike(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], piece: int
) -> None:
    file = tmp_path_factory.mktemp("odd") / "trace.json"
    events += [json.dumps(op("last", ts=n)) for n in range(20)]  # so that none is in the last piece
    file.write_text('{"traceEvents": [' + ", ".join(events) + "]}", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", piece)
        assert_same(file)


def test_pieces_that_python_reads_stand_in_their_place(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", 2000)
    taken = Taken(monkeypatch)
    odd = {50, 51, 120}
    args: list[dict[str, Any]] = [{"Fwd thread id": 1.5} if n in odd else {} for n in range(300)]
    events = [op(ts=n, **more) for n, more in enumerate(args)]
    found = read(file, compact([*events, kernel()]))
    assert found.column("ops", "event") == list(range(300))
    assert found.column("ops", "ts_ns") == [n * 1000 for n in range(300)]
    assert min(taken.pieces.values()) > 1


def test_any_piece_is_within_its_bounds() -> None:
    """Every beginning of a piece is refused, and nothing behind its end is read."""
    piece = json.dumps(event_of("kernel")).encode()
    columns = NativeColumns({}, None)  # type: ignore[arg-type] # nothing is interned
    for end in range(len(piece)):
        assert columns.scan(piece[:end], 0) is None
        assert columns.scan(piece[:end] + b"\x00" + piece[end + 1 :], 0) is None
    assert columns.row_count(0) == 0
