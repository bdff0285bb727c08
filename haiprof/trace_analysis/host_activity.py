"""What the host did at each moment of a trace: position in the step, activity, line of code."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.code_places import is_library
from haiprof.base.intervals import Bools, Ints, difference, intersection
from haiprof.base.ledger import POSITIONS
from haiprof.trace_analysis import call_tree
from haiprof.trace_analysis.device_time import union_of
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.events import GPU_BACKENDS, HOST_BACKENDS
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import BLOCKING, FREE

PYTHON, OPERATORS, LOADER = "python", "operators", "wait: loader"
SYNC, ALLOCATION, CALLS = "wait: device", "allocation", "runtime calls"
COLLECTIVE, WAITING, OUTSIDE = "wait: collective", "wait: sleep or lock", "outside operators"
ACTIVITIES = (PYTHON, OPERATORS, LOADER, SYNC, ALLOCATION, CALLS, COLLECTIVE, WAITING, OUTSIDE)
"""What a host thread did; `outside operators` is Python, or a wait, of which no event tells."""

_IS_PYTHON, _IS_RANGE, _IS_OPERATOR, _IS_CALL = range(4)
_STEP = r"^ProfilerStep#"
LOADER_NAME = r"^enumerate\((?:DataLoader\)#.*\.__next__$|DataPipe\)#)"
_OPTIMIZER = r"^Optimizer\.step#"
_ENGINE = "^autograd::engine::"
_MODULE = "^nn.Module: "
_RUN_BACKWARD = r"\brun_backward\b"
_COMPILE = r"\(dynamo_timed\)$"
_SAVE = r"^torch/serialization\.py\(\d+\): save$"
_BACKEND = f"^(?:{GPU_BACKENDS}|{HOST_BACKENDS}):"
_WAITS_FOR_PEERS = f"^(?:{HOST_BACKENDS}):|^c10d::"
_ALLOCATION = rf"{FREE}|^(?:cuda|hip)(?:Host)?(?:Malloc|Alloc)|^cuMem(?:Alloc|Create|Map)"
_LAUNCH = r"Launch|Memcpy|Memset"
_SLEEPS = r"^<built-in (?:function|method) (?:sleep|select|poll|acquire|recv|recv_into|waitpid)\b"
_PLACE = re.compile(r"(.*)\((\d+|\?)\): (.*)", re.DOTALL)
LIBRARIES = frozenset({
    "torch", "torchvision", "torchaudio", "torchdata", "functorch", "numpy", "scipy", "pandas",
    "PIL", "cv2", "triton", "apex", "tqdm", "transformers", "accelerate", "lightning",
    "pytorch_lightning", "lightning_fabric", "deepspeed", "datasets", "tensorboard", "wandb",
    "haiprof",
})  # fmt: skip
"""Packages that are not the job's own: Kineto cuts the folder off, so that only names tell."""
_MARKED = {
    "forward": "forward", "forwardpass": "forward", "fwd": "forward",
    "backward": "backward", "backwardpass": "backward", "bwd": "backward",
    "loss": "loss", "computeloss": "loss",
    "optimizer": "optimizer", "optimizerstep": "optimizer",
    "dataloader": "input", "dataloading": "input", "loaddata": "input", "loadbatch": "input",
    "evaluation": "evaluation", "eval": "evaluation", "validation": "evaluation",
    "checkpoint": "checkpoint", "savecheckpoint": "checkpoint",
}  # fmt: skip
"""Ranges that a job marks with its own words for a position; letters alone count."""
(
    INPUT, PREPARE, FORWARD, LOSS, BACKWARD, GRADIENTS, OPTIMIZER, AFTER_STEP, EVALUATION,
    CHECKPOINT, COMPILE, BETWEEN_STEPS,
) = range(len(POSITIONS))  # fmt: skip
_START, _END = -1, -2  # edges of a step, beside the positions before and after some time


class Pieces(NamedTuple):
    """Parts of intervals between edges."""

    of: Ints  # which interval each is a part of
    starts: Ints
    ends: Ints
    segment: Ints  # the last edge at or before it; -1 before all


def split(starts: Ints, ends: Ints, edges: Ints) -> Pieces:
    """Cuts intervals at edges, which are in order; what is empty is left out."""
    first = np.searchsorted(edges, starts, side="right") - 1
    last = np.searchsorted(edges, ends, side="left") - 1
    counts = np.where(ends > starts, last - first + 1, 0)
    of = np.repeat(np.arange(len(starts)), counts)
    segment = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.concatenate([[np.iinfo(np.int64).min], edges])[segment + 1]
    finishes = np.concatenate([edges, [np.iinfo(np.int64).max]])[segment + 1]
    return Pieces(of, np.maximum(starts[of], begins), np.minimum(ends[of], finishes), segment)


