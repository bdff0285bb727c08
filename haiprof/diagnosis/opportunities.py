"""Opportunities: the parts of the time table that a change would remove, and what each would gain.

One code opportunity is a node of the call tree, from the script inwards: the outermost function
whose time is mostly avoidable, named by the line that holds most of it. What a machine or another
rank does has no code and is one opportunity by activity. No nanosecond is in two of them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.ledger import POSITIONS
from haiprof.diagnosis import thresholds
from haiprof.diagnosis.job_time import JobTime
from haiprof.run_analysis import ledger, step_positions
from haiprof.run_analysis.code_samples import CodeSamples, CodeTree, Frame
from haiprof.run_analysis.lines import (
    functions_of,
    innermost_stack,
    is_part_of_function,
    written_in,
)
from haiprof.run_analysis.step_positions import BACKWARD, EVALUATION, FORWARD, INPUT, OPTIMIZER
from haiprof.run_format.stack_lines import LAYERS, OPERATIONS_BIT, RECURRENCE

FRAMEWORKS = frozenset({
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate",
    "deepspeed", "timm", "diffusers", "peft", "torchvision", "torchaudio", "torch_geometric",
    "megatron", "torchtitan", "fairscale", "ignite", "fastai",
})  # fmt: skip
"""Packages whose code in a model or an optimizer is the model's and the optimizer's own."""
_WITHOUT_PHASES = (step_positions.PREPARE, step_positions.AFTER_STEP)
"""Where the model is in a job of which only the ends of steps are known."""
_WITH_ROLLOUTS = (step_positions.PREPARE, step_positions.BETWEEN_STEPS)
"""Where code in a module is a model's that is not trained: a teacher's, a policy's."""
_BESIDE_MODEL = np.arange(len(POSITIONS))
_BESIDE_MODEL[[
    step_positions.PREPARE, step_positions.LOSS, step_positions.GRADIENTS,
    step_positions.AFTER_STEP, step_positions.BETWEEN_STEPS,
]] = step_positions.PREPARE  # fmt: skip
"""By position: itself, or one for all that lie between phases of the model."""
_AFTER_INPUT = range(FORWARD, step_positions.AFTER_STEP + 1)
_HARDLY = 0.1  # A rank that spends so little of what another does on some work is without it
_PURE = 0.5  # A function whose time is avoidable for more than this is one opportunity as a whole
_MOST = 0.7  # Who holds so much of an opportunity is what it is named by
_OWN_FILES = re.compile(r"/torch/optim/(?!swa_utils)|/torch/_dynamo/eval_frame\.py")
"""An optimizer, and the call of a compiled model: guards and what else it does around it."""
_NOT_COMPILED = "DisableContext."
"""Around a function that is never compiled: whatever that is, it is not the model's for that."""
_RESTART = re.compile(rf"{re.escape(ledger.WORKER_LOADER)}(?:__init__|_shutdown_workers|_reset)\Z")
"""What starts and ends a DataLoader's workers."""
RECOMPUTED, RECEIVED, RESTARTED = "recomputation", "receiving", "worker_start"
POLLED = "polling"
_POLL_OPERATIONS = 3
"""A loop that asks whether something is there, and sleeps, does no more: `while not len(queue)`."""
SAVED = "saving"
_SAVES = re.compile(
    r"(?:Trainer\._save_checkpoint|Trainer\.save_checkpoint|Accelerator\.save_state)\Z"
)
"""What a trainer makes a checkpoint in: preparing what is saved costs time, too."""
FEEDS_THREAD = "feeds_thread"
"""Key of lines that a library's thread gets its work from, with the wait for its lock."""
_IN_PACKAGE = re.compile(r".*-packages(?=[/\\])", re.DOTALL)
WORKER_CORES = "worker_cores"
"""Key of the wait for batches with the wait for the cores that the workers take."""
_COLLECTING_MIN = 8  # So many samples within collections tell where they begin
_SHARDED = re.compile(
    r"/torch/distributed/(?:_?fsdp|_composable|tensor|optim)/|/deepspeed/|/megatron/"
)
METRIC_FILE = "/torchmetrics/metric.py"  # Runs each metric, and keeps its state
_COPIES = "/copy.py"  # Who copies a model calls torch's own code, and works for no forward
_FUNCTION_FILE = "/torch/autograd/function.py"  # Calls what a job's own Functions define
_CHECKPOINT_FILE = "/torch/utils/checkpoint.py"
_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePlace:
    """A line of the job's own code, and the way there."""

    file: str
    line: int
    function: str
    callers: tuple[tuple[str, int, str], ...] = ()  # The job's lines outside of it, nearest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Opportunity:
    """Rows of the table that one change would remove."""

    rows: Ints
    at: CodePlace | None
    position: int  # Index into POSITIONS: where most of it is paid
    activity: int  # Index into ACTIVITIES: what most of it is
    key: str | None = None  # Of the explanation, where it was found by more than the table
    unsure_ns: float = 0.0  # Of its time per step, what may be needed
    spread: tuple[float, float] | None = None
    """Where its time lies with 95 % certainty, as parts of it, where not samples tell that."""
    when: str | None = None
    """When it is paid, where more is known of that than its time in each step."""


