"""What the launcher notices in the ranks' files, with steps written at simulated times."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pytest

from haiprof.agent.node_agent import LiveRank
from haiprof.agent.step_watch import EARLY_HANG_NS, HANG_FLOOR_NS, IDLE_START_NS, Alarm, Watch
from haiprof.base.trace_options import HangLimit
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.linux.processes import Process
from haiprof.linux.procfs import TICK_NS
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.schema import (
    BACKWARD,
    DATA,
    DATA_END,
    EVAL,
    FORWARD,
    GC,
    OPTIMIZER,
    PHASES,
    SAVE,
    TAG_BITS,
    ClockAnchor,
)
from haiprof.run_format.writer import LineWriter, RecordWriter
from tests.sampling import variants

LOOK_NS = 2 * NS_PER_S
STEP_NS = 100 * NS_PER_MS
Span = tuple[int, int]
"""Kind and length in ns."""


class Rank:
    """A rank that writes what its training does; time passes only by what it does."""

    def __init__(self, folder: Path, rank: int = 0, pid: int = 100) -> None:
        folder.mkdir(parents=True)
        self.rank, self.pid, self.paths = rank, pid, RankPaths(folder)
        self.steps: int | None = None
        """What it tells when it is asked; it is an older one where it tells nothing."""
        self.told: int | None = None
        self._clock = ClockAnchor(0, 0)
        self._records = RecordWriter(self.paths.phases, PHASES, clock=self._clock, extra={})
        self._lines = LineWriter(self.paths.events)

    def write(self, spans: Iterable[tuple[int, int, int, int]]) -> None:
        """(kind, tag, start, end) in ns."""
        for kind, tag, start, end in spans:
            packed = (start << TAG_BITS | kind, end << TAG_BITS | tag)
            self._records.append(PHASES.struct.pack(*packed))

    def say(self, **line: object) -> None:
        self._lines.append(line)


class World:
    """Ranks, the watch over them, and the clock of both."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int = 1,
        hang: HangLimit = HangLimit(),  # noqa: B008
        record_s: float = 0.0,
        warmup_s: float = 0.0,
    ) -> None:
        self.now = 1_000 * NS_PER_S
        self._looked = self.now
        self.proc = folder / "proc"
        self.starts_work, self.states = True, dict[int, str]()
        self.ranks = [Rank(folder / str(rank), rank, 100 + rank) for rank in range(ranks)]
        for rank in self.ranks:
            self.set_state(rank.pid, "S")
        self.watch = Watch(
            0.2, hang, record_s=record_s, warmup_s=warmup_s,
            clock=lambda: self.now, proc=self.proc,
        )  # fmt: skip
        self.alarms: list[Alarm] = []
        self.starts: list[Process] = []
        self.asked = 0

    def set_state(self, pid: int, letter: str) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        self.states[pid] = letter
        ticks = self.now // TICK_NS if self.starts_work else 0
        (folder / "stat").write_text(f"{pid} (python) {letter} 1 1" + f" {ticks}" * 47)

    def look(self) -> None:
        self._looked = self.now
        for start in self.starts:
            self.set_state(start.pid, self.states[start.pid])
        self.alarms += self.watch.look(self)

    def live_ranks(self) -> list[LiveRank]:
        return [LiveRank(rank.rank, rank.pid, rank.paths, rank.told) for rank in self.ranks]

    def ask_steps(self, pids: Collection[int]) -> None:
        for rank in self.ranks:
            if rank.pid in pids:
                rank.told, self.asked = rank.steps, self.asked + 1

    def starting(self) -> list[Process]:
        return self.starts

    def start(self, *pids: int) -> None:
        """Processes load torch."""
        self.starts = [
            Process(pid=pid, parent=1, start_ticks=1, command=(), environ={}, python=11)
            for pid in pids
        ]
        for pid in pids:
            self.set_state(pid, "S")

    def wait(self, ns: int) -> None:
        """Nobody writes; the launcher looks as usual."""
        end = self.now + ns
        while self.now < end:
            self.now = min(end, self.now + LOOK_NS)
            self.look()

    def do(self, *spans: Span, tag: int = 0) -> None:
        """All ranks do the same."""
        for kind, ns in spans:
            start, self.now = self.now, self.now + ns
            for rank in self.ranks:
                rank.write([(kind, tag, start, self.now)])
            if self.now - self._looked >= LOOK_NS:
                self.look()

    def train(self, times_ns: Iterable[float]) -> None:
        for ns in times_ns:
            self.do(*step(round(ns)))

    @property
    def triggers(self) -> list[str]:
        return [alarm.trigger for alarm in self.alarms]


