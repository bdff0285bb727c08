"""The inputs of `haiprof chakra` as one graph per rank: joined, paired or bare traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.trace_analysis.execution.chakra import ChakraGraph, chakra_graph
from haiprof.trace_analysis.execution.link import link
from haiprof.trace_analysis.execution.pairs import execution_files, pairs
from haiprof.trace_format.execution.trace import ExecutionTrace, integer, load_execution_trace
from haiprof.trace_format.file_ranks import rank_in_name
from haiprof.trace_format.find import LINKED_NAME, TRACE_ENDINGS, trace_files


def graphs(
    source: Path,
    execution: Path | None = None,
    *,
    window: int | None = None,
    rank: int | None = None,
) -> Iterator[tuple[ChakraGraph, list[str]]]:
    """Yields the graph of each rank, with notes for people."""
    bare = [] if execution or window is not None else _execution_only(source)
    if bare:
        yield from _load(bare, rank)
        return
    found, alone = pairs(source, execution, window=window, rank=rank)
    for pair in found:
        linked = link(pair)
        header = {"schema": pair.execution.schema, "pid": pair.execution.pid}
        graph = chakra_graph(linked.nodes, pair.rank, header | pair.execution.header)
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


def _load(found: list[ExecutionTrace], rank: int | None) -> Iterator[tuple[ChakraGraph, list[str]]]:
    taken: dict[int, Path] = {}
    for place, execution in enumerate(found):
        said = integer(execution.header.get("rank"))
        own = rank_in_name(execution.path.name) if said is None else said
        own = place if own is None else own
        if own in taken:
            raise TraceFormatError(
                f"two execution traces of rank {own}: {taken[own]} and {execution.path}"
            )
        taken[own] = execution.path
        if rank in (None, own):
            header = {"schema": execution.schema, "pid": execution.pid} | execution.header
            graph = chakra_graph(execution.nodes, own, header)
            yield graph, [*execution.report.notes, *graph.notes]
    if rank is not None and rank not in taken:
        known = ", ".join(map(str, sorted(taken)))
        raise MissingDataError(f"no execution trace of rank {rank}; there are those of {known}")
