"""The call tree of each thread, call stacks as numbers, and haiprof's own frames taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Ints, covered_lengths, union
from haiprof.trace_format.kineto.events import OPS, PYTHON
from haiprof.trace_format.kineto.rank_trace import Trace

_TABLES = {OPS: "operators", PYTHON: "Python functions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTree:
    """Spans of threads with their nesting; a row number refers to `spans`."""

    spans: pl.DataFrame  # by thread (`pid`, `tid`), then start; a parent before its children
    starts: Ints  # ns
    ends: Ints  # ns; at least 1 ns after the start, so that spans without duration nest too
    parent: Ints  # row of the innermost span around; -1 at the top
    depth: Ints  # number of enclosing spans

    def climb(self, rows: Ints, wanted: Bools) -> Ints:
        """The innermost wanted span at or around each row; -1 where there is none."""
        return climb(rows, self.parent, lambda _, row: wanted[row])

    def outwards(self, rows: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yields rows, then what is around them, level by level: places in `rows`, and the row."""
        place = np.arange(len(rows))
        while True:
            place, rows = place[rows >= 0], rows[rows >= 0]
            if not len(rows):
                return
            yield place, rows
            rows = self.parent[rows]

    def names_at(self, rows: Ints) -> pl.Series:
        """The names of some rows; null for -1."""
        return take(self.spans["name"], rows).cast(pl.String)

    def names_around(self, rows: Ints) -> pl.DataFrame:
        """`place` in `rows`, and each `name` of the spans at or around it, once."""
        levels = [pl.DataFrame({"place": place, "name": self.spans["name"].gather(row)})
                  for place, row in self.outwards(rows)]  # fmt: skip
        empty = pl.DataFrame({"place": rows[:0], "name": self.spans["name"].head(0)})
        return pl.concat([empty, *levels]).unique().with_columns(pl.col("name").cast(pl.String))


def nest(spans: pl.DataFrame) -> CallTree:
    """Resolves the nesting of spans; O(n log n) without a loop over them."""
    spans = spans.sort("pid", "tid", "ts_ns", -pl.col("dur_ns"), maintain_order=True)
    starts = spans["ts_ns"].to_numpy()
    ends = np.maximum(starts + spans["dur_ns"].to_numpy(), starts + 1)
    parent = _enclosing(ends, thread_numbers(spans))
    depth = depths(parent)
    assert depth is not None, "what encloses a span comes before it"
    return CallTree(spans=spans, starts=starts, ends=ends, parent=parent, depth=depth)


def climb(rows: Ints, parent: Ints, fits: Callable[[Ints, Ints], Bools]) -> Ints:
    """From each row outwards to the first of which `fits(place in rows, row)` is true; else -1."""
    found = rows.copy()
    active = np.flatnonzero(found >= 0)
    while len(active):
        active = active[~fits(active, found[active])]
        found[active] = parent[found[active]]
        active = active[found[active] >= 0]
    return found


def thread_numbers(spans: pl.DataFrame) -> Ints:
    """A number per span for its thread; spans are by thread."""
    return spans.select(pl.struct("pid", "tid").rle_id().cast(pl.Int64)).to_series().to_numpy()


def depths(parent: Ints) -> Ints | None:
    """How many spans enclose each one; None if a span encloses itself in the end."""
    depth, above = (parent >= 0).astype(np.int64), parent.copy()
    active = np.flatnonzero(above >= 0)
    for _ in range(_ROUNDS):  # pointer jumping: the distance to the ancestor doubles
        if not len(active):
            return depth
        more, higher = depth[above[active]], above[above[active]]
        depth[active] += more
        above[active] = higher
        active = active[higher >= 0]
    return None


def _enclosing(ends: Ints, thread: Ints) -> Ints:
    """Row of the last earlier span of the thread that ends no earlier; rows are by start.

    A candidate that ends too early is replaced by its own candidate: everything in between ends
    earlier still. All rows advance at once, as in pointer jumping, so the chains shorten.
    """
    found = np.arange(-1, len(ends) - 1, dtype=np.int64)
    found[:1] = -1
    found[1:][thread[1:] != thread[:-1]] = -1
    active = np.flatnonzero(found >= 0)
    while len(active):
        candidate = found[active]
        short = ends[candidate] < ends[active]
        active, candidate = active[short], candidate[short]
        found[active] = found[candidate]
        active = active[found[active] >= 0]
    return found


def roots(parent: Ints) -> Ints:
    """Row of the outermost span around each row; its own at the top."""
    return climb(np.arange(len(parent)), parent, lambda _, row: parent[row] < 0)


def own_ns(tree: CallTree) -> Ints:
    """Duration of each span without what the spans directly inside it cover, in ns."""
    ends = tree.starts + tree.spans["dur_ns"].to_numpy()
    ((_, own),) = total_and_own(tree.starts, ends, tree.parent, lambda begin, end: end - begin)
    return own


