"""HTTP servers of haiprof's own: which users may ask them, how many at once, and for how long.

An address of the loopback interface is open to every user of the machine. On Linux the kernel says
which user owns the socket at the other end of a local connection, so such a server answers its own
user and root, without a password, a proxy or a change on the client's side.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import socketserver
import time
from collections import deque
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

MAX_CONNECTIONS = 64  # connections at a time: each has a thread; a browser opens six
MAX_CONNECTIONS_PER_ADDRESS = 32
Address = tuple[Any, ...]  # as `accept` and `getsockname` give it: host, port, and more for IPv6
HEAD_S = 10.0  # a client that has not sent a whole request by then is disconnected, however slow
STALL_S = 60.0  # a client that reads nothing of an answer for so long is disconnected
_LEAVE_S = 1.0
_REST_S = 0.1
_PROC_NET = Path("/proc/net")
_TRIES = 3
_IPV4_BYTES = 4
_MAPPED = b"\0" * 10 + b"\xff\xff"
_UID, _INODE = 7, 9  # columns of /proc/net/tcp
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_REFUSAL = (
    "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n"
    "Connection: close\r\n\r\n{text}"
)


def allowed_hosts(host: str) -> frozenset[str] | None:
    """Names that are allowed in a request's Host header; None allows any."""
    if is_loopback(host):
        return _LOOPBACK | {host}
    return None if host in ("0.0.0.0", "::", "") else frozenset({host})


def is_allowed(header: str, hosts: frozenset[str] | None) -> bool:
    """Whether a Host header names one of the hosts, with or without a port."""
    if hosts is None:
        return True
    name = header[1:].split("]")[0] if header.startswith("[") else header.split(":")[0]
    return name.lower() in hosts


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_readers(host: str) -> frozenset[int] | None:
    """Users whose requests a server at that address answers: this one and root.

    None to answer every user: other machines can reach the address, or the kernel does not say to
    whom a connection belongs.
    """
    if not is_loopback(host) or not os.access(_PROC_NET / "tcp", os.R_OK):
        return None
    return frozenset({0, os.geteuid()})


def peer_uid(peer: Address, own: Address, *, folder: Path = _PROC_NET) -> int | None:
    """The user whose socket is at the other end of a connection within this machine.

    None if the other end is not there: of another machine, or closed by its owner, whom the kernel
    then gives as root.
    """
    for _ in range(_TRIES):  # a socket may be passed over while the kernel's table changes
        for name, needle in _entries(peer, own):
            try:
                table = (folder / name).read_bytes()
            except OSError:
                continue
            start = table.find(needle)
            while start >= 0:
                row = table[table.rfind(b"\n", 0, start) + 1 : table.find(b"\n", start)].split()
                if len(row) > _INODE and row[_INODE] != b"0":
                    return int(row[_UID])
                start = table.find(needle, start + 1)
    return None


def _entries(peer: Address, own: Address) -> list[tuple[str, bytes]]:
    """Tables of the kernel's, and how a connection from `peer` to `own` stands in each."""
    packed = [ipaddress.ip_address(host.partition("%")[0]).packed for host, *_ in (peer, own)]
    plain = [address.removeprefix(_MAPPED) for address in packed]  # IPv4 however it is written
    # A program may have opened an IPv6 socket for an IPv4 address.
    heads = {"tcp6": b""} if len(plain[0]) > _IPV4_BYTES else {"tcp": b"", "tcp6": _MAPPED}
    return [
        (name, b"".join(b"%s:%04X " % (_hex(head + address), end[1])
                        for address, end in zip(plain, (peer, own), strict=True)))
        for name, head in heads.items()
    ]  # fmt: skip


def _hex(address: bytes) -> bytes:
    """An address as the kernel prints it: words of 32 bits in the machine's own order."""
    return b"".join(b"%08X" % word for word in memoryview(address).cast("I"))


@dataclass(slots=True)
class _Visit:
    """A connection in service."""

    address: str
    head_until_s: float | None  # deadline for its whole request, monotonic; None: it is answered


