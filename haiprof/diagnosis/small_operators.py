"""Small operators that the job calls one by one, and what autograd does of them in backward.

Calling an operator takes microseconds whatever it computes: a loop whose rounds do not need one
another could be a few operators on larger tensors. Its rounds are told from a recurrence by their
source (`haiprof.in_job.loops`); its part of backward by a window's sequence numbers, and where none
was recorded by what its operators take of forward.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.diagnosis.job_time import JobTime
from haiprof.diagnosis.opportunities import CodePlace, Opportunity, code_place, opportunity
from haiprof.diagnosis.thresholds import MANY_OPERATORS, OPERATOR_CALL_NS
from haiprof.run_analysis import step_positions
from haiprof.run_analysis.code_samples import CodeSamples, CodeTree, Frame
from haiprof.run_analysis.ledger import JOB, MODULE_FILE, NO_CORE, OPERATORS, PYTHON, TimeTable
from haiprof.run_analysis.lines import innermost_stack, written_in
from haiprof.run_format import stack_lines

SMALL_OPERATORS = "many_small_operators"
Line = tuple[str, int, str]  # File, line, function
_ENGINE = "/torch/autograd/"
_OPTIMIZER_FILE = "/torch/optim/optimizer.py"  # Wraps the step of each optimizer
_LEAST_SHARE = 0.002  # Lines with less of backward stay with the line that called it
_LOOP_NS = MANY_OPERATORS * OPERATOR_CALL_NS
_MOSTLY_CALLS = 0.5
"""Operators are small whose calls take so much of their time: others compute, and stay."""
_OF_OPERATORS = 0.3  # A loop in which operators take less is Python
_LEAST_HELD, _SMALL_HELD = 1 / 45, 1 / 15
"""Where a loop holds the interpreter lock for so much of its time its operators take less than
some 45 and 15 us each; below that they compute, and below the second, calling them is all."""
_LAYERS_HELD = 1 / 5
"""In a loop over layers it is held by calling modules, too: so much where their operators take less
than some 30 us. Own choice; three convolutions of 3 ms each were seen with 0.09."""
_FREES = re.compile(r"\bzero_grad\Z")
"""Frees gradients, and holds the lock for as long as that takes: no operators."""
_CALL_HELD_NS, _FEW_ROUNDS = 1000, 8
"""So long calling an operator holds that lock; a loop of fewer rounds in a step gains little."""
_BACKWARD = 2.0
"""Backward of a loop's operators takes so much more for its time than that of others: taking a row
makes a tensor of the whole there. Measured on five programs: 1.6 to 3.5 times forward, of the rest
of the model 0.7 to 2.1."""
_LEAST_BACKWARD = 0.7
"""The least of the rest: where backward is shorter than that of all of it, the loop has none."""
_NO_GRAD_FILE = "/torch/utils/_contextlib.py"  # What `@torch.no_grad()` runs a function in
_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # With what is in them, three deep
_NEW = re.compile(
    r"(?:torch\.(?:stack|cat)\(\[)?(?:torch\.)?"
    rf"(?:from_numpy|rand\w*|arange|zeros|ones|empty|full|tensor){_BRACKETS}"
    rf"(?:\.(?:to|float|long|view|reshape|unsqueeze|expand|repeat|cuda){_BRACKETS})*"
    r"(?:\s+for\s[^\]]*)?\]?(?:,\s*dim=-?\d)?\)?\Z|"
    r"torch\.(?:from_numpy|rand\w*|arange|zeros|ones|empty|full|tensor)\([^…]*…\Z"  # cut off
)
"""Makes a tensor of what is none, which no gradients go through; or several, of a comprehension."""
_TABLES_FILE = "/torch/nn/modules/sparse.py"  # Of nn.Embedding and nn.EmbeddingBag
_UNSURE = 0.25
"""Of a loop's time, what the operators may still take that stand in its place. Own choice."""
_AHEAD = (step_positions.FORWARD, step_positions.LOSS)
_TRAINING = range(step_positions.AFTER_STEP + 1)
_PARTS = (_AHEAD, (step_positions.BACKWARD,), (step_positions.OPTIMIZER,))
_INSIDE = 0.95
"""A loop with less of its time there is no part of forward, of backward or of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A loop over small operators whose rounds need one another, or call a layer each."""

    at: CodePlace
    kind: int
    ns: float  # Of the mean step, with an estimate of its part of backward
    has_backward: bool
    looks_up: bool  # Rows of tables (nn.Embedding), mostly
    called: tuple[float, float] | None
    """Its operators in forward of a step, and the ns of each, by a window; None without one."""


