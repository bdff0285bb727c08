from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.agent.samplers.loop import MAX_FACTOR, Pace, SamplingLoop
from haiprof.agent.samplers.ranks import PlacementSampler, ProcessSampler
from haiprof.agent.samplers.registry import SAMPLERS
from haiprof.agent.samplers.table import (
    ALL_METRICS,
    REASONS_PER_METRIC,
    CounterState,
    Missing,
    MissingLog,
    Node,
    RankReports,
    TableSampler,
)
from haiprof.base.options import RECORDERS, Options
from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import SuspendWatch, boot_ns
from haiprof.linux.readings import Unavailable
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import read_json, read_lines, read_records
from haiprof.run_format.schema import Table
from haiprof.run_format.tables import COUNTER_TABLES, HOST
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.unit.analysis.recorded import row_of, write_run
from tests.unit.samplers.records import SimulatedTime

NODE = "node1"


class Scripted(TableSampler):
    """A sampler that does what a test says."""

    recorder = "host"
    every = 1
    table: Table = HOST
    read_limit_ns = 50_000_000

    def __init__(self, sample: Callable[[int], bytes], missing: Sequence[Missing] = ()) -> None:
        self.sample_count = 0
        self.is_open = False
        self._script = sample
        self._absent = list(missing)
        self.missing = MissingLog()

    def open(self) -> list[Missing]:
        self.is_open = True
        return self._absent

    def header(self) -> dict[str, object]:
        return {}

    def urgent(self) -> bool:
        return False

    def sample(self) -> bytes:
        self.sample_count += 1
        return self._script(self.sample_count)

    def drain_lines(self) -> list[Mapping[str, object]]:
        return []

    def states(self) -> list[CounterState]:
        return []

    def close(self) -> None:
        self.is_open = False


class ScriptedGpu(Scripted):
    recorder = "gpu"
    table = replace(HOST, name="gpu")


def record(number: int) -> bytes:
    return HOST.struct.pack(number, *([0] * (len(HOST.columns) - 1)))


def loop_for(
    run: RunPaths, recorder: tuple[str, ...] = ("host",), *, interval_s: float = 0.1, **more: Any
) -> SamplingLoop:
    options = Options(recorder=recorder, interval_s=dict.fromkeys(RECORDERS, interval_s))
    return SamplingLoop(run, NODE, options, **more)


def record_for(
    run: RunPaths, seconds: float, recorder: tuple[str, ...] = ("host",), **more: Any
) -> SamplingLoop:
    """Records for so long, as a clock says that moves by waiting alone."""
    stop = SimulatedTime(seconds)
    loop = loop_for(run, recorder, clock=stop.clock, **{"boot_clock": stop.clock, **more})
    loop.run(stop)
    return loop


def count(run: RunPaths, table: str) -> int:
    """How many records of a table there are; none before its file is."""
    path = run.node(NODE).records(table)
    return read_records(path).count if path.exists() else 0


def events(run: RunPaths, kind: str) -> list[dict[str, object]]:
    lines, notes = read_lines(run.node(NODE).events)
    assert notes == ()
    return [line for line in lines if line["type"] == kind]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    folder = tmp_path / "run"
    folder.mkdir()
    return RunPaths(folder)


def test_loop_records_what_the_options_name(run: RunPaths) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    record_for(run, 0.55, ("phases", "host", "gpu"), nvml=nvml)
    assert count(run, "host") == 7
    gpu = read_records(run.node(NODE).records("gpu"))
    assert gpu.count == 2 * 7
    assert gpu.header["host"] == NODE
    assert gpu.header["pid"] == os.getpid()
    assert [entity["key"] for entity in gpu.header["entities"]] == [[0], [1]]
    assert not run.node(NODE).records("process").exists()
    assert nvml.is_let_go_of()


