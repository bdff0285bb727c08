"""Flame graphs: sampled stacks as one tree of frames, with the time of each rank per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import polars as pl

from haiprof.base.code_places import code_name
from haiprof.base.intervals import Floats, Ints
from haiprof.base.units import visible
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples, CodeTree
from haiprof.run_analysis.nesting import Bools
from haiprof.run_analysis.step_frame import STEP_PHASES

IN_STEP = (*STEP_PHASES, "checkpoint")
"""Phases that make up a step; others are shown on their own."""
_SHOWN = (*IN_STEP, "evaluation", "worker", "worker_waiting", "other_threads")
_Key = TypeVar("_Key", int, str)
_LEAST_RATIO = 0.001
"""Frames below this share of a step, in every rank, count as their caller's own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameSource:
    """One run, or a part of its ranks."""

    run: str
    """Empty for the run itself; the name of another that it is compared with."""
    folder: str
    """Where the job was started: files below it are named from there."""
    samples: CodeSamples
    steps: pl.DataFrame
    """The steps that count, in the columns of `step_frame`: only samples in them are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameFrame:
    """A frame, the same wherever it is called from."""

    name: str
    """Its function; a phase has its own name."""
    place: str
    """`data.py:14` of the user's code, of two runs the file alone; the module of a library's; empty
    for a phase."""
    kind: str
    """`phase`, `user` or `library`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameNode:
    """A frame below its callers; numbers count from 0, callers come before the called."""

    parent: int
    """-1: a phase."""
    frame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameSeries:
    """The time of one rank, or of the mean of all, by node."""

    run: str
    rank: int | None
    """None: the mean of the ranks that are shown."""
    step_count: int
    sample_count: int
    sample_ns: dict[str, float]
    """By phase: what one sample stands for, per step. A time of `a` ns strays by the square root of
    `a` times that, as counts do (Poisson)."""
    self_ns: dict[int, float]
    """By node: its own time without what it calls, per step. The nodes of a step's phases add up
    to the mean step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameGraph:
    """Stacks of one run, or of two to compare."""

    frames: tuple[FlameFrame, ...]
    nodes: tuple[FlameNode, ...]
    series: tuple[FlameSeries, ...]
    """The mean of the ranks first, then each rank, in order of runs."""

    def as_json(self) -> dict[str, Any]:
        """Plain values: what a page draws."""
        return {
            "in_step": list(IN_STEP),
            "frames": [
                [visible(frame.name), visible(frame.place), frame.kind] for frame in self.frames
            ],
            "parents": [node.parent for node in self.nodes],
            "places": [node.frame for node in self.nodes],
            "series": [
                {
                    "run": visible(one.run), "rank": one.rank, "step_count": one.step_count,
                    "sample_count": one.sample_count, "sample_ns": one.sample_ns,
                    "nodes": list(one.self_ns),
                    "self_ns": [round(ns) for ns in one.self_ns.values()],
                }
                for one in self.series
            ],
        }  # fmt: skip


def flame_graph(sources: Sequence[FlameSource]) -> FlameGraph:
    """One tree of all stacks that were sampled in the steps that count.

    A frame of user code is a line, and of two runs a function, as lines move when code changes; a
    library's is a function. Times are per step: a phase has the time that its spans tell, shared
    among its samples, so that phases add up to the mean step. Evaluation, workers and other
    threads are per step, too. Source: Gregg, The Flame Graph, CACM 59 (6), 2016.

    Args:
        sources: The run; then the one that it is compared with.
    """
    grower = _Grower(by_line=len(sources) == 1)
    series = [one for source in sources for one in _series_of(source, grower)]
    return _prune(grower, series)


def _series_of(source: FlameSource, grower: _Grower) -> Iterator[FlameSeries]:
    """The mean of the ranks, then each of them."""
    placer = _Placer(source, grower)
    ranks = [
        _of_rank(source, rank, placer)
        for rank in np.unique(source.samples.rank).tolist()
        if (source.steps["rank"] == rank).any()
    ]
    if not ranks:
        return
    yield FlameSeries(
        run=source.run,
        rank=None,
        step_count=sum(one.step_count for one in ranks),
        sample_count=sum(one.sample_count for one in ranks),
        sample_ns={
            phase: ns / len(ranks)  # the mean of so many strays less
            for phase, ns in _mean([one.sample_ns for one in ranks]).items()
        },
        self_ns=_mean([one.self_ns for one in ranks]),
    )
    yield from ranks


def _mean(parts: Sequence[Mapping[_Key, float]]) -> dict[_Key, float]:
    """Of all parts, also of those that lack a key."""
    found: dict[_Key, float] = {}
    for part in parts:
        for key, ns in part.items():
            found[key] = found.get(key, 0.0) + ns / len(parts)
    return found


def _of_rank(source: FlameSource, rank: int, placer: _Placer) -> FlameSeries:
    steps = source.steps.filter(pl.col("rank") == rank)
    samples = source.samples.take(source.samples.rank == rank)
    samples = samples.take(in_steps(samples, steps))
    known_ns = _phase_ns(steps, samples)
    self_ns: dict[int, float] = {}
    sample_ns: dict[str, float] = {}
    for phase in _SHOWN:
        rows = samples.phase == CODE_PHASES.index(phase)
        weight = samples.weight_ns[rows]
        total_ns = known_ns.get(phase, float(weight.sum())) / steps.height
        if total_ns <= 0:
            continue
        sample_ns[phase] = total_ns / max(len(weight), 1)
        for stack, share in _shares(samples.stack[rows], weight):
            node = placer.node(stack, phase)
            self_ns[node] = self_ns.get(node, 0.0) + share * total_ns
    return FlameSeries(
        run=source.run,
        rank=rank,
        step_count=steps.height,
        sample_count=len(samples.stack),
        sample_ns=sample_ns,
        self_ns=self_ns,
    )


def _shares(stack: Ints, weight: Floats) -> Iterator[tuple[int, float]]:
    """(stack, its share of the weight); without samples all of it is nobody's: stack 0."""
    total = float(weight.sum())
    if not total:
        yield 0, 1.0
        return
    stacks, place = np.unique(stack, return_inverse=True)
    yield from zip(stacks.tolist(), (np.bincount(place, weight) / total).tolist(), strict=True)