@dataclass(slots=True)
class _Function:
    """A function as it was called from one line of its caller."""

    key: int
    outer: _Line | None
    lines: dict[tuple[int, int], _Line] = field(default_factory=dict)  # By line and statement
    rows: list[Ints] = field(default_factory=lambda: [_NO_ROWS])  # In it and below, by stack


@dataclass(slots=True)
class _Line:
    """One line of such a function."""

    frame: int
    stack: int  # That ends in it, as it was met first
    function: _Function
    own: list[Ints] = field(default_factory=lambda: [_NO_ROWS])  # Rows that no line is nearer to
    calls: dict[int, _Function] = field(default_factory=dict)


def mark_needed(table: ledger.TimeTable) -> ledger.TimeTable:
    """The table in which the rows of the model's own work are known."""
    own = _is_models_own(table) & (table.activity != ledger.NO_CORE) & ~_is_recomputed(table)
    return replace(table, needed=own)


def _is_recomputed(table: ledger.TimeTable) -> Bools:
    """Per row: whether activation checkpointing runs a part of forward again for backward."""
    found: Bools = (table.position == BACKWARD) & table.tree.within(_CHECKPOINT_FILE)[table.stack]
    return found & np.isin(table.work, (ledger.OPERATORS, ledger.PYTHON))


def _is_models_own(table: ledger.TimeTable) -> Bools:
    """The same, where what such work waits for a core is its own."""
    place = table.tree.place[table.stack]
    of_model = np.array([*(name in FRAMEWORKS for name in table.packages), True])[place]
    is_own_call = table.tree.calls_libraries(_own_frames(table.tree))[table.stack]
    is_own_call &= ~np.isin(table.position, (step_positions.COMPILE, EVALUATION))
    inside = np.isin(table.position, ledger.MODEL_POSITIONS)
    if not inside.any():
        inside = np.isin(table.position, _WITHOUT_PHASES)
    # Whether a module runs: no `state_dict` or `load_state_dict`, which stand in that file, too.
    of_module = _module_calls(table.tree)
    beside = np.isin(table.position, _WITH_ROLLOUTS) & table.tree.holds(of_module)[table.stack]
    # What one rank evaluates, and others do without, is no part of the model.
    of_rank = np.bincount(table.rank, np.where(beside, table.ns, 0.0))[np.bincount(table.rank) > 0]
    if of_rank.min(initial=np.inf) >= _HARDLY * of_rank.max(initial=0.0):
        inside |= beside
    own = (table.work == ledger.OPERATORS) | ((table.work == ledger.PYTHON) & of_model)
    own |= table.work == ledger.UNKNOWN
    if not (table.position == OPTIMIZER).any():  # parameters are updated by hand
        updates = np.array([*(".grad" in f.expression for f in table.tree.frames), False])
        inside |= (table.position != INPUT) & table.tree.holds(updates)[table.stack]
    beside_it = in_hooks(table.tree) | table.tree.within(_COPIES) | table.tree.within(METRIC_FILE)
    own &= inside & ~beside_it[table.stack]
    found: Bools = own | (is_own_call & np.isin(table.work, (ledger.OPERATORS, ledger.PYTHON)))
    return found


def _own_frames(tree: CodeTree) -> Bools:
    """Per frame, and none: whether it is an optimizer's or a compiled model's own."""
    return np.array([*(
        _OWN_FILES.search(frame.file) is not None and not frame.function.startswith(_NOT_COMPILED)
        for frame in tree.frames
    ), False])  # fmt: skip