def innermost(tree: CallTree, calls: pl.DataFrame) -> Ints:
    """The innermost span around each call, on its thread."""
    starts = calls["ts_ns"].to_numpy()
    ends = np.maximum(starts + calls["dur_ns"].to_numpy(), starts + 1)
    # Row of the last span that began at or before each call on its thread; -1 without one.
    found = np.full(len(starts), -1, dtype=np.int64)
    threads = tree.spans.with_row_index("row").group_by("pid", "tid", maintain_order=True)
    first = {key: (int(rows["row"][0]), len(rows)) for key, rows in threads}
    for key, rows in calls.select("pid", "tid").with_row_index("row").group_by("pid", "tid"):
        if key not in first:
            continue
        at, count = first[key]
        place = rows["row"].to_numpy()
        begun = np.searchsorted(tree.starts[at : at + count], starts[place], side="right")
        found[place] = np.where(begun > 0, at + begun - 1, -1)
    return climb(found, tree.parent, lambda at, row: tree.ends[row] >= ends[at])


def innermost_at(starts: Ints, ends: Ints, times: Ints) -> Ints:
    """The innermost range around each time: the one that began last; ranges are by start."""
    outer = _enclosing(ends, np.zeros_like(ends))
    begun = np.searchsorted(starts, times, side="right") - 1
    return climb(begun, outer, lambda at, row: ends[row] > times[at])


def call_tree(trace: Trace, *, table: str = OPS) -> pl.DataFrame:
    """Each operator or Python function with its caller and its own time.

    Args:
        trace: Of one rank.
        table: `ops` or `python`.

    Returns:
        One row per span: `event`, `name`, `pid`, `tid`, `ts_ns`, `dur_ns`, `self_ns`,
        `parent_event`, `depth`.

    Source: nesting as in HTA's CallStackGraph, which HTA builds twice and event by event
    (HTA issue 141).
    """
    if table not in _TABLES:
        raise ValueError(f"no call tree of {table!r}: it is one of {', '.join(_TABLES)}")
    spans = trace.ops if table == OPS else trace.python
    tree = nest(spans)
    return tree.spans.select(
        "event", pl.col("name").cast(pl.String), "pid", "tid", "ts_ns", "dur_ns",
        pl.Series("self_ns", own_ns(tree), dtype=pl.Int64),
        take(tree.spans["event"], tree.parent).alias("parent_event"),
        pl.Series("depth", tree.depth, dtype=pl.Int64),
    )  # fmt: skip


ADDRESS = " at 0x[0-9a-fA-F]+"
"""In the names of built-in methods: of the object, another one in each call."""
_ROUNDS = 64  # of doubling: more callers than a trace can hold events


class Stacks(NamedTuple):
    """Distinct call stacks; callers come before callees."""

    of_call: Ints  # stack of each call, shape (calls,)
    caller: Ints  # stack without its last call, -1 for a root; shape (stacks,)
    name: Ints  # code of the last call's name, shape (stacks,)
    thread: Ints  # code of the thread, shape (stacks,): stacks of two threads are not the same
    names: pl.Series  # by code
    threads: pl.DataFrame  # `pid` and `tid` by code


def stacks(spans: pl.DataFrame, parent: Ints) -> Stacks:
    """Numbers the distinct stacks of spans, which are by thread; none may enclose itself."""
    depth = depths(parent)
    assert depth is not None, "callers are resolved before"
    (code, names), of_thread = name_codes(spans["name"]), thread_numbers(spans)
    of_call = np.full(len(parent), -1, dtype=np.int64)
    count = int(code.max(initial=0)) + 1
    caller, name, thread = np.zeros((3, 0), dtype=np.int64)
    for level in range(int(depth.max(initial=-1)) + 1):
        rows = np.flatnonzero(depth == level)
        before = of_call[parent[rows]] if level else of_thread[rows]
        keys, place = np.unique(before * count + code[rows], return_inverse=True)
        of_call[rows] = len(caller) + place
        above = keys // count
        thread = np.append(thread, thread[above] if level else above)
        caller = np.append(caller, above if level else np.full(len(keys), -1))
        name = np.append(name, keys % count)
    threads = spans.select("pid", "tid").unique(maintain_order=True)
    return Stacks(of_call, caller, name, thread, names, threads)


def total_and_own(
    starts: Ints, ends: Ints, parent: Ints, *measures: Callable[[Ints, Ints], Ints]
) -> Iterator[tuple[Ints, Ints]]:
    """What each call takes by measures of (starts, ends), and what without the calls inside."""
    inner = np.flatnonzero(parent >= 0)
    begins = uncovered_starts(starts, ends, parent)[inner]
    for measure in measures:
        total = measure(starts, ends)
        own = total.copy()
        np.subtract.at(own, parent[inner], measure(begins, ends[inner]))
        yield total, own


def uncovered_starts(starts: Ints, ends: Ints, parent: Ints) -> Ints:
    """The start of each call's uncovered time: if calls of one caller overlap, it counts once."""
    rows = pl.DataFrame({"parent": parent, "start": starts, "end": ends})
    reached = pl.col("end").cum_max().shift(1).over("parent")
    begin = pl.min_horizontal(pl.max_horizontal("start", reached), "end")
    return rows.select(begin).to_series().to_numpy()


