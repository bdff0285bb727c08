"""Inside the job: times phases per step; needs nothing but the standard library and torch.

Nothing here may raise into the job, block it, print to its streams or change a result. A hook that
breaks switches itself off and says so once in the run directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_activated = False


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
    if "phases" not in config["recorder"]:
        return
    from haiprof.hook.patches import install
    from haiprof.hook.recorder import Recorder

    install(Recorder.from_config(config))