def _module_calls(tree: CodeTree) -> Bools:
    """Per frame, and none: whether it calls a module."""
    return np.array([*(
        ledger.MODULE_FILE in frame.file and "_call_impl" in frame.function
        for frame in tree.frames
    ), False])  # fmt: skip


def in_models(tree: CodeTree) -> Bools:
    """Per stack: whether a module, backward or an optimizer runs, of ranks without phases."""
    engine = [frame.function == "_engine_run_backward" for frame in tree.frames]
    frames = _own_frames(tree) | _module_calls(tree) | np.array([*engine, False])
    return tree.holds(frames) & ~in_hooks(tree)


def calls_collectives(tree: CodeTree) -> Bools:
    """Per stack: whether Python calls a collective: the job, or torch for its model's buffers.

    Not what exchanges gradients and parameters: C++ calls it, a sharded model's own code, or a
    communication hook.
    """
    sharded = np.array([*(_SHARDED.search(frame.file) is not None for frame in tree.frames), False])
    return tree.holds(ledger.exchange_frames(tree)) & ~tree.holds(sharded) & ~in_hooks(tree)


def in_hooks(tree: CodeTree) -> Bools:
    """Per stack: whether it is in a hook of the job's: no part of the model, which runs without."""
    # A module calls its hooks as it calls `forward`, from other lines. Hooks of gradients are
    # called by the engine of backward alone, a Function's backward from torch/autograd/function.py.
    frames = [*tree.frames, Frame("", 0, "")]  # the last stands for none
    callers = [frames[place] for place in tree.place[tree.parent].tolist()]
    inner = [frames[place].function for place in tree.place.tolist()]
    forward = {callers[stack][:2] for stack, name in enumerate(inner) if name.endswith("forward")}
    found = np.zeros(len(tree.place), dtype=np.bool_)
    for stack in range(1, len(tree.place)):  # callers come first
        outer = callers[stack]
        is_hook = outer.function == "_engine_run_backward"
        is_hook |= outer.file.endswith(ledger.MODULE_FILE) and outer[:2] not in forward
        is_own = not tree.library[tree.place[stack]]
        found[stack] = found[tree.parent[stack]] or (is_hook and is_own)
    return found


def lacks_line(table: ledger.TimeTable) -> Bools:
    """Per row: whether no line of code is its cause, whatever the samples were in."""
    # A collective that the job itself calls has a line; so has waiting for a core amid code that a
    # change removes, and for the batches of an evaluation.
    has_line = ~np.isin(table.position, (FORWARD, BACKWARD))
    has_line |= calls_collectives(table.tree)[table.stack]
    has_line &= table.activity == ledger.LINK_WAIT
    has_work = table.work != ledger.NO_CORE
    has_line |= (table.activity == ledger.NO_CORE) & ~_is_models_own(table) & has_work
    has_line |= (table.activity == ledger.LOADER_WAIT) & (table.position == EVALUATION)
    lacking: Bools = np.isin(table.activity, ledger.NO_LINE) & ~has_line
    return lacking


def _is_polling(table: ledger.TimeTable) -> Bools:
    """[row]: its innermost line of the job is in a loop that does little but ask and sleep."""
    tree = table.tree
    kinds = np.array([*(frame.loop_kind for frame in tree.frames), 0])
    polls = (kinds & LAYERS == RECURRENCE) & (kinds >> OPERATIONS_BIT <= _POLL_OPERATIONS)
    found: Bools = polls[tree.place[innermost_stack(tree)]][table.stack]
    return found