def step(ns: int, *inside: Span) -> Sequence[Span]:
    part = ns // 10
    return [(DATA, part), (FORWARD, 4 * part), *inside, (BACKWARD, 4 * part), (OPTIMIZER, part)]


def jittered(count: int, mean_ns: float, ratio: float, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [mean_ns * max(0.5, chance.gauss(1, ratio)) for _ in range(count)]


@pytest.mark.parametrize("jitter", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("mean_ms", [5, 100, 1000])
@pytest.mark.parametrize("seed", range(2))
def test_steps_slower_by_a_quarter_are_noticed(
    tmp_path: Path, mean_ms: int, jitter: float, seed: int
) -> None:
    world, mean = World(tmp_path), mean_ms * NS_PER_MS
    before = max(150, 10_000 // mean_ms)
    world.train(jittered(before, mean, jitter, seed))
    assert world.triggers == []
    world.train(jittered(max(60, 10_000 // mean_ms), 1.25 * mean, jitter, seed + 100))
    assert world.triggers == ["slow"], "once, and not again while they stay so"
    (alarm,) = world.alarms
    assert alarm.step is not None
    assert abs(alarm.step - before) <= 3 + 40 * jitter * max(1, 100 // mean_ms)
    grown = alarm.numbers["after_ns"] / alarm.numbers["before_ns"]
    assert grown == pytest.approx(1.25, abs=0.04 + 0.6 * jitter)


@pytest.mark.parametrize("jitter", [0.0, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_tenth_or_jitter_alone_is_not_called_slower(
    tmp_path: Path, jitter: float, seed: int
) -> None:
    world = World(tmp_path)
    world.train(jittered(400, STEP_NS, jitter, seed))
    world.train(jittered(400, 1.1 * STEP_NS, min(jitter, 0.1), seed + 100))
    assert world.triggers == []


def test_slower_is_noticed_within_thirty_steps(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train(jittered(100, NS_PER_S, 0.03, 1))
    world.train(jittered(30, 1.25 * NS_PER_S, 0.03, 2))
    assert world.triggers == ["slow"]


def test_slow_drift_is_measured_against_the_fastest_pace_kept(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train(STEP_NS * (1 + 0.3 * n / 4000) for n in range(4000))
    assert world.triggers == ["slow"]


def test_evaluations_saves_and_epochs_are_told_apart(tmp_path: Path) -> None:
    world = World(tmp_path)
    for epoch in range(12):
        world.train([STEP_NS] * 40)
        world.do((DATA_END, NS_PER_MS))
        for _ in range(30):
            world.do((DATA, NS_PER_MS), (EVAL, 200 * NS_PER_MS))
        world.do((SAVE, (5 + epoch) * NS_PER_S))
        for _ in range(15):
            world.do(*step(STEP_NS, (SAVE, STEP_NS)))
    assert world.triggers == []


def test_teacher_that_runs_in_every_step_is_part_of_the_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    for ns in [STEP_NS] * 100 + [round(1.3 * STEP_NS)] * 60:
        world.do(*step(ns, (EVAL, ns // 2)))
    assert world.triggers == ["slow"]


def test_two_optimizers_in_turn_are_one_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(300):
        world.do(*step(STEP_NS), tag=0)
        world.do(*step(3 * STEP_NS), tag=1)
    assert world.triggers == []


def test_traced_steps_are_not_called_slower(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train([STEP_NS] * 100)
    world.ranks[0].say(type="trace_begin", time_ns=world.now)
    world.train([2 * STEP_NS] * 100)
    world.ranks[0].say(type="trace_window", time_ns=world.now, state="recorded")
    world.train([STEP_NS] * 100)
    assert world.triggers == []
    world.train([1.3 * STEP_NS] * 60)
    assert world.triggers == ["slow"]


def test_silence_beyond_the_limit_is_a_hang_once(tmp_path: Path) -> None:
    world = World(tmp_path, ranks=2, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 30)
    world.wait(9 * NS_PER_S)
    assert world.triggers == []
    world.wait(100 * NS_PER_S)
    assert world.triggers == ["hang"]
    assert world.alarms[0].step == 29
    world.train([STEP_NS] * 30)
    world.wait(20 * NS_PER_S)
    assert world.triggers == ["hang", "hang"], "it went on, and stands still again"


def test_a_hang_goes_on_until_a_step_ends_though_other_spans_end_before(tmp_path: Path) -> None:
    """A rank that is ended writes the span that it hung in."""
    world = World(tmp_path, ranks=2, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 30)
    world.wait(20 * NS_PER_S)
    assert world.watch.is_hanging
    assert not world.watch.has_gone_on
    world.do((BACKWARD, 3 * NS_PER_S))
    assert not world.watch.is_hanging
    assert not world.watch.has_gone_on
    world.train([STEP_NS] * 3)
    world.look()
    assert world.watch.has_gone_on


def test_limit_grows_with_the_longest_time_between_signs_of_life(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train([STEP_NS] * 30)
    world.do((SAVE, 100 * NS_PER_S))
    world.train([STEP_NS] * 30)
    world.wait(490 * NS_PER_S)
    assert world.triggers == []
    world.wait(30 * NS_PER_S)
    assert world.triggers == ["hang"]
    assert "5 times the longest" in world.alarms[0].reason


def test_evaluation_counts_as_life_and_collections_do_not(tmp_path: Path) -> None:
    world = World(tmp_path, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 30)
    for _ in range(20):
        world.do((EVAL, 5 * NS_PER_S))
    assert world.triggers == []
    for _ in range(20):
        world.do((GC, NS_PER_S))
    assert world.triggers == ["hang"]


def test_job_that_ends_after_a_long_last_phase_is_no_hang(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train([STEP_NS] * 30)
    world.wait(HANG_FLOOR_NS - 10 * NS_PER_S)
    world.ranks[0].say(type="record_end", time_ns=world.now, reason="exit")
    world.wait(10 * HANG_FLOOR_NS)
    assert world.triggers == []


def test_rank_that_writes_no_spans_any_more_or_never_did_is_no_hang(tmp_path: Path) -> None:
    world = World(tmp_path, hang=HangLimit(seconds=10), record_s=60)
    world.wait(100 * NS_PER_S)  # phases are not recorded, or the warm-up goes on
    world.train([STEP_NS] * 600)
    world.wait(100 * NS_PER_S)  # its time is up, and a trace window is waited for
    assert world.triggers == []


@pytest.mark.parametrize(
    ("hang", "limit_s"),
    [
        (HangLimit(seconds=10), 50),
        *variants((HangLimit(seconds=300), 1500), (HangLimit(seconds=1680), 1680),
                  (HangLimit(seconds=3600), 3600), (HangLimit(factor=5), 1680)),
    ],
)  # fmt: skip
def test_first_step_may_take_longer_than_others(
    tmp_path: Path, hang: HangLimit, limit_s: int
) -> None:
    begun = World(tmp_path / "a", hang=hang)
    begun.ranks[0].write([(FORWARD, 0, begun.now, begun.now + 1)])
    waiting = World(tmp_path / "b", ranks=0, hang=hang)
    waiting.start(7, 8)
    for world in (begun, waiting):
        world.wait((limit_s - 1) * NS_PER_S)
        assert world.triggers == []
        world.wait(limit_s * NS_PER_S)
        assert world.triggers == ["hang"]
        assert "no first step for" in world.alarms[0].reason
        assert world.alarms[0].step is None


@pytest.mark.parametrize(
    ("hang", "limit_s"), [(HangLimit(), IDLE_START_NS / NS_PER_S), (HangLimit(seconds=10), 10)]
)
def test_processes_that_use_no_cpu_before_any_first_step_hang(
    tmp_path: Path, hang: HangLimit, limit_s: float
) -> None:
    world = World(tmp_path, ranks=0, hang=hang)
    world.start(7, 8)
    world.wait(round(2 * limit_s) * NS_PER_S)
    world.starts_work = False
    world.wait(round(limit_s / 2) * NS_PER_S)
    assert world.triggers == []
    world.wait(130 * NS_PER_S)
    assert world.triggers == ["hang"], "once"
    assert "of a core" in world.alarms[0].reason


def test_processes_that_come_and_go_or_are_stopped_do_not_wait_for_a_first_step(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, ranks=0)
    for pid in range(1000, 1030):
        world.start(pid)
        world.wait(EARLY_HANG_NS // 20)
    world.set_state(1029, "T")
    world.wait(2 * EARLY_HANG_NS)
    world.set_state(1029, "S")
    world.wait(EARLY_HANG_NS - 200 * NS_PER_S)
    world.now += EARLY_HANG_NS  # Ctrl-Z
    world.look()
    assert world.triggers == []
    world.wait(400 * NS_PER_S)
    assert world.triggers == ["hang"]


def test_ranks_that_started_again_and_stand_still_before_their_first_step_hang_again(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 100)
    world.wait(30 * NS_PER_S)
    world.ranks = []
    world.start(300)
    world.wait(8 * NS_PER_S)
    assert world.triggers == ["hang"]
    world.wait(40 * NS_PER_S)
    assert world.triggers == ["hang", "hang"]


@pytest.mark.parametrize(
    ("hang", "limit_s"), [(HangLimit(), HANG_FLOOR_NS / NS_PER_S), (HangLimit(seconds=100), 210)]
)
def test_restart_that_takes_many_times_as_long_as_the_first_start_hangs(
    tmp_path: Path, hang: HangLimit, limit_s: float
) -> None:
    world = World(tmp_path, hang=hang)
    ranks, world.ranks = world.ranks, []
    world.start(100)
    world.wait(40 * NS_PER_S)
    world.ranks = ranks
    world.train([STEP_NS] * 100)
    world.ranks = []
    world.start(300)
    world.wait(round((limit_s - 1) * NS_PER_S))
    assert world.triggers == []
    world.wait(70 * NS_PER_S)
    assert world.triggers == ["hang"]
    assert "no first step for" in world.alarms[0].reason
    assert "the start before took 42.0 s" in world.alarms[0].reason


def test_rank_whose_recording_has_ended_is_asked_seldom_whether_it_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path, hang=HangLimit(seconds=10), record_s=20)
    world.train([STEP_NS] * 150)
    assert world.asked == 0, "its files tell"
    (rank,) = world.ranks
    rank.steps = 200
    rank.say(type="record_end", time_ns=world.now, reason="time")
    for _ in range(10):
        world.wait(40 * NS_PER_S)
        rank.steps += 1
    assert world.triggers == []
    assert world.asked < 100
    world.wait(60 * NS_PER_S)
    assert world.triggers == ["hang"]
    assert "no optimizer step for" in world.alarms[0].reason
    assert "without a recording" in world.alarms[0].reason


def test_loop_without_optimizer_steps_is_not_judged_by_them(tmp_path: Path) -> None:
    world = World(tmp_path, hang=HangLimit(seconds=10), record_s=20)
    world.train([STEP_NS] * 150)
    world.ranks[0].steps = 0
    world.ranks[0].say(type="record_end", time_ns=world.now, reason="time")
    world.wait(1000 * NS_PER_S)
    assert world.triggers == []


def test_warm_up_is_no_hang_while_optimizer_steps_end(tmp_path: Path) -> None:
    world = World(tmp_path, hang=HangLimit(seconds=10), warmup_s=100)
    (rank,) = world.ranks
    rank.steps = 0
    world.wait(140 * NS_PER_S)  # a loop without optimizer steps would write spans by now
    rank.steps = 1
    world.wait(45 * NS_PER_S)
    rank.steps = 2
    world.wait(45 * NS_PER_S)
    assert world.triggers == []
    world.wait(20 * NS_PER_S)
    assert world.triggers == ["hang"]


def test_one_rank_that_goes_on_is_no_hang(tmp_path: Path) -> None:
    world = World(tmp_path, ranks=2, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 30)
    for _ in range(30):
        start, world.now = world.now, world.now + NS_PER_S
        world.ranks[0].write([(FORWARD, 0, start, world.now)])
        world.look()
    assert world.triggers == []


def test_suspended_launcher_and_job_are_no_hang_and_no_slow_step(tmp_path: Path) -> None:
    world = World(tmp_path, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 100)
    world.now += 3600 * NS_PER_S  # Ctrl-Z: nobody looks
    world.look()
    world.train([STEP_NS] * 100)
    assert world.triggers == []
    world.wait(9 * NS_PER_S)
    assert world.triggers == []
    world.wait(5 * NS_PER_S)
    assert world.triggers == ["hang"]


def test_suspension_does_not_lengthen_the_limit(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train([STEP_NS] * 100)
    world.now += 3600 * NS_PER_S
    world.train([STEP_NS] * 100)
    world.wait(HANG_FLOOR_NS + 5 * NS_PER_S)
    assert world.triggers == ["hang"]


def test_ranks_that_are_all_stopped_are_suspended_and_one_of_two_hangs(tmp_path: Path) -> None:
    world = World(tmp_path, ranks=2, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 100)
    for rank in world.ranks:
        world.set_state(rank.pid, "T")
    world.wait(100 * NS_PER_S)
    world.set_state(world.ranks[0].pid, "R")
    world.wait(5 * NS_PER_S)
    assert world.triggers == []
    world.wait(10 * NS_PER_S)
    assert world.triggers == ["hang"]


def test_suspensions_are_told_once_with_how_that_is_known(tmp_path: Path) -> None:
    world = World(tmp_path, ranks=2, hang=HangLimit(seconds=10))
    world.train([STEP_NS] * 100)
    for rank in world.ranks:
        world.set_state(rank.pid, "T")
    world.wait(100 * NS_PER_S)
    assert world.watch.suspensions == [], "it goes on"
    for rank in world.ranks:
        world.set_state(rank.pid, "S")
    world.wait(9 * NS_PER_S)
    world.train([STEP_NS] * 100)
    ((begin, end, seen),) = world.watch.suspensions
    assert seen
    assert 98 * NS_PER_S <= end - begin <= 104 * NS_PER_S
    world.now += 100 * NS_PER_S  # Ctrl-Z
    world.look()
    assert world.watch.suspensions[1:] == [(world.now - 100 * NS_PER_S, world.now, False)]
    assert world.triggers == []


def test_restarted_rank_begins_anew(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train([STEP_NS] * 100)
    world.ranks = [Rank(tmp_path / "0.1", 0, 200)]
    world.set_state(world.ranks[0].pid, "S")
    world.train([2 * STEP_NS] * 100)
    assert world.triggers == []
    world.ranks = []
    world.wait(10 * HANG_FLOOR_NS)
    assert world.triggers == [], "all ranks are gone: nobody hangs"


def test_damaged_files_harm_nobody(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.ranks[0].paths.events.open("ab") as file:
        file.write(b'[1]\n{"type": 7}\nnot json\n\xff\xfe\n' + json.dumps({"type": "x"}).encode())
    with world.ranks[0].paths.phases.open("ab") as file:
        file.write(b"\0" * 16 + b"\xff" * 160 + b"torn")
    world.look()
    world.ranks[0].paths.phases.unlink()
    world.look()
    assert "slow" not in world.triggers
