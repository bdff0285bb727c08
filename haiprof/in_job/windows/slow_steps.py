"""Keeps what torch.profiler saw of a slow step: windows roll, and one that holds it stays."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.base.medians import upper_median
from haiprof.base.trace_options import DEFAULT_STEPS, TraceOptions
from haiprof.in_job.identity import rank_and_world
from haiprof.in_job.windows.requested_windows import ENDED, Recording, WindowContext, Windows
from haiprof.in_job.windows.step_plan import KEPT_STEPS, RollingSchedule

HOLD_NS = 1_000_000_000  # for another rank to say that it saw a slow step
SETTLED_STEPS = 20  # plain steps before the first window: what is normal must be known
PROFILED_FOR_USUAL = 5
UNKNOWN_SLOWDOWN = 3.0  # of a profiled step, until enough of them were seen
NOTE_EVERY_NS = 60_000_000_000
KEPT_COSTS = 5
_NS_PER_S = 1_000_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_now = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class _HeldRecording:
    """A window in which this rank saw no slow step."""

    recording: Recording
    details: Mapping[str, Any]
    until_ns: int


class KeepSlow(Windows):
    """Rolling windows of a few steps, in memory, one at a time."""

    def __init__(
        self, config: Mapping[str, Any], context: WindowContext, schedule: RollingSchedule
    ) -> None:
        super().__init__(context)
        self._schedule = schedule
        self._budget = float(config.get("slow_cost") or TraceOptions.slow_cost)
        self._held: _HeldRecording | None = None
        self._length = int(config.get("count") or DEFAULT_STEPS)
        self._ratio = float(config.get("slow_ratio") or TraceOptions.slow_ratio)
        self._wanted = int(config.get("repeat") or TraceOptions.repeat)
        self._warmup_ns = round(float(config.get("warmup_s") or 0) * _NS_PER_S)
        self._first = 0
        self._slow_step: int | None = None
        self._spent: deque[int] = deque()
        self._profiled: deque[int] = deque(maxlen=KEPT_STEPS)
        self._costs: deque[int] = deque(maxlen=KEPT_COSTS)
        self._next: int | None = None
        self._plain_count = 0
        self._refusal: str | None = None
        self._totals = {"steps": 0, "watched": 0, "slow_seen": 0, "slow_kept": 0}
        self._cost_ns = self._kept_bytes = self._memory_bytes = 0
        self._resident_bytes: int | None = None
        self._begun_ns: int | None = None
        self._noted_ns = _now()

    @property
    def over(self) -> bool:
        """Whether as many as wanted were kept."""
        return self._schedule.window_count >= self._wanted and self._held is None

    def boundary(self, number: int, begins: bool) -> None:
        """An edge of a step."""
        self._begun_ns = self._begun_ns or _now()
        recording = self._recording
        if recording is not None and recording.started:
            self._judge(profiled=True)
            if number >= self._first + self._schedule.length or not begins:
                self._close(number, None)
            else:
                recording.mark(number, begins)
        else:
            self._judge(profiled=False)
        held = self._held
        if held is not None and not self.holds_profiler and _now() > held.until_ns:
            self._put_away(held, wanted=self._is_held_wanted())
        if begins and not self.over and (self._recording is None or not self._recording.started):
            self._consider(number)
        if _now() - self._noted_ns > NOTE_EVERY_NS:
            self._note()

    def finish(self) -> None:
        """The job ends."""
        self.cut(ENDED)
        if self._held is not None:
            self._put_away(self._held, wanted=self._is_held_wanted())
        self._note()

    def fail(self, reason: str) -> None:
        """Something of ours broke."""
        super().fail(reason)
        if self._held is not None:
            self._held.recording.files.drop()
            self._held = None
        self._note()

    def forget(self) -> None:
        """In a forked child."""
        super().forget()
        self._held = None

    @property
    def _number(self) -> int:
        return self._schedule.window_count

    def _cut_recording(self, recording: Recording, reason: str) -> None:
        """It stays if it held a slow step."""
        self._close(self._context.whole_until(recording, self._first), reason)

    def _judge(self, *, profiled: bool) -> None:
        """Looks at the step that has just ended; those with other work than training are left."""
        last = self._context.times.last
        if last is None:
            return
        number, ns, pure = last
        self._totals["steps"] += 1
        self._totals["watched"] += profiled
        if not pure:
            return
        usual = self._usual_ns(profiled)
        slow = usual > 0 and ns > self._ratio * usual
        self._totals["slow_seen"] += slow
        if profiled:
            self._spent.append(ns)
            if slow and self._slow_step is None and self._step_bytes is not None:
                self._slow_step = number
            if not slow:
                self._profiled.append(ns)
        elif not slow or self._plain_count < SETTLED_STEPS:
            self._plain_count += 1
            self._context.times.keep(ns)

    def _usual_ns(self, profiled: bool) -> int:
        plain = self._context.times.usual_ns if self._plain_count >= SETTLED_STEPS else 0
        if not profiled:
            return plain
        if len(self._profiled) >= PROFILED_FOR_USUAL:
            return upper_median(self._profiled)
        return round(plain * UNKNOWN_SLOWDOWN)

    def _consider(self, number: int) -> None:
        times = self._context.times
        trained_ns = times.counter.trained_ns
        if self._plain_count < SETTLED_STEPS or trained_ns is None:
            return
        if _now() < trained_ns + self._warmup_ns:
            return
        if self._next is None or number > self._next:
            if self._next is not None:
                self._schedule.advance()  # refused
            self._next = self._schedule.next_first(number, pace=self._pace, usual_ns=times.usual_ns)
        if number < self._next - 1:
            return
        self._refusal = self._context.refusal()
        if self._refusal is not None:
            return
        if self._recording is None:
            self._resident_bytes = _resident_bytes()
            self._recording = Recording(self._context)
        if number == self._next:
            self._first, self._slow_step, self._spent = number, None, deque()
            self._recording.start()
            self._recording.mark(number, True)

    def _pace(self) -> tuple[int, int]:
        """Steps in a window, and from the start of one to the start of the next."""
        # How often there is one follows from what they cost: setting up, starting, stopping, and
        # how much longer profiled steps take than others, against the budget. Ranks record the same
        # steps and keep the same windows: one in which no step was slow here is held until the
        # others have had time to say that one was.
        period = self._length
        if self._costs:
            usual = max(1, self._context.times.usual_ns)
            period = max(period, round(upper_median(self._costs) / (self._budget * usual)))
        return self._length, period

    def _close(self, number: int, cut: str | None) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        slow, self._next, first = self._slow_step, None, self._first
        self._schedule.advance()
        held, wanted = self._held, self._is_held_wanted()  # first: it is the earlier one
        kept = slow is not None and not self.over and self._schedule.is_kept(first, slow=True)
        details = {
            "window": self._schedule.window_count, "reason": "slow", "request": None,
            "steps": [first, number], "slow_step": slow, "cut": cut,
        }  # fmt: skip
        try:
            recording.stop(details)
            self._account(recording)
            if held is not None:
                self._put_away(held, wanted=wanted)
            if kept:
                self._schedule.window_count += 1
                self._keep(recording, details)
            elif self._step_bytes is None:
                self._measure(recording, number)
            elif rank_and_world()[1] > 1 and slow is None and not self.over:
                self._held = _HeldRecording(recording, details, _now() + HOLD_NS)
            else:
                recording.files.drop()
        except Exception:
            recording.abandon()
            raise

    def _is_held_wanted(self) -> bool:
        """Whether another rank has kept the window that is held; it is held no longer."""
        held, self._held = self._held, None
        if held is None or not self._schedule.is_kept(held.details["steps"][0], slow=False):
            return False
        self._schedule.window_count += 1
        return True

    def _put_away(self, held: _HeldRecording, *, wanted: bool) -> None:
        if wanted:
            self._keep(held.recording, held.details)
        else:
            held.recording.files.drop()

    def _account(self, recording: Recording) -> None:
        session, usual = recording.session, self._context.times.usual_ns
        longer = 0
        if self._spent:  # one step in which something else happened says nothing of the profiler
            longer = max(0, upper_median(self._spent) - usual) * len(self._spent)
        cost = session.setup_ns + session.start_ns + session.stop_ns + longer
        self._costs.append(cost)
        self._cost_ns += cost
        before, now = self._resident_bytes, _resident_bytes()
        if before is not None and now is not None:  # by how much the process has grown, if it has
            self._memory_bytes = max(self._memory_bytes, now - before)

    def _keep(self, recording: Recording, details: Mapping[str, Any]) -> None:
        content = recording.save(details)
        self._totals["slow_kept"] += 1
        self._kept_bytes += content["raw_bytes"]
        self._note_recorded(
            recording, content, details, details["cut"] or "slow", stall_ns=0,
            slow_step=details["slow_step"],
        )  # fmt: skip
        if self.over:
            self._note()

    def _measure(self, recording: Recording, number: int) -> None:
        """The first window tells how large one is, and so how many steps fit into the limit."""
        began = _now()
        recording.session.save(recording.files.raw_draft)
        size = recording.files.raw_draft.stat().st_size
        recording.files.drop()
        self._step_bytes = max(1, size // max(1, number - self._first))
        self._length = max(1, min(self._length, self._context.limit_bytes // self._step_bytes))
        self._cost_ns += _now() - began

    def _note(self) -> None:
        self._noted_ns = now = _now()
        elapsed = max(1, now - (self._begun_ns or now))
        steps = self._totals["steps"]
        self._context.recorder.lines.append({
            "type": "keep_slow", "time_ns": now, **self._totals,
            "watched_ratio": self._totals["watched"] / steps if steps else None,
            "cost_ns": self._cost_ns, "cost_ratio": self._cost_ns / elapsed,
            "budget_ratio": self._budget, "memory_bytes": self._memory_bytes or None,
            "kept_bytes": self._kept_bytes, "kept_limit": self._wanted,
            "usual_ns": self._context.times.usual_ns or None, "refused": self._refusal,
        })  # fmt: skip


def _resident_bytes() -> int | None:
    """What this process holds in memory; None where /proc does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
