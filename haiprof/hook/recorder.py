"""The buffer that the hooks append to, and the one thread that drains it once a second."""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.hook.answers import handlers
from haiprof.hook.commands import Commands
from haiprof.hook.files import RankFiles
from haiprof.hook.identity import torch_facts
from haiprof.hook.threads import start_deaf_thread
from haiprof.hook.window import Window
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.schema import OPTIMIZER, PHASES, TAG_BITS, TAG_MASK

if TYPE_CHECKING:
    from haiprof.hook.patches import State

DRAIN_INTERVAL_S = 1.0
COST_EVERY_DRAINS = 10
WORDS_PER_SPAN = 3  # start ns, end ns, kind | tag << TAG_BITS
UNARMED_LIMIT_WORDS = 1536  # spans kept in a process that has not shown yet that it trains
EXIT_WAIT_S = 5.0

_now = time.perf_counter_ns


class Recorder:
    """Takes spans from the hooks and writes them out.

    A process is recorded once it *arms*: it ran a backward pass or an optimizer step. Until then
    nothing is written and no thread runs, so that launchers, compile workers, DataLoader workers
    and forked children stay as they are. Three integers per span go into `words`: start and end in
    ns, and `kind | tag << TAG_BITS`. Packing them is the thread's work: between the job's own work,
    with cold caches, it costs several times as much. `words.extend` is atomic under the interpreter
    lock, so no lock is taken in the job's thread.
    """

    def __init__(self, run: RunPaths, *, time_s: float, warmup_s: float) -> None:
        self.run = run
        self.words: list[int] = []
        self.lines: list[dict[str, Any]] = []
        self.device_records: list[bytes] = []
        self.phases: dict[str, str] = {}
        self.armed = False
        self.closed = False
        self.uninstall: Callable[[], None] = _nothing
        self.forked: Callable[[], None] = _nothing
        self.calibrate: Callable[[], tuple[float, float]] = _no_calibration
        self.held: Callable[[], bool] = _not_held
        """Whether the hooks must stay in after the recording's time: for a trace window."""
        self.puts_off: Callable[[], bool] = _not_held
        """Whether a trace window that runs takes the hooks out, at the job's next span."""
        self.ending: Callable[[], None] = _nothing
        """Ends a trace window before the files are closed."""
        self.state: State | None = None
        """What the wrappers share; null until they are installed."""
        self.step_ns = 0
        """Mean time between two optimizer steps in the last second; 0 while it is not known."""
        self._over = False
        self.commands: Commands | None = None
        self._files: RankFiles | None = None
        self._start_noted = False
        self._window = Window(time_s=time_s, warmup_s=warmup_s)
        self._lock = _thread.allocate_lock()
        self._wake = _thread.allocate_lock()
        self._was_forked = False
        self._last_line: Mapping[str, Any] | None = None
        self._facts: dict[str, Any] = {}
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.finish)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Recorder:
        """From what the launcher wrote beside sitecustomize."""
        run = RunPaths(Path(config["run_dir"]))
        return cls(run, time_s=float(config["time"]), warmup_s=float(config["warmup"]))

    @property
    def attempt(self) -> int | None:
        """Which process of its rank this is; null until its folder is claimed."""
        return None if self._files is None else self._files.attempt

    def arm(self) -> None:
        """Starts the thread; called on the training thread at its first backward or step."""
        if self.armed or self.closed:
            return
        self.armed = True
        self._facts = torch_facts()  # here: the current device is the thread's own
        if _has_parent():
            from multiprocessing.util import Finalize

            Finalize(None, self.finish, exitpriority=0)  # such processes end without atexit
        start_deaf_thread(self._loop)

    def overflow(self) -> None:
        """Many spans and still no training: an evaluation is recorded, a worker is left alone."""
        if self.is_child():
            del self.words[:]
        else:
            self.arm()

    def is_child(self) -> bool:
        """Whether this may be a worker of a rank: such a process is recorded only if it trains."""
        return self._was_forked or _has_parent()

    def finish(self) -> None:
        """Writes what is left; at exit of the process."""
        self.ending()
        if not self.closed and not self.armed and (self.is_child() or not self.words):
            self._close(None)
        if not self._lock.acquire(timeout=EXIT_WAIT_S):
            return  # the thread is stuck in a write; the file keeps its whole records
        try:
            self._drain()
            self._end("exit")
        except Exception as error:
            self.fault("finish", error)
        finally:
            self._close_files()
            self._lock.release()

    def fault(self, where: str, error: BaseException) -> None:
        """Something of ours broke: everything is switched off, and the run directory says why.

        Files are left to the thread, which may be writing to them.

        Raises:
            BaseException: The error itself, if it is not ours: a signal handler of the job raised
                while our lines ran, and the job waits for that.
        """
        if is_foreign(error):
            raise error
        if self.closed:
            return
        reason = f"{type(error).__name__}: {error}"
        self._close({"type": "hook_error", "time_ns": _now(), "where": where, "reason": reason})
        if not self.armed:
            note_failure(self.run, f"{where}: {reason}")

    # -- the thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        count = 0
        self._wake.acquire()
        while not self.closed:
            with self._lock:
                try:
                    self._drain()
                    count += 1
                    if count % COST_EVERY_DRAINS == 0:
                        self._note_cost()
                except Exception as error:
                    self.fault("drain", error)
                if self.closed:
                    self._close_files()
            if not self.closed:
                self._wake.acquire(timeout=DRAIN_INTERVAL_S)
        with self._lock:
            self._close_files()

    def _drain(self) -> None:
        """Moves the buffer's whole spans to the file; ends the recording when its time is up."""
        if self.closed:
            return
        if self._files is None:  # once, and so not a part of the cost per step
            self._files = RankFiles(self.run, self.phases, self._facts)
            self._files.event_ns, self._files.module_call_ns = self.calibrate()
            self._listen(self._files)
        files = self._files
        began = time.thread_time_ns()
        batch = self._take()
        kept = array("q")
        if not self._over:
            kept, self._over = self._window.cut(batch, _now())
        self._note_start(files)
        for line in _taken(self.lines):
            files.note(line)
        records = _taken(self.device_records)
        files.write(kept, records if self._start_noted else [])
        files.beat()
        files.drain_cpu_ns += time.thread_time_ns() - began
        if self._over and not self.held():
            self._end("time")

    def _take(self) -> array[int]:
        """The buffer's spans, packed as they go to the file (schema.PHASES)."""
        count = len(self.words) // WORDS_PER_SPAN * WORDS_PER_SPAN
        words = self.words[:count]
        del self.words[:count]
        packed = array("q", bytes(count // WORDS_PER_SPAN * PHASES.record_bytes))
        codes = words[2::3]
        self._note_pace(words[1::3], codes)
        packed[::2] = array(
            "q", [t << TAG_BITS | c & TAG_MASK for t, c in zip(words[::3], codes, strict=True)]
        )
        packed[1::2] = array(
            "q", [t << TAG_BITS | c >> TAG_BITS for t, c in zip(words[1::3], codes, strict=True)]
        )
        return packed

    def _note_pace(self, ends: list[int], codes: list[int]) -> None:
        steps = [end for end, code in zip(ends, codes, strict=True) if code & TAG_MASK == OPTIMIZER]
        if len(steps) > 1:
            self.step_ns = (steps[-1] - steps[0]) // (len(steps) - 1)

    def _note_start(self, files: RankFiles) -> None:
        window = self._window
        if window.started_ns is None or self._start_noted:
            return
        self._start_noted = True
        files.note(
            {
                "type": "record_start",
                "time_ns": window.started_ns,
                "optimizer_steps_before": window.steps_before,
            }
        )

    def _note_cost(self) -> None:
        if self._files is not None and not self.closed:
            self._files.note_cost(self._window.started_ns)

    # -- ends ---------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        self._note_cost()
        ended_ns = self._window.ended_ns or _now()
        self._close({"type": "record_end", "time_ns": ended_ns, "reason": reason})

    def _close(self, last_line: Mapping[str, Any] | None) -> None:
        """Takes the hooks out, on whichever thread this happens."""
        self.closed = True
        self._last_line = last_line
        if not self.puts_off():
            self.uninstall()
        self.words.clear()

    def _close_files(self) -> None:
        """Ends the files, under the lock; later calls do nothing."""
        files, self._files = self._files, None
        if files is None:
            return
        files.keep_collectives()
        if self._last_line is not None:
            files.note(self._last_line)
        files.close()

    def _listen(self, files: RankFiles) -> None:
        """Starts answering requests: goes on after the recording, until the process ends."""
        answers = {
            **handlers(lambda: files.collectives, self.progress),
            "trace": self._trace,
            "activate": self._activate,
        }
        self.commands = Commands(self.run, answers, self.lines.append)
        self.commands.start({"rank": files.rank, "attempt": files.attempt})

    def progress(self) -> dict[str, Any]:
        """What is known of the steps at this moment."""
        state = self.state
        return {
            "recording": not self.closed,
            "step": None if state is None else state.steps_so_far(),
            "step_ns": self.step_ns or None,
            "job_step": None if state is None else state.steps_of_job(),
            "counts_all": state is not None and state.counts_all,
        }

    def _trace(self, request_id: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Plans a trace window that was asked for while the job runs."""
        from haiprof.hook.trace.request import plan_request

        return plan_request(request_id, arguments, recorder=self)

    def _activate(self, _: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Records again, into another run directory, once this recording has ended."""
        from haiprof.hook.again import activate_request

        return activate_request(arguments, recorder=self)

    def _after_fork(self) -> None:
        """In a forked child: nothing of the parent's is written, and it must train to arm."""
        if self.commands is not None:
            self.commands.forget()
            self.commands = None
        files, self._files = self._files, None
        if files is not None:
            files.close()
        self._start_noted = self._over = False
        self._lock = _thread.allocate_lock()
        self._wake = _thread.allocate_lock()
        self._was_forked = True
        self.armed = False
        self.words.clear()
        self.lines.clear()
        self.device_records.clear()
        self._window = self._window.fresh()
        self.forked()


def is_foreign(error: BaseException) -> bool:
    """Whether a signal handler of the job raised it, while our lines happened to run."""
    codes = set()
    traceback = error.__traceback__
    while traceback is not None:
        codes.add(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
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
        with run.boot_failures.open("a", encoding="utf-8") as file:
            file.write(f"pid {os.getpid()}: {text}\n")
    except OSError:
        return  # the run directory is gone or full: nobody is left to tell


def _taken(items: list[Any]) -> list[Any]:
    """Takes out what is there now; what the job's thread appends meanwhile stays."""
    count = len(items)
    taken = items[:count]
    del items[:count]
    return taken


def _has_parent() -> bool:
    """Whether multiprocessing started this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _nothing() -> None:
    """What there is to do before anything is installed."""


def _not_held() -> bool:
    return False


def _no_calibration() -> tuple[float, float]:
    return 0.0, 0.0
