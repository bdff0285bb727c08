"""`haiprof verdict lines`: which lines of the job's code take the time, by rank and position."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson, HtmlFile, RunDir
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output
from haiprof.cli.report import Baseline
from haiprof.cli.target import open_target

OneRank = Annotated[int | None, Opt("--rank RANK", "Only this rank.")]
OnePhase = Annotated[
    str | None,
    Opt(
        "--phase PHASE",
        "Only this position of the step: input, prepare, forward, loss, backward, gradients, "
        "optimizer, after_step, evaluation, checkpoint, compile, between_steps; or only "
        "worker, worker_waiting, other_threads.",
    ),
]
SpeedscopeFile = Annotated[
    Path | None,
    Opt(
        "--speedscope FILE",
        "Write all stacks for https://www.speedscope.app (it runs in the browser alone).",
    ),
]
CollapsedFile = Annotated[
    Path | None,
    Opt(
        "--collapsed FILE",
        "Write all stacks as lines `frame;frame COUNT`, for flamegraph.pl and others.",
    ),
]
Force = Annotated[bool, Opt("--force", "Replace a file that already exists.")]


def lines(
    directory: RunDir = None, rank: OneRank = None, phase: OnePhase = None,
    html: HtmlFile = None, baseline: Baseline = None, speedscope: SpeedscopeFile = None,
    collapsed: CollapsedFile = None, force: Force = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show which lines of your code take the time, by rank and position, as they were sampled.

    haiprof looks at the training thread's Python stack up to 100 times a second (less often
    later), and at those of DataLoader workers. `itself` is the share of samples in which a line was
    the innermost one of your code: it ran, or a library that it called. `with what it calls` counts
    all samples that have the line anywhere, `per step` is its time in the mean step, as in the
    verdict. Libraries are not listed; --html draws them as a flame graph by rank and position, with
    --baseline also against another run; --speedscope and --collapsed have all stacks.

    For example:

      haiprof verdict lines                               the newest run
      haiprof verdict lines --phase worker                what DataLoader workers do
      haiprof verdict lines --rank 3 --phase after_step   rank 3, between optimizer and next batch
      haiprof verdict lines --html lines.html             a flame graph, in one file
      haiprof verdict lines --speedscope stacks.json      for speedscope
      haiprof verdict lines --json | jq '.lines[0]'
    """
    from haiprof.run_analysis import flame_graph as stack_export
    from haiprof.show.flame import LINE_PARTS, sampled_lines
    from haiprof.show.views.run import lines_view

    if phase is not None and phase not in LINE_PARTS:
        raise UsageError(f"--phase {phase}: no such phase", hint=f"one of {', '.join(LINE_PARTS)}")
    analyzer = open_target(directory)
    samples, found, notes = sampled_lines(analyzer, rank, phase)
    output = Output(json=as_json)
    if speedscope is not None:
        _write(speedscope, stack_export.speedscope(samples, name=analyzer.run.root.name), force)
        output.hint(f"wrote {speedscope}")
    if collapsed is not None:
        _write(collapsed, stack_export.collapsed_lines(samples), force)
        output.hint(f"wrote {collapsed}")
    if html is not None:
        from haiprof.show.page.render import write_lines_page  # 0.3 s

        output.hint(f"wrote {write_lines_page(analyzer, html, baseline=baseline)}")
    elif baseline is not None:
        raise UsageError("--baseline needs --html FILE: both runs are drawn there, side by side")
    data = {"run": str(analyzer.run.root), "lines": found.to_dicts(), "notes": list(notes)}
    output.show(lambda _: lines_view(found, notes), data)


def _write(path: Path, content: bytes, force: bool) -> None:
    from haiprof.base.output_file import output_file

    with output_file(path, force=force) as file:
        file.write(content)
