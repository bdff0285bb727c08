"""Watches this node's ranks through their files: slower steps than usual, or none at all.

Only what was appended to `phases.rec` and `events.jsonl` since the last look is read; that costs
the ranks nothing. Ranks that write no spans (in the warm-up, after `--time`) are asked at long
intervals how many optimizer steps there were. Processes that have not begun to train only need to
exist.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from haiprof.agent.node_agent import LiveRank
from haiprof.base.medians import MAD_TO_SIGMA, mean_median
from haiprof.base.trace_options import HangLimit
from haiprof.base.units import NS_PER_S, duration_text, ratio_text
from haiprof.linux.procfs import TICK_NS, process_state, read_stat
from haiprof.run_format import schema
from haiprof.run_format.control import read_object
from haiprof.run_format.layout import RankPaths

if TYPE_CHECKING:
    from haiprof.linux.processes import Process

WARM_UP_STEPS = 10
WINDOW_STEPS = 15
WINDOW_NS = 3 * NS_PER_S  # minimum size of the last window: a burst of other load is no change
USUAL_MIN_STEPS = 30
USUAL_STEPS = 200
USUAL_NS = 10 * NS_PER_S  # minimum steps and time from which the usual step is known
SURE = 5.0  # standard errors of a difference of medians; a smaller difference may be chance
HANG_FLOOR_NS = 300 * NS_PER_S  # minimum of a relative limit (`5x`): a last save takes minutes
EARLY_HANG_NS = 28 * 60 * NS_PER_S  # while the pace is not known; the published tool's limit
PATIENCE = 5
"""Multiple of a limit in seconds before the first step (compiling and loading take long), and where
only optimizer steps are seen (an evaluation takes long); at most `EARLY_HANG_NS` unless the limit
itself is longer."""
IDLE_START_NS = 120 * NS_PER_S
"""How long the processes of a start may use no CPU, unless the limit is in seconds: most wait for
each other in init_process_group then, whose own timeout is 10 to 30 minutes."""
_IDLE_CORES = 0.02
BEFORE_TIMEOUT = 0.75  # share of a process group's timeout after which a silence is looked at
ASK_NS = 60 * NS_PER_S  # maximum interval at which ranks without spans are asked
SUSPENDED_NS = 4 * NS_PER_S  # it looks every 2 s: after so long it was stopped, and so the job
NOTED_NS = 10 * NS_PER_S  # minimum length of a suspension that is noted: less is a busy node
_SURE_REPEATS = 32
_ENDS = (
    schema.COLLECTIVE, schema.FORWARD, schema.FORWARD_EVAL, schema.NOGRAD, schema.EVAL, schema.DATA,
    schema.BACKWARD, schema.OPTIMIZER, schema.MARK,
)  # fmt: skip
"""What may end a step, the surest last: what comes later in this order takes an earlier one's
place, all but the last two after they have repeated so often."""
_READ_LIMIT_BYTES = 1 << 20
_KEPT_STEPS = 3000
_KEPT_WINDOWS = 8
_MEDIAN_ERROR = 1.2533 * MAD_TO_SIGMA  # times the median deviation over the root of the count

_WITHIN = {schema.EVAL: 1, schema.NOGRAD: 2, schema.SAVE: 4, schema.DATA_END: 8,
           schema.DATA_ITER: 8}  # fmt: skip
_ODD = 16  # the step was traced, or the job was stopped in it


class Step(NamedTuple):
    """From one optimizer step, or what stands for it, to the next."""

    number: int
    end_ns: int
    ns: int
    within: int  # bits of what else happened in it (`_WITHIN`, `_ODD`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A finding of the watch."""

    trigger: Literal["slow", "hang"]
    rank: int | None  # None where the rank of a process is not known
    step: int | None  # the first slower one; for `hang` the last that ended; None without any
    since_mono_ns: int  # when that step ended; for `hang` the last sign of life
    reason: str
    numbers: dict[str, float]  # the compared numbers, in ns


class _Usual(NamedTuple):
    median_ns: float
    error_ns: float