@dataclass(slots=True, kw_only=True)
class Loops:
    """What `find_loops` found, beside the table."""

    found: list[Opportunity] = field(default_factory=list)
    recurrences: list[Recurrence] = field(default_factory=list)
    """Whose price no window measured: they are no opportunities."""
    shares: list[tuple[Line, float]] = field(default_factory=list)
    """Of backward, what each line of a window made that is in none of these; largest first."""
    left: float = 1.0  # Of backward, what none of these has


def find_loops(
    table: TimeTable, samples: CodeSamples, time: JobTime, lines: pl.DataFrame | None
) -> tuple[TimeTable, Loops]:
    """Loops over small operators in the model, each with its part of backward as one opportunity.

    `lines` are of a window, by rank (`python_code.operator_lines`). Without them that part is
    estimated, and a loop whose rounds need one another has no price.
    """
    told = Loops()
    loops, kinds = _loops_of(table.tree)
    ahead = np.isin(table.position, _AHEAD) & (table.work != NO_CORE)
    forward_ns, backward_ns = (float(table.ns[of].sum()) for of in (ahead, is_of_autograd(table)))
    if lines is not None:
        behind = np.flatnonzero(is_of_autograd(table))
        told.shares = _shares(lines, time.mean_of(table, behind) if len(behind) else 0.0)
    for number, rows, held_ratio in _loop_rows(table, samples, time, loops, kinds):
        kind = kinds[number] & stack_lines.LAYERS
        small = _LAYERS_HELD if kind == stack_lines.LAYERS else _SMALL_HELD
        share = min(held_ratio / small, 1.0)
        inner = innermost_stack(table.tree)[table.stack[rows]]
        most = _in_loop(table.tree, loops, int(np.bincount(inner, table.ns[rows]).argmax()))
        frames = [table.tree.frames[at] for at in np.unique(table.tree.place[inner[inner > 0]])]
        places = {frame[:2] for frame in frames}
        is_recorded = has_gradients(table, rows)
        # Numbers may take the place of tensors that need no gradients, where these have so few that
        # calling an operator is all it does.
        are_numbers = not is_recorded and held_ratio * OPERATOR_CALL_NS >= _CALL_HELD_NS
        has_price, called = not kinds[number] & stack_lines.RECURRENCE or are_numbers, None
        if lines is not None and not has_price:
            count, spent_ns = operators_of(lines, places)
            called = (count, spent_ns / count) if count else None
            calls_ratio = min(OPERATOR_CALL_NS * count / max(spent_ns, 1.0), 1.0)
            has_price = count >= MANY_OPERATORS and calls_ratio >= _MOSTLY_CALLS
            share = calls_ratio if has_price else float(calls_ratio >= _SMALL_HELD)
        own_ns, part = float(table.ns[rows].sum()), 0.0
        if lines is not None:
            own = [each for each in told.shares if each[0][:2] in places]
            part = sum(each for _, each in own) / told.left
        elif table.position[rows[0]] in _AHEAD and is_recorded:
            forward_ns -= own_ns
            rest_ns = max(forward_ns, 0.0)
            whole_ns = _BACKWARD * own_ns + rest_ns
            if backward_ns >= _LEAST_BACKWARD * whole_ns:
                part = _BACKWARD * own_ns / whole_ns
        at, behind = code_place(table.tree, most), np.flatnonzero(is_of_autograd(table))
        if not has_price and at is not None and share == 1.0:  # else most of them compute
            ns = share * (time.mean_of(table, rows) + part * time.mean_of(table, behind))
            looks = table.ns[rows][table.tree.within(_TABLES_FILE)[table.stack[rows]]].sum()
            told.recurrences.append(Recurrence(
                at=at, kind=kind, ns=ns, has_backward=part > 0,
                looks_up=bool(looks > own_ns / 2), called=called,
            ))  # fmt: skip
        if not has_price:
            continue
        if lines is not None:
            told.shares = [each for each in told.shares if each not in own]
            told.left -= part * told.left
        if part:
            table, behind = table.split(behind, part)
            table.stack[behind] = most
            rows = np.concatenate([rows, behind])
        if share < 1.0:
            table, _ = table.split(rows, 1.0 - share, needed=True)
        table = replace(table, needed=table.needed & ~np.isin(np.arange(len(table.ns)), rows))
        unsure_ns = _UNSURE * time.mean_of(table, rows)
        one = replace(opportunity(table, rows, at), key=SMALL_OPERATORS, unsure_ns=unsure_ns)
        told.found.append(one)
    return table, told


def _in_loop(tree: CodeTree, loops: Ints, stack: int) -> int:
    """Of a stack that a loop's round leads to, the part up to the function that has the loop."""
    for at in tree.outwards(stack):
        if not tree.library[tree.place[at]] and loops[tree.parent[at]] != loops[stack]:
            return at
    return stack


