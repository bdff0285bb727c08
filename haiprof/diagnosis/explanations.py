"""Explanations: what an account of the ledger means, and what to do about it.

They are asked for opportunities alone, after these were found and ordered by their gain; none of
them decides whether something is said. An explanation looks at position, activity, package and
function of an account, and at what the run recorded of its loaders, cores and settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from haiprof.base.code_places import place_text
from haiprof.base.intervals import Bools
from haiprof.base.ledger import GROWING, Account, activity_words, expression_text
from haiprof.base.units import (
    NS_PER_S,
    bytes_text,
    duration_text,
    ranks_text,
    ratio_text,
    shorten,
    visible,
)
from haiprof.base.version import read_data
from haiprof.diagnosis import machine_causes, opportunities
from haiprof.diagnosis.background_saves import SLOWED, SlowedSteps
from haiprof.diagnosis.loader_causes import MAKES_LOADER, OPENS, less_per_sample, loader_cause
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.small_operators import SMALL_OPERATORS, operators_of, without_gradients
from haiprof.diagnosis.verdict import CODE_CHARS, Finding, evidence_rows, make_finding
from haiprof.run_analysis import code_samples, ledger
from haiprof.run_analysis.lines import (
    MIN_WAY_RATIO,
    TRAINERS,
    CodeLine,
    function_times,
    innermost_stack,
    written_in,
)
from haiprof.run_analysis.run_files import number
from haiprof.run_analysis.settings import ModelSettings
from haiprof.run_analysis.step_frame import GC_PHASE, SAVE_PHASE
from haiprof.run_format.stack_lines import INDEPENDENT, LAYERS, RECURRENCE, WAITS

WHERE = {
    "input": "making the batch on the training thread", "prepare": "before forward",
    "forward": "in forward", "loss": "between forward and backward", "backward": "in backward",
    "gradients": "before the optimizer", "optimizer": "in the optimizer",
    "after_step": "after the optimizer", "evaluation": "in evaluation",
    "checkpoint": "saving checkpoints", "compile": "in torch.compile",
    "between_steps": "between steps",
}  # fmt: skip
"""How a title names a position."""
_UNKNOWN = ledger.ACTIVITIES[ledger.UNKNOWN]
_COLLECTION = ledger.ACTIVITIES[ledger.COLLECTION]
_MAYBE_OF_OTHERS = ("few_workers", "no_workers", "cores_full", "slow_samples", "part_of_run")
"""Causes of waiting for the loader's workers that may be other processes' doing."""
_ADVICE: Mapping[str, Any] = read_data("diagnosis/advice.json")
_OF_CALLS, _OF_CODE = (
    [(re.compile(code), do) for code, do in _ADVICE[of]] for of in ("calls", "code")
)
"""By what a line calls; by the function and the expression of a line outside of the model."""
_OF_POSITION, _OF_ACTIVITY, _DO = (_ADVICE[of] for of in ("positions", "activities", "others"))
_TOLD_OF_INPUT = ("epoch_restart", "part_of_run", "slow_samples")
"""Causes that say more of batches made on the training thread than the line that makes them."""
SLUGS = {
    "input": "dataloader_bound", "forward": "forward_bound", "backward": "backward_bound",
    "optimizer": "optimizer_bound", "evaluation": "evaluation_heavy",
    "checkpoint": "checkpoint_stalls", "compile": "recompiles",
}  # fmt: skip
"""By position; what lies between the phases is `outside_the_model`."""
_MIN_SAMPLES = 4
_AT_LOCK = WAITS.index("lock")
_WAITING_FILES = ("/threading.py", "/queue.py")  # A thread in these waits itself
_LINE_LIMIT = 3
_LEAST_RATIO = 0.05
FOR_LAYERS = "torch.baddbmm on stacked weights, torch.func.stack_module_state with torch.vmap"
_BARRIERS = [(ledger.COLLECTIVES_FILE, "barrier")]
_LARGE_BATCH = 250_000  # Numbers: 1 MB of float32. Own choice.
_WHOLE = 0.95  # A gain of so much of what a straggler takes beyond the others is all of it
_UNEVEN = 1.02  # A gain that is so many times the mean over ranks is the slowest rank's


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an explanation may look at."""

    inputs: RuleInputs
    samples: code_samples.CodeSamples
    account: Account
    mean_ns: float
    collections_ns: float = 0.0  # Of the account, the garbage collections that begin in it

    @property
    def share(self) -> float:
        """The account's gain, of the mean step."""
        return self.account.gain_ns / max(self.mean_ns, 1.0)

    @property
    def bound(self) -> str:
        """What training is called that loses most of its time to its input; else empty."""
        return "dataloader-bound: " if self.share > 0.5 else ""

    @property
    def is_alone(self) -> bool:
        """Whether it is about some of several ranks."""
        return bool(self.account.ranks) and len(self.inputs.world) > 1

    def of_phase(self, phase: int) -> code_samples.CodeSamples:
        """The samples of one phase: what the training thread, or a worker, does meanwhile."""
        return self.samples.take(self.samples.phase == phase)

    @property
    def amount(self) -> str:
        """`6.9 ms of a step, 18 %`."""
        whole = _whole_of(self.account) or "a step"
        return f"{duration_text(self.account.gain_ns)} of {whole}, {ratio_text(self.share)}"


def _whole_of(account: Account) -> str:
    """Whose step a gain is a part of, where it is more than the mean over ranks; else empty."""
    if account.gain_ns <= _UNEVEN * account.ns_per_step:
        return ""
    if account.ranks:
        return "its step"
    slowest = account.slowest_rank
    return "the slowest rank's step" if slowest is None else f"rank {slowest}'s step"


def explain(question: Question) -> Finding:
    """The first explanation that speaks of an account."""
    account = question.account
    is_evaluated = (account.activity, account.position) == _EVALUATED
    by_activity = None if is_evaluated else _BY_ACTIVITY.get(account.activity)
    by_position = _BY_POSITION.get(account.position, _code)
    said = (_BY_KEY.get(account.explanation) or by_activity or by_position)(question)
    if more := _MORE.get(account.activity):
        said = more(question, said)
    ns = question.collections_ns
    if account.activity != _COLLECTION and ns >= _LEAST_RATIO * account.ns_per_step:
        causes = f", with the garbage collections that it causes ({duration_text(ns)})"
        evidence = (*said.evidence, *evidence_rows(*_pauses(question)))
        said = replace(said, title=said.title + causes, evidence=evidence)
    if paid := re.match(r"every \d+\w\w step", account.when):  # so it is done every N steps already
        remedy = said.remedy.replace("every N steps", f"less often than {paid[0]}")
        said = replace(said, remedy=remedy)
    rank = min(account.ranks or question.inputs.world)
    is_full = machine_causes.busy_ratio(question.inputs, rank) >= _FULL
    if is_full and _ELSEWHERE.search(said.remedy) and not account.activity.startswith("wait"):
        full = "; the job keeps its cores busy: done elsewhere on this node, it gains little"
        said = replace(said, remedy=said.remedy + full)
    return _name_alone(question, said)


