"""Flame graphs: sampled stacks as one tree of frames, and as files for other viewers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import polars as pl

from haiprof.base.code_places import code_name
from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.ledger import POSITIONS, activity_words
from haiprof.base.units import visible
from haiprof.base.version import __version__
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples
from haiprof.run_analysis.ledger import ACTIVITIES, TimeTable

OTHER_THREADS = ("worker", "worker_waiting", "other_threads")
"""Shown beside the positions of a step, on their own."""
_Key = TypeVar("_Key", int, str)
_LEAST_RATIO = 0.001
"""Frames below this share of a step, in every rank, count as their caller's own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameSource:
    """One run, or a part of its ranks."""

    run: str  # empty for the run itself; the name of another that it is compared with
    folder: str  # where the job was started: files below it are named from there
    samples: CodeSamples
    table: TimeTable  # what the training thread did in the steps that count
    lineless: Bools
    """Per row of it: whether its activity stands for itself, as no line is its cause."""
    steps: pl.DataFrame  # these steps, in the columns of `step_frame`
    accounts: Sequence[tuple[Ints, float]] = ()
    """Rows of the table that are drawn on their own, and what they take per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameFrame:
    """A frame, the same wherever it is called from."""

    name: str  # its function; a phase has its own name
    place: str
    """`data.py:14` of the user's code, of two runs the file alone; the module of a library's; empty
    for a position."""
    kind: str
    """`phase` (a position of the step, or other threads), `user`, `library`, or `activity`: time
    that no line is the cause of, such as waiting for a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameSeries:
    """The time of one rank, or of the mean of all, by node."""

    run: str
    rank: int | None  # None: the mean of the ranks that are shown
    step_count: int
    sample_count: int
    sample_ns: dict[str, float]
    """By position: what one sample stands for, per step. A time of `a` ns strays by the square
    root of `a` times that, as counts do (Poisson)."""
    self_ns: dict[int, float]
    """By node: its own time without what it calls, per step. The nodes of a step's
    positions add up to the mean step."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "run": visible(self.run), "rank": self.rank, "step_count": self.step_count,
            "sample_count": self.sample_count, "sample_ns": self.sample_ns,
            "nodes": list(self.self_ns), "self_ns": [round(ns) for ns in self.self_ns.values()],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameGraph:
    """Stacks of one run, or of two to compare."""

    frames: tuple[FlameFrame, ...]
    parents: tuple[int, ...]
    """By node, a frame below its callers: its caller, which comes before it; -1: a position."""
    places: tuple[int, ...]  # by node: its frame
    series: tuple[FlameSeries, ...]  # the mean of the ranks first, then each rank, in order of runs
    accounts: tuple[FlameSeries, ...] = ()  # those of the first run that were asked for, each alone

    def as_json(self) -> dict[str, Any]:
        """Plain values: what a page draws."""
        return {
            "in_step": list(POSITIONS),
            "frames": [
                [visible(frame.name), visible(frame.place), frame.kind] for frame in self.frames
            ],
            "parents": list(self.parents),
            "places": list(self.places),
            "series": [one.as_json() for one in self.series],
            "accounts": [one.as_json() for one in self.accounts],
        }


def flame_graph(sources: Sequence[FlameSource]) -> FlameGraph:
    """One tree of all stacks that were sampled in the steps that count.

    A frame of user code is a line, and of two runs a function, as lines move when code changes; a
    library's is a function. Times are per step and those of the ledger: positions add up to the
    mean step. Workers and other threads are per step, too. Source: Gregg, The Flame Graph, CACM 59
    (6), 2016.
    """
    grower = _Grower()
    placers = [_Placer(source, grower, by_line=len(sources) == 1) for source in sources]
    series = [one for pair in zip(sources, placers, strict=True) for one in _series_of(*pair)]
    first, accounts = sources[0], []
    for rows, ns in first.accounts:  # so scaled that they add up to what the account takes per step
        self_ns = defaultdict[int, float](float)
        scale = ns / max(float(first.table.ns[rows].sum()), 1.0)
        _add_rows(self_ns, placers[0], first, rows, scale)
        accounts.append(FlameSeries(
            run=first.run, rank=None, step_count=first.steps.height, self_ns=self_ns,
            sample_count=_sample_count(first.table, rows), sample_ns={},
        ))  # fmt: skip
    return _prune(grower, series, accounts)


def _series_of(source: FlameSource, placer: _Placer) -> Iterator[FlameSeries]:
    """The mean of the ranks, then each of them."""
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
        # The mean of so many strays less.
        sample_ns={
            phase: ns / len(ranks) for phase, ns in _mean([r.sample_ns for r in ranks]).items()
        },
        self_ns=_mean([one.self_ns for one in ranks]),
    )
    yield from ranks


def _mean(parts: Sequence[Mapping[_Key, float]]) -> dict[_Key, float]:
    """Of all parts, also of those that lack a key."""
    found = defaultdict[_Key, float](float)
    for key, ns in (item for part in parts for item in part.items()):
        found[key] += ns / len(parts)
    return dict(found)


def _of_rank(source: FlameSource, rank: int, placer: _Placer) -> FlameSeries:
    steps = source.steps.filter(pl.col("rank") == rank)
    table = source.table
    own = np.flatnonzero(table.rank == rank)
    self_ns, sample_ns = defaultdict[int, float](float), dict[str, float]()
    for number in np.unique(table.position[own]).tolist():
        rows = own[table.position[own] == number]
        total_ns = float(table.ns[rows].sum()) / steps.height
        sample_ns[POSITIONS[number]] = total_ns / max(_sample_count(table, rows), 1)
        _add_rows(self_ns, placer, source, rows, 1 / steps.height)
    # Samples of a rank's workers and other threads from its first step that counts to its last.
    start_ns = steps["start_ns"].to_numpy()
    end_ns = start_ns + steps["step_ns"].to_numpy()
    beside = np.isin(source.samples.phase, [CODE_PHASES.index(name) for name in OTHER_THREADS])
    during = (source.samples.time_ns >= start_ns.min()) & (source.samples.time_ns <= end_ns.max())
    found: Bools = beside & during & (source.samples.rank == rank)
    samples = source.samples.take(found)
    for name in OTHER_THREADS:
        rows = np.flatnonzero(samples.phase == CODE_PHASES.index(name))
        if weight := float(samples.weight_ns[rows].sum()):
            sample_ns[name] = weight / steps.height / len(rows)
            stacks, place = np.unique(samples.stack[rows], return_inverse=True)
            times = np.bincount(place, samples.weight_ns[rows]) / steps.height
            for stack, ns in zip(stacks.tolist(), times.tolist(), strict=True):
                self_ns[placer.node(stack, name)] = ns
    return FlameSeries(
        run=source.run, rank=rank, step_count=steps.height,
        sample_count=_sample_count(table, own) + len(samples.stack), sample_ns=sample_ns,
        self_ns=self_ns,
    )  # fmt: skip


def _sample_count(table: TimeTable, rows: Ints) -> int:
    """A sample can be in several rows, with a share of its time in each."""
    samples = table.sample[rows]
    return len(np.unique(samples[samples >= 0]))


def _add_rows(
    self_ns: dict[int, float], placer: _Placer, source: FlameSource, rows: Ints, scale: float
) -> None:
    """Puts the time of some rows below their positions."""
    table = source.table
    activity = np.where(source.lineless[rows], table.activity[rows], -1)
    stack = np.where(activity < 0, table.stack[rows], 0)
    keys = np.stack([table.position[rows], activity, stack])
    cells, place = np.unique(keys, axis=1, return_inverse=True)
    times = np.bincount(place.ravel(), scale * table.ns[rows]).tolist()
    for (position, nobodys, own), ns in zip(cells.T.tolist(), times, strict=True):
        name = POSITIONS[position]
        node = placer.node(own, name)
        if nobodys >= 0:  # an activity that has no line
            frame = FlameFrame(name=activity_words(ACTIVITIES[nobodys]), place="", kind="activity")
            node = placer.grower.node(node, frame)
        self_ns[node] += ns


class _Grower:
    """Frames and nodes of all runs, each once."""

    def __init__(self) -> None:
        self.frames: dict[FlameFrame, int] = {}
        self.nodes: dict[tuple[int, int], int] = {}

    def node(self, parent: int, frame: FlameFrame) -> int:
        """The number of a frame below a node."""
        number = self.frames.setdefault(frame, len(self.frames))
        return self.nodes.setdefault((parent, number), len(self.nodes))


class _Placer:
    """Puts the stacks of one run into the tree."""

    def __init__(self, source: FlameSource, grower: _Grower, *, by_line: bool) -> None:
        self._tree, self.grower = source.samples.tree, grower
        below = f"{source.folder.rstrip('/')}/" if source.folder else ""
        self._frames: list[FlameFrame] = []
        for frame, library in zip(self._tree.frames, self._tree.library.tolist(), strict=True):
            if library:
                named = code_name(frame.file, frame.function)
                module, _, name = named.partition(f".{frame.function}")
                found = FlameFrame(name=frame.function + name, place=module, kind="library")
            else:
                file = frame.file.removeprefix(below)
                place = f"{file}:{frame.line}" if by_line else file
                found = FlameFrame(name=frame.function, place=place, kind="user")
            self._frames.append(found)
            grower.frames.setdefault(found, len(grower.frames))
        self._known: dict[tuple[int, str], int] = {}

    def node(self, stack: int, phase: str) -> int:
        """The node of a stack in a position; stack 0 is the position itself."""
        known = self._known.get((stack, phase))
        if known is None:
            parent, frame = -1, FlameFrame(name=phase, place="", kind="phase")
            if stack:
                parent = self.node(int(self._tree.parent[stack]), phase)
                frame = self._frames[self._tree.place[stack]]
            known = self._known[stack, phase] = self.grower.node(parent, frame)
        return known


def _prune(
    grower: _Grower, series: Sequence[FlameSeries], accounts: Sequence[FlameSeries]
) -> FlameGraph:
    """Without nodes that are too small to be seen: their time is their caller's own."""
    parents = [parent for parent, _ in grower.nodes]
    keep = np.zeros(len(parents), dtype=np.bool_)
    for one in series:
        ratio = inclusive_ns(parents, one.self_ns) / (sum(one.self_ns.values()) or 1)
        keep |= ratio >= _LEAST_RATIO
    target: list[int] = []
    for node, parent in enumerate(parents):
        target.append(node if keep[node] or parent < 0 else target[parent])
    number = {node: place for place, node in enumerate(sorted(set(target)))}
    places = [frame for _, frame in grower.nodes]
    used = {frame: at for at, frame in enumerate(sorted({places[node] for node in number}))}
    moved = []
    for one in (*series, *accounts):
        self_ns = defaultdict[int, float](float)
        for node, ns in one.self_ns.items():
            self_ns[number[target[node]]] += ns
        moved.append(replace(one, self_ns=dict(self_ns)))
    frames, shown = list(grower.frames), len(series)
    return FlameGraph(
        frames=tuple(frames[at] for at in used),
        parents=tuple(number.get(parents[node], -1) for node in number),
        places=tuple(used[places[node]] for node in number), series=tuple(moved[:shown]),
        accounts=tuple(moved[shown:]),
    )  # fmt: skip