def find_opportunities(
    table: ledger.TimeTable, known: Sequence[Opportunity] = ()
) -> list[Opportunity]:
    """All beside the known ones, in no order; what is needed (`mark_needed`) is in none."""
    free = ~table.needed & (table.ns > 0)
    for each in known:
        free[each.rows] = False

    def take(chosen: Bools) -> Ints:
        rows = np.flatnonzero(free & chosen)
        free[rows] = False
        return rows

    def take_at(chosen: Bools, key: str | None, unsure_ns: float = 0.0) -> Iterator[Opportunity]:
        """What is one opportunity in whichever lines it is."""
        if len(rows := take(chosen)):
            at = main_place(table.tree, table.stack[rows], table.ns[rows])
            yield replace(opportunity(table, rows, at), key=key, unsure_ns=unsure_ns)

    lineless = lacks_line(table)
    is_input = table.position == INPUT
    own = is_input & (~lineless | (table.activity == ledger.LOADER_WAIT))
    found = [*take_at(_holds(table, _RESTART) & own, RESTARTED)]
    found += [
        replace(opportunity(table, rows, None), activity=activity)
        for activity in ledger.NO_LINE
        if len(rows := take((table.activity == activity) & lineless))
    ]
    found += take_at(_holds(table, _SAVES), SAVED)
    found += take_at(table.position == step_positions.COMPILE, None)
    if len(rows := take(_is_recomputed(table))):
        at = _find_checkpointing(table)
        found.append(replace(opportunity(table, rows, at), key=RECOMPUTED))
    takes = np.array([*(  # batches from workers, or their tensors over
        frame.function.startswith(ledger.WORKER_LOADER) or frame.file.endswith(ledger.HANDED_OVER)
        for frame in table.tree.frames
    ), False])  # fmt: skip
    takes_over = table.tree.calls_libraries(takes)[table.stack]
    found += take_at(takes_over & is_input, RECEIVED, math.inf)  # workers or not: needed
    found += take_at((table.activity == ledger.SLEEP) & _is_polling(table), POLLED)
    nowhere = table.stack == 0
    for position in np.unique(table.position[free & nowhere]).tolist():
        rows = take(nowhere & (table.position == position))
        found.append(opportunity(table, rows, None))
    return [*found, *_of_code(table, free)]


def join_restarts(table: ledger.TimeTable, found: Sequence[Opportunity]) -> list[Opportunity]:
    """The same where starting and ending workers is one opportunity with the wait for them."""
    kept, rows = list[Opportunity](), list[Ints]()
    for each in found:
        if each.key == RESTARTED or (each.activity == ledger.LOADER_WAIT and each.at is None):
            rows.append(each.rows)
        else:
            kept.append(each)
    joined = [opportunity(table, np.concatenate(rows), None)] if rows else []
    return kept + [replace(each, activity=ledger.LOADER_WAIT) for each in joined]


class Collecting(NamedTuple):
    """Samples at which a garbage collection stopped training."""

    rank: Ints
    position: Ints
    stack: Ints


def join_collections(
    table: ledger.TimeTable, found: Sequence[Opportunity], seen: Collecting
) -> tuple[ledger.TimeTable, list[Opportunity]]:
    """Each code with the collections that begin in it, where its own work takes longer than these.

    Whoever makes so many objects causes both. Elsewhere they take long because of what is alive.
    """
    number = next((n for n, each in enumerate(found) if each.activity == ledger.COLLECTION), None)
    if number is None or len(seen.stack) < _COLLECTING_MIN:
        return table, list(found)
    pauses, places = found[number], range(len(found))
    owner = _find_holders(table, found)[innermost_stack(table.tree)[seen.stack]]
    # [opportunity, row of collections]: how many samples, of how many
    rank, position = table.rank[pauses.rows], table.cell[pauses.rows]
    inside = (seen.rank[:, None] == rank) & (seen.position[:, None] == position)
    count = np.array([inside[owner == each].sum(axis=0) for each in places])
    share = count / np.maximum(inside.sum(axis=0), 1)
    caused_ns = share @ table.ns[pauses.rows]
    joined, left = list(found), np.ones(len(pauses.rows))
    for each in places:
        one = found[each]
        if not 0 < caused_ns[each] < table.ns[one.rows].sum():
            owner[owner == each] = -1
            continue
        at = np.flatnonzero(count[each])
        table, new = table.split(pauses.rows[at], share[each, at] / left[at])
        left[at] -= share[each, at]
        stacks = [seen.stack[(owner == each) & inside[:, row]] for row in at]
        for column, values in (
            (table.stack, [int(np.bincount(own).argmax()) for own in stacks]),
            (table.count, count[each, at]), (table.work, one.activity),
        ):  # fmt: skip
            column[new] = values
        joined[each] = replace(one, rows=np.concatenate([one.rows, new]))
    rest = seen.stack[owner < 0]
    if len(rest) >= _COLLECTING_MIN:
        joined[number] = replace(pauses, at=main_place(table.tree, rest, np.ones(len(rest))))
    return table, joined