class _Start(NamedTuple):
    """A process that has torch, and no step."""

    since_ns: int  # when it was first seen so
    idle_ns: int  # since when it has used no CPU
    looked_ns: int
    cpu_ns: int


@dataclass
class Tail:
    """Reads what was appended to a file since the last read."""

    path: Path
    offset: int = 0
    skipped: bool = False  # whether the last read left something out

    def read(self, *, multiple: int = 1) -> bytes:
        """New bytes, at most the last MiB of them."""
        try:
            size = os.stat(self.path).st_size
            if size <= self.offset:
                return b""
            with self.path.open("rb") as file:
                if not self.offset and multiple > 1:
                    self.offset = len(file.readline(_READ_LIMIT_BYTES))
                left = (size - self.offset) // multiple * multiple
                skipped = max(0, left - _READ_LIMIT_BYTES) // multiple * multiple
                self.skipped = skipped > 0
                file.seek(self.offset + skipped)
                data = file.read(left - skipped)
        except OSError:
            return b""
        self.offset += skipped + len(data)
        return data


@dataclass
class RankWatch:
    """One rank's steps and signs of life."""

    rank: int
    pid: int
    paths: RankPaths
    now_ns: int
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    count: int = 0  # steps so far
    over: bool = False  # whether its recording has ended
    exited: bool = False  # whether it ended because the process does
    asked: bool = False  # whether it writes no spans, so that only its answers show that it trains
    timeout_ns: int = 0  # after so long its process group's backend ends it; 0: not known
    reported_steps: int | None = None  # optimizer steps in its last answer
    first_ns: int = 0  # end of the first span; 0 before it
    alive_ns: int = 0  # end of the last span that shows progress
    longest_ns: int = 0  # longest time between two such spans after warm-up
    _seen_ns: int = 0
    _usual: _Usual | None = None
    _lead: tuple[int, int] | None = None
    _repeats: dict[int, int] = field(default_factory=dict)
    _within: int = 0
    _end_ns: int = 0
    _stopped: bool = False
    _rest: bytes = b""

    def __post_init__(self) -> None:
        self._seen_ns = self.now_ns
        self._traced: deque[tuple[int, int | None]] = deque(maxlen=_KEPT_WINDOWS)
        self._spans = Tail(self.paths.phases)
        self._lines = Tail(self.paths.events)

    def read(self, now_ns: int) -> bool:
        """Reads what is new; whether the rank gave a sign of life."""
        *whole, self._rest = (self._rest + self._lines.read()).split(b"\n")
        for text in whole:
            if (line := read_object(text)) is None:
                continue
            name, time_ns = line.get("type"), line.get("time_ns")
            if name == "trace_begin" and type(time_ns) is int:
                self._traced.append((time_ns, None))
            elif name == "trace_window" and type(time_ns) is int:
                begun = self._traced.pop()[0] if self._traced else time_ns
                self._traced.append((begun, time_ns))
            elif name == "collective_timeout" and type(line.get("timeout_ns")) is int:
                self.timeout_ns = max(0, line["timeout_ns"])
            elif name in ("record_end", "hook_error"):
                self.over, self.exited = True, line.get("reason") == "exit"
        before = self.alive_ns
        words = array("q")
        words.frombytes(self._spans.read(multiple=schema.PHASES.record_bytes))
        if self._spans.skipped:
            self._end_ns = 0
        for start, end in zip(words[::2], words[1::2], strict=True):
            self._take(start & schema.TAG_MASK, end & schema.TAG_MASK, end >> schema.TAG_BITS)
        if self.alive_ns == before:
            return False
        self._seen_ns = now_ns
        return True

    def hear(self, steps: int | None, now_ns: int) -> bool:
        """Takes the rank's answer; whether that is a sign of life."""
        before = self.reported_steps
        if steps is None:
            return False
        self.reported_steps = steps
        if before in (None, steps):
            return False
        self._seen_ns = now_ns
        self.alive_ns = max(self.alive_ns, now_ns)
        return True

    @property
    def has_reported(self) -> bool:
        """Whether its number of optimizer steps is usable: some loops use none of torch's."""
        return self.reported_steps is not None and (self.reported_steps > 0 or not self.first_ns)

    def pause(self, ns: int) -> None:
        """Takes off a time for which the job was stopped: it is neither silence nor a slow step."""
        self._seen_ns += ns
        self._stopped = True
        self._within |= _ODD

    def silent_ns(self, now_ns: int) -> int:
        """How long it has been silent."""
        return now_ns - self._seen_ns

    def limit(self, limit: HangLimit, warmup_ns: int) -> tuple[int, str]:
        """How long that may be, and by what; less where the group's timeout would end all before.

        A rank that is asked, and has told of no step, may be in a warm-up.
        """
        opening_ns = warmup_ns if self.asked and not self.reported_steps else 0
        stepped, floor_ns = self.asked and bool(self.reported_steps), patient_ns(limit)
        why = "; nothing else is seen of it without a recording" if stepped else ""
        if limit.seconds:
            seen = self.count and not self.asked
            own_ns = round(limit.seconds * NS_PER_S) if seen else floor_ns
        elif self.count < WARM_UP_STEPS:
            own_ns = EARLY_HANG_NS
        else:
            floor_ns = floor_ns if self.asked else HANG_FLOOR_NS
            own_ns = max(floor_ns, round(limit.factor * self.longest_ns))
            if own_ns + opening_ns > HANG_FLOOR_NS and not why:
                why = f": {limit.factor:g} times the longest so far"
        if self.timeout_ns and (before_ns := round(BEFORE_TIMEOUT * self.timeout_ns)) <= own_ns:
            timeout = duration_text(self.timeout_ns)
            return before_ns + opening_ns, f": soon the process group's timeout of {timeout}"
        return own_ns + opening_ns, why

    def slower(self, ratio: float) -> Alarm | None:
        """Whether its last steps are slower than its usual ones, and then become the usual ones."""
        # The usual step is the fastest median that the rank sustained. Steps are compared with
        # steps of the same content: not with those that hold an evaluation or a save.
        counts = Counter(step.within for step in self.steps)
        if not counts or any(end is None for _, end in self._traced):
            return None
        common = counts.most_common(1)[0][0]
        like = [step for step in self.steps if step.within == common]
        last = _end_of(like, WINDOW_STEPS, WINDOW_NS)
        before = like[: len(like) - len(last)]
        settled = _end_of(before, USUAL_STEPS, USUAL_NS)
        older = settled or before
        if common & _ODD or not last or len(older) < USUAL_MIN_STEPS:
            return None
        usual, now, kept = _usual(older), _usual(last), self._usual
        if settled:  # the fastest pace that was sustained
            if kept is not None and usual.median_ns >= kept.median_ns - 2 * kept.error_ns:
                usual = kept
            self._usual = usual
        sure = SURE * (usual.error_ns**2 + now.error_ns**2) ** 0.5
        if now.median_ns - usual.median_ns <= max(ratio * usual.median_ns, sure):
            return None
        first = _since(like, usual.median_ns, now.median_ns)
        self.steps.clear()
        self._usual = None
        grown = ratio_text(now.median_ns / usual.median_ns - 1)
        change = f"{duration_text(usual.median_ns)} to {duration_text(now.median_ns)}"
        return Alarm(
            trigger="slow", rank=self.rank, step=first.number,
            since_mono_ns=first.end_ns - first.ns,
            reason=f"step {first.number} on became {grown} slower ({change} on rank {self.rank})",
            numbers={"before_ns": usual.median_ns, "after_ns": now.median_ns},
        )  # fmt: skip

    def _take(self, kind: int, tag: int, end_ns: int) -> None:
        if kind == schema.GC:
            return
        gap_ns = end_ns - self.alive_ns
        if self.alive_ns and self.count >= WARM_UP_STEPS and not self._stopped:
            self.longest_ns = max(self.longest_ns, gap_ns)
        self.first_ns = self.first_ns or end_ns
        self.alive_ns = max(self.alive_ns, end_ns)
        self._stopped = False
        if kind in _ENDS and self._ends_step(kind, tag):
            if self._end_ns and self.count >= WARM_UP_STEPS:
                # A step that overlaps a trace window, or is the first one after.
                inside = (b <= end_ns and (e is None or self._end_ns <= e) for b, e in self._traced)
                within = self._within | (_ODD if any(inside) else 0)
                self.steps.append(Step(self.count, end_ns, end_ns - self._end_ns, within))
            self.count += 1
            self._end_ns, self._within = end_ns, 0
        else:
            self._within |= _WITHIN.get(kind, 0)

    def _ends_step(self, kind: int, tag: int) -> bool:
        """Whether it is the first optimizer of a step: others belong to the same step."""
        if self._lead is None or _ENDS.index(kind) > _ENDS.index(self._lead[0]):
            self._repeats[kind] = self._repeats.get(kind, 0) + 1
            if kind in (schema.OPTIMIZER, schema.MARK) or self._repeats[kind] >= _SURE_REPEATS:
                self._lead, self.count, self._end_ns = (kind, tag), 0, 0
                self.steps.clear()
        return self._lead == (kind, tag)


