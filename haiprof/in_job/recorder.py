"""The buffer that the hooks append to, and the one thread that drains it once a second."""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from typing import Any

from haiprof.base.descriptors import Descriptor
from haiprof.base.safe_files import open_to_append
from haiprof.in_job.collectives import collective_timeout_ns, groups_line
from haiprof.in_job.commands import Commands, Handler, handlers
from haiprof.in_job.files import RankFiles
from haiprof.in_job.frames import take_all
from haiprof.in_job.identity import has_process_group, torch_facts
from haiprof.in_job.recording_window import RecordingWindow
from haiprof.in_job.spans import RingMemory, make_spans
from haiprof.in_job.stack_sampler import StackSampler, stack_rate, why_not_sampled
from haiprof.in_job.threads import call_within, hold_size_signal, start_deaf_thread
from haiprof.in_job.uncaught import Uncaught
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.ring import RING_CAPACITY
from haiprof.run_format.schema import OPTIMIZER, TAG_BITS, TAG_MASK

DRAIN_INTERVAL_S = 1.0
DRAIN_SOON_S = 0.1  # while there are so many spans that they would fill the ring in some seconds
MANY_SPANS = RING_CAPACITY // 4
COST_EVERY_DRAINS, COST_PART = 10, 50  # a line of cost comes after so many, and a fiftieth of all
UNARMED_LIMIT_SPANS = 512  # kept in a process that has not shown yet that it works
UNARMED_NS = 1_000_000_000  # how long calls must go on that may be an evaluation, or no rank's
EXIT_WAIT_S = 5.0  # so long a run directory that does not answer may hold the exit of this process
NOTE_WAIT_S = 1.0
_LOW_BYTE = 0 if sys.byteorder == "little" else 7
_KIND_OF_BYTE = bytes(byte & TAG_MASK for byte in range(256))
"""By a span's first byte: a search in bytes holds the interpreter lock a tenth of a loop's time."""

_now = time.perf_counter_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The wrappers and the trace windows, as far as the recorder needs them: by default none."""

    uninstall: Callable[[], None] = lambda: None  # puts the job's own functions back
    restart_in_fork: Callable[[], None] = lambda: None  # in a forked child, which names its own
    calibrate: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    """Measures what one event, and one call of a module, cost in ns."""
    steps: Callable[[], Mapping[str, Any]] = lambda: {
        "step": None, "job_step": None, "counts_all": False
    }  # fmt: skip
    """What is known of the steps now: `step`, `job_step`, `counts_all`."""
    settings_lines: Callable[[bool], Iterable[dict[str, Any]]] = lambda _last: ()
    """Looks at the process's settings, and gives what is to be written of them now; of (last)."""
    training_thread: Callable[[], int] = lambda: 0  # the thread that trains, whose spans are taken
    works_untrained: Callable[[], bool] = lambda: False  # steps are what repeats: it does not train
    must_stay: Callable[[], bool] = lambda: False  # after the recording's time: for a window
    leaves_by_itself: Callable[[], bool] = lambda: False  # at the job's next span, after a window
    end_window: Callable[[], None] = lambda: None  # ends a trace window before the files are closed
    requests: Mapping[str, Handler] = field(default_factory=dict)
    """What answers requests that concern more than the recorder, by kind."""


