"""Runs inside a process that was not started under haiprof: loads the hook, says what became of it.

It is executed from its place in the package, on the main thread, between two bytecodes of whatever
the job does there; it is given the run directory as `run_dir`, and its owner's uid as `owner`.
Nothing of it stays in the job's namespaces.
"""

import json
import os
import sys
from importlib import util
from pathlib import Path
from typing import Any


def attach(run_dir: Path, owner: int) -> None:
    """Activates the hook and writes `boot/injected-<pid>.json`; never raises."""
    before = set(sys.modules)
    try:
        reason = _why_not()
        answer = {"state": "refused", "reason": reason} if reason else _activate(run_dir, owner)
    except Exception as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "haiprof":
                del sys.modules[name]
        answer = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:  # without safe_files: where the hook is not put in, nothing of haiprof is loaded
        fd = os.open(run_dir / "boot" / f"injected-{os.getpid()}.json", flags, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(answer).encode())
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


def _activate(run_dir: Path, owner: int) -> dict[str, Any]:
    """Loads haiprof by its location: the job's interpreter need not have it installed."""
    if "haiprof" not in sys.modules:
        folder = str(Path(__file__).parents[1])
        spec = util.spec_from_file_location(
            "haiprof", folder + "/__init__.py", submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"no haiprof package at {folder}")
        sys.modules["haiprof"] = package = util.module_from_spec(spec)
        spec.loader.exec_module(package)
    from haiprof.in_job.activation import activate_into
    from haiprof.run_format.layout import RunPaths

    return activate_into(RunPaths(run_dir), owner=owner)


if __name__ == "haiprof_attach":
    attach(Path(globals()["run_dir"]), globals()["owner"])