def _phase_ns(steps: pl.DataFrame, samples: CodeSamples) -> dict[str, float]:
    """How long the phases of a rank's steps were in all; saves are taken out of `other`."""
    found = {phase: float(steps[f"{phase}_host_ns"].sum() or 0) for phase in STEP_PHASES}
    saves = samples.phase == CODE_PHASES.index("checkpoint")
    saved_ns = min(float(samples.weight_ns[saves].sum()), found["other"])
    return {**found, "other": found["other"] - saved_ns, "checkpoint": saved_ns}


def in_steps(samples: CodeSamples, steps: pl.DataFrame) -> Bools:
    """Samples of one rank in steps that count; of other phases and threads, between them.

    Args:
        samples: Of one rank.
        steps: The steps that count, of one or several attempts of that rank.
    """
    inside = np.zeros(len(samples.stack), dtype=np.bool_)
    in_step = np.isin(samples.phase, [CODE_PHASES.index(phase) for phase in IN_STEP])
    for own in steps.partition_by("attempt"):
        start_ns = own["start_ns"].to_numpy()
        end_ns = (start_ns + own["step_ns"].to_numpy()).max()
        during = (samples.time_ns >= start_ns.min()) & (samples.time_ns <= end_ns)
        inside |= during & (~in_step | np.isin(samples.step, own["step"].to_numpy()))
    return inside


