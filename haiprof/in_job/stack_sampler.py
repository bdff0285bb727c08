"""Samples the training thread's Python stack beside the training, a few times a second."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType
from typing import Any

from haiprof.in_job.frames import Place, Sample, read_stacks, why_not_safe
from haiprof.in_job.sample_clock import SampleClock, load_sample_clock
from haiprof.in_job.stack_tree import MAX_DEPTH, StackTree, take_all
from haiprof.in_job.threads import start_deaf_thread
from haiprof.run_format.stack_lines import (
    HEADER,
    LOCK_STATES,
    LOCK_UNKNOWN,
    LOCK_WAITED_FOR,
    SAMPLES,
    STACKS_VERSION,
)

DEFAULT_HZ = 20.0
PACE = ((30.0, 1.0), (3600.0, 0.25), (float("inf"), 0.05))
"""The share of the rate that a run has up to an age in seconds: 20 Hz, without which a run of some
seconds has too few, then 5 Hz, which costs less than 0.1 % of a core, then 1 Hz. A day is 100,000
samples then."""
HELD_RATIO = 0.005
"""Of the training thread's time, what samples may take that it takes itself: with stacks of
hundreds of frames samples become few."""
HELD_AT_ONCE_NS = 50_000_000
"""So much it may be at the start already, for short runs."""
MAX_PENDING = 2000
"""Samples that wait for a disk; while there are as many, no more are taken."""
OTHERS_EVERY = 4
"""Each so many samples other threads are looked at, and where one of them must hold the lock."""
OTHERS_LIMIT = 16
THREAD_LIMIT = 256
BUSY_SHARE = 0.05
"""A thread that used so much of a core since the last look runs; others wait for something."""
_NAME_LIMIT = 80
_NS_PER_S = 1_000_000_000
_NS_PER_US = 1000
_THREAD_CPU_CLOCK = 6  # CPUCLOCK_SCHED of one thread (include/linux/posix-timers.h)

_now = time.perf_counter_ns
_ident = threading.get_ident


def why_not_sampled() -> str:
    """Why another thread's frames cannot be looked at here; empty where they can."""
    if not isinstance(_thread.start_new_thread, BuiltinFunctionType):
        return "threads are replaced by something else (gevent): none runs in parallel"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python runs threads at the same time: frames may change while they are read"
    return why_not_safe()