_ELSEWHERE = re.compile(
    r"beside training|worker processes|DataLoader worker|another (?:thread|process)"
)
_FULL = 0.9  # So much of their cores that ranks use leaves none for more work. Own choice.


def _name_alone(question: Question, said: Finding) -> Finding:
    if not question.is_alone or said.title.startswith("rank"):
        return said
    who = question.inputs.name_ranks(question.account.ranks)
    return replace(said, title=f"{who} alone: {said.title}")


def _with_mount(question: Question, said: Finding) -> Finding:
    """What waits for a file, with what the node's NFS client counted, where it may be that."""
    account = question.account
    share = account.ns_per_step / max(question.mean_ns, 1.0)
    nfs = machine_causes.nfs_wait(question.inputs, account.ranks, share)
    if nfs is None or nfs.title in said.title:
        return said
    return replace(
        said, title=f"{said.title}; {nfs.title}", remedy=f"{said.remedy}; {nfs.remedy}",
        evidence=(*said.evidence, *nfs.evidence),
    )  # fmt: skip


def _with_sent_again(question: Question, said: Finding) -> Finding:
    """With what the nodes had to send again: what came in late has its counts on the peer."""
    inputs, ranks, found = question.inputs, question.account.ranks, list[tuple[str, float, str]]()
    for host in sorted({host for rank, host in inputs.hosts.items() if rank in ranks or not ranks}):
        node = inputs.counted.nodes.get(host, {}).get(None, {})
        sent, again = (node.get(f"tcp_{n}_segment_count_per_s") for n in ("transmit", "retransmit"))
        if sent and again and again / sent >= _SENT_AGAIN:
            name = f"{visible(host)}: TCP segments sent again, of those it sent"
            found.append((name, again / sent, "ratio"))
    return replace(said, evidence=(*said.evidence, *evidence_rows(*found)))


def _small_operators(question: Question) -> Finding:
    account, lines = question.account, question.inputs.traces.lines
    frames = [frame for frame in question.samples.tree.frames if frame.file == account.file]
    loops = {frame.loop: frame.loop_kind for frame in frames if frame.line == account.line}
    count, rows, beside = "", [], ""
    if account.elsewhere and "backward" in (account.position, *account.elsewhere):
        beside = f" with their part of backward{' (an estimate)' * (lines is None)}"
    if lines is not None:
        number = operators_of(lines, {frame[:2] for frame in frames if frame.loop in loops})[0]
        count, rows = f", {number:,.0f} in a step", [("operators in a step", number, "count")]
    is_numpy = account.package == "numpy" or any(c.startswith("numpy") for c in account.callees)
    kinds = {kind & LAYERS for kind in loops.values()}
    kind = next((kind for kind in (LAYERS, RECURRENCE) if kind in kinds), INDEPENDENT)
    remedy = {
        LAYERS: "no layer of the loop needs the one before: where they are alike, compute all with "
        f"one batched operator ({FOR_LAYERS}), or use torch.compile",
        RECURRENCE: "each round needs the one before: use the operator that has the loop inside "
        "(nn.LSTM, nn.GRU, torch.cumsum), torch.compile, or do outside of it what does not need it"
        if beside
        else _DO["one by one"],
        INDEPENDENT: "do it for all elements at once, without the loop: "
        + ("whole arrays, or tensors" if is_numpy else _DO["batched"]),
    }
    return make_finding(
        f"many small operators in a loop: {_function_text(account)}{count}, "
        f"{question.amount}{beside}",
        remedy[kind],
        *rows,
        rule=SMALL_OPERATORS,
    )


def _waits_for_loader(question: Question) -> Finding:
    inputs, loading = question.inputs, question.of_phase(code_samples.WORKER)
    made = loading if len(loading.rank) else question.of_phase(code_samples.DATALOADER)
    why = loader_cause(inputs, made, question.account)
    lines = code_lines(loading, "the workers' loading", 1.0)
    if why is not None and why.rule == "epoch_restart":
        beside = question.of_phase(code_samples.WORKER_WAITING)
        starting = code_lines(beside, "what the workers do beside loading", 1.0)
        lines = starting or lines
        if starting and (starting[0].share or 0.0) >= MIN_WAY_RATIO:
            most = starting[0]
            place = place_text(most.file, most.line, written_in(most.function))
            at = f": {ratio_text(most.share)} of {most.of} is at {place}"
            why = replace(why, title=why.title + at)
    if why is None or why.rule in _MAYBE_OF_OTHERS:
        starved = machine_causes.starvation(inputs)
        lost = machine_causes.lost_to_waiting(inputs)
        if (loading.queue_ns >= 0).any():
            ranks = set(loading.rank.tolist())
            lost = max(ledger.workers_without_core(question.samples, rank) for rank in ranks)
        theirs = lost >= min(question.share, 1.0) / 2
        theirs &= max(inputs.loader_workers.values(), default=1) > 0
        if starved is not None and starved.rule == machine_causes.NEIGHBOURS and theirs:
            used = max((inputs.worker_cores(rank) or 0.0 for rank in inputs.world), default=0.0)
            own = evidence_rows(("CPU of its workers in a step", used * question.mean_ns, "ns"))
            return replace(
                starved,
                title=f"training waits for loader workers, {question.amount}: other processes use "
                "the CPUs",
                remedy=f"do less per sample: {less_per_sample(loading)}; or {starved.remedy}",
                evidence=(*starved.evidence, *own),
                code_lines=lines,
            )
    why = why or Finding(
        title="",
        remedy="give the DataLoader workers (num_workers, persistent_workers=True), or do less per "
        "sample",
        missing=("how the loader was made, its CPU use",),
    )
    both = question.account.explanation == opportunities.WORKER_CORES
    cores = " and for the CPU cores that its workers take" * both
    return replace(
        why,
        rule=SLUGS["input"],
        cause=why.rule or None,
        title=f"{question.bound}training waits for batches{cores}, {question.amount}"
        + (f", {why.title}" if why.title else ""),
        code_lines=lines,
    )


