"""Has C++ exceptions that end this process written down, where the compiled helper is there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from haiprof.in_job.own_library import load_own_library


def watch_terminate(folder: Path) -> bool:
    """Puts a handler before the one of std::terminate, which is called after it.

    Called once torch is loaded: the helper then uses the same C++ runtime as torch does.
    """
    library = load_own_library("_terminate")
    if library is None:
        return False
    try:
        return bool(
            library.haiprof_watch_terminate(os.fsencode(folder), os.fsencode(socket.gethostname()))
        )
    except (OSError, AttributeError, ValueError):  # built from another source; a name that is none
        return False