def test_loop_samples_of_one_second_are_taken_in_one_wake_up(run: RunPaths) -> None:
    """Sources that began at other times, too; ranks are looked for once a second later on."""
    waits: list[int] = []

    class Counted(SimulatedTime):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(self.now)
            return super().wait(timeout)

    stop, seen = Counted(200), list[tuple[str, int]]()

    def sample(name: str, number: int) -> bytes:
        seen.append((name, stop.now))
        stop.now += 200_000_000 * (number == 1)  # its source answers late at first
        return record(number)

    samplers = [Scripted(partial(sample, "host")), ScriptedGpu(partial(sample, "gpu"))]
    loop_for(run, interval_s=1.0, samplers=samplers, clock=stop.clock, boot_clock=stop.clock).run(
        stop
    )
    times = {name: {at for other, at in seen if other == name} for name in ("host", "gpu")}
    assert len(times["host"]) == pytest.approx(200, abs=3)
    assert len(times["host"] ^ times["gpu"]) <= 4  # the first of each, and the last
    assert sum(at > 100 * NS_PER_S for at in waits) <= 105


def test_loop_short_job_has_a_first_and_a_last_sample(run: RunPaths) -> None:
    record_for(run, 0.3, interval_s=60)
    assert count(run, "host") == 2


def test_loop_reports_its_cost_at_the_end(run: RunPaths) -> None:
    record_for(run, 0.35)
    (cost,) = events(run, "cost")
    assert isinstance(cost["cpu_ns"], int)
    assert cost["cpu_ns"] > 0
    assert cost["elapsed_ns"] == pytest.approx(0.35e9, rel=0.3)
    assert (cost["dropped_bytes"], cost["slowed"]) == (0, {})


def test_loop_source_that_is_missing_is_an_event_and_no_file(run: RunPaths) -> None:
    record_for(run, 0.15, ("host", "gpu"), nvml=FakeNvml())
    missing = [line for line in events(run, "counter_missing") if line["source"] == "gpu"]
    assert [line["metric"] for line in missing] == [ALL_METRICS]
    assert not run.node(NODE).records("gpu").exists()
    assert count(run, "host") >= 2


def test_loop_sampler_that_fails_is_said_once_and_the_others_go_on(run: RunPaths) -> None:
    def fail(_: int) -> bytes:
        raise ZeroDivisionError("broken")

    broken, healthy = Scripted(fail), ScriptedGpu(record)
    record_for(run, 0.8, samplers=[broken, healthy])
    (error,) = events(run, "sampler_error")
    assert (error["source"], error["reason"]) == ("host", "ZeroDivisionError: broken")
    assert count(run, "gpu") >= 8
    assert broken.sample_count < healthy.sample_count  # a sampler that fails is asked less often
    assert not broken.is_open