def _input(question: Question) -> Finding:
    """The batch is made on the training thread."""
    inputs, account, amount = question.inputs, question.account, question.amount
    if account.activity == _UNKNOWN:  # nobody saw who makes it
        return _waits_for_loader(question)
    tree, code, rule = question.samples.tree, _code_text(account), SLUGS["input"]
    samples = np.array([*(frame.function.endswith("_next_index") for frame in tree.frames), False])
    if _is_own(question, tree.holds(samples)):
        return Finding(
            rule=rule,
            cause="sampler",
            title=f"the sampler chooses batches on the training thread, {amount}{code}",
            remedy="a sampler runs there whatever num_workers is: draw the indices of an epoch, or "
            "of many batches, at once (numpy, torch.randperm; by weights torch.multinomial, or "
            "np.searchsorted in their cumsum, made once), keep what does not change from batch to "
            "batch, sets and arrays in place of lists that are searched",
        )
    if min(inputs.loader_workers.values(), default=0) > 0:
        return Finding(
            rule=rule,
            title="what the training thread itself does to get a batch, beside the DataLoader's "
            f"workers: {amount}{code}",
            remedy=_DO["trainer"]
            if is_in_trainer(account)
            else "the DataLoader itself does it for each batch: fewer, larger batches"
            if account.package == "torch"
            else "move what this line does into the dataset, where the workers do it; hand over "
            "fewer and larger tensors",
        )
    makes = question.of_phase(code_samples.DATALOADER)
    why = loader_cause(inputs, makes, account)
    told = why if why is not None and why.rule in _TOLD_OF_INPUT else None
    waits = account.activity.startswith("wait")
    is_its = why is not None and (why.rule == "cores_full" or (why.rule == "storage") == waits)
    known = (why if is_its else told) or Finding(
        rule="storage" if waits else "no_workers",
        title="",
        remedy="load batches in worker processes: DataLoader(..., num_workers=1, "
        "persistent_workers=True), or more where there are cores; or do less per sample: "
        + less_per_sample(makes),
    )
    return Finding(
        rule=rule,
        cause=known.rule,
        title=f"{question.bound}batches are made on the training thread, {amount}"
        + (f", {told.title}" if told else code),
        remedy=known.remedy,
        evidence=known.evidence,
    )


def _own_stacks(question: Question) -> Bools:
    """Per stack: whether the account's line is the innermost one of the job in it."""
    tree, place = question.samples.tree, (question.account.file, question.account.line)
    of_line = np.array([*(frame[:2] == place for frame in tree.frames), False])
    found: Bools = of_line[tree.place[innermost_stack(tree)]]
    return found


def _is_own(question: Question, stacks: Bools) -> bool:
    """Whether the account's line is the innermost one of the job in one of these stacks."""
    return bool((_own_stacks(question) & stacks[innermost_stack(question.samples.tree)]).any())


def _exchanges_in(question: Question, codes: Collection[tuple[str, str]]) -> bool:
    """Whether most collectives at the account's line, in its phase, are called in some code."""
    samples, tree, phases = question.samples, question.samples.tree, code_samples.TRAINING_PHASES
    position = question.account.position
    rows = (_own_stacks(question) & tree.holds(ledger.exchange_frames(tree)))[samples.stack]
    rows &= samples.phase == phases.index(position if position in phases else "other")
    return bool(tree.runs(codes)[samples.stack[rows]].sum() > rows.sum() / 2)


def _is_in_exchange(question: Question) -> bool:
    """Whether the account's line is in a hook that calls a collective in backward."""
    if question.account.position != "backward":
        return False
    tree = question.samples.tree
    hooks = opportunities.in_hooks(tree)
    entered = hooks & ~hooks[tree.parent]
    functions = [
        {
            tree.frames[tree.place[at]][::2]
            for stack in np.flatnonzero(stacks & hooks).tolist()
            for at in tree.outwards(stack)
            if entered[at]
        }
        for stacks in (_own_stacks(question), tree.within(ledger.COLLECTIVES_FILE))
    ]
    return bool(functions[0] & functions[1])


def _loop_kind(question: Question) -> int:
    """Of a loop around the account's line that is no training loop; 0 where there is none."""
    samples, tree = question.samples, question.samples.tree

    def loops_of(chosen: Bools) -> set[tuple[str, int, int]]:
        stacks = np.unique(samples.stack[chosen]).tolist()
        frames = (tree.frames[place] for each in stacks for place in tree.frame_places(each))
        return {(frame.file, frame.loop, frame.loop_kind) for frame in frames}

    of_model = np.isin(samples.phase, _OF_MODEL)
    training = {loop[:2] for loop in loops_of(of_model)}
    own = loops_of(_own_stacks(question)[samples.stack])
    kinds = {k for file, loop, k in own if k & LAYERS and (file, loop) not in training}
    return min(kinds, key=lambda kind: kind & RECURRENCE, default=0) if of_model.any() else 0


def _other_threads(question: Question) -> tuple[code_samples.CodeSamples, float]:
    """What other Python threads of the training process use cores for, and how many cores."""
    samples = question.samples
    chosen = samples.take((samples.phase == code_samples.OTHER_THREADS) & (samples.worker < 0))
    trained_ns = [question.inputs.trained_ns.get(rank, 1.0) for rank in chosen.rank[:1].tolist()]
    return chosen, min(float(chosen.weight_ns.sum()) / max([*trained_ns, 1.0]), 1.0)


def _polling(question: Question) -> Finding:
    """A sleep in a loop that asks whether another thread or process has made something."""
    chosen, used = _other_threads(question)
    lines = code_lines(_without_waits(chosen), "a core, in another thread", used)[:1]
    makes = f" ({', '.join(line.location for line in lines)})" if lines else ""
    pause = _SLEEPS.search(question.account.expression or "")
    ns = float(pause[1]) * NS_PER_S if pause else None
    length = f" of {duration_text(ns)}" if ns else ""
    longer = duration_text(ns / 2) if ns else "half its length"
    do = f"from another process {_FROM_PROCESS}"
    if len(question.inputs.world) > 1:
        do = f"from another rank {_FROM_RANK}"
    if lines or len(question.inputs.world) == 1:
        do = f"from another thread {_FROM_THREAD}; {do}"
    return Finding(
        rule="polling",
        title=f"waiting, in sleeps, for what another thread or process makes: "
        f"{_function_text(question.account)}, {question.amount}",
        remedy=f"a sleep{length} ends {longer} too late on average: take it {do}; or sleep "
        f"shorter. What is left then is what makes it{makes}: shorten that, or begin it earlier",
    )


