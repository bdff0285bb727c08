"""`haiprof chakra`: Chakra traces of every rank, or the graph of one as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson, Rank, ReadProgress, Window
from haiprof.cli.link import ExecutionTraces
from haiprof.cli.output import Output
from haiprof.cli.target import existing_log_dir, trace_target

Source = Annotated[
    Path,
    typer.Argument(
        metavar="[RUN_OR_LINKED]",
        help="A run directory or a folder with traces and execution traces, or what "
        "haiprof link wrote, or bare execution traces.",
        show_default=False,
        default_factory=existing_log_dir,
        callback=trace_target,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Write NAME.RANK.et files, which Chakra's tools and simulators read.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Begins the files' names.")]
GraphFile = Annotated[
    Path | None,
    typer.Option(
        "--graph",
        metavar="FILE",
        help="Draw one rank's graph: .graphml, .dot, or .pdf, .svg, .png by Graphviz.",
        show_default=False,
    ),
]
MaxNodes = Annotated[
    int,
    typer.Option(
        "--max-nodes", metavar="N", min=2, help="Of the graph: deeper operators are folded."
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step", metavar="N", help="Of the graph: only ProfilerStep#N.", show_default=False
    ),
]
Depth = Annotated[
    int | None,
    typer.Option(
        "--depth",
        metavar="D",
        min=1,
        help="Of the graph: levels of operators; left out: as many as --max-nodes allows.",
        show_default=False,
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
    step: Step = None,
    depth: Depth = None,
    as_json: AsJson = False,
) -> None:
    """Convert execution traces to Chakra (MLCommons), or draw the graph.

    Traces with timelines beside them are linked first. Nodes are computing,
    copies, collectives, sends and receives, with durations from the timeline.

    For example:

      haiprof chakra RUN -o chakra

      haiprof chakra linked.json.gz --graph graph.pdf

      haiprof chakra RUN --graph graph.graphml --rank 3 --step 102
    """
    from haiprof.base.safe_files import make_named_folder
    from haiprof.show.figures.execution_graph import check_ending, write_graph
    from haiprof.show.views.trace_files import chakra_view, row_of
    from haiprof.trace_analysis.chakra import graphs, write_chakra
    from haiprof.trace_analysis.execution_drawing import draw_graph

    if (folder is None) == (graph_file is None):
        raise UsageError("name -o DIR for Chakra files or --graph FILE for a picture")
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
                picture = draw_graph(graph, max_nodes=max_nodes, step=step, depth=depth)
                write_graph(path, picture)
                notes += picture.notes
            rows.append(row_of(graph, path))
            if graph_file is not None:
                break
    output.show(lambda _: chakra_view(rows, notes), {"ranks": rows, "notes": notes})
