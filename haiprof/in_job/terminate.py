"""Has C++ exceptions that end this process written down, where the compiled helper is there."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

_LIBRARY = "_terminate*.so"


def watch_terminate(folder: Path) -> bool:
    """Puts a handler before the one of std::terminate, which is called after it.

    Called once torch is loaded: the helper then uses the same C++ runtime as torch does.

    Args:
        folder: Of the run, for such texts; made when there is one.

    Returns:
        Whether it is in place: not where it was not compiled.
    """
    found = sorted(Path(__file__).parent.glob(_LIBRARY))
    if not found:
        return False
    try:
        import ctypes

        library: Any = ctypes.CDLL(str(found[0]))
        watch = library.haiprof_watch_terminate
        watch.argtypes, watch.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_int
        return bool(watch(os.fsencode(folder), os.fsencode(socket.gethostname())))
    except (ImportError, OSError, AttributeError, ValueError):  # built for another machine
        return False
