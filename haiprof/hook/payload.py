"""Runs inside a process that was not started under haiprof: loads the hook, says what became of it.

A copy stands in the run directory's boot/ beside config.json. It is executed on the main thread,
between two bytecodes of whatever the job does there; nothing of it stays in the job's namespaces.
"""

import json
import os
import sys
from importlib import util
from pathlib import Path
from typing import Any


def attach(boot: Path) -> None:
    """Activates the hook and writes `injected-<pid>.json`; never raises.

    Args:
        boot: The run directory's boot folder.
    """
    before = set(sys.modules)
    try:
        reason = _why_not()
        answer = {"state": "refused", "reason": reason} if reason else _activate(boot)
    except Exception as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "haiprof":
                del sys.modules[name]
        answer = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    path = boot / f"injected-{os.getpid()}.json"
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(json.dumps(answer), encoding="utf-8")
        draft.rename(path)
    except OSError:
        return  # the run directory is gone or full: nobody is left to tell


def _why_not() -> str:
    """Why the hook cannot be put in now; empty where it can."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "it has not imported torch"
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return "it is importing torch just now: try again"
    return ""


def _activate(boot: Path) -> dict[str, Any]:
    """Loads haiprof by its location: the job's interpreter need not have it installed."""
    config = json.loads((boot / "config.json").read_text(encoding="utf-8"))
    if "haiprof" not in sys.modules:
        folder = config["package"]
        spec = util.spec_from_file_location(
            "haiprof", folder + "/__init__.py", submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"no haiprof package at {folder}")
        sys.modules["haiprof"] = package = util.module_from_spec(spec)
        spec.loader.exec_module(package)
    from haiprof.hook.again import activate_into
    from haiprof.rundir.layout import RunPaths

    return activate_into(RunPaths(boot.parent))


if __name__ == "haiprof_attach":
    attach(Path(__file__).parent)
