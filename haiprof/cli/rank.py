"""`haiprof rank`: one rank over time, phase statistics and its slowest steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from haiprof.cli.arguments import AsJson, HtmlFile
from haiprof.cli.output import Output
from haiprof.cli.target import open_target
from haiprof.errors import UsageError

_ARGUMENT_HELP = "A run or log directory (see `haiprof overview --help`), then the rank."


def rank(
    words: Annotated[list[str], typer.Argument(metavar="[DIR] RANK", help=_ARGUMENT_HELP)],
    as_json: AsJson = False,
    html: HtmlFile = None,
) -> None:
    """Show one rank over time: each phase's statistics, the slowest steps, pauses, its counters.

    For example:

      haiprof rank 0                              rank 0 of the newest run

      haiprof rank haiprof-logs/train-... 3       rank 3 of that run

      haiprof rank 0 --html rank0.html            interactive, in one file

      haiprof rank 0 --json | jq '.slowest'
    """
    from haiprof.report.rank_summary import one_rank_summary
    from haiprof.report.rank_view import rank_view

    directory, number = parse_rank_words(words)
    analyzer = open_target(directory)
    output = Output(json=as_json)
    summary = one_rank_summary(analyzer, number)
    if html is not None:
        from haiprof.report.page import write_rank_page

        output.hint(f"wrote {write_rank_page(analyzer, number, html)}")
    output.show(lambda _: rank_view(summary), summary.as_json())
    output.hint(f"next: haiprof verdict {summary.run.path}")


def parse_rank_words(words: list[str]) -> tuple[Path | None, int]:
    """`DIR RANK` or `RANK` as (directory, rank).

    Raises:
        UsageError: Something else.
    """
    if len(words) > 2 or not words[-1].isdigit():
        raise UsageError(
            f"rank {' '.join(words)}: expected a directory and a rank",
            hint="haiprof rank haiprof-logs 0",
        )
    return (Path(words[0]) if len(words) == 2 else None), int(words[-1])
