"""`haiprof trace what-if`: the step's time if something were faster."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import (
    AsJson,
    Cluster,
    ReadProgress,
    StepRange,
    Window,
    parse_cluster,
    parse_steps,
)
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import existing_log_dir, trace_target
from haiprof.cli.trace_check import print_faults

if TYPE_CHECKING:
    from haiprof.trace_analysis.what_if.replay_parts import Change

Source = Annotated[
    Path,
    Arg(
        "[TRACES_OR_RUN]",
        "A trace, a folder with one file per rank, a run directory with traces, or a table of "
        "a pipelined job's operations (.parquet), or a folder of such.",
        callback=trace_target,
        factory=existing_log_dir,
    ),
]
Faster = Annotated[
    list[str] | None,
    Opt(
        "--faster WHAT[:SPEED]",
        "kernel=NAME, operator=NAME, collective=NAME (regular expressions), loader, network, "
        "launches, each with how many times as fast (:2x; without it: takes no time); rank=R "
        "or ranks: as fast as the others. 'A and B' is both together. May be given several "
        "times.",
    ),
]
_NAMED, _PLAIN = ("kernel", "operator", "collective"), ("loader", "network", "launches")
_HINT = "--faster kernel=gemm:2x, operator=aten::conv2d, loader:2x, network:2x, launches:2x, rank=3"


def what_if(
    source: Source,
    faster: Faster = None,
    steps: StepRange = None,
    window: Window = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Predict the step's time if something were faster; alone: what would help most.

    The step is replayed from what waits for what: calls, launches, kernels, streams,
    collectives of all ranks. First as it was, with the error; then with each change.

    For example:

      haiprof trace what-if traces/                              what would help most
      haiprof trace what-if traces/ --faster loader:2x --faster "kernel=gemm:1.5x"
      haiprof trace what-if traces/ --faster rank=3              rank 3 as fast as the others
      haiprof trace what-if traces/ --faster "loader:2x and operator=aten:2x"     both together
      haiprof trace what-if job.parquet                          what a job's stragglers cost
    """
    from haiprof.show.views.causes import (
        job_answers,
        job_data,
        job_view,
        what_if_answers,
        what_if_data,
        what_if_view,
    )
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
    from haiprof.trace_analysis.what_if.operations import operation_files

    changes = [parse_change(text) for text in faster or ()]
    chosen, pool = parse_steps(steps), parse_cluster(cluster)
    output = Output(json=as_json)
    if tables := operation_files(source):
        if faster or steps or cluster or window is not None:
            raise UsageError(
                f"{source}: a table of operations is replayed whole",
                hint="leave --faster, --steps, --window and --cluster out",
            )
        jobs = [job_answers(path) for path in tables]
        output.show(lambda _: job_view(jobs), job_data(jobs))
        return
    with ReadProgress(quiet=as_json):
        answers = what_if_answers(source, changes, steps=chosen, window=window, pool=pool)
        analysis = TraceQuestions(source, window=window, pool=pool)
        faults = print_faults(output, analysis, "what-if")
    output.show(lambda _: what_if_view(answers), what_if_data(answers) | {"faults": faults})


def parse_change(text: str) -> Change:
    """Parses a change such as `kernel=gemm:2x`, or several with `and` between them.

    Raises:
        UsageError: It is anything else.
    """
    from haiprof.trace_analysis.what_if.replay_parts import together

    parts = [_parse_one(part) for part in text.split(" and ")]
    return parts[0] if len(parts) == 1 else together(*parts)


def _parse_one(text: str) -> Change:
    from haiprof.trace_analysis.what_if.replay_parts import (
        RANK,
        Change,
        faster_loader,
        rank_as_others,
    )

    found = re.fullmatch(r"(\w+)(?:=(.+?))?(?::([0-9.]+(?:e[0-9]+)?)x)?", text, re.DOTALL)
    if found is None:
        raise UsageError(f"--faster {text}: not understood", hint=_HINT)
    kind, name, speed = found.groups()
    speedup = _speedup(speed, text)
    if kind in _NAMED and name:
        return Change(kind=kind, name=name, speedup=speedup)
    if kind in _PLAIN and name is None:
        return faster_loader(speedup) if kind == "loader" else Change(kind=kind, speedup=speedup)
    if kind == RANK and name and name.isdecimal() and speed is None:
        return rank_as_others(int(name))
    if kind == "ranks" and name is None and speed is None:
        return rank_as_others()
    raise UsageError(f"--faster {text}: not understood", hint=_HINT)


def _speedup(text: str | None, whole: str) -> float:
    try:
        return math.inf if text is None else float(text)
    except ValueError:
        raise UsageError(f"--faster {whole}: {text} is no number", hint=_HINT) from None