class StackSampler:
    """One thread that looks at another one's frames, or has it note them itself.

    Who looks has to hold the interpreter lock. `sample_clock` finds who holds it when a sample is
    due, and takes the sample without waiting; without that, it comes where the training thread lets
    go of the lock for long, so that what runs between small operators is seen too seldom, and what
    follows too often. `late_us` says how long each sample waited. A thread of its own, as the one
    that writes may wait for a disk.

    Args:
        thread: Says which thread is sampled.
        hz: Samples per second at the start.
        note: Takes one line for events.jsonl, where sampling ends by an error.
        until: Frames outside that function are not looked at.
    """

    def __init__(
        self,
        thread: Callable[[], int],
        *,
        hz: float,
        note: Callable[[dict[str, Any]], None],
        until: CodeType | None = None,
    ) -> None:
        self._thread = thread
        self.hz = hz
        """Samples per second, before the run's age is counted in."""
        self._note = note
        self._until = until
        self._tree = StackTree()
        self._taken: list[Sample] = []
        self._samples: list[tuple[int, int, int, int]] = []
        self._others: list[tuple[int, int, int, int, int]] = []
        self._threads: dict[str, int] = {}
        self._new_threads: list[tuple[int, str]] = []
        self._cpu: dict[int, tuple[int, int]] = {}
        self._wake = _thread.allocate_lock()
        self._clock: SampleClock | None = None
        self._held_before_ns = 0
        self._stopped = False
        self._cpu_ns = 0
        self._random = os.getpid()
        self._began_ns = _now()
        self._looks = 0

    def start(self) -> None:
        """Starts a thread that samples until it is stopped."""
        self.prepare()
        start_deaf_thread(self._run)

    def prepare(self) -> None:
        """Makes it ready for `sample_until`, on whichever thread."""
        self._wake.acquire()
        self._began_ns = _now()
        self._clock = load_sample_clock(
            self._thread, self._taken, most=MAX_PENDING, until=self._until, limit=MAX_DEPTH
        )
        self._held_before_ns = 0 if self._clock is None else self._clock.held_ns()

    def stop(self) -> None:
        """Ends the thread, soon; from any thread."""
        if not self._stopped:
            self._stopped = True
            if self._clock is not None:
                self._clock.stop()
            self._wake.release()

    def header(self, worker: int | None = None) -> dict[str, Any]:
        """The first line of this process."""
        torch = sys.modules.get("torch")
        files = (os.__file__, getattr(torch, "__file__", None))
        return {
            "type": HEADER,
            "version": STACKS_VERSION,
            "pid": os.getpid(),
            "worker": worker,
            "time_ns": _now(),
            "hz": self.hz,
            "libraries": [os.path.dirname(file) for file in files if file],
        }

    def take_line(self) -> dict[str, Any] | None:
        """What was sampled since the last time, as a line; None where there is nothing."""
        samples, others = take_all(self._samples), take_all(self._others)
        threads = take_all(self._new_threads)
        if not samples:
            return None
        first = samples[0][0]
        line = {
            "type": SAMPLES,
            "pid": os.getpid(),
            "time_ns": first,
            **self._tree.take_definitions(),
            "offset_us": [(time - first) // _NS_PER_US for time, _, _, _ in samples],
            "late_us": [late // _NS_PER_US for _, late, _, _ in samples],
            "stack": [stack for _, _, stack, _ in samples],
            "cpu_ns": self._cpu_ns,
        }
        states = "".join(LOCK_STATES[state] for _, _, _, state in samples)
        if states.strip(LOCK_STATES[LOCK_UNKNOWN]):
            line["lock_wait"] = states
        if others:
            line["others"] = [[(o[0] - first) // _NS_PER_US, *o[1:]] for o in others]
        return {**line, "threads": threads} if threads else line

    def sample_until(self, pause_ns: int) -> bool:
        """Samples for a while.

        Returns:
            False once it has been stopped.
        """
        ends = _now() + pause_ns
        while not self._stopped and _now() < ends:
            known = self._thread() == threading.main_thread().ident
            self._take_samples(self._due_times(ends), self._clock if known else None)
        self._cpu_ns = time.thread_time_ns()
        return not self._stopped

    def _due_times(self, ends_ns: int) -> list[int]:
        """When the next samples are due: up to a time, and until other threads are looked at."""
        most = OTHERS_EVERY if self._has_other_threads() else MAX_PENDING
        due = [_now() + self._pause_ns()]
        while due[-1] < ends_ns and len(due) < most:
            due.append(due[-1] + self._pause_ns())
        return due

    def _has_other_threads(self) -> bool:
        """Whether the job has Python threads beside the one that is sampled."""
        known = getattr(threading, "_active", {})
        return len(known) - (self._thread() in known) - (_ident() in known) > 0

    def _take_samples(self, due_ns: Sequence[int], clock: SampleClock | None) -> None:
        """Waits and samples: at all of the times, or at the first one that needs a look from here.

        Args:
            due_ns: When samples are due.
            clock: Takes most of them; None where the sampling thread takes all of them.
        """
        over = 0
        if clock is None:
            self._wake.acquire(timeout=max(due_ns[0] - _now(), 0) / _NS_PER_S)
        else:
            over = clock.take_samples(due_ns)
        for time_ns, late_ns, known, stack in take_all(self._taken):
            self._add(time_ns, late_ns, self._tree.find(stack), known)
        if self._stopped:
            return
        is_due = over < len(due_ns)
        state = clock.lock_state() if clock is not None and is_due else LOCK_UNKNOWN
        owner, self._looks = self._thread(), self._looks + over + is_due
        looks_at_others = self._looks >= OTHERS_EVERY or state == LOCK_WAITED_FOR
        if not is_due and not looks_at_others:
            return
        stacks = read_stacks(
            None if looks_at_others else (owner,), until=self._until, limit=MAX_DEPTH
        )
        if is_due:
            time_ns, number = _now(), self._tree.find(stacks.get(owner, ()))
            self._add(time_ns, time_ns - due_ns[over], number, state)
        if looks_at_others:
            self._looks = 0
            self._look_at_others(stacks, owner)

    def _add(self, time_ns: int, late_ns: int, stack: int, lock_state: int) -> None:
        """Takes one sample, unless too many wait for a disk."""
        if len(self._samples) < MAX_PENDING:
            self._samples.append((time_ns, late_ns, stack, lock_state))

    def _run(self) -> None:
        try:
            while self.sample_until(_NS_PER_S):
                continue
        except Exception as error:  # the recording goes on without it
            self._note({"type": "stacks_failed", "reason": f"{type(error).__name__}: {error}"})

    def _pause_ns(self) -> int:
        """To the next sample: uneven, so that it does not keep pace with the steps of the job."""
        age_ns = _now() - self._began_ns
        pace = next(share for limit_s, share in PACE if age_ns < limit_s * _NS_PER_S)
        self._random = (self._random * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        uneven = 0.5 + self._random / 0x80000000
        over_ns = self.held_ns() - HELD_AT_ONCE_NS - HELD_RATIO * age_ns
        return int(uneven * _NS_PER_S / (self.hz * pace) + max(over_ns, 0) / HELD_RATIO)

    def held_ns(self) -> int:
        """For how long the training thread has waited for samples."""
        return 0 if self._clock is None else self._clock.held_ns() - self._held_before_ns

    def _look_at_others(self, stacks: Mapping[int, Sequence[Place]], owner: int) -> None:
        """Which other Python threads used a core, and what they are at: may hold the lock."""
        skipped = (owner, _ident())
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
            if share >= BUSY_SHARE:
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


def _thread_cpu_ns(native_id: int | None) -> int | None:
    """CPU time of a thread of this process; None where it is over or not known.

    By the kernel's number of the thread: pthread_getcpuclockid would crash on one that is over.
    """
    if native_id is None:
        return None
    try:
        return time.clock_gettime_ns(~native_id << 3 | _THREAD_CPU_CLOCK)
    except OSError:
        return None
