"""What `haiprof node` keeps: hours, days and months on a clock of the test's own."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from haiprof.agent.samplers.loop import Stream
from haiprof.agent.samplers.table import Node, TableSampler
from haiprof.base.units import NS_PER_S
from haiprof.linux.readings import Entity, Reading
from haiprof.live.node import NodeHistory
from haiprof.run_analysis.counters import _growth as growth_of_all
from haiprof.run_analysis.node_history import read_history
from haiprof.run_format.layout import NodePaths, RunPaths
from haiprof.run_format.node_history import TIERS, Tier, history_table
from haiprof.run_format.reader import read_records
from haiprof.run_format.schema import NULL_I64, ClockAnchor, counter_end, growth
from haiprof.run_format.tables import NUMA

START_NS = 1_800_000_000 * NS_PER_S + 123_456_789
DAY_S = 86_400
LIMIT_BYTES = 100_000_000
MISSING_FROM, MISSING_TO = 0.90, 0.93
GAP_FROM, GAP_TO = 0.96, 0.97
RESET_AT = 0.95


class Numa(TableSampler):
    """NUMA nodes whose counters are what a test says."""

    recorder = "numa"
    table = NUMA

    def __init__(self, clock: Callable[[], int], read: Callable[[], list[int | None]]) -> None:
        super().__init__(Node(clock=clock))
        self._read_all = read

    def find(self) -> list[Entity]:
        columns = tuple(column.name for column in NUMA.metrics)
        reading = Reading(columns=columns, origin="the test", read=self._read_all)
        return [Entity(key=(0,), name="node 0", readings=(reading,))]


class Recorded:
    """One source that is recorded on a clock of its own."""

    def __init__(self, root: Path, interval_s: int = 1, *, limit: int = LIMIT_BYTES) -> None:
        root.mkdir(exist_ok=True)
        self.node = RunPaths(root).node("node1")
        self.node.root.mkdir(parents=True, exist_ok=True)
        self.mono_ns = 5 * NS_PER_S
        self.offset_ns = START_NS
        self.values: list[int | None] = [None] * len(NUMA.metrics)
        self.notes: list[dict[str, Any]] = []
        self.history = NodeHistory(
            self.node, limit, note=lambda line: self.notes.append(dict(line)),
            clock=lambda: self.mono_ns + self.offset_ns,
        )  # fmt: skip
        self.stream = Stream(
            Numa(lambda: self.mono_ns, lambda: self.values),
            interval_s * NS_PER_S,
            clock=lambda: self.mono_ns,
            report=lambda line: None,
            open_writer=self.history.open_source,
        )
        assert self.stream.start(self.node, ClockAnchor(0, 0), {})

    def sample(self, values: list[int | None], after_ns: int) -> None:
        self.mono_ns += after_ns
        self.values = values
        self.stream.sample_if_due(self.mono_ns)

    def size(self, tier: Tier) -> int:
        files = self.node.history_files("numa", tier.name)
        return sum(path.stat().st_size for _, path in files)


def series(count: int) -> npt.NDArray[np.int64]:
    """Counters that grow by what is random, one of which is set back, and gauges."""
    random = np.random.default_rng(7)
    values = np.cumsum(random.integers(0, 5_000, (count, len(NUMA.metrics))), axis=0)
    values[:, :2] = random.integers(1, 1 << 38, (count, 2))
    values[int(count * MISSING_FROM) : int(count * MISSING_TO), [1, 3]] = NULL_I64
    values[int(count * RESET_AT) :, 4] -= values[int(count * RESET_AT), 4]
    return values


def record(run: Recorded, values: npt.NDArray[np.int64], interval_s: int) -> npt.NDArray[np.int64]:
    """Records them but for a time in which nobody did; Unix time of each sample, 0 for none."""
    times = np.zeros(len(values), dtype=np.int64)
    waited = 0
    for place, row in enumerate(values.tolist()):
        waited += interval_s * NS_PER_S
        if not GAP_FROM <= place / len(values) < GAP_TO:
            run.sample([None if value == NULL_I64 else value for value in row], waited)
            times[place], waited = run.mono_ns + run.offset_ns, 0
    run.stream.close()
    return times


def expect(
    values: npt.NDArray[np.int64], times: npt.NDArray[np.int64], column: int, tier: Tier
) -> dict[int, tuple[float, float, float]]:
    """Mean, least and greatest of each time by numpy, from the raw counters alone."""
    taken = times > 0
    raw, at = values[taken, column].astype(float), times[taken]
    raw[values[taken, column] == NULL_I64] = np.nan
    weight = np.ones(len(raw))
    if counter_end(NUMA.metrics[column].kind) is not None:
        elapsed = np.diff(at, prepend=np.nan) / NS_PER_S
        usual = np.nanmedian(elapsed)
        raw = np.diff(raw, prepend=np.nan) / elapsed
        raw[(raw < 0) | (elapsed > 30 * usual)] = np.nan
        weight = elapsed
    known = np.isfinite(raw)
    raw, at, weight = raw[known], at[known], weight[known]
    bucket = at if tier is TIERS[0] else at // tier.interval_ns * tier.interval_ns
    begins, starts = np.unique(bucket, return_index=True)
    total, weights = np.add.reduceat(raw * weight, starts), np.add.reduceat(weight, starts)
    low, high = np.minimum.reduceat(raw, starts), np.maximum.reduceat(raw, starts)
    rows = zip((total / weights).tolist(), low.tolist(), high.tolist(), strict=True)
    return dict(zip(begins.tolist(), rows, strict=True))


def stored(node: NodePaths, tier: Tier, metric: str) -> dict[int, tuple[float, ...]]:
    """The rows of a tier as they are in its files."""
    own = history_table(NUMA, tier)
    names = [column.name for column in own.columns]
    value = [name for name in names if name.rpartition(".")[0] == metric]
    found = {}
    for _, path in node.history_files("numa", tier.name):
        for row in own.struct.iter_unpack(read_records(path).data):
            one = dict(zip(names, row, strict=True))
            if not math.isnan(one[value[0]]):
                found[one["time_ns"]] = tuple(one[name] for name in (value * 3)[:3])
    return found


@pytest.mark.parametrize(("hours", "interval_s"), [
    (8, 1), (5 * 24, 120), (240 * 24, 3600),  # in each, one more tier is full and begins anew
    *(pytest.param(*case, marks=pytest.mark.proof)
      for case in ((24, 1), (30 * 24, 120), (365 * 24, 1800))),
])  # fmt: skip
def test_history_is_what_numpy_says_and_no_larger_than_stated(
    tmp_path: Path, hours: int, interval_s: int
) -> None:
    run = Recorded(tmp_path / "logs", interval_s)
    values = series(hours * 3600 // interval_s)
    times = record(run, values, interval_s)
    for place, tier in enumerate(TIERS):
        files = run.history.files["numa"][place]
        assert run.size(tier) <= files.most_bytes
        rows = tier.kept_ns // max(tier.interval_ns, interval_s * NS_PER_S)
        assert files.kept_bytes == rows * history_table(NUMA, tier).record_bytes
        assert files.most_bytes <= files.kept_bytes * 7 / 6 + 7 * 3_000
        times_kept = sum(
            read_records(path).count for _, path in run.node.history_files("numa", tier.name)
        )
        assert times_kept >= min(rows, len(np.unique(times[times > 0] // tier.interval_ns)))
        for column, metric in ((1, "memory_free_bytes"), (3, "miss_page_count_per_s"),
                               (4, "foreign_page_count_per_s")):  # fmt: skip
            found, right = stored(run.node, tier, metric), expect(values, times, column, tier)
            first = min(found)
            kept = [time for time in right if time >= first]
            assert sorted(found) == kept, "what is missing has no row, and all else has one"
            got = np.array([found[time] for time in kept])
            np.testing.assert_allclose(got, [right[time] for time in kept], rtol=2e-6, atol=1e-9)


def test_limit_is_never_exceeded_and_the_oldest_goes_first(tmp_path: Path) -> None:
    limit = 60_000
    run = Recorded(tmp_path / "logs", limit=limit)
    for number in range(4_000):
        run.sample([number] * len(NUMA.metrics), NS_PER_S)
        assert run.history.size_bytes <= limit
    run.stream.close()
    assert sum(run.size(tier) for tier in TIERS) <= limit
    assert max(stored(run.node, TIERS[0], "memory_free_bytes").values()) == (3_999.0,) * 3


def test_clock_that_is_set_is_said_and_loses_nothing(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "logs")
    for jump_s in (0, 10 * 365 * DAY_S, -10 * 365 * DAY_S, -3 * 3600):
        run.offset_ns += jump_s * NS_PER_S
        for number in range(30):
            run.sample([100 * number + 100] * len(NUMA.metrics), NS_PER_S)
    run.stream.close()
    assert [round(note["by_ns"] / NS_PER_S) for note in run.notes if note["type"] == "clock_set"] \
        == [10 * 365 * DAY_S, -10 * 365 * DAY_S, -3 * 3600]  # fmt: skip
    rates = stored(run.node, TIERS[0], "miss_page_count_per_s")
    assert len(rates) >= 4 * 28
    assert {value[0] for value in rates.values()} == {100.0}
    now_ns = run.mono_ns + run.offset_ns
    rows, notes = read_history(run.node, since_ns=0, until_ns=now_ns, step_ns=NS_PER_S)
    assert notes == ()
    assert rows["time_ns"].max() == now_ns // NS_PER_S * NS_PER_S, (
        "no row of the year 2037 hides it"
    )


def test_agent_that_starts_again_goes_on_after_what_is_there(tmp_path: Path) -> None:
    for start in range(3):
        run = Recorded(tmp_path / "logs")
        run.mono_ns += start * 3600 * NS_PER_S
        for number in range(90):
            run.sample([1000 * number + 1000] * len(NUMA.metrics), NS_PER_S)
        run.stream.close()
    assert len(run.node.history_files("numa", "10s")) == 3
    until_ns = run.mono_ns + run.offset_ns
    rows, _ = read_history(run.node, since_ns=0, until_ns=until_ns, step_ns=60 * NS_PER_S)
    rates = rows.filter(pl.col("metric") == "miss_page_count_per_s")
    assert rates["entity"].unique().to_list() == ["node 0"]
    assert set(rates["mean"].round(3)) == {1000.0}


def test_full_disk_is_said_and_recording_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Recorded(tmp_path / "logs")
    run.sample([1] * len(NUMA.metrics), NS_PER_S)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(200):
        run.sample([2] * len(NUMA.metrics), NS_PER_S)
    assert [note["type"] for note in run.notes] == ["disk_full"]
    assert run.stream.dropped_bytes > 0
    monkeypatch.setattr(os, "write", write)
    for _ in range(100):
        run.sample([3] * len(NUMA.metrics), NS_PER_S)
    run.stream.close()
    assert [note["type"] for note in run.notes] == ["disk_full", "disk_again"]
    kept = [value[0] for value in stored(run.node, TIERS[0], "memory_free_bytes").values()]
    assert kept.count(2) == 0
    assert kept.count(3) >= 39  # a file that could not be begun is tried again after a minute


@pytest.mark.parametrize("kind", ["counter", "counter32", "sticky16", "sticky32x4"])
def test_growth_of_two_samples_is_that_of_a_whole_series(kind: str) -> None:
    end = counter_end(kind)
    assert end is not None
    top = min(end.scale * ((1 << end.bits) - 1), (1 << 62))
    random = np.random.default_rng(3)
    values = random.choice([0, 1, top // 3, top // 2, top - 1, top, NULL_I64], 400).astype(np.int64)
    whole, _ = growth_of_all(values, np.append(False, np.ones(399, dtype=bool)), *end)
    each = [growth(int(a), int(b), end) for a, b in itertools.pairwise(values)]
    np.testing.assert_array_equal([math.nan if x is None else float(x) for x in each], whole[1:])
