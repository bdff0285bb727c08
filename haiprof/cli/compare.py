"""`haiprof compare`: is a run slower than another, by how much, by what, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output
from haiprof.cli.target import open_target, trace_path
from haiprof.cli.trace_diff import SLOWER, parse_percent

LAST_GOOD = "last-good"

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[BASELINE] RUN",
        help="The run before and the new one; or the new one alone, with --baseline. A log "
        "directory stands for its newest run; left out: the log directory of a job started here.",
        show_default=False,
    ),
]
BaselineName = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="DIR|last-good",
        help="What RUN is compared with. last-good: the newest earlier run in the same log "
        "directory with the same name and number of ranks that ended with exit status 0 and was "
        "not itself found slower; the result is kept in RUN/report/compare.json.",
        show_default=False,
    ),
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--fail-if-slower",
        metavar="PERCENT",
        help="End with status 10 where the mean step is longer by more than this and the "
        "interval excludes 0, and with 5 where that cannot be judged (too few steps, an interval "
        "from below 0 to beyond the limit, other load). For continuous integration.",
        show_default=False,
    ),
]


def compare(
    runs: Runs = None,
    baseline: BaselineName = None,
    fail_if_slower: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Compare two recorded runs: is the new one slower, by chance or not, and by what.

    The difference of two ledgers: the mean step after warm-up with a 99 % interval; accounts of
    time (position in the step, what was done, line of code) by how much they changed; whether the
    gain that the first run's verdict promised came true; counters and kernels; and what differs in
    command, code, packages, variables and machine. What chance may explain is not claimed.

    For example:

      haiprof compare haiprof-logs/train-before haiprof-logs/train-after

      haiprof compare before after --fail-if-slower 5%

      haiprof compare haiprof-logs --baseline last-good --fail-if-slower 5%

      haiprof compare before after --json | jq .verdict

      haiprof compare a.json b.json       traces of torch.profiler: what changed on the GPU
    """
    from haiprof.base.units import ratio_text
    from haiprof.diagnosis.compare.baseline import baseline_named, note_outcome
    from haiprof.diagnosis.compare.compared_run import compared_run_of
    from haiprof.diagnosis.compare.comparison import compare_runs, exceeds
    from haiprof.show.views.compare import compare_data, compare_view, headline, what_would_decide

    limit = parse_percent(fail_if_slower)
    first, last = parse_runs(runs or [], baseline)
    output = Output(json=as_json)
    traces = [trace_path(None if path is None else str(path)) for path in (first, last)]
    if traces[0] is not None and traces[1] is not None:
        if limit is not None:
            raise UsageError(
                "--fail-if-slower is of two runs; here are traces",
                hint=f"haiprof trace-diff {first} {last} --fail-if-slower {fail_if_slower}",
            )
        _show_traces(traces[0], traces[1], output)
        return
    after = compared_run_of(open_target(last))
    before = baseline_named(first, after)
    found, chosen = compare_runs(before.side, after), before.why
    data = compare_data(found, chosen=chosen)
    if chosen and not note_outcome(after, data):
        output.hint(f"cannot note the outcome in {after.path}")
    output.show(lambda _: compare_view(found, chosen=chosen), data)
    if limit is None:
        return
    decided = exceeds(found, limit)
    if decided is None:
        raise MissingDataError(
            f"--fail-if-slower cannot be decided: {headline(found)}", hint=what_would_decide(found)
        )
    if decided:
        output.hint(f"slower than {ratio_text(limit)}: exit status {SLOWER}")
        if chosen:
            output.hint(f"if that is meant: remove {after.analyzer.run.comparison_json}, and this "
                        "run is the next one's baseline")  # fmt: skip
        raise typer.Exit(SLOWER)


def _show_traces(before: Path, after: Path, output: Output) -> None:
    from haiprof.cli.arguments import ReadProgress
    from haiprof.show.views.device_comparison import (
        device_comparison_data,
        device_comparison_view,
    )
    from haiprof.trace_analysis.device_comparison import compare_devices
    from haiprof.trace_analysis.device_verdict import device_ledger

    with ReadProgress(quiet=output.json) as waiting:
        sides = [device_ledger(path, progress=waiting) for path in (before, after)]
    found = compare_devices(*sides)
    output.show(
        lambda width: device_comparison_view(found, width=width), device_comparison_data(found)
    )
    output.hint(f"next: haiprof trace-diff {before} {after}")


def parse_runs(runs: list[Path], baseline: str | None) -> tuple[str, Path | None]:
    """The baseline, and the run; None for the newest one here.

    Raises:
        UsageError: Neither two runs nor one with --baseline.
    """
    if len(runs) <= 1 and baseline is not None:
        return baseline, (runs[0] if runs else None)
    if len(runs) == 2 and baseline is None:
        named = str(runs[0])
        return (f"./{named}" if named == LAST_GOOD else named), runs[1]  # here it is a folder
    raise UsageError(
        "compare: name a baseline and a run, or a run with --baseline",
        hint="haiprof compare BEFORE AFTER, or haiprof compare RUN --baseline last-good",
    )
