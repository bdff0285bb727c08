"""The user's own cache folder: entries that only this user can write, up to a total size.

No cache beside a trace is read or written: whoever packed the trace could have put it there. An
entry is one file, which appears complete; the least recently used ones are evicted first. Where
there is no such folder, or it is not the user's alone, every function raises OSError, and the
caller works without a cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from haiprof.base.options import cache_limit_bytes
from haiprof.base.safe_files import (
    PRIVATE,
    is_unfinished,
    make_folder,
    make_named_folder,
    open_folder,
    open_to_read,
    remove_file,
    whole_file,
)

_ENTRY = re.compile(r"[0-9a-z-]{8,80}\.(columns|answers|findings)")
_UNFINISHED_S = 24 * 3600.0
"""After this time an unfinished file is taken for abandoned."""


def user_folder() -> Path:
    """The folder for caches that the user has: $XDG_CACHE_HOME, else ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None


def trace_folder() -> Path:
    """Where entries about traces are."""
    return user_folder() / "haiprof" / "traces"


@contextlib.contextmanager
def read_entry(name: str) -> Iterator[BinaryIO]:
    """Opens an entry to read, and marks it as used now."""
    with open(open_to_read(trace_folder() / name, below=user_folder(), own=True), "rb") as file:
        with contextlib.suppress(OSError):
            os.utime(file.fileno())
        yield file


@contextlib.contextmanager
def new_entry(name: str) -> Iterator[BinaryIO]:
    """An entry to write; the folder is made where it is missing."""
    limit = cache_limit_bytes(os.environ)
    if not limit:
        raise OSError(errno.EDQUOT, "the user wants no cache", name)
    folder, home = trace_folder(), user_folder()
    make_named_folder(home, mode=PRIVATE)
    make_folder(folder, below=home, mode=PRIVATE, own=True)
    with whole_file(folder / name, below=home, mode=0o600, own=True) as file:
        yield file
        _make_room(folder, limit - file.tell(), home=home, but=name)


def _make_room(folder: Path, size: int, *, home: Path, but: str) -> None:
    """Removes entries beyond `size` bytes, and unfinished files of processes that have ended."""
    entries, now_s = [], time.time()
    with open_folder(folder, below=home, own=True) as fd, os.scandir(fd) as found:
        for entry in found:
            with contextlib.suppress(OSError):  # somebody else was faster
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if is_unfinished(entry.name) and now_s - status.st_mtime > _UNFINISHED_S:
                    remove_file(folder / entry.name, below=home)
                elif _ENTRY.fullmatch(entry.name) and entry.name != but:
                    entries.append((status.st_mtime_ns, status.st_size, entry.name))
    total = sum(size for _, size, _ in entries)
    for _, freed, name in sorted(entries):
        if total <= size:
            return
        with contextlib.suppress(OSError):
            remove_file(folder / name, below=home)
            total -= freed
