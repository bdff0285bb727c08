"""Everything haiprof changes in the job: each wrapped function, and its undo.

The wrappers obey four rules, measured in benchmarks/in_process.py and held by tests:

- the user's call is made exactly once, outside our own `try`;
- while torch.compile traces, and inside a span of the same sort, they only pass the call on;
- nothing in them branches on the identity of a module (it would become a compile guard);
- Dynamo skips their frames, so that they neither break a graph nor are compiled themselves.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

from haiprof.in_job.device import DeviceTimer
from haiprof.in_job.object_settings import Registry, input_line
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.repeats import Repeats
from haiprof.in_job.spans import Gate, step_ends
from haiprof.run_format.schema import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    DATA_END,
    DATA_ITER,
    EVAL,
    FORWARD,
    FORWARD_EVAL,
    MARK,
    NOGRAD,
    OPTIMIZER,
    SAVE,
    TAG_BITS,
    TAG_MASK,
)

OWNER_SILENT_NS = 10_000_000_000  # another thread that trains takes over after this long
CALIBRATION_CALLS = 41
CALIBRATION_EVICT_BYTES = 1 << 20
CLOSED = -1
WAITING = -2
_NO_BACKWARD = (BACKWARD, CLOSED)
_MODULES = (FORWARD, FORWARD_EVAL, EVAL, NOGRAD)

_now = time.perf_counter_ns
_ident = threading.get_ident


class State(Gate):
    """What the wrappers share: the owner thread, and whether a span is open in it."""

    __slots__ = (
        "after_step", "before_backward", "begin", "counts_all", "device", "find_device", "inputs",
        "inside", "is_tracing", "kept_graphs", "recorder", "repeats", "stepped", "steps_before",
        "successor", "trains", "watch",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, is_tracing: Callable[[], bool]) -> None:
        self.recorder = recorder
        self.is_tracing = is_tracing
        self.owner = threading.main_thread().ident or 0
        self.owner_seen_ns = 0
        self.idle = 0  # what `busy` returns to: 0, WAITING, or CLOSED once the hooks are out
        self.busy = 0  # `idle`, or FORWARD in a root module's call, or BACKWARD in the engine
        self.loading = False
        self.optimizer_count = 0
        """Optimizer steps of the owner thread so far, whether recorded or not; once the hooks are
        out, of any thread, until another installation takes their places."""
        self.steps_before = 0  # those of this process before these hooks, as far as hooks saw them
        self.counts_all = True  # whether these are all: hooks were in from the start
        self.successor: State | None = None  # what that installation's wrappers share
        self.device: DeviceTimer | None = None
        self.find_device: Callable[[], DeviceTimer | None] = lambda: None
        self.kept_graphs = 0  # backward passes that were told to keep their graph, and make none
        self.slow = True
        """Whether a span needs more than two times: until an optimizer has stepped, with a GPU,
        where memory is watched, and while a trace window is planned."""
        self.repeats = Repeats()  # what stands for steps until then
        self.stepped = False  # whether an optimizer has stepped
        self.trains: Callable[[], None] = lambda: None
        """Called at the first backward pass or optimizer step."""
        self.inside: frozenset[CodeType] = frozenset()  # where hooks put in late must not begin
        self.inputs: Callable[[int, tuple[Any, ...], dict[str, Any]], None] | None = None
        """Receives the number of a root module in training and its arguments: of all calls where
        GPU memory is recorded, else of one a second, and None in between."""
        self.after_step: Callable[[Any], None] | None = None
        """Called once, at the end of the next optimizer step, while `slow` is set."""
        self.before_backward: Callable[[Any], None] | None = None
        """The same before the next backward pass, with what it begins at."""
        self.watch: Watch | None = None
        self.begin: Callable[..., Callable[[], None] | None] = self._begin
        """The rarer part of a span's start: of (kind, target); see `_begin`."""

    def restart(self) -> None:
        """In a forked child: its only thread may train, and the parent's device is not its own."""
        if self.idle == 0:
            self.owner = _ident()
            self.busy, self.loading, self.slow, self.device = 0, False, True, None
            self.inputs = self.after_step = self.before_backward = None
            self.optimizer_count = self.steps_before = self.kept_graphs = 0
            self.repeats, self.stepped = Repeats(), False
            if self.watch is not None:
                self.watch.after_fork()

    def steps_so_far(self) -> int:
        """Optimizer steps since these hooks were put in, whatever took their places since."""
        later = 0 if self.successor is None else self.successor.steps_so_far()
        return self.optimizer_count + later

    def steps_of_job(self) -> int:
        """Optimizer steps since this process first had hooks, or what stands for them."""
        # Where these were in from the start, it is the same on all ranks between two steps.
        trained = self.steps_before + self.optimizer_count
        return self.repeats.marks or trained or self.repeats.backwards or self.repeats.count

    def progress(self) -> dict[str, Any]:
        """What is known of the steps at this moment, as a reply says it."""
        return {
            "step": self.steps_so_far() or self.steps_of_job(),
            "job_step": self.steps_of_job(),
            "counts_all": self.counts_all,
        }

    def lean(self, begin: Callable[[int, Any], Callable[[], None] | None] | None) -> None:
        """A watch that does little at a span's start is called at once if nothing else is due."""
        alone = begin is not None and self.device is None and self.stepped
        self.begin = begin if alone and begin is not None else self._begin

    def _begin(self, kind: int, target: Any = None) -> Callable[[], None] | None:
        """A span's mark on the device, and what a watch does."""
        if self.device is None and not self.recorder.armed:
            self.device = self.find_device()
        watched = self.watch.begin(kind, target) if self.watch is not None else None
        due = (self.device, self.inputs, self.after_step, self.before_backward)
        self.slow = due != (None,) * 4 or not self.stepped
        if kind in (DATA, DATA_ITER) and not self.stepped and not self.busy:
            self.repeats.fetch()
            if kind == DATA and not self.recorder.armed:
                self.recorder.sample_early()
        if self.watch is not None:  # asked after: another thread may put one in meanwhile
            self.slow = True
        mark = self.device.begin(kind) if self.device is not None and kind != SAVE else None
        if watched is None or mark is None:
            return mark or watched
        return functools.partial(_end_both, mark, watched)

    def end(self, mark: Callable[[], None] | None, code: int = 0) -> None:
        """The rarer part of a span's end."""
        if mark is not None:
            mark()
        if not self.stepped and not self.loading:
            kind = code & TAG_MASK
            if kind in _MODULES:
                self.repeats.call(code >> TAG_BITS)
            elif kind == COLLECTIVE:
                self.repeats.collective(code >> TAG_BITS)
        if not self.recorder.armed:
            self.recorder.show_work()

    def finish_call(self, code: int, is_lost: bool) -> None:
        """What calls.c leaves to Python at the end of a span: it became slow, or had no room."""
        kind = code & TAG_MASK
        try:
            if is_lost:
                raise MemoryError("no room for a span")
            if kind in (DATA, DATA_END):
                self.loading = False
                self.end_fetch(None, kind)
            else:
                self.end(None, code)
        except Exception as error:
            self.recorder.fault("span", error)

    def end_fetch(self, mark: Callable[[], None] | None, kind: int) -> None:
        """The same of a loader's fetch."""
        if not self.stepped and kind == DATA and not self.busy:
            self.repeats.batch()
        self.end(mark)

    def train(self, *, stepped: bool = False) -> None:
        """A backward pass, or an optimizer step: until the first of these."""
        self.stepped = stepped
        self.repeats.backwards += not stepped
        if not self.repeats.trained:
            self.repeats.trained = True
            self.trains()
        if not self.recorder.armed:
            self.recorder.arm()

    def end_step(self, mark: Callable[[], None] | None, end_ns: int, optimizer: Any) -> None:
        """The rarer part of an optimizer step's end: an interval on the device is over."""
        if mark is not None:
            mark()
        if self.device is not None:
            self.device.close(end_ns)
        act, self.after_step = self.after_step, None
        if act is not None:
            act(optimizer)

    def wait_for_boundary(self) -> None:
        """Put in while the job runs: begins between two steps, not inside a module's call."""
        self.idle = WAITING

    def open(self) -> None:
        """No module's call is under way in this thread: spans begin here."""
        if self.idle == WAITING:
            self.owner = _ident()
            self.idle = 0

    def begins_here(self) -> bool:
        """Whether a call of this thread is one of the spans that are taken."""
        # Hooks that were put in late begin with the main thread's first call that is inside no
        # other, as its stack tells; where training runs on another thread, its backward opens them.
        if _ident() != self.owner:
            return False
        if self.idle == WAITING:
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code in self.inside:
                    return False
                frame = frame.f_back  # type: ignore[assignment]
            self.open()
        return True

    @property
    def is_closed(self) -> bool:
        """Whether the hooks are out."""
        return self.idle == CLOSED

    def close(self) -> None:
        """Makes every wrapper that something still holds pass its calls on, and nothing else."""
        self.idle = self.busy = CLOSED
        self.loading = True
        self.device = self.watch = self.inputs = self.after_step = self.before_backward = None
        self.begin = self._begin

    def takes_over(self, now_ns: int) -> bool:
        """Whether another thread that trains becomes the owner: the owner has been silent long."""
        if self.owner_seen_ns and now_ns - self.owner_seen_ns < OWNER_SILENT_NS:
            return False
        self.owner = _ident()
        return True


