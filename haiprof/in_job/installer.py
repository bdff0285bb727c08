"""Puts the wrappers in place, takes them out again, and measures what one costs."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any, ClassVar

import haiprof
from haiprof.in_job import patches
from haiprof.in_job.collectives import drop_old_flight_names
from haiprof.in_job.device import DeviceTimer
from haiprof.in_job.gpu_memory import GpuMemory, OutOfMemory
from haiprof.in_job.late_wrappers import LOADS, SAVES, CheckpointLog, ImportWatch, wrap_calls
from haiprof.in_job.object_settings import (
    CallHooks,
    InputSizes,
    Registry,
    UnusedGradients,
    describe_loader,
    describe_root,
    wrap_iter,
)
from haiprof.in_job.recorder import Recorder, is_foreign
from haiprof.in_job.settings import CollectorPauses, Settings
from haiprof.in_job.spans import make_spans, time_call
from haiprof.in_job.worker_stacks import wrap_worker_loop
from haiprof.run_format.schema import (
    BACKWARD,
    DATA,
    DATA_ITER,
    FORWARD,
    OPTIMIZER,
    SAVE,
    SCALER,
    TAG_BITS,
)

_OPTIMIZER_HOOKS: list[Any] = []
_OPTIMIZER_STATES: list[patches.State] = []  # of the installation whose hooks these are
_STAYING: dict[tuple[str, str], patches.Staying] = {}
_OF_STATE = patches.State
_OWN_WORK = (  # what wrappers call beside the job's own function
    _OF_STATE.takes_over, _OF_STATE._begin, _OF_STATE.open, _OF_STATE.end, _OF_STATE.end_fetch,
    _OF_STATE.finish_call, _OF_STATE.end_step, _OF_STATE.train, _OF_STATE.begins_here,
    patches._end_both, Registry.add, describe_root, Recorder.show_work,
    Recorder.sample_early, Recorder.fault, Recorder.arm, DeviceTimer.begin, GpuMemory.begin_step,
    patches._compiler_is_tracing, describe_loader,
)  # fmt: skip


class Installer:
    """Holds what was replaced, so that it can be put back."""

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self.recorder = recorder
        self.state = patches.State(recorder, _tracing_test(torch))
        self.is_grad_enabled = torch.is_grad_enabled
        self.roots = Registry(self._describe_root, patches.module_codes, recorder.lines)
        self.optimizers = Registry(
            lambda optimizer: {"type": "optimizer", "name": type(optimizer).__name__},
            lambda tag: OPTIMIZER | tag << TAG_BITS,
            recorder.lines,
        )
        self._families: dict[int, int] = {}
        self._pauses = CollectorPauses(recorder)
        self._sizes = InputSizes(recorder.lines)
        self._hooks = CallHooks()
        self._gradients = UnusedGradients(
            self.roots.list_numbered, self.optimizers.list_numbered, recorder.lines
        )
        self._settings = Settings(
            self.roots.living, self.optimizers.living, pauses=self._pauses,
            own_profiler=lambda: self.recorder.installed.must_stay(),
            kept_graphs=lambda: self.state.kept_graphs, masks=lambda: self._sizes.masks,
            hooks=self._hooks,
        )  # fmt: skip
        self._watches_memory = False
        self._memory_inputs: Callable[[int, tuple[Any, ...], dict[str, Any]], None] | None = None
        self._time_call = partial(time_call, gate=self.state, spans=recorder.spans)
        self.state.find_device = self._find_device
        self._undo: list[Callable[[], None]] = []
        self._imports = ImportWatch(self._import_failed)
        self._late = False

    def install(self, *, late: bool = False) -> patches.State:
        """Installs each part; one that fails is noted and leaves its phase unmeasured."""
        self._late = late
        if late:
            self.state.wait_for_boundary()
        parts = {
            "forward": self._forward, "backward": self._backward, "optimizer": self._optimizer,
            "dataloader": self._dataloader, "scaler": self._scaler, "gc": self._gc,
            "save": self._checkpoints, "workers": self._workers, "collectives": self._collectives,
            "step": self._step,
        }  # fmt: skip
        for name, part in parts.items():
            try:
                part()
                self.recorder.phases[name] = "ok"
            except Exception as error:
                self.recorder.phases[name] = reason = f"{type(error).__name__}: {error}"
                line = {"type": "patch_failed", "phase": name, "reason": reason}
                self.recorder.lines.append(line)
        for own in (
            *_OWN_WORK, self._look_once, self._look_at_gradients, self._gradients.walk,
        ):  # fmt: skip
            _skip_frame(own, below=True)
        with contextlib.suppress(AttributeError, ImportError):  # at once where CUDA has started
            import torch.cuda

            lazy_call: Any = torch.cuda._lazy_call  # which has no types
            lazy_call(self._cuda_started)
        self.recorder.installed = replace(
            self.recorder.installed, uninstall=self.uninstall, restart_in_fork=self._restart,
            calibrate=self.calibrate, settings_lines=self._settings_lines,
            training_thread=lambda: self.state.owner, works_untrained=self._works_untrained,
        )  # fmt: skip
        return self.state

    def uninstall(self) -> None:
        """Puts the originals back; what somebody wrapped again stays, and is inert."""
        self.state.close()  # first: whatever stays in place is inert from here on
        self._imports.stop()
        while self._undo:
            with contextlib.suppress(Exception):  # one that fails must not keep the others in
                self._undo.pop()()

    def _restart(self) -> None:
        """In a forked child, which names its own modules and optimizers."""
        self.state.restart()
        self._memory_inputs = None
        self._settings.restart()
        self._sizes.restart()
        self._hooks.restart()
        self._gradients.restart()
        self.roots.clear()
        self.optimizers.clear()

    def _settings_lines(self, last: bool) -> list[dict[str, Any]]:
        """What is to be written of settings now."""
        # Where a look at inputs is due, the training thread's next call of a root module tells its
        # size. That one call takes the way through Python, as all do on a GPU.
        state = self.state
        due = not last and not state.is_closed and self._sizes.becomes_due()
        if due and state.inputs is None and not self._watches_memory:  # which looks by itself
            state.inputs, state.slow = self._look_once, True
        if not (last or state.is_closed):
            if self._gradients.wants_graph:
                state.before_backward, state.slow = self._gradients.walk, True
            elif self._gradients.is_due(state.steps_so_far()):
                state.after_step, state.slow = self._look_at_gradients, True
        return self._settings.take_lines(state.steps_so_far(), last=last)

    def _look_once(self, tag: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.state.inputs = self._memory_inputs  # CUDA may have started since this was put in
        self._hooks.look()
        self._sizes.look(self.state.steps_so_far(), tag, args, kwargs)

    def _look_at_gradients(self, optimizer: Any) -> None:
        if self._gradients.look(self.state.steps_so_far(), optimizer):
            self.state.after_step, self.state.slow = self._look_at_gradients, True

    def _forward(self) -> None:
        from torch.nn import Module

        original = Module.__call__
        self.state.inside |= _codes(original, Module._call_impl)
        outermost = patches.wrap_module_call(original, self.state, self.roots, self.is_grad_enabled)
        _skip_frame(outermost)
        wrapper = self._time_call(
            FORWARD, original, self.roots.entries, self.is_grad_enabled, wrapper=outermost
        )
        outermost.__qualname__ = wrapper.__qualname__ = "Module.__call__"  # for pickle
        self._replace(Module, "__call__", wrapper, skip=False)
        _tell_dynamo(original, wrapper)
        self._undo.append(lambda: _tell_dynamo(wrapper, original))

        def use_function() -> None:
            if vars(Module).get("__call__") is wrapper:
                Module.__call__ = outermost  # type: ignore[method-assign]
                _tell_dynamo(wrapper, outermost)

        if wrapper is not outermost:
            self._before_compilation(use_function)

    def _before_compilation(self, act: Callable[[], None]) -> None:
        """Dynamo traces functions, but no compiled callable: it would break the graph there."""
        # It comes to `Module.__call__` where a submodule has hooks, a `forward` of its instance, or
        # a `__call__` that calls `super().__call__`. Guards then hold the function, so it stays
        # from the first compilation on, as one that passes calls on once the hooks are out.

        def compiles(*_: Any) -> None:  # before torch 2.7 without an argument
            if not self.state.is_closed:
                act()

        def wait(module: Any) -> None:
            module.callback_handler.register_start_callback(compiles)

        def undo() -> None:
            module: Any = sys.modules.get("torch._dynamo.callback")
            module.callback_handler.remove_start_callback(compiles)

        self._imports.after("torch._dynamo.callback", wait)
        self._undo.append(undo)  # fails where it is not in the list, or in another torch

    def _backward(self) -> None:
        import torch.autograd
        import torch.autograd.graph

        original = torch.autograd.graph._engine_run_backward
        self.state.inside |= _codes(original)
        plain = patches.wrap_backward(original, self.state)
        _skip_frame(plain)
        wrapper = self._time_call(BACKWARD, original, wrapper=plain)
        self._replace(torch.autograd.graph, "_engine_run_backward", wrapper, skip=False)
        self._replace(torch.autograd, "_engine_run_backward", wrapper, skip=False)

    def _optimizer(self) -> None:
        from torch.optim import optimizer

        before, after = patches.optimizer_hooks(self.state, self.optimizers)
        _skip_frame(before, below=True)
        _skip_frame(after, below=True)
        # They stay in, inert: taking them out would change a dictionary that a step under way
        # iterates over, and on whose length Dynamo guards. A later installation takes their places.
        places = [(handle.hooks_dict_ref(), handle.id) for handle in _OPTIMIZER_HOOKS]
        if places and all(number in place for place, number in places):
            for (place, number), hook in zip(places, (before, after), strict=True):
                place[number] = hook
            for before_us in _OPTIMIZER_STATES:
                before_us.successor = self.state
                self.state.steps_before += before_us.steps_of_job()
                self.state.counts_all = before_us.counts_all and not before_us.repeats.count
        else:
            _OPTIMIZER_HOOKS[:] = [
                optimizer.register_optimizer_step_pre_hook(before),
                optimizer.register_optimizer_step_post_hook(after),
            ]
            self.state.counts_all = self.state.idle != patches.WAITING
        _OPTIMIZER_STATES[:] = [self.state]

    def _dataloader(self) -> None:
        from torch.utils.data import dataloader

        base = dataloader._BaseDataLoaderIter
        self.state.inside |= _codes(base.__next__)
        plain = patches.wrap_next(base.__next__, self.state)
        _skip_frame(plain)
        wrapper = self._time_call(DATA, base.__next__, wrapper=plain)
        self._replace(base, "__next__", wrapper, skip=False)
        loader = dataloader.DataLoader
        told = wrap_iter(loader.__iter__, self.recorder)
        _skip_frame(told)
        self._replace(loader, "__iter__", patches.wrap_span(told, self.state, DATA_ITER))

    def _scaler(self) -> None:
        from torch.amp.grad_scaler import GradScaler

        self._replace(GradScaler, "step", patches.wrap_span(GradScaler.step, self.state, SCALER))

    def _gc(self) -> None:
        callback = self._pauses.on_collection
        gc.callbacks.append(callback)
        self._undo.append(lambda: gc.callbacks.remove(callback))

    def _checkpoints(self) -> None:
        import torch
        import torch.serialization as files

        at_torch = [name for name in ("save", "load") if getattr(torch, name) is vars(files)[name]]
        log = CheckpointLog(self.state)

        def save(original: Callable[..., Any]) -> Callable[..., Any]:
            return log.wrap(patches.wrap_span(original, self.state, SAVE), loads=False)

        for table, wrap in ((SAVES, save), (LOADS, partial(log.wrap, loads=True))):
            for module, names in table:

                def stay(loaded: Any, names: Any = names, wrap: Any = wrap) -> None:
                    for name in filter(partial(hasattr, loaded), names):
                        self._stay(loaded, name, wrap)

                self._imports.after(module, stay)
        for name in at_torch:
            setattr(torch, name, getattr(files, name))

    def _workers(self) -> None:
        if not self.recorder.stacks_hz:
            return
        from torch.utils.data._utils import worker

        # Once and for good: a worker that is spawned finds its function by name.
        self._stay(worker, "_worker_loop", lambda loop: wrap_worker_loop(loop, self.recorder))

    def _collectives(self) -> None:
        """Until the process trains: after that its steps are known, and a collective costs more."""
        undos: list[Callable[[], None]] = []

        def wrap(module: Any) -> None:
            drop_old_flight_names()
            if not self.state.repeats.trained and not self.state.is_closed:
                undos.extend(wrap_calls(module, self.state))

        def undo() -> None:
            while undos:
                undos.pop()()

        self._imports.after("torch.distributed.distributed_c10d", wrap)
        self.state.trains = undo
        self._undo.append(undo)

    def _step(self) -> None:
        """What `haiprof.step()` does from now on."""
        mark = patches.step_marker(self.state)
        _skip_frame(mark)
        haiprof._mark_step = mark

        def undo() -> None:
            if haiprof._mark_step is mark:
                haiprof._mark_step = None

        self._undo.append(undo)

    def _works_untrained(self) -> bool:
        """Whether steps are what repeats: nothing trained, and nothing seems about to."""
        repeats = self.state.repeats
        return repeats.settled and not repeats.marks and (self._late or not optimizer_exists())

    def _import_failed(self, name: str, error: Exception) -> None:
        line = {"type": "patch_failed", "phase": "save", "reason": f"{name}: {error}"}
        self.recorder.lines.append(line)

    def _stay(self, module: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
        """Replaces a module's function for good, or takes the place of an earlier installation."""
        key = (module.__name__, name)
        staying = _STAYING.get(key)
        if staying is None:
            staying = _STAYING[key] = patches.Staying(getattr(module, name))
            _skip_frame(staying.function)
            setattr(module, name, staying.function)
        wrapper = wrap(staying.original)
        _skip_frame(wrapper)
        staying.current = wrapper

        def undo() -> None:
            if staying.current is wrapper:
                staying.current = staying.original

        self._undo.append(undo)

    def _replace(self, holder: Any, name: str, wrapper: Any, *, skip: bool = True) -> None:
        """Sets an attribute, and puts back exactly what was there (or nothing, if inherited)."""
        if skip:
            _skip_frame(wrapper)
        own = name in vars(holder)
        original = getattr(holder, name)
        setattr(holder, name, wrapper)

        def undo() -> None:
            if vars(holder).get(name) is wrapper:
                if own:
                    setattr(holder, name, original)
                else:
                    delattr(holder, name)

        self._undo.append(undo)

    def _describe_root(self, module: Any) -> dict[str, Any] | None:
        if self.state.device is None:
            self.state.device = self._find_device()
            self.state.slow = True
        return describe_root(module, self._families)

    def _find_device(self) -> DeviceTimer | None:
        timer = DeviceTimer.where_started(self.recorder.device_records)
        if timer is not None:
            self._cuda_started()
        return timer

    def _cuda_started(self) -> None:
        """Torch calls this while it starts CUDA; an error of ours would become the job's."""
        if self._watches_memory or self.recorder.closed:
            return
        self._watches_memory = True
        try:
            self._watch_memory()
        except Exception as error:
            self._lose_memory(error)

    def _watch_memory(self) -> None:
        import torch

        recorder, state = self.recorder, self.state
        memory = GpuMemory(torch, recorder.lines, history=recorder.memory_history)
        begin_step, steps, sizes = memory.begin_step, state.steps_so_far, self._sizes
        hooks = self._hooks

        def inputs(tag: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if sizes.is_due:
                hooks.look()
                sizes.look(steps(), tag, args, kwargs)
            try:
                begin_step(steps(), args, kwargs)
            except Exception as error:
                state.inputs = self._memory_inputs = None
                self._lose_memory(error)

        _skip_frame(inputs, below=True)
        self._memory_inputs = state.inputs = inputs
        state.slow = True
        OutOfMemory(
            torch, recorder.run, memory, describe=recorder.describe, phase=self._phase,
            training_thread=lambda: state.owner, modules=self.roots.living,
            optimizers=self.optimizers.living, is_foreign=is_foreign,
        ).watch()  # fmt: skip
        memory.start_history()

    def _lose_memory(self, error: Exception) -> None:
        """Memory is not watched any more; the rest of the hook goes on."""
        if is_foreign(error):
            raise error
        reason = f"{type(error).__name__}: {error}"
        self.recorder.lines.append({"type": "gpu_memory_failed", "reason": reason})

    def _phase(self) -> str | None:
        """What the training thread does, or has the autograd engine's threads do."""
        if self.state.busy == BACKWARD:
            return "backward"
        if self.state.busy != FORWARD or patches._ident() != self.state.owner:
            return None
        return "forward" if self.is_grad_enabled() else "evaluation"

    def calibrate(self) -> tuple[float, float]:
        """What one span and one passed-on module call cost here, in ns: wrappers around nothing."""
        scratch = SimpleNamespace(spans=make_spans(), armed=True, closed=False)
        state = patches.State(scratch, self.state.is_tracing)  # type: ignore[arg-type]
        state.owner = patches._ident()
        state.stepped, state.slow = True, False
        roots = Registry(lambda _: {}, patches.module_codes, [])
        outermost = patches.wrap_module_call(_do_nothing, state, roots, self.is_grad_enabled)
        _skip_frame(outermost)
        call = time_call(
            FORWARD, _do_nothing, roots.entries, self.is_grad_enabled,
            wrapper=outermost, gate=state, spans=scratch.spans,
        )  # fmt: skip
        target = _Target()
        roots.add(target)
        bare = _price(_do_nothing, target)
        span = _price(call, target) - bare
        state.busy = 1
        return max(span, 0.0), max(_price(call, target) - bare, 0.0)


def _codes(*functions: Any) -> frozenset[CodeType]:
    """Code of functions, where they are Python."""
    codes = (getattr(function, "__code__", None) for function in functions)
    return frozenset(code for code in codes if code is not None)


def optimizer_exists() -> bool:
    """Whether the job has made an optimizer: torch then has put its hooks into the class's step."""
    module = sys.modules.get("torch.optim.optimizer")
    classes = [] if module is None else [module.Optimizer]
    while classes:
        found = classes.pop()
        if getattr(vars(found).get("step"), "hooked", False):
            return True
        classes += found.__subclasses__()
    return False


class _Target:
    """Stands for a module while a wrapper is timed."""

    training = True
    _parameters: ClassVar[dict[str, Any]] = {}  # read by torch.profiler where it records modules


def _do_nothing(target: Any) -> None:
    """Stands for a module's call while a wrapper is timed."""


def _price(function: Callable[[Any], Any], target: Any) -> float:
    """Median ns of a call whose code and data have left the near caches, as in a job."""
    # A call in a tight loop costs a third of that and would flatter us.
    prices = []
    for _ in range(patches.CALIBRATION_CALLS):
        bytearray(patches.CALIBRATION_EVICT_BYTES)
        begin = time.perf_counter_ns()
        function(target)
        prices.append(time.perf_counter_ns() - begin)
    return float(sorted(prices)[len(prices) // 2])


def _tracing_test(torch: Any) -> Callable[[], bool]:
    """The cheapest test for "Dynamo is tracing this", which Dynamo itself folds to a constant."""
    compiler = getattr(torch, "compiler", None)
    for name in ("is_dynamo_compiling", "is_compiling"):
        test: Callable[[], bool] | None = getattr(compiler, name, None)
        if test is not None:
            return test
    return lambda: False


def _skip_frame(function: Any, *, below: bool = False) -> None:
    """Tells Dynamo to leave a function's own frame alone, and those it calls only if `below`."""
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(
            action.SKIP, action.SKIP if below else action.DEFAULT
        )
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):
        return  # older torch: the wrapper's own test for tracing has to do


def _tell_dynamo(before: Any, now: Any) -> None:
    """Dynamo remembers `Module.__call__` to tell patched modules: ours is not one of those."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "unpatched_nn_module_call", None) is before:
            setattr(module, "unpatched_nn_module_call", now)  # noqa: B010