_SLEEPS = re.compile(r"\bsleep\(\s*(\d+\.?\d*|\.\d+)\s*\)")
_FROM_THREAD = "by queue.Queue, threading.Event or threading.Condition"
_FROM_PROCESS = "by multiprocessing.Queue, Event or Pipe"
_FROM_RANK = "by torch.distributed.broadcast, or store.wait(), without files"
"""What wakes who waits at once."""


def _with_holder(question: Question, said: Finding) -> Finding:
    """What waits for a lock, with where other threads are meanwhile: one of them holds it."""
    samples = question.samples
    is_look = samples.phase == code_samples.OTHER_THREADS
    at_lock = np.zeros(len(samples.rank), dtype=np.bool_)
    for rank in np.unique(samples.rank[is_look]).tolist():
        of_rank = (samples.rank == rank) & (samples.worker < 0)
        own, looks = np.flatnonzero(of_rank & ~is_look), np.flatnonzero(of_rank & is_look)
        before = np.searchsorted(samples.time_ns[own], samples.time_ns[looks]) - 1
        at_lock[looks[before >= 0]] = samples.wait[own[before[before >= 0]]] == _AT_LOCK
    chosen = _without_waits(samples.take(at_lock))
    chosen = replace(chosen, weight_ns=np.ones(len(chosen.rank)))
    lines = code_lines(chosen, "these moments, in another thread", 1.0)
    if not lines:
        chosen, used = _other_threads(question)
        return replace(said, code_lines=code_lines(chosen, "a core, in another thread", used))
    title = f"{said.title}; meanwhile another thread is at {lines[0].location}"
    return replace(said, title=title, code_lines=lines)


def _without_waits(samples: code_samples.CodeSamples) -> code_samples.CodeSamples:
    """Those of threads that wait for no lock themselves."""
    frames = samples.tree.frames
    waits = np.array([*(frame.file.endswith(_WAITING_FILES) for frame in frames), False])
    return samples.take(~waits[samples.tree.place[samples.stack]])


def _interpreter_lock(question: Question) -> Finding:
    # A thread that holds the lock is looked at once it lets go of it, often where it waits then.
    chosen, used = _other_threads(question)
    of = "a core, in another thread that takes the GIL"
    lines = code_lines(chosen.take(~ledger.waiting_stacks(chosen.tree)[chosen.stack]), of, used)
    seen = () if lines else code_lines(chosen, of, used)
    within = f", in {seen[0].function}," if seen else ""
    spins = _spins(chosen)
    return make_finding(
        f"another Python thread{within}{' spins, and' * spins} holds the interpreter lock (GIL): "
        f"training waits for it, {question.amount}",
        "it looks at a clock or a flag again and again: let it wait in between, in "
        "threading.Event.wait(seconds), which also ends at once when the event is set, or in "
        "time.sleep"
        if spins
        else "move that thread's work to another process (multiprocessing, subprocess, a "
        "DataLoader worker), do less of it, or use code that releases the GIL",
        ("CPU of other Python threads", used, "cores"),
        rule="interpreter_lock",
        code_lines=lines,
        missing=("its line: it was seen where it waits",) if seen else (),
    )


_ASKS = re.compile(
    r"(?:time\.)?(?:time|monotonic|perf_counter)(?:_ns)?\(\)|"
    r"[\w.]+\.(?:is_set|empty|qsize|done|poll)\(\)|while (?:not )?[\w.]+:"
)
"""A look at a clock or a flag, which takes no time to speak of beside any work."""
_ASKING = 1 / 3


def _spins(samples: code_samples.CodeSamples) -> bool:
    """Whether a considerable part of some threads' time is looks at a clock or a flag."""
    tree, ns = samples.tree, samples.weight_ns
    asks = np.array([*(_ASKS.match(f.expression) is not None for f in tree.frames), False])
    asking = asks[tree.place[innermost_stack(tree)]][samples.stack]
    return bool(ns[asking].sum() > _ASKING * ns.sum())


def _no_core(question: Question) -> Finding:
    starved = machine_causes.starvation(question.inputs)
    if starved is not None:
        title = f"{starved.title}: the training thread waits for a CPU core, {question.amount}"
        if starved.cause != machine_causes.LOADER_WORKERS:
            return replace(starved, title=title)
        lines = code_lines(question.of_phase(code_samples.WORKER), "the workers' loading", 1.0)
        return replace(starved, title=title, code_lines=lines)
    inputs, ranks = question.inputs, question.account.ranks
    used = machine_causes.others_beside(inputs, ranks)
    missed = max((inputs.core_waits.get(rank, 0.0) for rank in ranks or inputs.world), default=0.0)
    is_own = used is not None and used < max(missed, question.share)
    # Who has one thread and no workers has none to spare; of others nothing is known.
    threads = [inputs.settings[rank].operator_threads for rank in inputs.world
               if rank in inputs.settings]  # fmt: skip
    has_fewer = set(threads) != {1} or any(inputs.loader_workers.values())
    fewer = (
        "run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers), or " * has_fewer
    )
    return make_finding(
        f"the training thread was ready to run but had no CPU core, {question.amount}",
        f"{fewer}allow the job more cores: what else runs on the node used too little to be it"
        if is_own
        else f"see what else runs on these cores (top), or {fewer}allow the job more cores",
        ("cores used by others on its node", used, "cores"),
        rule="no_core",
        missing=() if is_own else ("who had the cores meanwhile",),
        is_choice=False,
    )


def _pauses(question: Question) -> tuple[tuple[str, float, str], ...]:
    pauses = question.inputs.pauses.filter(phase=GC_PHASE)["duration_ns"]
    longest = float(number(pauses.max()) or 0)
    return (
        ("pauses of 0.2 ms and more", float(len(pauses)), "count"),
        ("longest pause", longest, "ns"),
    )


def _collections(question: Question) -> Finding:
    inputs, account = question.inputs, question.account
    pauses = _pauses(question)
    looks = (settings.looks for settings in inputs.settings.values())
    calls = [(look.collect_file, look.collect_line) for look in looks]
    asked = account.line is not None and (account.file, account.line) in calls
    by, there = "", " in each step"
    if account.file is not None:
        by = f", {'called by' if asked else 'mostly in'} {_function_text(account)}"
        there = " there"
    device = ", and GPU memory only if a reference cycle holds tensors" * inputs.uses_gpu
    return make_finding(
        f"garbage collection stops training, {question.amount}, up to "
        f"{duration_text(pauses[1][1])} at once{by}",
        "remove gc.collect() from the loop, or call it every few hundred steps; it frees "
        f"nothing but reference cycles{device}"
        if asked
        else "call gc.freeze() once the model and data are built; then gc.disable(), and "
        "gc.collect(1) every few hundred steps on all ranks alike; look for what makes objects and "
        f"reference cycles{there} (closures, kept exceptions)",
        *pauses,
        rule="garbage_collection",
        cause="explicit" if asked else None,
    )


