"""`haiprof verdict rank`: one rank over time, phase statistics and its slowest steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson, HtmlFile, Rank
from haiprof.cli.command_line import Arg
from haiprof.cli.output import Output
from haiprof.cli.target import open_target

Words = Annotated[
    list[str] | None,
    Arg(
        "[DIR] [RANK]",
        "A run or log directory and a rank, in either order. Left out: rank 0 of the newest run.",
    ),
]


def rank(
    words: Words = None,
    number: Rank = None,
    as_json: AsJson = False,
    html: HtmlFile = None,
) -> None:
    """Show one rank over time: each phase's statistics, the slowest steps, pauses, its counters.

    For example:

      haiprof verdict rank 0                              rank 0 of the newest run
      haiprof verdict rank haiprof-logs/train-... 3       rank 3 of that run
      haiprof verdict rank 0 --html rank0.html            interactive, in one file
      haiprof verdict rank 0 --json | jq '.slowest'
    """
    directory, chosen = parse_rank_words(words or [], number)
    analyzer = open_target(directory)
    from haiprof.show.rank_summary import one_rank_summary
    from haiprof.show.views.run import rank_view

    output = Output(json=as_json)
    summary = one_rank_summary(analyzer, chosen)
    if html is not None:
        from haiprof.show.page.render import write_rank_page

        output.hint(f"wrote {write_rank_page(analyzer, chosen, html)}")
    output.show(lambda _: rank_view(summary), summary.as_json())
    output.hint(f"next: haiprof verdict {summary.run.path}")


def parse_rank_words(words: Sequence[str], number: int | None = None) -> tuple[Path | None, int]:
    """A run and a rank in either order as (directory, rank); rank 0 where none is named.

    Args:
        words: At most a directory and a number.
        number: The rank that `--rank` names.

    Raises:
        UsageError: They are something else.
    """
    numbers = [word for word in words if word.isdecimal() and not Path(word).is_dir()]
    numbers += [] if number is None else [str(number)]
    targets = [word for word in words if word not in numbers]
    if len(numbers) > 1 or len(targets) > 1:
        raise UsageError(
            f"rank {' '.join(words)}: expected a directory and a rank",
            hint="haiprof verdict rank haiprof-logs 0",
        )
    target = Path(targets[0]) if targets else None
    if target is not None and not target.exists() and not numbers:
        raise UsageError(
            f"rank {target}: expected a directory and a rank",
            hint="haiprof verdict rank haiprof-logs 0",
        )
    return target, int(numbers[0]) if numbers else 0
