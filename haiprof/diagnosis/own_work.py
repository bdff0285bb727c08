"""What the model's own work is: facts about the job's functions, which may all be needed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from haiprof.base.code_places import place_text
from haiprof.base.intervals import Bools, Ints
from haiprof.base.ledger import PROBLEM_RATIO, Account, Ledger, position_words
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.explanations import FOR_LAYERS, is_in_trainer
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.settings_facts import has_layers
from haiprof.diagnosis.slow_parts import are_stages
from haiprof.diagnosis.small_operators import has_gradients, is_of_autograd
from haiprof.diagnosis.thresholds import CRITICAL_RATIO
from haiprof.diagnosis.verdict import OwnFunction
from haiprof.run_analysis.code_samples import Frame
from haiprof.run_analysis.ledger import LINK_WAIT, MODULE_FILE, TimeTable, point_to_point
from haiprof.run_analysis.lines import innermost_stack, written_in
from haiprof.run_analysis.run_files import number
from haiprof.run_analysis.step_positions import OPTIMIZER
from haiprof.run_format.stack_lines import LAYERS, RECURRENCE

_OF_MODEL = ("prepare", "forward", "loss", "between_steps")  # Before forward: teachers, encoders
_ONE_LINE = 0.95  # Of a function's time, for it to be called that line's
_FUNCTIONS = "/torch/nn/functional.py"
_MAKES_WEIGHTS = 0.01
"""Of the layer's time, in softmax of the weights. What need_weights=False saved of forward and
backward, one thread (torch 2.13): nothing to 8 % of sequences of 32 to 256, 41 % of 512, 49 % of
1,024."""
_MAKE_WEIGHTS = (  # what attends, what in it makes weights, and how it is left out
    ((_FUNCTIONS, "multi_head_attention_forward"), (_FUNCTIONS, "softmax"),
     "nn.MultiheadAttention with need_weights=True, its default): need_weights=False saves up to "
     "half of it and of its backward, the more the longer the sequences"),
    (("", "eager_attention_forward"), ("", "eager_attention_forward"),
     'attn_implementation="eager"): "sdpa", the default of most models, takes 0.3 to 0.8 of that '
     "and of its backward where nobody reads the weights"),
)  # fmt: skip
_SOFTMAX = re.compile(r"(?<!log_)softmax\(")
_SCORES = re.compile(
    r"@ *[\w.\[\]]+\.(?:transpose|permute|mT\b|T\b|t\(\))|"
    r"\b(?:b?mm|matmul|baddbmm)\(.*(?:transpose|permute|\.mT\b|\.T\b|\.t\(\))|\beinsum\("
)
"""A product with a transpose: queries and keys."""
_PRODUCT = re.compile(r" @ |\b(?:b?mm|matmul|baddbmm|einsum)\(")
_DROPOUT = re.compile(r"(?i:dropout|\bdrop)\(")
"""What `F.scaled_dot_product_attention` took of the same by hand with backward, one thread (torch
2.13), sequences of 64 to 1,024: 0.3 to 0.8 without dropout, mostly half; 0.7 to 1.0 with it."""
_DROPS_RATIO = 0.05  # Of such a function's time, in dropout: with a probability of 0 it takes none
_UPDATE_ALL = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Optimizers of torch that update all parameters, whether they have a gradient of 0 or not."""
_STEPS = re.compile(r"/torch/optim/\w+\.py \w+\.step\Z")
_MANY_PASSES, _SHORT_PASS_NS = 8, 1_000_000
"""So short a pass is the calling of operators, mostly: it takes as long for more samples. Own
choice."""
_OF_LOOPS = {
    RECURRENCE: ("whose rounds need one another",
                 "torch.compile or one operator for the whole loop"),
    LAYERS: ("that calls one layer after the other, none of which needs the one before",
             f"one batched operator for all that are alike ({FOR_LAYERS}) or torch.compile"),
}  # fmt: skip


