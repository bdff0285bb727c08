"""`haiprof verdict`: the cause, the numbers that prove it, what to change, how sure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from haiprof.cli.arguments import AsJson, RunDir
from haiprof.cli.output import Output
from haiprof.cli.target import open_target
from haiprof.errors import UsageError

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


def verdict(
    directory: RunDir = None, as_json: AsJson = False, save: Save = False, svg: SvgFile = None,
    last: Last = None,
) -> None:  # fmt: skip
    """Show what makes the job slow, the numbers that prove it, what to do, and how sure that is.

    Also: what could not be measured and why, and what haiprof itself cost.

    For example:

      haiprof verdict                             the newest run of the log directory

      haiprof verdict haiprof-logs/train-...      that run, also while it runs

      haiprof verdict --last 60                   of its last minute alone

      haiprof verdict --svg card.svg              the card as a picture

      haiprof verdict --json | jq '.findings[0].remedy'
    """
    from haiprof.analysis.trace.pool import SMALL_BYTES
    from haiprof.diagnosis.engine import diagnose
    from haiprof.report.card import verdict_card
    from haiprof.report.export import save_card_svg, save_verdict
    from haiprof.report.run_header import manifest_or_none, run_header

    if last is not None and save:
        raise UsageError("--save keeps the verdict of a whole run: not together with --last")
    analyzer = open_target(directory)
    analyzer = analyzer if last is None else analyzer.last(last)
    output = Output(json=as_json)
    # The launcher saves the verdict while a job ends: it does not wait for large traces there.
    found = diagnose(analyzer, trace_limit_bytes=SMALL_BYTES if save else None)
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    if save:
        save_verdict(found, header, analyzer.run)
    if svg is not None:
        output.hint(f"wrote {save_card_svg(found, header, svg)}")
    output.show(lambda width: verdict_card(found, header, width=width), found.as_json())
