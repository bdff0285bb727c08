"""Waits for the times of samples, and has the training thread take its own where that must be."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from haiprof.in_job.frames import Sample, sample_function
from haiprof.in_job.own_library import load_own_library

_BREAKER_UNTIL = (3, 13)
"""From that version on a pending call is seen at once."""


class SampleClock:
    """The compiled helper `sample_clock.c`, for one sampling thread of this process.

    Without it a sample waits for the lock as any thread does, and comes late: see there.

    Args:
        library: As ctypes loaded it.
        take: Address of the function that notes a stack.
    """

    def __init__(self, library: Any, take: int) -> None:
        import ctypes

        self._array: Any = ctypes.c_longlong
        self._take_samples = library.haiprof_take_samples
        self._take_samples.argtypes = (ctypes.POINTER(ctypes.c_longlong), ctypes.c_int)
        self._take_samples.restype = ctypes.c_int
        self._stop = library.haiprof_stop
        self._stop.argtypes, self._stop.restype = (), None
        self._held = ctypes.c_longlong.in_dll(library, "haiprof_held_ns")
        self._lock_state = ctypes.c_int.in_dll(library, "haiprof_lock_state")
        api = ctypes.pythonapi
        functions = (
            api.PyThreadState_Get, api.PyInterpreterState_Get, api.PyGILState_Ensure,
            api.PyGILState_Release, api.Py_AddPendingCall,
        )  # fmt: skip
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        find_symbol = runtime = None
        with contextlib.suppress(ValueError, AttributeError):  # none is exported, or it is no glibc
            runtime = ctypes.addressof(ctypes.c_char.in_dll(api, "_PyRuntime"))
            find_symbol = ctypes.cast(ctypes.CDLL(None).dladdr1, ctypes.c_void_p).value
        interval_us = round(1e6 * sys.getswitchinterval())
        sets_breaker = sys.version_info < _BREAKER_UNTIL
        given = (*addresses, find_symbol, take, runtime, interval_us, sets_breaker)
        words = (ctypes.c_void_p * len(given))(*(word or 0 for word in given))
        library.haiprof_prepare.argtypes, library.haiprof_prepare.restype = (ctypes.c_void_p,), None
        library.haiprof_prepare(words)

    def take_samples(self, due_ns: Sequence[int]) -> int:
        """Waits until the last of some times of CLOCK_MONOTONIC, with a sample at each.

        Returns:
            How many are over, -1 once stopped. Where not all are, the next one is due now, and the
            training thread waits for the lock that another thread holds, or that is not known.
        """
        return int(self._take_samples((self._array * len(due_ns))(*due_ns), len(due_ns)))

    def lock_state(self) -> int:
        """Whether the main thread waited for the lock when the sample was due; -1: unknown."""
        return self._lock_state.value

    def held_ns(self) -> int:
        """For how long the main thread took samples so far."""
        return self._held.value

    def stop(self) -> None:
        """Ends a wait, at once."""
        self._stop()


def load_sample_clock(
    thread: Callable[[], int],
    samples: list[Sample],
    *,
    most: int,
    until: CodeType | None,
    limit: int,
) -> SampleClock | None:
    """The helper; None where it was not compiled, or does not help.

    Only the main thread of CPython runs pending calls.

    Args:
        thread: Says which thread is sampled.
        samples: Takes the samples.
        most: So many are in it at most.
        until: Frames from that function on are left out.
        limit: Of a deeper stack so many innermost frames.
    """
    if sys.implementation.name != "cpython" or thread() != threading.main_thread().ident:
        return None
    take = sample_function(samples, most=most, until=until, limit=limit)
    library = load_own_library("_sample_clock") if take else None
    try:
        return None if library is None or take is None else SampleClock(library, take)
    except (OSError, AttributeError, ValueError):  # built from another source
        return None
