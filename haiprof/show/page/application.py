"""The web application of one run: a fixed set of addresses, a token, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from werkzeug.exceptions import Forbidden, HTTPException, MethodNotAllowed, NotFound
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

from haiprof.base.errors import HaiprofError
from haiprof.base.local_http import is_allowed
from haiprof.diagnosis.document import as_document
from haiprof.show.page.content import time_start_ns
from haiprof.show.page.page_state import CachedPage
from haiprof.show.page.render import data_json, page_js, plotly_js, served_html, static_text
from haiprof.show.page.step_data import step_data
from haiprof.show.servers.local_server import FIRST_PAGE, Access
from haiprof.show.text import printable

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

# Scripts are files of this server; plotly sets styles on its elements.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_SCRIPT, _JSON = "text/javascript", "application/json"


class PageApp:
    """A WSGI application."""

    def __init__(
        self, page: CachedPage, access: Access, open_trace: Callable[[Path], str] | None = None
    ) -> None:
        self._page, self._access, self._open_trace = page, access, open_trace
        self._routes: dict[str, Callable[[Request], Response]] = {
            "/": self._html,
            "/page.css": lambda _: Response(static_text("page.css"), mimetype="text/css"),
            "/page.js": lambda _: Response(page_js(), mimetype=_SCRIPT),
            "/plotly.js": lambda _: Response(plotly_js(), mimetype=_SCRIPT),
            "/data.json": lambda _: Response(data_json(self._page.current()), mimetype=_JSON),
            "/summary.json": lambda _: _json(self._page.status()),
            "/verdict.json": lambda _: _json(as_document(self._page.current().verdict)),
            "/comparison.json": lambda _: _json(self._comparison()),
            "/overview.json": lambda _: _json(self._page.current().summary.as_json()),
            "/ranks.json": lambda _: _json(self._page.analyzer().ranks().to_dicts()),
            "/steps.json": lambda request: _json(self._steps(request).to_dicts()),
            "/rank.json": self._rank,
            "/perfetto": self._perfetto,
        }

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """One request."""
        response = self._answer(Request(environ))
        for name, value in _HEADERS.items():
            response.headers[name] = value
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        try:
            return self._check_access(request) or self._route(request)(request)
        except HTTPException as error:
            return _text_response(str(error.description), error.code or 500)
        except HaiprofError as error:
            return _text_response(printable(str(error)), 503)

    def _check_access(self, request: Request) -> Response | None:
        """None if the request is allowed; the first visit is redirected without its token."""
        if not is_allowed(request.headers.get("Host", ""), self._access.hosts):
            raise Forbidden("unknown host")
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(["GET", "HEAD"], "only GET and HEAD")
        if self._access.is_token(request.args.get("token", "")):
            return Response(FIRST_PAGE, headers=self._access.first_headers)
        if not self._access.is_token(request.cookies.get(self._access.cookie, "")):
            raise Forbidden("open the address that haiprof printed")
        return None

    def _route(self, request: Request) -> Callable[[Request], Response]:
        """Dispatches by the whole address: none of them is a path of a file."""
        found = self._routes.get(request.path)
        if found is None:
            raise NotFound("no such page")
        return found

    def _html(self, _: Request) -> Response:
        content = self._page.newest()
        places = {
            path: f"perfetto?window={window}&file={number}"
            for window, files in enumerate(content.windows)
            for number, path in enumerate(files)
        }
        can_open = self._open_trace is not None
        page = served_html(content, lambda path: places[path] if can_open else "")
        return Response(page, mimetype="text/html")

    def _comparison(self) -> Mapping[str, Any]:
        """As `haiprof compare --json`."""
        compared = self._page.current().comparison
        if compared is None or compared.data is None:
            raise NotFound("not compared with another run: haiprof view RUN --baseline OTHER")
        return compared.data

    def _steps(self, request: Request) -> pl.DataFrame:
        """`/steps.json?rank=3`: every step of a rank."""
        rank = request.args.get("rank", type=int)
        if rank is None:
            raise NotFound("which rank? steps.json?rank=0")
        found = self._page.analyzer().steps().filter(pl.col("rank") == rank)
        if found.is_empty():
            raise NotFound(f"no step of rank {rank}")
        return found

    def _rank(self, request: Request) -> Response:
        """`/rank.json?rank=3`: more of its steps than a page of many ranks has."""
        return _json(step_data(self._steps(request), time_start_ns(self._page.current().summary)))

    def _perfetto(self, request: Request) -> Response:
        """`/perfetto?window=0&file=3`: a trace of the page's list, in Perfetto."""
        window, number = (request.args.get(name, -1, type=int) for name in ("window", "file"))
        windows = self._page.current().windows
        known = 0 <= window < len(windows) and 0 <= number < len(windows[window])
        if self._open_trace is None or not known:
            raise NotFound("no such trace")
        return redirect(self._open_trace(windows[window][number]))


def _json(content: Any) -> Response:  # noqa: ANN401 - any JSON value
    text = json.dumps(content, ensure_ascii=False, default=str)
    return Response(text, mimetype=_JSON)


def _text_response(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, mimetype="text/plain")
