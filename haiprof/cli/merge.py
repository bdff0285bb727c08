"""`haiprof export --to merged`: all ranks in one timeline, for Perfetto and chrome://tracing."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.base.messages import print_message
from haiprof.cli.arguments import AsJson, ReadProgress, StepRange, Window, parse_ranks, parse_steps
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import existing_log_dir, trace_target

Sources = Annotated[
    list[Path] | None,
    Arg(
        "[RUN_OR_TRACES]...",
        "A run or log directory, a folder with one trace per rank, or trace files. Left out: "
        "the newest run.",
    ),
]
OutputFile = Annotated[
    Path | None,
    Opt(
        "-o --output FILE",
        "Where to write; packed where it ends in .gz. `-` is standard output, as text. Left "
        "out: merged.json.gz in the run directory, or here.",
    ),
]
Force = Annotated[bool, Opt("-f --force", "Replace FILE if it already exists.")]
Ranks = Annotated[str | None, Opt("--ranks LIST", "Only these, such as 0,3-5.")]
WallClocks = Annotated[
    bool,
    Opt("--wall-clocks", "Take hosts' clocks as they are; left out: compare them by collectives."),
]
NoCounters = Annotated[bool, Opt("--no-counters", "Leave the run's counters out.")]
NoPhases = Annotated[bool, Opt("--no-phases", "Leave haiprof's phases out.")]
_EVERY_S = 2.0


def merge(
    sources: Sources = None,
    output: OutputFile = None,
    steps: StepRange = None,
    ranks: Ranks = None,
    window: Window = None,
    wall_clocks: WallClocks = False,
    no_counters: NoCounters = False,
    no_phases: NoPhases = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write all ranks' traces into one timeline, each with lanes of its own.

    Clocks of different hosts are compared by the ends of collectives, and moved
    only where these show more than their own spread. From a run directory its
    counters and haiprof's phases become tracks beside the ranks' lanes.

    For example:

      haiprof export --to merged profiling_result/train-20261121 -o merged.json.gz
      haiprof export --to merged traces/ --ranks 0,3-5 --steps 100:102 -o some.json.gz
      haiprof export --to merged rank0.json rank1.json -o - | jq '.traceEvents | length'
    """
    from haiprof.show.servers import has_viewer
    from haiprof.show.views.trace_files import merge_view
    from haiprof.trace_analysis.merge import MergeOptions, default_output, merge_traces

    sources = [trace_target(source) for source in sources or [existing_log_dir()]]
    output = output or default_output(sources)
    to_stdout = str(output) == "-"
    if to_stdout and as_json:
        raise UsageError("merge: -o - and --json both write to standard output; give one")
    options = MergeOptions(
        ranks=parse_ranks(ranks),
        steps=parse_steps(steps),
        window=window,
        by_collectives=not wall_clocks,
        counters=not no_counters,
        phases=not no_phases,
        force=force,
    )
    out = Output(json=as_json)
    one_pass = wall_clocks and steps is None
    with ReadProgress(quiet=as_json or one_pass) as waiting:
        report = merge_traces(
            sources, output, options, reading=waiting, writing=_WriteProgress(quiet=as_json)
        )
    for line in report.faults:
        out.hint(f"warning: {line}")
    if to_stdout:
        for note in report.notes:
            print_message(note)
        return
    out.show(lambda _: merge_view(report), report.as_json())
    name = shlex.quote(str(output))
    viewer = f"haiprof export --to perfetto {name}"
    out.hint(f"next: {viewer if has_viewer() else f'open {name} at https://ui.perfetto.dev'}")


class _WriteProgress:
    """Reports the progress of the output on stderr every two seconds.

    Args:
        quiet: Whether to print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._start_s = self._said_s = time.monotonic()
        self._done_bytes: dict[int, int] = {}

    def __call__(self, rank: int, text_bytes: int) -> None:
        """Called with how much of a rank's text is in the output."""
        if not self._done_bytes:
            self._start_s = self._said_s = time.monotonic()
        self._done_bytes[rank] = text_bytes
        now_s = time.monotonic()
        if not self._quiet and now_s - self._said_s >= _EVERY_S:
            self._said_s = now_s
            megabytes = sum(self._done_bytes.values()) / 1e6
            rate = megabytes / (now_s - self._start_s)
            print_message(f"merging rank {rank}: {megabytes:.0f} MB, {rate:.0f} MB/s")
