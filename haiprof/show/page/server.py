"""Serving the page of a run until Ctrl-C: its addresses, its state, and Perfetto beside it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base import local_http
from haiprof.base.errors import HaiprofError, MissingExtraError
from haiprof.base.stop_signal import stop_event
from haiprof.base.units import NS_PER_S, duration_text
from haiprof.diagnosis.verdict import as_document
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.show import servers
from haiprof.show.page.content import PageContent, page_content, time_start_ns
from haiprof.show.page.counter_data import json_for_script, step_data
from haiprof.show.page.render import page_js, plotly_js, served_html, static_text
from haiprof.show.run_header import last_write_ns, manifest_or_none, run_header
from haiprof.show.text import moment_text, printable
from haiprof.trace_analysis.step_time import with_range_lanes

try:
    from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
    from werkzeug.utils import redirect
    from werkzeug.wrappers import Request, Response
except ImportError as error:
    raise MissingExtraError(
        "the web server werkzeug is not installed",
        hint="pip install 'haiprof[view]', or haiprof report: the same page in one file",
    ) from error

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from werkzeug.serving import BaseWSGIServer

_OLD_S = 2.0
_PAUSE_S, _COST_RATIO = 5.0, 0.05
"""A page is renewed at most so often, and for at most this share of a core, beside a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One reading of the run."""

    content: PageContent
    analyzer: RunFrames
    time_ns: int  # Unix time at which it began
    cost_s: float  # CPU time that it took


class CachedPage:
    """Reads the run at the first request, and again when it has grown."""

    def __init__(self, run: RunPaths, *, read_traces: bool, baseline: str | None = None) -> None:
        self._run, self._read_traces, self._baseline = run, read_traces, baseline
        self._lock = threading.Lock()
        self._held: _Read | None = None

    def newest(self) -> PageContent:
        """The run as it is now, or as it was at most two seconds ago."""
        with self._lock:
            held, now = self._held, time.time_ns()
            if held is None or (now - held.time_ns > _OLD_S * NS_PER_S and self._has_news(held)):
                analyzer, began = RunFrames(self._run.root), time.process_time()
                content = page_content(
                    analyzer, read_traces=self._read_traces, baseline=self._baseline
                )
                cost_s = time.process_time() - began
                held = _Read(content=content, analyzer=analyzer, time_ns=now, cost_s=cost_s)
                self._held = held
            return held.content

    def current(self) -> PageContent:
        """What the page was made of, so that its figures agree with its text."""
        read = self._held
        return self.newest() if read is None else read.content

    def analyzer(self) -> RunFrames:
        """The frames behind `shown`."""
        self.current()
        assert self._held is not None
        return self._held.analyzer

    def status(self) -> dict[str, Any]:
        """Whether the job runs, has written since the page was made, and one is due; cheap."""
        header = run_header(self._run, manifest_or_none(self._run))
        read, is_due = self._held, False
        changed = read is not None and self._has_news(read)
        if read is not None and changed:
            pause_s = max(_PAUSE_S, read.cost_s / _COST_RATIO)
            age_ns = time.time_ns() - read.time_ns
            is_due = not header.is_running or age_ns > pause_s * NS_PER_S
        since = f" for {duration_text(header.duration_ns)}" if header.is_running else ""
        return {
            "state": header.state, "changed": changed, "due": is_due,
            "text": f"job {header.outcome}{since}",
            "read": moment_text(read.time_ns)[-8:] if read is not None else None,
        }  # fmt: skip

    def _has_news(self, read: _Read) -> bool:
        written_ns = last_write_ns(self._run)
        if written_ns is not None and written_ns > read.time_ns:
            return True
        state = run_header(self._run, manifest_or_none(self._run)).state
        return state != read.content.header.state


# Scripts are files of this server; plotly sets styles on its elements.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}  # fmt: skip
_SCRIPT, _JSON = "text/javascript", "application/json"


class PageApp:
    """A WSGI application."""

    def __init__(
        self, page: CachedPage, access: servers.Access,
        open_trace: Callable[[Path], str] | None = None,
    ) -> None:  # fmt: skip
        self._page, self._access, self._open_trace = page, access, open_trace
        self._routes: dict[str, Callable[[Request], Response]] = {
            "/": self._html,
            "/page.css": lambda _: Response(static_text("page.css"), mimetype="text/css"),
            "/page.js": lambda _: Response(page_js(), mimetype=_SCRIPT),
            "/plotly.js": lambda _: Response(plotly_js(), mimetype=_SCRIPT),
            "/data.json": lambda _: Response(
                json_for_script(self._page.current().data), mimetype=_JSON
            ),
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
        response.headers.update(_HEADERS)
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        host, cookies = (request.headers.get(name, "") for name in ("Host", "Cookie"))
        other = self._access.answer(host, request.query_string.decode("latin-1"), cookies)
        try:
            if other is not None:
                status, headers, text = other
                return Response(text, status, headers)
            if request.method not in ("GET", "HEAD"):
                raise MethodNotAllowed(["GET", "HEAD"], "only GET and HEAD")
            if request.path not in self._routes:  # the whole address: none is a path of a file
                raise NotFound("no such page")
            return self._routes[request.path](request)
        except HTTPException as error:
            return _text_response(str(error.description), error.code or 500)
        except HaiprofError as error:
            return _text_response(printable(str(error)), 503)

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
            raise NotFound(
                "not compared with another run: haiprof report --serve RUN --baseline OTHER"
            )
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


_PERFETTO_PORT = 9010


def serve_page(
    run: RunPaths, *, host: str, port: int, read_traces: bool, baseline: str | None,
    ready: Callable[[servers.Serving], None],
) -> None:  # fmt: skip
    """Serves the page until SIGINT or SIGTERM."""
    page = CachedPage(run, read_traces=read_traces, baseline=baseline)
    page.newest()
    number = servers.free_port(host, port)
    access = servers.new_access(host, number)
    with ExitStack() as stack, stop_event() as stop:
        viewers = Viewers(stack) if local_http.is_loopback(host) and servers.has_viewer() else None
        app = PageApp(page, access, viewers.address_of if viewers else None)
        server = _server(host, number, app)
        threading.Thread(target=server.serve_forever, name="haiprof-view", daemon=True).start()
        ready(servers.Serving(url=servers.url_of(host, number, access), port=number))
        stop.wait()
        server.shutdown()
        server.server_close()


class Viewers:
    """Perfetto, one server for each trace that was opened."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._lock = stack, threading.Lock()
        self._addresses: dict[Path, str] = {}

    def address_of(self, trace: Path) -> str:
        """Starts a viewer of a trace and returns its address."""
        with self._lock:
            if trace not in self._addresses:
                shown = self._stack.enter_context(with_range_lanes(trace))
                served = servers.perfetto_served(
                    shown, servers.viewer_folder(trace), port=_PERFETTO_PORT
                )
                self._addresses[trace] = self._stack.enter_context(served).url
            return self._addresses[trace]


def _server(host: str, port: int, app: PageApp) -> BaseWSGIServer:
    from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler

    class Handler(local_http.GuardedHandler, WSGIRequestHandler):
        """Hides the name of the server."""

        server_version, sys_version = "haiprof", ""

    class Server(local_http.GuardedServer, BaseWSGIServer):
        """A limited number of threads, one per connection."""

        multithread = True
        readers = local_http.own_readers(host)

    return Server(host, port, app, Handler)
