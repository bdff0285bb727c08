"""What a rank answers to requests: how far it is, what its threads do, its last collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from haiprof.in_job.collectives import FlightRecorder
from haiprof.in_job.commands import Handler
from haiprof.in_job.frames import line_of, read_stacks

MAX_DEPTH = 100
MAX_THREADS = 64


def handlers(
    flight_recorder: Callable[[], FlightRecorder | None],
    progress: Callable[[], Mapping[str, Any]],
) -> dict[str, Handler]:
    """The handlers that need nothing of the training thread, by kind of request."""

    def status(_: str, __: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "state": "done",
            "mono_ns": time.perf_counter_ns(),
            "wall_ns": time.time_ns(),
            **progress(),
        }

    def stacks(_: str, __: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"state": "done", "wall_ns": time.time_ns(), "threads": thread_stacks()}

    def collectives(_: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        recorder = flight_recorder()
        if recorder is None:
            return {"state": "refused", "reason": "the Flight Recorder is not read here"}
        recorder.beat()
        groups = {str(group): list(status) for group, status in recorder.status().items()}
        path = recorder.dump() if arguments.get("entries") else None
        return {"state": "done", "groups": groups, "path": path.name if path else None}

    return {"status": status, "stacks": stacks, "collectives": collectives}


def thread_stacks() -> list[dict[str, Any]]:
    """What every Python thread of this process is doing.

    One entry per thread, the main thread first: `name`, `main`, and `frames` from the outermost
    to the innermost as [file, line, function]. A thread inside C shows the line that called it.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, stack in read_stacks(None, limit=MAX_DEPTH).items():
        if ident != own:
            frames = [[p[0].co_filename, line_of(p), p[0].co_name] for p in reversed(stack)]
            found.append({"name": names.get(ident, "?"), "main": ident == main, "frames": frames})
    found.sort(key=lambda thread: not thread["main"])
    return found[:MAX_THREADS]
