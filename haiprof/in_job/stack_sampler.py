"""Samples the training thread's Python stack beside the training, up to 100 times a second."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType
from typing import Any, NamedTuple

from haiprof.in_job.frames import (
    MAX_DEPTH,
    MAX_PLACES,
    StackTree,
    compiled_part,
    find_codes,
    read_stacks,
    take_all,
    why_not_safe,
)
from haiprof.in_job.threads import start_deaf_thread
from haiprof.run_format.stack_lines import (
    HEADER,
    LEFT_OUT,
    LOCK_STATES,
    LOCK_UNKNOWN,
    SAMPLES,
    STACKS_VERSION,
    WAIT_LETTERS,
    WAIT_UNKNOWN,
    WAITS,
)

DEFAULT_HZ = 100.0
CPU_RATIO = 0.002
"""Of a core, what the sampling thread may take before steps and on average in their first minute.
Waking up alone takes 5 us on hardware, and 25 us on a virtual machine."""
PACE = (
    (10.0, 1.0, 3.0),
    (60.0, 1.0, 0.6),
    (600.0, 0.2, 0.25),
    (3600.0, 0.05, 0.25),
    (float("inf"), 0.01, 0.25),
)
"""Up to an age of its training in seconds: the share of the rate, and of `CPU_RATIO`. By default
100 Hz, then 20, 5 and 1 Hz. Half of the first minute's share is spent in its first ten seconds, so
that short runs have samples enough. A day is 120,000 samples then."""
BEFORE_STEPS = 0.2  # and before its first step, which may be long after the first fetch of a batch
HELD_RATIO = 0.001
"""Of the training thread's time, what samples may take; with deep stacks they become few."""
SLICE_NS, SLICE_SAMPLES, MOST_SLICE_NS = 1_000_000_000, 10, 4_000_000_000
"""Python runs once in so long, or for so many samples: it takes as long as several of them."""
OTHERS_NS = 250_000_000
"""So often other threads are looked at, where there are some; where one of them must hold the lock,
five times as often."""
SLICES_SHARE = 0.5  # of the sampling thread's time, what Python may take after each slice
MIN_SAMPLES = 20  # after so many it is known what one takes
END_WAIT_S = 0.2  # so long the last samples are waited for
MAX_PENDING = 2000  # samples that wait for a disk; while there are as many, no more are taken
OTHERS_LIMIT = 16
THREAD_LIMIT = 256
BUSY_SHARE = 0.05  # a thread that used so much of a core since the last look runs; others wait
_NAME_LIMIT = 80
_NS_PER_S = 1_000_000_000
_NS_PER_US = 1000
_BREAKER_UNTIL = (3, 13)  # from that version on a pending call is seen at once
_SAMPLE_WORDS = 7
_THREAD_CPU_CLOCK = 6  # CPUCLOCK_SCHED of one thread (include/linux/posix-timers.h)

_UNKNOWN = {
    "lock_wait": LOCK_STATES[LOCK_UNKNOWN], "wait": WAIT_LETTERS[WAIT_UNKNOWN], "run_us": -1,
    "queue_us": -1,
}  # fmt: skip
"""Columns that are left out where they say nothing."""

_AT_LOCK = WAITS.index("lock")

_now = time.perf_counter_ns
_ident = threading.get_ident


class _Sample(NamedTuple):
    time_ns: int
    stack: int
    due_ns: int
    cpu_ns: int = -1
    queue_ns: int = -1
    lock_state: int = LOCK_UNKNOWN
    wait: int = WAIT_UNKNOWN


def why_not_sampled() -> str:
    """Why another thread's frames cannot be looked at here; empty where they can."""
    if not isinstance(_thread.start_new_thread, BuiltinFunctionType):
        return "threads are replaced by something else (gevent): none runs in parallel"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python runs threads at the same time: frames may change while they are read"
    return why_not_safe()