def _link(question: Question) -> Finding:
    inputs, account = question.inputs, question.account
    for pattern, does in _POINT_TO_POINT:
        if any(pattern.search(callee) for callee in account.callees):
            return _waits_for_peer(question, does)
    tree = question.samples.tree
    if _is_own(question, ledger.point_to_point(tree)[tree.place]):  # by its handle
        return _waits_for_peer(question, "send or receive")
    exchanges = _ADVICE["exchanges"]
    called = next((row for row in exchanges if any(row[0] in c for c in account.callees)
                   or _exchanges_in(question, [("", row[0])])), None)  # fmt: skip
    if called or account.file or account.position not in ("backward", "forward"):
        inside = account.position in ("backward", "forward")
        what = f"collectives {'that the model calls' if inside else 'between the phases'}"
        remedy = _DO["inside" if inside else "between"]
        if called:
            _, what, remedy = called
        elif _exchanges_in(question, _BARRIERS):
            remedy = _DO["barrier"]
        elif account.position == "gradients":
            remedy = _DO["exchange gradients"]
        return Finding(
            rule="blocking_collectives", remedy=remedy,
            title=f"{what}, {question.amount}, not counting the wait for late ranks",
        )  # fmt: skip
    tool, starved = "nccl-tests" if inputs.uses_gpu else "iperf3", None
    measure = f"measure the link between the ranks (haiprof doctor; {tool}); "
    if len(set(inputs.hosts.values())) == 1:
        starved = machine_causes.starvation(inputs)
        measure *= inputs.uses_gpu  # others exchange through the node's memory
    first = f"first {starved.remedy}: on one node an exchange needs cores; " if starved else ""
    models = [model for each in inputs.settings.values() for model in each.models]
    is_sharded = any(model.fsdp_unit_count for model in models)
    buckets = _small_units(models) if is_sharded else _small_buckets(models)
    if buckets:
        first = "larger buckets: DistributedDataParallel(bucket_cap_mb=25), the default; then "
    if buckets and is_sharded:
        first = "larger units: fully_shard, or auto_wrap_policy, of blocks and not of layers; then "
    skips = any(each.looks.no_sync_count for each in inputs.settings.values())
    spares = "" if skips else "accumulate with no_sync(), "
    spares += "compress with a communication hook (bf16_compress_hook)"
    if is_sharded:
        spares = _DO["exchange shards"]
    return Finding(
        rule="link_bound",
        cause="small_buckets" if buckets else None,
        title=f"exchanging {'parameters and ' * is_sharded}gradients takes longer than their bytes "
        f"need on a good link, {question.amount}, not counting the wait for late ranks{buckets}",
        remedy=f"{first}{measure}send less: {spares}, or larger batches",
    )


_POINT_TO_POINT = (
    (re.compile(r"\.(?:i?recv|recv_object_list|batch_isend_irecv)$"), "send"),
    (re.compile(r"\.(?:i?send|send_object_list)$"), "receive"),
)


def _waits_for_peer(question: Question, does: str) -> Finding:
    """Who waits for another rank to send or receive is told what that rank does meanwhile."""
    inputs, account = question.inputs, question.account
    known = inputs.analyzer.files.last_attempts()
    senders = sorted(known.keys() - set(account.ranks or inputs.world))
    samples = inputs.analyzer.code_samples(senders)
    works = ~ledger.waits_for_peers(samples.tree)[samples.stack] & (samples.worker < 0)
    lines = code_lines(samples.take(works), "their time", 1.0)[:1]
    place = "".join(f" ({ratio_text(line.share)} of its time: {line.location})" for line in lines)
    who = ranks_text(senders) if senders else "other ranks"
    pronoun = "it does" if len(senders) == 1 else "they do"
    return Finding(
        rule="blocking_collectives",
        cause=does.partition(" ")[0],
        title=f"waiting for {who} to {does}, {question.amount}",
        remedy=f"shorten what {pronoun} meanwhile{place}, or let it {does} ahead (isend, irecv), "
        "so that nobody waits; pipeline stages: balance them, more micro-batches",
    )


def _small_buckets(models: Sequence[ModelSettings]) -> str:
    """`; about 98 all-reduces a step, for buckets of 1 KiB`; empty where they are few."""
    # DistributedDataParallel reduces a bucket when its gradients are ready. Source: Li et al.,
    # PyTorch Distributed (VLDB 2020), section 3.2.3.
    for model in models:
        size, whole = number((model.ddp or {}).get("bucket_bytes")), model.gradient_bytes or 0
        count, usual = (math.ceil(whole / each) for each in (size or math.inf, _BUCKET_BYTES))
        count = min(count, model.tensor_count or count)
        if size and count and count >= _MANY_BUCKETS * usual:
            return f"; about {count:,} all-reduces a step, for buckets of {bytes_text(size)}"
    return ""


def _small_units(models: Sequence[ModelSettings]) -> str:
    """`; about 102 collectives a step, for 34 units of 33 KiB`; empty where they are few."""
    # FullyShardedDataParallel gathers a unit's parameters in forward and in backward, and scatters
    # its gradients. Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3.
    for model in models:
        count, whole = model.fsdp_unit_count or 0, model.gradient_bytes
        if whole and count >= _MANY_BUCKETS * math.ceil(whole / _BUCKET_BYTES):
            size = bytes_text(round(whole / count))
            return f"; about {3 * count:,} collectives a step, for {count} units of {size}"
    return ""


