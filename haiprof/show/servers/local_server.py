"""Serving pages to a browser: the token that opens them, a free port, and the end by a signal."""

from __future__ import annotations

import errno
import secrets
import socket
from dataclasses import dataclass, field

from haiprof.base.errors import UsageError
from haiprof.base.local_http import allowed_hosts

_TRIES = 100
_BUSY = (errno.EADDRINUSE, errno.EACCES)


# A redirect would belong to the page that linked here, perhaps a file on the disk, and Chromium
# then sends no cookie that is strictly this site's. It would also ask for a missing icon.
FIRST_PAGE = (
    b'<!doctype html><link rel="icon" href="data:,">'
    b'<meta http-equiv="refresh" content="0; url=/">\n'
)
"""A page that redirects itself to the address without the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access control of a server: its own names, and a token."""

    hosts: frozenset[str] | None
    """Names that the Host header may carry (another name would be DNS rebinding); None: any."""
    cookie: str
    """The cookie's name; browsers send cookies to all ports of an address, so it names the port."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Sent once in the address and then as a cookie."""

    def is_token(self, text: str) -> bool:
        """Checks the token in constant time."""
        return secrets.compare_digest(text.encode(), self.token.encode())

    @property
    def first_headers(self) -> dict[str, str]:
        """Of the answer to an address with the token, whose text is FIRST_PAGE."""
        return {
            "Set-Cookie": f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict",
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(FIRST_PAGE)),
        }


def new_access(host: str, port: int) -> Access:
    """A new token for a server at that address."""
    return Access(hosts=allowed_hosts(host), cookie=f"haiprof-{port}")


def url_of(host: str, port: int, access: Access | None = None) -> str:
    """The address of a server's first page, with the token that opens it."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={access.token}" if access else "")


def free_port(host: str, wanted: int) -> int:
    """The requested port, or the next free one."""
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
