"""Time tables of written stacks: so many ms of each stack in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from haiprof.base.ledger import POSITIONS
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.opportunities import find_opportunities, mark_needed
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples, CodeTree, Frame, StackTree
from haiprof.run_analysis.ledger import ACTIVITIES, RankSamples, TimeTable, time_table
from haiprof.run_analysis.step_positions import StepPositions
from haiprof.run_format.stack_lines import LOCK_STATES, LOCK_UNKNOWN, WAIT_LETTERS, WAIT_UNKNOWN
from tests.unit.analysis.sampled import Stack

SITE = "/opt/venv/lib/python3.11/site-packages"
PYTHON = "/usr/lib/python3.11"
SCRIPT = ("/home/me/train.py", 300, "<module>")
MODULE = (f"{SITE}/torch/nn/modules/module.py", 1700, "Module._call_impl")
LINEAR = (f"{SITE}/torch/nn/modules/linear.py", 130, "Linear.forward")
FORWARD = ("/home/me/net.py", 5, "Net.forward")
ENGINE = (f"{SITE}/torch/autograd/graph.py", 800, "_engine_run_backward")
STEP = (f"{SITE}/torch/optim/adamw.py", 220, "AdamW.step")
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 4800, "barrier")

SENDS_BUFFERS = (f"{SITE}/torch/nn/parallel/distributed.py", 2405,
                 "DistributedDataParallel._sync_buffers")  # fmt: skip
SHARDED = (f"{SITE}/torch/distributed/optim/zero_redundancy_optimizer.py", 820,
           "ZeroRedundancyOptimizer._sync_params")  # fmt: skip


def job(line: int, function: str, file: str = "train.py") -> tuple[str, int, str]:
    """A line of the job's own code."""
    return (f"/home/me/{file}", line, function)


MAIN = job(40, "main")
TRAINING: tuple[Any, ...] = (
    ("forward", (SCRIPT, job(41, "main"), MODULE, FORWARD, MODULE, LINEAR), 10),
    ("backward", (SCRIPT, job(43, "main"), ENGINE), 20),
    ("optimizer", (SCRIPT, job(44, "main"), STEP), 2),
)
"""32 ms of a step that nobody can take away."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some ms of each step, each sampled once."""

    position: str
    stack: Stack
    ms: int
    lock: str = "0"
    """Letters of LOCK_STATES, in turn."""
    wait: str = "-"
    """What it waited for, letters of WAIT_LETTERS, in turn."""
    queued: float | None = None
    """Share of its time in which it was ready, but had no core; None: not known."""
    asked: bool = True
    """Whether it was asked how long the thread queued."""
    collecting: bool = False
    every: int = 1
    """It is in every Nth step."""


def parts_of(parts: Sequence[Any]) -> list[Part]:
    """Parts from (position, stack, ms, lock)."""
    return [
        each
        if isinstance(each, Part)
        else Part(position=each[0], stack=each[1], ms=each[2], lock=(*each, "0")[3])
        for each in parts
    ]


def tree_of(stacks: Sequence[Stack]) -> tuple[CodeTree, list[int]]:
    """The tree of some stacks, and the number of each."""
    tree, numbers = StackTree(), []
    for stack in stacks:
        number = 0
        for frame in stack:  # with its expression, where a test gives one
            number = tree.stack(number, tree.frame(Frame(*frame), (SITE, PYTHON)))
        numbers.append(number)
    return tree.whole(), numbers


def table_of(*given: Any, steps: int = 12, **rank: Any) -> TimeTable:
    """The table of one rank whose steps all have these parts, in this order."""
    parts = parts_of(given)
    tree, numbers = tree_of([part.stack for part in parts])
    begins, rows, now = [], [], 0
    samples: list[tuple[int, ...]] = []
    for step in range(steps):
        for place, part in enumerate(parts):
            if step % part.every:
                continue
            begins.append(now)
            rows.append((POSITIONS.index(part.position), part.collecting, step))
            for ms in range(part.ms):
                letter = part.lock[(step * part.ms + ms) % len(part.lock)]
                lock = LOCK_STATES.index(letter) if letter != "-" else LOCK_UNKNOWN
                letter = part.wait[(step * part.ms + ms) % len(part.wait)]
                wait = WAIT_LETTERS.index(letter) if letter != "-" else WAIT_UNKNOWN
                queue = -1 if part.queued is None else int(part.queued * NS_PER_MS)
                cpu = -1 if part.queued is None else NS_PER_MS - queue
                queue = queue if part.asked else -1
                samples.append((now + NS_PER_MS - 1, numbers[place], lock, wait, queue, cpu))
                now += NS_PER_MS
    position, collecting, period = (np.array(column) for column in zip(*rows, strict=True))
    cut = StepPositions(
        start_ns=np.array(begins), end_ns=now, position=position, collecting=collecting,
        around_closure=position < 0, period=period, step_count=steps,
    )  # fmt: skip
    plain, collected = cut.sums()
    more: dict[str, Any] = dict.fromkeys(("no_core_ratio", "tail_ratio", "free_ratio", "busy"))
    more |= {"peer_ratios": {}} | rank
    ranks = [RankSamples(
        rank=0, step=np.arange(steps), count=np.ones(steps, dtype=np.int64), plain_ns=plain,
        collected_ns=collected, positions=cut, wall_offset_ns=0, **more,
    )]  # fmt: skip
    return time_table(samples_of(tree, samples), ranks)


def samples_of(tree: CodeTree, rows: Sequence[tuple[int, ...]]) -> CodeSamples:
    """Samples of a training thread: time, stack, stand to the lock, wait, queue, CPU time."""
    time, stack, lock, wait, queue, cpu = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    unknown = np.full(len(time), -1)
    columns = {f.name: unknown for f in fields(CodeSamples) if f.name not in ("tree", "notes")}
    columns |= {
        **dict.fromkeys(("around", "hidden"), unknown > 0),
        "rank": unknown + 1, "time_ns": time, "stack": stack, "lock_wait": lock,
        "wait": wait, "queue_ns": queue, "cpu_ns": cpu,
        "phase": np.full(len(time), CODE_PHASES.index("other")),
        "weight_ns": np.ones(len(time)),
    }  # fmt: skip
    return CodeSamples(tree=tree, notes=(), **columns)


def shares(table: TimeTable, position: str) -> dict[str, float]:
    """By activity: its share of a position's time."""
    rows = table.position == POSITIONS.index(position)
    found = np.bincount(table.activity[rows], table.ns[rows], minlength=len(ACTIVITIES))
    whole = found.sum()
    return {name: float(ns / whole) for name, ns in zip(ACTIVITIES, found, strict=True) if ns > 1}


def opportunities(table: TimeTable) -> dict[str, tuple[float, str, str]]:
    """By place: ms of all steps, position and activity; the largest first."""
    table = mark_needed(table)
    found = find_opportunities(table)
    rows = np.concatenate([each.rows for each in found]) if found else np.zeros(0, int)
    assert len(set(rows.tolist())) == len(rows), "a nanosecond in two opportunities"
    assert not table.needed[rows].any()
    named = {}
    for each in sorted(found, key=lambda each: -float(table.ns[each.rows].sum())):
        at = each.at
        name = f"{at.function}:{at.line}" if at else ACTIVITIES[each.activity]
        assert name not in named, f"two opportunities at {name}"
        ms = float(table.ns[each.rows].sum()) / NS_PER_MS
        named[name] = (round(ms, 6), POSITIONS[each.position], ACTIVITIES[each.activity])
    return named