def own_functions(
    inputs: RuleInputs, found: RunLedger, *, outside_layers: bool = False
) -> list[OwnFunction]:
    """Functions with the model's own work up to backward, those with most of the step first."""
    # Outside of layers: without what they call by modules of libraries.
    ledger, table, tree = found.ledger, found.table, found.table.tree
    if inputs.uses_gpu:  # the host's time says little of what a device works
        return []
    module = np.array([*(MODULE_FILE in frame.file for frame in tree.frames), False])
    calls_layer = tree.calls_libraries(module)[table.stack]
    inner, engine = innermost_stack(tree), is_of_autograd(table)
    line, place = tree.line_places()[inner], tree.place[inner]
    parts = defaultdict[tuple[str, str], list[tuple[float, Account, Ints]]](list)
    traced, shared_ns = defaultdict[tuple[str, str], float](float), 0.0
    for each, rows in zip(ledger.accounts, found.rows, strict=True):
        key = each.file or "", written_in(each.function or "")
        if each.needed and each.position == "backward":
            ratio = _part(table, rows, engine[rows])
            shared_ns += ratio * each.ns_per_step
            traced[key] += (1.0 - ratio) * each.ns_per_step
        elif each.needed and each.file and each.position in _OF_MODEL:
            if is_in_trainer(each) or each.activity.startswith("wait"):
                continue  # a library's model: the line that runs the trainer tells nothing of it
            own = ~calls_layer[rows] | (not outside_layers)
            parts[key].append((_part(table, rows, own) * each.ns_per_step, each, rows[own]))
    recorded = {key: sum(ns for ns, _, rows in of if has_gradients(table, rows))
                for key, of in parts.items()}  # fmt: skip
    whole = max(sum(recorded.values()), 1.0)
    functions = []
    for key, of in parts.items():
        ns = sum(part for part, *_ in of)
        by_share = shared_ns * recorded[key] / whole
        most = max(of, key=lambda part: part[0])[1]
        rows = np.concatenate([rows for *_, rows in of])
        of_line, of_part = (np.bincount(each[table.stack[rows]] + 1, table.ns[rows], 1)
                            for each in (line, place))  # fmt: skip
        # Of several that one line works out, one is named where it is most.
        named = tree.frames[int(of_part.argmax()) - 1]
        is_most = of_part.max() > of_part.sum() / 2
        functions.append(OwnFunction(
            file=key[0], line=named.line if is_most else most.line or 0, function=key[1],
            expression=named.expression if is_most else "",
            line_count=1 if of_line.max() >= _ONE_LINE * of_line.sum()
            else int(np.count_nonzero(of_line)),
            position=most.position, ns_per_step=ns, backward_ns=by_share + traced[key],
            is_estimate=by_share > 0, ratio=(ns + by_share + traced[key]) / ledger.mean_ns,
        ))  # fmt: skip
    return sorted(functions, key=lambda each: -each.ratio)


def _part(table: TimeTable, rows: Ints, of: Bools) -> float:
    """What share of some rows' time these of them have."""
    return float(table.ns[rows[of]].sum()) / max(float(table.ns[rows].sum()), 1.0)


def describe_work(
    inputs: RuleInputs, found: RunLedger, functions: Sequence[OwnFunction]
) -> list[tuple[float, str]]:
    """Of the model's own work what may be the job's doing, and has no price: share, and words.

    `functions` are its `own_functions`.
    """
    every = [*_recurrence(found), *_own_backward(found), *_large_optimizer(inputs, found)]
    every += _other_stages(inputs, found)
    every += _many_passes(inputs, found.ledger)
    every += [] if inputs.uses_gpu else _attention_weights(found)
    every += _attention_by_hand(found, functions)
    every += [] if found.recurrences else _own_function(inputs, found)
    return [each for each in every if each[0] >= PROBLEM_RATIO]


def _attention_weights(found: RunLedger) -> Iterator[tuple[float, str]]:
    """Attention of torch's own layer and of transformers that makes its weights."""
    table, tree = found.table, found.table.tree
    for own, maker, text in _MAKE_WEIGHTS:
        inside, makes = (tree.runs([code])[table.stack] for code in (own, maker))
        rows = np.flatnonzero(inside & table.needed)
        if len(rows) and _part(table, rows, makes[rows]) >= _MAKES_WEIGHTS:
            ratio = found.time.mean_of(table, rows) / found.ledger.mean_ns
            yield (
                ratio,
                f"{ratio_text(ratio)} of the step is attention in forward that makes its weights "
                f"({text}",
            )