def _find_holders(table: ledger.TimeTable, found: Sequence[Opportunity]) -> Ints:
    """Per stack: the code opportunity that has most of its time, or of its callers'; -1: none."""
    tree, inner = table.tree, innermost_stack(table.tree)[table.stack]
    size, rest = len(tree.place), np.ones(len(table.ns), dtype=np.bool_)
    ns = np.zeros((len(found) + 1, size))
    for each, row in zip(found, ns, strict=False):
        rest[each.rows] = False
        if each.at is not None and each.activity not in ledger.NO_LINE:
            row += np.bincount(inner[each.rows], table.ns[each.rows], size)
    ns[-1] = np.bincount(inner[rest], table.ns[rest], size)
    owner = np.where(ns.any(axis=0), ns.argmax(axis=0), -1)
    owner[0] = len(found)
    for stack in np.flatnonzero(owner < 0).tolist():  # callers come first
        owner[stack] = owner[tree.parent[stack]]
    return np.where(owner < len(found), owner, -1)


def join_received(
    table: ledger.TimeTable, found: Sequence[Opportunity], *, time: JobTime, waits: bool
) -> list[Opportunity]:
    """Receiving batches with what of it is sure to go, where they have fewer tensors.

    `waits`: the wait for batches is for workers that hand them over, and goes with it.
    """
    kept, rows = list[Opportunity](), list[Ints]()
    for each in found:
        is_wait = waits and each.activity == ledger.LOADER_WAIT and each.at is None
        if is_wait or each.key == RECEIVED:
            rows.append(each.rows)
        else:
            kept.append(each)
    if not rows:
        return kept
    own = np.concatenate(rows)
    handed = table.tree.within(ledger.HANDED_OVER)[table.stack[own]]
    other = own[~handed & (table.activity[own] != ledger.LOADER_WAIT)]
    at = main_place(table.tree, table.stack[own], table.ns[own])
    unsure_ns = time.mean_of(table, other) + thresholds.RECEIVING_NS
    return [*kept, replace(opportunity(table, own, at), key=RECEIVED, unsure_ns=unsure_ns)]


def join_worker_cores(
    table: ledger.TimeTable, found: Sequence[Opportunity], share: float
) -> tuple[ledger.TimeTable, list[Opportunity]]:
    """Waiting for batches with that share of the wait for a core, where it is the longer one."""
    # What makes the batches cheaper leaves these cores to the training thread, too.
    batches, cores = (
        next((each for each in found if each.at is None and each.activity == activity), None)
        for activity in (ledger.LOADER_WAIT, ledger.NO_CORE)
    )
    if not batches or not cores or not share:
        return table, list(found)
    if table.ns[batches.rows].sum() <= table.ns[cores.rows].sum():
        return table, list(found)
    table, taken = table.split(cores.rows, share)
    joined = replace(batches, rows=np.concatenate([batches.rows, taken]), key=WORKER_CORES)
    return table, [joined if each is batches else each for each in found]


def join_fed_thread(
    table: ledger.TimeTable, found: Sequence[Opportunity], others: CodeSamples
) -> list[Opportunity]:
    """What hands a library's thread its work, with the wait for the lock that this thread holds.

    `others` are samples of the training process's other threads.
    """
    holds = next((x for x in found if x.activity == ledger.GIL_WAIT and x.at is None), None)
    if holds is None or not (own := _library_of_threads(table, others)):
        return list(found)
    folders = (_IN_PACKAGE.sub("", frame.file) for frame in table.tree.frames)
    named = [own in re.split(r"[/\\]", folder) for folder in folders]
    named_library = np.array(named, dtype=np.bool_) & table.tree.library
    inside = table.tree.holds(np.append(named_library, False))[table.stack]
    ns = np.where(inside, 1 - _PURE, -_PURE) * table.ns
    feeds = [each for each in found if each.at is not None and ns[each.rows].sum() > 0]
    if not feeds:
        return list(found)
    largest = max(feeds, key=lambda each: float(table.ns[each.rows].sum()))
    joined = np.concatenate([each.rows for each in (*feeds, holds)])
    others_found = [each for each in found if not np.isin(each.rows, joined).any()]
    return [*others_found, replace(largest, rows=joined, key=FEEDS_THREAD)]