class GuardedServer(socketserver.ThreadingMixIn):
    """Mix-in before an HTTP server class: limits connections and checks which user they belong to.

    Whoever holds a connection without sending a request, or sends it byte by byte, has a place for
    HEAD_S seconds; other users of the machine have none. No error of a connection is printed.
    """

    daemon_threads = True
    request_queue_size = 128  # of 5 or so, others' connections leave no place in the kernel's queue
    readers: frozenset[int] | None = None  # users who are answered; None answers all

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - the other base's own
        self._visits: dict[socket.socket, _Visit] = {}
        self._leaving: deque[tuple[float, socket.socket]] = deque()
        super().__init__(*args, **options)

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection."""
        try:
            return super().get_request()  # type: ignore[misc, no-any-return]  # the other base's
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_REST_S)  # or the loop would ask again at once, for as long as it lasts
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Serves a connection in a thread of its own, or refuses it."""
        if (refusal := self._refusal(request, client_address)) is not None:
            self._refuse(request, *refusal)
            return
        self._visits[request] = _Visit(str(client_address[0]), time.monotonic() + HEAD_S)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as in the base
        """Ends a connection."""
        self._visits.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]  # the other base's

    def service_actions(self) -> None:
        """Disconnects clients that are too slow; `serve_forever` calls it twice a second."""
        super().service_actions()  # type: ignore[misc]  # the other base's
        now_s = time.monotonic()
        for request, visit in list(self._visits.items()):
            if visit.head_until_s is not None and now_s > visit.head_until_s:
                with contextlib.suppress(OSError):  # its thread was quicker
                    request.shutdown(socket.SHUT_RDWR)
        while self._leaving and (
            now_s > self._leaving[0][0] or len(self._leaving) > MAX_CONNECTIONS
        ):
            self._leaving.popleft()[1].close()

    def server_close(self) -> None:
        """Stops listening."""
        super().server_close()
        while self._leaving:
            self._leaving.popleft()[1].close()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Does nothing: a client's broken connection is not reported on stderr."""

    def expect_head(self, request: socket.socket, *, is_whole: bool) -> None:
        """Notes that a request begins, or has been read."""
        if (visit := self._visits.get(request)) is not None:
            visit.head_until_s = None if is_whole else time.monotonic() + HEAD_S

    def _refusal(self, request: socket.socket, client: Any) -> tuple[str, str] | None:  # noqa: ANN401
        """Status and text of a refusal; None where the request is served."""
        visits = list(self._visits.values())
        of_address = sum(visit.address == client[0] for visit in visits)
        if len(visits) >= MAX_CONNECTIONS or of_address >= MAX_CONNECTIONS_PER_ADDRESS:
            return "503 Service Unavailable", "too many connections\n"
        if self.readers is None or peer_uid(client, request.getsockname()) in self.readers:
            return None
        return "403 Forbidden", "this is another user's: only that user and root may read it\n"

    def _refuse(self, request: socket.socket, status: str, text: str) -> None:
        """Answers a refusal without a thread; closes later, as closing at once could discard it."""
        answer = _REFUSAL.format(status=status, length=len(text), text=text)
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(answer.encode())
            request.shutdown(socket.SHUT_WR)
        self._leaving.append((time.monotonic() + _LEAVE_S, request))


class GuardedHandler(BaseHTTPRequestHandler):
    """Mix-in before the handler class of a `GuardedServer`."""

    timeout = STALL_S

    def handle_one_request(self) -> None:
        """Serves one request of a connection."""
        self._expect_head(is_whole=False)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Reads what stands before a request's body."""
        parsed = super().parse_request()
        self._expect_head(is_whole=True)
        return parsed

    def log_request(self, code: Any = "-", size: Any = "-") -> None:  # noqa: ANN401
        """Prints nothing: werkzeug's would print the page's token with each address."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - as in the base
        """Prints nothing."""

    def log_error(self, format: str, *args: Any) -> None:  # noqa: ANN401 - as in the base
        """Prints nothing."""

    def _expect_head(self, *, is_whole: bool) -> None:
        if isinstance(self.server, GuardedServer):
            self.server.expect_head(self.request, is_whole=is_whole)