class Watch(Protocol):
    """Follows the spans of the training thread as they begin and end."""

    def begin(self, kind: int, target: Any) -> Callable[[], None] | None:
        """A span begins; what it returns is called when the span ends."""

    def after_fork(self) -> None:
        """This is a forked child now."""


def _end_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Two things to do at a span's end."""
    first()
    second()


def wrap_module_call(
    original: Callable[..., Any], state: State, roots: Registry, is_grad_enabled: Callable[[], bool]
) -> Any:
    """Times the outermost call of a module that owns parameters; all others pass through."""
    is_tracing, recorder, entries = state.is_tracing, state.recorder, roots.entries
    begin, end = recorder.spans.begin, recorder.spans.end

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if is_tracing() or state.busy:  # in this order: a compiler would guard on what is read
            return original(self, *args, **kwargs)
        code = start = 0
        mark = None
        try:
            try:
                codes = entries.get(id(self))
                if codes is None and (state.idle == 0 or state.begins_here()):
                    codes = roots.add(self)
                    if codes:
                        recorder.lines.append(input_line(self, (*args, *kwargs.values())))
                if codes and _ident() == state.owner:
                    found = codes[is_grad_enabled()][self.training]
                    if state.inputs is not None and is_grad_enabled():
                        state.inputs(found >> TAG_BITS, args, kwargs)
                    if state.slow:
                        mark = state.begin(found & TAG_MASK, self)
                    start = begin(found)
                    code = found
            except Exception as error:
                recorder.fault("forward", error)
            if code:
                state.busy = FORWARD
            return original(self, *args, **kwargs)
        finally:
            if code:
                try:
                    end(start, code)
                    if state.slow:
                        state.end(mark, code)
                except Exception as error:
                    recorder.fault("forward", error)
                finally:
                    state.busy = state.idle

    return __call__


