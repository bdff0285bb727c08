"""Other haiprof commands: how lower parts start one, and end its process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Subcommand = Callable[..., list[str]]
"""Maps a command and its words (`"verdict", RUN, "--json"`) to the words that are executed."""

_TERMINATE_S = 2.0


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Ends a child process: asks it, and after a moment kills it."""
    child.terminate()
    try:
        child.wait(_TERMINATE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
