"""Serving pages to a browser on this machine: which hosts may be asked for, and a free port."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from haiprof.errors import UsageError

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_TRIES = 100
_BUSY = (errno.EADDRINUSE, errno.EACCES)


def allowed_hosts(host: str) -> frozenset[str] | None:
    """Names that a request's Host header may carry; None where any may.

    Args:
        host: The address that is listened on. On a wildcard address nobody can tell the names by
            which this machine is known.
    """
    if is_loopback(host):
        return _LOOPBACK | {host}
    return None if host in ("0.0.0.0", "::", "") else frozenset({host})


def is_allowed(header: str, hosts: frozenset[str] | None) -> bool:
    """Whether a Host header names one of the hosts, with or without a port."""
    if hosts is None:
        return True
    name = header[1:].split("]")[0] if header.startswith("[") else header.split(":")[0]
    return name.lower() in hosts


def free_port(host: str, wanted: int) -> int:
    """The wanted port, or the next one that nobody listens on.

    Args:
        host: The address to listen on.
        wanted: 0 takes any.

    Raises:
        UsageError: The address is not of this machine, or the ports around are all taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = "all ports around it are taken"
    for port in range(wanted, min(wanted + _TRIES, 1 << 16)):
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno in _BUSY:
                    continue
                reason = error.strerror or str(error)
                break
            found: int = listener.getsockname()[1]
            return found
    raise UsageError(f"--host {host} --port {wanted}: cannot listen there: {reason}")


@contextmanager
def stop_event(signals: tuple[int, ...]) -> Iterator[threading.Event]:
    """An event that these signals set; their handlers are as before afterwards."""
    stop = threading.Event()

    def set_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, set_stop) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
