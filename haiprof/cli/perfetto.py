"""`haiprof export --to perfetto`: a trace in Perfetto's UI, served from this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haiprof.base.messages import print_message
from haiprof.cli.arguments import Rank
from haiprof.cli.browser import NoBrowser, page_opener
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.target import run_or_traces
from haiprof.cli.tensorboard import Port

if TYPE_CHECKING:
    from haiprof.show.servers import Serving

TraceOrRun = Annotated[
    Path | None,
    Arg(
        "TRACE_OR_RUN",
        "A trace, a folder of traces, or a run or log directory. Left out: the newest run.",
    ),
]
Window = Annotated[
    int | None, Opt("--window W", "This trace window instead of the last one.", low=0)
]


def perfetto(
    source: TraceOrRun = None,
    rank: Rank = None,
    window: Window = None,
    port: Port = 9010,
    no_browser: NoBrowser = False,
) -> None:
    """Show a trace in Perfetto's UI, which is served from this machine: no network is needed.

    Of several ranks, what `haiprof export --to merged` wrote is shown, or the rank that is named.
    It ends with Ctrl-C. Needs `pip install 'haiprof[perfetto]'`; without it, says which file to
    open at ui.perfetto.dev.

    For example:

      haiprof export --to perfetto                            what the newest run merged
      haiprof export --to perfetto haiprof-logs --rank 3      one rank's trace
    """
    from haiprof.show.servers import serve_perfetto, trace_to_show, viewer_folder
    from haiprof.trace_analysis.step_time import with_range_lanes

    run, traces = run_or_traces(source)
    trace = trace_to_show(run, traces, rank=rank, window=window)
    viewer = viewer_folder(trace)

    with page_opener(no_browser) as open_page, with_range_lanes(trace) as shown:

        def ready(serving: Serving) -> None:
            if port not in (0, serving.port):
                print_message(f"port {port} is in use: {serving.port} is taken")
            print_message(f"{trace.name} is at {serving.url} (Ctrl-C ends it)")
            open_page(serving.url)

        serve_perfetto(shown, viewer, port=port, ready=ready)