def inclusive_ns(parents: Sequence[int], self_ns: Mapping[int, float]) -> Floats:
    """Time of each node with all below it."""
    found = np.zeros(len(parents))
    found[list(self_ns)] = list(self_ns.values())
    for node, parent in reversed(list(enumerate(parents))):
        if parent >= 0:
            found[parent] += found[node]
    return found


_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(samples: CodeSamples, *, name: str) -> bytes:
    """A file that speedscope.app opens: one profile per rank, thread and phase, in samples."""
    tree = samples.tree
    frames = [
        {"name": f"{frame.function}:{frame.line}", "file": frame.file, "line": frame.line}
        for frame in tree.frames
    ]
    profiles = []
    for title, rows in _groups(samples):
        stacks = samples.stack[rows][np.argsort(samples.time_ns[rows], kind="stable")].tolist()
        profiles.append({
            "type": "sampled", "name": title, "unit": "none",
            "startValue": 0, "endValue": len(stacks),
            "samples": [tree.frame_places(stack) for stack in stacks],
            "weights": [1] * len(stacks),
        })  # fmt: skip
    content = {
        "$schema": _SCHEMA, "name": name, "exporter": f"haiprof@{__version__}",
        "activeProfileIndex": 0, "shared": {"frames": frames}, "profiles": profiles,
    }  # fmt: skip
    return json.dumps(content).encode()


