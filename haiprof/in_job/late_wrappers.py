"""Functions that are wrapped once the job imports their module: checkpoints and collectives.

Checkpoints are written down as lines: when, and from which file a start went on. Calls of
torch.distributed are spans, in a process that has not trained yet.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from _thread import get_ident
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from haiprof.base.code_places import is_library
from haiprof.in_job.frames import MAX_DEPTH, OWN_FOLDER, Place, line_of, read_stacks
from haiprof.in_job.patches import State
from haiprof.run_format.schema import COLLECTIVE, TAG_BITS, TAG_MASK

_now = time.perf_counter_ns


class ImportWatch:
    """A finder for a few module names: the real spec, with a step added after the import."""

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._steps: dict[str, Callable[[Any], None]] = {}

    def after(self, name: str, then: Callable[[Any], None]) -> None:
        """Calls `then(module)` once the job has imported `name`, at once if it already has."""
        # It stays on sys.meta_path for good, and answers None when there is nothing left to wait
        # for: taking it out would make an import under way in another thread skip a finder.
        module = sys.modules.get(name)
        if module is not None:
            then(module)
            return
        self._steps[name] = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Waits for nothing more."""
        self._steps.clear()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, for our names alone."""
        if name not in self._steps:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(name, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            original(module)
            then = self._steps.pop(name, None)
            try:
                loader.__dict__.pop("exec_module", None)
                if then is not None:
                    then(module)
            except Exception as error:
                self._failed(name, error)

        try:
            loader.exec_module = exec_module
        except AttributeError as error:  # a loader with slots
            self._failed(name, error)


SAVES = (
    ("torch.serialization", ("save",)),
    ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save")),
    ("safetensors.torch", ("save_file",)),
)
LOADS = (
    ("torch.serialization", ("load",)),
    ("torch.distributed.checkpoint.state_dict_loader", ("load",)),
    ("safetensors.torch", ("load_file",)),
)
"""Functions by module; those of torch.distributed.checkpoint take a folder by name."""
_LOAD_LIMIT = 64
_PLACES = {"save": 1, "save_file": 1, "load": 0, "load_file": 0}  # place of the file in a call
_NAMES = ("f", "filename", "checkpoint_id")
_FOLDER_INDEX = ".metadata"
_FOLDERS = "/torch/distributed/checkpoint/"
_STARTERS = ("/threading.py", "/concurrent/futures/thread.py")
"""Where a thread is that has just given another one its work."""


class CheckpointLog:
    """Writes down the saves of all threads, and what the training thread loads before it trains.

    A load tells when its file was written, whatever the file is called by now: by that a reader
    knows which save it holds. A save that goes on beside the training thread tells since when, and
    which line of the job began it.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._inside: set[int] = set()
        """Threads in one of these functions: what it calls itself is no other."""
        self._load_count = 0

    def wrap(self, original: Callable[..., Any], *, loads: bool) -> Callable[..., Any]:
        """The same function, which leaves a line for each call that did not fail."""

        @functools.wraps(original)
        def note(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            line = self._begin(thread, loads=loads)
            if line is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside.discard(thread)
            self._end(line, result, original, args, kwargs)
            return result

        return note

    def _begin(self, thread: int, *, loads: bool) -> dict[str, Any] | None:
        """The beginning of a call's line; None where it leaves none."""
        state = self._state
        try:
            if thread in self._inside or state.is_closed:
                return None
            line: dict[str, Any] = {"type": "checkpoint", "action": "load" if loads else "save"}
            if thread == state.owner:
                if state.loading:  # a dataset that reads its samples so
                    return None
                if loads and (state.stepped or self._load_count >= _LOAD_LIMIT):
                    return None
                self._load_count += loads
            else:
                stack = read_stacks((thread, state.owner), limit=MAX_DEPTH)
                own = [place for place in stack[thread] if not _is_ours(place)]
                if loads or (own and _FOLDERS in own[0][0].co_filename):
                    return None  # a part of a save of torch.distributed is no other one
                line |= _begun_at(own, stack.get(state.owner, ()))
                line["beside_ns"] = _now()
            self._inside.add(thread)
            return {**line, "start_ns": line.get("beside_ns") or _now()}
        except Exception as error:
            state.recorder.fault("checkpoint", error)
            return None

    def _end(
        self, line: dict[str, Any], result: Any, original: Callable[..., Any],
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        """Leaves the line, once what the call began is written."""
        try:
            path = _path_of(original, args, kwargs)
            written = getattr(result, "upload_completion", result)  # of torch's async_save
            is_begun = line["action"] == "save"
            when_done = getattr(written, "add_done_callback", None) if is_begun else None
            if when_done is None:
                self._state.recorder.lines.append({**line, "end_ns": _now(), **_file_facts(path)})
                return
            thread = get_ident()
            stack = read_stacks((thread,), limit=MAX_DEPTH)[thread]
            line |= {"beside_ns": _now(), **_begun_at(stack)}
            when_done(functools.partial(self._is_written, line, path))
        except Exception as error:
            self._state.recorder.fault("checkpoint", error)

    def _is_written(self, line: dict[str, Any], path: str | None, future: Any) -> None:
        """On whichever thread: what was written beside the training is there, or has failed."""
        try:
            if not self._state.is_closed and not future.cancelled() and future.exception() is None:
                self._state.recorder.lines.append({**line, "end_ns": _now(), **_file_facts(path)})
        except Exception as error:
            self._state.recorder.fault("checkpoint", error)


def _begun_at(own: Sequence[Place], starter: Sequence[Place] = ()) -> dict[str, Any]:
    """The job's line that saves; of a thread that runs a library's function, who started it."""
    # Whoever starts a thread waits until it runs, and so is seen there; None each where nobody is,
    # as with a thread that was there before.
    places = [place for place in own if _is_of_job(place)]
    if not places and starter and starter[0][0].co_filename.endswith(_STARTERS):
        places = [place for place in starter if _is_of_job(place)]
    if not places:
        return dict.fromkeys(("begun_file", "begun_line", "begun_function"))
    code = places[0][0]
    return {"begun_file": code.co_filename, "begun_line": line_of(places[0]),
            "begun_function": getattr(code, "co_qualname", code.co_name)}  # fmt: skip


def _is_of_job(place: Place) -> bool:
    file = place[0].co_filename
    return not _is_ours(place) and not is_library(file, place[0].co_name)


def _is_ours(place: Place) -> bool:
    return place[0].co_filename.startswith(OWN_FOLDER)


def _path_of(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """The file's or folder's name; None where it is not known."""
    place = _PLACES.get(original.__name__)
    is_of_folders = "checkpoint" in original.__module__
    target = next((kwargs[name] for name in _NAMES if name in kwargs), None)
    if target is None and place is not None and not is_of_folders and len(args) > place:
        target = args[place]
    if not isinstance(target, (str, os.PathLike)):
        target = getattr(target, "name", None)  # an open file, which may have none
    if not isinstance(target, (str, os.PathLike)):
        return None
    return os.path.abspath(os.fspath(target))


def _file_facts(path: str | None) -> dict[str, Any]:
    """The file's name, and Unix time of when it was written; None where they are not known."""
    written_ns = None
    for place in () if path is None else (os.path.join(path, _FOLDER_INDEX), path):
        try:
            written_ns = os.stat(place).st_mtime_ns
            break
        except OSError:  # no folder, or not this machine's file system
            continue
    return {"file": path, "written_ns": written_ns}


CALLS = (
    "barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list",
)  # fmt: skip
_MEETING = "init_process_group"
_CALLERS = 2  # frames between the caller and ours: torch's own decorator


def number_place(name: str, tags: dict[Place, int], lines: list[dict[str, Any]]) -> int:
    """The number of the place that called the wrapper; the last one stands for many."""
    frame = sys._getframe(_CALLERS + 1)
    key = (frame.f_code, frame.f_lasti)
    known = tags.get(key)
    if known is not None:
        return known
    if len(tags) + 1 >= TAG_MASK:
        return TAG_MASK
    tag = tags[key] = len(tags) + 1
    place = {"file": frame.f_code.co_filename, "line": frame.f_lineno}
    lines.append({"type": "collective_call", "tag": tag, "name": name, **place})
    return tag


def wrap_calls(module: Any, state: State) -> list[Callable[[], None]]:
    """Puts wrappers behind the functions of `torch.distributed.distributed_c10d`; the undos."""
    # torch decorates each of them with a function that logs its exceptions, and what is replaced is
    # the function inside that decorator. So the names that the job imports, pickles, and by which
    # Dynamo knows collectives that it can trace, stay the objects that they were.
    undos: list[Callable[[], None]] = []
    tags: dict[Place, int] = {}
    for name in (*CALLS, _MEETING):
        function = getattr(module, name, None)
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        if code is None or code.co_freevars != ("func",) or not cells:
            continue  # another torch: these calls are not seen
        original = cells[0].cell_contents
        cells[0].cell_contents = (
            _wrap_meeting(original, state)
            if name == _MEETING
            else wrap_collective(original, state, name=name, tags=tags)
        )
        undos.append(functools.partial(setattr, cells[0], "cell_contents", original))
    return undos


def _wrap_meeting(original: Callable[..., Any], state: State) -> Callable[..., Any]:
    """Writes down how long the ranks took to meet; it is no step of anything, and so no span."""

    @functools.wraps(original)
    def meet(*args: Any, **kwargs: Any) -> Any:
        line: dict[str, Any] = {"type": "process_group", "start_ns": _now()}
        try:
            return original(*args, **kwargs)
        finally:
            state.recorder.lines.append({**line, "end_ns": _now()})

    return meet


def wrap_collective(
    original: Callable[..., Any], state: State, *, name: str, tags: dict[Place, int]
) -> Callable[..., Any]:
    """Times outermost calls of the training thread."""
    recorder, is_tracing = state.recorder, state.is_tracing
    begin, end = recorder.spans.begin, recorder.spans.end

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if is_tracing() or state.busy or state.loading:
            return original(*args, **kwargs)
        code = start = 0
        mark = None
        try:
            try:
                if state.begins_here():
                    found = COLLECTIVE | number_place(name, tags, recorder.lines) << TAG_BITS
                    mark = state.begin(COLLECTIVE, None)
                    start = begin(COLLECTIVE)
                    code = found
                    state.loading = True  # what it calls itself is no other
            except Exception as error:
                recorder.fault("collective", error)
            return original(*args, **kwargs)
        finally:
            if code:
                try:
                    end(start, code)
                    state.loading = False
                    state.end(mark, code)
                except Exception as error:
                    recorder.fault("collective", error)
                finally:
                    state.loading = state.is_closed

    return collective
