"""Everything haiprof changes in the job: each wrapped function, and its undo.

The wrappers obey four rules, measured in benchmarks/overhead.py and held by tests:

- the user's call is made exactly once, outside our own `try`;
- while torch.compile traces, and inside a span of the same sort, they only pass the call on;
- nothing in them branches on the identity of a module (it would become a compile guard);
- Dynamo skips their frames, so that they neither break a graph nor are compiled themselves.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from haiprof.hook.device import DeviceTimer
from haiprof.hook.recorder import UNARMED_LIMIT_WORDS, Recorder
from haiprof.hook.roots import Registry
from haiprof.rundir.schema import (
    BACKWARD,
    DATA,
    DATA_END,
    DATA_ITER,
    EVAL,
    FORWARD,
    FORWARD_EVAL,
    GC,
    NOGRAD,
    OPTIMIZER,
    SCALER,
    TAG_BITS,
)

GC_PAUSE_MIN_NS = 200_000  # shorter pauses are part of normal allocation
OWNER_SILENT_NS = 10_000_000_000  # another thread that trains takes over after this long
CALIBRATION_CALLS = 200

_now = time.perf_counter_ns
_ident = threading.get_ident


class State:
    """What the wrappers share: the owner thread, and whether a span is open in it."""

    __slots__ = ("busy", "device", "is_tracing", "loading", "owner", "owner_seen_ns", "recorder")

    def __init__(self, recorder: Recorder, is_tracing: Callable[[], bool]) -> None:
        self.recorder = recorder
        self.is_tracing = is_tracing
        self.owner = threading.main_thread().ident or 0
        self.owner_seen_ns = 0
        self.busy = 0
        """0 outside, FORWARD inside a root module's call, BACKWARD inside the engine."""
        self.loading = False
        self.device: DeviceTimer | None = None

    def trains(self) -> bool:
        """Called where backward and optimizer steps happen: whether this thread is the trainer."""
        ident = _ident()
        now = _now()
        if ident != self.owner:
            if now - self.owner_seen_ns < OWNER_SILENT_NS:
                return False
            self.owner = ident
        self.owner_seen_ns = now
        if not self.recorder.armed:
            self.recorder.arm()
        return True


def wrap_module_call(original: Callable[..., Any], state: State, roots: Registry) -> Any:
    """Times the outermost call of a module that owns parameters; all others pass through."""
    is_tracing, put, tags = state.is_tracing, state.recorder.words.extend, roots.tags
    recorder = state.recorder

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if state.busy or is_tracing():
            return original(self, *args, **kwargs)
        try:
            tag = tags.get(id(self))
            if tag is None:
                tag = roots.add(self)
            mark: Any = None
            if tag and _ident() == state.owner:
                grad, training = roots.is_grad_enabled(), self.training
                kind = (
                    (FORWARD if training else FORWARD_EVAL)
                    if grad
                    else (NOGRAD if training else EVAL)
                )
                if state.device is not None:
                    mark = state.device.begin(kind)
                state.busy = FORWARD
                start = _now()
            else:
                tag = 0
        except Exception as error:
            state.busy = tag = 0
            recorder.fault("forward", error)
        if not tag:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            try:
                put((start << TAG_BITS | kind, _now() << TAG_BITS | tag))
                if mark is not None:
                    mark()
                if not recorder.armed and len(recorder.words) > UNARMED_LIMIT_WORDS:
                    recorder.overflow()
            except Exception as error:
                recorder.fault("forward", error)
            state.busy = 0

    return __call__


def wrap_backward(original: Callable[..., Any], state: State) -> Any:
    """Times every entry of the autograd engine: backward(), autograd.grad(), closures."""
    is_tracing, put, recorder = state.is_tracing, state.recorder.words.extend, state.recorder

    @functools.wraps(original)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        outer = state.busy
        if outer == BACKWARD or is_tracing() or (outer and _compiler_is_tracing()):
            return original(*args, **kwargs)
        ours, mark, start = False, None, 0
        try:
            if state.trains():
                ours = True
                if state.device is not None:
                    mark = state.device.begin(BACKWARD)
                state.busy = BACKWARD
                start = _now()
        except Exception as error:
            ours, state.busy = False, outer
            recorder.fault("backward", error)
        if not ours:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                put((start << TAG_BITS | BACKWARD, _now() << TAG_BITS))
                if mark is not None:
                    mark()
            except Exception as error:
                recorder.fault("backward", error)
            state.busy = outer

    return _engine_run_backward


