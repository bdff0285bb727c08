"""Trace windows: torch.profiler around chosen steps of the job, and never in a user's own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haiprof.hook.patches import State
    from haiprof.hook.recorder import Recorder
    from haiprof.hook.trace.driver import Tracer


def attach(
    config: Mapping[str, Any], *, recorder: Recorder, state: State, late: bool = False
) -> Tracer:
    """Plans the windows that the launcher asked for; torch is loaded by now.

    Args:
        config: `trace` of the boot config: the options of the windows.
        recorder: Takes the events lines; stays until the windows are over.
        state: The wrappers' state, which tells of spans.
        late: The job trains already: a request while it runs.
    """
    from haiprof.hook.trace.driver import Tracer

    tracer = Tracer(config, recorder=recorder, state=state)
    tracer.attach(late=late)
    return tracer
