"""Puts the hook into a process that trains already: on request, or from an injected payload."""

from __future__ import annotations

import _thread
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from haiprof.rundir.layout import RunPaths

if TYPE_CHECKING:
    from haiprof.hook.recorder import Recorder

BUSY = "it is recorded already"
_lock = _thread.allocate_lock()


def activate_request(arguments: Mapping[str, Any], *, recorder: Recorder) -> Mapping[str, Any]:
    """Begins another recording in this process, after an earlier one has ended.

    Args:
        arguments: `name` of the new run directory, which stands beside the recorder's own.
        recorder: Of the earlier recording.

    Returns:
        The reply: `done`, or `refused` with the reason.
    """
    name = arguments.get("name")
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
        return {"state": "refused", "reason": "the request names no run directory"}
    return activate_into(RunPaths(recorder.run.root.parent / name))


def activate_into(run: RunPaths) -> dict[str, Any]:
    """Begins a recording as a run directory's boot config says.

    Raises:
        Exception: Whatever goes wrong; the caller says so to whoever asked.
    """
    from haiprof.hook import activate_late

    config = json.loads(run.boot_config.read_text(encoding="utf-8"))
    with _lock:
        begun = activate_late(config)
    return {"state": "done"} if begun else {"state": "refused", "reason": BUSY}
