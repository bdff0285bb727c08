"""Windows that were asked for: rehearsed, recorded, kept; and the tools that every window needs."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.in_job.identity import torch_facts
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.threads import hold_size_signal
from haiprof.in_job.windows.forward_lines import ForwardLines
from haiprof.in_job.windows.phase_times import PhaseTimes
from haiprof.in_job.windows.profiler_session import ProfilerOptions, Session, distributed_info, fits
from haiprof.in_job.windows.step_plan import LEAD_STEPS, Plan, PlannedWindow
from haiprof.in_job.windows.step_times import StepTimes
from haiprof.in_job.windows.user_profilers import Guard, python_profiler
from haiprof.in_job.windows.window_files import WindowFiles
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.control import OVER

SPARE_BYTES = 64_000_000
FINISHED_SHARE = 0.3  # of the raw size: the compressed trace, while both are there
# Where no step could be rehearsed: what torch.profiler writes at the most per second of training,
# measured with eager operators back to back (benchmarks/window.py).
BYTES_PER_S = {False: 150_000_000, True: 400_000_000}
ENDED = "the job ended inside the window"

_now = time.perf_counter_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowContext:
    """What every window needs."""

    recorder: Recorder
    guard: Guard
    what: ProfilerOptions
    times: StepTimes
    ended: Callable[[int], bool]
    """Whether the step before this one has had its last optimizer step."""
    execution_trace: bool
    limit_bytes: int
    request: str | None = None
    """Who asked for the windows while the job ran, and waits for a reply."""

    def refusal(self) -> str | None:
        """Why no window may start now; None where one may."""
        largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if largest != resource.RLIM_INFINITY and largest <= self.limit_bytes:
            return (
                f"files of this job may have {largest / 1e6:.3g} MB at the most (ulimit -f), a "
                f"trace {self.limit_bytes / 1e6:.3g} MB (--trace-limit)"
            )
        return self.guard.refusal()

    def whole_until(self, recording: Recording, first: int) -> int:
        """The step after the last whole one of a recording that ends now."""
        marked = first if recording.marked is None else recording.marked
        return marked + 1 if self.ended(marked + 1) else marked

    def note(self, window: int, state: str, reason: str | None, **more: Any) -> None:
        """One line in events.jsonl."""
        line = {"type": "trace_window", "time_ns": _now(), "window": window, "state": state}
        self.recorder.lines.append({**line, "reason": reason, **more})
        if self.request is not None and self.recorder.commands is not None:
            answer = {"recorded": "done", "cut": "done"}.get(state, state)
            content = {"state": answer, "window": window, "reason": reason, **more}
            self.recorder.commands.reply(self.request, content)

    def recording(self, *, execution_trace: bool) -> Recording:
        """A new recording, which begins with `prepare`."""
        return Recording(self, execution_trace=execution_trace)


class Recording:
    """One window under way: its profiler and its files."""

    def __init__(self, context: WindowContext, *, execution_trace: bool) -> None:
        what = context.what
        self.remark: str | None = None
        if what.stacks and python_profiler() is not None:
            what = ProfilerOptions(**{**what.as_json(), "stacks": False})
            self.remark = "no Python stacks: the job's own profiler (sys.setprofile) uses them"
        self.what = what
        self._context = context
        self.files = WindowFiles(context.recorder.run, ClockAnchor.now())
        self.with_et = execution_trace
        path = self.files.et_draft if execution_trace else None
        self.session = Session(what, context.guard, path)
        self.session.prepare()
        self.setup_ns = self.session.setup_ns
        self.clock = self.files.clock
        self.end_ns = 0
        self.started = False
        self.stopped = False
        self.marked: int | None = None
        self.phases = PhaseTimes()
        self._lines = ForwardLines()

    def start(self) -> None:
        """Begins to record."""
        self.clock = self.files.clock = ClockAnchor.now()
        self.started = True
        self.session.start()
        if self.what.lines:
            self.remark = self._lines.start() or self.remark

    def mark(self, number: int, begins: bool) -> None:
        """Moves the step mark."""
        if begins and number != self.marked:
            self.session.mark(number)
            self.marked = number
        elif not begins:
            self.session.unmark()

    def stop(self, details: Mapping[str, Any]) -> None:
        """Ends the recording; `details` go into the trace."""
        lines = self._lines.stop()
        self.end_ns = _now()
        self.stopped = True
        identity = torch_facts()
        clock = {"wall_ns": self.clock.wall_ns, "mono_ns": self.clock.mono_ns}
        shared = distributed_info()
        own = {
            "run": self._context.recorder.run.root.name,
            "rank": shared["rank"],
            "world_size": shared["world_size"],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gpu_uuid": identity["gpu_uuid"],
            "torch": identity["torch"],
            "clock": clock,
            **({} if lines is None else {"lines": lines}),
            **details,
        }
        self.session.stop({"distributedInfo": shared, "haiprof": own})

    def save(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """Writes trace and sidecar; the sidecar's content."""
        export_ns = self.session.save(self.files.raw_draft)
        content = {
            "attempt": self._context.recorder.attempt,
            "gpu_uuid": torch_facts()["gpu_uuid"],
            "start_mono_ns": self.clock.mono_ns,
            "end_mono_ns": self.end_ns,
            "start_wall_ns": self.clock.wall_ns,
            "options": self.what.as_json(),
            "remark": self.remark,
            **self.phases.as_json(self.clock),
            "setup_ns": self.setup_ns,
            "start_ns": self.session.start_ns,
            "stop_ns": self.session.stop_ns,
            "export_ns": export_ns,
            **details,
        }
        with hold_size_signal():
            return self.files.finish(content, execution_trace=self.with_et)

    def discard(self) -> None:
        """Ends it without a trace."""
        self._lines.stop()
        if not self.stopped:
            self.stopped = True
            self.session.stop()
        self.files.drop()

    def abandon(self) -> None:
        """After a failure."""
        self._lines.stop()
        if not self.stopped:
            self.session.abandon()
        self.files.drop()

    def disown(self) -> None:
        """In a forked child."""
        self._lines.stop()
        self.session.disown()


