"""`haiprof view`: the report page of a run, served on this machine."""

from __future__ import annotations

import os
import sys
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer

from haiprof.cli.arguments import RunDir
from haiprof.cli.output import say
from haiprof.cli.report import Baseline, ReadTraces
from haiprof.cli.target import open_target
from haiprof.cli.tensorboard import Host, Port

if TYPE_CHECKING:
    from haiprof.report.site.server import Serving

NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Only print the address.")]


def view(
    directory: RunDir = None,
    port: Port = 5000,
    host: Host = "127.0.0.1",
    no_browser: NoBrowser = False,
    baseline: Baseline = None,
    read_traces: ReadTraces = True,
) -> None:
    r"""Show the page of `haiprof report` in a browser, also while the job runs.

    It ends with Ctrl-C and leaves nothing behind. Only who has the printed address can open it.
    Needs `pip install 'haiprof\[view]'`; with `'haiprof\[perfetto]'` traces open from the page.

    For example:

      haiprof view                                the newest run, also beside the job

      haiprof view haiprof-logs/train-... --port 7007
    """
    from haiprof.report.site.server import serve_page

    analyzer = open_target(directory)

    def ready(serving: Serving) -> None:
        if port not in (0, serving.port):
            say(f"port {port} is in use: {serving.port} is taken", sys.stderr)
        say(f"{analyzer.run.root.name} is at {serving.url} (Ctrl-C ends it)", sys.stderr)
        if not no_browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(serving.url)

    serve_page(
        analyzer.run, host=host, port=port, read_traces=read_traces, baseline=baseline, ready=ready
    )
