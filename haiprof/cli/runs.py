"""`haiprof verdict overview`, `rank` and `lines`, `goodput` and `ls`: recorded runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.cli import shared
from haiprof.cli.command_line import argument, option
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.run_analysis.run_frames import RunFrames


def overview(
    directory: Path | None = shared.RUN_DIR,
    output: Output = shared.OUTPUT,
    html: Path | None = shared.HTML_FILE,
) -> None:
    """Show the whole job: per rank the steps and their time split, CPU, memory, traffic, GPU.

    Also works while the job runs. What was not measured is a dash, with the reason below.

    For example:

      haiprof verdict overview                            the newest run of the log directory
      haiprof verdict overview haiprof-logs/train-...     that run
      haiprof verdict overview --html overview.html       interactive, in one file
      haiprof verdict overview --json | jq '.ranks[].median_step_ns'
    """
    from haiprof.show.summary import overview_summary
    from haiprof.show.views.run import overview_view

    analyzer = shared.open_target(directory)
    summary = overview_summary(analyzer)
    if html is not None:
        _write_part(html, analyzer, output)
    output.show(lambda width: overview_view(summary, width=width), summary.as_json())
    output.hint(f"next: haiprof verdict rank {shlex.quote(str(summary.run.path))} 0")


def _write_part(html: Path, analyzer: RunFrames, output: Output, **part: Any) -> None:  # noqa: ANN401
    from haiprof.show.figures.style import write_text
    from haiprof.show.page.render import page_part

    output.hint(f"wrote {write_text(html, page_part(analyzer, **part))}")


def rank(
    words: list[str] | None = argument(
        "[DIR] [RANK]",
        "A run or log directory and a rank, in either order. Left out: rank 0 of the newest run.",
    ),
    number: int | None = shared.RANK,
    output: Output = shared.OUTPUT,
    html: Path | None = shared.HTML_FILE,
) -> None:
    """Show one rank over time: each phase's statistics, the slowest steps, pauses, its counters.

    For example:

      haiprof verdict rank 0                              rank 0 of the newest run
      haiprof verdict rank haiprof-logs/train-... 3       rank 3 of that run
      haiprof verdict rank 0 --html rank0.html            interactive, in one file
      haiprof verdict rank 0 --json | jq '.slowest'
    """
    directory, chosen = parse_rank_words("rank", words or [], number)
    analyzer = shared.open_target(directory)
    chosen = 0 if chosen is None else chosen
    from haiprof.show.rank_summary import one_rank_summary
    from haiprof.show.views.run import rank_view

    summary = one_rank_summary(analyzer, chosen)
    if html is not None:
        _write_part(html, analyzer, output, rank=chosen)
    output.show(lambda _: rank_view(summary), asdict(summary))
    output.hint(f"next: haiprof verdict {shlex.quote(str(summary.run.path))}")


def parse_rank_words(
    command: str, words: Sequence[str], number: int | None = None
) -> tuple[Path | None, int | None]:
    """A run and a rank in either order as (directory, rank); None where none is named."""
    numbers = [word for word in words if word.isdecimal() and not Path(word).is_dir()]
    numbers += [] if number is None else [str(number)]
    targets = [word for word in words if word not in numbers]
    if len(numbers) > 1 or len(targets) > 1:
        raise UsageError(
            f"{command} {' '.join(words)}: expected a directory and a rank",
            hint=f"haiprof verdict {command} haiprof-logs 0",
        )
    target = Path(targets[0]) if targets else None
    return target, int(numbers[0]) if numbers else None


def lines(
    words: list[str] | None = argument(
        "[DIR] [RANK]",
        "A run or log directory and a rank, in either order. Left out: all ranks of the newest "
        "run.",
    ),
    number: int | None = option("--rank RANK", "Only this rank."),
    phase: str | None = option(
        "--phase PHASE",
        "Only this position of the step: input, prepare (before forward), forward, loss, backward, "
        "gradients (before optimizer), optimizer, after_step (after optimizer), evaluation, "
        "checkpoint, compile, between_steps; or only worker, worker_waiting, other_threads.",
    ),
    html: Path | None = shared.HTML_FILE,
    baseline: str | None = shared.BASELINE,
    speedscope: Path | None = option(
        "--speedscope FILE",
        "Write all stacks for https://www.speedscope.app (it runs in the browser alone).",
    ),
    collapsed: Path | None = option(
        "--collapsed FILE",
        "Write all stacks as lines `frame;frame COUNT`, for flamegraph.pl and others.",
    ),
    force: bool = option("--force", "Replace a file that already exists."),
    output: Output = shared.OUTPUT,
) -> None:
    """Show which lines of your code take the time, by rank and position, as they were sampled.

    haiprof looks at the training thread's Python stack up to 100 times a second (less often
    later), and at those of DataLoader workers. `itself` is the share of time in which a line was
    the innermost one of your code: it ran, or a library that it called. `with what it calls` counts
    all time that has the line anywhere, `per step` is what it takes itself of the mean step, as in
    the verdict; samples that waited for a core or for other ranks are counted, and are no line's
    time. Libraries are not listed; --html draws them as a flame graph by rank and position, with
    --baseline also against another run; --speedscope and --collapsed have all stacks.

    For example:

      haiprof verdict lines                               the newest run
      haiprof verdict lines --phase worker                what DataLoader workers do
      haiprof verdict lines --rank 3 --phase after_step   rank 3, between optimizer and next batch
      haiprof verdict lines --html lines.html             a flame graph, in one file
      haiprof verdict lines --speedscope stacks.json      for speedscope
      haiprof verdict lines --json | jq '.lines[0]'
    """
    from haiprof.base.safe_files import output_file
    from haiprof.live.external_sampling import read_samples
    from haiprof.run_analysis import flame_graph as stack_export
    from haiprof.show.flame import LINE_PARTS, sampled_lines
    from haiprof.show.run_header import manifest_or_none, run_header
    from haiprof.show.views.requests import sampled_run_view
    from haiprof.show.views.run import lines_view

    if phase is not None and phase not in LINE_PARTS:
        raise UsageError(f"--phase {phase}: no such phase", hint=f"one of {', '.join(LINE_PARTS)}")
    directory, rank = parse_rank_words("lines", words or [], number)
    analyzer = shared.open_target(directory)
    ranks = sorted(set(analyzer.ranks()["rank"]))
    if rank is not None and rank not in ranks:
        known = f"its ranks: {', '.join(map(str, ranks))}"
        raise MissingDataError(f"the run has no rank {rank}", hint=known)
    samples, found, notes = sampled_lines(analyzer, rank, phase)
    of_run = partial(stack_export.speedscope, name=analyzer.run.root.name)
    for path, export in ((speedscope, of_run), (collapsed, stack_export.collapsed_lines)):
        if path is not None:
            with output_file(path, force=force) as file:
                file.write(export(samples))
            output.hint(f"wrote {path}")
    if html is not None:
        from haiprof.show.page.render import write_lines_page  # 0.3 s

        output.hint(f"wrote {write_lines_page(analyzer, html, baseline=baseline)}")
    elif baseline is not None:
        raise UsageError("--baseline needs --html FILE: both runs are drawn there, side by side")
    data = {"run": str(analyzer.run.root), "lines": found.to_dicts(), "notes": list(notes)}
    if seen := read_samples(analyzer.run):
        header = run_header(analyzer.run, manifest_or_none(analyzer.run))
        data["sampled_from_outside"] = [asdict(each) for each in seen]
        output.show(lambda _: sampled_run_view(seen, header, analyzer), data)
    else:
        output.show(lambda _: lines_view(found, notes), data)


def goodput(
    runs: list[Path] | None = argument(
        "[JOB|RUN...]",
        "A run, or a log directory for its newest one: all runs of its job are joined. Several "
        "runs: exactly these. Left out: the newest run of the log directory that a job started "
        "here would write to.",
    ),
    output: Output = shared.OUTPUT,
    form: shared.Form = shared.OUTPUT_FORM,
) -> None:
    """Show where a job's wall time went, from its first start to its last end: it adds up to 100 %.

    Steps that count, input, evaluation, checkpoints, compilation, init and import, waiting for
    ranks, hangs, lost steps, drain, and the queue between runs. Each moment is in one account, and
    what is in none is shown.

    Runs of one job are joined: those with the same --run-id, else with the same command in the same
    job of Slurm, else in the same folder up to a run that ended well. Restarts by torchrun are
    starts inside a run.

    Lost steps were trained in vain: a later start went on from an older checkpoint. Which one is
    told by the file that it read: when it had been written. Where no such file was seen, the steps
    before it are steps that may be lost, and goodput lies between two shares; but those of a run
    that ended with status 0 count.

    For example:

      haiprof goodput                             the job of the newest run
      haiprof goodput haiprof-logs/train-7-3      all runs of that run's job
      haiprof goodput train-41 train-42           these two runs, one after the other
      haiprof goodput --json | jq '.accounts.lost_steps / .wall_ns'
      haiprof goodput --format markdown > ticket.md
    """
    from haiprof.diagnosis.restart_advice import job_goodput, runs_of_job
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run
    from haiprof.show.views.deaths import goodput_data, goodput_markdown, goodput_view

    named = [newest_run(shared.whole_path(run)) for run in runs or [shared.existing_log_dir()]]
    folders, joined = runs_of_job(RunPaths(named[0])) if len(named) == 1 else (named, "as named")
    joined = joined if len(folders) > 1 else ""
    found = job_goodput(list(dict.fromkeys(folders)))
    output = Output(json=output.json or form == "json", markdown=form == "markdown")
    output.show(
        lambda _: goodput_view(found, joined=joined),
        goodput_data(found, folders, joined=joined),
        lambda: goodput_markdown(found, joined=joined),
    )
    output.hint(f"next: haiprof verdict {shlex.quote(str(folders[-1]))}")


LIMIT_S = 0.5


def list_runs(
    directory: Path | None = argument(
        "DIR", "A log directory. Left out: the one that a job started here would write to."
    ),
    everything: bool = option(
        "--all",
        "Count the steps of every run, however many there are. Left out: of as many of the "
        "newest as half a second allows; what was counted once is kept in the run.",
    ),
    job: Path | None = option(
        "--job RUN",
        "Only runs of the same job as RUN: the same script and arguments, however launched, or the "
        "same --run-id.",
    ),
    nodes: bool = option(
        "--nodes",
        "Instead of runs, the nodes that verdicts of runs and kept preflights named: how often, "
        "and as what.",
    ),
    output: Output = shared.OUTPUT,
) -> None:
    """List the runs in a log directory, newest last: start, ranks, steps, state, exit status.

    `each` is the mean step, where a verdict was kept at the end of the run: with --job, step time
    over weeks. `haiprof ls --live` watches the jobs that run now, and has a --help of its own.

    For example:

      haiprof ls                      runs below the default log directory
      haiprof ls /shared/haiprof      runs below that one
      haiprof ls --job train-7-3      step time of that run's job over weeks
      haiprof ls --nodes              which nodes were named how often
      haiprof ls --json | jq -r '.runs[-1].path'
    """
    log_dir = directory if directory is not None else shared.existing_log_dir()
    if nodes:
        if everything or job is not None:
            raise UsageError("ls --nodes is of all runs: --all and --job do not go with it")
        from haiprof.diagnosis.named_nodes import read_named_nodes
        from haiprof.show.views.node import named_nodes_view

        named = read_named_nodes(log_dir)
        data = {"log_dir": log_dir, **asdict(named)}
        output.show(lambda _: named_nodes_view(log_dir, named), data)
        return
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run, read_manifest
    from haiprof.show.run_list import list_view, run_list

    own = None if job is None else read_manifest(RunPaths(newest_run(shared.whole_path(job))))
    runs = run_list(log_dir, limit_s=None if everything else LIMIT_S, job=own)
    output.show(lambda _: list_view(log_dir, runs), {"log_dir": log_dir, "runs": runs})
    if runs:
        output.hint(f"next: haiprof verdict {shlex.quote(str(runs[-1].path))}")
