"""`haiprof report`, and what is served on this machine: pages, TensorBoard, Perfetto."""

from __future__ import annotations

import contextlib
import html
import os
import shlex
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from haiprof.base.errors import UsageError, convert_os_errors
from haiprof.base.log_addresses import shown_path
from haiprof.base.messages import print_message
from haiprof.base.safe_files import MadeFolder, write_file
from haiprof.cli import shared
from haiprof.cli.command_line import argument, option

NO_BROWSER = option("--no-browser", "Only print the address.")

_PAGE = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">'


@contextlib.contextmanager
def page_opener(port: int, no_browser: bool) -> Iterator[Callable[[int, str, str], None]]:
    """What announces a port, an address and what is there, and opens it on a screen if wanted.

    The browser is started with a file that sends it on, as Jupyter does: only this user can read
    it, and it goes away at the end of the block. Where a browser may not read the folder for
    temporary files (packed as snap or flatpak), the address that haiprof printed does.
    """
    with contextlib.ExitStack() as stack:

        def open_page(taken: int, url: str, said: str) -> None:
            if port not in (0, taken):
                print_message(f"port {port} is in use: {taken} is taken")
            print_message(f"{said} (Ctrl-C ends it)")
            if no_browser or not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                return
            folder = stack.enter_context(MadeFolder.temporary("haiprof-"))
            page = _PAGE.format(url=html.escape(url))
            write_file(folder / "open.html", page.encode(), below=folder)
            webbrowser.open((folder / "open.html").as_uri())

        yield open_page


PORT = option("--port N", "The port; the next free one if it is taken.", low=0, high=65535)
HOST = option("--host ADDRESS", "Address to listen on.", "127.0.0.1")


def tensorboard(
    source: Path | None = argument(
        "RUN_OR_TRACES",
        "A run directory, a log directory whose newest run is taken, a trace, or a folder "
        "with one trace per rank. Left out: the log directory that a job started here would "
        "write to.",
    ),
    port: int = replace(PORT, default=6006),
    host: str = HOST,
    no_browser: bool = NO_BROWSER,
) -> None:
    """Serve TensorBoard until Ctrl-C: a run's scalars, also while the job runs, and its traces.

    Nothing is left behind but the run's own scalars, which `haiprof export --to scalars` writes
    without serving. Only you and root can open it; with --host of another interface, anybody with
    the printed address. Needs `pip install 'haiprof[tensorboard]'`; traces also need
    `'haiprof[torch-tb-profiler]'`, whose pages work without network and with right numbers here:
    docs/tensorboard.md.

    For example:

      haiprof export --to tensorboard                         the newest run, also beside the job
      haiprof export --to tensorboard traces/ --port 7007     traces of torch.profiler
    """
    from haiprof.compat.tensorboard import serve_tensorboard
    from haiprof.show.servers import Serving

    run, traces = shared.run_or_traces(source)

    with page_opener(port, no_browser) as open_page:

        def ready(it: Serving, notes: Sequence[str]) -> None:
            *others, where = notes
            for note in others:
                print_message(note)
            open_page(it.port, it.url, where)

        serve_tensorboard(run, traces, host=host, port=port, ready=ready)


READ_TRACES = option(
    "--traces/--no-traces",
    "Read the run's traces, which takes long for large ones: kernels, functions, memory.",
    True,
)


