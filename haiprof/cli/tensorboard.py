"""`haiprof export --to tensorboard`: TensorBoard on a run, with its scalars and its traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haiprof.base.messages import print_message
from haiprof.cli.browser import NoBrowser, page_opener
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.target import run_or_traces

if TYPE_CHECKING:
    from haiprof.compat.tensorboard import Serving

RunOrTraces = Annotated[
    Path | None,
    Arg(
        "RUN_OR_TRACES",
        "A run directory, a log directory whose newest run is taken, a trace, or a folder "
        "with one trace per rank. Left out: the log directory that a job started here would "
        "write to.",
    ),
]
Port = Annotated[
    int, Opt("--port N", "The port; the next free one if it is taken.", low=0, high=65535)
]
Host = Annotated[str, Opt("--host ADDRESS", "Address to listen on.")]


def tensorboard(
    source: RunOrTraces = None,
    port: Port = 6006,
    host: Host = "127.0.0.1",
    no_browser: NoBrowser = False,
) -> None:
    """Start TensorBoard on a run: its scalars, also while the job runs, and its traces.

    It ends with Ctrl-C and leaves nothing behind but the run's own scalars. Only you and root can
    open it; with --host of another interface, anybody with the printed address. Needs
    `pip install 'haiprof[tensorboard]'`; traces also need `'haiprof[torch-tb-profiler]'`, whose
    pages work without network and with right numbers here: docs/tensorboard.md.

    For example:

      haiprof export --to tensorboard                         the newest run, also beside the job
      haiprof export --to tensorboard traces/ --port 7007     traces of torch.profiler
    """
    from haiprof.compat.tensorboard import serve_tensorboard

    run, traces = run_or_traces(source)

    with page_opener(no_browser) as open_page:

        def ready(serving: Serving) -> None:
            if port not in (0, serving.port):
                print_message(f"port {port} is in use: {serving.port} is taken")
            for note in serving.notes:
                print_message(note)
            print_message(f"TensorBoard is at {serving.url} for {serving.readers} (Ctrl-C ends it)")
            open_page(serving.url)

        serve_tensorboard(run, traces, host=host, port=port, ready=ready)