def _attention_by_hand(
    found: RunLedger, functions: Sequence[OwnFunction]
) -> Iterator[tuple[float, str]]:
    """Lines of a function that multiply by a transpose, take a softmax of that, and multiply."""
    table, tree = found.table, found.table.tree
    rows = np.flatnonzero(table.needed)
    place = tree.place[innermost_stack(tree)[table.stack[rows]]]
    seen = defaultdict[tuple[str, str], list[tuple[Frame, float]]](list)
    for at, ns in enumerate(np.bincount(place[place >= 0], table.ns[rows[place >= 0]]).tolist()):
        frame = tree.frames[at]
        seen[frame.file, written_in(frame.function)] += [(frame, ns)] if ns else []
    ratio, drops, named = 0.0, 0.0, ""
    for each in functions:
        frames = seen[each.file, each.function]
        scores, weights, products = (
            sorted({f.line for f, _ in frames if of.search(f.expression)})
            for of in (_SCORES, _SOFTMAX, _PRODUCT)
        )
        for line in weights:
            first = max((at for at in scores if at < line), default=None)
            last = min((at for at in products if at > line), default=None)
            if first is None or last is None:
                continue
            whole = sum(ns for _, ns in frames)
            inside = [(f, ns) for f, ns in frames if first <= f.line <= last]
            dropped = sum(ns for f, ns in inside if _DROPOUT.search(f.expression))
            ratio += each.ratio * sum(ns for _, ns in inside) / whole
            drops = max(drops, dropped / sum(ns for _, ns in inside))
            named = named or place_text(each.file, line, each.function)
            break
    beside = "; with dropout, as here, it gains little on a CPU" * (drops >= _DROPS_RATIO)
    yield (
        ratio,
        f"{ratio_text(ratio)} of the step looks like attention that makes its weights ({named}, "
        "with its part of backward): where nobody reads them, "
        "torch.nn.functional.scaled_dot_product_attention takes 0.3 to 0.8 of that time"
        f"{beside}",
    )


def _other_stages(inputs: RuleInputs, found: RunLedger) -> Iterator[tuple[float, str]]:
    """What ranks wait for one another while these do their models' work, one after the other."""
    table, tree = found.table, found.table.tree
    waits = tree.holds(point_to_point(tree))[table.stack] & table.needed
    rows = np.flatnonzero(waits & (table.activity == LINK_WAIT))
    if len(rows) and are_stages(inputs, found):
        ratio = found.time.mean_of(table, rows) / found.ledger.mean_ns
        yield (
            ratio,
            f"{ratio_text(ratio)} of the step a rank waits for what others compute meanwhile: more "
            "microbatches let stages work at the same time (n_microbatches; of m, with s stages, "
            "each waits (s - 1) / (m + s - 1) of the time)",
        )


def _recurrence(found: RunLedger) -> Iterator[tuple[float, str]]:
    """The largest loop over small operators that has no price: see `Recurrence`."""
    largest = max(found.recurrences, key=lambda each: each.ns, default=None)
    if largest is None:
        return
    place = place_text(largest.at.file, largest.at.line, largest.at.function)
    beside = ", with its part of backward" if largest.has_backward else ""
    ratio = largest.ns / found.ledger.mean_ns
    what, do = _OF_LOOPS[largest.kind]
    if largest.looks_up:
        do = "one table for all that have rows of one length (each one's indices begin after the "
        do += "rows of those before it)"
    is_cell = largest.has_backward and largest.kind == RECURRENCE
    do += ", where there is one (nn.LSTM, nn.GRU)," * is_cell
    kind, much = "small operators", "some of that, haiprof --explain says how much"
    if largest.called is not None:
        kind, (count, each_ns) = "operators", largest.called
        each = f"{count:,.0f} operators of {duration_text(each_ns)} each"
        much = f"some of that (its forward has {each}, as traced)"
    text = f"about {ratio_text(ratio)} of the step is {kind} of a loop {what} ({place}{beside})"
    yield ratio, f"{text}: {do} may save {much}"


