"""How a process ended, seen from outside: its exit status or signal, also of no child of ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
from dataclasses import dataclass
from pathlib import Path

from haiprof.linux.process_files import stat_fields
from haiprof.linux.procfs import read_parent, read_start_ticks, user_id

# linux/pidfd.h: PIDFD_GET_INFO, and its struct of version 0 with the exit code at its end.
_INFO_BYTES = 64
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
_ASK_EXIT = 1 << 3  # PIDFD_INFO_EXIT, from Linux 6.15 on: after the parent has taken the status
_EXIT_CODE = struct.Struct("<60xi")
_STATE, _ZOMBIE_CODE = 0, 49  # fields of /proc/PID/stat from the third on


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a process ended."""

    status: int | None
    """Exit status; None where a signal ended it, or nobody saw it."""
    signal: int | None
    core: bool
    """Whether the kernel wrote a core file, or handed it on."""
    source: str
    """`kernel`, `zombie`, or `gone` where its parent had taken the status before it was read."""


class WatchedProcess:
    """One process, told from others that get its number later."""

    def __init__(self, pid: int, *, root: Path = Path("/")) -> None:
        self.pid = pid
        self._root = root
        self.fd = os.pidfd_open(pid)
        self.start_ticks = read_start_ticks(root, pid)
        self.parent = read_parent(root, pid)

    def is_over(self) -> bool:
        """Whether it has ended."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def read_exit(self) -> ProcessExit:
        """How it ended, once its descriptor is readable.

        The kernel tells it by the descriptor once the parent has asked, and by /proc until then.
        """
        asked = (("kernel", self._from_kernel), ("zombie", self._from_zombie),
                 ("kernel", self._from_kernel))  # fmt: skip
        for source, ask in asked:
            code = ask()
            if code is not None:
                return _exit_of(code, source)
        return ProcessExit(status=None, signal=None, core=False, source="gone")

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self.fd)

    def _from_kernel(self) -> int | None:
        """The wait status; None before Linux 6.15."""
        buffer = bytearray(_INFO_BYTES)
        struct.pack_into("<Q", buffer, 0, _ASK_EXIT)
        try:
            fcntl.ioctl(self.fd, _GET_INFO, buffer)
        except OSError:
            return None
        if not struct.unpack_from("<Q", buffer)[0] & _ASK_EXIT:
            return None
        return int(_EXIT_CODE.unpack(buffer)[0])

    def _from_zombie(self) -> int | None:
        """The wait status, as long as its parent has not asked for it."""
        if os.geteuid() not in (0, user_id(self.pid, proc=self._root / "proc")):
            return None  # the kernel shows that of others as 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = stat_fields(f"{self._root}/proc/{self.pid}")
            if fields[_STATE] in b"ZX" and int(fields[19]) == self.start_ticks:
                return int(fields[_ZOMBIE_CODE])
        return None


def _exit_of(code: int, source: str) -> ProcessExit:
    """From a wait status, as waitpid(2) has it."""
    number = code & 0x7F
    return ProcessExit(
        status=None if number else code >> 8 & 0xFF,
        signal=number or None,
        core=bool(number and code & 0x80),
        source=source,
    )