def module_codes(tag: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Codes of a root module's spans, by [gradients are on][the module is in training mode]."""
    high = tag << TAG_BITS
    return (EVAL | high, NOGRAD | high), (FORWARD_EVAL | high, FORWARD | high)


def wrap_backward(original: Callable[..., Any], state: State) -> Any:
    """Times every entry of the autograd engine: backward(), autograd.grad(), closures."""
    is_tracing, recorder = state.is_tracing, state.recorder
    begin, end = recorder.spans.begin, recorder.spans.end

    @functools.wraps(original)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        outer = state.busy
        if outer in _NO_BACKWARD or is_tracing() or (outer and _compiler_is_tracing()):
            return original(*args, **kwargs)
        if state.idle == WAITING:
            try:
                return original(*args, **kwargs)
            finally:
                state.open()
        ours, start = False, 0
        mark = None
        try:
            try:
                if _ident() != state.owner and state.takes_over(_now()):
                    outer = state.idle  # what was open is open in the thread that was the owner
                if _ident() == state.owner:
                    if state.slow:
                        if not state.stepped:
                            state.train()
                        act, state.before_backward = state.before_backward, None
                        if act is not None:
                            act(args[0])
                        mark = state.begin(BACKWARD, None)
                    state.kept_graphs += args[2:4] == (True, False)  # retain_graph, create_graph
                    start = state.owner_seen_ns = begin(BACKWARD)
                    ours = True
            except Exception as error:
                ours = False
                recorder.fault("backward", error)
            if ours:
                state.busy = BACKWARD
            return original(*args, **kwargs)
        finally:
            if ours:
                try:
                    end(start, BACKWARD)
                    if mark is not None:
                        mark()
                except Exception as error:
                    recorder.fault("backward", error)
                finally:
                    state.busy = outer if state.idle == 0 else state.idle

    return _engine_run_backward


def optimizer_hooks(state: State, optimizers: Registry) -> tuple[Any, Any]:
    """The pair for torch's own global optimizer hooks: before and after every step."""
    # Of an optimizer that steps another one inside (Lookahead), the inner step is taken. A step
    # that raised leaves a start behind, which the next one overwrites.
    is_tracing, recorder, entries = state.is_tracing, state.recorder, optimizers.entries
    begin, finish = recorder.spans.begin, recorder.spans.end
    begin_quickly, end_quickly = step_ends(state, recorder.spans, entries)
    start = 0
    mark: Callable[[], None] | None = None

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal start, mark
        if is_tracing():  # first: a compiler would guard on what it reads after it
            return
        quick_start = begin_quickly()
        if quick_start:
            start = quick_start
            return
        if state.idle:
            if state.idle == CLOSED:
                state.optimizer_count += 1
            else:
                state.steps_before += 1
            state.open()
            return
        try:
            if _ident() != state.owner and not state.takes_over(_now()):
                return
            if state.slow:
                mark = state.begin(OPTIMIZER, optimizer)
            start = begin(OPTIMIZER)
        except Exception as error:
            recorder.fault("optimizer", error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal start, mark
        if not start:  # as where before() saw a compiler; to ask for that here would be compiled
            return
        if end_quickly(optimizer, start):
            start = 0
            return
        if _ident() != state.owner:
            return
        try:
            began, start = start, 0
            end = finish(began, entries.get(id(optimizer)) or optimizers.add(optimizer))
            state.owner_seen_ns = end
            state.optimizer_count += 1
            if state.slow:
                if not state.stepped:
                    state.train(stepped=True)
                state.end_step(mark, end, optimizer)
                mark = None
        except Exception as error:
            start = 0
            recorder.fault("optimizer", error)

    return before, after


def wrap_span(original: Callable[..., Any], state: State, kind: int) -> Any:
    """Times a plain call of the training thread: GradScaler.step, saves, DataLoader.__iter__."""
    recorder = state.recorder
    begin, end = recorder.spans.begin, recorder.spans.end

    @functools.wraps(original)
    def time_call(*args: Any, **kwargs: Any) -> Any:
        if state.is_tracing() or recorder.closed or state.idle:
            return original(*args, **kwargs)
        start = 0
        mark = None
        try:
            try:
                if _ident() == state.owner:
                    if state.slow:
                        mark = state.begin(kind, args[0] if args else None)
                    start = begin(kind)
            except Exception as error:
                start = 0
                recorder.fault("span", error)
            return original(*args, **kwargs)
        finally:
            if start:
                try:
                    end(start, kind)
                    if state.slow:
                        state.end(mark)
                except Exception as error:
                    recorder.fault("span", error)

    return time_call


class Staying:
    """A module's function that is replaced once and for good: what it calls comes and goes."""

    def __init__(self, original: Callable[..., Any]) -> None:
        # One that the job holds, such as torch.save, can be pickled only while the module's
        # attribute is the same object.
        self.original = original
        self.current = original

        @functools.wraps(original)
        def stays(*args: Any, **kwargs: Any) -> Any:
            return self.current(*args, **kwargs)

        self.function = stays


def wrap_next(original: Callable[..., Any], state: State) -> Any:
    """Times the training thread's wait for a batch; the end of an epoch is a kind of its own."""
    recorder = state.recorder
    begin, end = recorder.spans.begin, recorder.spans.end

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807
        if state.loading or state.is_tracing():
            return original(self)
        kind, start = DATA, 0
        mark = None
        try:
            try:
                if _ident() == state.owner and (state.idle == 0 or state.begins_here()):
                    if state.slow:
                        mark = state.begin(DATA, self)
                    start = begin(DATA)
            except Exception as error:
                start = 0
                recorder.fault("dataloader", error)
            if start:
                state.loading = True
            return original(self)
        except StopIteration:
            kind = DATA_END
            raise
        finally:
            if start:
                try:
                    end(start, kind)
                    if state.slow:
                        state.loading = False
                        state.end_fetch(mark, kind)
                except Exception as error:
                    recorder.fault("dataloader", error)
                finally:
                    state.loading = state.idle == CLOSED

    return __next__


def step_marker(state: State) -> Callable[[], None]:
    """What `haiprof.step()` calls: a step of the job has ended."""
    recorder, is_tracing = state.recorder, state.is_tracing
    hooked_ns = _now()

    def mark() -> None:
        if is_tracing():
            return
        try:
            if state.idle == WAITING:
                state.open()
            if state.idle or (_ident() != state.owner and not state.takes_over(_now())):
                return
            now = state.owner_seen_ns = _now()
            unseen = not state.repeats.marks and not recorder.armed and not len(recorder.spans)
            recorder.spans.put(hooked_ns if unseen else now, now, MARK)
            if not recorder.armed:
                recorder.arm()
            state.repeats.mark()
        except Exception as error:
            recorder.fault("step", error)

    return mark


def _compiler_is_tracing() -> bool:
    """Inside AOT's tracing of a forward: its backward call is no backward pass of the job."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None
