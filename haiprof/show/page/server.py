"""Serving the page of a run until Ctrl-C, with Perfetto beside it for traces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.base.errors import MissingExtraError
from haiprof.base.local_http import GuardedHandler, GuardedServer, is_loopback, own_readers
from haiprof.base.stop_signal import stop_event
from haiprof.run_format.layout import RunPaths
from haiprof.show.page.page_state import CachedPage
from haiprof.show.servers.local_server import free_port, new_access, url_of
from haiprof.show.servers.perfetto import has_viewer, perfetto_served, viewer_folder
from haiprof.trace_analysis.step_time import with_range_lanes

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

    from haiprof.show.page.application import PageApp

_PERFETTO_PORT = 9010


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is being served."""

    url: str
    """With the token that opens it."""
    port: int


def serve_page(
    run: RunPaths,
    *,
    host: str,
    port: int,
    read_traces: bool,
    baseline: str | None,
    ready: Callable[[Serving], None],
) -> None:
    """Serves the page until SIGINT or SIGTERM."""
    if find_spec("werkzeug") is None:
        raise MissingExtraError(
            "the web server werkzeug is not installed",
            hint="pip install 'haiprof[view]', or haiprof report: the same page in one file",
        )
    from haiprof.show.page.application import PageApp

    page = CachedPage(run, read_traces=read_traces, baseline=baseline)
    page.newest()
    number = free_port(host, port)
    access = new_access(host, number)
    with ExitStack() as stack, stop_event() as stop:
        viewers = Viewers(stack) if is_loopback(host) and has_viewer() else None
        app = PageApp(page, access, viewers.address_of if viewers else None)
        server = _server(host, number, app)
        threading.Thread(target=server.serve_forever, name="haiprof-view", daemon=True).start()
        ready(Serving(url=url_of(host, number, access), port=number))
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
                served = perfetto_served(shown, viewer_folder(trace), port=_PERFETTO_PORT)
                self._addresses[trace] = self._stack.enter_context(served).url
            return self._addresses[trace]


def _server(host: str, port: int, app: PageApp) -> BaseWSGIServer:
    from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler

    class Handler(GuardedHandler, WSGIRequestHandler):
        """Hides the name of the server."""

        server_version, sys_version = "haiprof", ""

    class Server(GuardedServer, BaseWSGIServer):
        """A limited number of threads, one per connection."""

        multithread = True
        readers = own_readers(host)

    return Server(host, port, app, Handler)
