"""The standalone Kineto agent, for jobs with KINETO_USE_DAEMON that do not run under haiprof."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from haiprof.agent.kineto.ask import shown_address
from haiprof.agent.kineto.daemon import KinetoAgent, remove_socket
from haiprof.agent.kineto.socket_address import ABSTRACT, address_for, is_alive
from haiprof.base.errors import UsageError
from haiprof.base.options import ENV_KINETO_DAEMON, ENV_KINETO_FOLDER

_PATH_LIMIT_BYTES = 107 - len("dynoconfigclient") - 36 + len("dynolog")
"""Of the daemon's socket: a Unix address has 108 bytes, and the processes' own names are longer."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def own_address(environ: Mapping[str, str], folder: Path | None) -> str:
    """Where to listen: the folder, else KINETO_IPC_SOCKET_DIR, else Kineto's abstract address."""
    own = {ENV_KINETO_FOLDER: str(folder.absolute())} if folder else {}
    address = address_for({**environ, **own, ENV_KINETO_DAEMON: "1"}) or ABSTRACT
    if address.startswith("\0"):
        return address
    place = Path(os.path.dirname(address))
    if not place.is_absolute() or not place.is_dir():
        raise UsageError(f"{place}: no such folder", hint=f"mkdir -m 700 {place}")
    if place.stat().st_uid != os.getuid() or place.stat().st_mode & 0o077:
        raise UsageError(
            f"{place}: other users may enter it: they could pose as the agent, or end your jobs",
            hint=f"chmod 700 {place}",
        )
    if len(os.fsencode(address)) > _PATH_LIMIT_BYTES:
        raise UsageError(f"{place}: too long for a socket's address", hint="a shorter path in /tmp")
    return address


def listen(address: str, ready: Callable[[str], None]) -> int:
    """Answers until it is asked to end."""
    if is_alive(address):
        raise UsageError(
            f"{shown_address(address)}: another process listens there already",
            hint="a dynolog daemon is driven with haiprof trace-now PID --backend dynolog",
        )
    remove_socket(address)  # of a killed agent: nobody listens
    agent = KinetoAgent(address, failed=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    ending = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        agent.bind()
    except OSError as error:
        raise UsageError(f"{shown_address(address)}: {error.strerror or error}") from None
    agent.start()
    ready(shown_address(address))
    try:
        signal.sigwait(ending)
    finally:
        agent.stop()
        _remove_dead(address)
    return agent.ignored_count


def _remove_dead(address: str) -> None:
    """Removes sockets that ended processes left in the folder."""
    if address.startswith("\0"):
        return
    for left in Path(address).parent.glob("dynoconfigclient*"):
        if not is_alive(str(left)):
            remove_socket(str(left))