def optimizer_hooks(state: State, optimizers: Registry) -> tuple[Any, Any]:
    """The pair for torch's own global optimizer hooks: before and after every step."""
    is_tracing, put, recorder = state.is_tracing, state.recorder.words.extend, state.recorder
    starts: dict[int, tuple[int, Any]] = {}

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_tracing() or recorder.closed:
            return
        try:
            mark = state.device.begin(OPTIMIZER) if state.device is not None else None
            starts[id(optimizer)] = (_now(), mark)
        except Exception as error:
            recorder.fault("optimizer", error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_tracing() or recorder.closed:
            return
        try:
            end = _now()
            start, mark = starts.pop(id(optimizer), (0, None))
            if not start or not state.trains():
                return
            tag = optimizers.tags.get(id(optimizer)) or optimizers.add(optimizer)
            put((start << TAG_BITS | OPTIMIZER, end << TAG_BITS | tag))
            if mark is not None:
                mark()
            if state.device is not None:
                state.device.close(end)
        except Exception as error:
            recorder.fault("optimizer", error)

    return before, after


def wrap_span(original: Callable[..., Any], state: State, kind: int) -> Any:
    """Times a plain call of the training thread: GradScaler.step, saves, DataLoader.__iter__."""
    put, recorder = state.recorder.words.extend, state.recorder
    on_device = kind in (SCALER, DATA_ITER)

    @functools.wraps(original)
    def spanned(*args: Any, **kwargs: Any) -> Any:
        if recorder.closed or state.is_tracing() or _ident() != state.owner:
            return original(*args, **kwargs)
        mark: Any = None
        start = _now()
        try:
            if on_device and state.device is not None:
                mark = state.device.begin(kind)
        except Exception as error:
            recorder.fault("span", error)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                put((start << TAG_BITS | kind, _now() << TAG_BITS))
                if mark is not None:
                    mark()
            except Exception as error:
                recorder.fault("span", error)

    return spanned


def wrap_next(original: Callable[..., Any], state: State) -> Any:
    """Times the training thread's wait for a batch; the end of an epoch is a kind of its own."""
    put, recorder = state.recorder.words.extend, state.recorder

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807
        if state.loading or state.is_tracing() or _ident() != state.owner:
            return original(self)
        kind, mark, start = DATA, None, 0
        try:
            if state.device is not None:
                mark = state.device.begin(DATA)
            state.loading = True
            start = _now()
        except Exception as error:
            recorder.fault("dataloader", error)
        try:
            return original(self)
        except StopIteration:
            kind = DATA_END
            raise
        finally:
            try:
                put((start << TAG_BITS | kind, _now() << TAG_BITS))
                if mark is not None:
                    mark()
                if not recorder.armed and len(recorder.words) > UNARMED_LIMIT_WORDS:
                    recorder.overflow()
            except Exception as error:
                recorder.fault("dataloader", error)
            state.loading = False

    return __next__


def gc_callback(state: State) -> Callable[[str, dict[str, int]], None]:
    """Notes garbage collections that stop the interpreter for a while."""
    put, recorder = state.recorder.words.extend, state.recorder
    start = 0

    def on_gc(phase: str, info: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = _now()
            return
        end = _now()
        if end - start > GC_PAUSE_MIN_NS and recorder.armed and not recorder.closed:
            put((start << TAG_BITS | GC, end << TAG_BITS | info["generation"]))

    return on_gc


def _compiler_is_tracing() -> bool:
    """Inside AOT's tracing of a forward: its backward call is no backward pass of the job."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def install(recorder: Recorder) -> None:
    """Puts every wrapper in place; one that cannot be installed leaves its phase unmeasured."""
    from haiprof.hook.installer import Installer

    Installer(recorder).install()


def uncollected(callback: Any) -> None:
    """Takes our callback out of the garbage collector's list, wherever it stands now."""
    if callback in gc.callbacks:
        gc.callbacks.remove(callback)