def has_gradients(table: TimeTable, rows: Ints) -> bool:
    """Whether autograd records most of what some rows of forward do."""
    without = without_gradients(table.tree)[table.stack[rows]]
    return bool(table.ns[rows][without].sum() <= table.ns[rows].sum() / 2)


def without_gradients(tree: CodeTree) -> Bools:
    """Per stack: whether autograd records nothing of it: below no_grad, or of new numbers."""
    none = [
        bool(f.loop_kind & stack_lines.NO_GRAD or _FREES.search(f.function))
        or _NEW.match(f.expression) is not None
        for f in tree.frames
    ]
    found, closure = np.zeros((2, len(tree.place)), dtype=np.bool_)
    # An optimizer's step switches gradients on again for the closure that it calls.
    steps = [f.file.endswith(_OPTIMIZER_FILE)
             or ("/torch/optim/" in f.file and f.function.endswith(".step"))
             for f in tree.frames]  # fmt: skip
    for stack in range(1, len(tree.place)):  # callers come first
        parent, place = tree.parent[stack], tree.place[stack]
        file = tree.frames[place].file
        found[stack] = found[parent] or none[place]
        closure[stack] = steps[place] or (closure[parent] and tree.library[place])
        if file.endswith(_NO_GRAD_FILE):
            found[stack] = not closure[parent]
    return found


def operators_of(lines: pl.DataFrame, places: Collection[tuple[str, int]]) -> tuple[float, float]:
    """How many operators some lines of a window call in forward in a step, and their time in ns."""
    own = lines.filter([place in places for place in lines.select("file", "line").rows()])
    count = own["operator_count"] / own["step_count"] / max(lines["rank"].n_unique(), 1)
    return float(count.sum()), float((count * own["operator_ns"]).sum())


def _loop_rows(
    table: TimeTable, samples: CodeSamples, time: JobTime, loops: Ints, kinds: Sequence[int]
) -> Iterator[tuple[int, Ints, float]]:
    """Loops over small operators: number, rows, and how much of their time holds the lock."""
    # While it calls an operator a thread holds the interpreter lock, for about a microsecond.
    loop, inner = loops[table.stack], innermost_stack(table.tree)
    layer = np.array([*(MODULE_FILE in frame.file for frame in table.tree.frames), False])
    calls_layer = table.tree.calls_libraries(layer)[table.stack]
    works = (loop > 0) & np.isin(table.work, (OPERATORS, PYTHON)) & (table.activity != NO_CORE)
    frees = np.array([*(_FREES.search(f.function) is not None for f in table.tree.frames), False])
    works &= ~table.tree.holds(frees)[table.stack]
    held = (
        np.append(samples.lock_wait, stack_lines.LOCK_UNKNOWN)[table.sample]
        == stack_lines.LOCK_HELD
    )
    for each in np.unique(loop[works]).tolist():
        inside = np.flatnonzero(works & (loop == each))
        training = inside[np.isin(table.position[inside], _TRAINING)]
        parts = (training[np.isin(table.position[training], of)] for of in _PARTS)
        rows = max(parts, key=lambda part: float(table.ns[part].sum()))
        ns = table.ns[rows]
        whole = float(ns.sum())
        if not whole or whole < _INSIDE * table.ns[training].sum():
            continue
        code = table.tree.place[inner[table.stack[rows]]] + 1
        # Code that surely holds the lock less than small operators computes, whatever others do.
        small = np.where(calls_layer[rows], _LAYERS_HELD, _SMALL_HELD)
        held_count, usual = (
            np.bincount(code, table.count[rows] * of) for of in (held[rows], small)
        )
        most_held = np.minimum(usual * _LEAST_HELD / _SMALL_HELD, usual - 2 * np.sqrt(usual))
        computes = (held_count < most_held)[code]
        if ns[computes].sum() > _MOSTLY_CALLS * whole:
            continue
        rows, ns = rows[~computes], ns[~computes]
        whole = float(ns.sum())
        of_operators = float(ns[table.work[rows] == OPERATORS].sum()) / whole
        ratio = float(ns[held[rows]].sum()) / whole
        if of_operators < _OF_OPERATORS or ratio < _LEAST_HELD:
            continue
        mean_ns = time.mean_of(table, rows)
        rounds = mean_ns * ratio / _CALL_HELD_NS / max(kinds[each] >> stack_lines.OPERATIONS_BIT, 1)
        if mean_ns >= _LOOP_NS and rounds >= _FEW_ROUNDS:
            yield each, rows, ratio


