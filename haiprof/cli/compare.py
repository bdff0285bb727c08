"""`haiprof compare`: is a run slower than another, by how much, by what, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.base.errors import MissingDataError, RunNotFoundError, UsageError
from haiprof.cli.arguments import AsJson, Form, OutputForm
from haiprof.cli.command_line import Arg, ExitStatus, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import named_traces, open_target, whole_path
from haiprof.cli.trace_diff import SLOWER, parse_percent, trace_diff

LAST_GOOD = "last-good"

Runs = Annotated[
    list[Path] | None,
    Arg(
        "[BASELINE] RUN",
        "The run before and the new one; or the new one alone, with --baseline. A log "
        "directory stands for its newest run; left out: the log directory of a job started "
        "here.",
    ),
]
BaselineName = Annotated[
    str | None,
    Opt(
        "--baseline DIR|last-good",
        "What RUN is compared with. last-good: the newest earlier run in the same log "
        "directory with the same name and number of ranks that ended with exit status 0 and "
        "was not itself found slower; the result is kept in RUN/report/compare.json.",
    ),
]
Limit = Annotated[
    str | None,
    Opt(
        "--fail-if-slower PERCENT",
        "End with status 10 where the mean step is longer by more than this and the interval "
        "excludes 0, and with 5 where that cannot be judged (too few steps, an interval from "
        "below 0 to beyond the limit, other load). For continuous integration.",
    ),
]

FromStep = Annotated[
    int | None,
    Opt("--from-step N", "Compare the steps of RUN from step N on with those before it.", low=1),
]


def compare(
    runs: Runs = None,
    baseline: BaselineName = None,
    fail_if_slower: Limit = None,
    from_step: FromStep = None,
    as_json: AsJson = False,
    form: OutputForm = Form.TEXT,
) -> None:
    """Compare two recorded runs, or two traces: is the new one slower, and by what.

    The difference of two ledgers: the mean step after warm-up with a 99 % interval; accounts of
    time (position in the step, what was done, line of code) by how much they changed; whether the
    gain that the first run's verdict promised came true; counters and kernels; and what differs in
    command, code, packages, variables and machine. What chance may explain is not claimed.
    Of two traces it says what changed on the GPU, operators paired by their role; with
    --fail-if-slower, and as `haiprof compare --traces A B` (see its --help), step by step.

    For example:

      haiprof compare haiprof-logs/train-before haiprof-logs/train-after
      haiprof compare before after --fail-if-slower 5%
      haiprof compare haiprof-logs --baseline last-good --fail-if-slower 5%
      haiprof compare before after --format markdown > comment.md
      haiprof compare before after --json | jq .verdict
      haiprof compare run --from-step 412         what made steps slower within one run
      haiprof compare a.json b.json               what changed on the GPU
    """
    from haiprof.base.units import ratio_text
    from haiprof.diagnosis.compare.compared_run import baseline_named, compared_run_of, note_outcome
    from haiprof.diagnosis.compare.comparison import compare_runs, compare_steps, exceeds
    from haiprof.show.views.compare import (
        compare_data,
        compare_markdown,
        compare_view,
        headline,
        what_would_decide,
    )

    output = Output(json=as_json or form is Form.JSON, markdown=form is Form.MARKDOWN)
    limit = parse_percent(fail_if_slower)
    if from_step is not None:
        if len(runs or []) > 1 or baseline is not None or limit is not None:
            raise UsageError("compare: --from-step goes with one run, and no other option")
        found = compare_steps(open_target(runs[0] if runs else None), from_step)
        output.show(lambda _: compare_view(found), compare_data(found))
        return
    first, last = parse_runs(runs or [], baseline)
    before_traces, after_traces = named_traces(first), named_traces(last)
    if before_traces and after_traces:
        if limit is None:
            _show_traces(before_traces, after_traces, output)
        elif output.markdown:
            raise UsageError("--fail-if-slower of traces has no Markdown",
                             hint="haiprof compare A B --format markdown")  # fmt: skip
        else:
            trace_diff(
                before_traces, after_traces, fail_if_slower=fail_if_slower, as_json=output.json
            )
        return
    if before_traces or after_traces:
        raise UsageError(
            f"compare: {before_traces or after_traces} is a trace, and "
            f"{last if before_traces else first} is a run",
            hint="name two runs or two traces",
        )
    after = compared_run_of(open_target(last))
    before = baseline_named(first, after)
    found, chosen = compare_runs(before.side, after), before.why
    data = compare_data(found, chosen=chosen)
    if chosen and not note_outcome(after, data):
        output.hint(f"cannot note the outcome in {after.path}")
    output.show(lambda _: compare_view(found, chosen=chosen), data,
                lambda: compare_markdown(found, chosen=chosen))  # fmt: skip
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
        raise ExitStatus(SLOWER)


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
    output.hint(f"next: haiprof compare --traces {before} {after}")


def parse_runs(runs: list[Path], baseline: str | None) -> tuple[str, Path | None]:
    """The baseline, and the run; None for the newest one here.

    Raises:
        UsageError: Neither two runs nor one with --baseline.
        RunNotFoundError: No run begins as the first one is named.
    """
    if len(runs) <= 1 and baseline is not None:
        return baseline, (runs[0] if runs else None)
    if len(runs) == 2 and baseline is None:
        try:
            named = str(whole_path(runs[0]))
        except RunNotFoundError as first:
            try:
                whole_path(runs[1])
            except RunNotFoundError as second:
                raise RunNotFoundError(f"{first}; {second}", hint=first.hint) from None
            raise
        return (f"./{named}" if named == LAST_GOOD else named), runs[1]  # here it is a folder
    raise UsageError(
        "compare: name a baseline and a run, or a run with --baseline",
        hint="haiprof compare BEFORE AFTER, or haiprof compare RUN --baseline last-good",
    )
