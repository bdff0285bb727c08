"""`haiprof compare`: two runs, or the traces of two, slower or not and by what."""

from __future__ import annotations

import shlex
from pathlib import Path

from haiprof.base.errors import MissingDataError, RunNotFoundError, UsageError
from haiprof.cli import shared
from haiprof.cli.command_line import ExitStatus, argument, option
from haiprof.cli.output import Output
from haiprof.cli.trace_causes import print_faults

LAST_GOOD = "last-good"


def compare(
    runs: list[Path] | None = argument(
        "[BASELINE] RUN",
        "The run before and the new one; or the new one alone, with --baseline. A log "
        "directory stands for its newest run; left out: the log directory of a job started "
        "here.",
    ),
    baseline: str | None = option(
        "--baseline DIR|last-good|median",
        "What RUN is compared with. last-good: the newest earlier run in the same log "
        "directory with the same name and number of ranks that ended with exit status 0 and "
        "was not itself found slower; the result is kept in RUN/report/compare.json. median: of "
        "the 100 newest such runs of the same job (the same script and arguments, or --run-id), "
        "slower or not, the one with the median mean step.",
    ),
    fail_if_slower: str | None = option(
        "--fail-if-slower PERCENT",
        "End with status 10 where the mean step is longer by more than this and the interval "
        "excludes 0, and with 5 where that cannot be judged (too few steps, an interval from "
        "below 0 to beyond the limit, other load). For continuous integration.",
    ),
    from_step: int | None = option(
        "--from-step N", "Compare the steps of RUN from step N on with those before it.", low=1
    ),
    output: Output = shared.OUTPUT,
    form: shared.Form = shared.OUTPUT_FORM,
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
      haiprof compare haiprof-logs --baseline median       the newest run against its job's others
      haiprof compare before after --format markdown > comment.md
      haiprof compare before after --json | jq .verdict
      haiprof compare run --from-step 412         what made steps slower within one run
      haiprof compare a.json b.json               what changed on the GPU
    """
    from haiprof.base.units import ratio_text
    from haiprof.diagnosis.compare import compared_run
    from haiprof.diagnosis.compare.comparison import compare_runs, compare_steps, exceeds
    from haiprof.show.views import compare as views

    output = Output(json=output.json or form == "json", markdown=form == "markdown")
    limit = parse_percent(fail_if_slower)
    if from_step is not None:
        if len(runs or []) > 1 or baseline is not None or limit is not None:
            raise UsageError("compare: --from-step goes with one run, and no other option")
        found = compare_steps(shared.open_target(runs[0] if runs else None), from_step)
        output.show(lambda _: views.compare_view(found), views.compare_data(found))
        return
    first, last = parse_runs(runs or [], baseline)
    before_traces, after_traces = shared.named_traces(first), shared.named_traces(last)
    if before_traces and after_traces:
        if limit is None:
            _show_traces(before_traces, after_traces, output)
        elif output.markdown:
            raise UsageError("--fail-if-slower of traces has no Markdown",
                             hint="haiprof compare A B --format markdown")  # fmt: skip
        else:
            trace_diff(
                before_traces, after_traces, fail_if_slower, steps=None, test_steps=None,
                window=None, short_names=False, geometry=False, output=output,
            )  # fmt: skip
        return
    if before_traces or after_traces:
        raise UsageError(
            f"compare: {before_traces or after_traces} is a trace, and "
            f"{last if before_traces else first} is a run",
            hint="name two runs or two traces",
        )
    after = compared_run.open_compared_run(shared.open_target(last))
    before = compared_run.baseline_named(first, after)
    found, chosen = compare_runs(before.side, after), before.why
    data = views.compare_data(found, chosen=chosen, of=before.of)
    is_noted = baseline == LAST_GOOD
    if is_noted and not compared_run.note_outcome(after, data):
        output.hint(f"cannot note the outcome in {after.path}")
    output.show(lambda _: views.compare_view(found, chosen=chosen), data,
                lambda: views.compare_markdown(found, chosen=chosen))  # fmt: skip
    if limit is None:
        return
    decided = exceeds(found, limit)
    if decided is None:
        raise MissingDataError(
            f"--fail-if-slower cannot be decided: {views.headline(found)}",
            hint=views.what_would_decide(found),
        )
    if decided:
        output.hint(f"slower than {ratio_text(limit)}: exit status {SLOWER}")
        if is_noted:
            output.hint(f"if that is meant: remove {after.analyzer.run.comparison_json}, and this "
                        "run is the next one's baseline")  # fmt: skip
        raise ExitStatus(SLOWER)


def _show_traces(before: Path, after: Path, output: Output) -> None:
    from haiprof.show.views.compare import device_comparison_data, device_comparison_view
    from haiprof.trace_analysis.device_verdict import device_ledger
    from haiprof.trace_analysis.diff import compare_devices

    with shared.ReadProgress(quiet=output.json) as waiting:
        sides = [device_ledger(path, progress=waiting) for path in (before, after)]
    found = compare_devices(*sides)
    output.show(
        lambda width: device_comparison_view(found, width=width), device_comparison_data(found)
    )
    output.hint(f"next: haiprof compare --traces {shlex.join([str(before), str(after)])}")


def parse_runs(runs: list[Path], baseline: str | None) -> tuple[str, Path | None]:
    """The baseline, and the run; None for the newest one here."""
    if len(runs) <= 1 and baseline is not None:
        return baseline, (runs[0] if runs else None)
    if len(runs) == 2 and baseline is None:
        try:
            named = str(shared.whole_path(runs[0]))
        except RunNotFoundError as first:
            try:
                shared.whole_path(runs[1])
            except RunNotFoundError as second:
                raise RunNotFoundError(f"{first}; {second}", hint=first.hint) from None
            raise
        return (f"./{named}" if named == LAST_GOOD else named), runs[1]  # here it is a folder
    raise UsageError(
        "compare: name a baseline and a run, or a run with --baseline",
        hint="haiprof compare BEFORE AFTER, or haiprof compare RUN --baseline last-good",
    )


SLOWER = 10  # Exit status of `--fail-if-slower`, which no error of haiprof has

_LEAST_PERCENT = 1.0
"""A smaller number without % is more likely a ratio: no comparison resolves so little."""


def trace_diff(
    control: Path = argument(
        "CONTROL",
        "Traces from before; of a log directory, its newest run.",
        callback=shared.trace_target,
    ),
    test: Path = argument(
        "TEST",
        "Traces from after; of a log directory, its newest run.",
        callback=shared.trace_target,
    ),
    fail_if_slower: str | None = option(
        "--fail-if-slower PERCENT",
        "End with status 10 where steps are slower by more than this and not by chance, and "
        "with 5 if that cannot be judged; for continuous integration.",
    ),
    steps: str | None = shared.STEP_RANGE,
    test_steps: str | None = option("--test-steps A:B", "Steps of TEST, where they differ."),
    window: int | None = shared.WINDOW,
    short_names: bool = option("--short-names", "Kernels without template arguments are one."),
    geometry: bool = shared.GEOMETRY,
    output: Output = shared.OUTPUT,
) -> None:
    """Compare traces from before and after, step by step and name by name.

    Says whether steps are slower, whether that can be chance (Mann-Whitney U test
    over steps, at least four on each side), and which kernels and operators make
    the difference.

    For example:

      haiprof compare --traces before/ after/
      haiprof compare --traces before/ after/ --fail-if-slower 5%
      haiprof compare --traces a100.json h100.json --short-names
      haiprof compare --traces before/ after/ --json | jq .verdict
    """
    from haiprof.show.views.causes import diff_data, diff_view
    from haiprof.trace_analysis.diff import verdict
    from haiprof.trace_analysis.kernel_names import FULL, SHORT
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    tolerance = parse_percent(fail_if_slower)
    chosen = shared.parse_steps(steps)
    before, after = (TraceQuestions(path, window=window) for path in (control, test))
    with shared.ReadProgress(quiet=output.json):
        found = before.diff(
            after, names=SHORT if short_names else FULL, geometry=geometry, steps=chosen,
            other_steps=shared.parse_steps(test_steps) or chosen,
        )  # fmt: skip
    of_each = [print_faults(output, each, "kernels", "steps") for each in (before, after)]
    faults = [*of_each[0], *of_each[1]]
    said = verdict(found, tolerance_ratio=tolerance or 0.0)
    output.show(lambda _: diff_view(found, said), diff_data(found, said) | {"faults": faults})
    if tolerance is None:
        return
    if said.is_slower is None:
        raise MissingDataError(f"--fail-if-slower cannot be decided: {said.text}")
    if said.is_slower:
        raise ExitStatus(SLOWER)


def parse_percent(text: str | None) -> float | None:
    """`5%` or `5` as 0.05; raises UsageError for anything else."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1000:
        raise UsageError(f"--fail-if-slower {text}: expected percent", hint="--fail-if-slower 5%")
    if 0 < value < _LEAST_PERCENT and not text.endswith("%"):
        raise UsageError(
            f"--fail-if-slower {text}: {text} percent, or {100 * value:g}?",
            hint=f"--fail-if-slower {100 * value:g}%",
        )
    return value / 100