def take(values: pl.Series, rows: Ints) -> pl.Series:
    """The values of some rows; null for -1."""
    at = pl.Series(rows, dtype=pl.Int64)
    return values.gather(at.set(at < 0, None))


def distinct_names(names: pl.Series) -> tuple[Ints, pl.Series]:
    """The place of each name among the distinct ones, and those."""
    _, first, code = np.unique(
        names.to_physical().to_numpy(), return_index=True, return_inverse=True
    )
    return code, names.gather(pl.Series(first)).cast(pl.String)


def name_codes(names: pl.Series) -> tuple[Ints, pl.Series]:
    """The same without addresses of objects."""
    code, texts = distinct_names(names)
    plain = texts.str.replace_all(ADDRESS, "")
    distinct = plain.unique(maintain_order=True)
    of_plain = plain.replace_strict(distinct, np.arange(len(distinct)), return_dtype=pl.Int64)
    return of_plain.to_numpy()[code], distinct


def is_outermost(found: Stacks) -> Bools:
    """Whether no caller in a stack has the name of its last call; shape (stacks,)."""
    name, caller = found.name, found.caller
    return climb(caller, caller, lambda at, row: name[row] == name[at]) < 0


def stack_texts(found: Stacks) -> pl.Series:
    """Each stack as `root;...;leaf`; a semicolon inside a name becomes a comma."""
    plain = found.names.str.replace_all(";", ",", literal=True).to_list()
    texts: list[str] = []
    for caller, name in zip(found.caller.tolist(), found.name.tolist(), strict=True):
        texts.append(plain[name] if caller < 0 else f"{texts[caller]};{plain[name]}")
    return pl.Series("stack", texts, dtype=pl.String)


_OWN = r"(?:^|[/\\])haiprof[/\\](?:in_job|base|run_format|linux)[/\\]"
_THREAD_START = "threading.py("


def python_calls(trace: Trace) -> pl.DataFrame:
    """Python calls without those of haiprof's modules inside the job.

    What a wrapper of haiprof called belongs to the wrapper's caller, and the wrapper's own time
    with it. Threads that haiprof started are left out whole. A call that the profiler found running
    has the line at which it stood then, which says nothing of what it did later: `train.py(?)`.
    """
    # torch's profiler notes running calls before any other returns (profiler_python.cpp).
    first_end = (pl.col("ts_ns") + pl.col("dur_ns")).min()
    found_running = (pl.col("ts_ns") < first_end) & (pl.col("ts_ns") + pl.col("dur_ns") > first_end)
    running = trace.python.filter(found_running)["name"].unique().cast(pl.String)
    without = running.str.replace(r"\(\d+\): ", "(?): ")
    calls = trace.python
    if len(running) and isinstance(texts := calls["name"].dtype, pl.Enum):
        texts = pl.Enum(pl.concat([texts.categories, without]).unique(maintain_order=True))
        name = pl.col("name").cast(texts)
        calls = calls.with_columns(
            pl.when(found_running).then(name.replace(running, without)).otherwise(name)
        )
    names = calls["name"].unique()
    own_names = names.filter(names.cast(pl.String).str.contains(_OWN))
    if own_names.is_empty():
        return calls
    marked = calls.with_columns(is_own=pl.col("name").is_in(own_names.implode()))
    # Threads in which nothing but threading.py calls haiprof.
    found = []
    for (pid, tid), rows in marked.filter(pl.col("is_own").any().over("pid", "tid")).group_by(
        "pid", "tid"
    ):
        starts = rows["ts_ns"].to_numpy()
        ends = starts + rows["dur_ns"].to_numpy()
        own = rows["is_own"].to_numpy()
        covered = covered_lengths(union(starts[own], ends[own]), starts, ends)
        others = rows.filter(pl.Series(~own & (covered < ends - starts)))["name"].cast(pl.String)
        if others.str.starts_with(_THREAD_START).all():
            found.append((pid, tid))
    threads = pl.DataFrame(found, schema={"pid": pl.Int64, "tid": pl.Int64}, orient="row")
    kept = marked.join(threads, on=["pid", "tid"], how="anti", maintain_order="left")
    above = kept.filter("is_own").select("python_id", "parent_id").drop_nulls("python_id")
    if above["python_id"].is_duplicated().any():  # ids that mean nothing: times nest the calls
        return kept.filter(~pl.col("is_own")).drop("is_own")
    # Of each own call, by id, the id of the nearest call around it that is not own.
    callers = dict(above.iter_rows())
    outside: dict[int, int | None] = {}
    for call in callers:
        caller, seen = callers[call], {call}
        while caller in callers and caller not in seen:
            seen.add(caller)
            caller = callers[caller]
        outside[call] = caller
    moved = pl.col("parent_id").replace_strict(outside, default=pl.col("parent_id"))
    return kept.filter(~pl.col("is_own")).drop("is_own").with_columns(parent_id=moved)
