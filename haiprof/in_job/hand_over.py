"""Has the training thread hand the interpreter lock over when a sample is due, where it can."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from haiprof.in_job.own_library import load_own_library


class HandOver:
    """The compiled helper `hand_over.c`, for one sampling thread of this process.

    Without it a sample waits for the lock as any thread does, and comes late: see there.

    Args:
        library: As ctypes loaded it.
    """

    def __init__(self, library: Any) -> None:
        import ctypes

        self._wait = library.haiprof_wait
        self._wait.argtypes, self._wait.restype = (ctypes.c_longlong,), ctypes.c_int
        self.over = ctypes.PyDLL(library._name).haiprof_over
        """Says that the sample is taken, and lets the main thread go on; called with the lock."""
        self.over.argtypes, self.over.restype = (), None
        self._stopped = ctypes.c_int.in_dll(library, "haiprof_stopped")
        self._held = ctypes.c_longlong.in_dll(library, "haiprof_held_ns")
        api = ctypes.pythonapi
        given = (api.PyEval_SaveThread, api.PyEval_RestoreThread, api.Py_AddPendingCall)
        library.haiprof_prepare(*(ctypes.cast(function, ctypes.c_void_p) for function in given))
        self._lock_wait = ctypes.c_int.in_dll(library, "haiprof_lock_wait")
        with contextlib.suppress(ValueError, AttributeError):  # none is exported, or it is no glibc
            runtime = ctypes.c_char.in_dll(api, "_PyRuntime")
            find_symbol = ctypes.cast(ctypes.CDLL(None).dladdr1, ctypes.c_void_p)
            library.haiprof_find_lock(ctypes.c_void_p(ctypes.addressof(runtime)), find_symbol)

    def wait(self, due_ns: int) -> bool:
        """Sleeps until a time of CLOCK_MONOTONIC, then asks for the lock; False once stopped."""
        return bool(self._wait(due_ns))

    def lock_wait(self) -> int:
        """Whether the main thread waited for the lock when the last sample was due; -1: unknown."""
        return self._lock_wait.value

    def held_ns(self) -> int:
        """For how long the main thread was held up so far."""
        return self._held.value

    def stop(self) -> None:
        """Ends a wait, soon."""
        self._stopped.value = 1


def load_hand_over(thread: Callable[[], int]) -> HandOver | None:
    """The helper; None where it was not compiled, or does not help.

    Only the main thread of CPython runs pending calls.

    Args:
        thread: Says which thread is sampled.
    """
    if sys.implementation.name != "cpython" or thread() != threading.main_thread().ident:
        return None
    library = load_own_library("_hand_over")
    try:
        return None if library is None else HandOver(library)
    except (OSError, AttributeError, ValueError):  # built from another source
        return None