def _library_of_threads(table: ledger.TimeTable, others: CodeSamples) -> str:
    """The package whose own threads hold most of what others than training run; else empty."""
    ns, tree = defaultdict[str, float](float), table.tree
    held = np.bincount(others.stack, others.weight_ns, len(tree.place))
    for stack in np.flatnonzero(held).tolist():
        names = [table.packages[tree.place[at]] for at in tree.outwards(stack)]
        names = [name for name in names if name != "python"]
        ns["" if ledger.JOB in names or not names else names[-1]] += float(held[stack])
    most = max(ns, key=lambda name: ns[name], default="")
    is_most = ns[most] > _MOST * sum(ns.values())
    return most if is_most and most not in FRAMEWORKS else ""  # any line calls a framework


def opportunity(table: ledger.TimeTable, rows: Ints, at: CodePlace | None) -> Opportunity:
    """Some rows, by what most of their time is."""
    ns = table.ns[rows]
    return Opportunity(
        rows=rows, at=at, position=_main_position(table, rows),
        activity=int(np.bincount(table.work[rows], ns).argmax()),
    )  # fmt: skip


def _main_position(table: ledger.TimeTable, rows: Ints) -> int:
    return int(np.bincount(table.position[rows], table.ns[rows]).argmax())


def main_place(tree: CodeTree, stacks: Ints, weight: Floats) -> CodePlace | None:
    """The job's line that most of some stacks are in, innermost; None where no line holds most."""
    inner = innermost_stack(tree)[stacks]
    place = np.append(tree.line_places(), -1)[inner]
    held = np.bincount(place + 1, weight)
    most = int(held.argmax()) if len(held) else 0
    if not most or held[most] < _MOST * held.sum():
        return None
    return code_place(tree, int(inner[place == most - 1][0]))


def calling_place(tree: CodeTree, stacks: Ints, weight: Floats) -> CodePlace | None:
    """The innermost of the job's lines that most of some stacks are in or below."""
    held, inside, line = dict[int, float](), dict[int, int](), tree.line_places()
    whole, share = np.unique(stacks, return_inverse=True)
    for stack, ns in zip(whole.tolist(), np.bincount(share, weight).tolist(), strict=True):
        own = {int(line[at]): at for at in tree.outwards(stack) if not tree.library[tree.place[at]]}
        for each, at in own.items():
            held[each] = held.get(each, 0.0) + ns
            inside.setdefault(each, at)
    most = [inside[each] for each, ns in held.items() if ns >= _MOST * weight.sum()]
    innermost = max(most, key=lambda at: len([*tree.outwards(at)]), default=None)
    return None if innermost is None else code_place(tree, innermost)


def _find_checkpointing(table: ledger.TimeTable) -> CodePlace | None:
    """The job's line that has most of its forward checkpointed; None where forward shows none."""
    tree, time = table.tree, dict[int, float]()
    inner = innermost_stack(tree)
    ns = np.bincount(table.stack, np.where(table.position == FORWARD, table.ns, 0.0))
    for stack in np.flatnonzero(ns).tolist():
        outer = 0
        for at in tree.outwards(stack):
            if _CHECKPOINT_FILE in tree.frames[tree.place[at]].file:
                outer = int(inner[at])
        if outer:
            time[outer] = time.get(outer, 0.0) + float(ns[stack])
    return code_place(tree, max(time, key=lambda at: time[at])) if time else None


def code_place(tree: CodeTree, stack: int) -> CodePlace | None:
    """The innermost line of the job in a stack, and the job's lines that lead there."""
    way: list[tuple[str, int, str]] = []
    for at in tree.outwards(stack):
        if not tree.library[tree.place[at]]:
            frame = tree.frames[tree.place[at]]
            caller = (frame.file, frame.line, written_in(frame.function))
            if caller not in way[-1:]:  # no comprehension of that line
                way.append(caller)
    if not way:
        return None
    (file, line, function), *callers = way
    return CodePlace(file=file, line=line, function=function, callers=tuple(callers))


def _of_code(table: ledger.TimeTable, free: Bools) -> Iterator[Opportunity]:
    """Nodes of the call tree; those of one function and position are one."""
    names, numbers = functions_of(table.tree)
    walk = _Walk(table=table, free=free, models=_model_functions(table, numbers))
    merged: dict[tuple[int, int, int], tuple[list[Ints], _Line]] = {}
    backward = _find_backwards(table.tree, names, numbers)
    nodes = sorted(walk.nodes(_grow(table, numbers)), key=lambda x: x[1].function.key in backward)
    for rows, line in nodes:
        at = line.frame if walk.is_driver(line.function) else -1
        key = (line.function.key, at, int(_BESIDE_MODEL[_main_position(table, rows)]))
        if key[0] in backward:  # who changes its forward changes it, too
            key = (backward[key[0]], -1, FORWARD)
        merged.setdefault(key, ([], line))[0].append(rows)
    for parts, line in merged.values():
        yield opportunity(table, np.concatenate(parts), code_place(table.tree, line.stack))


