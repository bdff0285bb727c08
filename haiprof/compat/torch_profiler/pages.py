"""A WSGI layer before TensorBoard: access control, and plugin pages without network."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from haiprof.show.servers import Access

Environ = dict[str, Any]
App = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

_PLUGIN = "/data/plugin/pytorch_profiler/"
_CHARTS_URL = "https://www.gstatic.com/charts/loader.js"
_COMPONENTS_URL = (
    "https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js"
)
_OWN = ("charts.js", "webcomponents.min.js")
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
_SELF = "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
# The trace viewer's page builds its scripts from HTML imports.
_VIEWER_POLICY = (
    _SELF + "script-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' data:"
)


class Pages:
    """TensorBoard as the browser sees it."""

    def __init__(self, app: App, *, static: Path | None, access: Access) -> None:
        self._app, self._static, self._access = app, static, access

    def __call__(self, environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        """Answers one request."""
        asked = ("HTTP_HOST", "QUERY_STRING", "HTTP_COOKIE")
        other = self._access.answer(*(str(environ.get(name, "")) for name in asked))
        if other is not None:
            status, headers, said = other
            own = {"Content-Length": str(len(said)), **_HEADERS}
            start(f"{status.value} {status.phrase}", [*(headers | own).items()])
            return [said]
        path = str(environ.get("PATH_INFO", ""))
        name = path.removeprefix(_PLUGIN)
        if self._static is None or name == path:
            return self._app(environ, start)
        if name in _OWN:
            return _answer(start, _own(name), "application/javascript")
        if name == "index.html":
            return self._index(start)
        if name == "trace_embedding.html":
            text = (self._static / name).read_text(encoding="utf-8")
            page = text.replace(_COMPONENTS_URL, "webcomponents.min.js").encode()
            return _answer(start, page, "text/html", _VIEWER_POLICY)
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
        return _answer(start, page.encode(), "text/html", policy)


def _own(name: str) -> bytes:
    return (resources.files("haiprof.compat.torch_profiler") / "static" / name).read_bytes()


def _answer(start: Callable[..., Any], body: bytes, kind: str, policy: str = "") -> list[bytes]:
    headers = {
        "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **_HEADERS,
        **({"Content-Security-Policy": policy} if policy else {}),
    }  # fmt: skip
    start("200 OK", list(headers.items()))
    return [body]
