"""Exceptions that nobody caught in this process, written down before it ends.

The job's own handlers see and print what they do without haiprof: only Python's default hooks are
replaced, by ones that call them; a hook of the job's own is never wrapped. What such a hook takes
is found at exit where Python itself keeps it (`sys.last_value`, the exception in flight).
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import mmap
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import BuiltinFunctionType, TracebackType
from typing import Any, NoReturn

from haiprof.base.code_places import Frame, own_frame
from haiprof.base.safe_files import make_folder, write_file
from haiprof.in_job.frames import compiled_part
from haiprof.in_job.identity import named_rank, process_details
from haiprof.in_job.threads import call_within
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.secrets import mask_text

WRITE_WAIT_S = 1.0  # so long a run directory without an answer may hold a process that fails
MESSAGE_CHARS = 4_000
_LINE_CHARS = 300
_OUTER_FRAMES, _INNER_FRAMES = 16, 48
_CHAIN_LIMIT = 4
_THREAD_LIMIT = 4
_CHILDREN_LIMIT, _ENDING_S = 64, 0.2
_LOADER_FILE = "/torch/utils/data/dataloader.py"
_RESERVE_BYTES = 32 << 20
"""Address space, never touched, for the last words of a process whose memory has run out: the
thread that writes them needs a stack of 8 MiB, and Python arenas of 1 MiB."""


class Uncaught:
    """What no handler of this process caught."""

    def __init__(self, run: RunPaths, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._run, self._describe = run, describe
        self._noted: list[dict[str, Any]] = []
        self._pid = os.getpid()
        self._ended = False
        self._unwritten: tuple[dict[str, Any], BaseException | None] | None = None
        self._exit: list[dict[str, Any]] | None = None  # the last call of sys.exit
        self.left_at: list[Frame] = []  # where that call was made, whatever its status
        self._reserve: mmap.mmap | None = None

    @property
    def seen(self) -> bool:
        """Whether an exception ended this process, written down or not."""
        return self._ended and self._pid == os.getpid()

    def watch(self) -> None:
        """Replaces Python's own default hooks, and no others, by ones that call them."""
        # What ends the process from native code is written down, too, where that can be had.
        _watch_terminate(self._run.uncaught)
        _watch_crashes(self._run.uncaught)
        with contextlib.suppress(OSError):
            self._reserve = mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE)
        default, thread_default = sys.__excepthook__, threading.__excepthook__

        def excepthook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            self._note("exception", error)
            default(kind, error, traceback)

        def thread_excepthook(arguments: Any) -> None:
            if isinstance(arguments.exc_value, BaseException):
                name = getattr(arguments.thread, "name", None)
                self._note("thread", arguments.exc_value, thread=str(name))
            thread_default(arguments)

        leave = sys.exit

        @functools.wraps(leave)
        def exit(*arguments: Any) -> NoReturn:
            with contextlib.suppress(Exception):  # the interpreter forgets where it was called
                if threading.current_thread() is threading.main_thread():
                    called = (walk_stack(sys._getframe(1)), sys.exc_info()[1], *arguments)
                    call_within(WRITE_WAIT_S, self._keep_exit, *called, or_here=True)
            leave(*arguments)

        if isinstance(leave, BuiltinFunctionType):
            sys.exit = exit
        if sys.excepthook is default:
            sys.excepthook = excepthook
        if threading.excepthook is thread_default:
            threading.excepthook = thread_excepthook
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # its children print by themselves, and end without atexit
            util.register_after_fork(self, _finish_with_child)

    def finish(self) -> None:
        """At exit: what the job's own hook, or multiprocessing, has taken."""
        self._forget_parent()
        in_flight = sys.exc_info()[1]
        error = in_flight if in_flight is not None else getattr(sys, "last_value", None)
        if not self._ended and isinstance(error, BaseException):
            self._note("exit" if isinstance(error, SystemExit) else "exception", error)
        elif self._unwritten is not None:  # by now its frames have let go of their memory
            call_within(WRITE_WAIT_S, self._write, *self._unwritten, or_here=True)
        elif not self._ended and self._exit is not None:
            entry = {**_entry("exit_call"), "errors": self._exit}
            call_within(WRITE_WAIT_S, self._write, entry, None, or_here=True)

    def _keep_exit(self, stack: Any, handled: BaseException | None, code: object = None) -> None:
        self._exit = None
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack]
        self.left_at = frames[:_INNER_FRAMES][::-1]
        if code:  # else it reports no failure
            chain = [] if handled is None else list(_describe_chain(handled))
            self._exit = [_describe(SystemExit(code), frames[:_INNER_FRAMES][::-1]), *chain]

    def _note(self, how: str, error: BaseException, *, thread: str | None = None) -> None:
        """Keeps one exception and writes the file anew; if that fails, the job's end goes on."""
        # Describing it may call the job's own `__str__`, and reads lines of source: both happen in
        # a thread, which is waited for no longer than a moment.
        self._forget_parent()
        threads = sum(entry["how"] == "thread" for entry in self._noted)
        if self._ended or (how == "thread" and threads >= _THREAD_LIMIT):
            return
        if isinstance(error, SystemExit) and not error.code:
            return
        self._ended = how != "thread"
        entry = _entry(how, thread)
        self._unwritten = entry, error
        if self._reserve is not None:
            self._reserve.close()
        try:
            if ended := _ended_children(error):
                entry["children"] = ended
            call_within(WRITE_WAIT_S, self._write, entry, error, or_here=True)
        except Exception:
            return

    def _write(self, entry: dict[str, Any], error: BaseException | None) -> None:
        try:
            import json

            errors = {} if error is None else {"errors": [*_describe_chain(error)]}
            noted = [*self._noted, {**entry, **errors}]
            worker = sys.modules.get("torch.utils.data._utils.worker")
            is_worker = getattr(worker, "_worker_info", None) is not None
            own = {**process_details(), "rank": named_rank(), "loader_worker": is_worker}
            content = {**own, **self._describe(), "ended": noted}
            path = self._run.uncaught_file(socket.gethostname(), os.getpid())
            make_folder(path.parent, below=self._run.root)
            write_file(path, json.dumps(content).encode(), below=self._run.root)
        except Exception:
            return
        self._noted, self._unwritten = noted, None

    def _forget_parent(self) -> None:
        """In a forked child: what the parent had noted is not its own."""
        if self._pid != os.getpid():
            self._pid, self._noted, self._ended = os.getpid(), [], False
            self._unwritten = self._exit = None
            self.left_at = []


