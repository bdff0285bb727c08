"""What PYTHONPATH carries into a job: haiprof's own boot folder, and the name of its run."""

from __future__ import annotations

import os
import re

from haiprof.base.version import PACKAGE
from haiprof.run_format.layout import RunPaths

BOOT_FOLDER = PACKAGE / "in_job" / "boot"
"""Holds sitecustomize.py. No code is ever taken from a log directory, which others may share."""
_RUN_ENTRY = re.compile(r"(?P<folder>/.*)/@(?P<owner>\d+)(?P<root>/.*)\Z", re.DOTALL)


def boot_entries(run: RunPaths) -> list[str]:
    """The two entries in front of PYTHONPATH: the boot folder, and one that names the run.

    The second never exists: Python passes over it, and sitecustomize reads the run's owner (as the
    file system tells it) and its path from the name. So one variable carries everything, through
    launchers that drop all others.
    """
    root = os.path.realpath(run.root)
    return [str(BOOT_FOLDER), f"{BOOT_FOLDER}/@{os.stat(root).st_uid}{root}"]


def check_carried(run: RunPaths) -> None:
    """Checks that PYTHONPATH can name a run directory."""
    if os.pathsep in f"{BOOT_FOLDER}{os.path.realpath(run.root)}":
        raise OSError(f"PYTHONPATH cannot carry a path with {os.pathsep!r}")


def carries_run(pythonpath: str, root: str) -> bool:
    """Whether a PYTHONPATH has the entry of a run, by any installation of haiprof."""
    return any(_folder_of(entry, root) for entry in pythonpath.split(os.pathsep))


def remove_run(pythonpath: str, root: str) -> str:
    """A PYTHONPATH without the two entries of a run."""
    entries = pythonpath.split(os.pathsep)
    folders = [folder for folder in (_folder_of(entry, root) for entry in entries) if folder]
    kept = [entry for entry in entries if not _folder_of(entry, root) and entry not in folders]
    return os.pathsep.join(kept)


def _folder_of(entry: str, root: str) -> str:
    """The boot folder that an entry of this run belongs to; empty for any other entry."""
    found = _RUN_ENTRY.match(entry)
    if found is None or not root or found["root"] != os.path.realpath(root):
        return ""
    return found["folder"]
