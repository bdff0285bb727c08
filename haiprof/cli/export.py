"""`haiprof export`: tables, merged and linked traces, Chakra, scalars, and trackers."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.messages import print_message
from haiprof.cli import shared
from haiprof.cli.command_line import argument, option
from haiprof.cli.names import TABLES, nearest, second_words
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.compat.otlp import Sender
    from haiprof.run_analysis.run_frames import RunFrames


Table = Literal["counters", "steps", "phases", "ranks"]
_TABULAR = ("csv", "parquet")
_FORMAT_HELP = (
    "csv and parquet: a table, rates per second. prometheus: last values, text format. "
    "otlp-json: every sample. The last two hold counters as they were read."
)


def export(
    directory: Path | None = shared.RUN_DIR,
    to: str = option("--to FORMAT", _FORMAT_HELP, "csv", old=("--format",)),
    what: Table = option("--what VALUE", "The table, for csv and parquet.", "counters"),
    output: Path | None = option(
        "-o --output FILE", "Where to write. Left out: standard output, but for parquet."
    ),
    force: bool = option("--force", "Replace FILE if it already exists."),
    lines: bool = option("--lines", "otlp-json: a line for each node and rank, for large runs."),
) -> None:
    """Write a run's data for other tools; tensorboard and perfetto serve it until Ctrl-C instead.

    What was not measured is left out, never 0.
    Other forms have options of their own, which `haiprof export --to FORM --help` shows:
    tensorboard and scalars, perfetto, merged (one trace with all ranks), linked (execution traces
    with times), chakra, wandb, mlflow.

    For example:

      haiprof export --to parquet -o counters.parquet
      haiprof export --what steps | head              the newest run's steps as CSV
      haiprof export --to prometheus -o job.prom  OpenTelemetry's names in Prometheus' form
      haiprof export --to otlp-json --lines -o job.jsonl
    """
    from haiprof.compat.exports import write_export

    if to not in TABLES:
        forms = second_words("export")
        near = nearest(to, forms)
        hint = f"did you mean haiprof export --to {near}?" if near else "haiprof export --help"
        raise UsageError(f"--to: expected one of {', '.join(forms)}, got {to!r}", hint=hint)
    if to == "parquet" and output is None:
        raise UsageError("parquet is not text: it needs a file", hint="-o FILE.parquet")
    if to not in _TABULAR and what != "counters":
        raise UsageError(f"{to} holds counters only", hint=f"--to csv --what {what}")
    if lines and to != "otlp-json":
        raise UsageError("--lines is for --to otlp-json")
    analyzer = shared.open_target(directory)
    stdout = sys.stdout.buffer
    written = write_export(analyzer, to, output, what=what, lines=lines, force=force, stdout=stdout)
    for note in written.notes:
        Output().hint(note)
    if output is not None:
        Output().hint(f"wrote {written.count} {written.unit} to {output}")
    if to in _TABULAR:
        others = ", ".join(other for other in get_args(Table) if other != what)
        Output().hint(
            f"these are its {what}; others with --what: {others}; the ledger: "
            "haiprof verdict RUN --json"
        )


_EVERY_S = 2.0


def merge(
    sources: list[Path] | None = argument(
        "[RUN_OR_TRACES]...",
        "A run or log directory, a folder with one trace per rank, or trace files. Left out: "
        "the newest run.",
    ),
    output: Path | None = option(
        "-o --output FILE",
        "Where to write; packed where it ends in .gz. `-` is standard output, as text. Left "
        "out: merged.json.gz in the run directory, or here.",
    ),
    steps: str | None = shared.STEP_RANGE,
    ranks: str | None = option("--ranks LIST", "Only these, such as 0,3-5."),
    window: int | None = shared.WINDOW,
    wall_clocks: bool = option(
        "--wall-clocks", "Take hosts' clocks as they are; left out: compare them by collectives."
    ),
    no_counters: bool = option("--no-counters", "Leave the run's counters out."),
    no_phases: bool = option("--no-phases", "Leave haiprof's phases out."),
    force: bool = option("-f --force", "Replace FILE if it already exists."),
    out: Output = shared.OUTPUT,
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

    sources = [shared.trace_target(source) for source in sources or [shared.existing_log_dir()]]
    output = output or default_output(sources)
    to_stdout = str(output) == "-"
    if to_stdout and out.json:
        raise UsageError("merge: -o - and --json both write to standard output; give one")
    options = MergeOptions(
        ranks=shared.parse_ranks(ranks), steps=shared.parse_steps(steps), window=window,
        by_collectives=not wall_clocks, counters=not no_counters, phases=not no_phases, force=force,
    )  # fmt: skip
    one_pass = wall_clocks and steps is None
    with shared.ReadProgress(quiet=out.json or one_pass) as waiting:
        report = merge_traces(
            sources, output, options, reading=waiting, writing=_WriteProgress(quiet=out.json)
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
    """Reports the progress of the output on stderr every two seconds."""

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


EXECUTION_TRACES = option(
    "--et FILE_OR_DIR", "Execution traces; left out: *.et.json or *.et.json.gz next to the traces."
)


def link(
    traces: Path = shared.TRACES,
    execution: Path | None = EXECUTION_TRACES,
    output_file: Path | None = option(
        "-o --output FILE",
        "Write the joined trace, .json or .json.gz; of several ranks one file each, "
        "FILE.rankN.json.gz. Left out: only the report.",
    ),
    rank: int | None = shared.RANK,
    window: int | None = shared.WINDOW,
    output: Output = shared.OUTPUT,
) -> None:
    """Link execution traces to timelines, operator by operator.

    Each node of the execution trace (haiprof --execution-trace, or torch's
    ExecutionTraceObserver) gets the time of its operator, the GPU work that it
    launched, and what it waited for. Says how much was linked, how, and why not
    the rest. Chakra's converter reads what is written.

    For example:

      haiprof export --to linked RUN -o linked.json.gz
      haiprof export --to linked traces/ --et execution_traces/ --json | jq '.ranks[].linked_ratio'
    """
    from haiprof.show.views.trace_files import link_view
    from haiprof.trace_analysis.execution_link import link as link_pair
    from haiprof.trace_analysis.execution_link import linked_path, pairs, write_rank

    shares, written = [], []
    with shared.ReadProgress(quiet=output.json):
        found, alone = pairs(traces, execution, window=window, rank=rank)
        for pair in found:
            linked = link_pair(pair)
            shares.append(linked.share)
            if output_file is not None and linked.share.linked_count:
                path = linked_path(output_file, pair.rank if len(found) > 1 else None)
                write_rank(path, linked)
                written.append(path)
    data = {"ranks": shares, "without_partner": alone, "written": written}
    output.show(lambda _: link_view(shares, alone), data)
    if not any(share.linked_count for share in shares):
        raise MissingDataError(
            f"{traces}: nothing was linked, and nothing was written",
            hint="both files have to come from the same steps of the same run",
        )
    if written:
        output.hint(f"wrote {', '.join(map(str, written))}")
        output.hint(f"next: haiprof export --to chakra {shlex.quote(str(written[0]))} -o chakra")


def chakra(
    source: Path = argument(
        "[RUN_OR_LINKED]",
        "A run directory or a folder with traces and execution traces, or what haiprof export "
        "--to linked wrote, or bare execution traces.",
        callback=shared.trace_target,
        factory=shared.existing_log_dir,
    ),
    execution: Path | None = EXECUTION_TRACES,
    folder: Path | None = option(
        "-o --output DIR", "Write NAME.RANK.et files, which Chakra's tools and simulators read."
    ),
    name: str = option("--name NAME", "Begins the files' names.", "chakra"),
    rank: int | None = shared.RANK,
    window: int | None = shared.WINDOW,
    graph_file: Path | None = option(
        "--graph FILE", "Draw one rank's graph: .graphml, .dot, or .pdf, .svg, .png by Graphviz."
    ),
    max_nodes: int = option(
        "--max-nodes N", "Of the graph: deeper operators are folded.", 150, low=2
    ),
    steps: str | None = option("--steps N", "Of the graph: only ProfilerStep#N.", old=("--step",)),
    depth: int | None = option(
        "--depth D",
        "Of the graph: levels of operators; left out: as many as --max-nodes allows.",
        low=1,
    ),
    output: Output = shared.OUTPUT,
) -> None:
    """Convert execution traces to Chakra (MLCommons), or draw the graph.

    Traces with timelines beside them are linked first. Nodes are computing,
    copies, collectives, sends and receives, with durations from the timeline.

    For example:

      haiprof export --to chakra RUN -o chakra
      haiprof export --to chakra linked.json.gz --graph graph.pdf
      haiprof export --to chakra RUN --graph graph.graphml --rank 3 --steps 102
    """
    from haiprof.base.safe_files import make_named_folder
    from haiprof.show.figures.execution_graph import check_ending, write_graph
    from haiprof.show.views.trace_files import chakra_view, row_of
    from haiprof.trace_analysis.chakra import draw_graph, graphs, write_chakra

    chosen = shared.parse_steps(steps)
    if chosen is not None and chosen[1] - chosen[0] != 1:
        raise UsageError(f"--steps {steps}: a graph shows one step", hint="--steps 102")
    if (folder is None) == (graph_file is None):
        raise UsageError("give -o DIR (Chakra files) or --graph FILE (a picture)")
    if graph_file is not None:
        check_ending(graph_file)
    rows, notes = [], []
    with shared.ReadProgress(quiet=output.json):
        for graph, said in graphs(source, execution, window=window, rank=rank):
            notes += said
            if folder is not None:
                path = folder / f"{name}.{graph.rank}.et"
                make_named_folder(folder)
                write_chakra(path, graph)
            elif graph_file is not None:
                path = graph_file
                picture = draw_graph(
                    graph, max_nodes=max_nodes, step=chosen[0] if chosen else None, depth=depth
                )
                write_graph(path, picture)
                notes += picture.notes
            rows.append(row_of(graph, path))
            if graph_file is not None:
                break
    output.show(lambda _: chakra_view(rows, notes), {"ranks": rows, "notes": notes})


def scalars(
    directory: Path | None = shared.RUN_DIR,
    follow: bool = option(
        "--follow", "Keep writing until the job has ended, or until interrupted."
    ),
    every: float = option("--every SECONDS", "Time between two looks at the run.", 5.0, low=0.5),
    output: Output = replace(shared.OUTPUT, help="Print what was written as JSON at the end."),
) -> None:
    """Write step time, phases, CPU, memory and GPU of every rank as scalars for TensorBoard.

    They go into DIR/tensorboard/rank0, rank1, ...; the job itself is not touched. Of steps faster
    than 50 per second some are left out. Needs `pip install 'haiprof[tensorboard]'`.

    For example:

      haiprof export --to scalars --follow                    beside the job that runs
      tensorboard --logdir haiprof-logs           to see them
      haiprof train.py --tensorboard              starts this by itself
    """
    from haiprof.show.scalars import write_scalars

    analyzer = shared.open_target(directory)
    written = write_scalars(analyzer.run, follow=follow, every_s=every)
    output.show(lambda _: written.line, asdict(written))


def wandb(directory: Path | None = shared.RUN_DIR) -> None:
    """Send verdict, ledger, medians, step times and the page to Weights & Biases.

    Its own variables count: WANDB_PROJECT, WANDB_MODE=offline, WANDB_DIR; with WANDB_RUN_ID and
    WANDB_RESUME=allow they go into the run that the job itself logged to. Needs
    `pip install 'haiprof[wandb]'`.

    For example:

      haiprof export --to wandb                   the newest run of the log directory
      WANDB_RUN_ID=3kx81f WANDB_RESUME=allow haiprof export --to wandb haiprof-logs/train-...
    """
    _send("wandb", directory)


def mlflow(directory: Path | None = shared.RUN_DIR) -> None:
    """Send verdict, ledger, medians, step times and the page to MLflow.

    Its own variables count: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME; with MLFLOW_RUN_ID they go
    into the run that the job itself logged to. Needs `pip install 'haiprof[mlflow]'`.

    For example:

      haiprof export --to mlflow                  the newest run of the log directory
      MLFLOW_TRACKING_URI=http://tracker:5000 haiprof export --to mlflow haiprof-logs/train-...
    """
    _send("mlflow", directory)


_PUSH_S = 10.0


def otlp(
    directory: Path | None = shared.RUN_DIR,
    endpoint: str | None = option(
        "--endpoint URL",
        "The collector's address; /v1/metrics is added to one without a path. Left out: "
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, else this machine's.",
    ),
    follow: bool = option("--follow", "The job runs: also what comes, every 10 s until it ends."),
    output: Output = shared.OUTPUT,
) -> None:
    """Push every sample of a run, and its steps, to an OpenTelemetry collector by OTLP/HTTP.

    OpenTelemetry's own variables count: OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _CERTIFICATE,
    _CLIENT_CERTIFICATE, _CLIENT_KEY, _COMPRESSION, and _PROTOCOL: http/json, or http/protobuf with
    `pip install 'haiprof[otlp]'`. A collector that is busy is asked again for up to a minute.

    For example:

      haiprof export --to otlp --endpoint http://collector:4318
      haiprof export --to otlp --follow &         while the newest run goes on
      OTEL_EXPORTER_OTLP_HEADERS=api-key=... haiprof export --to otlp haiprof-logs/train-...
    """
    from haiprof.compat.otlp import Sender, find_collector

    collector = find_collector(endpoint, os.environ)
    sender, analyzer = Sender(collector, print_message), shared.open_target(directory)
    if follow:
        _push_while_it_runs(sender, analyzer)
    done = sender.push(shared.open_target(analyzer.run.root))
    for note in done.notes:
        output.hint(note)
    lost = f"; it rejected {done.rejected_count} of them" if done.rejected_count else ""
    why = f": {done.said}" if done.said else ""
    sent = f"pushed {done.point_count} points in {done.request_count} requests to {done.url}"
    text = f"{sent}{lost}{why}"
    output.show(lambda _: text, asdict(done))
    if done.rejected_count:
        raise HaiprofError(f"{done.url} rejected {done.rejected_count} points")


def _push_while_it_runs(sender: Sender, analyzer: RunFrames) -> None:
    """What fails is pushed with the next samples."""
    from haiprof.live.find import is_running

    os.nice(10)
    while is_running(analyzer.run, analyzer.manifest()):
        try:
            sender.push(analyzer)
        except HaiprofError as error:
            print_message(f"{error}; again in {_PUSH_S:g} s")
        time.sleep(_PUSH_S)
        analyzer = shared.open_target(analyzer.run.root)


def _send(tracker: str, directory: Path | None) -> None:
    from haiprof.base.safe_files import MadeFolder
    from haiprof.compat.trackers import send, tracked_run
    from haiprof.diagnosis.engine import diagnose
    from haiprof.diagnosis.verdict import as_document
    from haiprof.show.card import verdict_markdown
    from haiprof.show.page.content import page_content
    from haiprof.show.page.render import report_html

    analyzer = shared.open_target(directory)
    found, manifest = diagnose(analyzer), analyzer.manifest()
    texts = {"command": " ".join(manifest.command), "run": str(analyzer.run.root),
             "version": manifest.haiprof_version}  # fmt: skip
    files = {
        "report.html": report_html(page_content(analyzer)),
        "verdict.md": verdict_markdown(found, found.name),
    }
    sent = tracked_run(analyzer.steps(), as_document(found), texts, files)
    folder = MadeFolder.temporary(f"haiprof-{tracker}-")
    try:
        Output().hint(f"sent to {tracker}: {send(tracker, sent, folder.path)}")
    finally:
        folder.remove()
