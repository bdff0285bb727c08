"""A trace window that is asked for while the job runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from haiprof.in_job.patches import State
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.windows.driver import attach

_SWITCHES = ("stacks", "shapes", "memory", "flops", "modules", "sync", "lines", "execution_trace")
_MAX_STEPS = 10_000
_MAX_S = 86_400.0


def plan_request(
    request_id: str, arguments: Mapping[str, Any], *, recorder: Recorder, state: State
) -> Mapping[str, Any] | None:
    """Plans the window, and replies `accepted`; the final reply follows when it is over.

    All ranks take the same steps: those from `first` on, which lies so far ahead that every rank
    has heard of it; without it, the rank that first knows how far it is settles it for all.
    """
    if recorder.closed:
        return _refusal("its recording has ended, and with it haiprof's hooks (haiprof attach)")
    if state.watch is not None:
        return _refusal("another trace window is planned or runs")
    config = _config(request_id, arguments, recorder)
    if config is None:
        return _refusal("the request has options that do not fit")
    if recorder.commands is not None:  # first: the training thread may end it before we are back
        accepted = {"state": "accepted", "step": state.steps_of_job()}
        recorder.commands.reply(request_id, accepted)
    attach(config, recorder=recorder, state=state, late=True)
    return None


def _config(
    request_id: str, arguments: Mapping[str, Any], recorder: Recorder
) -> dict[str, Any] | None:
    """The plan's options from a message that may hold anything; None if they do not fit."""
    try:
        config: dict[str, Any] = {name: arguments.get(name) is True for name in _SWITCHES}
        count, window = int(arguments.get("count") or 1), int(arguments.get("window") or 0)
        first = int(arguments.get("first") or 0)
        seconds = {n: float(arguments.get(n) or 0) for n in ("time_s", "ahead_s", "valid_s")}
        limit_bytes = int(arguments.get("limit_bytes") or 0)
    except (TypeError, ValueError, OverflowError):
        return None
    inside = all(0 <= value <= _MAX_S for value in seconds.values())
    if not (0 < count <= _MAX_STEPS and min(window, first, limit_bytes) >= 0 and inside):
        return None
    return {
        **config,
        **seconds,
        "count": count,
        "steps": [first, first + count] if first else None,
        "window": window,
        "limit_bytes": limit_bytes,
        "repeat": 1,
        "request": request_id,
        "step_ns": recorder.step_ns,
        "valid_s": seconds["valid_s"] or None,
    }


def _refusal(reason: str) -> dict[str, Any]:
    return {"state": "refused", "reason": reason}
