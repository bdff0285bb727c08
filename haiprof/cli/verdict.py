"""`haiprof verdict`: the cause, the numbers that prove it, what to change, how sure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson, Everything, RunDir
from haiprof.cli.output import Output
from haiprof.cli.target import open_target

Save = Annotated[
    bool, typer.Option("--save", help="Also write report/verdict.json and .txt into the run.")
]
SvgFile = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="Write the card as a picture.", show_default=False),
]

Last = Annotated[
    float | None,
    typer.Option(
        "--last",
        metavar="SECONDS",
        min=0.1,
        help="Only the last seconds of what was recorded.",
        show_default=False,
    ),
]


ExitReport = Annotated[
    Path | None,
    typer.Option(
        "--exit-report",
        metavar="FILE",
        help="Write how the job ended as Markdown, for a ticket.",
        show_default=False,
    ),
]


def verdict(
    directory: RunDir = None, as_json: AsJson = False, save: Save = False, svg: SvgFile = None,
    last: Last = None, exit_report: ExitReport = None, everything: Everything = False,
) -> None:  # fmt: skip
    """Show why the job died, or what makes it slow, the numbers that prove it, and what to do.

    With --all also what could not be measured or judged and why, and what haiprof itself cost.

    For example:

      haiprof verdict                             the newest run of the log directory

      haiprof verdict haiprof-logs/train-...      that run, also while it runs

      haiprof verdict --last 60                   of its last minute alone

      haiprof verdict --svg card.svg              the card as a picture

      haiprof verdict --exit-report ticket.md     how it ended, for a ticket

      haiprof verdict --json | jq '.findings[0].remedy'
    """
    if last is not None and save:
        raise UsageError("--save keeps the verdict of a whole run: not together with --last")
    analyzer = open_target(directory)
    from haiprof.diagnosis.document import as_document
    from haiprof.diagnosis.engine import diagnose
    from haiprof.show import death_block
    from haiprof.show.card import verdict_card
    from haiprof.show.export import save_card_svg, save_verdict
    from haiprof.show.figures.html_file import write_text
    from haiprof.show.run_header import manifest_or_none, run_header
    from haiprof.trace_analysis.pool import SMALL_BYTES

    analyzer = analyzer if last is None else analyzer.last(last)
    output = Output(json=as_json)
    # The launcher saves the verdict while a job ends: it does not wait for large traces there.
    found = diagnose(analyzer, trace_limit_bytes=SMALL_BYTES if save else None)
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    if save:
        save_verdict(found, header, analyzer.run)
    if svg is not None:
        output.hint(f"wrote {save_card_svg(found, header, svg)}")
    if exit_report is not None:
        write_text(exit_report, death_block.exit_report(found, header))
        output.hint(f"wrote {exit_report}")
    output.show(
        lambda width: verdict_card(found, header, width=width, everything=everything),
        as_document(found),
    )
