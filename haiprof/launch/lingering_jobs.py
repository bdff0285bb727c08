"""Recognizes a process that is over but cannot exit: the kernel waits for a disk on its behalf."""

from __future__ import annotations

import os

from haiprof.linux.process_files import stat_fields, status_fields

_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49  # fields of /proc/PID/stat from the third on: proc(5)
_PF_EXITING = 0x4  # linux/sched.h
_KILLED = 1 << 8  # SIGKILL in a mask of signals


def status_of_ended(pid: int) -> int | None:
    """The wait status of a process of which no thread will run a line of its own any more.

    None while it runs, dumps its core, or is gone, and where it is another user's, whose status the
    kernel shows as 0.
    """
    folder = f"/proc/{pid}"
    try:
        if os.geteuid() not in (0, os.stat(folder).st_uid):
            return None
        threads = os.listdir(f"{folder}/task")
        if all(_leaves(f"{folder}/task/{thread}") for thread in threads):
            return int(stat_fields(folder)[_EXIT_CODE])
    except (OSError, ValueError, IndexError):
        return None
    return None


def _leaves(folder: str) -> bool:
    """Whether a thread has begun to exit, or will as soon as it comes out of the kernel."""
    if int(stat_fields(folder)[_FLAGS]) & _PF_EXITING:
        return True
    return bool(int(status_fields(folder).get("SigPnd", "0"), 16) & _KILLED)