class _Grower:
    """Frames and nodes of all runs, each once."""

    def __init__(self, *, by_line: bool) -> None:
        self.by_line = by_line
        self.frames: dict[tuple[str, str, str], int] = {}
        self.nodes: dict[tuple[int, int], int] = {}
        self.shown: dict[int, FlameFrame] = {}

    def frame(self, found: FlameFrame, *, key: str) -> int:
        """Its number; frames of one key are the same."""
        number = self.frames.setdefault((found.kind, key, found.name), len(self.frames))
        self.shown.setdefault(number, found)
        return number

    def node(self, parent: int, frame: int) -> int:
        """The number of a frame below a node."""
        return self.nodes.setdefault((parent, frame), len(self.nodes))


class _Placer:
    """Puts the stacks of one run into the tree."""

    def __init__(self, source: FlameSource, grower: _Grower) -> None:
        self._tree, self._grower = source.samples.tree, grower
        self._frames = [
            _add_frame(grower, self._tree, place, source.folder)
            for place in range(len(self._tree.frames))
        ]
        self._known: dict[tuple[int, str], int] = {}

    def node(self, stack: int, phase: str) -> int:
        """The node of a stack in a phase; stack 0 is the phase itself."""
        known = self._known.get((stack, phase))
        if known is not None:
            return known
        if not stack:
            top = FlameFrame(name=phase, place="", kind="phase")
            found = self._grower.node(-1, self._grower.frame(top, key=""))
        else:
            parent = self.node(int(self._tree.parent[stack]), phase)
            found = self._grower.node(parent, self._frames[self._tree.place[stack]])
        self._known[stack, phase] = found
        return found


def _add_frame(grower: _Grower, tree: CodeTree, place: int, folder: str) -> int:
    frame = tree.frames[place]
    if tree.library[place]:
        module, _, name = code_name(frame.file, frame.function).partition(f".{frame.function}")
        found = FlameFrame(name=frame.function + name, place=module, kind="library")
        return grower.frame(found, key=module)
    file = own_path(frame.file, folder)
    place_text = f"{file}:{frame.line}" if grower.by_line else file
    found = FlameFrame(name=frame.function, place=place_text, kind="user")
    return grower.frame(found, key=place_text)


def own_path(file: str, folder: str) -> str:
    """A file of the user's as it is named from where the job was started."""
    below = f"{folder.rstrip('/')}/"
    return file.removeprefix(below) if folder else file


def _prune(grower: _Grower, series: Sequence[FlameSeries]) -> FlameGraph:
    """Without nodes that are too small to be seen: their time is their caller's own."""
    parents = [parent for parent, _ in grower.nodes]
    largest = np.zeros(len(parents))
    for one in series:
        largest = np.maximum(
            largest, inclusive_ns(parents, one.self_ns) / (sum(one.self_ns.values()) or 1)
        )
    keep = (largest >= _LEAST_RATIO).tolist()
    target: list[int] = []
    for node, parent in enumerate(parents):
        target.append(node if keep[node] or parent < 0 else target[parent])
    number = {node: place for place, node in enumerate(sorted(set(target)))}
    places = [frame for _, frame in grower.nodes]
    used = {frame: at for at, frame in enumerate(sorted({places[node] for node in number}))}
    nodes = tuple(
        FlameNode(parent=number.get(parents[node], -1), frame=used[places[node]]) for node in number
    )
    moved = []
    for one in series:
        self_ns: dict[int, float] = {}
        for node, ns in one.self_ns.items():
            place = number[target[node]]
            self_ns[place] = self_ns.get(place, 0.0) + ns
        moved.append(replace(one, self_ns=self_ns))
    frames = tuple(grower.shown[frame] for frame in used)
    return FlameGraph(frames=frames, nodes=nodes, series=tuple(moved))


def inclusive_ns(parents: Sequence[int], self_ns: Mapping[int, float]) -> Floats:
    """Time of each node with all below it."""
    found = np.zeros(len(parents))
    for node, ns in self_ns.items():
        found[node] = ns
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            found[parents[node]] += found[node]
    return found