class PlannedWindows:
    """The windows of a plan: rehearsal of one step, warm-up, the steps themselves, the files.

    The rehearsal records one step some steps before and throws it away. It warms the profiler up,
    so that the first step of the window is like the others, and tells how large a step is.
    """

    def __init__(self, plan: Plan, context: WindowContext) -> None:
        self._plan = plan
        self._context = context
        self._recording: Recording | None = None
        self._rehearsal: Recording | None = None
        self._step_bytes: int | None = None
        self._stall_ns = 0
        self.asleep_until = 0
        """Edges of steps before this one are of no use."""

    @property
    def over(self) -> bool:
        """Whether no window is left."""
        return self._plan.over

    @property
    def holds_profiler(self) -> bool:
        """Whether a profiler of ours is prepared or runs."""
        return self._recording is not None or self._rehearsal is not None

    @property
    def recording(self) -> bool:
        """The same, for a fork."""
        return self.holds_profiler

    @property
    def phases(self) -> PhaseTimes | None:
        """Of the window that is recorded; None while none is."""
        recording = self._recording
        return recording.phases if recording is not None and recording.started else None

    def boundary(self, number: int, begins: bool) -> None:
        """An edge of a step."""
        if number < self.asleep_until:
            return
        self._end_rehearsal()
        self._note_time()
        recording = self._recording
        if recording is not None and recording.started:
            self._go_on(recording, number, begins)
        if not begins or (self._recording is not None and self._recording.started):
            return
        times = self._context.times
        wanted = self._plan.current(number=number, trained_ns=times.counter.trained_ns, times=times)
        if wanted is None:
            return
        if number >= wanted.first - LEAD_STEPS:
            self._approach(wanted, number)
        elif wanted.until_ns is None:  # nothing to do, and no step's time is needed
            self.asleep_until = wanted.first - LEAD_STEPS

    def finish(self) -> None:
        """The job ends."""
        recording, wanted = self._recording, self._next_window()
        if self._rehearsal is not None:
            self._rehearsal.discard()
        if recording is not None and recording.started and wanted is not None:
            until = self._context.whole_until(recording, wanted.first)
            whole = wanted.after_last is not None and until >= wanted.after_last
            self._end(recording, wanted, until, None if whole else ENDED)
        elif recording is not None:
            recording.discard()
            self._recording = None
        if not self.over:
            self._refuse(self._next_window(), "the job ended before the window")

    def give_up(self, reason: str) -> None:
        """No window comes any more; none runs."""
        self._refuse(self._next_window(), reason)

    def cut(self, reason: str) -> None:
        """Ends what runs, now."""
        if self._rehearsal is not None:
            rehearsal, self._rehearsal = self._rehearsal, None
            rehearsal.discard()
        recording, wanted = self._recording, self._next_window()
        if recording is None or wanted is None:
            return
        if recording.started:
            self._end(recording, wanted, self._context.whole_until(recording, wanted.first), reason)
        else:
            self._recording = None
            recording.discard()

    def fail(self, reason: str) -> None:
        """Something of ours broke."""
        for recording in (self._rehearsal, self._recording):
            if recording is not None:
                recording.abandon()
        self._rehearsal = self._recording = None
        wanted = self._next_window()
        self._context.note(wanted.window if wanted else 0, "failed", reason)

    def forget(self) -> None:
        """In a forked child."""
        for recording in (self._rehearsal, self._recording):
            if recording is not None:
                recording.disown()
        self._rehearsal = self._recording = None

    # -- one window ----------------------------------------------------------------------------

    def _next_window(self) -> PlannedWindow | None:
        return self._plan.current(number=0, trained_ns=None, times=self._context.times)

    def _approach(self, wanted: PlannedWindow, number: int) -> None:
        recorder = self._context.recorder
        if recorder.is_child() and not recorder.armed:
            return  # a worker of a rank: it has not shown yet that it trains
        if number > wanted.first:
            self._refuse(wanted, f"step {wanted.first} {OVER}")
            return
        refusal = self._context.refusal()
        if number < wanted.first:
            if refusal is None and self._recording is None:
                self._prepare_ahead(wanted, number)
            return
        refusal = refusal or self._too_large(wanted)
        if refusal is not None:
            self._refuse(wanted, refusal)
            return
        if self._recording is None:
            self._recording = self._context.recording(execution_trace=self._context.execution_trace)
        began = {"type": "trace_begin", "time_ns": _now(), "window": wanted.window}
        self._context.recorder.lines.append(began)  # for the launcher, which watches the step times
        self._recording.start()
        self._recording.mark(number, True)

    def _prepare_ahead(self, wanted: PlannedWindow, number: int) -> None:
        if number == wanted.first - 1:
            self._recording = self._context.recording(execution_trace=self._context.execution_trace)
        elif number == wanted.first - 2 and self._step_bytes is None:
            self._rehearsal = self._context.recording(execution_trace=False)
            self._rehearsal.start()

    def _end_rehearsal(self) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is None:
            return
        began = _now()
        rehearsal.stop({})
        rehearsal.session.save(rehearsal.files.raw_draft)
        self._step_bytes = rehearsal.files.raw_draft.stat().st_size
        rehearsal.files.drop()
        self._stall_ns += rehearsal.setup_ns + rehearsal.session.start_ns + _now() - began

    def _too_large(self, wanted: PlannedWindow) -> str | None:
        context, step = self._context, self._step_bytes or 0
        if step > context.limit_bytes:
            limit = context.limit_bytes / 1e6
            return f"one step takes {step / 1e6:.0f} MB, the limit is {limit:.0f} MB"
        count = (wanted.after_last or wanted.first + 1) - wanted.first
        needed = min(step * count, context.limit_bytes) * (1 + FINISHED_SHARE) + SPARE_BYTES
        folder = context.recorder.run.root
        if not fits(folder, int(needed)):
            return f"the disk of {folder} has less than the {needed / 1e6:.0f} MB this may need"
        return None

    def _go_on(self, recording: Recording, number: int, begins: bool) -> None:
        wanted = self._next_window()
        if wanted is None:
            return
        after = self._plan.ends_at(number, self._context.times)
        if after is not None and number >= after:
            self._end(recording, wanted, after, None)
            return
        reason = self._why_too_large(recording, wanted, number)
        if reason is not None and number > wanted.first:
            self._end(recording, wanted, number, reason)
            return
        recording.mark(number, begins)

    def _why_too_large(
        self, recording: Recording, wanted: PlannedWindow, number: int
    ) -> str | None:
        """Why the window must end here, if its trace would get too large."""
        limit = self._context.limit_bytes
        if self._step_bytes is not None:
            size = self._step_bytes * (number - wanted.first + 1)
        else:
            seconds = (_now() - recording.clock.mono_ns) / 1e9
            size = round(seconds * BYTES_PER_S[recording.what.stacks])
        if size <= limit:
            return None
        return f"the trace would exceed {limit / 1e6:.0f} MB (--trace-limit)"

    def _end(
        self, recording: Recording, wanted: PlannedWindow, after: int, cut: str | None
    ) -> None:
        self._recording = None
        details = {
            "window": wanted.window,
            "reason": wanted.reason,
            "request": wanted.request,
            "steps": [wanted.first, after],
            "cut": cut,
        }
        try:
            recording.stop(details)
            content = recording.save(details)
        except Exception:
            recording.abandon()
            raise
        stall = self._stall_ns + sum(
            content[name] for name in ("setup_ns", "start_ns", "stop_ns", "export_ns")
        )
        self._context.note(
            wanted.window, "recorded" if cut is None else "cut", cut, steps=details["steps"],
            stall_ns=stall, stem=recording.files.stem, raw_bytes=content["raw_bytes"],
            remark=recording.remark,
        )  # fmt: skip
        self._stall_ns = 0
        self._plan.advance()

    def _refuse(self, wanted: PlannedWindow | None, reason: str) -> None:
        if self._recording is not None:
            self._recording.discard()
            self._recording = None
        steps = None if wanted is None else [wanted.first, wanted.after_last]
        self._context.note(
            self._plan.window, "refused", reason, steps=steps, stall_ns=self._stall_ns, stem=None
        )
        self._stall_ns = 0
        self._plan.advance()

    def _note_time(self) -> None:
        last = self._context.times.last
        if last is not None and last[2] and not self.holds_profiler:
            self._context.times.keep(last[1])