def _own_function(inputs: RuleInputs, found: RunLedger) -> Iterator[tuple[float, str]]:
    """The function that takes most of the model's own work outside of layers."""
    functions = own_functions(inputs, found, outside_layers=True)
    most = max(functions, key=lambda each: each.ns_per_step, default=None)
    ratio = most.ns_per_step / found.ledger.mean_ns if most is not None else 0.0
    if most is not None and ratio >= CRITICAL_RATIO:
        what, place = "one line", most.code_place
        if most.line_count > 1:
            what = f"{most.line_count} lines of one function"
            place = place_text(most.file, most.line, most.function)
        where = position_words(most.position)
        yield ratio, f"{ratio_text(ratio)} of the step is {what} of {where} ({place})"


def _own_backward(found: RunLedger) -> Iterator[tuple[float, str]]:
    """What a backward that the job has written itself takes, as part of the model."""
    own = dict[tuple[str, str | None], list[Account]]()
    for each in found.ledger.accounts:
        is_written = (each.function or "").rpartition(".")[2] == "backward"
        if is_written and each.needed and each.position == "backward" and each.file is not None:
            own.setdefault((each.file, each.function), []).append(each)
    parts = max(own.values(), key=lambda of: sum(each.ns_per_step for each in of), default=[])
    if parts:
        largest = max(parts, key=lambda each: each.ns_per_step)
        inside = f" in {largest.callees[0]}" if largest.callees else ""
        ratio = sum(each.ns_per_step for each in parts) / found.ledger.mean_ns
        text = f"{ratio_text(ratio)} of the step is a backward of your own"
        yield ratio, f"{text} ({largest.code_place}{inside})"


def _many_passes(inputs: RuleInputs, ledger: Ledger) -> Iterator[tuple[float, str]]:
    """Forward and backward over few samples, many times in one optimizer step."""
    count = number(inputs.steps["micro_step_count"].median()) or 1.0
    ns = sum(ledger.positions.get(name, 0.0) for name in ("forward", "loss", "backward"))
    if count >= _MANY_PASSES and ns <= count * _SHORT_PASS_NS:
        ratio = ns / ledger.mean_ns
        yield (
            ratio,
            f"{ratio_text(ratio)} of the step is {count:.0f} forward and backward passes of "
            f"{duration_text(ns / count)} each in one optimizer step: larger batches take less "
            "time, or torch.func.vmap over torch.func.grad for the gradients of each sample",
        )


def _large_optimizer(inputs: RuleInputs, found: RunLedger) -> Iterator[tuple[float, str]]:
    """What is true of an optimizer that takes longer than all that it follows, on a CPU."""
    ledger, table, tree = found.ledger, found.table, found.table.tree
    model, own = (
        sum(ledger.positions.get(name, 0.0) for name in names)
        for names in (("forward", "loss", "backward"), ("optimizer",))
    )
    if own <= model or inputs.uses_gpu:
        return
    ratio, every = own / ledger.mean_ns, inputs.settings.values()
    names = {each.name for of in every for each in of.optimizers}
    rows = np.flatnonzero(table.position == OPTIMIZER)
    steps = {(f.file, f.function) for f in tree.frames if _STEPS.search(f"{f.file} {f.function}")}
    parts = {step[1]: _part(table, rows, tree.runs([step])[table.stack[rows]]) for step in steps}
    most = max(parts, key=lambda name: parts[name], default="")
    of = f" ({ratio_text(parts[most])} of that is {most})" if len(parts) > 1 else ""
    text = (
        f"the optimizer takes {ratio_text(ratio)} of the step{of}, more than forward and backward"
    )
    if names and names <= _UPDATE_ALL and any(has_layers(each, ("Embedding",)) for each in every):
        text += ": it updates all parameters, used or not (sparse=True with SparseAdam leaves out "
        text += "what a large embedding did not use)"
    yield ratio, text