def _find_backwards(
    tree: CodeTree, names: Sequence[tuple[str, str]], numbers: Ints
) -> dict[int, int]:
    """`backward` of each `torch.autograd.Function`, with its `forward`, as numbers."""
    calls = np.array([*(each.file.endswith(_FUNCTION_FILE) for each in tree.frames), False])
    called = np.unique(numbers[tree.place[calls[tree.place[tree.parent]]]])
    number = {name: at for at, name in enumerate(names)}
    pairs = (((file, name.removesuffix(".backward") + ".forward"), at) for at in called.tolist()
             if at >= 0 for file, name in [names[at]] if name.endswith(".backward"))  # fmt: skip
    return {at: number[forward] for forward, at in pairs if forward in number}


def _holds(table: ledger.TimeTable, functions: re.Pattern[str]) -> Bools:
    """Per row: whether it is in or below one of some functions."""
    named = (functions.match(frame.function) is not None for frame in table.tree.frames)
    found: Bools = table.tree.holds(np.array([*named, False]))[table.stack]
    return found


def _grow(table: ledger.TimeTable, numbers: Ints) -> _Function:
    """The call tree of the job's own frames, with the table's rows in it."""
    tree = table.tree
    root = _Function(key=-1, outer=None)
    script = _Line(frame=-1, stack=0, function=root)
    root.lines[-1, 0] = script
    lines: dict[int, _Line] = {0: script}
    order = np.argsort(table.stack, kind="stable")
    first = np.flatnonzero(np.diff(table.stack[order], prepend=-1))
    for rows in np.split(order, first[1:]) if len(first) else ():
        stack = int(table.stack[rows[0]])
        line = _line_of(tree, numbers, lines, stack)
        line.own.append(rows)
        function: _Function | None = line.function
        while function is not None:
            function.rows.append(rows)
            function = function.outer.function if function.outer else None
    return root


def _line_of(tree: CodeTree, numbers: Ints, lines: dict[int, _Line], stack: int) -> _Line:
    """The line of the job's that a stack is in, below the job's lines that lead there."""
    way = []
    while stack not in lines:
        way.append(stack)
        stack = int(tree.parent[stack])
    line = lines[stack]
    for inner in reversed(way):
        frame = int(tree.place[inner])
        key, own = int(numbers[frame]), tree.frames[frame]
        is_own = key == line.function.key and is_part_of_function(own.function)
        if not tree.library[frame] and not is_own:  # a comprehension is its line's
            function = line.calls.setdefault(key, _Function(key=key, outer=line))
            new = _Line(frame=frame, stack=inner, function=function)
            line = function.lines.setdefault((own.line, own.statement), new)
        lines[inner] = line
    return line


def _model_functions(table: ledger.TimeTable, numbers: Ints) -> set[int]:
    """Functions of the job that the model's forward runs: an evaluation is not named by these."""
    tree = table.tree
    found: set[int] = set()
    inside = np.unique(
        table.stack[(table.position == FORWARD) & (table.activity == ledger.OPERATORS)]
    )
    for stack in inside.tolist():
        below: set[int] = set()
        for at in tree.outwards(stack):
            frame = int(tree.place[at])
            if tree.frames[frame].file.endswith(ledger.MODULE_FILE):
                found |= below
                below.clear()
            elif not tree.library[frame]:
                below.add(int(numbers[frame]))
    return found


