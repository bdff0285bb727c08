"""Lines of user code in sampled stacks: how much of the time each takes, and what it calls."""

from __future__ import annotations

import ast
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, islice, takewhile
from typing import TypeVar

import numpy as np
import polars as pl

from haiprof.base.code_places import code_name, place_text
from haiprof.base.intervals import Floats, Ints
from haiprof.base.ledger import POSITIONS
from haiprof.base.units import ratio_text, visible
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples, CodeTree, Frame
from haiprof.run_format.secrets import mask_text

LINE_SCHEMA = {
    "rank": pl.Int64, "worker": pl.Int64, "phase": pl.String, "position": pl.String,
    "file": pl.String, "line": pl.Int64, "function": pl.String, "code": pl.String,
    "self_count": pl.Int64, "inclusive_count": pl.Int64, "sample_count": pl.Int64,
    "self_ratio": pl.Float64, "self_low": pl.Float64, "self_high": pl.Float64,
    "inclusive_ratio": pl.Float64, "time_ns": pl.Float64, "ns_per_step": pl.Float64,
    "inclusive_ns_per_step": pl.Float64,
}  # fmt: skip
_COMPREHENSION = re.compile(
    r"(?:(?:(?:\.<locals>)?\.|\A)<(?:genexpr|listcomp|dictcomp|setcomp|lambda)>)+\Z"
)
"""What runs in a comprehension or a lambda is its function's."""
CALLEE_LIMIT = 3
CALLER_LIMIT = 3
TRAINERS = ("transformers.trainer", "lightning.pytorch", "pytorch_lightning")
"""Of a way through these, the ends tell what is done; all between is their loop."""
FUNCTION_LIMIT = 20
MIN_WAY_RATIO = 0.5
"""What a function calls, or is called by, is named where so much of its time goes that way."""
_WRAPPERS = (
    "Module._wrapped_call_impl", "Module._call_impl", ".decorate_context",
    "profile_hook_step.<locals>.wrapper", "._use_grad", "_exception_logger.<locals>.wrapper",
    "_time_logger.<locals>.wrapper", "_no_grad.<locals>._no_grad_wrapper",
)  # fmt: skip
"""Of torch, around calls of modules, optimizers, collectives, functions under no_grad: they tell
nothing."""
_SCRIPT = "<module>"  # the outermost frame of every script: it tells nothing either
_SOURCE_LIMIT_BYTES = 1 << 20
_Step = TypeVar("_Step", str, int)
_Z = 1.96  # 95 % of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLine:
    """A function of the job's own code that a finding is about, as it was sampled."""

    file: str
    line: int  # its line that was seen most often
    function: str
    share: float | None  # of what `of` says; None where it is not known
    low: float | None
    high: float | None  # where the share lies with 95 % certainty; None where that is not known
    of: str  # what it is a share of: `the step`, `the workers' loading`
    sample_count: int | None
    """None where the ledger has the share: it rests on more than the samples of this line."""
    callees: tuple[str, ...]
    """Functions of libraries in which most of that time passes, from its own call inwards."""
    callers: tuple[str, ...] = ()
    """The job's own lines through which most of that time came there, from the nearest outwards:
    `train.py:307 log_metrics`."""

    @property
    def location(self) -> str:
        """`train.py:88 load_image`; the names are whatever the run directory holds."""
        return place_text(self.file, self.line, self.function)

    def describe(self) -> str:
        """`train.py:88 load_image: 61 % of the step (55 to 67 %), in PIL.Image.open`."""
        if self.share is None:
            return self.location
        between = ""
        if self.low is not None and self.high is not None:
            between = f" ({100 * self.low:.0f} to {ratio_text(self.high)})"
            if round(100 * self.low) == 0:
                between = f" (at most {ratio_text(self.high)})"
            if ratio_text(self.high) == ratio_text(self.share):  # all that it can be
                between = f" (at least {ratio_text(self.low)})"
        inside = visible(f", in {' > '.join(self.callees)}") if self.callees else ""
        by = f", called by {' < '.join(self.callers)}" if self.callers else ""
        return f"{self.location}: {ratio_text(self.share)} of {self.of}{between}{inside}{by}"


def find_statement(
    tree: CodeTree, pattern: str, unchanged_since_ns: int
) -> tuple[str, int, str] | None:
    """File, line and function of the one call or assignment that a pattern matches.

    It is looked for in the files of the job that were sampled, as they are on this machine. A call
    is matched without what it is called on: `set_detect_anomaly(True)`. None where none matches,
    where several do, and where one of these files is not known to be what the job ran.
    """
    files: dict[str, list[Frame]] = {}
    for frame in compress(tree.frames, ~tree.library):
        files.setdefault(frame.file, []).append(frame)
    found = []
    try:
        for file, frames in files.items():
            module = _parse_source(file, frames, unchanged_since_ns)
            found += [(file, *place) for place in _matching_places(module, re.compile(pattern))]
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    return found[0] if len(found) == 1 else None