def stragglers(question: Question, extra_ns: float, *, is_rest: bool) -> Finding:
    """Some ranks need longer than the others for the same work, without what else is listed."""
    inputs, account = question.inputs, question.account
    several = len(account.ranks) > 1
    gpu = ", its GPU's clock and temperature" * inputs.uses_gpu
    state = machine_causes.state_of(inputs, account.ranks[0], question.share) or Finding(
        cause=account.position,
        title="",
        remedy=f"compare rank {account.ranks[0]} with another: its data shard, its host's load, "
        f"its CPU affinity{gpu}; the others wait for {'them' if several else 'it'} in their "
        "collectives",
    )
    are = "are stragglers" if several else "is a straggler"
    code = _code_text(account) if account.file else ""
    rest = ", beyond its other causes listed here" * is_rest
    if account.gain_ns < _WHOLE * extra_ns:
        rest = f" ({duration_text(account.gain_ns)} of that can go){rest}"
    return Finding(
        rule="ranks_uneven",
        cause=state.cause,
        title=f"{inputs.name_ranks(account.ranks)} {are}: {duration_text(extra_ns)} longer per "
        f"step than the others{rest}, most of it {WHERE[account.position]}{code}{state.title}",
        remedy=state.remedy,
        evidence=state.evidence,
    )


def slowed_by_saves(question: Question, slowed: SlowedSteps) -> Finding:
    """Steps take longer while a checkpoint is written beside them."""
    account = question.account
    code = f", begun by {_function_text(account)}" if account.file else ""
    do = _ADVICE["writers"].get(account.activity, _DO["writer"])
    said = make_finding(
        f"steps are {duration_text(slowed.extra.mean)} slower while a save is written beside "
        f"them{code}: {question.amount} on average",
        f"{do}; or save less often, or less",
        ("saves beside the training", float(slowed.save_count), "count"),
        ("steps that began meanwhile", float(slowed.step_count), "count"),
        ("of steps that were compared", float(slowed.of_count), "count"),
        ("slower at least", slowed.extra.low, "ns"),
        ("slower at most", slowed.extra.high, "ns"),
        rule=SLOWED,
        cause=account.activity,
        missing=() if account.file else ("which line begins the saves",),
    )
    return _name_alone(question, said)


def _evaluation(question: Question) -> Finding:
    account, who = question.account, ""
    remedy = "evaluate less often or on fewer batches"
    tree, line = question.samples.tree, (account.file, account.line)
    inside = tree.holds(np.array([*(frame[:2] == line for frame in tree.frames), False]))
    rows = inside[question.samples.stack] & (question.samples.phase == code_samples.EVALUATION)
    if without_gradients(tree)[question.samples.stack[rows]].sum() <= rows.sum() / 2:
        remedy += "; under torch.no_grad(), which keeps no gradients, they can be larger"
    if question.is_alone:
        who = f"{ranks_text(account.ranks)} evaluates alone while the others wait: "
        remedy = "let all ranks evaluate a part each, less often or on fewer batches"
    what, cause = "evaluation takes", None
    if "update_bn" in f"{account.expression} {' '.join(account.callees)}":
        what, cause = "computing the averages of BatchNorm again (update_bn) takes", "update_bn"
        remedy = "only the averaged model that is used needs them: call update_bn once, at the end"
        remedy += " (or before each evaluation of that model), and on as many batches as they need"
    title = f"{who}{what} {question.amount}, {account.paid}"
    return Finding(rule="evaluation_heavy", cause=cause, title=title, remedy=remedy)


def _checkpoint(question: Question) -> Finding:
    account, saves = question.account, question.inputs.pauses.filter(phase=SAVE_PHASE)
    is_copying = "async_save" in " ".join((account.expression or "", *account.callees))
    return make_finding(
        f"saving checkpoints stops training, {question.amount}, {account.paid}",
        "save less often, or less: async_save copies the state before it writes it; "
        "StagingOptions(use_async_staging=True) of torch.distributed.checkpoint.staging copies it "
        "beside the training, too"
        if is_copying
        else "save less often, or asynchronously: torch.distributed.checkpoint.async_save, or "
        "copy the state to the CPU and write it from another thread; write to a local disk first",
        ("calls that save, in the judged steps", float(saves.height), "count"),
        ("mean time of such a call", number(saves["duration_ns"].mean()) or 0.0, "ns"),
        rule="checkpoint_stalls",
    )


def _explain_by(
    rule: str, title: str, remedy: str, *, cause: str | None = None, setting: str = ""
) -> Callable[[Question], Finding]:
    """An explanation that needs no more than the account; its title has fields of it."""

    def explain(question: Question) -> Finding:
        account, at = question.account, question.account.code_place
        fields = {"amount": question.amount, "paid": account.paid, "code": _code_text(account),
                  "called": f"what {at} calls " if at else "", "bound": question.bound}  # fmt: skip
        text = title.format(**fields)
        return Finding(rule=rule, title=text, remedy=remedy, cause=cause, setting=setting)

    return explain


def _receive(question: Question) -> Finding:
    """Batches are taken from workers."""
    inputs = question.inputs
    numbers = number(inputs.input_sizes["number_count"].mean())
    parts = (
        "each tensor of a batch is handed over by itself: one stacked tensor where a batch holds "
        "many (collate_fn, which the workers run), or "
        "torch.multiprocessing.set_sharing_strategy('file_system'), which passes no file "
        "descriptors",
        "of large ones, uint8 or float16 in place of float32"
        * (numbers is None or numbers >= _LARGE_BATCH),
        "larger batches",
        "what fewer workers gain is measured by haiprof try-loader"
        * (max(inputs.loader_workers.values(), default=0) > 1),
    )
    title = "the training thread receives the batches that the DataLoader's workers made, "
    return Finding(
        rule=SLUGS["input"], title=f"{question.bound}{title}{question.amount}", cause="receiving",
        remedy="; ".join(part for part in parts if part),
    )  # fmt: skip


def _imbalance(question: Question) -> Finding:
    """Ranks take turns in being late."""
    waits_for_core = max(question.inputs.core_waits.values(), default=0.0) >= question.share / 2
    may_be_cores = question.account.gain_low_ns <= 0 and waits_for_core
    unless = ", unless that is how they wait for cores" * may_be_cores
    samples = question.samples
    waits = ledger.waits_for_peers(samples.tree)[samples.stack] & (samples.worker < 0)
    at = code_lines(samples.take(waits), "the waiting for other ranks", 1.0)
    calls = samples.tree.runs(_BARRIERS)[samples.stack[waits]]
    first = (
        f"{_DO['barrier']}; if they wait at the next collective then, "
        if calls.sum() > len(calls) / 2
        else ""
    )
    return Finding(
        rule="data_imbalance",
        title="uneven work: the slowest rank, a different one in each step, makes the others "
        f"wait, {question.amount}{unless}",
        remedy=f"{first}give all ranks batches of equal cost: group samples by length and "
        "distribute each group over all ranks (length-bucketing sampler), cap tokens per batch in "
        "place of samples, or pack sequences" + "; or let them meet there less often" * bool(at),
        code_lines=at,
    )


