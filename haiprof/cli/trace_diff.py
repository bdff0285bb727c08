"""`haiprof compare --traces`: is a job slower than before, and what makes the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.cli.arguments import (
    AsJson,
    Geometry,
    ReadProgress,
    StepRange,
    Window,
    parse_steps,
)
from haiprof.cli.command_line import Arg, ExitStatus, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import trace_target
from haiprof.cli.trace_check import print_faults

SLOWER = 10
"""Exit status of `--fail-if-slower`, which no error of haiprof has."""

_LEAST_PERCENT = 1.0
"""A smaller number without % is more likely a ratio: no comparison resolves so little."""

Control = Annotated[
    Path,
    Arg(
        "CONTROL", "Traces from before; of a log directory, its newest run.", callback=trace_target
    ),
]
Test = Annotated[
    Path,
    Arg("TEST", "Traces from after; of a log directory, its newest run.", callback=trace_target),
]
Tolerance = Annotated[
    str | None,
    Opt(
        "--fail-if-slower PERCENT",
        "End with status 10 where steps are slower by more than this and not by chance, and "
        "with 5 if that cannot be judged; for continuous integration.",
    ),
]
TestSteps = Annotated[str | None, Opt("--test-steps A:B", "Steps of TEST, where they differ.")]
Short = Annotated[bool, Opt("--short-names", "Kernels without template arguments are one.")]


def trace_diff(
    control: Control,
    test: Test,
    fail_if_slower: Tolerance = None,
    steps: StepRange = None,
    test_steps: TestSteps = None,
    window: Window = None,
    short_names: Short = False,
    geometry: Geometry = False,
    as_json: AsJson = False,
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
    chosen = parse_steps(steps)
    output = Output(json=as_json)
    before, after = (TraceQuestions(path, window=window) for path in (control, test))
    with ReadProgress(quiet=as_json):
        found = before.diff(
            after,
            names=SHORT if short_names else FULL,
            geometry=geometry,
            steps=chosen,
            other_steps=parse_steps(test_steps) or chosen,
        )
    faults = [
        line
        for analysis in (before, after)
        for line in print_faults(output, analysis, "kernels", "steps")
    ]
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
