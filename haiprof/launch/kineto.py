"""Stands in for dynolog beside the job: bound before the job starts, gone when it has ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from haiprof.config import ENV_KINETO_DAEMON, ENV_KINETO_FOLDER
from haiprof.kineto.agent import KinetoAgent
from haiprof.kineto.place import ABSTRACT, NAME, PrivateFolder, is_alive
from haiprof.launch.say import say
from haiprof.rundir.layout import RunPaths


@dataclass(slots=True)
class KinetoSide:
    """The agent of one launcher, and its folder."""

    agent: KinetoAgent
    folder: PrivateFolder

    @property
    def environment(self) -> dict[str, str]:
        """What the job needs in its environment."""
        return {ENV_KINETO_DAEMON: "1", ENV_KINETO_FOLDER: self.folder.as_seen}

    def stop(self) -> None:
        """Takes socket and folder away."""
        self.agent.stop()
        self.folder.remove()


def prepare_kineto(run: RunPaths, environ: Mapping[str, str], *, asked: bool) -> KinetoSide | None:
    """Binds the socket where the job is to speak Kineto's protocol; null where it is not ours.

    Args:
        run: The run directory.
        environ: As the launcher was given it.
        asked: `--kineto`: also where the user has not set KINETO_USE_DAEMON.

    Raises:
        OSError: No folder takes a socket.
    """
    if not asked and ENV_KINETO_DAEMON not in environ:
        return None
    if not asked and (environ.get(ENV_KINETO_FOLDER) or is_alive(ABSTRACT)):
        return None  # a daemon of the site's own: the job is left to it
    name = f"kineto-{socket.gethostname()[:60]}-{os.getpid()}"
    folder = PrivateFolder.create(run.control / name)
    agent = KinetoAgent(f"{folder.as_seen}/{NAME}", failed=_say_failed)
    try:
        agent.bind()
    except OSError:
        folder.remove()
        raise
    return KinetoSide(agent, folder)


def _say_failed(reason: str) -> None:
    say(f"the Kineto agent has ended ({reason}): the job goes on, and cannot be traced that way")
