"""The Kineto agent of one job: bound before the job starts, removed when it has ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from haiprof.agent.kineto.daemon import KinetoAgent
from haiprof.agent.kineto.socket_address import ABSTRACT, NAME, PrivateFolder, is_alive
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_KINETO_DAEMON, ENV_KINETO_FOLDER
from haiprof.run_format.layout import RunPaths


@dataclass(slots=True)
class JobKinetoAgent:
    """The agent of one launcher, and its folder."""

    agent: KinetoAgent
    folder: PrivateFolder

    @property
    def environment(self) -> dict[str, str]:
        """What the job needs in its environment."""
        return {ENV_KINETO_DAEMON: "1", ENV_KINETO_FOLDER: self.folder.as_seen}

    def stop(self) -> None:
        """Removes socket and folder."""
        self.agent.stop()
        self.folder.remove()


def prepare_kineto(
    run: RunPaths, environ: Mapping[str, str], *, asked: bool
) -> JobKinetoAgent | None:
    """Binds the socket if the job is to use Kineto's protocol; None if it uses another daemon."""
    if not asked and ENV_KINETO_DAEMON not in environ:
        return None
    if not asked and (environ.get(ENV_KINETO_FOLDER) or is_alive(ABSTRACT)):
        return None  # a daemon of the site's own: the job is left to it
    name = f"kineto-{socket.gethostname()[:60]}-{os.getpid()}"
    folder = PrivateFolder.create(run.control / name)
    agent = KinetoAgent(f"{folder.as_seen}/{NAME}", failed=_report_failure)
    try:
        agent.bind()
    except OSError:
        folder.remove()
        raise
    return JobKinetoAgent(agent, folder)


def _report_failure(reason: str) -> None:
    print_message(
        f"the Kineto agent has ended ({reason}): the job goes on, and cannot be traced that way"
    )
