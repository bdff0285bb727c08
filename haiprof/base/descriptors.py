"""Descriptors of haiprof's own inside the job's process: high numbers, checked before every use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path

_HIGHEST = 1024  # beyond it the kernel's table of descriptors would grow, which each fork copies
_PLACES = 64


class LostDescriptorError(OSError):
    """The job has closed a descriptor of ours; its number may belong to another file by now."""


class Descriptor:
    """A file or socket that haiprof opened inside the job.

    A job may close descriptors that it did not open: by os.closerange, by closing one twice, by
    becoming a daemon. The kernel then gives the number to the job's next file, and a write of ours
    would end up in it. So ours are moved to high numbers, which the kernel gives out last, and
    device and inode are compared before each use.
    """

    def __init__(self, number: int) -> None:
        self.identity = _identity(number)
        self.number = _move_up(number, self.identity)

    def is_ours(self) -> bool:
        """Whether the number still refers to what was opened."""
        return self.is_at(self.number)

    def is_at(self, number: int) -> bool:
        """Whether a number refers to what was opened."""
        try:
            return number >= 0 and _identity(number) == self.identity
        except OSError:
            return False

    def check(self) -> int:
        """Returns the number, for immediate use."""
        if not self.is_ours():
            raise LostDescriptorError(errno.EBADF, "the job has closed this descriptor of haiprof")
        return self.number

    def close(self) -> None:
        """Closes it, unless the number refers to something else by now."""
        if self.is_ours():
            os.close(self.number)
        self.number = -1


class OwnFile:
    """An append-only file that is opened again by its path if the job has closed it."""

    def __init__(self, path: Path, opened: Callable[[Path], int]) -> None:
        self.path = path
        self.lost_count = 0  # how often the job has closed it
        self._descriptor = Descriptor(opened(path))

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed by us."""
        return self._descriptor.number >= 0

    def write(self, data: bytes | memoryview) -> int:
        """Writes once; how many bytes went in."""
        return os.write(self._number(), data)

    def cut(self, size: int) -> None:
        """Shortens it."""
        os.ftruncate(self._number(), size)

    def close(self) -> None:
        """Closes it; later writes fail."""
        self._descriptor.close()

    def _number(self) -> int:
        descriptor = self._descriptor
        if descriptor.number < 0:
            raise OSError(errno.EBADF, "closed", str(self.path))
        if not descriptor.is_ours():
            self.lost_count += 1
            self._find_again(descriptor.identity)
        return self._descriptor.check()

    def _find_again(self, identity: tuple[int, int]) -> None:
        """Opens the same file again, and refuses another one at its path."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            again = Descriptor(os.open(self.path, flags))
        except OSError:
            self._descriptor.number = -1
            raise
        if again.identity != identity:
            again.close()
        self._descriptor = again


def _identity(number: int) -> tuple[int, int]:
    state = os.fstat(number)
    return state.st_dev, state.st_ino


def _move_up(number: int, identity: tuple[int, int]) -> int:
    """Duplicates a descriptor to a high number; returns it unchanged where there is no room."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _HIGHEST if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST)
    try:
        high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(limit - _PLACES, 3))
    except OSError:
        return number
    with contextlib.suppress(OSError):
        if _identity(number) == identity:
            os.close(number)
    return high