class Node(Protocol):
    """What the watch needs from this node's agent."""

    def live_ranks(self) -> list[LiveRank]:
        """Latest attempt of each rank that can be asked; a new process starts afresh."""

    def ask_steps(self, pids: Collection[int]) -> None:
        """Asks processes of ranks how many optimizer steps there were; later looks see it."""

    def starting(self) -> list[Process]:
        """Processes that have loaded torch, and have not begun to train."""


@dataclass
class Watch:
    """All ranks of this node."""

    slow_ratio: float
    hang_limit: HangLimit
    record_s: float = 0.0
    warmup_s: float = 0.0
    clock: Callable[[], int] = time.monotonic_ns
    proc: Path = Path("/proc")
    is_hanging: bool = False  # whether the hang that was found last goes on
    suspensions: list[tuple[int, int, bool]] = field(default_factory=list)
    """Start and end of each suspension of the job, and whether its ranks were seen stopped, or only
    the launcher did not run; the caller records and clears them."""
    _ask_at_ns: int = 0
    _scan_at_ns: int = 0
    _ranks: dict[tuple[int, int], RankWatch] = field(default_factory=dict)
    _starting: dict[int, _Start] = field(default_factory=dict)  # by process id
    _start_ns: int | None = None  # how long the first start took until a rank reported in
    _steps_before: dict[tuple[int, int], int] = field(default_factory=dict)
    _suspended_ns: int = 0  # since when all ranks are stopped; 0 while they are not

    def __post_init__(self) -> None:
        self._record_ns = round(self.record_s * NS_PER_S)
        self._warmup_ns = round(self.warmup_s * NS_PER_S)
        self._looked_ns = self._began_ns = self.clock()
        self._ask_every_ns = min(patient_ns(self.hang_limit) // 10, ASK_NS)

    @property
    def has_gone_on(self) -> bool:
        """Whether a step has ended since then: other signs of life are those of an end, too."""
        steps = self._step_counts()
        return any(steps[rank] > self._steps_before.get(rank, 0) for rank in steps)

    def _step_counts(self) -> dict[tuple[int, int], int]:
        return {key: rank.count + (rank.reported_steps or 0) for key, rank in self._ranks.items()}

    def look(self, node: Node) -> list[Alarm]:
        """Reads what is new."""
        now = self.clock()
        pause_ns, self._looked_ns = now - self._looked_ns, now
        live = node.live_ranks()
        before = self._ranks
        self._ranks = {
            (r.rank, r.pid): before.get((r.rank, r.pid)) or RankWatch(r.rank, r.pid, r.paths, now)
            for r in live
        }
        if not live:
            return self._waited_for(node, now, pause_ns if pause_ns > SUSPENDED_NS else 0)
        self._starting.clear()
        if self._start_ns is None:
            self._start_ns = now - self._began_ns
        ranks = [rank for rank in self._ranks.values() if not rank.exited]
        if pause_ns > SUSPENDED_NS:
            for rank in ranks:
                rank.pause(pause_ns)
            if pause_ns > NOTED_NS and not self._suspended_ns:
                self.suspensions.append((now - pause_ns, now, False))
        steps = {(rank.rank, rank.pid): rank.reported_steps for rank in live}
        lives = [(r.read(now), r.hear(steps[r.rank, r.pid], now)) for r in ranks]
        for rank in ranks:
            timed = self._record_ns and now - rank.first_ns >= self._record_ns
            # A rank that writes no spans is asked: the silence of its files means nothing.
            rank.asked = not rank.first_ns or rank.over or bool(timed)
        self._ask(node, [rank for rank in ranks if rank.asked], now)
        if any(map(any, lives)):
            self.is_hanging = False
        recorded = [rank for rank in ranks if not rank.asked]
        slow = [alarm for rank in recorded if (alarm := rank.slower(self.slow_ratio)) is not None]
        # Those whose silence means something; one that was stopped first has yet to answer.
        active = [
            r for r in ranks
            if not r.exited and (not r.asked or r.has_reported or self._is_stopped(r.pid))
        ]  # fmt: skip
        hang = None if self.is_hanging else self._standing(active, now)
        return [*slow[:1], *([] if hang is None else [hang])]

    def _ask(self, node: Node, ranks: Sequence[RankWatch], now: int) -> None:
        """Asks ten times within the limit, and at once a rank that has never answered."""
        due = now >= self._ask_at_ns
        pids = [rank.pid for rank in ranks if due or rank.reported_steps is None]
        if due:
            self._ask_at_ns = now + self._ask_every_ns
        if pids:
            node.ask_steps(pids)

    def _waited_for(self, node: Node, now: int, pause_ns: int) -> list[Alarm]:
        """Whether too much time has passed since the last process began, while no rank trains."""
        self._starting = {
            pid: own._replace(since_ns=own.since_ns + pause_ns, idle_ns=own.idle_ns + pause_ns)
            for pid, own in self._starting.items()
        }
        if now < self._scan_at_ns:
            return []
        self._scan_at_ns = now + min(self._ask_every_ns, IDLE_START_NS // 4)
        found = node.starting()
        stopped = found and all(self._is_stopped(process.pid) for process in found)
        before = {} if stopped else self._starting
        self._starting = {
            process.pid: self._look_at_start(process.pid, before.get(process.pid), now)
            for process in found
        }
        since_ns = max((start.since_ns for start in self._starting.values()), default=now)
        idle_ns = now - max((start.idle_ns for start in self._starting.values()), default=now)
        silent_ns, limit_ns = now - since_ns, patient_ns(self.hang_limit)
        own_ns = round(self.hang_limit.seconds * NS_PER_S)
        if self._start_ns is not None:  # ranks that are started again had shown what they need
            limit_ns = min(limit_ns, max(own_ns or HANG_FLOOR_NS, PATIENCE * self._start_ns))
        idle = idle_ns > (own_ns or IDLE_START_NS)
        if silent_ns <= limit_ns and not idle:
            self.is_hanging = False
            return []
        if self.is_hanging:
            return []
        self.is_hanging, self._steps_before = True, self._step_counts()
        said = "1 process has" if len(found) == 1 else f"{len(found)} processes have"
        why = f"limit {duration_text(limit_ns)}"
        if self._start_ns is not None:
            why += f"; the start before took {duration_text(self._start_ns)}"
        if idle:
            share = ratio_text(_IDLE_CORES)
            why = f"at most {share} of a core was used for {duration_text(idle_ns)}"
        waited = f"no first step for {duration_text(silent_ns)} since {said} loaded torch"
        return [Alarm(
            trigger="hang", rank=found[0].rank, step=None, reason=f"{waited} ({why})",
            since_mono_ns=now - (idle_ns if idle else silent_ns),
            numbers={"silent_ns": silent_ns, "limit_ns": limit_ns},
        )]  # fmt: skip

    def _look_at_start(self, pid: int, before: _Start | None, now: int) -> _Start:
        fields = read_stat(self.proc.parent, pid) or [b"0"] * 13
        cpu_ns = sum(map(int, fields[11:13])) * TICK_NS
        if before is None:
            return _Start(since_ns=now, idle_ns=now, looked_ns=now, cpu_ns=cpu_ns)
        busy = cpu_ns - before.cpu_ns > _IDLE_CORES * (now - before.looked_ns)
        idle_ns = now if busy else before.idle_ns
        return before._replace(idle_ns=idle_ns, looked_ns=now, cpu_ns=cpu_ns)

    def _is_stopped(self, pid: int) -> bool:
        return process_state(pid, proc=self.proc)["state"] == "T"

    def _standing(self, active: Sequence[RankWatch], now: int) -> Alarm | None:
        """A node hangs when all of its ranks do: while one proceeds, it does not block others."""
        silent = [rank.silent_ns(now) for rank in active]
        quiet = min(silent, default=0) > SUSPENDED_NS
        if active and (quiet or self._suspended_ns):
            if all(self._is_stopped(rank.pid) for rank in active):
                self._suspended_ns = self._suspended_ns or now - min(silent)
                for rank in active:
                    rank.pause(max(silent))
                return None
            if self._suspended_ns:
                self.suspensions.append((self._suspended_ns, now, True))
                self._suspended_ns = 0
        if not quiet:
            return None
        limits = [rank.limit(self.hang_limit, self._warmup_ns) for rank in active]
        over = [ns - limit_ns for ns, (limit_ns, _) in zip(silent, limits, strict=True)]
        if min(over) <= 0:
            return None
        self.is_hanging, self._steps_before = True, self._step_counts()
        # The rank whose limit was the last to be reached is the one whose limit is said.
        place = min(range(len(over)), key=lambda at: (over[at], -active[at].alive_ns))
        last, silent_ns, (limit_ns, why) = active[place], silent[place], limits[place]
        expected = "step" if last.count else "first step"
        if last.asked and last.reported_steps:
            expected = "optimizer step"
        limit = f"limit {duration_text(limit_ns)}{why}"
        return Alarm(
            trigger="hang", rank=last.rank, since_mono_ns=last.alive_ns or now - silent_ns,
            step=last.count - 1 if last.count and not last.asked else None,
            reason=f"no {expected} for {duration_text(silent_ns)} ({limit})",
            numbers={"silent_ns": silent_ns, "limit_ns": limit_ns},
        )  # fmt: skip


def patient_ns(limit: HangLimit) -> int:
    """The limit of a silence that may well have another reason; see `PATIENCE`."""
    if not limit.seconds:
        return EARLY_HANG_NS
    own_ns = round(limit.seconds * NS_PER_S)
    return max(own_ns, min(PATIENCE * own_ns, EARLY_HANG_NS))


def _end_of(steps: Sequence[Step], count: int, ns: int) -> Sequence[Step]:
    """The newest steps, at least so many and so long; empty where there are too few."""
    total = 0
    for taken, step in enumerate(reversed(steps), 1):
        total += step.ns
        if taken >= count and total >= ns:
            return steps[len(steps) - taken :]
    return ()


def _usual(steps: Sequence[Step]) -> _Usual:
    values = [step.ns for step in steps]
    middle = mean_median(values)
    spread = mean_median([abs(value - middle) for value in values])
    return _Usual(middle, _MEDIAN_ERROR * spread / len(values) ** 0.5)


def _since(steps: Sequence[Step], before_ns: float, after_ns: float) -> Step:
    """The first of the slower steps: most of what follows is nearer to them than to the usual."""
    middle, half = (before_ns + after_ns) / 2, (after_ns - before_ns) / 2
    best, total, first = 0.0, 0.0, steps[-1]
    for step in reversed(steps):
        total += min(max(step.ns - middle, -half), half)  # a step that took very long is one step
        if total > best:
            best, first = total, step
    return first
