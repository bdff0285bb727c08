"""Drives the windows: what happens at each edge of a step, and when something goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from haiprof.base.trace_options import DEFAULT_LIMIT_BYTES
from haiprof.in_job.identity import rank_and_world
from haiprof.in_job.installer import _skip_frame, optimizer_exists
from haiprof.in_job.patches import State
from haiprof.in_job.recorder import Recorder, is_foreign
from haiprof.in_job.windows.beside_profiler import PhaseTimes
from haiprof.in_job.windows.profiler_session import CUT, Guard, ProfilerOptions, wait_until
from haiprof.in_job.windows.requested_windows import PlannedWindows, WindowContext
from haiprof.in_job.windows.slow_steps import KeepSlow
from haiprof.in_job.windows.step_counter import SteadySteps, StepCounter
from haiprof.in_job.windows.step_plan import (
    OTHER_WORK,
    Agreement,
    Meeting,
    Plan,
    RollingSchedule,
    StepTimes,
)
from haiprof.run_format.control import TOO_LATE
from haiprof.run_format.schema import KIND_NAMES, OPTIMIZER

_SWITCHES = (*ProfilerOptions.__dataclass_fields__, "execution_trace")
_MAX_STEPS = 10_000
_MAX_S = 86_400.0
_TRAINS = "the process has started training, and counts its steps from 0"
_now = time.perf_counter_ns


class Tracer:
    """Sits behind the hooks' wrappers while a window is planned; gone when the last one is over.

    Everything runs on the training thread. An error of ours ends the windows with a line in
    events.jsonl; the job and the rest of the hook go on.
    """

    def __init__(self, config: Mapping[str, Any], *, recorder: Recorder, state: Any) -> None:
        self._config = config
        self._recorder = recorder
        self._state = state
        self._guard = Guard(self._make_way)
        self.active = False  # whether a window is still to come or runs
        self._yield_asked = self._end_asked = self._late = False
        self._meeting: Meeting | None = None
        self._repeated_last = False
        self._phases: PhaseTimes | None = None  # of the window that is recorded, of each span
        self._base = 0  # steps before this follows them: a window may be asked for at any time
        lasts_s = config.get("valid_s")
        self._expires_ns = None if lasts_s is None else _now() + round(float(lasts_s) * 1e9)
        self._build()

    def _build(self) -> None:
        import torch

        self._state.repeats.listener = self._meet_repeat
        sure = bool(self._state.repeats.backwards) and not optimizer_exists()
        self._counter = StepCounter(self.boundary, torch.is_grad_enabled, sure=sure)
        self.times = StepTimes(self._counter)
        self._ends = {kind: self._ending(kind) for kind in KIND_NAMES}
        self._steady = SteadySteps(
            self._counter, self.boundary, otherwise=self._begin_unexpected,
            ended=self._ends[OPTIMIZER], failed=self._fail,
        )  # fmt: skip
        what = ProfilerOptions.from_config(self._config)
        context = WindowContext(
            recorder=self._recorder, guard=self._guard, what=what, times=self.times,
            ended=self._saw_end_of_step,
            execution_trace=bool(self._config.get("execution_trace")),
            limit_bytes=int(self._config.get("limit_bytes") or DEFAULT_LIMIT_BYTES),
            request=self._config.get("request"),
        )  # fmt: skip
        self._windows: PlannedWindows | KeepSlow
        about = str(self._config.get("request") or "")
        self._agreement = agreement = Agreement(Path(self._recorder.run.trace_parts), about=about)
        if self._config.get("keep_slow"):
            self._windows = KeepSlow(self._config, context, RollingSchedule(agreement))
        else:
            plan = Plan(self._config, agreement)
            self._windows = PlannedWindows(plan, context)

    def attach(self, *, late: bool = False) -> None:
        """Begins to follow the steps."""
        self._guard.install(late=late)
        for own in (SteadySteps.follow, SteadySteps._optimizer_ends):
            _skip_frame(own, below=True)
        self.active = True
        self._late = late
        self._recorder.installed = replace(
            self._recorder.installed, must_stay=lambda: self.active, end_window=self.finish,
            leaves_by_itself=self._puts_off,
        )  # fmt: skip
        self._state.watch = self
        self._state.slow = True

    def _has_expired(self) -> bool:
        """Whether a request has waited too long for its window: a job that stood still."""
        windows = self._windows
        late = self._expires_ns is not None and _now() > self._expires_ns
        if not late or windows.holds_profiler or not isinstance(windows, PlannedWindows):
            return False
        windows.give_up("it was asked for too long ago")
        self._detach()
        return True

    def _join(self) -> None:
        """The job trains already: steps go on from how often its optimizers have stepped."""
        # What repeats in a process that has not trained, and calls of haiprof.step(), are counted
        # from the start.
        self._late = False
        if self._state.repeats.count:
            return
        self._base = self._state.steps_of_job()
        if rank_and_world()[1] > 1:
            self._meeting = Meeting(self._config, self._agreement, joined=self._base)

    def _meets(self, meeting: Meeting) -> bool:
        """Whether all ranks follow the steps from this span on."""
        # What makes up a step is learned from the spans: ranks that began between different ones
        # would cut a step of several optimizers at different places.
        if self._has_expired():
            return False
        count = self._state.steps_of_job()
        place = meeting.agree_on_count(count)
        if count > place or place <= meeting.joined:
            if isinstance(self._windows, PlannedWindows):
                self._windows.give_up(TOO_LATE)
            self._detach()
            return False
        if count < place:
            return False
        self._meeting, self._base = None, place
        return True

    def _begin_unexpected(self, kind: int, target: Any) -> Callable[[], None] | None:
        self._state.lean(None)
        return self.begin(kind, target)

    def _saw_end_of_step(self, after_last: int) -> bool:
        self._steady.leave()
        if self._repeats():
            return bool(self._state.repeats.count >= after_last)
        return self._counter.saw_end_of_step(after_last - self._base)

    def begin(self, kind: int, target: Any) -> Callable[[], None] | None:
        """A span begins; what it returns is called when the span ends."""
        steady = self._steady
        if steady.follows:  # of a job with a GPU, whose spans have more to do
            return steady.follow(kind, target)
        try:
            if self._end_asked:
                self.finish()
                return None
            if self._yield_asked:
                self._cut()
            if self._late:
                self._join()
            if self._meeting is not None and not self._meets(self._meeting):
                return None
            if self._phases is None and steady.begins(kind, target):
                self._state.lean(steady.follow)
                return steady.follow(kind, target)
            if kind in OTHER_WORK:
                self.times.other_work = True
            self._counter.begin(kind, target)
            steady.saw(kind, target)
            phases, end = self._phases, self._ends[kind]
            return end if phases is None else phases.begin(kind, end)
        except Exception as error:
            self._fail(error)
            return None

    def _ending(self, kind: int) -> Callable[[], None]:
        counter = self._counter
        end = counter.ends.get(kind)
        if end is None:
            return counter.pop

        def end_span() -> None:
            try:
                if self.active:
                    end()
            except Exception as error:
                self._fail(error)

        return end_span

    def boundary(self, number: int, begins: bool) -> None:
        """An edge of a step, as the counter saw it."""
        steady = self._steady
        if not steady.follows:
            steady.edge(begins)
        if self._repeats():
            return
        if self._repeated_last:  # training has begun, and with it another count
            self._repeated_last = False
            self._windows.cut(_TRAINS)
            self._phases = None
        if not self._has_expired():
            self._edge(number + self._base, begins)
            steady.asleep_until = self._windows.asleep_until - self._base

    def _repeats(self) -> bool:
        """Whether steps are marked by the job, or are what repeats in it."""
        # An evaluation before the training repeats, too: a window of the launcher's options waits
        # for the training where an optimizer has been made, one that was asked for now does not.
        repeats = self._state.repeats
        if repeats.marks or not repeats.settled:
            return bool(repeats.marks)
        return bool(self._config.get("request")) or not optimizer_exists()

    def _meet_repeat(self, number: int) -> None:
        try:
            if not self.active or not self._repeats() or self._has_expired():
                return
            if self._end_asked:
                self.finish()
                return
            if self._yield_asked:
                self._cut()
            self._repeated_last = True
            if self._counter.trained_ns is None:
                self._counter.trained_ns = _now()
            self._edge(number, True)
        except Exception as error:
            self._fail(error)

    def _edge(self, number: int, begins: bool) -> None:
        self.times.boundary(number, begins)
        began = _now()
        self._windows.boundary(number, begins)
        self._phases = self._windows.phases
        if self._phases is not None and self._steady.follows:
            self._steady.expect_nothing()
        self.times.ours_ns += _now() - began
        if self._windows.over:
            self._detach()

    def finish(self) -> None:
        """The job ends: what was recorded is kept."""
        if not self.active:
            return
        try:
            self._windows.finish()
        except Exception as error:
            self._fail(error)
        self._detach()

    def after_fork(self) -> None:
        """In a forked child, which has the parent's profiler state and none of its windows."""
        if not self.active:
            return
        self._state.lean(None)
        inherited = self._windows.holds_profiler
        self._guard.forget()
        if inherited:
            self._windows.forget()
            self._detach()
        else:
            self._build()
            self._state.watch, self._state.slow = self, True

    def _puts_off(self) -> bool:
        """The recording has ended early: only the training thread can stop its profiler."""
        if not self.active or not self._windows.holds_profiler:
            return False
        if threading.get_ident() == self._state.owner:
            self.finish()
            return False
        self._end_asked = self._steady.interrupted = True
        return True

    def _make_way(self) -> None:
        """A profiler of the job is about to be entered."""
        if not self.active or not self._windows.holds_profiler:
            return
        if threading.get_ident() == self._state.owner:
            self._cut()
            return
        self._yield_asked = self._steady.interrupted = True
        wait_until(lambda: not self._yield_asked)

    def _cut(self) -> None:
        began = _now()
        try:
            self._windows.cut(CUT)
        except Exception as error:
            self._fail(error)
        self._phases = None
        self.times.ours_ns += _now() - began
        self._yield_asked = self._steady.interrupted = False

    def _fail(self, error: Exception) -> None:
        if is_foreign(error):
            raise error
        self._windows.fail(f"{type(error).__name__}: {error}")
        self._detach()

    def _detach(self) -> None:
        self.active = False
        self._phases = None
        self._yield_asked = False
        self._state.lean(None)
        self._state.repeats.listener = None
        self._state.watch = None
        self._guard.uninstall()
        if self._end_asked:
            self._end_asked = False
            self._recorder.installed.uninstall()


