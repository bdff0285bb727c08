"""The simulator: each point is the latest of its dependencies; level by level in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Ints
from haiprof.base.errors import TraceFormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Points in time and what each waits for; work and waiting are lengths of edges.

    A task is two points (start, end) with its duration between them; a collective is a point that
    waits for the start of every member, with an edge to each member's end.
    """

    point_count: int
    """Points are 0 .. point_count - 1; one without an incoming edge is at 0 ns."""
    sources: Ints
    """Earlier end of each edge, shape (edges,)."""
    targets: Ints
    """Later end of each edge, shape (edges,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A graph's edges in an order in which they can be followed."""

    graph: Graph
    edges: Ints
    """Edges by the level of their target, those of one target together."""
    heads: Ints
    """Where a new target begins in `edges`."""
    levels: Ints
    """Where a new level begins in `heads`; ends with their number."""


def plan_graph(graph: Graph) -> Plan:
    """The order of a graph's edges."""
    depth = _depths(graph)
    order = np.lexsort((graph.targets, depth[graph.targets]))
    targets = graph.targets[order]
    heads = np.flatnonzero(np.append(True, targets[1:] != targets[:-1])[: len(targets)])
    level_of_head = depth[targets[heads]]
    changes = np.append(True, level_of_head[1:] != level_of_head[:-1])[: len(heads)]
    levels = np.append(np.flatnonzero(changes), len(heads))
    return Plan(graph=graph, edges=order, heads=heads, levels=levels)


def _depths(graph: Graph) -> Ints:
    """Most edges in a chain before each point: Kahn's algorithm, a level at a time."""
    by_source = np.argsort(graph.sources, kind="stable")
    after = graph.targets[by_source]
    counts = np.bincount(graph.sources, minlength=graph.point_count)
    first = np.cumsum(counts) - counts
    missing = np.bincount(graph.targets, minlength=graph.point_count)
    depth = np.zeros(graph.point_count, dtype=np.int64)
    front, level, seen = np.flatnonzero(missing == 0), 0, 0
    while len(front):
        depth[front] = level
        seen, level = seen + len(front), level + 1
        width = counts[front]
        inside = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
        reached = after[np.repeat(first[front], width) + inside]
        np.subtract.at(missing, reached, 1)
        front = np.unique(reached[missing[reached] == 0])
    if seen < graph.point_count:
        raise TraceFormatError(f"{graph.point_count - seen} points in time wait for each other")
    return depth


def times(plan: Plan, lengths: Ints, delays: Ints | None = None) -> Ints:
    """When each point is reached."""
    graph = plan.graph
    found = np.zeros((graph.point_count, lengths.shape[1]), dtype=np.int64)
    sources, along = graph.sources[plan.edges], lengths[plan.edges]
    reached = graph.targets[plan.edges[plan.heads]]
    bounds = np.append(plan.heads, len(plan.edges))
    for low, high in zip(plan.levels[:-1], plan.levels[1:], strict=True):
        begin, end = bounds[low], bounds[high]
        arrivals = found[sources[begin:end]] + along[begin:end]
        latest = np.maximum.reduceat(arrivals, plan.heads[low:high] - begin, axis=0)
        points = reached[low:high]
        found[points] = latest if delays is None else latest + delays[points]
    return found