class Moments(NamedTuple):
    """The innermost event of one thread, from each edge to the next."""

    edges: Ints
    rows: Ints
    """Of the tree, shape (len(edges) + 1,): the first before all edges; -1 where there is none."""


@dataclass(frozen=True)
class Host:
    """The host of one rank: Python functions, ranges, operators and calls, nested together."""

    trace: Trace
    tree: call_tree.CallTree
    kind: Ints  # per row, in which table it stood

    @cached_property
    def names(self) -> tuple[Ints, pl.Series]:
        """The place of each row's name among the distinct ones, and those."""
        return call_tree.distinct_names(self.tree.spans["name"])

    def has_name(self, pattern: str) -> Bools:
        """Which rows have such a name; the pattern is tried once per name."""
        of_row, names = self.names
        return names.str.contains(pattern).to_numpy().astype(np.bool_)[of_row]

    @cached_property
    def thread(self) -> Ints:
        """A number per row for its thread."""
        return call_tree.thread_numbers(self.tree.spans)

    @cached_property
    def is_operator(self) -> Bools:
        """Operators of torch."""
        return np.isin(self.kind, _IS_OPERATOR)

    @cached_property
    def is_call(self) -> Bools:
        """Calls of the runtime and the driver of the GPU."""
        return np.isin(self.kind, _IS_CALL)

    def call_rows(self, correlations: pl.Series) -> Ints:
        """The row of the first call with each correlation; -1 where there is none."""
        calls = self.tree.spans.select("correlation", "ts_ns", row=pl.int_range(pl.len()))
        known = calls.filter(pl.Series(self.is_call) & (pl.col("correlation") > 0)).sort("ts_ns")
        first = known.unique("correlation", keep="first", maintain_order=True)
        asked = correlations.to_frame("correlation")
        found = asked.join(first, on="correlation", how="left", maintain_order="left")
        return found["row"].fill_null(-1).cast(pl.Int64).to_numpy().copy()

    def name_codes(self, rows: Ints) -> Ints:
        """The name of each row as its place in `names`; -1 for none."""
        return np.append(self.names[0], -1)[rows]

    def texts(self, codes: Ints) -> list[str | None]:
        """The names of some codes."""
        return call_tree.take(self.names[1], codes).to_list()

    def name_at(self, rows: Ints) -> list[str | None]:
        """The names of some rows; None for none."""
        return self.texts(self.name_codes(rows))

    @cached_property
    def is_python(self) -> Bools:
        """Python functions, built-in ones too."""
        return np.isin(self.kind, _IS_PYTHON) & ~self.has_name(_MODULE)

    @cached_property
    def runs_backward(self) -> Bools:
        """The built-in function below which autograd runs, which says nothing of what it does."""
        return np.isin(self.kind, _IS_PYTHON) & self.has_name(_RUN_BACKWARD)

    @cached_property
    def is_backward(self) -> Bools:
        """What autograd runs: its engine, and operators that know the thread of their forward."""
        forward_tid = self.tree.spans["forward_tid"].fill_null(0).to_numpy() > 0
        return self.is_operator & (forward_tid | self.has_name(_ENGINE))

    @cached_property
    def has_stacks(self) -> bool:
        """Whether Python functions were recorded."""
        return bool((self.kind == _IS_PYTHON).any())

    @cached_property
    def is_place(self) -> Bools:
        """The job's own code: its Python functions; without stacks the ranges that it marked."""
        if not self.has_stacks:
            return np.isin(self.kind, _IS_RANGE) & ~self.has_name(f"{_BACKEND}|{_COMPILE}")
        of_row, names = self.names
        return self.is_python & np.array(list(map(_is_job_code, names)), dtype=np.bool_)[of_row]

    @cached_property
    def main(self) -> int:
        """The thread that trains: the profiler's, or that with most of the forward's operators."""
        spans, ahead = self.tree.spans, self.is_operator & ~self.is_backward
        if len(self.trace.steps):
            ahead &= (spans["tid"] == int(self.trace.steps["tid"][0])).to_numpy()
        counts = np.bincount(self.thread[ahead], minlength=1)
        if not counts.any() and len(self.thread):
            counts = np.bincount(self.thread)
        return int(counts.argmax())

    def moments(self, thread: int) -> Moments:
        """What was innermost on a thread at each moment."""
        rows = np.flatnonzero(self.thread == thread)
        starts, ends = self.tree.starts[rows], self.tree.ends[rows]
        edges = np.unique(np.concatenate([starts, ends]))
        inner = call_tree.innermost_at(starts, ends, edges)
        return Moments(edges, np.append(-1, np.append(rows, -1)[inner]))

    @cached_property
    def main_moments(self) -> Moments:
        """What was innermost on the training thread at each moment."""
        return self.moments(self.main)

    @cached_property
    def activity(self) -> Ints:
        """Per row, what it means that it is innermost: an index into ACTIVITIES."""
        calls = self.kind == _IS_CALL
        found = np.select(
            [
                calls & self.has_name(_ALLOCATION), calls & self.has_name(BLOCKING),
                calls & self.has_name(_LAUNCH), calls,
                self.has_name(_WAITS_FOR_PEERS), self.is_operator,
                self.is_python & self.has_name(_SLEEPS), self.kind == _IS_PYTHON,
            ],
            [ACTIVITIES.index(name) for name in (
                ALLOCATION, SYNC, OPERATORS, CALLS, COLLECTIVE, OPERATORS, WAITING, PYTHON,
            )],
            ACTIVITIES.index(PYTHON if self.has_stacks else OUTSIDE),
        )  # fmt: skip
        # All inside of a loader's range waits for input, whatever it is.
        waits = self.tree.climb(np.arange(len(found)), self.has_name(LOADER_NAME)) >= 0
        found[waits] = ACTIVITIES.index(LOADER)
        return found.astype(np.int64)

    @cached_property
    def forward_of(self) -> Ints:
        """Per row, for one of autograd's the forward operator that made it; -1 where unknown."""
        found = np.full(len(self.kind), -1, dtype=np.int64)
        rows = pl.DataFrame({
            "row": np.arange(len(found)), "start": self.tree.starts, "back": self.is_backward,
            "number": self.tree.spans["sequence_number"], "is_operator": self.is_operator,
        }).filter(pl.col("number") >= 0).sort("start")  # fmt: skip
        made = rows.filter("is_operator", ~pl.col("back")).rename({"row": "forward"})
        pairs = rows.filter("back").join_asof(
            made, on="start", by="number", check_sortedness=False
        ).drop_nulls("forward")  # fmt: skip
        found[pairs["row"].to_numpy()] = pairs["forward"].to_numpy()
        return found

    def place_rows(self, rows: Ints, times: Ints) -> Ints:
        """The job's innermost code around some rows, or of the training thread then."""
        found = self.tree.climb(rows, self.is_place)
        back = self.tree.climb(rows, self.forward_of >= 0)
        # Code inside of autograd (a hook, a Function) is its own; on a CPU the call of backward()
        # is around autograd on the same thread, and says nothing.
        depth = np.append(self.tree.depth, -1)
        outside = np.flatnonzero((back >= 0) & (depth[found] < depth[back]))
        ahead = self.tree.climb(self.forward_of[back[outside]], self.is_place)
        found[outside] = np.where(ahead >= 0, ahead, found[outside])
        lost = np.flatnonzero(found < 0)
        main = self.main_moments
        around = main.rows[np.searchsorted(main.edges, times[lost], side="right")]
        found[lost] = self.tree.climb(around, self.is_place)
        return found

    def chains(self, rows: Ints) -> pl.Series:
        """The job's code around each place, from the outermost call on, a line each; or null."""
        of_row, names = self.names
        known: dict[int, str | None] = {-1: None}
        for row in np.unique(rows).tolist():
            path = [row]
            while path[-1] not in known:
                above = int(self.tree.parent[path[-1]])
                while above >= 0 and not self.is_place[above]:
                    above = int(self.tree.parent[above])
                path.append(above)
            for inner, outer in zip(path[-2::-1], path[:0:-1], strict=True):
                name, around = names[int(of_row[inner])].replace("\n", " "), known[outer]
                known[inner] = name if around is None else f"{around}\n{name}"
        return pl.Series([known[row] for row in rows.tolist()], dtype=pl.String)

    @cached_property
    def positions(self) -> tuple[Ints, Ints]:
        """Edges in time, and the position from each to the next, and before all of them."""
        marks = _marked_spans(self)
        tree = call_tree.nest(marks)
        whole = Host(self.trace, tree, np.zeros(len(marks), dtype=np.int64))
        edges, rows = whole.moments(0) if len(marks) else Moments(*[np.zeros(0, np.int64)] * 2)
        code = tree.spans["position"].to_numpy()
        inside = np.where(rows >= 0, np.append(code, 0)[rows], -1) if len(marks) else np.array([-1])
        steps = self.trace.steps["start_ns"].to_numpy()
        every = np.unique(np.concatenate([edges, steps]))
        known = inside[np.searchsorted(edges, np.append(np.iinfo(np.int64).min, every), "right")]
        # Of those without a mark (-1) from what is around them in the step.
        begins_step = np.append(False, np.isin(every, steps))
        mark = pl.when(pl.col("known") >= 0).then("known")
        around = pl.DataFrame({"known": known, "step": np.cumsum(begins_step)}).select(
            before=mark.shift(1).forward_fill().over("step").fill_null(_START),
            after=mark.backward_fill().over("step").fill_null(_END),
        )
        found, lacks = known.copy(), np.flatnonzero(known < 0)
        given = bool((known >= 0).any()), bool((known == FORWARD).any())
        gaps = [_gap(old, new, *given) for old, new in around[lacks].iter_rows()]
        found[lacks] = np.array(gaps, dtype=np.int64)
        return every, found

    def position_at(self, times: Ints) -> Ints:
        """Positions at some times, as indices into POSITIONS."""
        edges, codes = self.positions
        return codes[np.searchsorted(edges, times, side="right")]


