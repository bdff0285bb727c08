"""`haiprof report`: all of a run in one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import shown_path
from haiprof.base.messages import print_message
from haiprof.cli.arguments import RunDir
from haiprof.cli.command_line import Opt
from haiprof.cli.target import named_traces, open_target

OutFile = Annotated[
    Path | None, Opt("-o --output FILE", "Left out: report/report.html in the run.")
]
ReadTraces = Annotated[
    bool,
    Opt(
        "--traces/--no-traces",
        "Read the run's traces, which takes long for large ones: kernels, functions, memory.",
    ),
]

Baseline = Annotated[
    str | None,
    Opt("--baseline DIR|last-good", "Also compare with this run, as `haiprof compare` does."),
]


def report(
    directory: RunDir = None,
    output: OutFile = None,
    baseline: Baseline = None,
    read_traces: ReadTraces = True,
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
    from haiprof.show.page.content import page_content
    from haiprof.show.page.render import write_report

    if (traces := named_traces(directory)) is not None:
        _write_trace_page(traces, output)
        return
    analyzer = open_target(directory)
    content = page_content(analyzer, read_traces=read_traces, baseline=baseline)
    if content.comparison is not None and content.comparison.missing:
        print_message(f"not compared: {content.comparison.missing}")
    below = None
    if output is None:
        output, below = analyzer.run.report_html, analyzer.run.root
        try:
            make_folder(output.parent, below=below)
        except OSError as error:
            raise UsageError(
                f"{output.parent}: cannot be made: {error.strerror or error}",
                hint="name another file: -o report.html",
            ) from None
    wrote = "replaced" if output.exists() else "wrote"
    write_report(content, output, below=below)
    print_message(f"{wrote} {output} ({bytes_text(output.stat().st_size)})")
    print_message(
        f"next: open it in a browser, or haiprof report --serve {shown_path(analyzer.run.root)}"
    )


def _write_trace_page(traces: Path, output: Path | None) -> None:
    """The page of traces that are named in place of a run: here, named after them."""
    from haiprof.base.output_file import output_file
    from haiprof.cli.arguments import ReadProgress
    from haiprof.show.page.render import trace_page_html
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
    from haiprof.trace_analysis.report import standard_report

    with ReadProgress(quiet=False) as waiting:
        report = standard_report(traces, progress=waiting)
    page = trace_page_html(report, TraceQuestions(report.path))
    path = output or Path(f"{traces.resolve().name.partition('.json')[0]}.html")
    with output_file(path, force=output is not None) as file:
        file.write(page.encode())
    print_message(f"wrote {path}: open it in a browser")
