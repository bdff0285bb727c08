"""Inside the job: times phases per step; needs nothing but the standard library and torch.

Nothing here may raise into the job, block it, print to its streams or change a result. A hook that
breaks switches itself off and says so once in the run directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haiprof.hook.recorder import Recorder

_NEXT_STEP_S = 1e-9
_activated = False
_recorder: Recorder | None = None


def activate(config: Mapping[str, Any]) -> None:
    """Installs the hook in this process; a second call does nothing.

    Args:
        config: What the launcher wrote beside sitecustomize: `run_dir`, `time`, `warmup`, ...

    Raises:
        Exception: Whatever goes wrong; the caller (boot/sitecustomize) notes it, the job goes on.
    """
    global _activated
    if _activated:
        return
    _activated = True
    if "phases" in config["recorder"]:
        _record(config, late=False)


def activate_late(config: Mapping[str, Any]) -> bool:
    """Installs the hook in a process that trains already, for the first time or again.

    Nothing is taken before a place between two steps. It may be called on any thread: attributes
    are replaced one by one, each at once, and a call under way goes on in what it began in.

    Args:
        config: As for `activate`.

    Returns:
        False where a recording goes on in this process: that one is left alone.
    """
    global _activated
    if _recorder is not None and not _recorder.closed:
        return False
    _activated = True
    _record(config, late=True)
    return True


def _record(config: Mapping[str, Any], *, late: bool) -> None:
    global _recorder
    from haiprof.hook.patches import install
    from haiprof.hook.recorder import Recorder

    if late:  # the recording opens with the end of a whole step
        config = {**config, "warmup": config["warmup"] or _NEXT_STEP_S}
    recorder = _recorder = Recorder.from_config(config)
    state = recorder.state = install(recorder, late=late)
    if config.get("trace"):
        from haiprof.hook.trace import attach

        try:
            attach(config["trace"], recorder=recorder, state=state)
        except Exception as error:  # no windows, and the rest of the hook goes on
            reason = f"{type(error).__name__}: {error}"
            recorder.lines.append(
                {"type": "trace_window", "window": 0, "state": "failed", "reason": reason}
            )
