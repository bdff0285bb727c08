"""A WSGI layer before TensorBoard: access control, and plugin pages without network."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from haiprof.base.local_http import allowed_hosts, is_allowed
from haiprof.show.servers import FIRST_PAGE, Access

Environ = dict[str, Any]
App = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

_PLUGIN = "/data/plugin/pytorch_profiler/"
_CHARTS_URL = "https://www.gstatic.com/charts/loader.js"
_COMPONENTS_URL = (
    "https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js"
)
_OWN = ("charts.js", "webcomponents.min.js")
_SELF = "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
# The trace viewer's page builds its scripts from HTML imports.
_VIEWER_POLICY = (
    _SELF + "script-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' data:"
)


class Pages:
    """TensorBoard as the browser sees it."""

    def __init__(
        self, app: App, *, host: str, static: Path | None, access: Access | None = None
    ) -> None:
        self._app = app
        self._access = access
        self._hosts = allowed_hosts(host)
        self._static = static

    def __call__(self, environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        """Answers one request."""
        if not is_allowed(str(environ.get("HTTP_HOST", "")), self._hosts):
            return _answer(start, "403 Forbidden", b"unknown host", "text/plain")
        if self._access is not None and not _has_cookie(environ, self._access):
            return _let_in(environ, start, self._access)
        path = str(environ.get("PATH_INFO", ""))
        name = path.removeprefix(_PLUGIN)
        if self._static is None or name == path:
            return self._app(environ, start)
        if name in _OWN:
            return _answer(start, "200 OK", _own(name), "application/javascript")
        if name == "index.html":
            return self._index(start)
        if name == "trace_embedding.html":
            text = (self._static / name).read_text(encoding="utf-8")
            page = text.replace(_COMPONENTS_URL, "webcomponents.min.js").encode()
            return _answer(start, "200 OK", page, "text/html", _VIEWER_POLICY)
        return self._app(environ, start)

    def _index(self, start: Callable[..., Any]) -> Iterable[bytes]:
        """The plugin's page: no script runs in it but its own two."""
        assert self._static is not None
        nonce = secrets.token_urlsafe(16)
        text = (self._static / "index.html").read_text(encoding="utf-8")
        mark = f'<script nonce="{nonce}"'
        head = f'<script src="{_CHARTS_URL}">'
        page = text.replace(head, f'{mark} src="charts.js">', 1)
        page = page.replace('<div id="app"></div><script>', f'<div id="app"></div>{mark}>', 1)
        policy = _SELF + f"script-src 'nonce-{nonce}'; connect-src 'self'"
        return _answer(start, "200 OK", page.encode(), "text/html", policy)


def _has_cookie(environ: Environ, access: Access) -> bool:
    try:
        cookies = SimpleCookie(str(environ.get("HTTP_COOKIE", "")))
    except CookieError:
        return False
    return access.cookie in cookies and access.is_token(cookies[access.cookie].value)


def _let_in(environ: Environ, start: Callable[..., Any], access: Access) -> list[bytes]:
    """Answers a request without a cookie: sets one, if it has the printed address's token."""
    if access.is_token(parse_qs(str(environ.get("QUERY_STRING", ""))).get("token", [""])[0]):
        start("200 OK", [*access.first_headers.items(), ("Cache-Control", "no-store")])
        return [FIRST_PAGE]
    text = b"open the address that haiprof printed"
    return _answer(start, "403 Forbidden", text, "text/plain")


def _own(name: str) -> bytes:
    return (resources.files("haiprof.compat.torch_profiler") / "static" / name).read_bytes()


def _answer(
    start: Callable[..., Any], status: str, body: bytes, kind: str, policy: str = ""
) -> list[bytes]:
    headers = {
        "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)),
        "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store",
        **({"Content-Security-Policy": policy} if policy else {}),
    }  # fmt: skip
    start(status, list(headers.items()))
    return [body]
