"""One run of torch.profiler on the training thread: warmed up, started, marked, stopped, saved."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.descriptors import Descriptor
from haiprof.in_job.threads import hold_size_signal
from haiprof.in_job.windows.user_profilers import Guard

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerOptions:
    """What is recorded of a step; the names of torch.profiler's own options."""

    stacks: bool = False
    shapes: bool = False
    memory: bool = False
    flops: bool = False
    modules: bool = False
    sync: bool = False
    lines: bool = False  # the lines of the job that call operators: `forward_lines`, not torch's

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
