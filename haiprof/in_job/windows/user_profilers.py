"""The job's own profilers: they always win, and ours is out of their way before they start."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

OTHER_THREAD_WAIT_S = 2.0
_POLL_S = 0.001

_ENTERS = ("_prepare_trace", "_start_trace", "__enter__")
_LEAVES = "__exit__"
_ENVIRONMENT = {
    "KINETO_USE_DAEMON": "a Kineto daemon (KINETO_USE_DAEMON) may trace this job",
    "CUDA_INJECTION64_PATH": "another CUDA tool is loaded (CUDA_INJECTION64_PATH)",
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems records this job",
}
_NSYS_PREFIX = "NSYS_"

CUT = "the job started a profiler of its own"
REFUSED = "the job's own profiler is on"


def other_tool(environ: Mapping[str, str]) -> str | None:
    """Why the environment forbids a window; None where it does not."""
    for name, reason in _ENVIRONMENT.items():
        if environ.get(name):
            return reason
    if any(name.startswith(_NSYS_PREFIX) for name in environ):
        return "Nsight Systems records this job"
    return None


class Guard:
    """Knows which profilers of the job are entered: recording, or warming up for it."""

    def __init__(self, make_way: Callable[[], None]) -> None:
        self._make_way = make_way
        self._ours = 0
        self._entered: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []

    def install(self, *, late: bool) -> None:
        """Wraps the classes; `late` also looks for instances that were entered before (30 ms)."""
        # `torch.autograd.profiler.profile` is what all of torch.profiler's, Lightning's and
        # Accelerate's end in; `emit_nvtx` and `emit_itt` take the same place in torch.
        from torch.autograd import profiler

        names = ("profile", "emit_nvtx", "emit_itt")
        kinds = [getattr(profiler, name) for name in names if hasattr(profiler, name)]
        for kind in kinds:
            for name in _ENTERS:
                if name in vars(kind):
                    self._wrap(kind, name, self._entering)
            self._wrap(kind, _LEAVES, self._leaving)
        if late:
            for found in gc.get_objects():
                if type(found) in kinds and getattr(found, "entered", False):
                    self._note(found)

    def uninstall(self) -> None:
        """Puts the originals back."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Inside, this thread's profiler calls are haiprof's own."""
        before, self._ours = self._ours, threading.get_ident()
        try:
            yield
        finally:
            self._ours = before

    def refusal(self) -> str | None:
        """Why no window may start now; None where one may."""
        from torch._C._autograd import _profiler_enabled

        is_on = any(ref() is not None for ref in list(self._entered.values()))
        return other_tool(os.environ) or (REFUSED if is_on or _profiler_enabled() else None)

    def forget(self) -> None:
        """In a forked child: what was entered is the parent's."""
        self._entered.clear()

    def _wrap(self, kind: Any, name: str, around: Callable[..., Any]) -> None:
        original = vars(kind)[name]

        @functools.wraps(original)
        def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return around(original, instance, *args, **kwargs)

        setattr(kind, name, method)

        def undo() -> None:
            if vars(kind).get(name) is method:
                setattr(kind, name, original)

        self._undo.append(undo)

    def _entering(self, original: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ours != threading.get_ident() and getattr(instance, "enabled", True):
            self._make_way()
            self._note(instance)
        return original(instance, *args, **kwargs)

    def _leaving(self, original: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(instance, *args, **kwargs)
        finally:
            self._entered.pop(id(instance), None)

    def _note(self, instance: Any) -> None:
        key, entered = id(instance), self._entered
        entered[key] = weakref.ref(instance, lambda _: entered.pop(key, None))


def wait_until(done: Callable[[], bool]) -> None:
    """For another thread of ours to end its window; not for long, whatever it does."""
    deadline = time.monotonic() + OTHER_THREAD_WAIT_S
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