def attach(
    config: Mapping[str, Any], *, recorder: Recorder, state: State, late: bool = False
) -> Tracer:
    """Plans the windows that the launcher asked for; torch is loaded by now."""
    tracer = Tracer(config, recorder=recorder, state=state)
    tracer.attach(late=late)
    return tracer


def plan_request(
    request_id: str, arguments: Mapping[str, Any], *, recorder: Recorder, state: State
) -> Mapping[str, Any] | None:
    """Plans the window, and replies `accepted`; the final reply follows when it is over."""
    # All ranks take the same steps: those from `first` on, which lies so far ahead that every rank
    # has heard of it; without it, the rank that first knows how far it is settles it for all.
    if recorder.closed:
        return _refusal("its recording has ended, and with it haiprof's hooks (haiprof attach)")
    if state.watch is not None:
        return _refusal("another trace window is planned or runs")
    config = _config(request_id, arguments, recorder)
    if config is None:
        return _refusal("the request has options that do not fit")
    if recorder.commands is not None:  # first: the training thread may end it before we are back
        accepted = {"state": "accepted", "step": state.steps_of_job()}
        recorder.commands.reply(request_id, accepted)
    attach(config, recorder=recorder, state=state, late=True)
    return None


def _config(
    request_id: str, arguments: Mapping[str, Any], recorder: Recorder
) -> dict[str, Any] | None:
    """The plan's options from a message that may hold anything; None if they do not fit."""
    try:
        config: dict[str, Any] = {name: arguments.get(name) is True for name in _SWITCHES}
        count, window = int(arguments.get("count") or 1), int(arguments.get("window") or 0)
        first = int(arguments.get("first") or 0)
        seconds = {n: float(arguments.get(n) or 0) for n in ("time_s", "ahead_s", "valid_s")}
        limit_bytes = int(arguments.get("limit_bytes") or 0)
    except (TypeError, ValueError, OverflowError):
        return None
    inside = all(0 <= value <= _MAX_S for value in seconds.values())
    if not (0 < count <= _MAX_STEPS and min(window, first, limit_bytes) >= 0 and inside):
        return None
    return {
        **config, **seconds, "count": count, "steps": [first, first + count] if first else None,
        "window": window, "limit_bytes": limit_bytes, "repeat": 1, "request": request_id,
        "step_ns": recorder.step_ns, "valid_s": seconds["valid_s"] or None,
    }  # fmt: skip


def _refusal(reason: str) -> dict[str, Any]:
    return {"state": "refused", "reason": reason}