def report(
    directory: Path | None = shared.RUN_DIR,
    output: Path | None = option(
        "-o --output FILE",
        "Left out: report/report.html in the run; of another user's run RUN.html here.",
    ),
    baseline: str | None = shared.BASELINE,
    read_traces: bool = READ_TRACES,
    cluster: str | None = shared.CLUSTER,
) -> None:
    """Write all of a run, or of traces, into one HTML file, for a ticket or to keep.

    The verdict first, then steps and ranks over time, any rank's phases and counters, collectives,
    what the traces say, and how it was run. The file needs no network and no other file.
    `haiprof report --serve` shows the page in a browser, also while the job runs (see its --help).

    For example:

      haiprof report                              the newest run of the log directory
      haiprof report haiprof-logs/train-... -o slow.html
      haiprof report --baseline last-good         with a section that says what changed
    """
    from haiprof.base.safe_files import make_folder
    from haiprof.base.units import bytes_text
    from haiprof.base.users import other_uid
    from haiprof.show.page.content import page_content
    from haiprof.show.page.render import write_report, write_trace_page

    pool = shared.parse_cluster(cluster)
    if (traces := shared.named_traces(directory)) is not None:
        from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
        from haiprof.trace_analysis.report import standard_report

        with shared.ReadProgress(quiet=False) as waiting:
            found = standard_report(traces, pool=pool, progress=waiting)
        path = output or Path(f"{traces.resolve().name.partition('.json')[0]}.html")
        write_trace_page(found, TraceQuestions(found.path), path, force=output is not None)
        print_message(f"wrote {path}: open it in a browser")
        return
    analyzer = shared.open_target(directory, pool=pool)
    content = page_content(analyzer, read_traces=read_traces, baseline=baseline)
    if content.comparison is not None and content.comparison.missing:
        print_message(f"not compared: {content.comparison.missing}")
    below = None
    if output is None and other_uid(analyzer.run.manifest) is not None:
        output = Path(f"{analyzer.run.root.name}.html")  # another user's run is only read
    if output is None:
        output, below = analyzer.run.report_html, analyzer.run.root
        what, hint = f"{output.parent}: cannot be made", "name another file: -o report.html"
        with convert_os_errors(UsageError, what, hint=hint):
            make_folder(output.parent, below=below)
    wrote = "replaced" if output.exists() else "wrote"
    write_report(content, output, below=below)
    print_message(f"{wrote} {output} ({bytes_text(output.stat().st_size)})")
    run = shlex.quote(shown_path(analyzer.run.root))
    print_message(f"next: open it in a browser, or haiprof report --serve {run}")


def view(
    directory: Path | None = shared.RUN_DIR, port: int = replace(PORT, default=5000),
    host: str = HOST, no_browser: bool = NO_BROWSER, baseline: str | None = shared.BASELINE,
    read_traces: bool = READ_TRACES,
) -> None:  # fmt: skip
    """Show the page of `haiprof report` in a browser, also while the job runs.

    Ctrl-C ends it, and nothing is left behind. Only who has the printed address can open it,
    and on this machine's own addresses (127.0.0.1) only the same user or root.
    Needs `pip install 'haiprof[view]'`; with `'haiprof[perfetto]'` traces open from the page.

    For example:

      haiprof report --serve                                the newest run, also beside the job
      haiprof report --serve haiprof-logs/train-... --port 7007
    """
    print_message("reading the run; the page's address follows")
    from haiprof.show.page.server import serve_page

    run = shared.open_target(directory).run
    with page_opener(port, no_browser) as open_page:
        serve_page(
            run, host=host, port=port, read_traces=read_traces, baseline=baseline,
            ready=lambda it: open_page(it.port, it.url, f"{run.root.name} is at {it.url}"),
        )  # fmt: skip


def perfetto(
    source: Path | None = argument(
        "TRACE_OR_RUN",
        "A trace, a folder of traces, or a run or log directory. Left out: the newest run.",
    ),
    rank: int | None = shared.RANK,
    window: int | None = option("--window W", "This trace window instead of the last one.", low=0),
    port: int = replace(PORT, default=9010),
    no_browser: bool = NO_BROWSER,
) -> None:
    """Serve Perfetto's UI with a trace until Ctrl-C, from this machine: no network is needed.

    Of several ranks, what `haiprof export --to merged` wrote is shown, or the rank that is named.
    Needs `pip install 'haiprof[perfetto]'`; without it, says which file to
    open at ui.perfetto.dev.

    For example:

      haiprof export --to perfetto                            what the newest run merged
      haiprof export --to perfetto haiprof-logs --rank 3      one rank's trace
    """
    from haiprof.show.servers import serve_perfetto, trace_to_show, viewer_folder
    from haiprof.trace_analysis.step_time import with_range_lanes

    run, traces = shared.run_or_traces(source)
    trace = trace_to_show(run, traces, rank=rank, window=window)
    viewer = viewer_folder(trace)

    with page_opener(port, no_browser) as open_page, with_range_lanes(trace) as shown:
        serve_perfetto(
            shown, viewer, port=port,
            ready=lambda it: open_page(it.port, it.url, f"{trace.name} is at {it.url}"),
        )  # fmt: skip
