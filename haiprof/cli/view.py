"""`haiprof report --serve`: the report page of a run, served on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from haiprof.base.messages import print_message
from haiprof.cli.arguments import RunDir
from haiprof.cli.browser import NoBrowser, page_opener
from haiprof.cli.report import Baseline, ReadTraces
from haiprof.cli.target import open_target
from haiprof.cli.tensorboard import Host, Port

if TYPE_CHECKING:
    from haiprof.show.page.server import Serving


def view(
    directory: RunDir = None,
    port: Port = 5000,
    host: Host = "127.0.0.1",
    no_browser: NoBrowser = False,
    baseline: Baseline = None,
    read_traces: ReadTraces = True,
) -> None:
    """Show the page of `haiprof report` in a browser, also while the job runs.

    Ctrl-C ends it, and nothing is left behind. Only who has the printed address can open it,
    and on this machine's own addresses (127.0.0.1) only the same user or root.
    Needs `pip install 'haiprof[view]'`; with `'haiprof[perfetto]'` traces open from the page.

    For example:

      haiprof report --serve                                the newest run, also beside the job
      haiprof report --serve haiprof-logs/train-... --port 7007
    """
    from haiprof.show.page.server import serve_page

    analyzer = open_target(directory)

    with page_opener(no_browser) as open_page:

        def ready(serving: Serving) -> None:
            if port not in (0, serving.port):
                print_message(f"port {port} is in use: {serving.port} is taken")
            print_message(f"{analyzer.run.root.name} is at {serving.url} (Ctrl-C ends it)")
            open_page(serving.url)

        serve_page(
            analyzer.run, host=host, port=port, read_traces=read_traces, baseline=baseline,
            ready=ready,
        )  # fmt: skip
