"""Which end of the star a launcher is: the controller where the address is its own, or an agent."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from haiprof.launch.reach.controller import Controller
from haiprof.launch.reach.uplink import Uplink
from haiprof.launch.reach.wire import make_token, parse_address, read_token

_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def join(address: str, token_file: Path, host: str) -> Controller | Uplink:
    """Listens at the address, or connects to the launcher that does.

    The same command line does on every node: the one whose address it is listens.

    Args:
        address: `HOST:PORT`.
        token_file: Holds the token; the controller writes it where there is none.
        host: This node.

    Raises:
        UsageError: The token cannot be had.
        OSError: The address cannot be listened at, for a reason other than being another's.
    """
    where = parse_address(address)
    if _is_ours(*where):
        controller = Controller(*where, make_token(token_file))
        controller.start()
        return controller
    uplink = Uplink(where, read_token(token_file), host)
    uplink.start()
    return uplink


def _is_ours(host: str, port: int) -> bool:
    """Whether this launcher can listen there: another node's address, or one in use, it cannot.

    Raises:
        OSError: For another reason.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in _NOT_OURS:
                return False
            raise
    return True
