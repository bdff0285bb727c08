"""One run of torch.profiler on the training thread: warmed up, started, marked, stopped, saved.

The job's own profilers always win: ours is out of their way before they start.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.descriptors import Descriptor
from haiprof.in_job.threads import hold_size_signal

STEP_NAME = "ProfilerStep"

# What Kineto says of stages by itself, on every use (torch 2.13: USDT, before: STAGE); the
# execution trace observer; functions that were open when a window with stacks began; ranges of the
# job's own that overlap our step marks.
_OWN_LINES = re.compile(
    rb"(STAGE|USDT):\d|.*(Execution Trace Observer|Python replay stack is empty"
    rb"|\bcollection\.cpp:\d+\] Warning: )"
)
_STDERR = 2

_now = time.perf_counter_ns
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

    @contextlib.contextmanager
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerOptions:
    """What is recorded of a step; the names of torch.profiler's own options."""

    stacks: bool = False
    shapes: bool = False
    memory: bool = False
    flops: bool = False
    modules: bool = False
    sync: bool = False
    lines: bool = False  # the lines of the job that call operators: `ForwardLines`, not torch's

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ProfilerOptions:
        """From the boot config's `trace`."""
        return cls(**{name: bool(config.get(name)) for name in cls.__dataclass_fields__})


class Session:
    """A profiler that lives for one window."""

    def __init__(
        self, what: ProfilerOptions, guard: Guard, execution_trace: Path | None = None
    ) -> None:
        import torch
        from torch.profiler import profiler as kineto

        self.what = what
        self.start_ns = self.stop_ns = 0
        self._guard = guard
        self._mark: Any = None
        self._started = False
        began = _now()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: Any = kineto._KinetoProfile(
            activities=activities, record_shapes=what.shapes, profile_memory=what.memory,
            with_stack=what.stacks, with_flops=what.flops, with_modules=what.modules,
            experimental_config=_experimental(what),
        )  # fmt: skip
        self._observer: Any = None
        if execution_trace is not None:
            self._observer = kineto.ExecutionTraceObserver()
            self._observer.register_callback(str(execution_trace))
        with guard.ours(), quiet():  # warms Kineto and CUPTI up; nothing is recorded yet
            self._profiler.prepare_trace()
        self.setup_ns = _now() - began

    def start(self) -> None:
        """Begins to record."""
        began = _now()
        with self._guard.ours(), quiet():
            if self._observer is not None:
                self._observer.start()
            self._profiler.start_trace()
        self._started = True
        self.start_ns = _now() - began

    def mark(self, number: int) -> None:
        """A step begins: its mark in the trace, as torch.profiler's own."""
        from torch.autograd.profiler import record_function

        self.unmark()
        mark = record_function(f"{STEP_NAME}#{number}")
        mark.__enter__()  # type: ignore[no-untyped-call]
        self._mark = mark

    def unmark(self) -> None:
        """The step that runs ends."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def stop(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Ends the recording."""
        began = _now()
        self.unmark()
        foreign = sys.getprofile() if self.what.stacks else None
        with self._guard.ours():
            if not self._started:
                with quiet():
                    self._profiler.start_trace()
            for name, value in (metadata or {}).items():
                if name != "distributedInfo" or name not in self._own_metadata():
                    self._profiler.add_metadata_json(name, json.dumps(value))
            if self._observer is not None:
                self._end_observer()
            with quiet():
                self._profiler.stop_trace()
        if callable(foreign) and sys.getprofile() is None:
            sys.setprofile(foreign)  # the job set it while we recorded, and torch took it out
        self.stop_ns = _now() - began

    def save(self, path: Path) -> int:
        """Writes the trace as plain JSON; how many ns that took."""
        began = _now()
        with hold_size_signal():
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None  # what torch's file still holds is written with its end
        return _now() - began

    def _end_observer(self) -> None:
        with quiet():
            self._observer.unregister_callback()  # stops it, and ends the file

    def abandon(self) -> None:
        """After a failure: leaves nothing of ours on, as far as torch still lets us."""
        with contextlib.suppress(Exception):
            self.unmark()
        with contextlib.suppress(Exception):
            if self._observer is not None:
                self._end_observer()
            with self._guard.ours(), quiet():
                if not self._started:
                    self._profiler.start_trace()
                self._profiler.stop_trace()

    def disown(self) -> None:
        """In a forked child: the parent's execution trace is left alone, its file too."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer._registered = observer._execution_trace_running = False  # not at its end
            from torch._C._profiler import _disable_execution_trace_observer

            with quiet():
                _disable_execution_trace_observer()

    def _own_metadata(self) -> Mapping[str, Any]:
        import torch

        found = getattr(self._profiler, "_trace_metadata", None)
        if found is not None:
            return dict(found)
        initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
        return {"distributedInfo": None} if initialised else {}


def _experimental(what: ProfilerOptions) -> Any:
    """Options that not every torch has: each only where this one takes it."""
    from torch._C._profiler import _ExperimentalConfig

    wanted = {"enable_cuda_sync_events": what.sync, "trace_only": not what.stacks}
    known = _ExperimentalConfig.__init__.__doc__ or ""
    config: dict[str, Any] = {name: True for name, on in wanted.items() if on and name in known}
    return _ExperimentalConfig(**config) if config else None


def fits(folder: Path, needed_bytes: int) -> bool:
    """Whether a folder's file system has so much room."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize >= needed_bytes


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what Kineto prints by itself out of the job's stderr; the rest goes out late."""
    # Around starts and stops alone: other threads' lines wait meanwhile. Kineto's log level would
    # be simpler, but it stays, and hides errors from the job's own profilers.
    try:
        saved = Descriptor(os.dup(_STDERR))
    except OSError:  # the job has closed it
        yield
        return
    held = Descriptor(os.memfd_create("haiprof"))
    os.dup2(held.number, _STDERR)
    with hold_size_signal():
        try:
            yield
        finally:
            _let_go(saved, held)


def _let_go(saved: Descriptor, held: Descriptor) -> None:
    """Puts standard error back, unless the job has closed or replaced it meanwhile."""
    if saved.is_ours() and held.is_at(_STDERR):
        os.dup2(saved.number, _STDERR)
    lines = []
    if held.is_ours():
        size = os.lseek(held.number, 0, os.SEEK_END)
        lines = os.pread(held.number, size, 0).splitlines(keepends=True)
    others = b"".join(line for line in lines if not _OWN_LINES.match(line))
    if others and saved.is_ours():
        os.write(saved.number, others)
    saved.close()
    held.close()
