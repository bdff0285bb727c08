"""What `haiprof chakra` is pointed at, as one graph per rank: joined, paired or bare traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from haiprof.analysis.execution.chakra import ChakraGraph, chakra_graph
from haiprof.analysis.execution.link import link
from haiprof.analysis.execution.pairs import execution_files, pairs
from haiprof.errors import MissingDataError, TraceFormatError
from haiprof.traces.execution.trace import ExecutionTrace, integer, load_execution_trace
from haiprof.traces.find import LINKED_NAME, TRACE_ENDINGS, trace_files
from haiprof.traces.ranks import rank_in_name


def graphs(
    source: Path,
    execution: Path | None = None,
    *,
    window: int | None = None,
    rank: int | None = None,
) -> Iterator[tuple[ChakraGraph, list[str]]]:
    """The graph of each rank, one after the other, with what a person must know of it.

    Args:
        source: A joined or bare execution trace, a folder of them, or a run or a folder of
            timelines with execution traces, which are linked first.
        execution: Execution traces that stand elsewhere.
        window: Which, of a run; then its own traces are taken, not joined ones.
        rank: Only this one.

    Raises:
        TraceFormatError: A file cannot be read.
        MissingDataError: There is no execution trace.
    """
    bare = [] if execution or window is not None else _execution_only(source)
    if bare:
        yield from _loaded(bare, rank)
        return
    found, alone = pairs(source, execution, window=window, rank=rank)
    for pair in found:
        linked = link(pair)
        around = {"schema": pair.execution.schema, "pid": pair.execution.pid}
        graph = chakra_graph(linked.nodes, pair.rank, around | pair.execution.around)
        yield graph, [*alone, *linked.share.notes, *graph.notes]
        alone = []


def _execution_only(source: Path) -> list[ExecutionTrace]:
    """Joined files if there are any; bare ones where no timeline is beside them."""
    if source.is_file():
        try:
            return [load_execution_trace(source)]
        except TraceFormatError:
            trace_files(source)
            if execution_files(source):
                return []
            raise
    if not source.is_dir():
        raise TraceFormatError(f"{source}: no such file or folder")
    folder = source / "traces" if (source / "traces").is_dir() else source
    joined = sorted(
        path for path in folder.iterdir()
        if path.name.startswith(f"{LINKED_NAME}.") and path.name.endswith(TRACE_ENDINGS)
    )  # fmt: skip
    if joined:
        return [load_execution_trace(path) for path in joined]
    files = execution_files(source)
    try:
        timelines = {path for path in trace_files(source) if path not in files}
    except TraceFormatError:
        timelines = set()
    return [] if timelines else [load_execution_trace(path) for path in files]


def _loaded(
    found: list[ExecutionTrace], rank: int | None
) -> Iterator[tuple[ChakraGraph, list[str]]]:
    taken: dict[int, Path] = {}
    for place, execution in enumerate(found):
        said = integer(execution.around.get("rank"))
        own = rank_in_name(execution.path.name) if said is None else said
        own = place if own is None else own
        if own in taken:
            raise TraceFormatError(
                f"two execution traces of rank {own}: {taken[own]} and {execution.path}"
            )
        taken[own] = execution.path
        if rank in (None, own):
            around = {"schema": execution.schema, "pid": execution.pid} | execution.around
            graph = chakra_graph(execution.nodes, own, around)
            yield graph, [*execution.report.notes, *graph.notes]
    if rank is not None and rank not in taken:
        known = ", ".join(map(str, sorted(taken)))
        raise MissingDataError(f"no execution trace of rank {rank}; there are those of {known}")
