"""Decides which end of the star a launcher is: the controller at its own address, or an agent."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from haiprof.agent.reach.controller import Controller, raise_descriptor_limit
from haiprof.agent.reach.messages import parse_address
from haiprof.agent.reach.token_file import make_token, read_token
from haiprof.agent.reach.uplink import Uplink

_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def join(address: str, token_file: Path) -> Controller | Uplink:
    """Listens at the address, or connects to the launcher that does.

    The command line is the same on every node: the one with that address listens.
    """
    where = parse_address(address)
    if _is_ours(*where):
        controller = Controller(*where, make_token(token_file))
        controller.start()
        raise_descriptor_limit()
        return controller
    uplink = Uplink(where, read_token(token_file))
    uplink.start()
    return uplink


def _is_ours(host: str, port: int) -> bool:
    """Whether this launcher can listen there: another node's address, or one in use, it cannot."""
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
