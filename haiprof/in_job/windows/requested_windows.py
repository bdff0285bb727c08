"""Windows that were asked for: rehearsed, recorded, kept; and the tools that every window needs."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from haiprof.base.safe_files import make_folder, remove_file, rename
from haiprof.in_job.identity import process_details, rank_and_world, torch_facts
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.threads import hold_size_signal
from haiprof.in_job.windows.beside_profiler import ForwardLines, PhaseTimes
from haiprof.in_job.windows.profiler_session import Guard, ProfilerOptions, Session, fits
from haiprof.in_job.windows.step_plan import LEAD_STEPS, Plan, PlannedWindow, StepTimes
from haiprof.run_format.control import OVER
from haiprof.run_format.layout import ET_RAW_SUFFIX, RAW_SUFFIX, SIDECAR_SUFFIX, RunPaths
from haiprof.run_format.schema import ClockAnchor
from haiprof.run_format.writer import write_json

SPARE_BYTES = 64_000_000
FINISHED_SHARE = 0.3  # of the raw size: the compressed trace, while both are there
# Where no step could be rehearsed: what torch.profiler writes at the most per second of training,
# measured with eager operators back to back (benchmarks/in_process.py).
BYTES_PER_S = {False: 150_000_000, True: 400_000_000}
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_HOST_LIMIT = 80
ENDED = "the job ended inside the window"

_now = time.perf_counter_ns


class WindowFiles:
    """The files of one window: drafts until all are whole, and the sidecar last."""

    def __init__(self, run: RunPaths, clock: ClockAnchor) -> None:
        self._root, self._folder = run.root, run.trace_parts
        self.clock = clock  # when the window began
        self._draft = self.stem
        make_folder(self._folder, below=run.root, trusted=True)

    @property
    def stem(self) -> str:
        """What the window's files are named by."""
        host = _UNSAFE.sub("-", socket.gethostname())[:_HOST_LIMIT] or "host"
        rank, _ = rank_and_world()
        return f"rank{rank}_{host}_{os.getpid()}.{self.clock.wall_ns}"

    @property
    def raw_draft(self) -> Path:
        """Where Kineto writes."""
        return self._folder / f".{self._draft}{RAW_SUFFIX}"

    @property
    def et_draft(self) -> Path:
        """Where the execution trace observer writes."""
        return self._folder / f".{self._draft}{ET_RAW_SUFFIX}"

    def finish(self, details: Mapping[str, Any], *, execution_trace: bool) -> dict[str, Any]:
        """Gives the files their names and writes the sidecar; what that says."""
        raw_bytes = self.raw_draft.stat().st_size
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if raw_bytes >= limit != resource.RLIM_INFINITY:  # torch does not say that it was cut
            raise OSError(27, "larger than a file may be (ulimit -f)", str(self.raw_draft))
        et_bytes = self.et_draft.stat().st_size if execution_trace else None
        content = {
            **process_details(), "stem": self.stem, "event_count": None, **details,
            "raw_bytes": raw_bytes, "et_bytes": et_bytes,
        }  # fmt: skip
        rename(self.raw_draft, self._folder / f"{self.stem}{RAW_SUFFIX}", below=self._root)
        if execution_trace:
            rename(self.et_draft, self._folder / f"{self.stem}{ET_RAW_SUFFIX}", below=self._root)
        write_json(self._folder / f"{self.stem}{SIDECAR_SUFFIX}", content, below=self._root)
        return content

    def drop(self) -> None:
        """Removes the drafts."""
        for draft in (self.raw_draft, self.et_draft):
            with contextlib.suppress(OSError):
                remove_file(draft, below=self._root)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowContext:
    """What every window needs."""

    recorder: Recorder
    guard: Guard
    what: ProfilerOptions
    times: StepTimes
    ended: Callable[[int], bool]  # whether the step before this one has had its last optimizer step
    execution_trace: bool
    limit_bytes: int
    request: str | None = None  # who asked for the windows while the job ran, and waits for a reply

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