def _loops_of(tree: CodeTree) -> tuple[Ints, list[int]]:
    """Per stack the number of the outermost loop that it is in, 0 for none; and what each loop is.

    Of a loop whose rounds do not need one another, what is inside a module is not in it: another
    module may be called in each. Of no loop is what is inside an optimizer that it calls.
    """
    known: dict[tuple[str, int, int], int] = {}
    found = np.zeros(len(tree.place), dtype=np.int64)
    kinds = [0]
    for stack in range(1, len(tree.place)):  # callers come first
        frame = tree.frames[tree.place[stack]]
        outer = int(found[tree.parent[stack]])
        if MODULE_FILE in frame.file:
            outer = outer if kinds[outer] & stack_lines.RECURRENCE else 0
        elif frame.file.endswith(_OPTIMIZER_FILE):
            outer = 0
        if frame.loop and kinds[outer] & stack_lines.LAYERS != stack_lines.INDEPENDENT:
            outer = known.setdefault((frame.file, frame.loop, frame.loop_kind), len(kinds))
            kinds += [frame.loop_kind] if outer == len(kinds) else []
        found[stack] = outer
    return found, kinds


def is_of_autograd(table: TimeTable) -> Bools:
    """Per row: whether autograd's engine runs in it, and no code of the job below that."""
    code = table.tree
    engine = np.array([*(_ENGINE in frame.file for frame in code.frames), False])
    of_row: Bools = code.calls_libraries(engine & np.append(code.library, False))[table.stack]
    found: Bools = of_row & table.needed & (table.position == step_positions.BACKWARD)
    return found


def give_lines(table: TimeTable, loops: Loops) -> TimeTable:
    """The same table in which what autograd's engine does for no loop has its forward's lines."""
    rows = np.flatnonzero(is_of_autograd(table))
    if not len(rows):
        return table
    left = loops.left
    for (file, line, function), share in loops.shares:
        tree, stack = _stack_of(table, Frame(file, line, function))
        if stack:
            table, new = replace(table, tree=tree).split(rows, share / left)
            left -= share
            at = table.stack.copy()
            at[new] = stack
            packages = [*table.packages, *[JOB] * (len(tree.frames) - len(table.packages))]
            table = replace(table, stack=at, packages=packages)
    return table


def _shares(lines: pl.DataFrame, plain_ns: float) -> list[tuple[Line, float]]:
    """Of backward, what each line's operators made; largest first."""
    # Recording an operator takes time, too, so that small ones seem larger than they are: as much
    # as backward was longer in the window, and no more than the engine's time around a node allows.
    per_step = lines.with_columns(pl.col("backward_ns", "event_count") / pl.col("step_count"))
    ranks = max(per_step["rank"].n_unique(), 1)
    traced = float(per_step["backward_ns"].sum()) / ranks
    events = max(float(per_step["event_count"].sum()) / ranks, 1.0)
    most = float(per_step["rest_ns"].mean() or 0.0) / 2  # type: ignore[arg-type]
    cost = min(max((traced - plain_ns) / events, 0.0), most)
    net = per_step.with_columns(ns=(pl.col("backward_ns") - cost * pl.col("event_count")).clip(0))
    whole = float(net["ns"].sum())
    if not whole:
        return []
    found = (
        net.drop_nulls("file").group_by("file", "line", "function").agg(pl.col("ns").sum() / whole)
    )
    kept = found.filter(pl.col("ns") >= _LEAST_SHARE).sort(-pl.col("ns"), "file", "line")
    return [((file, line, function), share) for file, line, function, share in kept.rows()]


def _stack_of(table: TimeTable, line: Frame) -> tuple[CodeTree, int]:
    """The stack in which that line was sampled most in forward; a new one where it was not."""
    # 0 where not even its function was sampled.
    tree = table.tree
    inner = innermost_stack(tree)[table.stack]
    frames = [tree.frames[place] for place in tree.place[inner].tolist()]
    ahead = np.isin(table.position, _AHEAD) & (inner > 0)

    def most(of: Floats) -> int:
        weight = np.where(ahead, of * table.ns, 0.0)
        return int(np.bincount(inner, weight).argmax()) if weight.any() else 0

    in_file = np.array([f.file == line.file for f in frames], float)
    same = most(in_file * [f.line == line.line for f in frames])
    function = written_in(line.function)
    near = same or most(in_file * [written_in(f.function) == function for f in frames])
    if same or not near:
        return tree, same
    grown = replace(
        tree, frames=[*tree.frames, line], library=np.append(tree.library, False),
        parent=np.append(tree.parent, tree.parent[near]),
        place=np.append(tree.place, len(tree.frames)),
    )  # fmt: skip
    return grown, len(tree.place)