@dataclass(slots=True)
class _Walk:
    """From the script inwards."""

    table: ledger.TimeTable
    free: Bools
    models: set[int]
    _drivers: dict[int, bool] = field(default_factory=dict)

    def nodes(self, function: _Function) -> Iterator[tuple[Ints, _Line]]:
        """Rows of each opportunity below a function, with the line that it is named by."""
        tree, rows = self.table.tree, np.concatenate(function.rows)
        if not len(rows) or not self.free[rows].any():
            return
        avoidable = self._time([rows])
        work = float(self.table.ns[rows[self.table.needed[rows]]].sum())
        whole = function.key >= 0 and not self.is_driver(function)
        if whole and avoidable > _PURE * (avoidable + work):
            yield rows[self.free[rows]], self._caller_of_model(function) or self._name(function)
            return
        # What the loop itself, or a trainer, does of an evaluation is one opportunity.
        evaluated, others = list[tuple[Ints, _Line]](), list[tuple[Ints, _Line]]()
        for line in function.lines.values():
            # A line of a loop that holds several positions is one opportunity beside the model,
            # wherever a step with several passes runs it, and one in each of the others.
            own = np.concatenate(line.own)
            own = own[self.free[own]]
            for call in line.calls.values():
                found = list(self.nodes(call))
                if len(found) == 1:  # entering and leaving a function goes with it
                    at = tree.place[self.table.stack[own]]
                    calling = [frame for frame in np.unique(at) if self._is_call(frame, call)]
                    edges = np.isin(at, calling)
                    found = [(np.append(found[0][0], own[edges]), found[0][1])]
                    own = own[~edges]
                outer = tree.place[tree.parent[next(iter(call.lines.values())).stack]]
                is_trainers = outer >= 0 and tree.library[outer]
                for node in found:
                    is_part = is_trainers and _main_position(self.table, node[0]) == EVALUATION
                    (evaluated if is_part else others).append(node)
            beside = _BESIDE_MODEL[self.table.position[own]]
            for position in np.unique(beside).tolist():
                node = own[beside == position], line
                (evaluated if position == EVALUATION else others).append(node)
        yield from others
        if evaluated:
            named = max(evaluated, key=lambda node: self._time(node[:1]))[1]
            yield np.concatenate([rows for rows, _ in evaluated]), named

    def _is_call(self, frame: int, function: _Function) -> bool:
        """Whether a frame is of the expression that calls a function, where nothing else runs."""
        frames = self.table.tree.frames
        name = frames[next(iter(function.lines.values())).frame].function.rpartition(".")[2]
        expression = frames[frame].expression
        called = re.match(rf"(?:\w+\.)*{re.escape(name)}(?=\()", expression)
        rest = expression[called.end() :] if called else ""
        depth = list(itertools.accumulate((c == "(") - (c == ")") for c in rest))
        return bool(rest) and 0 not in depth[:-1]  # nothing follows the call

    def is_driver(self, function: _Function) -> bool:
        """Whether the training loop passes through it: who runs both model and backward."""
        # Of a model so small that it was never sampled, who takes batches and goes on after them.
        if id(function) not in self._drivers:
            rows = np.concatenate(function.rows)
            model = np.unique(self.table.position[rows[self.table.needed[rows]]])
            at = np.unique(self.table.position[rows])
            known = len(np.intersect1d(model, (FORWARD, BACKWARD, OPTIMIZER, INPUT))) > 1
            known |= INPUT in at and len(np.intersect1d(at, _AFTER_INPUT)) > 0
            self._drivers[id(function)] = known
        return self._drivers[id(function)]

    def _name(self, function: _Function) -> _Line:
        """Inwards, as long as one function holds most of the avoidable time, by whichever lines."""
        while True:
            held = defaultdict[int, list[_Function]](list)
            for line in function.lines.values():
                for key, call in line.calls.items():
                    held[key].append(call)
            calls = max(held.values(), key=self._of_calls, default=[])
            inner = max(calls, key=lambda call: self._time(call.rows), default=None)
            is_most = self._of_calls(calls) >= _MOST * self._time(function.rows)
            if inner is None or not is_most or self._caller_of_model(inner) is not None:
                return max(function.lines.values(), key=self._weight)
            function = inner

    def _of_calls(self, calls: Sequence[_Function]) -> float:
        return sum(self._time(call.rows) for call in calls)

    def _caller_of_model(self, function: _Function) -> _Line | None:
        """The line that runs the model outside of training (evaluation); None where it is not."""
        if function.key not in self.models:
            return None
        rows = np.concatenate(function.rows)
        inside = rows[np.isin(self.table.position[rows], ledger.MODEL_POSITIONS)]
        is_trained = self._time([inside]) > 0.5 * self._time([rows])
        return None if is_trained else function.outer

    def _weight(self, line: _Line) -> float:
        return self._time(line.own) + self._of_calls([*line.calls.values()])

    def _time(self, parts: Sequence[Ints]) -> float:
        rows = np.concatenate(parts)
        return float(self.table.ns[rows[self.free[rows]]].sum())