def read_host(trace: Trace) -> Host:
    """The host of one rank's trace."""
    parts = [call_tree.python_calls(trace), trace.host_ranges, trace.ops, trace.runtime]
    kept = {"event", "ts_ns", "dur_ns", "pid", "tid", "forward_tid", "sequence_number",
            "correlation"}  # fmt: skip
    name = pl.col("name").cast(parts[0]["name"].dtype)
    spans = pl.concat([
        part.select(*kept.intersection(part.columns), name, kind=pl.lit(kind, pl.Int64))
        for kind, part in enumerate(parts)
    ], how="diagonal")  # fmt: skip
    spans = pl.concat([spans, _waits_in_backward(spans)])
    # Before 2022 ranges were operators: those of loaders and optimizers are told by their names.
    is_old = has_name(spans, f"{LOADER_NAME}|{_OPTIMIZER}") & (pl.col("kind") == _IS_OPERATOR)
    kind = pl.when(is_old).then(_IS_RANGE).otherwise("kind")
    tree = call_tree.nest(spans.filter(~has_name(spans, _STEP)).with_columns(kind=kind))
    return Host(trace, tree, tree.spans["kind"].to_numpy())


def _waits_in_backward(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans of waiting for a collective below autograd, where the host's own backend exchanges.

    DDP waits there for its buckets, and no event tells: it is the time of backward() in which
    nothing else ran on its thread while a collective was under way on another one.
    """
    is_pass = has_name(spans, _RUN_BACKWARD)
    talks = spans.filter(has_name(spans, f"^(?:{HOST_BACKENDS}):")).sort("ts_ns")
    found = [spans.clear()]
    passes_by_thread = spans.filter(is_pass, len(talks) > 0).group_by("pid", "tid")
    for (pid, tid), own in passes_by_thread:
        here = (pl.col("pid") == pid) & (pl.col("tid") == tid)
        passes, away = union_of(own), union_of(talks.filter(~here))
        edges = np.column_stack(passes).ravel()
        others = spans.filter(here & ~is_pass)
        begins = others["ts_ns"].to_numpy()
        inside = np.searchsorted(edges, begins, "right") % 2 == 1
        waits = intersection(difference(passes, union_of(others.filter(pl.Series(inside)))), away)
        last = np.searchsorted(talks["ts_ns"].to_numpy(), waits.starts, "right") - 1
        found.append(talks[last].with_columns(
            ts_ns=pl.Series(waits.starts), dur_ns=pl.Series(waits.ends - waits.starts),
            pid=pl.lit(pid).cast(talks["pid"].dtype), tid=pl.lit(tid).cast(talks["tid"].dtype),
        ))  # fmt: skip
    return pl.concat(found)


def _is_job_code(name: str) -> bool:
    match = _PLACE.match(name)
    if match is None or name.startswith("<"):
        return False
    file = match[1]
    top = re.split(r"[/\\.]", file, maxsplit=1)[0]
    known = top in LIBRARIES or (top in sys.stdlib_module_names and not file.startswith("/"))
    return not (known or is_library(file, match[3]))


def parse_place(name: str) -> tuple[str | None, int | None, str]:
    """File, line and function of a Python function's name; of any other name the name alone."""
    match = _PLACE.match(name)
    plain = re.sub(call_tree.ADDRESS, "", name)
    if match is None:
        return None, None, plain
    return match[1], None if match[2] == "?" else int(match[2]), match[3]


def _marked_spans(host: Host) -> pl.DataFrame:
    """Spans whose position is known for certain: `pid`, `tid`, `ts_ns`, `dur_ns`, `position`."""
    of_row, names = host.names
    words = [_MARKED.get(re.sub("[^a-z]", "", name.lower())) for name in names]
    said = np.array([-1 if word is None else POSITIONS.index(word) for word in words] or [-1])
    said = said[of_row] if len(of_row) else np.zeros(0, dtype=np.int64)
    said = np.where((host.kind == _IS_RANGE) & (host.thread == host.main), said, -1)
    module = host.has_name(_MODULE) & (host.thread == host.main)
    above = host.tree.climb(host.tree.parent, module | host.is_backward | host.runs_backward)
    codes = np.select(
        [
            host.has_name(LOADER_NAME) & (host.thread == host.main), host.has_name(_OPTIMIZER),
            host.has_name(_COMPILE), host.has_name(_SAVE), host.runs_backward, said >= 0,
            module & (above < 0),
        ],
        [INPUT, OPTIMIZER, COMPILE, CHECKPOINT, BACKWARD, said, FORWARD],
        -1,
    )  # fmt: skip
    marked = pl.DataFrame({
        "ts_ns": host.tree.starts, "dur_ns": host.tree.ends - host.tree.starts,
        "position": codes.astype(np.int64),
    }).filter(pl.col("position") >= 0)  # fmt: skip
    is_forward = pl.col("name").cast(pl.String) == "forward"
    phases = host.trace.phase_ranges.select(
        "ts_ns", "dur_ns", position=pl.when(is_forward).then(FORWARD).otherwise(BACKWARD)
    )
    known = pl.concat([marked, phases.cast({"position": pl.Int64})])
    # Backward: from the first to the last of autograd's operators between two other starts.
    top = host.tree.climb(host.tree.parent, host.is_backward) < 0
    own = np.flatnonzero(host.is_backward & top)
    number = host.tree.spans["sequence_number"].fill_null(-1).to_numpy() >= 0
    outermost = host.tree.climb(host.tree.parent, host.is_operator) < 0
    ahead = host.is_operator & ~host.is_backward & number & outermost
    steps = host.trace.steps["start_ns"].to_numpy()
    breaks = np.sort(np.concatenate([known["ts_ns"], host.tree.starts[ahead], steps]))
    between = np.searchsorted(breaks, host.tree.starts[own], side="right")
    passes = pl.DataFrame({
        "pass": between, "ts_ns": host.tree.starts[own], "end": host.tree.ends[own],
    }).group_by("pass").agg(pl.col("ts_ns").min(), pl.col("end").max()).sort("ts_ns")  # fmt: skip
    found = pl.concat([known, passes.select(
        "ts_ns", dur_ns=pl.col("end") - pl.col("ts_ns"), position=pl.lit(BACKWARD, pl.Int64)
    )])  # fmt: skip
    one = dict.fromkeys(("pid", "tid"), pl.lit(0, pl.Int64))
    return found.with_columns(name=pl.lit(""), **one)


def _gap(before: int, after: int, marked: bool, has_forward: bool) -> int:
    """The position of time between two marked positions of a step."""
    if not marked:
        return FORWARD
    if after == BACKWARD:
        return LOSS if before in (FORWARD, LOSS) and has_forward else FORWARD
    if after in (LOSS, FORWARD):
        return FORWARD if before == FORWARD or after == LOSS else PREPARE
    if after == OPTIMIZER:
        return {BACKWARD: GRADIENTS, OPTIMIZER: OPTIMIZER}.get(before, FORWARD)
    if before in (OPTIMIZER, BACKWARD, FORWARD, LOSS):
        return AFTER_STEP
    if before == _START and after != _END:
        return BETWEEN_STEPS
    if before in (_START, INPUT):
        return PREPARE if before == INPUT and has_forward else FORWARD
    return AFTER_STEP
