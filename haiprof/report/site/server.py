"""Serving the page of a run until Ctrl-C, with Perfetto beside it for traces."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.analysis.trace.range_lanes import with_range_lanes
from haiprof.errors import MissingExtraError
from haiprof.report.local_server import allowed_hosts, free_port, is_loopback, stop_event
from haiprof.report.perfetto_server import has_viewer, perfetto_served, viewer_folder
from haiprof.report.site.held import HeldPage
from haiprof.rundir.layout import RunPaths

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

    from haiprof.report.site.app import PageApp

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
    """Serves the page until SIGINT or SIGTERM.

    Args:
        run: The run; it may still grow.
        host: Address to listen on.
        port: The first that is tried.
        read_traces: Whether the run's traces are read.
        baseline: The run it is compared with: a directory, or `last-good`.
        ready: Called once the address answers.

    Raises:
        MissingExtraError: werkzeug is not installed.
        UsageError: Nothing can be listened on there.
        HaiprofError: The run cannot be read.
    """
    if find_spec("werkzeug") is None:
        raise MissingExtraError(
            "the web server werkzeug is not installed",
            hint="pip install 'haiprof[view]', or haiprof report: the same page in one file",
        )
    from haiprof.report.site.app import Access, PageApp

    page = HeldPage(run, read_traces=read_traces, baseline=baseline)
    page.newest()
    number = free_port(host, port)
    access = Access(
        token=secrets.token_urlsafe(16), cookie=f"haiprof-{number}", hosts=allowed_hosts(host)
    )
    with ExitStack() as stack, stop_event((signal.SIGINT, signal.SIGTERM)) as stop:
        viewers = Viewers(stack) if is_loopback(host) and has_viewer() else None
        app = PageApp(page, access, viewers.address_of if viewers else None)
        server = _server(host, number, app)
        threading.Thread(target=server.serve_forever, name="haiprof-view", daemon=True).start()
        shown = f"[{host}]" if ":" in host else host
        ready(Serving(url=f"http://{shown}:{number}/?token={access.token}", port=number))
        stop.wait()
        server.shutdown()
        server.server_close()


class Viewers:
    """Perfetto, one server for each trace that was opened.

    Args:
        stack: Ends them.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._lock = stack, threading.Lock()
        self._addresses: dict[Path, str] = {}

    def address_of(self, trace: Path) -> str:
        """Where a trace is shown, from now on.

        Raises:
            HaiprofError: It cannot be read.
        """
        with self._lock:
            if trace not in self._addresses:
                shown = self._stack.enter_context(with_range_lanes(trace))
                served = perfetto_served(shown, viewer_folder(trace), port=_PERFETTO_PORT)
                self._addresses[trace] = self._stack.enter_context(served).url
            return self._addresses[trace]


def _server(host: str, port: int, app: PageApp) -> BaseWSGIServer:
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        """Prints nothing, and does not tell which server this is."""

        server_version, sys_version = "haiprof", ""

        def log(self, type: str, message: str, *args: object) -> None:
            """Nothing."""

    return make_server(host, port, app, threaded=True, request_handler=Quiet)
