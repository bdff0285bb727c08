"""Traces that haiprof recorded: the files of one window, and the ranges added to them."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import haiprof
from haiprof.agent.trace_finisher import finish_parts
from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.in_job.windows.beside_profiler import PhaseTimes
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.phase_ranges import (
    KEY,
    LIMIT,
    PhaseRange,
    add_phases,
    pack_ranges,
    parse_ranges,
)
from haiprof.run_format.schema import BACKWARD, DATA, FORWARD, FORWARD_EVAL, ClockAnchor
from haiprof.run_format.writer import LineWriter
from haiprof.trace_analysis.report import standard_report
from haiprof.trace_format.find import trace_files, window_files
from tests.unit.launch.parts import GONE_PID, HOST, new_run, part_of, put_down


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path)


def end(run: RunPaths) -> None:
    manifest = read_manifest(run)
    write_manifest(run, replace(manifest, end_wall_ns=manifest.start_wall_ns + 1))


def finish(run: RunPaths) -> None:
    folder = run.node(HOST)
    folder.root.mkdir(exist_ok=True)
    writer = LineWriter(folder.events)
    finish_parts(run, writer.append)
    writer.close()


def ranks_and_starts(paths: list[Path]) -> list[tuple[int, int]]:
    stems = [path.name.split(".")[:2] for path in paths]
    return [(int(left[4 : left.index("_")]), int(start)) for left, start in stems]


def test_analysis_opens_a_run_with_the_traces_of_all_its_ranks(run: RunPaths) -> None:
    for rank in (0, 1, 10):
        put_down(part_of(run, rank), et="{}")
    finish(run)
    assert list(haiprof.TraceAnalysis(run.root).files) == [0, 1, 10]
    assert standard_report(run.root).ranks == (0, 1, 10)
    assert standard_report(run.root, rank=10).ranks == (10,)


def test_window_is_chosen_by_its_start(run: RunPaths) -> None:
    for window in (0, 1, 2):
        for rank in (0, 1):
            start = 1000 * window + rank + 1
            put_down(part_of(run, rank, start=start), window=window)
    finish(run)
    assert ranks_and_starts(window_files(run.root)) == [(0, 2001), (1, 2002)]
    assert ranks_and_starts(window_files(run.root, 0)) == [(0, 1), (1, 2)]
    assert ranks_and_starts(window_files(run.traces, 1)) == [(0, 1001), (1, 1002)]
    assert len(trace_files(run.root)) == 6
    assert standard_report(run.root, window=0).ranks == (0, 1)
    with pytest.raises(MissingDataError, match="no window 3"):
        window_files(run.root, 3)


def test_window_that_one_rank_missed_keeps_the_others_together(run: RunPaths) -> None:
    put_down(part_of(run, 0, start=1), window=0)  # rank 1 refused it
    put_down(part_of(run, 0, start=11), window=1)
    put_down(part_of(run, 1, start=12), window=1)
    finish(run)
    assert ranks_and_starts(window_files(run.root)) == [(0, 11), (1, 12)]
    assert ranks_and_starts(window_files(run.root, 0)) == [(0, 1)]


def test_newest_window_that_is_still_being_written_is_not_the_default(run: RunPaths) -> None:
    for rank in (0, 1):
        put_down(part_of(run, rank, start=1), window=0)
    put_down(part_of(run, 0, start=50), window=1)
    finish(run)
    assert ranks_and_starts(window_files(run.root)) == [(0, 1), (1, 1)]


def test_windows_of_a_restarted_rank_are_told_apart(run: RunPaths) -> None:
    put_down(part_of(run, 0, start=1), window=0, attempt=0)
    put_down(part_of(run, 0, start=70, pid=GONE_PID + 1), window=0, attempt=1)
    finish(run)
    assert ranks_and_starts(window_files(run.root)) == [(0, 70)]
    assert ranks_and_starts(window_files(run.root, 0)) == [(0, 1)]


def test_windows_are_counted_where_the_events_are_lost(run: RunPaths) -> None:
    for start in (1, 50):
        for rank in (0, 1):
            put_down(part_of(run, rank, start=start))
    finish(run)
    run.node(HOST).events.write_text("garbage")
    assert ranks_and_starts(window_files(run.root)) == [(0, 50), (1, 50)]


def test_raw_traces_of_an_ended_run_are_read_as_they_are(run: RunPaths) -> None:
    put_down(part_of(run, 0))
    finish(run)
    raw = put_down(part_of(run, 1))
    part_of(run, 2).raw.write_text('{"half')  # no sidecar: not whole
    assert list(haiprof.TraceAnalysis(run.root).files) == [0]  # it is being compressed
    end(run)
    found = haiprof.TraceAnalysis(run.root).files
    assert list(found) == [0, 1]
    assert found[1].path == raw.raw


def test_parts_that_nobody_touched_for_long_are_read(run: RunPaths) -> None:
    part = put_down(part_of(run))
    with pytest.raises(TraceFormatError) as error:
        trace_files(run.root)
    assert "being compressed" in error.value.hint
    long_ago = time.time() - 3600
    os.utime(part.sidecar, (long_ago, long_ago))
    assert trace_files(run.root) == [part.raw]


def test_finished_trace_goes_before_its_left_over_parts(run: RunPaths) -> None:
    part = put_down(part_of(run))
    finish(run)
    put_down(part)
    end(run)
    assert trace_files(run.root) == [part.trace]


def test_other_traces_have_no_windows(tmp_path: Path) -> None:
    for name in ("a.json", "rank1.json"):
        (tmp_path / name).write_text(json.dumps({"traceEvents": []}))
    assert len(window_files(tmp_path)) == 2
    with pytest.raises(MissingDataError, match="no haiprof run"):
        window_files(tmp_path, 1)


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


@pytest.mark.parametrize("packed", [
    None, 3, "", "null", "{}", "[1]", "[[0,1]]", "[[2,1,1]]", '[["a",1,1]]', "[[0,Infinity,1]]",
    "[[0,NaN,1]]", "[" * 100_000, '[[0,"x",1]]', "[null]",
])  # fmt: skip
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