class Recording:
    """One window under way: its profiler and its files."""

    def __init__(self, context: WindowContext, *, rehearses: bool = False) -> None:
        what = context.what
        self.remark: str | None = None
        if what.stacks and sys.getprofile() is not None:  # torch's stacks would throw it out
            what = replace(what, stacks=False)
            self.remark = "no Python stacks: the job's own profiler (sys.setprofile) uses them"
        self.what = what
        self._context = context
        self.files = WindowFiles(context.recorder.run, ClockAnchor.now())
        self.with_et = context.execution_trace and not rehearses
        path = self.files.et_draft if self.with_et else None
        self.session = Session(what, context.guard, path)
        self.clock = self.files.clock
        self.end_ns = 0
        self.started = self.stopped = False
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
        identity, (rank, world) = torch_facts(), rank_and_world()
        own = {
            "run": self._context.recorder.run.root.name, "rank": rank, "world_size": world,
            "host": socket.gethostname(), "pid": os.getpid(), "gpu_uuid": identity["gpu_uuid"],
            "torch": identity["torch"], "clock": asdict(self.clock),
            **({} if lines is None else {"lines": lines}), **details,
        }  # fmt: skip
        # As torch writes it itself where torch.distributed is on.
        shared = {"rank": rank, "world_size": world, "backend": None}
        self.session.stop({"distributedInfo": shared, "haiprof": own})

    def save(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """Writes trace and sidecar; the sidecar's content."""
        export_ns = self.session.save(self.files.raw_draft)
        content = {
            "attempt": self._context.recorder.attempt, "gpu_uuid": torch_facts()["gpu_uuid"],
            "start_mono_ns": self.clock.mono_ns, "end_mono_ns": self.end_ns,
            "start_wall_ns": self.clock.wall_ns, "options": asdict(self.what),
            "remark": self.remark, **self.phases.as_json(self.clock),
            "setup_ns": self.session.setup_ns, "start_ns": self.session.start_ns,
            "stop_ns": self.session.stop_ns, "export_ns": export_ns, **details,
        }  # fmt: skip
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


class Windows:
    """What there is of windows of any sort: the recording under way, and its ends."""

    def __init__(self, context: WindowContext) -> None:
        self._context = context
        self._recording: Recording | None = None
        self._rehearsal: Recording | None = None  # of a step before a window; thrown away
        self._step_bytes: int | None = None
        self.asleep_until = 0  # edges of steps before this one are of no use

    @property
    def holds_profiler(self) -> bool:
        """Whether a profiler of ours is prepared or runs."""
        return self._recording is not None or self._rehearsal is not None

    @property
    def phases(self) -> PhaseTimes | None:
        """Of the window that is recorded; None while none is."""
        recording = self._recording
        return recording.phases if recording is not None and recording.started else None

    def cut(self, reason: str) -> None:
        """Ends what runs, now; what was only prepared is thrown away."""
        recording = self._recording
        if recording is not None and recording.started:
            self._cut_recording(recording, reason)
        else:
            for each in self._take():
                each.discard()

    def fail(self, reason: str) -> None:
        """Something of ours broke."""
        for recording in self._take():
            recording.abandon()
        self._context.note(self._number, "failed", reason)

    def forget(self) -> None:
        """In a forked child."""
        for recording in self._take():
            recording.disown()

    @property
    def _number(self) -> int:
        """Of the window that comes next or runs."""
        raise NotImplementedError

    def _cut_recording(self, recording: Recording, reason: str) -> None:
        raise NotImplementedError

    def _take(self) -> list[Recording]:
        """What is under way, which is held no longer."""
        found = [each for each in (self._rehearsal, self._recording) if each is not None]
        self._rehearsal = self._recording = None
        return found

    def _note_recorded(
        self, recording: Recording, content: Mapping[str, Any], details: Mapping[str, Any],
        reason: str | None, *, stall_ns: int, **more: Any,
    ) -> None:  # fmt: skip
        """Says what was recorded, and how long the job stood still for it."""
        costs = (content[name] for name in ("setup_ns", "start_ns", "stop_ns", "export_ns"))
        self._context.note(
            details["window"], "recorded" if details["cut"] is None else "cut", reason,
            steps=details["steps"], **more, stall_ns=stall_ns + sum(costs),
            stem=recording.files.stem, raw_bytes=content["raw_bytes"], remark=recording.remark,
        )  # fmt: skip


class PlannedWindows(Windows):
    """The windows of a plan: rehearsal of one step, warm-up, the steps themselves, the files."""

    def __init__(self, plan: Plan, context: WindowContext) -> None:
        super().__init__(context)
        self._plan = plan
        self._stall_ns = 0

    @property
    def over(self) -> bool:
        """Whether no window is left."""
        return self._plan.over

    def boundary(self, number: int, begins: bool) -> None:
        """An edge of a step."""
        if number < self.asleep_until:
            return
        self._end_rehearsal()
        last = self._context.times.last
        if last is not None and last[2] and not self.holds_profiler:
            self._context.times.keep(last[1])
        recording = self._recording
        if recording is not None and recording.started:
            self._go_on(recording, number, begins)
        if not begins or (self._recording is not None and self._recording.started):
            return
        wanted = self._plan.find(number, self._context.times)
        if wanted is None:
            return
        if number >= wanted.first - LEAD_STEPS:
            self._approach(wanted, number)
        elif wanted.until_ns is None:  # nothing to do, and no step's time is needed
            self.asleep_until = wanted.first - LEAD_STEPS

    def finish(self) -> None:
        """The job ends."""
        recording, wanted = self._recording, self._plan.upcoming
        if recording is not None and recording.started and wanted is not None:
            until = self._context.whole_until(recording, wanted.first)
            whole = wanted.after_last is not None and until >= wanted.after_last
            self._end(recording, wanted, until, None if whole else ENDED)
        if not self.over:
            self.give_up("the job ended before the window")

    def give_up(self, reason: str) -> None:
        """No window comes any more; none runs."""
        self._refuse(self._plan.upcoming, reason)

    @property
    def _number(self) -> int:
        wanted = self._plan.upcoming
        return wanted.window if wanted else 0

    def _cut_recording(self, recording: Recording, reason: str) -> None:
        wanted = self._plan.upcoming
        if wanted is not None:
            self._end(recording, wanted, self._context.whole_until(recording, wanted.first), reason)

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
                if number == wanted.first - 1:
                    self._recording = Recording(self._context)
                elif number == wanted.first - 2 and self._step_bytes is None:
                    self._rehearsal = Recording(self._context, rehearses=True)
                    self._rehearsal.start()
            return
        refusal = refusal or self._too_large(wanted)
        if refusal is not None:
            self._refuse(wanted, refusal)
            return
        if self._recording is None:
            self._recording = Recording(self._context)
        began = {"type": "trace_begin", "time_ns": _now(), "window": wanted.window}
        self._context.recorder.lines.append(began)  # for the launcher, which watches the step times
        self._recording.start()
        self._recording.mark(number, True)

    def _end_rehearsal(self) -> None:
        # The rehearsal records one step some steps before and throws it away. It warms the profiler
        # up, so that the first step of the window is like the others, and tells how large a step
        # is.
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is None:
            return
        began = _now()
        rehearsal.stop({})
        rehearsal.session.save(rehearsal.files.raw_draft)
        self._step_bytes = rehearsal.files.raw_draft.stat().st_size
        rehearsal.files.drop()
        session = rehearsal.session
        self._stall_ns += session.setup_ns + session.start_ns + _now() - began

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
        wanted = self._plan.upcoming
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
            "window": wanted.window, "reason": wanted.reason, "request": wanted.request,
            "steps": [wanted.first, after], "cut": cut,
        }  # fmt: skip
        try:
            recording.stop(details)
            content = recording.save(details)
        except Exception:
            recording.abandon()
            raise
        self._note_recorded(recording, content, details, cut, stall_ns=self._stall_ns)
        self._stall_ns = 0
        self._plan.advance()

    def _refuse(self, wanted: PlannedWindow | None, reason: str) -> None:
        for recording in self._take():
            recording.discard()
        steps = None if wanted is None else [wanted.first, wanted.after_last]
        self._context.note(
            self._plan.window, "refused", reason, steps=steps, stall_ns=self._stall_ns, stem=None
        )
        self._stall_ns = 0
        self._plan.advance()
