"""What an attached recording is put at an address with: `put`, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache

from haiprof.base.options import ENV_LOG_DIR
from haiprof.cli.own_command import own_command
from haiprof.launch.run_directories import RunCopies
from haiprof.run_format.layout import RunPaths

_PAUSE_S = 0.1
_NICE = 10


def copies_at(address: str) -> Callable[[RunPaths], RunCopies]:
    """Of a run, its copies at an address: the same ones whenever they are asked for.

    Args:
        address: Of a log directory. It may hold a password: no command line has it.
    """

    @cache
    def copies(run: RunPaths) -> RunCopies:
        def start(words: Sequence[str], background: bool) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                own_command("put", str(run.root), *words),
                env={**os.environ, ENV_LOG_DIR: address},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what it says goes to stderr
            )
            if background:
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            return process

        return RunCopies(run, address, start)

    return copies


def pause() -> bool:
    """Waits a moment; whether the user ended the waiting with Ctrl-C meanwhile."""
    try:
        time.sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return True
    return False