def collapsed_lines(samples: CodeSamples) -> bytes:
    """Lines of `rank 0;phase;frame;frame COUNT`, as flamegraph.pl and others read them."""
    lines, tree = [], samples.tree
    texts = (f"{frame.function} ({frame.file}:{frame.line})" for frame in tree.frames)
    names = [" ".join(text.replace(";", ":").split()) for text in texts]
    for title, rows in _groups(samples):
        stacks, counts = np.unique(samples.stack[rows], return_counts=True)
        for stack, count in zip(stacks.tolist(), counts.tolist(), strict=True):
            way = [names[place] for place in tree.frame_places(stack)]
            lines.append(";".join((*title.split(", "), *way)) + f" {count}\n")
    return "".join(lines).encode("utf-8", "replace")


def _groups(samples: CodeSamples) -> Iterator[tuple[str, Bools]]:
    """(`rank 0, worker 3, phase`, its samples), in order."""
    keys = np.stack([samples.rank, samples.worker, samples.phase])
    for rank, worker, phase in np.unique(keys, axis=1).T.tolist():
        rows = (keys == np.array([[rank], [worker], [phase]])).all(axis=0)
        thread = f"worker {worker}, " if worker >= 0 else ""
        yield f"rank {rank}, {thread}{CODE_PHASES[phase].replace('_', ' ')}", rows
