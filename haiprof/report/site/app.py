"""The web application of one run: a fixed set of addresses, a token, and nothing else."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from werkzeug.exceptions import Forbidden, HTTPException, MethodNotAllowed, NotFound
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

from haiprof.errors import HaiprofError
from haiprof.report.local_server import is_allowed
from haiprof.report.site.content import time_start_ns
from haiprof.report.site.held import HeldPage
from haiprof.report.site.render import data_json, plotly_js, served_html, static_text
from haiprof.report.site.step_data import step_data
from haiprof.report.text import printable

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may ask."""

    token: str
    """Comes once in the address and then as a cookie."""
    cookie: str
    """Its name; browsers send cookies to all ports of an address, so it names the port."""
    hosts: frozenset[str] | None
    """Names that the Host header may carry (another name would be DNS rebinding); None: any."""


class PageApp:
    """A WSGI application.

    Args:
        page: The run.
        access: Who may ask.
        open_trace: Starts Perfetto on a trace and gives its address; None where that is not
            installed, or where the reader's browser is on another machine.
    """

    def __init__(
        self, page: HeldPage, access: Access, open_trace: Callable[[Path], str] | None = None
    ) -> None:
        self._page, self._access, self._open_trace = page, access, open_trace
        self._routes: dict[str, Callable[[Request], Response]] = {
            "/": self._html,
            "/page.css": lambda _: Response(static_text("page.css"), mimetype="text/css"),
            "/page.js": lambda _: Response(static_text("page.js"), mimetype=_SCRIPT),
            "/plotly.js": lambda _: Response(plotly_js(), mimetype=_SCRIPT),
            "/data.json": lambda _: Response(data_json(self._page.shown()), mimetype=_JSON),
            "/summary.json": lambda _: _json(self._page.status()),
            "/verdict.json": lambda _: _json(self._page.shown().verdict.as_json()),
            "/comparison.json": lambda _: _json(self._comparison()),
            "/overview.json": lambda _: _json(self._page.shown().summary.as_json()),
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
            return self._allowed(request) or self._route(request)(request)
        except HTTPException as error:
            return _said(str(error.description), error.code or 500)
        except HaiprofError as error:
            return _said(printable(str(error)), 503)

    def _allowed(self, request: Request) -> Response | None:
        """Nothing where the request may go on; the first visit is sent on without its token."""
        if not is_allowed(request.headers.get("Host", ""), self._access.hosts):
            raise Forbidden("unknown host")
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(["GET", "HEAD"], "only GET and HEAD")
        if self._is_token(request.args.get("token", "")):
            sent_on = redirect("/")
            sent_on.set_cookie(
                self._access.cookie, self._access.token, httponly=True, samesite="Strict"
            )
            return sent_on
        if not self._is_token(request.cookies.get(self._access.cookie, "")):
            raise Forbidden("open the address that haiprof printed")
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._access.token.encode())

    def _route(self, request: Request) -> Callable[[Request], Response]:
        """Addresses are compared whole: none of them is a path of a file."""
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
        compared = self._page.shown().comparison
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
        return _json(step_data(self._steps(request), time_start_ns(self._page.shown().summary)))

    def _perfetto(self, request: Request) -> Response:
        """`/perfetto?window=0&file=3`: a trace of the page's list, in Perfetto."""
        window, number = (request.args.get(name, -1, type=int) for name in ("window", "file"))
        windows = self._page.shown().windows
        known = 0 <= window < len(windows) and 0 <= number < len(windows[window])
        if self._open_trace is None or not known:
            raise NotFound("no such trace")
        return redirect(self._open_trace(windows[window][number]))


def _json(content: Any) -> Response:  # noqa: ANN401 - any JSON value
    text = json.dumps(content, ensure_ascii=False, default=str)
    return Response(text, mimetype=_JSON)


def _said(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, mimetype="text/plain")
