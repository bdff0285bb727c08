"""`haiprof export --to chakra`: Chakra traces of every rank, or the graph of one as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson, Rank, ReadProgress, Window, parse_steps
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.link import ExecutionTraces
from haiprof.cli.output import Output
from haiprof.cli.target import existing_log_dir, trace_target

Source = Annotated[
    Path,
    Arg(
        "[RUN_OR_LINKED]",
        "A run directory or a folder with traces and execution traces, or what haiprof export "
        "--to linked wrote, or bare execution traces.",
        callback=trace_target,
        factory=existing_log_dir,
    ),
]
Folder = Annotated[
    Path | None,
    Opt("-o --output DIR", "Write NAME.RANK.et files, which Chakra's tools and simulators read."),
]
Name = Annotated[str, Opt("--name NAME", "Begins the files' names.")]
GraphFile = Annotated[
    Path | None,
    Opt("--graph FILE", "Draw one rank's graph: .graphml, .dot, or .pdf, .svg, .png by Graphviz."),
]
MaxNodes = Annotated[int, Opt("--max-nodes N", "Of the graph: deeper operators are folded.", low=2)]
Step = Annotated[
    str | None, Opt("--steps N", "Of the graph: only ProfilerStep#N.", old=("--step",))
]
Depth = Annotated[
    int | None,
    Opt(
        "--depth D",
        "Of the graph: levels of operators; left out: as many as --max-nodes allows.",
        low=1,
    ),
]


def chakra(
    source: Source,
    execution: ExecutionTraces = None,
    folder: Folder = None,
    name: Name = "chakra",
    rank: Rank = None,
    window: Window = None,
    graph_file: GraphFile = None,
    max_nodes: MaxNodes = 150,
    steps: Step = None,
    depth: Depth = None,
    as_json: AsJson = False,
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
    from haiprof.trace_analysis.chakra import graphs, write_chakra
    from haiprof.trace_analysis.execution_drawing import draw_graph

    chosen = parse_steps(steps)
    if chosen is not None and chosen[1] - chosen[0] != 1:
        raise UsageError(f"--steps {steps}: a graph shows one step", hint="--steps 102")
    if (folder is None) == (graph_file is None):
        raise UsageError("give -o DIR (Chakra files) or --graph FILE (a picture)")
    if graph_file is not None:
        check_ending(graph_file)
    output = Output(json=as_json)
    rows, notes = [], []
    with ReadProgress(quiet=as_json):
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