class Recorder:
    """Takes spans from the hooks and writes them out.

    A process is recorded once it *arms*: it ran a backward pass or an optimizer step, called
    haiprof.step(), or for a second root modules, loaders or collectives. Until then
    nothing is written and no thread runs, so that launchers, compile workers, DataLoader workers
    and forked children stay as they are. Spans go into `spans`: into a buffer that the thread
    empties into the file, and into a ring in shared memory, from which the node's agent adds to the
    file what the thread did not come to, when the process was killed.
    """

    def __init__(
        self, run: RunPaths, *, time_s: float, warmup_s: float, stacks_hz: float = 0.0,
        memory_history: str = "off",
    ) -> None:  # fmt: skip
        self.run = run
        self.spans = make_spans()
        self.stacks_hz = stacks_hz  # samples of the training thread's stack per second; 0: none
        self.memory_history = memory_history  # of the CUDA allocator: `off`, `auto` or `on`
        self.lines: list[dict[str, Any]] = []
        self.device_records: list[bytes] = []
        self.phases: dict[str, str] = {}
        self.armed = self.closed = False
        self.installed = Installed()  # replaced as a whole when a part of it is added
        self.step_ns = 0  # mean time between optimizer steps in the last second; 0: not known
        self._over = False
        self._shown_ns = 0
        self._paced = (0, 0)
        self.commands: Commands | None = None
        self._files: RankFiles | None = None
        self._ring: RingMemory | None = None
        self._sampler: StackSampler | None = None
        self._start_noted = False
        self._window = RecordingWindow(time_s=time_s, warmup_s=warmup_s)
        self._exiting = False
        self._pause_s = DRAIN_INTERVAL_S
        self._make_locks()
        self._was_forked = False
        self._last_line: Mapping[str, Any] | None = None
        self._facts: dict[str, Any] = {}
        self.uncaught = Uncaught(run, self.describe)
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.finish)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Recorder:
        """From what the launcher wrote for the hook."""
        return cls(
            RunPaths(Path(config["run_dir"])), time_s=float(config["time"]),
            warmup_s=float(config["warmup"]), stacks_hz=stack_rate(config),
            memory_history=str(config.get("memory_history", "off")),
        )  # fmt: skip

    @property
    def attempt(self) -> int | None:
        """Which process of its rank this is; None until its folder is claimed."""
        return None if self._files is None else self._files.attempt

    def describe(self) -> dict[str, Any]:
        """How far this process is, for what it leaves when it fails."""
        return {
            "attempt": self.attempt, "armed": self.armed, "step": self.installed.steps()["step"],
        }  # fmt: skip

    def arm(self) -> None:
        """Starts the thread; called on the training thread once the process is one of the job's."""
        if self.armed or self.closed:
            return
        self.armed = True
        self._facts = torch_facts()  # here: the current device is the thread's own
        timeout_ns = collective_timeout_ns()
        if timeout_ns is not None:
            self.lines.append({"type": "collective_timeout", "timeout_ns": timeout_ns})
        groups = groups_line()
        self.lines.extend([] if groups is None else [groups])
        if _has_parent():
            from multiprocessing.util import Finalize

            Finalize(None, self.finish, exitpriority=0)  # such processes end without atexit
        try:  # without a ring the job is recorded all the same; the run says that there is none
            self._ring = ring = RingMemory(warm=not self._window.warmup_s)
            self.spans.attach(ring.address)
        except (OSError, AttributeError) as error:
            self._ring = None
            self.lines.append({"type": "no_ring", "reason": f"{type(error).__name__}: {error}"})
        self._start_thread()

    def _start_thread(self) -> None:
        self._wake.acquire()
        self._ended.acquire()
        try:
            start_deaf_thread(self._loop)
        except BaseException:
            self._ended.release()
            raise

    def show_work(self) -> None:
        """A span of a process that has not trained: a rank may never do, a worker is left alone."""
        self._shown_ns = self._shown_ns or _now()
        many = len(self.spans) > UNARMED_LIMIT_SPANS
        if not many and _now() - self._shown_ns < UNARMED_NS:
            return
        if not self.is_child() or self._is_in_group():
            self.arm()
        elif many:
            self.spans.clear()

    def sample_early(self) -> None:
        """Samples from the first fetch of a batch on: it may take longer than all that follows."""
        # Files are opened for it when the process trains. Not at a loader's iterator: its workers
        # are forked there, and Python warns of a fork beside threads.
        if self._sampler is None and not (self.closed or self._window.warmup_s or self.is_child()):
            self._sampler = self._make_sampler()

    def _is_in_group(self) -> bool:
        """Whether this process has made itself a rank: a forked worker has its parent's groups."""
        return not self._was_forked and has_process_group()

    def is_child(self) -> bool:
        """Whether this may be a worker of a rank: such a process is recorded only if it trains."""
        return self._was_forked or _has_parent()

    def finish(self) -> None:
        """Has the thread write what is left, and waits for it; at exit of the process."""
        # Nothing is written here: a disk that hangs holds the thread, and the job's exit no longer
        # than `EXIT_WAIT_S`. What the file has by then are whole records.
        self.uncaught.finish()
        self.installed.end_window()
        unseen = self.closed or not len(self.spans)
        if not self.armed and (unseen or (self.is_child() and not self._is_in_group())):
            if not self.closed:
                self._close(None)
            return
        woken, self._exiting = self._exiting, True
        if self._sampler is not None:
            self._sampler.stop()  # nothing asks for the interpreter while it is torn down
        try:
            if not self.armed:
                self.armed = True
                self._start_thread()
            elif not woken:
                self._wake.release()
        except Exception as error:
            self.fault("finish", error)
        if self._ended.acquire(timeout=EXIT_WAIT_S):
            self._ended.release()

    def fault(self, where: str, error: BaseException) -> None:
        """Something of ours broke: everything is switched off, and the run directory says why."""
        # Files are left to the thread, which may be writing to them.
        if is_foreign(error):
            raise error
        if self.closed:
            return
        reason = f"{type(error).__name__}: {error}"
        self._close({"type": "hook_error", "time_ns": _now(), "where": where, "reason": reason})
        if not self.armed:
            call_within(NOTE_WAIT_S, note_failure, self.run, f"{where}: {reason}")

    def _loop(self) -> None:
        """Body of the thread: all that is ever written to the run directory is written here."""
        count, cost_due = 0, COST_EVERY_DRAINS
        try:
            with self.installing:  # a job that trains already steps on meanwhile
                pass
            try:
                # Also of a hook that has broken meanwhile, and has to say so.
                self._files = files = RankFiles(self.run, self.phases, self._facts)
                files.event_ns, files.module_call_ns = self.installed.calibrate()
                self._listen(files)
            except Exception as error:
                self.fault("drain", error)
            while not self.closed:
                exiting = self._exiting  # before the last drain, which is to have all spans
                try:
                    self._drain()
                    count += 1
                    if count >= cost_due and self._files is not None and not self.closed:
                        cost_due = count + max(COST_EVERY_DRAINS, count // COST_PART)
                        self._files.note_cost(self._window.started_ns)
                    if exiting:
                        self._end("exit")
                except Exception as error:
                    self.fault("drain", error)
                if not self.closed:
                    self._wake.acquire(timeout=self._pause_s)
            self._close_files()
        finally:
            self._ended.release()

    def _make_locks(self) -> None:
        self.installing = _thread.allocate_lock()  # held until all wrappers are in place
        self._wake = _thread.allocate_lock()  # held while the thread is to sleep
        self._ended = _thread.allocate_lock()  # held by the thread

    def _drain(self) -> None:
        """Moves the buffer's whole spans to the file; ends the recording when its time is up."""
        files = self._files
        if self.closed or files is None:
            return
        began = time.thread_time_ns()
        batch = self._take()
        kept = array("q")
        if not self._over:
            untrained = self.installed.works_untrained()
            kept, self._over = self._window.cut(batch, _now(), untrained=untrained)
        if self._window.started_ns is not None and not self._start_noted:
            self._start_noted = True
            line = {"type": "record_start", "time_ns": self._window.started_ns}
            files.note({**line, "optimizer_steps_before": self._window.steps_before})
            self._start_sampler(files)
        for line in (*take_all(self.lines), *self.installed.settings_lines(False)):
            files.note(line)
        records = take_all(self.device_records)
        files.write(kept, records if self._start_noted else [])
        if self._ring is not None:
            opens_ns, closes_ns = self._window.limits()
            self._ring.settle(len(batch) // 2, opens_ns=opens_ns, closes_ns=closes_ns)
        self._pause_s = DRAIN_SOON_S if len(batch) // 2 > MANY_SPANS else DRAIN_INTERVAL_S
        if self._sampler is not None and self._start_noted:
            files.write_stacks(self._sampler.take_line())
        files.beat()
        files.drain_cpu_ns += time.thread_time_ns() - began
        if self._over and not self.installed.must_stay():
            self._end("time")

    def _take(self) -> array[int]:
        """The buffer's spans, packed as they go to the file (schema.PHASES)."""
        taken = self.spans.take()
        packed = array("q")
        packed.frombytes(taken)
        kinds = taken[_LOW_BYTE :: 2 * packed.itemsize].translate(_KIND_OF_BYTE)
        steps = kinds.count(OPTIMIZER)
        if steps > 1:
            first, last = (
                packed[2 * find(b"%c" % OPTIMIZER) + 1] for find in (kinds.find, kinds.rfind)
            )
            self.step_ns = (last - first >> TAG_BITS) // (steps - 1)
        elif not steps:
            self._pace_untrained()
        return packed

    def _pace_untrained(self) -> None:
        """The mean time of steps that no optimizer ends, as often as there are some."""
        count, then = self._paced
        now, steps = _now(), self.installed.steps()["job_step"] or 0
        if not then or steps < count:
            self._paced = (steps, now)
        elif steps > count:
            self.step_ns = (now - then) // (steps - count)
            self._paced = (steps, now)

    def _start_sampler(self, files: RankFiles) -> None:
        """Beside the training from here on; where it cannot be, the run says why."""
        if not self.stacks_hz or self._over:
            return
        reason = why_not_sampled()
        if reason:
            files.note({"type": "stacks_failed", "reason": reason})
            return
        sampler = self._sampler or self._make_sampler()
        if sampler is None:
            return
        try:
            files.open_stacks(sampler.header())
        except OSError as error:
            files.note({"type": "stacks_failed", "reason": str(error)})
            sampler.stop()
            self._sampler = None
        else:
            self._sampler = sampler
            sampler.begin_steps()

    def _make_sampler(self) -> StackSampler | None:
        """One that has started; None where stacks are not sampled or cannot be."""
        if not self.stacks_hz or why_not_sampled():
            return None
        sampler = StackSampler(
            self.installed.training_thread, hz=self.stacks_hz, note=self.lines.append
        )
        sampler.start()
        return sampler

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        if self._files is not None:
            self._files.note_cost(self._window.started_ns)
            for each in self.installed.settings_lines(True):
                self._files.note(each)
        ended_ns = self._window.ended_ns or _now()
        line = {"type": "record_end", "time_ns": ended_ns, "reason": reason}
        left = {"left_at": self.uncaught.left_at} if self.uncaught.left_at else {}
        self._close({**line, "uncaught": self.uncaught.seen, **left})

    def _close(self, last_line: Mapping[str, Any] | None) -> None:
        """Takes the hooks out, on whichever thread this happens."""
        self.closed = True
        self._last_line = last_line
        if self._sampler is not None:
            self._sampler.stop()
        if not self.installed.leaves_by_itself():
            self.installed.uninstall()
        self.spans.clear()

    def _close_files(self) -> None:
        files, self._files = self._files, None
        if files is None:
            return
        files.keep_collectives()
        if self._sampler is not None and self._start_noted:
            files.write_stacks(self._sampler.take_line())
        if self._last_line is not None:
            files.note(self._last_line)
        if self._ring is not None:
            self._ring.end()
        files.close()

    def _listen(self, files: RankFiles) -> None:
        """Starts answering requests: goes on after the recording, until the process ends."""
        answers = {**handlers(lambda: files.collectives, self.progress), **self.installed.requests}
        self.commands = Commands(self.run, answers, self.lines.append)
        self.commands.start({"rank": files.rank, "attempt": files.attempt}, ring=self._ring)

    def progress(self) -> dict[str, Any]:
        """What is known of the steps at this moment."""
        return {
            "recording": not self.closed, "step_ns": self.step_ns or None, **self.installed.steps(),
        }  # fmt: skip

    def _after_fork(self) -> None:
        """In a forked child: nothing of the parent's is written, and it must train to arm."""
        if self.commands is not None:
            self.commands.forget()
            self.commands = None
        self._files = None  # not closed: some file systems wait for the server then
        self._sampler = None  # its thread is the parent's
        self._start_noted = self._over = False
        self._exiting = False
        self._make_locks()
        self._was_forked = True
        self.armed = False
        self._shown_ns, self._paced = 0, (0, 0)
        self.spans.detach()
        self.spans.clear()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
        self.lines.clear()
        self.device_records.clear()
        window = self._window
        self._window = RecordingWindow(time_s=window.time_s, warmup_s=window.warmup_s)
        self.installed.restart_in_fork()


def is_foreign(error: BaseException) -> bool:
    """Whether a signal handler of the job raised it, while our lines happened to run."""
    codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
    return any(
        getattr(part, "__code__", None) in codes
        for number in signal.valid_signals()
        for part in _handler_parts(signal.getsignal(number))
    )


def _handler_parts(handler: Any) -> tuple[Any, ...]:
    """The functions that may run when a handler is called: itself, a method's, a partial's."""
    if handler is None or isinstance(handler, int):
        return ()
    inner = getattr(handler, "func", handler)
    return (inner, getattr(inner, "__func__", None), vars(type(inner)).get("__call__"))


def note_failure(run: RunPaths, text: str) -> None:
    """One line in the run directory for a process that has no folder of its own."""
    try:
        with hold_size_signal():
            file = Descriptor(open_to_append(run.boot_failures, below=run.root))
            os.write(file.check(), f"pid {os.getpid()}: {text}\n".encode(errors="replace"))
            file.close()
    except OSError:
        return  # the run directory is gone or full: nobody is left to tell


def _has_parent() -> bool:
    """Whether multiprocessing started this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None