def code_at(file: str, line: int, unchanged_since_ns: int) -> str:
    """What stands at a line of a Python file; empty where that may not be what the job ran."""
    try:
        return mask_text(_read_source(file, unchanged_since_ns).splitlines()[line - 1].strip())
    except (OSError, ValueError, SyntaxError, IndexError):
        return ""


def _read_source(file: str, unchanged_since_ns: int) -> str:
    """Raises ValueError where a file is younger than the job."""
    status = os.stat(file)
    is_source = stat.S_ISREG(status.st_mode) and os.path.isabs(file) and file.endswith(".py")
    is_changed = status.st_mtime_ns > unchanged_since_ns
    if not is_source or is_changed or status.st_size > _SOURCE_LIMIT_BYTES:
        raise ValueError(file)
    with tokenize.open(file) as source:
        return source.read()


def _parse_source(file: str, frames: Sequence[Frame], unchanged_since_ns: int) -> ast.Module:
    """Raises ValueError also where the file lacks what was sampled there."""
    text = _read_source(file, unchanged_since_ns)
    words = " ".join(text.split())
    if not all(frame.expression.removesuffix("…") in words for frame in frames):
        raise ValueError(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the job's own escapes
        return ast.parse(text)


def _matching_places(
    node: ast.AST, pattern: re.Pattern[str], function: str = "<module>"
) -> set[tuple[int, str]]:
    """Line and function of the innermost calls and assignments that match."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        function = node.name if function == "<module>" else f"{function}.{node.name}"
    found = set[tuple[int, str]]()
    for child in ast.iter_child_nodes(node):
        found |= _matching_places(child, pattern, function)
    line, text = None, ""
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        line = node.func.end_lineno  # of a chain over several lines that of the name
        text = f"{name}({', '.join(map(ast.unparse, (*node.args, *node.keywords)))})"
    elif isinstance(node, ast.Assign):
        line, text = node.lineno, ast.unparse(node)
    return {(line, function)} if not found and line and pattern.match(text) else found


def line_frame(samples: CodeSamples, ledger: tuple[Ints, Floats] | None = None) -> pl.DataFrame:
    """Lines of user code, by rank, thread and phase."""
    tree = samples.tree
    position, of_step = ledger or (np.full(len(samples.stack), -1), np.zeros(len(samples.stack)))
    columns = {
        "rank": samples.rank, "worker": samples.worker, "phase": samples.phase,
        "position": position, "stack": samples.stack.astype(np.int64),
        "weight": samples.weight_ns, "of_step": of_step,
    }  # fmt: skip
    group = ("rank", "worker", "phase", "position")
    cells = pl.DataFrame(columns).group_by(*group, "stack")
    counted = cells.agg(pl.len(), pl.col("weight", "of_step").sum())
    totals = counted.group_by(group).agg(sample_count=pl.col("len").sum())
    library, place = np.append(tree.library, True), tree.line_places()
    every = np.arange(len(tree.place))
    stack, at, parts = every, every, []
    while at.any():
        user = ~library[place[at]]
        exact = tree.place[at][user]
        parts.append(pl.DataFrame({"stack": stack[user], "frame": place[at][user], "code": exact}))
        at = tree.parent[at]
        stack, at = stack[at > 0], at[at > 0]
    empty = pl.DataFrame(schema={"stack": pl.Int64, "frame": pl.Int64, "code": pl.Int64})
    whole = pl.concat([empty, *parts]).unique()
    pairs = whole.select("stack", "frame").unique()
    inner = pl.DataFrame({"stack": every, "frame": place[innermost_stack(tree)]})
    own = counted.join(inner, on="stack").filter(pl.col("frame") >= 0)
    own = own.group_by(*group, "frame").agg(
        self_count=pl.col("len").sum(), time_ns=pl.col("weight").sum(),
        ns_per_step=pl.col("of_step").sum(),
    )  # fmt: skip
    inclusive = counted.join(pairs, on="stack").group_by(*group, "frame")
    found = (
        inclusive.agg(
            inclusive_count=pl.col("len").sum(),
            inclusive_ns_per_step=pl.col("of_step").sum().round(),
        )
        .join(own, on=[*group, "frame"], how="left")
        .join(totals, on=group)
        .with_columns(
            pl.col("self_count").fill_null(0), pl.col("time_ns", "ns_per_step").fill_null(0.0)
        )
    )
    # What a line itself takes names it before what it passes through.
    parts_of_line = whole.join(inner.with_columns(own=pl.lit(1)), on=["stack", "frame"], how="left")
    seen = (
        counted.join(parts_of_line, on="stack")
        .group_by(*group, "frame", "code")
        .agg((pl.col("len") * (1 + pl.col("own").fill_null(0))).sum())
    )
    code = _most_seen_code(seen, tree)
    named = _with_names(found.join(code, on=[*group, "frame"], how="left"), tree)
    return named if ledger else named.drop("position", "ns_per_step", "inclusive_ns_per_step")


def _most_seen_code(seen: pl.DataFrame, tree: CodeTree) -> pl.DataFrame:
    """What of each line was seen running most often, where its text was recorded."""
    texts = [tree.frames[place].expression or None for place in seen["code"].to_list()]
    known = seen.with_columns(code=pl.Series(texts, dtype=pl.String)).drop_nulls("code")
    by_text = known.group_by(pl.exclude("len")).agg(pl.col("len").sum())
    return by_text.sort("len", "code").group_by(pl.exclude("len", "code")).agg(pl.last("code"))


def _with_names(found: pl.DataFrame, tree: CodeTree) -> pl.DataFrame:
    """Frames and phases by name, counts as shares."""
    low, high = wilson(found["self_count"].to_numpy(), found["sample_count"].to_numpy())
    frame = found["frame"].to_list()
    named = found.with_columns(
        phase=pl.Series(CODE_PHASES, dtype=pl.String).gather(found["phase"]),
        position=pl.Series([*POSITIONS, None], dtype=pl.String).gather(
            found["position"] % (len(POSITIONS) + 1)
        ),
        **{
            name: pl.when(pl.col("position") >= 0).then(name)
            for name in ("ns_per_step", "inclusive_ns_per_step")
        },
        file=pl.Series([tree.frames[f].file for f in frame], dtype=pl.String),
        line=pl.Series([tree.frames[f].line for f in frame], dtype=pl.Int64),
        function=pl.Series([tree.frames[f].function for f in frame], dtype=pl.String),
        worker=pl.when(pl.col("worker") >= 0).then("worker"),
        self_ratio=pl.col("self_count") / pl.col("sample_count"),
        self_low=pl.Series(low),
        self_high=pl.Series(high),
        inclusive_ratio=pl.col("inclusive_count") / pl.col("sample_count"),
        time_ns=pl.when((pl.col("time_ns") > 0) & (pl.col("worker") < 0)).then("time_ns"),
    )
    chosen = named.select(pl.col(name).cast(dtype) for name, dtype in LINE_SCHEMA.items())
    order = ["rank", "worker", "phase", "position", "self_count", "inclusive_count", "file", "line"]
    descending = [False, False, False, False, True, True, False, False]
    return chosen.sort(order, descending=descending, nulls_last=False)


def function_times(samples: CodeSamples, of: str, part: float = 1.0) -> list[CodeLine]:
    """The job's functions by the time that passes in them and in what libraries they call.

    The first of them; their shares are of what `of` says, of which the samples are a `part`.
    """
    tree = samples.tree  # where no sample's time is known, each counts the same
    weight = samples.weight_ns if samples.weight_ns.any() else np.ones(len(samples.stack))
    if not (total := float(weight.sum())):
        return []
    inner, place = innermost_stack(tree), tree.line_places()
    functions, number = functions_of(tree)
    of_sample = number[tree.place[inner[samples.stack]]]
    own = np.bincount(of_sample + 1, weights=weight, minlength=len(functions) + 1)[1:]
    effective = total**2 / float((weight**2).sum())
    low, high = wilson(own / total * effective, np.full(len(own), effective))
    order = sorted(np.flatnonzero(own).tolist(), key=lambda f: (-own[f], functions[f]))
    found = []
    for function in order[:FUNCTION_LIMIT]:
        rows = of_sample == function
        stacks = inner[samples.stack[rows]]
        frame = tree.frames[int(np.bincount(place[stacks], weights=weight[rows]).argmax())]
        paths = [_user_callers(tree, place, stack) for stack in stacks.tolist()]
        callers = (tree.frames[at] for at in _common_way(paths, weight[rows]))
        line = CodeLine(
            file=frame.file, line=frame.line, function=frame.function,
            share=float(own[function]) / total * part, low=float(low[function]) * part,
            high=float(high[function]) * part, of=of, sample_count=int(rows.sum()),
            callees=common_callees(tree, samples.stack[rows], weight[rows], inner=inner),
            callers=tuple(place_text(*caller[:3]) for caller in callers),
        )  # fmt: skip
        found.append(line)
    return found


def written_in(function: str) -> str:
    """The function that a comprehension or a lambda is written in; other functions as they are."""
    return _COMPREHENSION.sub("", function) or "<module>"


def is_part_of_function(function: str) -> bool:
    """Whether that is a comprehension or a lambda, which belongs to the function around it."""
    return _COMPREHENSION.search(function) is not None


def functions_of(tree: CodeTree) -> tuple[list[tuple[str, str]], Ints]:
    """Functions as (file, name), and the number of each frame's; -1 for no frame, as the last."""
    known: dict[tuple[str, str], int] = {}
    keys = [(frame.file, written_in(frame.function)) for frame in tree.frames]
    numbers = [known.setdefault(key, len(known)) for key in keys]
    return list(known), np.array([*numbers, -1], dtype=np.int64)


def common_callees(
    tree: CodeTree, stack: Ints, weight: Floats, *, inner: Ints | None = None
) -> tuple[str, ...]:
    """Functions of libraries in which most of some stacks' time passes, from the job's own line."""
    inner = innermost_stack(tree) if inner is None else inner
    stacks, place = np.unique(stack, return_inverse=True)
    weight = np.bincount(place, weight).astype(np.float64)
    paths = (_library_path(tree, inner, number) for number in stacks.tolist())
    ways = [p if p[:1] and p[0].startswith(TRAINERS) else p[:CALLEE_LIMIT] for p in paths]
    way = _common_way(ways, weight)
    ends = _branches(ways, weight, way) if way[:1] and way[0].startswith(TRAINERS) else ""
    return (*way[:1], *[*way[1:], *([ends] if ends else [])][1 - CALLEE_LIMIT :])


def _branches(paths: Sequence[tuple[str, ...]], weight: Floats, way: tuple[str, ...]) -> str:
    """`clip, count`: the functions into which a third of the weight goes each where a way ends."""
    times = _next_steps(paths, weight, way)
    least = float(weight.sum()) / 3
    largest = sorted(times, key=lambda name: (-times[name], name))[:2]
    return ", ".join(name for name in largest if times[name] >= least)


def _common_way(paths: Sequence[tuple[_Step, ...]], weight: Floats) -> tuple[_Step, ...]:
    """The steps that most of the weight takes, one after the other."""
    way: tuple[_Step, ...] = ()
    while times := _next_steps(paths, weight, way):
        step = max(times, key=lambda found: (times[found], found))
        if times[step] < MIN_WAY_RATIO * float(weight.sum()):
            break
        way += (step,)
    return way


def _next_steps(
    paths: Sequence[tuple[_Step, ...]], weight: Floats, way: tuple[_Step, ...]
) -> dict[_Step, float]:
    """The weight of the paths that go a way, by their step after it."""
    times: dict[_Step, float] = {}
    for path, part in zip(paths, weight.tolist(), strict=True):
        if len(path) > len(way) and path[: len(way)] == way:
            times[path[len(way)]] = times.get(path[len(way)], 0.0) + part
    return times


def _user_callers(tree: CodeTree, place: Ints, stack: int) -> tuple[int, ...]:
    """Frames of user code outside a stack's own one, the nearest first."""
    outer = (int(place[at]) for at in tree.outwards(int(tree.parent[stack])))
    named = ((frame, tree.frames[frame].function) for frame in outer if not tree.library[frame])
    own = (at for at, name in named if name != _SCRIPT and not is_part_of_function(name))
    return tuple(islice(own, CALLER_LIMIT))


def _library_path(tree: CodeTree, inner: Ints, stack: int) -> tuple[str, ...]:
    """Names of the frames between a stack's innermost user frame and its end, outermost first."""
    inside = takewhile(lambda at: at != inner[at], tree.outwards(stack))
    frames = [tree.frames[tree.place[at]] for at in inside]
    named = [f for f in reversed(frames) if not f.function.endswith(_WRAPPERS)]
    return tuple(code_name(frame.file, frame.function) for frame in named)


def innermost_stack(tree: CodeTree) -> Ints:
    """Per stack: the part of it that ends in its innermost user frame; 0 where it has none."""
    library = np.append(tree.library, False)
    found = np.arange(len(tree.place))
    while (outwards := library[tree.place[found]] & (found > 0)).any():
        found = np.where(outwards, tree.parent[found], found)
    return found


def innermost_written_stack(tree: CodeTree) -> Ints:
    """The same outside of comprehensions and lambdas, as far as a frame of the user's is there."""
    found = innermost_stack(tree)
    part = np.array([*(is_part_of_function(frame.function) for frame in tree.frames), False])
    outer = found[tree.parent]
    while (inside := part[tree.place[found]] & (outer[found] > 0)).any():
        found = np.where(inside, outer[found], found)
    return found


def wilson(count: np.ndarray, total: np.ndarray) -> tuple[Floats, Floats]:
    """The interval of a share with 95 % certainty. Source: Wilson 1927, JASA 22 (158)."""
    share, squared = count / total, _Z**2
    middle = share + squared / (2 * total)
    spread = _Z * np.sqrt(share * (1 - share) / total + squared / (4 * total**2))
    below = 1 + squared / total
    return np.maximum((middle - spread) / below, 0.0), np.minimum((middle + spread) / below, 1.0)
