"""Where the agent's socket is: private for one job, or where Kineto looks by default."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.base.options import ENV_KINETO_DAEMON, ENV_KINETO_FOLDER
from haiprof.base.safe_files import MadeFolder, make_private, remove_file

NAME = "dynolog"
"""What Kineto calls the daemon."""
ABSTRACT = f"\0{NAME}\0"
"""Its address where no folder is named; Kineto counts the null byte behind a name as part of it."""


@dataclass(slots=True)
class PrivateFolder:
    """A folder for the sockets of one job, which its owner alone may enter.

    The job gets a path through the launcher's open descriptor: that is short enough for any socket,
    and it vanishes with the launcher, however that ended. A socket without a listener would delay
    `import torch` by ten seconds.
    """

    made: MadeFolder
    _fd: int = field(default=-1)

    @classmethod
    def create(cls, wanted: Path) -> PrivateFolder:
        """Makes the wanted folder, or a temporary one where its file system supports no sockets."""
        try:
            make_private(wanted.parent, below=wanted.parent.parent)
            made = cls(MadeFolder.make(wanted, below=wanted.parent))
            made._try()
        except OSError:
            made = cls(MadeFolder.temporary("haiprof-kineto-"))
            made._try()
        return made

    @property
    def path(self) -> Path:
        """The folder."""
        return self.made.path

    def _try(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with probe:
                probe.bind(f"{self.as_seen}/probe")
            remove_file(self.path / "probe", below=self.path)
        except OSError:
            self.remove()
            raise

    @property
    def as_seen(self) -> str:
        """Its path for every process of the job."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def remove(self) -> None:
        """Removes it, with the sockets of killed processes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.made.remove()


def address_for(environ: Mapping[str, str]) -> str | None:
    """The address that a process with this environment asks; None without KINETO_USE_DAEMON."""
    if ENV_KINETO_DAEMON not in environ:  # its being set counts, not its value
        return None
    folder = environ.get(ENV_KINETO_FOLDER)
    return f"{folder}/{NAME}" if folder else ABSTRACT


def is_alive(address: str) -> bool:
    """Whether a process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
