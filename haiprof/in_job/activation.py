"""Begins recordings in this process: from its start, on request, or from an injected payload."""

from __future__ import annotations

import _thread
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from haiprof.base.options import ENV_TRY_LOADER
from haiprof.base.safe_files import find_problem
from haiprof.run_format.layout import RunPaths

if TYPE_CHECKING:
    from haiprof.in_job.commands import Handler
    from haiprof.in_job.patches import State
    from haiprof.in_job.recorder import Recorder

BUSY = "it is recorded already"
_NEXT_STEP_S = 1e-9
_activated = False
_recorder: Recorder | None = None
_lock = _thread.allocate_lock()


def activate(config: Mapping[str, Any]) -> None:
    """Installs the hook in this process; a second call does nothing."""
    global _activated
    if _activated:
        return
    _activated = True
    if "phases" in config["recorder"]:
        _record(config, late=False)


def activate_into(run: RunPaths, *, owner: int) -> dict[str, Any]:
    """Begins a recording as a run directory's boot config says, in a job that trains already."""
    # Nothing is taken before a place between two steps. It may be called on any thread: attributes
    # are replaced one by one, each at once, and a call under way goes on in what it began in.
    global _activated
    for path in (run.root, run.boot, run.boot_config):
        problem = find_problem(path, owner=owner)
        if problem:
            raise PermissionError(f"{path} {problem}")
    config = json.loads(run.boot_config.read_text(encoding="utf-8"))
    with _lock:
        if _recorder is not None and not _recorder.closed:
            return {"state": "refused", "reason": BUSY}
        _activated = True
        _record({**config, "run_dir": str(run.root)}, late=True)
    return {"state": "done"}


def _record(config: Mapping[str, Any], *, late: bool) -> None:
    """Installs the wrappers, tells the recorder of them, and plans trace windows."""
    global _recorder
    from haiprof.in_job.recorder import Recorder

    if late:  # the recording opens with the end of a whole step
        config = {**config, "warmup": config["warmup"] or _NEXT_STEP_S}
    recorder = _recorder = Recorder.from_config(config)
    with recorder.installing:
        from haiprof.in_job.installer import Installer

        if ENV_TRY_LOADER in os.environ:
            from haiprof.in_job.loader_trial import change_loaders

            change_loaders(recorder.run.root)
        recorder.uncaught.watch()
        state = Installer(recorder).install(late=late)
        recorder.installed = replace(
            recorder.installed, steps=state.progress, requests=_requests(recorder, state)
        )
        if config.get("trace"):
            from haiprof.in_job.windows.driver import attach

            try:
                attach(config["trace"], recorder=recorder, state=state)
            except Exception as error:  # no windows, and the rest of the hook goes on
                line = {"type": "trace_window", "window": 0, "state": "failed"}
                recorder.lines.append({**line, "reason": f"{type(error).__name__}: {error}"})


def _requests(recorder: Recorder, state: State) -> dict[str, Handler]:
    """What answers requests that concern more than the recorder; loaded when one comes."""

    def trace(request_id: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        from haiprof.in_job.windows.driver import plan_request

        return plan_request(request_id, arguments, recorder=recorder, state=state)

    def activate_again(_: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        name = arguments.get("name")
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
            return {"state": "refused", "reason": "the request names no run directory"}
        root = recorder.run.root
        return activate_into(RunPaths(root.parent / name), owner=os.lstat(root).st_uid)

    return {"trace": trace, "activate": activate_again}