def _entry(how: str, thread: str | None = None) -> dict[str, Any]:
    times = {"wall_ns": time.time_ns(), "mono_ns": time.perf_counter_ns()}
    return {"how": how, "thread": thread, **times}


def _ended_children(error: BaseException) -> list[tuple[int, int, int]]:
    """Process id, `si_code` and `si_status` of children of multiprocessing that have ended."""
    # They were reaped by torch's DataLoader, or not yet at all: waitid(2) leaves them as they are.
    reaped = list(_reaped_workers(error))
    if reaped:
        return reaped
    children = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))
    # A connection breaks a moment before the process behind it is over. Meanwhile torch's handler
    # of SIGCHLD may raise here, as it would in whatever runs now.
    waits = bool(children) and isinstance(error, (ConnectionError, EOFError))
    until_s = time.monotonic() + (_ENDING_S if waits else 0.0)
    while True:
        with contextlib.suppress(Exception):
            found = [ended for child in children[:_CHILDREN_LIMIT] if (ended := _end_of(child))]
            if found or time.monotonic() >= until_s:
                return found
            time.sleep(0.005)


def _reaped_workers(error: BaseException) -> Iterator[tuple[int, int, int]]:
    """The same of loader workers that torch asked for, and found ended, before it raised."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename.endswith(_LOADER_FILE):
            workers = getattr(frame.f_locals.get("self"), "_workers", ())
            for worker in list(workers)[:_CHILDREN_LIMIT]:
                code = getattr(getattr(worker, "_popen", None), "returncode", None)
                if code:
                    yield worker.pid, os.CLD_KILLED if code < 0 else os.CLD_EXITED, abs(code)
            return


def _end_of(child: Any) -> tuple[int, int, int] | None:
    with contextlib.suppress(Exception):  # reaped, or closed, meanwhile
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if ended is None else (child.pid, ended.si_code, ended.si_status)
    return None


def _watch_terminate(folder: Path) -> None:
    """Has C++ exceptions that end this process written down, where terminate.cpp was compiled."""
    # Its handler goes before the one of std::terminate, which is called after it. Called once torch
    # is loaded: the helper then uses the same C++ runtime as torch does.
    library = next(iter(sorted(Path(__file__).parent.glob("_terminate*.so"))), None)
    # Built for another machine, or from another source; a name that is none.
    with contextlib.suppress(ImportError, OSError, AttributeError, ValueError):
        if library is not None:
            import ctypes

            watch = ctypes.CDLL(str(library)).haiprof_watch_terminate
            watch(os.fsencode(folder), os.fsencode(socket.gethostname()))


def _watch_crashes(folder: Path) -> None:
    """Has crashes of native code written down (crash.c), where stacks are sampled."""
    compiled = compiled_part()
    if compiled is not None:
        name = f"{socket.gethostname()}-{os.getpid()}.crash"
        # Of methods, whose qualified names, which are looked for, are not their names.
        codes = Uncaught.watch.__code__, Uncaught.finish.__code__
        compiled.write_crashes(os.fsencode(folder), os.fsencode(name), *codes)


def _finish_with_child(uncaught: Uncaught) -> None:
    from multiprocessing.util import Finalize

    Finalize(None, uncaught.finish, exitpriority=0)


def _describe_chain(error: BaseException) -> Iterator[dict[str, Any]]:
    """The exception, and what it was raised from or while handling, as Python prints them."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen and len(seen) < _CHAIN_LIMIT:
        seen.add(id(each))
        yield _describe(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _describe(error: BaseException, frames: Sequence[Frame] = ()) -> dict[str, Any]:
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its text cannot be read: {type(failure).__name__})"
    frames = frames or _frames(error.__traceback__)
    own = own_frame(frames)
    kind = type(error)
    return {
        "type": kind.__qualname__ if kind.__module__ == "builtins" else
        f"{kind.__module__}.{kind.__qualname__}",
        "message": mask_text(_shorten(message)),
        "frames": frames,
        "line": list(own) if own else None,
        "source": mask_text(linecache.getline(own[0], own[1]).strip()[:_LINE_CHARS]) if own else "",
        "errno": getattr(error, "errno", None) if isinstance(error, OSError) else None,
    }  # fmt: skip


def _shorten(message: str) -> str:
    """Its beginning, and its end: a remote traceback ends with what happened."""
    if len(message) <= MESSAGE_CHARS:
        return message
    half = MESSAGE_CHARS // 2
    return f"{message[:half]}\n...\n{message[-half:]}"


def _frames(traceback: TracebackType | None) -> list[Frame]:
    """From the outermost to the innermost; of a deep recursion the middle is left out."""
    found = ((f.f_code.co_filename, n or 0, f.f_code.co_name) for f, n in walk_tb(traceback))
    return [*islice(found, _OUTER_FRAMES), *deque(found, maxlen=_INNER_FRAMES)]