class StackSampler:
    """One thread that looks at another one's frames, or has it note them itself.

    Who looks has to hold the interpreter lock. The compiled part finds who holds it when a sample
    is due, takes the sample without waiting, and wakes no Python. Without it, samples come where
    the training thread lets go of the lock for long, so that what runs between small operators is
    seen too seldom, and what follows too often, and nothing is known but the stack. `late_us` says
    how long each sample waited. A thread of its own, as the one that writes may wait for a disk.
    `thread` says which thread is sampled; `note` takes a line for events.jsonl, where sampling ends
    by an error. Frames outside the function `until` are not looked at.
    """

    def __init__(
        self, thread: Callable[[], int], *, hz: float, note: Callable[[dict[str, Any]], None],
        until: CodeType | None = None,
    ) -> None:  # fmt: skip
        self._thread = thread
        self.hz = hz  # samples per second, before the run's age is counted in
        self._note = note
        self._until = until
        self._libraries = library_folders()
        self._tree = StackTree(self._libraries)
        self._stack_of_node = [0]
        self._samples: list[_Sample] = []
        self._others: list[tuple[int, int, int, int, int]] = []
        self._threads: dict[str, int] = {}
        self._new_threads: list[tuple[int, str]] = []
        self._cpu: dict[int, tuple[int, int]] = {}
        self._wake = _thread.allocate_lock()
        self._ended = _thread.allocate_lock()
        self._compiled = compiled_part()
        self.totals = (_now(), 0, 0, 0, 0)
        """When samples were last summed up; their number till then, CPU time of the sampling
        thread, how long the training thread took samples itself, and the lock was held beside it.
        """
        self._costs_ns = (0.0, 0.0)
        self._slice_cost_ns = 0.0
        self._sampling_ident = 0
        self._collected_ns = 0  # CPU time of the sampling thread in which the collector ran there
        self._collects_since_ns = 0
        self._stopped = False
        self._random = os.getpid()
        self._steps_began_ns: int | None = None
        self._looked_ns = 0

    def start(self) -> None:
        """Starts a thread that samples until it is stopped."""
        self.prepare()
        self._ended.acquire()
        start_deaf_thread(self._run)

    def prepare(self) -> None:
        """Makes it ready for `sample_until`, on whichever thread."""
        self._wake.acquire()
        gc.callbacks.append(self._on_collection)
        if self._compiled is not None:
            self._compiled.begin_samples(self._until, MAX_PENDING, MAX_PLACES)
            interval_us = round(1e6 * sys.getswitchinterval())
            self._compiled.prepare(interval_us, sys.version_info < _BREAKER_UNTIL)
            self.totals = (_now(), 0, 0, *self._compiled.held_ns())

    def begin_steps(self, age_s: float = 0.0) -> None:
        """The job trains, and has for so long: the age of the run counts from there."""
        began_ns = _now() - int(age_s * _NS_PER_S)
        self._steps_began_ns = min(self._steps_began_ns or began_ns, began_ns)

    def stop(self) -> None:
        """Ends the thread, soon; from any thread."""
        if not self._stopped:
            self._stopped = True
            with contextlib.suppress(ValueError):  # the job may have removed it
                gc.callbacks.remove(self._on_collection)
            if self._compiled is not None:
                self._compiled.stop()
            self._wake.release()

    def header(self, worker: int | None = None) -> dict[str, Any]:
        """The first line of this process."""
        return {
            "type": HEADER, "version": STACKS_VERSION, "pid": os.getpid(), "worker": worker,
            "time_ns": _now(), "hz": self.hz, "libraries": self._libraries,
        }  # fmt: skip

    def take_line(self) -> dict[str, Any] | None:
        """What was sampled since the last time, as a line; None where there is nothing."""
        if self._stopped and self._ended.acquire(timeout=END_WAIT_S):
            self._ended.release()  # what was sampled last comes when the thread ends
        samples, others = take_all(self._samples), take_all(self._others)
        threads = take_all(self._new_threads)
        if not samples:
            return None
        first = samples[0].time_ns
        line = {
            "type": SAMPLES, "pid": os.getpid(), "time_ns": first, **self._tree.take_definitions(),
            "offset_us": [(s.time_ns - first) // _NS_PER_US for s in samples],
            "late_us": [(s.time_ns - s.due_ns) // _NS_PER_US for s in samples],
            "stack": [s.stack for s in samples],
            "lock_wait": "".join(LOCK_STATES[s.lock_state] for s in samples),
            "wait": "".join(WAIT_LETTERS[s.wait] for s in samples),
            "run_us": [s.cpu_ns // _NS_PER_US for s in samples],
            "queue_us": [s.queue_ns // _NS_PER_US for s in samples], "cpu_ns": self.totals[2],
            "held_ns": self.totals[3] + self.totals[4],
        }  # fmt: skip
        for name, unknown in _UNKNOWN.items():
            if set(line[name]) == {unknown}:
                del line[name]
        if others:
            line["others"] = [[(o[0] - first) // _NS_PER_US, *o[1:]] for o in others]
        return {**line, "threads": threads} if threads else line

    def sample_until(self, pause_ns: int) -> bool:
        """Samples for a while; False once it has been stopped."""
        ends = _now() + pause_ns
        self._sampling_ident = _ident()
        while not self._stopped and _now() < ends:
            known = getattr(threading, "_active", {})  # the job's Python threads
            others = len(known) - (self._thread() in known) - (_ident() in known) > 0
            slice_ns = max(OTHERS_NS, int(self._slice_cost_ns / (SLICES_SHARE * self._pace()[1])))
            slice_ends = min(ends, _now() + slice_ns) if others else ends
            count = 0
            if self._compiled is None:
                self._sample_plainly()
            else:
                count = self._wait_for_samples(self._compiled, slice_ends)
            began_ns = self._cpu_ns()
            if self._compiled is not None:
                self._take_samples(self._compiled, count)
            if others and not self._stopped:
                self._look_at_others()
            took_ns = self._cpu_ns() - began_ns
            self._slice_cost_ns += (took_ns - self._slice_cost_ns) / 4
        return not self._stopped

    def _on_collection(self, phase: str, _info: dict[str, int]) -> None:
        """What gc.callbacks calls before and after each collection, on the thread that it is on."""
        # A thread that makes an object may have to collect all of the job's. Counted as the price
        # of samples, that would leave none for the rest of a run.
        if _ident() != self._sampling_ident:
            return
        now_ns = time.thread_time_ns()
        if phase == "start":
            self._collects_since_ns = now_ns
        elif self._collects_since_ns:
            self._collected_ns += now_ns - self._collects_since_ns
            self._collects_since_ns = 0

    def _cpu_ns(self) -> int:
        """CPU time of this thread, the sampling one, without the collector's."""
        return time.thread_time_ns() - self._collected_ns

    def _wait_for_samples(self, compiled: Any, ends_ns: int) -> int:
        """Has samples taken until a time, or until others are to be looked at; says how many."""
        ident = self._thread()
        main = threading.main_thread().ident
        thread = getattr(threading, "_active", {}).get(ident)
        number = os.getpid() if ident == main else getattr(thread, "native_id", None) or 0
        returns_ns = self._looked_ns + OTHERS_NS // 5
        pause_ns = self.pause_ns()
        return compiled.sample(ident, ident == main, number, pause_ns, ends_ns, returns_ns) or 0

    def _take_samples(self, compiled: Any, count: int) -> None:
        """Takes over the samples, and counts what they took."""
        words, nodes, unknown = compiled.take_samples()
        for caller, code, instruction in nodes:
            found = self._tree.below(self._stack_of_node[caller], (code, instruction))
            self._stack_of_node.append(found)
        for code in find_codes(unknown):  # of functions that have left the stack
            compiled.know_code(code)
        taken = array("q", words)
        room = MAX_PENDING - len(self._samples)
        for at in range(0, min(len(taken), _SAMPLE_WORDS * max(room, 0)), _SAMPLE_WORDS):
            time_ns, node, *moment = taken[at : at + _SAMPLE_WORDS]
            stack = LEFT_OUT if node == LEFT_OUT else self._stack_of_node[node]
            self._samples.append(_Sample(time_ns, stack, *moment))
        if count:
            now = (_now(), self.totals[1] + count, self._cpu_ns(), *compiled.held_ns())
            _, _, cpu_ns, own_ns, lock_ns = (a - b for a, b in zip(now, self.totals, strict=True))
            weight = min(count / MIN_SAMPLES, 1.0)  # of what was seen last
            self._costs_ns = tuple(
                old + weight * (new / count - old)
                for old, new in zip(self._costs_ns, (cpu_ns, own_ns + lock_ns), strict=True)
            )
            self.totals = now

    def _sample_plainly(self) -> None:
        """Waits for the time of one sample, and for the lock."""
        self._random = (self._random * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        due_ns = _now() + int(self.pause_ns() * (0.5 + self._random / 0x80000000))
        self._wake.acquire(timeout=max(due_ns - _now(), 0) / _NS_PER_S)
        if self._stopped:
            return
        owner = self._thread()
        stack = read_stacks((owner,), until=self._until, limit=MAX_DEPTH).get(owner, ())
        if len(self._samples) < MAX_PENDING:
            self._samples.append(_Sample(_now(), self._tree.find(stack), due_ns))
        self.totals = (_now(), self.totals[1] + 1, self._cpu_ns(), 0, 0)

    def _run(self) -> None:
        try:
            while self.sample_until(
                min(max(SLICE_NS, SLICE_SAMPLES * self.pause_ns()), MOST_SLICE_NS)
            ):
                continue
        except Exception as error:  # the recording goes on without it
            self._note({"type": "stacks_failed", "reason": f"{type(error).__name__}: {error}"})
        finally:
            self._ended.release()

    def _pace(self) -> tuple[float, float]:
        """By the age of the run: the share of the rate, and of a core."""
        if self._steps_began_ns is None:
            return BEFORE_STEPS, CPU_RATIO
        age_s = (_now() - self._steps_began_ns) / _NS_PER_S
        pace, part = next(row[1:] for row in PACE if age_s < row[0])
        return pace, part * CPU_RATIO

    def pause_ns(self) -> int:
        """To the next sample, in the mean: by the age of the run, and by what a sample takes."""
        pace, cpu_ratio = self._pace()
        cpu_ns, held_ns = self._costs_ns
        return int(max(_NS_PER_S / (self.hz * pace), cpu_ns / cpu_ratio, held_ns / HELD_RATIO))

    def _look_at_others(self) -> None:
        """Which other Python threads used a core, and what they are at: may hold the lock."""
        # Where training waits for a lock of the job's, who holds it may sleep: then all of them.
        if _now() < self._looked_ns + OTHERS_NS // 5:
            return
        self._looked_ns, owner = _now(), self._thread()
        stacks = read_stacks(None, until=self._until, limit=MAX_DEPTH)
        skipped = (owner, _ident())
        at_lock = any(  # the last sample, and that it has not moved on since
            last.wait == _AT_LOCK and self._tree.find(stacks.get(owner, ())) == last.stack
            for last in self._samples[-1:]
        )
        known = getattr(threading, "_active", {})  # enumerate() would wait for the job's lock
        used = {}
        for ident in [other for other in stacks if other not in skipped][:OTHERS_LIMIT]:
            thread = known.get(ident)
            cpu_ns = _thread_cpu_ns(getattr(thread, "native_id", None))
            if cpu_ns is None:
                continue
            time_ns = _now()
            used[ident] = (time_ns, cpu_ns)
            before_ns, before_cpu_ns = self._cpu.get(ident, (time_ns, cpu_ns))
            share = (cpu_ns - before_cpu_ns) / max(time_ns - before_ns, 1)
            if share >= BUSY_SHARE or at_lock:
                number = self._thread_number(str(getattr(thread, "name", ""))[:_NAME_LIMIT])
                stack = self._tree.find(stacks[ident])
                since_us = (time_ns - before_ns) // _NS_PER_US
                self._others.append((time_ns, number, stack, round(1000 * share), since_us))
        self._cpu = used

    def _thread_number(self, name: str) -> int:
        """Threads go by their names: a pool starts new ones again and again."""
        known = self._threads.get(name)
        if known is not None:
            return known
        number = min(len(self._threads), THREAD_LIMIT)
        if number < THREAD_LIMIT:
            self._threads[name] = number
            self._new_threads.append((number, name))
        return number


def stack_rate(config: Mapping[str, Any]) -> float:
    """Samples per second that the launcher's options ask for; 0 for none."""
    if "stacks" not in config.get("recorder", ()):
        return 0.0
    interval_s = config.get("interval", {}).get("stacks")
    return DEFAULT_HZ if interval_s is None else 1.0 / float(interval_s)


def library_folders() -> list[str]:
    """Folders of installed code."""
    files = (os.__file__, getattr(sys.modules.get("torch"), "__file__", None))
    return [os.path.dirname(file) for file in files if file]


def _thread_cpu_ns(native_id: int | None) -> int | None:
    """CPU time of a thread of this process; None where it is over or not known."""
    # By the kernel's number of the thread: pthread_getcpuclockid would crash on one that is over.
    if native_id is None:
        return None
    try:
        return time.clock_gettime_ns(~native_id << 3 | _THREAD_CPU_CLOCK)
    except OSError:
        return None