def test_loop_full_disk_drops_records_and_never_raises(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write

    def write(fd: int, data: bytes) -> int:
        if b'"format"' not in data:  # neither a record nor a line
            raise OSError(28, "No space left on device")
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert record_for(run, 0.25).failure is None
    assert count(run, "host") == 0


def test_loop_without_a_writable_run_directory_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in str(record_for(RunPaths(tmp_path / "file"), 0.05).failure)


def test_loop_deleted_run_directory_is_no_error(run: RunPaths) -> None:
    def move(number: int) -> bytes:
        if number == 3:
            os.rename(run.root, run.root.with_name("moved"))
        return record(number)

    sampler = Scripted(move)
    assert record_for(run, 0.5, samplers=[sampler]).failure is None
    assert sampler.sample_count > 3


def test_samplers_have_a_recorder_and_a_table_of_their_own() -> None:
    assert {kind.recorder for kind in SAMPLERS} <= set(RECORDERS[1:])
    tables = {kind.table for kind in SAMPLERS}
    assert len(tables) == len(SAMPLERS)
    assert tables <= set(COUNTER_TABLES)


def test_loop_over_a_suspended_machine_keeps_rates_right_and_says_so(tmp_path: Path) -> None:
    run, stop = write_run(tmp_path / "run"), SimulatedTime(1)

    def boot_clock() -> int:
        """The machine sleeps for an hour, 0.3 s after the start."""
        return stop.now + (3600 * NS_PER_S if stop.now > 3e8 else 0)

    def steady(_: int) -> bytes:
        values = {"time_ns": stop.now, "disk_read_bytes": stop.now // 1000}
        return HOST.struct.pack(*row_of(HOST, **values))

    clocks: dict[str, Any] = {"clock": stop.clock, "boot_clock": boot_clock}
    loop_for(run, samplers=[Scripted(steady)], **clocks).run(stop)
    analyzer = Analyzer(run.root)
    rates = analyzer.counters().filter(metric="disk_read_bytes_per_s")["value"]
    assert len(rates) >= 9
    assert rates.to_list() == pytest.approx([1e6] * len(rates), rel=1e-3)
    (line,) = events(run, "suspend")
    assert line["gap_ns"] == 3600 * NS_PER_S
    (note,) = [note for note in analyzer.notes() if "suspended" in note]
    assert note.startswith(f"{NODE}: ")
    assert "60 min" in note


def test_suspend_watch_is_not_misled_by_a_thread_that_waited_between_its_readings() -> None:
    times = iter([0, 10, 20, 100, 5_000_000_100, 5_000_000_200, 5_000_000_300, 9_000_000_300,
                  9_000_000_400])  # fmt: skip
    watch = SuspendWatch(lambda: next(times), lambda: next(times))
    assert watch.gap_ns() == 0
    assert watch.gap_ns() == 0


def test_suspend_watch_tells_each_gap_once() -> None:
    clocks = {"mono": 1_000, "boot": 1_000}
    watch = SuspendWatch(lambda: clocks["mono"], lambda: clocks["boot"])
    clocks["boot"] += 7 * NS_PER_S
    assert watch.gap_ns() == 7 * NS_PER_S
    assert watch.gap_ns() == 0
    clocks["boot"] += 2 * NS_PER_S
    assert watch.gap_ns() == 2 * NS_PER_S


def test_suspend_watch_on_this_machine_sees_none() -> None:
    watch = SuspendWatch(time.perf_counter_ns, boot_ns)
    assert [watch.gap_ns() for _ in range(1000)] == [0] * 1000


def test_pace_keeps_its_grid_and_doubles_after_slow_reads() -> None:
    pace = Pace(100, 50, 0)
    pace.advance(107, 1)
    assert (pace.due_ns, pace.missed_count) == (200, 0)
    pace.advance(430, 1)
    assert (pace.due_ns, pace.missed_count) == (500, 2)
    for _ in range(10):
        pace.advance(pace.due_ns, 51)
    assert pace.factor == MAX_FACTOR
    for _ in range(30):
        pace.advance(pace.due_ns, 50)
    assert pace.factor == MAX_FACTOR // 2


def test_reasons_that_are_new_each_time_come_to_an_end() -> None:
    log = MissingLog()
    for number in range(10_000):
        log.note("instruction_count", Unavailable(f"{number} threads need more files"))
    log.note("cycle_count", Unavailable("another metric is still told"))
    told = log.drain()
    assert len(told) == REASONS_PER_METRIC + 1
    assert told[-1].metric == "cycle_count"
    log.note("instruction_count", Unavailable("1 threads need more files"))
    assert log.drain() == []


def test_samplers_of_ranks_list_the_folder_together_and_read_each_report_once(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rank(0).root.mkdir(parents=True)
    run.rank(0).report.write_text(json.dumps({"host": "elsewhere", "rank": 0}))
    now: list[int] = [0]
    listed: list[object] = []
    opened: list[Path] = []
    listdir, read = os.listdir, read_json

    def counted_listdir(path: Path) -> list[str]:
        listed.append(path)
        return listdir(path)

    def counted_read(path: Path) -> dict[str, Any]:
        opened.append(path)
        return read(path)

    monkeypatch.setattr(os, "listdir", counted_listdir)
    monkeypatch.setattr("haiprof.agent.samplers.table.read_json", counted_read)
    reports = RankReports(run.ranks, clock=lambda: now[0], fresh_ns=100)
    node = Node(run=run, host=NODE, reports=reports, clock=lambda: now[0])
    samplers = [kind(node) for kind in (ProcessSampler, PlacementSampler)]
    for sampler in samplers:
        sampler.open()
    assert (listed.count(run.ranks), len(opened)) == (1, 1)
    run.rank(1).root.mkdir()
    run.rank(1).report.write_text(json.dumps({"host": NODE, "rank": 1}))
    now[0] = 100
    assert [sampler.urgent() for sampler in samplers] == [True, True]
    assert listed.count(run.ranks) == 2
    for sampler in samplers:
        sampler.close()
