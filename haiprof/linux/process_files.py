"""Parses /proc/PID/stat and status; it imports next to nothing, as launchers start with it."""

from __future__ import annotations

import os

_STAT_BYTES = 4096


def read_small(path: str) -> bytes:
    """A file of /proc that one read of a page holds."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _STAT_BYTES)
    finally:
        os.close(fd)


def stat_fields(folder: str) -> list[bytes]:
    """The fields of a process's or thread's stat from the third (state) on."""
    content = read_small(f"{folder}/stat")
    return content[content.rindex(b")") + 2 :].split()  # a name may hold blanks and `)`


def status_fields(folder: str) -> dict[str, str]:
    """The values of a process's or thread's status by name; empty where it cannot be read."""
    try:
        with open(f"{folder}/status", encoding="utf-8", errors="replace") as file:
            pairs = [line.partition(":") for line in file]
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in pairs}
