"""Forward and backward ranges of a finished trace: their times are exact, damage adds nothing."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from haiprof.in_job.windows.phase_times import PhaseTimes
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.phase_ranges import (
    KEY,
    LIMIT,
    PhaseRange,
    add_phases,
    pack_ranges,
    parse_ranges,
)
from haiprof.run_format.schema import BACKWARD, DATA, FORWARD, FORWARD_EVAL

WALL_NS = 1_790_857_000_123_456_789
RANGES = [
    PhaseRange(name="forward", start_wall_ns=WALL_NS + 1_001, duration_ns=2_000_003),
    PhaseRange(name="backward", start_wall_ns=WALL_NS + 3_000_000, duration_ns=999),
]


def added(text: str, ranges: list[PhaseRange] = RANGES) -> str:
    pieces = add_phases(io.BytesIO(text.encode()), ranges, pid=7, tid=8)
    return b"".join(pieces).decode()


def test_ranges_stand_before_the_events_on_the_traces_clock() -> None:
    head = '{"baseTimeNanoseconds": 1790856000000000000, "traceEvents": [\n  '
    whole = added(head + '{"ph": "X", "name": "aten::add", "ts": 1.5, "dur": 2}], "more": 1}')
    trace: dict[str, Any] = json.loads(whole)
    first, second, last = trace["traceEvents"]
    assert (first["name"], second["name"], last["name"]) == ("forward", "backward", "aten::add")
    assert {first["cat"], second["cat"]} == {"user_annotation"}
    assert (first["pid"], first["tid"]) == (7, 8)
    assert '"ts": 1000123457.790, "dur": 2000.003' in whole
    assert '"ts": 1000126456.789, "dur": 0.999' in whole
    assert trace["more"] == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", "not a trace", '{"traceEvents": []}', '{"traceEvents": [ ] }', '{"traceEvents": ['],
)
def test_text_without_events_comes_as_it_is(text: str) -> None:
    assert added(text) == text


def test_sidecar_holds_the_ranges_in_a_few_bytes_each() -> None:
    packed = pack_ranges(RANGES * LIMIT, since_ns=WALL_NS)
    assert parse_ranges(packed, since_ns=WALL_NS) == (RANGES * LIMIT)[:LIMIT]
    assert len(packed) < 600_000


@pytest.mark.parametrize(
    "packed",
    [
        None, 3, "", "null", "{}", "[1]", "[[0,1]]", "[[2,1,1]]", '[["a",1,1]]', "[[0,Infinity,1]]",
        "[[0,NaN,1]]", "[" * 100_000, '[[0,"x",1]]', "[null]",
    ],
)  # fmt: skip
def test_damaged_ranges_are_none(packed: object) -> None:
    assert parse_ranges(packed, since_ns=WALL_NS) == []
    assert parse_ranges("[[0,1,1]]", since_ns=None) == []


def test_pass_in_evaluation_mode_counts_where_a_backward_pass_follows() -> None:
    phases, clock = PhaseTimes(), ClockAnchor.now()
    for kind in (FORWARD, BACKWARD, FORWARD_EVAL, FORWARD_EVAL, FORWARD, DATA, BACKWARD):
        phases.begin(kind, lambda: None)()
    phases.begin(FORWARD_EVAL, lambda: None)()
    phases.begin(BACKWARD, lambda: None)()
    phases.begin(FORWARD, lambda: None)  # it does not end: the window is cut inside
    found = parse_ranges(phases.as_json(clock)[KEY], since_ns=clock.wall_ns)
    names = [each.name for each in found]
    assert names == ["forward", "backward"] * 3
    starts = [each.start_wall_ns for each in found]
    assert starts == sorted(starts)
    assert 0 <= starts[0] - clock.wall_ns < 1_000_000_000