_OF_GRADIENTS = re.compile(r"\.grad\b")
"""Before forward, of the one before in the same step: it makes no batch."""
_SCALES = re.compile(r"clip|clamp|\.mul_\(|\.div_\(|scale", re.IGNORECASE)
_MAKES_BATCH = re.compile(
    r"batch|sampl|data|load|augment|token|image|decode|collate|encode|crop|\btorch\.rand|randperm|"
    r"np\.load|memmap|index_select|from_numpy|\[\s*(?:idx|ids?|ind|index|indices|perm|order)\b|"
    r"\[\s*[a-z_]\w*\s*\]",
    re.IGNORECASE,
)  # fmt: skip
"""In a function or an expression between steps: it may make the next batch."""
_OF_MODEL = [code_samples.TRAINING_PHASES.index(name) for name in ("forward", "backward")]
_OF_TENSORS = (ledger.ACTIVITIES[ledger.OPERATORS], ledger.ACTIVITIES[ledger.NATIVE])
_ELEMENT = re.compile(r"\[\s*\w+(?:\s*,\s*\w+)+\s*\]")
"""Takes one element of a tensor or an array: `self.m[t,p]`."""
_ON_ARRAYS = re.compile(
    r"\b(?:np|numpy|math|scipy)\.|\.(?:abs|all|any|arg\w+|bmm|clamp|clip|cum\w+|div|dot|eq|exp|float|"
    r"gather|ge|gt|half|index_\w+|isin|item|le|long|lt|masked_\w+|matmul|max|mean|median|min|mm|mul|"
    r"ne|nonzero|norm|numpy|pow|prod|quantile|reshape|scatter\w*|sigmoid|softmax|sqrt|std|sub|sum|"
    r"tanh|tolist|topk|unique|var|view)\("
)
"""Calls that compute with arrays or tensors: other native code is a file, a database, a parser."""
_OF_PARAMETERS = re.compile(r"\bparams?\b|parameters\(|\.grad\b")
_DATABASE = re.compile(
    r"\.(?:commit|executemany|executescript)\(|\.execute\((?!\s*\w?[\"'(]+\s*(?i:select|with)\b)"
)
_OF_OBJECTS = re.compile(r"\b(?:all_gather|gather|scatter|broadcast|send|recv)_object")


def is_in_trainer(account: Account) -> bool:
    """Whether its line is the one that runs the trainer: not what of the job that calls back."""
    return any(name.startswith(TRAINERS) and ".trainer" in name for name in account.callees[:1])


def _is_in_accelerate(account: Account) -> bool:
    return any(name.startswith("accelerate.") for name in account.callees[:1])


def _code(question: Question) -> Finding:
    """A line of the job's."""
    account = question.account
    position, called = account.position, " ".join(account.callees)
    has_loader = question.inputs.steps["dataloader_host_ns"].count() > 0
    text = f"{account.function} {account.expression}"
    of_gradients = position == "prepare" and _OF_GRADIENTS.search(text) is not None
    may_load = position in ("prepare", "between_steps") and not (has_loader or of_gradients)
    may_load &= position == "prepare" or _MAKES_BATCH.search(text) is not None
    is_outside = position not in _OF_POSITION or may_load or of_gradients
    of_tensors = account.activity in _OF_TENSORS and (
        account.does.startswith(("torch", "arithmetic")) or _ON_ARRAYS.search(text) is not None
    )
    of_tensors |= not account.activity.startswith("wait") and _ELEMENT.search(text) is not None
    of_tensors &= account.package == ledger.JOB and is_outside
    loop = _loop_kind(question) if of_tensors else 0
    other = account.also.activity if account.also else account.activity
    also = f"; {_OF_ACTIVITY[other]}" if other in _OF_ACTIVITY and other != account.activity else ""
    every = f"{text} {called} {account.also.expression if account.also else ''}"
    is_hook = _is_own(question, opportunities.in_hooks(question.samples.tree))
    is_behind = position in ("gradients", "optimizer", "after_step")
    for_log = "where it is for a log or a check, do it every N steps; else " * is_behind
    batch = f"where it makes a batch, {_OF_POSITION['prepare']}; else "
    remedies = (  # the first that is true
        (account.when == GROWING and is_hook,
         "it is a hook, and runs more and more often where it is registered again: keep the handle "
         "that registering gives, and remove() it; or find the list or history that it adds to"),
        (account.when == GROWING, "find what grows: a list, a history or a graph to which each "
         "step adds; keep a running value or the last N entries"),
        (position == "forward" and account.package == "numpy",
         "use tensor operators in place of numpy, or do it ahead, in the dataset"),
        (_OF_OBJECTS.search(every) is not None,
         "exchange tensors (all_reduce, all_gather_into_tensor): objects are pickled, sent as bytes"
         " and built again on each rank; what stays Python data, less often"),
        *((code.search(called) is not None and "validate_args=False" not in text, do)
          for code, do in _OF_CALLS),
        (_DATABASE.search(every) is not None, _DO["database"]),
        (OPENS.search(every) is not None, "keep it open from one call to the next"),
        (account.activity in _OF_ACTIVITY, _OF_ACTIVITY.get(account.activity, "")),
        (is_in_trainer(account), _DO["trainer"]),
        (_is_in_accelerate(account), _DO["accelerate"]),
        *((is_outside and code.search(text) is not None, do) for code, do in _OF_CODE),
        (_is_in_exchange(question),
         "this hook exchanges gradients, which each step needs: where the link is fast enough, the "
         "all-reduce of DistributedDataParallel without it takes less; else choose what to send at "
         "less cost (a threshold from a sample of the gradient in place of topk or sort), or use "
         "fp16_compress_hook or powerSGD_hook of torch.distributed.algorithms.ddp_comm_hooks"),
        (is_hook,
         "it is a hook: remove it (the handle that registering it gave: remove()), or let it "
         "return at once in all but every Nth step"),
        (of_tensors and loop & LAYERS == INDEPENDENT, _DO["of parameters"]
         if _OF_PARAMETERS.search(text) else f"{batch if may_load else for_log}{_DO['at once']}"),
        (of_tensors and loop & LAYERS == RECURRENCE,
         f"{batch if may_load else ''}{_DO['one by one']}"),
        (question.is_alone and is_outside, "let all ranks do a part of it each, or less often"),
        (may_load, f"{batch}{_DO['outside']}"),
        (position == "gradients" and _SCALES.search(text) is not None,
         "it changes the gradients, in one call for each parameter tensor: "
         "torch.nn.utils.clip_grad_norm_ needs fewer"),
        # foreach gains nothing on a CPU
        (position == "gradients" and not question.inputs.uses_gpu,
         "where it is for a log, do it every N steps"),
        (True, _OF_POSITION.get("gradients" if of_gradients else position, _DO["outside"])),
    )  # fmt: skip
    first, *others = [WHERE.get(each, each) for each in (position, *account.elsewhere)]
    where = f"{first} and {others[0] if len(others) == 1 else 'elsewhere'}" if others else first
    return Finding(
        rule=SLUGS.get(position, "outside_the_model"),
        cause="waits" if account.activity.startswith("wait") else account.activity,
        title=f"{where}: {_code_text(account, lead='')}, {question.amount}{account.paid_aside}",
        remedy=next(do for is_so, do in remedies if is_so) + also,
    )


