"""`haiprof trace efficiency`, `critical-path`, `what-if`, `memory`, `check`, `flight-recorder`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.base.errors import UsageError
from haiprof.cli import shared
from haiprof.cli.command_line import ExitStatus, argument, option
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
    from haiprof.trace_analysis.what_if.replay import Change


def trace_check(
    traces: Path = shared.TRACES, window: int | None = shared.WINDOW, output: Output = shared.OUTPUT
) -> None:
    """Show what is wrong with the recording of traces, and what becomes of the answers.

    Kernels with impossible ends, clocks that differ, records that were lost, events
    that were recorded twice, wrong units, missing ranks. Exit status 0 if nothing is
    wrong, else 1. What looks odd but is right is listed, too.

    For example:

      haiprof trace check traces/
      haiprof trace check trace.json.gz --json | jq '.findings[].check'
    """
    from haiprof.show.views.trace_files import check_view

    with shared.reading(traces, output, window=window) as analysis:
        checks, files = analysis.trace_check(), analysis.load_report()
    faults = int(checks["is_fault"].sum())
    output.show(
        lambda _: check_view(checks, files),
        {"path": str(traces), "fault_count": faults, "findings": checks.to_dicts()},
    )
    if faults:
        raise ExitStatus(1)


def print_faults(output: Output, analysis: TraceQuestions, *answers: str) -> list[str]:
    """Prints, before an answer, what is wrong with the recording that it rests on.

    A command's JSON has the lines as `faults`.
    """
    from haiprof.trace_analysis.files import check_frame, fault_lines

    lines = fault_lines(check_frame(analysis.files), answers)
    for line in lines:
        output.hint(f"warning: {line}")
    return lines


def efficiency(
    traces: Path = shared.TRACES, steps: str | None = shared.STEP_RANGE,
    peak: str | None = shared.PEAK_OPTION, formulas: Path | None = shared.FORMULAS_OPTION,
    window: int | None = shared.WINDOW, output: Output = shared.OUTPUT,
) -> None:  # fmt: skip
    """Show MFU and HFU of traced steps, and which operators are far from the roofline.

    FLOPs and bytes are computed from recorded shapes: traces need record_shapes.
    An operator without a formula stays unknown; the share of kernels that is known
    is shown.

    For example:

      haiprof trace efficiency traces/ --steps 10:13
      haiprof trace efficiency trace.json.gz --peak bf16=989.4,memory=3.35
      haiprof trace efficiency traces/ --formulas my_kernels.toml
      haiprof trace efficiency traces/ --json | jq '.steps[].mfu_ratio'
    """
    from haiprof.show.views.functions import efficiency_view
    from haiprof.trace_analysis.operator_efficiency import parse_peak
    from haiprof.trace_analysis.operator_work import read_formulas

    chosen, peaks, own = shared.parse_steps(steps), parse_peak(peak), read_formulas(formulas)
    with shared.reading(traces, output, window=window) as analysis:
        whole = analysis.step_efficiency(chosen, peaks=peaks, formulas=own)
        operators = analysis.efficiency(chosen, peaks=peaks, formulas=own)
    faults = print_faults(output, analysis, "efficiency")
    data = {"path": str(traces), "steps": whole, "operators": operators, "faults": faults}
    output.show(lambda _: efficiency_view(whole, operators), data)


def critical_path(
    traces: Path = shared.TRACES,
    rank: int | None = shared.RANK,
    steps: str | None = shared.STEP_RANGE,
    annotation: str | None = option(
        "--annotation NAME", "The window is a record_function range with this in its name."
    ),
    instance: int = option("--instance N", "Which of those ranges, from 0.", 0, low=0),
    overlay: Path | None = option(
        "--overlay DIR", "Write a copy of the trace with the path drawn in, for Perfetto."
    ),
    window: int | None = shared.WINDOW,
    output: Output = shared.OUTPUT,
) -> None:
    """Show what a step's time consists of: work of the host, of the GPU, and delays.

    A faster piece of the critical path makes the step shorter, until another path
    is the longest. What the trace does not record is assumed; each assumption is listed.

    For example:

      haiprof trace critical-path traces/ --rank 0 --steps 12
      haiprof trace critical-path trace.json --annotation forward --instance 3
      haiprof trace critical-path trace.json --steps 12 --overlay .
    """
    from haiprof.show.views.causes import critical_path_data, critical_path_view

    chosen = shared.parse_steps(steps)
    if chosen is not None and annotation is not None:
        raise UsageError("trace critical-path: --steps and --annotation are two windows; give one")
    with shared.reading(traces, output, window=window) as analysis:
        path = analysis.critical_path(rank, steps=chosen, annotation=annotation, instance=instance)
        if overlay is not None:
            written = analysis.overlay_critical_path(path, rank, folder=overlay)
            output.hint(f"wrote {written}")
    faults = print_faults(output, analysis, "critical-path")
    output.show(lambda _: critical_path_view(path), critical_path_data(path) | {"faults": faults})


_NAMED, _PLAIN = ("kernel", "operator", "collective"), ("loader", "network", "launches")
_HINT = "--faster kernel=gemm:2x, operator=aten::conv2d, loader:2x, network:2x, launches:2x, rank=3"


def what_if(
    source: Path = argument(
        "[TRACES_OR_RUN]",
        "A trace, a folder with one file per rank, a run directory with traces, or a table of "
        "a pipelined job's operations (.parquet), or a folder of such.",
        callback=shared.trace_target,
        factory=shared.existing_log_dir,
    ),
    faster: list[str] | None = option(
        "--faster WHAT[:SPEED]",
        "kernel=NAME, operator=NAME, collective=NAME (regular expressions), loader, network, "
        "launches, each with how many times as fast (:2x; without it: takes no time); rank=R "
        "or ranks: as fast as the others. 'A and B' is both together. May be given several "
        "times.",
    ),
    steps: str | None = shared.STEP_RANGE,
    window: int | None = shared.WINDOW,
    cluster: str | None = shared.CLUSTER,
    output: Output = shared.OUTPUT,
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
    from haiprof.show.views import causes as views
    from haiprof.trace_analysis.what_if.operations import operation_files

    changes = [parse_change(text) for text in faster or ()]
    chosen, pool = shared.parse_steps(steps), shared.parse_cluster(cluster)
    if tables := operation_files(source):
        if faster or steps or cluster or window is not None:
            raise UsageError(
                f"{source}: a table of operations is replayed whole",
                hint="leave --faster, --steps, --window and --cluster out",
            )
        jobs = [views.job_row(path) for path in tables]
        output.show(lambda _: views.job_view(jobs), {"jobs": jobs})
        return
    with shared.reading(source, output, window=window, pool=pool) as analysis:
        answers = views.what_if_answers(source, changes, steps=chosen, window=window, pool=pool)
        faults = print_faults(output, analysis, "what-if")
    output.show(
        lambda _: views.what_if_view(answers), views.what_if_data(answers) | {"faults": faults}
    )


def parse_change(text: str) -> Change:
    """Parses a change such as `kernel=gemm:2x`, or several with `and` between them."""
    from haiprof.trace_analysis.what_if.replay import together

    parts = [_parse_one(part) for part in text.split(" and ")]
    return parts[0] if len(parts) == 1 else together(*parts)


def _parse_one(text: str) -> Change:
    from haiprof.trace_analysis.what_if.replay import RANK, Change, faster_loader, rank_as_others

    found = re.fullmatch(r"(\w+)(?:=(.+?))?(?::([0-9.]+(?:e[0-9]+)?)x)?", text, re.DOTALL)
    if found is None:
        raise UsageError(f"--faster {text}: not understood", hint=_HINT)
    kind, name, speed = found.groups()
    try:
        speedup = math.inf if speed is None else float(speed)
    except ValueError:
        raise UsageError(f"--faster {text}: {speed} is no number", hint=_HINT) from None
    if kind in _NAMED and name:
        return Change(kind=kind, name=name, speedup=speedup)
    if kind in _PLAIN and name is None:
        return faster_loader(speedup) if kind == "loader" else Change(kind=kind, speedup=speedup)
    if kind == RANK and name and name.isdecimal() and speed is None:
        return rank_as_others(int(name))
    if kind == "ranks" and name is None and speed is None:
        return rank_as_others()
    raise UsageError(f"--faster {text}: not understood", hint=_HINT)


def memory_timeline(
    traces: Path = shared.TRACES, rank: int | None = shared.RANK,
    window: int | None = shared.WINDOW, output: Output = shared.OUTPUT,
) -> None:  # fmt: skip
    """Show memory over time and what was alive at the peak, by operator.

    It needs traces that were recorded with --trace-memory (torch.profiler: profile_memory=True).
    A snapshot of the CUDA allocator (torch.cuda.memory, a pickle, which is not executed) is shown
    by line, with the sizes of its free blocks; torch.profiler's own memory timeline by category.

    For example:

      haiprof trace memory trace.json
      haiprof trace memory traces/ --rank 3
      haiprof trace memory snapshot.pickle
      haiprof trace memory trace.json --json | jq '.at_peak[0]'
    """
    from haiprof.show.views import memory_timeline as views
    from haiprof.trace_analysis.memory_timeline import is_memory_timeline, memory_by_category
    from haiprof.trace_format.memory_snapshot import is_pickle

    if is_pickle(traces):
        snapshot = views.snapshot_answers(traces)
        output.show(lambda _: views.snapshot_view(snapshot), snapshot)
    elif is_memory_timeline(traces):
        timeline = memory_by_category(traces)
        data = {"timeline": timeline, "at_peak": views.categories_at_peak(timeline)}
        output.show(lambda _: views.category_view(timeline), data)
    else:
        with shared.reading(traces, output, window=window) as analysis:
            answers = views.memory_answers(analysis, rank)
        output.show(lambda _: views.memory_view(answers), answers)


def flight_recorder(
    dumps: list[Path] = argument(
        "DUMPS", "Files, one per rank, which end in the rank's number, or a folder; or NCCL's own."
    ),
    output: Output = shared.OUTPUT,
) -> None:
    """Name the collective that does not match, and the ranks, from dumps of the Flight Recorder.

    PyTorch's watchdog writes such dumps where a collective times out
    (TORCH_NCCL_DUMP_ON_TIMEOUT=1, TORCH_FR_BUFFER_SIZE=2000). Nothing in a pickle is executed.
    Where stacks were recorded, lines of your code are named. Without such dumps files of NCCL's
    Inspector (JSON or .prom) and of its example profiler plugin are read: numbers of the last
    collectives, bandwidth against the other ranks, and what the network proxy waited for.

    For example:

      haiprof trace flight-recorder /tmp/nccl_trace_rank_*
      haiprof trace flight-recorder dumps/ --json | jq '.findings[0]'
      haiprof trace flight-recorder nccl-inspector-4711/
    """
    from haiprof.run_analysis.nccl_witness import NcclReport, judge_files, ranks_behind
    from haiprof.show.views.trace_files import flight_view, nccl_view

    found = judge_files(dumps)
    if isinstance(found, NcclReport):
        named = ranks_behind(found)
        said = [f"rank {each.rank}: {each.why}" for each in named]
        ranks = list(dict.fromkeys(each.rank for each in named))
        data, view = {"findings": said, "ranks": ranks, **found.as_json()}, nccl_view(found)
    else:
        data = {"findings": found.findings, "ranks": found.ranks, "last": found.last}
        view = flight_view(found)
    output.show(lambda _: view, data | {"notes": found.notes})
