"""Where the agent's socket is: private for one job, or where Kineto looks by default."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.config import ENV_KINETO_DAEMON, ENV_KINETO_FOLDER
from haiprof.rundir.control import make_private

NAME = "dynolog"
"""What Kineto calls the daemon."""
ABSTRACT = f"\0{NAME}\0"
"""Its address where no folder is named; Kineto counts the null byte behind a name as part of it."""


@dataclass(slots=True)
class PrivateFolder:
    """A folder for the sockets of one job, which its owner alone may enter.

    The job is told its path through the launcher's own open descriptor: that is short enough for
    any socket, and when the launcher is gone, however it ended, the path is gone with it. A socket
    that stands there while nobody listens would hold `import torch` up for ten seconds.

    Args:
        path: The folder; it goes at the end.
    """

    path: Path
    _fd: int = field(default=-1)

    @classmethod
    def create(cls, wanted: Path) -> PrivateFolder:
        """The folder that is wanted, or a temporary one where its file system takes no sockets.

        Raises:
            OSError: Neither can be made.
        """
        try:
            make_private(wanted.parent, wanted)
            made = cls(wanted)
            made._try()
        except OSError:
            with contextlib.suppress(OSError):
                wanted.rmdir()
            made = cls(Path(tempfile.mkdtemp(prefix="haiprof-kineto-")))
            made._try()
        return made

    def _try(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with probe:
                probe.bind(f"{self.as_seen}/probe")
            (self.path / "probe").unlink()
        except OSError:
            self.remove()
            raise

    @property
    def as_seen(self) -> str:
        """Its path for every process of the job."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def remove(self) -> None:
        """Takes it away, with what killed processes left in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        shutil.rmtree(self.path, ignore_errors=True)


def address_for(environ: Mapping[str, str]) -> str | None:
    """Where a process with this environment asks; null where it speaks no Kineto."""
    if ENV_KINETO_DAEMON not in environ:  # its being set counts, not its value
        return None
    folder = environ.get(ENV_KINETO_FOLDER)
    return f"{folder}/{NAME}" if folder else ABSTRACT


def is_alive(address: str) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