def _feeds_thread(question: Question) -> Finding:
    account = question.account
    thread = "the thread that it hands its work to, which holds the interpreter lock (GIL)"
    title = f"{_function_text(account)}{_also_text(account)}, and {thread}, {question.amount}"
    return replace(_code(question), title=title)


def main_callee(account: Account) -> str | None:
    """The function of a library that an account is named by; of a trainer's way its end."""
    of_trainer = is_in_trainer(account) or _is_in_accelerate(account)
    return account.callees[-1 if of_trainer else 0] if account.callees else None


def _code_text(account: Account, lead: str = ": ") -> str:
    """`ema_update (train.py:15), Python in copy.deepcopy`."""
    if account.file is None:
        return f"{lead}{account.does}"
    callee = main_callee(account)
    inside = f" in {callee}" if callee else ""
    return f"{lead}{_function_text(account)}, {account.does}{inside}{_also_text(account)}"


def _also_text(account: Account) -> str:
    """` (40 % of it: line 18 os.fsync(fd), waiting for a file)`; empty where it is one line."""
    also = account.also
    if also is None or (also.file, also.line) == (account.file, account.line):
        return ""
    at = f"line {also.line}" if also.file == account.file else place_text(also.file, also.line, "")
    code = shorten(expression_text(also.expression), CODE_CHARS)
    is_native = also.activity == ledger.ACTIVITIES[ledger.NATIVE]
    words = "native code" if is_native else activity_words(also.activity)
    does = "" if also.activity == account.activity else f", {words}"
    return f" ({ratio_text(also.ratio)} of it: {f'{at} {code}'.strip()}{does})"


def _function_text(account: Account) -> str:
    """`ema_update (train.py:15)`, with the expression where one is known."""
    name = (account.file or "").rpartition("/")[2]
    code = f" {shorten(account.code, CODE_CHARS)}" if account.code else ""
    function = "the script" if account.function == "<module>" else account.function
    line = "" if account.line is None else f":{account.line}"
    return f"{function} ({name}{line}{code})"


_BY_ACTIVITY: dict[str, Callable[[Question], Finding]] = {
    "wait: loader": _waits_for_loader, "wait: interpreter lock": _interpreter_lock,
    "no core": _no_core, "garbage collection": _collections, "wait: link": _link,
    "wait: peer": _imbalance,
}  # fmt: skip
_MORE = {
    "wait: file": _with_mount, "wait: socket": _with_sent_again, "wait: lock": _with_holder,
}  # fmt: skip
_SENT_AGAIN = 0.001  # A smaller part of TCP's segments explains no wait. Own choice.
_BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default
_MANY_BUCKETS = 8  # So many times those of the default's size are worth a word. Own choice.
_EVALUATED = ("wait: loader", "evaluation")  # Batches of an evaluation are its own
_BY_KEY: dict[str | None, Callable[[Question], Finding]] = {
    SMALL_OPERATORS: _small_operators,
    opportunities.WORKER_CORES: _waits_for_loader,
    opportunities.FEEDS_THREAD: _feeds_thread,
    opportunities.RECEIVED: _receive,
    opportunities.RESTARTED: _explain_by(
        SLUGS["input"],
        "starting the DataLoader's workers and ending the old ones, {amount}, {paid}",
        "keep the workers alive between epochs: DataLoader(..., persistent_workers=True); or fewer "
        "workers, or longer epochs (a sampler that repeats)",
        cause="worker_start",
        setting=MAKES_LOADER,
    ),
    opportunities.SAVED: _checkpoint,
    opportunities.POLLED: _polling,
    opportunities.RECOMPUTED: _explain_by(
        opportunities.RECOMPUTED,
        "activation checkpointing runs forward again inside backward, {amount}{code}",
        "where memory allows, checkpoint fewer layers (every second one), keep what is "
        "expensive to compute (torch.utils.checkpoint.create_selective_checkpoint_contexts), or "
        "remove the checkpointing",
    ),
}
RECOMPILES_REMEDY = (
    "TORCH_LOGS=recompiles names the guard that fails; a first evaluation compiles once more. "
    "Usually a shape that varies: pad to a few lengths, mark it with torch._dynamo.mark_dynamic, "
    "or compile(dynamic=True); or a Python number or object that changes each step: make it a "
    "tensor"
)
_BY_POSITION: dict[str, Callable[[Question], Finding]] = {
    "input": _input,
    "evaluation": _evaluation,
    "checkpoint": _checkpoint,
    "compile": _explain_by(
        "recompiles",
        "torch.compile compiles {called}while the job trains, {amount}, {paid}",
        RECOMPILES_REMEDY,
    ),
}


def account_line(account: Account, mean_ns: float) -> CodeLine | None:
    """The line that an account is about; None where it has none."""
    if account.file is None or account.line is None or account.function is None:
        return None
    whole = max(mean_ns, 1.0)
    return CodeLine(
        file=account.file, line=account.line, function=account.function,
        share=min(account.gain_ns / whole, 1.0), low=min(account.gain_low_ns / whole, 1.0),
        high=min(account.gain_high_ns / whole, 1.0), of=_whole_of(account) or "the step",
        sample_count=None, callees=account.callees, callers=account.callers[:_LINE_LIMIT],
    )  # fmt: skip


def code_lines(samples: code_samples.CodeSamples, of: str, part: float) -> tuple[CodeLine, ...]:
    """The lines that hold most of some samples' time."""
    return tuple(
        line
        for line in function_times(samples, of, part)[:_LINE_LIMIT]
        if (line.sample_count or 0) >= _MIN_SAMPLES and (line.share or 0.0) >= _LEAST_RATIO * part
    )
