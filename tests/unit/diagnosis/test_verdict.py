"""What the verdict says first of runs with a known story, and what it is silent about."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.engine import nothing_text
from haiprof.diagnosis.run_facts import RULES
from haiprof.diagnosis.verdict import CodeLine, as_document
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.stack_lines import INDEPENDENT, OPERATIONS_BIT, RECURRENCE
from haiprof.run_format.tables import CGROUP
from haiprof.run_format.writer import append_line
from haiprof.show.card import verdict_card, view_text
from haiprof.show.flame import sampled_lines
from haiprof.show.run_header import manifest_or_none, run_header
from tests.unit.analysis.recorded import (
    CLOCK,
    row_of,
    spans_from,
    spans_of,
    write_rank,
    write_records,
    write_run,
)
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import (
    BALANCED,
    KINDS,
    START_NS,
    PhaseTimes,
    counters,
    find,
    judged,
    ledger_of,
    note,
    placed,
    plain_steps,
    report,
    sample,
    saved_ns,
    verdict_of,
    write_beside,
    write_collectives,
    write_line,
    write_samples,
    write_story,
)
from tests.unit.diagnosis.tables import (
    BARRIER,
    ENGINE,
    FORWARD,
    LINEAR,
    MAIN,
    MODULE,
    PYTHON,
    SCRIPT,
    SENDS_BUFFERS,
    SHARDED,
    SITE,
    STEP,
    job,
)
from tests.unit.diagnosis.test_setting_rules import told

LOADER = (
    f"{SITE}/torch/utils/data/dataloader.py", 1300, "_MultiProcessingDataLoaderIter._next_data"
)  # fmt: skip
START = (
    f"{SITE}/torch/utils/data/dataloader.py", 1200, "_MultiProcessingDataLoaderIter.__init__"
)  # fmt: skip
LAUNCH = (f"{PYTHON}/multiprocessing/popen_fork.py", 66, "Popen._launch")
PUT_INDEX = (f"{SITE}/torch/utils/data/dataloader.py", 1539,
             "_MultiProcessingDataLoaderIter._try_put_index")  # fmt: skip
DRAW = (*job(22, "Balanced.__iter__", "data.py"), "self.rng.choice(N, k, p=p)")
NO_GRAD = (f"{SITE}/torch/utils/_contextlib.py", 9, "context_decorator.<locals>.decorate_context")
TRAINER_LOOP = tuple(
    (f"{SITE}/lightning/pytorch/{file}.py", 40, function)
    for file, function in (
        ("trainer/trainer", "Trainer.fit"), ("trainer/call", "_call_and_handle_interrupt"),
        ("loops/fit_loop", "_FitLoop.run"), ("loops/training_epoch_loop", "_TrainingEpochLoop.run"),
    )
)  # fmt: skip
STEP_WRAPPER = (f"{SITE}/torch/optim/optimizer.py", 517,
                "Optimizer.profile_hook_step.<locals>.wrapper")  # fmt: skip
MODEL_CALL = (MODULE, FORWARD)
GET_DATA = (*PUT_INDEX[:2], "_MultiProcessingDataLoaderIter._get_data")
REBUILD = (f"{SITE}/torch/multiprocessing/reductions.py", 538, "rebuild_storage_fd")
ANSWER = (f"{PYTHON}/multiprocessing/connection.py", 768, "answer_challenge")
POLL = (f"{PYTHON}/selectors.py", 415, "_PollLikeSelector.select")
FEED = (f"{PYTHON}/multiprocessing/queues.py", 244, "Queue._feed")
NEXT_INDEX = (f"{SITE}/torch/utils/data/dataloader.py", 700, "_BaseDataLoaderIter._next_index")
FETCH = (f"{SITE}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
OPEN = (f"{SITE}/PIL/Image.py", 3000, "open")
LOAD, LOG = job(12, "load_image", "data.py"), job(70, "log")
USUAL: dict[str, Stack] = {
    "dataloader": (SCRIPT, job(39, "main"), LOADER),
    "forward": (SCRIPT, job(41, "main"), MODULE, FORWARD, MODULE, LINEAR),
    "backward": (SCRIPT, job(43, "main"), ENGINE),
    "optimizer": (SCRIPT, job(44, "main"), STEP),
    "other": (SCRIPT, job(45, "main")),
    "evaluation": (SCRIPT, job(46, "main"), job(90, "evaluate"), MODULE, FORWARD),
}
Stacks = dict[str, Stack | Callable[[int], Stack]]


def every(number: int, stack: Stack, phase: str) -> Callable[[int], Stack]:
    """The stack at every so many steps, the usual one of its phase at the others."""
    return lambda step: stack if step is not None and step % number == 0 else USUAL[phase]


def write_sampled(
    root: Path,
    times: PhaseTimes,
    stacks: Stacks | Sequence[Stacks] = (),
    lock: str = "0",
    collectives_ms: Sequence[float] = (),
    **story: Any,
) -> Path:
    """A run whose samples are the usual ones, but for these; by rank where they differ."""
    write_story(root, times, **story)
    for rank in range(story.get("ranks", 1)):
        given: Any = stacks
        own: Any = USUAL | dict(given if isinstance(given, dict) or not given else given[rank])

        def at(phase: str, step: int, own: Any = own) -> Stack:
            stack: Any = own.get(phase, (SCRIPT, MAIN))
            return cast("Stack", stack(step) if callable(stack) else stack)

        write_samples(root, at, rank=rank, lock=lock)
    if collectives_ms:
        write_collectives(root, collectives_ms)
    return root


def write_spans(root: Path, extra: Any, kind: int = schema.GC) -> None:
    write_line(root, plain_steps(extra=extra, kind=kind))


def write_evaluating(root: Path, ranks: Sequence[int], world: int = 2, stack: Stack = ()) -> None:
    """240 steps; some ranks evaluate for 300 ms every 20 of them, others wait in backward then."""
    run = write_run(root)
    for rank in range(world):
        rows, now = [], START_NS
        for step in range(240):
            late = 301.0 * (step % 20 == 11 and rank not in ranks)
            for kind, ms in zip(KINDS[1:], (5.0, 10.0 + late, 2.0), strict=True):
                rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
                now += int((ms + 0.1) * NS_PER_MS)
            if step % 20 == 10 and rank in ranks:
                rows.append((schema.EVAL, 0, now, now + 300 * NS_PER_MS))
                now += 301 * NS_PER_MS
        write_rank(run, spans_from(rows), rank=rank, world_size=world)
    if stack:
        write_samples(root, lambda phase, _: stack if phase == "eval" else (SCRIPT, MAIN))


def write_compiling(root: Path) -> None:
    """Each 20th step compiles for 100 ms in forward."""
    rows, spans, now = [], [], START_NS
    for step in range(200):
        compiles = step % 20 == 19
        for kind, ms in zip(KINDS, (0.2, 105.0 if compiles else 5.0, 10.0, 2.0), strict=True):
            if compiles and kind == schema.FORWARD:
                spans.append([(now - CLOCK.mono_ns + CLOCK.wall_ns) // 1000, 100_000])
            rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.1) * NS_PER_MS)
    line = {"type": "compile", "time_ns": now, "count": 10, "spent_ns": NS_PER_S, "spans": spans}
    write_line(root, rows, [line])


def write_turns(root: Path, sizes: Callable[[int], int]) -> None:
    """Two ranks, now one and now the other later; the sizes of their inputs by rank and step."""
    late = np.random.default_rng(3).integers(0, 2, 400)

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        return (0.2, 12.0, 10.0, 2.0) if late[step] == rank else (0.2, 5.0, 17.0, 2.0)

    write_sampled(root, times, ranks=2, steps=400, noise=0.0, collectives_ms=(10.0, 10.0))
    for rank in range(2):
        for step in range(0, 400, 8):
            at = START_NS + step * 25 * NS_PER_MS
            size = sizes(int(late[step] == rank))
            note(root, rank, type="input_size", time_ns=at, step=step, root=1, number_count=size)


def write_marks(root: Path, lock: str) -> None:
    """`haiprof.step()` every 20 ms, and nothing else."""
    times = [START_NS + step * 20 * NS_PER_MS for step in range(100)]
    write_line(root, [(schema.MARK, 0, time, time + 1_000) for time in times])
    samples = [(time + 10 * NS_PER_MS, (SCRIPT, MAIN, LOG)) for time in times]
    write_stacks(RunPaths(root).rank(0).stacks, samples, lock=lock * len(samples))


def write_lock(root: Path, *more: tuple[Any, ...]) -> None:
    """Each third sample finds the training thread waiting for a lock that another one holds."""
    write_sampled(root, lambda *_: BALANCED, steps=200)
    path = RunPaths(root).rank(0).stacks
    path.unlink()
    samples = [(START_NS + i * 5 * NS_PER_MS, USUAL["forward"]) for i in range(600)]
    waits = [i % 3 == 0 for i in range(600)]
    write_stacks(path, samples, waits=waits, other=(job(12, "refresh", "cache.py"), *more))


EVENTS = f"{SITE}/tensorboard/summary/writer/event_file_writer.py"
WRITES = (
    (f"{PYTHON}/threading.py", 1045, "Thread._bootstrap_inner"),
    (EVENTS, 262, "_AsyncWriterThread.run"),
    (EVENTS, 269, "_AsyncWriterThread._run"),
)
LOGS = (
    SCRIPT,
    (*MAIN, "w.add_images('x', x)"),
    (f"{SITE}/torch/utils/tensorboard/writer.py", 600, "SummaryWriter.add_images"),
)


def write_fed(root: Path, *other: tuple[Any, ...]) -> None:
    """The same with 20 of 37 ms of a step, one in four its loss, that hand TensorBoard pictures."""
    write_sampled(root, lambda *_: BALANCED, steps=200, gap_ms=5.0)
    at = sample(RunFrames(root), lambda phase, _: LOGS if phase == "other" else USUAL[phase])
    path = RunPaths(root).rank(0).stacks
    path.unlink()
    chance = random.Random(1)
    write_stacks(path, at, waits=[chance.random() < 1 / 3 for _ in at], other=other)


@dataclass(frozen=True, kw_only=True)
class Cores:
    """How one rank used its cores."""

    cpus: str = "0-1"
    main: float = 1.0
    wait: float = 0.02
    workers: float = 0.0


def write_cores(
    root: Path,
    ranks: Sequence[Cores],
    *,
    cores: int = 2,
    others: float = 0.0,
    steal: float = 0.0,
    limit: tuple[float, float] | None = None,
    times: PhaseTimes = lambda *_: BALANCED,
    stacks: Stacks | None = None,
    lock: str = "0",
) -> None:
    """Ranks that had so many cores; the limit is in cores, with the share of periods stopped."""
    write_sampled(root, times, stacks or {}, lock, ranks=len(ranks), steps=400)
    busy = sum(each.main + each.workers for each in ranks) + others

    def used(second: float, rank: int) -> dict[str, float]:
        ns, each = (second + 10) * NS_PER_S, ranks[rank]
        return {"cpu_ns": (each.main + each.workers) * ns, "cpu_main_ns": each.main * ns,
                "run_queue_wait_ns": each.wait * ns}  # fmt: skip

    def counted(second: float) -> dict[str, int]:
        ns = {"cpu_user_ns": busy, "cpu_steal_ns": steal, "cpu_idle_ns": cores - busy - steal}
        return {name: int(of * (second + 10) * NS_PER_S) for name, of in ns.items()} | {
            "cpu_count": cores
        }

    seconds = np.arange(-1, 25, 0.5).tolist()
    counters(root, used, seconds=seconds, ranks=len(ranks), host=counted)
    if limit is not None:
        rows = [
            row_of(CGROUP, time_ns=START_NS + int(second * NS_PER_S), cgroup_index=0,
                   cpu_limit_cores=limit[0], cpu_period_count=int(10 * (second + 10)),
                   cpu_throttled_period_count=int(limit[1] * int(10 * (second + 10))))
            for second in seconds
        ]  # fmt: skip
        write_records(RunPaths(root).node("node0").records("cgroup"), CGROUP, rows)
    for rank, each in enumerate(ranks):
        placed(root, rank, each.cpus)
        if each.workers:
            note(root, rank, type="dataloader", time_ns=START_NS, workers=1)


def numpy_in_forward(step: int) -> Stack:
    """A third of forward is in numpy, in a method of the model's."""
    own = (job(6, "Net.forward", "net.py"), job(46, "Net.normalise", "net.py"))
    numpy = (f"{SITE}/numpy/lib/function_base.py", 4000, "_quantile")
    return USUAL["forward"] if step % 3 else (SCRIPT, job(41, "main"), MODULE, *own, numpy)


SLOW_RANK: PhaseTimes = lambda rank, _: (0.2, 9.0, 10.0, 2.0) if rank == 1 else (0.2, 5.0, 14.0, 2.0)  # noqa: E731,E501  # fmt: skip
KEEPS = (f"{SITE}/transformers/trainer.py", 2000, "Trainer._save_checkpoint")
LIST = (f"{SITE}/transformers/modeling_utils.py", 3000, "PreTrainedModel.save_pretrained")
WAITS = Cores(main=0.5, wait=0.45)
STARVED_LOADER: PhaseTimes = lambda *_: (20.0, 4.0, 8.0, 2.0)  # noqa: E731


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run, and what is said of it first."""

    write: Callable[[Path], object]
    slug: str
    lost: float
    cause: str | None = None
    says: str = ""
    does: str = ""
    place: str = ""
    rank: int | None = None


def sampled(times: PhaseTimes, *args: Any, **more: Any) -> Callable[[Path], object]:
    return lambda root: write_sampled(root, times, *args, **{"steps": 120, **more})


def busy(*args: Any, **more: Any) -> Callable[[Path], object]:
    return lambda root: write_cores(root, *args, **more)


def choose_gradients(step: int) -> Stack:
    """What a communication hook of DistributedDataParallel does at every second step."""
    hook = (SCRIPT, MAIN, ENGINE)
    sends = (*hook, job(18, "TopK.reduce"), (BARRIER[0], 3231, "all_reduce"))
    own = (*hook, job(15, "TopK.reduce"))
    return USUAL["backward"] if step % 2 else sends if step % 20 == 0 else own


STORIES = {
    # input
    "workers started anew": Story(
        write=sampled(
            lambda *_: (30.0, *BALANCED[1:]), {"dataloader": (SCRIPT, MAIN, START, LAUNCH)}
        ),
        slug="dataloader_bound", cause="worker_start", lost=0.63, place="train.py:40 main",
        says="starting the DataLoader's workers",
    ),
    "batches on the training thread": Story(
        write=sampled(
            lambda *_: (30.0, *BALANCED[1:]), {"dataloader": (SCRIPT, MAIN, FETCH, LOAD, OPEN)}
        ),
        slug="dataloader_bound", cause="no_workers", lost=0.63, place="data.py:12 load_image",
        says="batches are made on the training thread",
    ),
    "batches that a sampler chooses": Story(
        write=sampled(
            lambda *_: (30.0, *BALANCED[1:]),
            {"dataloader": (SCRIPT, MAIN, NEXT_INDEX, job(22, "Balanced.__iter__", "data.py"))},
        ),
        slug="dataloader_bound", cause="sampler", lost=0.63, place="data.py:22 Balanced.__iter__",
        says="the sampler chooses batches on the training thread",
    ),
    "batches of workers that a sampler chooses by weights": Story(
        write=sampled(
            lambda *_: (30.0, *BALANCED[1:]),
            {"dataloader": (SCRIPT, MAIN, PUT_INDEX, NEXT_INDEX, DRAW)},
        ),
        slug="dataloader_bound", cause="sampler", lost=0.63, place="data.py:22 Balanced.__iter__",
        says="the sampler chooses batches on the training thread",
        does="by weights torch.multinomial, or np.searchsorted in their cumsum",
    ),
    "waiting for workers": Story(
        write=sampled(lambda *_: (30.0, *BALANCED[1:])), slug="dataloader_bound", lost=0.63,
        says="training waits for batches",
    ),
    "bursts of four workers": Story(
        write=sampled(lambda _, step: (0.1 if step % 4 else 40.0, *BALANCED[1:])),
        slug="dataloader_bound", lost=0.36,
    ),
    # the model
    "numpy in forward": Story(
        write=sampled(lambda *_: (0.2, 30.0, 20.0, 2.0), {"forward": numpy_in_forward}),
        slug="forward_bound", cause="native", lost=0.19, place="net.py:46 Net.normalise",
        says="numpy in numpy.lib.function_base._quantile",
    ),
    "Python in a hook of forward": Story(
        write=sampled(
            lambda *_: (0.2, 30.0, 20.0, 2.0),
            {"forward": every(3, (SCRIPT, MAIN, MODULE, job(4, "hook")), "forward")}, "h",
        ),
        slug="forward_bound", cause="python", lost=0.19, place="train.py:4 hook",
    ),
    "Python in a hook of backward": Story(
        write=sampled(
            lambda *_: (0.2, 10.0, 60.0, 2.0),
            {"backward": every(2, (SCRIPT, MAIN, ENGINE, job(4, "hook")), "backward")}, "h",
        ),
        slug="backward_bound", cause="python", lost=0.41, place="train.py:4 hook",
        does="it is a hook: remove it",
    ),
    "a hook that is registered again and again": Story(
        write=sampled(
            lambda _, step: (0.2, 10.0, 20.0 + 0.1 * step, 2.0),
            {"backward": (SCRIPT, MAIN, ENGINE, job(4, "hook"))}, "h", steps=300,
        ),
        slug="backward_bound", lost=0.73, place="train.py:4 hook", says="longer and longer",
        does="keep the handle that registering gives, and remove() it",
    ),
    "a dictionary of the model's tensors": Story(
        write=sampled(
            lambda *_: BALANCED,
            {"other": (SCRIPT, MAIN, job(30, "sync"), (MODULE[0], 2200, "Module.state_dict"))},
            "h", gap_ms=lambda _: 5.0,
        ),
        slug="outside_the_model", lost=0.4, place="train.py:30 sync", does="call it once",
    ),
    "a communication hook that chooses what to send": Story(
        write=sampled(
            lambda *_: (0.2, 10.0, 60.0, 2.0), {"backward": choose_gradients}, ranks=2
        ),
        slug="backward_bound", lost=0.37, place="train.py:15 TopK.reduce",
        does="this hook exchanges gradients, which each step needs: where the link is fast enough",
    ),
    "Python in the optimizer": Story(
        write=sampled(
            lambda *_: (0.2, 10.0, 20.0, 20.0), {"optimizer": (SCRIPT, MAIN, STEP, job(9, "norm"))},
            "h",
        ),
        slug="optimizer_bound", cause="python", lost=0.39, place="train.py:9 norm",
    ),
    "forward of every tenth step": Story(
        write=sampled(
            lambda _, step: (0.2, 5.0 if step % 10 else 90.0, 10.0, 2.0),
            {"forward": every(10, (SCRIPT, MAIN, MODULE, job(7, "sometimes")), "forward")}, "h",
            steps=200,
        ),
        slug="forward_bound", lost=0.34, place="train.py:7 sometimes",
        says="paid every 10th step, 90", does="less often than every 10th step",
    ),
    "forward since a step": Story(
        write=sampled(
            lambda _, step: (0.2, 20.0 if step >= 150 else 5.0, 10.0, 2.0),
            {"forward": lambda step: (SCRIPT, MAIN, MODULE, job(7, "late")) if step >= 150
             else USUAL["forward"]}, "h", steps=300,
        ),
        slug="forward_bound", lost=0.4, place="train.py:7 late", says="paid since step 15",
    ),
    "a list that grows": Story(
        write=sampled(
            lambda _, step: (0.2, 5.0, 10.0, 2.0),
            {"other": (SCRIPT, MAIN, LOG)}, "h", steps=300, gap_ms=lambda step: 0.1 * step,
        ),
        slug="outside_the_model", lost=0.77, place="train.py:70 log", says="longer and longer",
    ),
    "compiling again and again": Story(
        write=write_compiling, slug="recompiles", lost=0.22, says="paid every 20th step, 100 ms",
    ),
    # between the phases
    "logging in each step": Story(
        write=sampled(lambda *_: BALANCED, {"other": (SCRIPT, MAIN, LOG)}, "h", gap_ms=8.0),
        slug="outside_the_model", cause="python", lost=0.65, place="train.py:70 log",
    ),
    "logging nobody sampled": Story(
        write=lambda root: write_story(root, lambda *_: (0.1, 2.0, 4.0, 1.0), gap_ms=5.0),
        slug="outside_the_model", cause="unknown", lost=0.185, says="time that was not sampled",
    ),
    "Python of marked steps": Story(
        write=lambda root: write_marks(root, "h"), slug="outside_the_model", lost=1.0,
        place="train.py:70 log",
    ),
    "a barrier in each step": Story(
        write=sampled(
            lambda *_: (1.0, 4.0, 8.0, 2.0),
            {"other": (SCRIPT, MAIN, job(61, "share"), BARRIER)}, ranks=2, gap_ms=3.0,
        ),
        slug="blocking_collectives", lost=0.44, says="collectives between the phases",
        place="train.py:61 share",
    ),
    "collections": Story(
        write=lambda root: write_spans(root, lambda _, now: [(now, 12 * NS_PER_MS)]),
        slug="garbage_collection", lost=0.4, says="up to 12.0 ms at once",
    ),
    "checkpoints": Story(
        write=lambda root: write_spans(
            root, lambda step, now: [(now, 200 * NS_PER_MS)] * (step % 10 == 9), schema.SAVE
        ),
        slug="checkpoint_stalls", lost=0.52, says="paid every 10th step, 200 ms",
    ),
    "checkpoints of a trainer": Story(
        write=sampled(
            lambda *_: (30.0, *BALANCED[1:]), {"dataloader": (SCRIPT, MAIN, KEEPS, LIST)}
        ),
        slug="checkpoint_stalls", lost=0.63, place="train.py:40 main", says="saving checkpoints",
    ),
    "evaluation": Story(
        write=lambda root: write_evaluating(root, (0, 1)), slug="evaluation_heavy", lost=0.46,
        says="paid every 20th step, 300 ms",
    ),
    "evaluation that keeps gradients": Story(
        write=lambda root: write_evaluating(root, (0,), 1, (SCRIPT, job(46, "main"), *MODEL_CALL)),
        slug="evaluation_heavy", lost=0.46, place="net.py:5 Net.forward",
        does="on fewer batches; under torch.no_grad()",
    ),
    "evaluation that keeps none": Story(
        write=lambda root: write_evaluating(
            root, (0,), 1, (SCRIPT, job(46, "main"), NO_GRAD, job(90, "evaluate"), *MODEL_CALL)
        ),
        slug="evaluation_heavy", lost=0.46, place="net.py:5 Net.forward",
        does="evaluate less often or on fewer batches",
    ),
    "averages of BatchNorm": Story(
        write=lambda root: write_evaluating(root, (0,), 1, (SCRIPT, (*MAIN, "update_bn(a, b)"))),
        slug="evaluation_heavy", cause="update_bn", lost=0.46, place="train.py:40 main",
        says="computing the averages of BatchNorm again (update_bn) takes",
        does="call update_bn once, at the end",
    ),
    "evaluation of rank 0": Story(
        write=lambda root: write_evaluating(root, (0,)), slug="evaluation_heavy", lost=0.46, rank=0,
        says="rank 0 evaluates alone while the others wait",
    ),
    "another thread holds the lock": Story(
        write=write_lock, slug="interpreter_lock", lost=0.33, place="cache.py:12 refresh",
    ),
    "TensorBoard's thread holds the lock": Story(
        write=lambda root: write_fed(root, *WRITES), slug="outside_the_model", lost=0.6,
        place="train.py:40 main", says="and the thread that it hands its work to",
        does="histograms and pictures far less often",
    ),
    "a thread of the job's holds the lock": Story(
        write=lambda root: write_fed(root, *WRITES[:1], job(12, "refresh", "cache.py")),
        slug="interpreter_lock", lost=0.33, place="cache.py:12 refresh",
    ),
    "a thread of torch's holds the lock": Story(
        write=lambda root: write_fed(
            root, (f"{SITE}/torch/utils/data/_utils/pin_memory.py", 50, "_pin_memory_loop")
        ),
        slug="interpreter_lock", lost=0.33, says="another Python thread",
    ),
    # ranks
    "a slow rank of two": Story(
        write=sampled(SLOW_RANK, ranks=2), slug="ranks_uneven", rank=1, cause="forward", lost=0.18,
        says="rank 1 is a straggler: 4.0",
    ),
    "a slow rank of four, not sampled": Story(
        write=lambda root: write_story(root, SLOW_RANK, ranks=4), slug="ranks_uneven", rank=1,
        lost=0.18, says="most of it in forward",
    ),
    "a slow rank beside two stalls": Story(
        write=lambda root: write_story(
            root, lambda rank, step: (0.2, 5.0 + 10 * rank, 1000.0 if step in (30, 40) else
                                      20.0 - 10 * rank, 2.0), ranks=2, noise=0.0, steps=100,
        ),
        slug="ranks_uneven", rank=1, lost=0.2, says="10.0 ms longer per step",
    ),
    "a rank late in backward": Story(
        write=sampled(lambda *_: (0.0, 5.0, 30.0, 2.0), ranks=2, noise=0.0,
                      collectives_ms=(5.0, 25.0)),
        slug="ranks_uneven", rank=1, cause="backward", lost=0.53, says="straggler: 20.0 ms",
    ),
    "work of one rank while the other waits in a barrier": Story(
        write=sampled(
            lambda *_: (0.0, 0.5, 1.0, 0.5),
            [{"other": (SCRIPT, job(15, "main"), BARRIER)}, {"other": (SCRIPT, MAIN, LOG)}], "h",
            ranks=2, gap_ms=10.0, noise=0.0, collectives_ms=(2.0, 26.0),
        ),
        slug="outside_the_model", rank=1, lost=0.75, place="train.py:70 log",
    ),
    "a slow link in backward": Story(
        write=sampled(lambda *_: (0.0, 5.0, 30.0, 2.0), ranks=2, noise=0.0,
                      collectives_ms=(5.0, 5.0)),
        slug="link_bound", lost=0.64, says="longer than their bytes need",
    ),
    "inputs that differ": Story(
        write=lambda root: write_turns(root, lambda large: 3000 if large else 1000),
        slug="data_imbalance", lost=0.14,
    ),
    # cores
    "ranks on one core": Story(
        write=busy([Cores(cpus="0", main=0.5, wait=0.48)] * 2, cores=64), slug="shared_cores",
        lost=0.48, says="ranks 0 and 1 share 1 core of 64",
    ),
    "more ranks than cores": Story(
        write=busy([Cores(main=0.3, wait=0.3)] * 4, others=0.7), slug="shared_cores", lost=0.3,
        says="ranks 0-3 share 2 cores",
    ),
    "more workers than cores": Story(
        write=busy([Cores(workers=0.98, wait=0.35)], cores=32), slug="too_few_cores", lost=0.35,
        cause="loader_workers", says="too few cores for its loader workers: rank 0 may use 2 of 32",
    ),
    "workers that fill the cores of the node": Story(
        write=busy([Cores(workers=0.98, wait=0.35)]), slug="too_few_cores", lost=0.35,
        cause="loader_workers", says="too few cores for its loader workers: rank 0 may use 2",
    ),
    "stopped at a limit": Story(
        write=busy([Cores(cpus="0-31", workers=2.9, wait=0.4)], cores=32, limit=(4.0, 0.9)),
        slug="cpu_throttled", lost=0.4, says="limit of 4 cores in 90 % of the periods",
    ),
    "a busy neighbour": Story(
        write=busy([Cores(main=0.5, wait=0.5)], others=1.5), slug="busy_neighbours", lost=0.5,
        says="other processes use the CPUs (1.50 cores)",
    ),
    "a busy neighbour of two": Story(
        write=busy([WAITS] * 2, others=1.0), slug="busy_neighbours", lost=0.45,
    ),
    "a neighbour of the loader's worker": Story(
        write=busy([Cores(main=0.5, wait=0.4, workers=0.55)], others=0.95, times=STARVED_LOADER),
        slug="busy_neighbours", lost=0.575, says="training waits for loader workers",
    ),
    "one worker that is too few": Story(
        write=busy([Cores(cpus="0-3", main=0.4, wait=0.0, workers=1.0)], cores=4,
                   times=STARVED_LOADER),
        slug="dataloader_bound", cause="few_workers", lost=0.575,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_the_cause_is_said_first(root: Path, name: str) -> None:
    story = STORIES[name]
    story.write(root)
    verdict = judged(root)
    first = verdict.findings[0]
    assert (first.rule, first.rank) == (story.slug, story.rank), verdict.findings
    assert first.severity != "info"
    assert verdict.headline == first.title
    assert first.lost_ratio == pytest.approx(story.lost, abs=0.02)
    assert story.says in first.title
    assert story.does in first.remedy
    assert "keeps none" not in name or "torch.no_grad" not in first.remedy
    assert story.cause in (None, first.cause)
    assert [line.location for line in first.code_lines][:1] == [story.place] * bool(story.place)
    assert first.gain is not None
    assert first.gain.low_ns <= first.gain.left_ns <= first.gain.high_ns <= first.gain.step_ns
    lost = first.lost_ratio or 0.0
    left = first.gain.step_ns * (1 - lost)
    assert first.gain.left_ns == pytest.approx(left, rel=1e-6)
    others = [f for f in verdict.findings[1:] if f.severity != "info"]
    assert all((f.lost_ratio or 0) <= lost for f in others)
    if story.rank is not None:
        assert verdict.next_command == f"haiprof verdict rank {root} {story.rank}"


HEALTHY: dict[str, Callable[[Path], object]] = {
    "balanced": sampled(lambda *_: BALANCED, ranks=2),
    "not sampled": lambda root: write_story(root, lambda *_: BALANCED, gpu=0.95, cores=1.0),
    "steps that vary": sampled(lambda *_: BALANCED, noise=0.5),
    "a frozen backbone": sampled(lambda *_: (0.2, 25.0, 0.5, 0.5)),
    "dear gradients": sampled(lambda *_: (0.2, 5.0, 90.0, 2.0)),
    "an optimizer that searches": sampled(lambda *_: (0.2, 5.0, 10.0, 60.0)),
    "steps of two sizes": sampled(lambda _, s: (0.2, 15.0, 30.0, 2.0) if s % 5 else BALANCED),
    "steps that become faster": sampled(lambda _, s: (0.2, 5.0, 14.0 if s < 60 else 10.0, 2.0)),
    "a curriculum": sampled(lambda _, s: (0.2, 5.0 + s / 10, 10.0 + s / 5, 2.0)),
    "a little loading": sampled(lambda *_: (0.6, *BALANCED[1:])),
    "short collections": lambda root: write_spans(
        root, lambda step, now: [(now, NS_PER_MS)] * (step % 10 == 0)
    ),
    "one long collection": lambda root: write_spans(
        root, lambda step, now: [(now, 700 * NS_PER_MS)] * (step == 60)
    ),
    "small checkpoints": lambda root: write_spans(
        root, lambda step, now: [(now, 5 * NS_PER_MS)] * (step % 10 == 9), schema.SAVE
    ),
    "operators of marked steps": lambda root: write_marks(root, "0"),
    "marked steps, nobody looked at the lock": lambda root: write_marks(root, "-"),
    "ranks that differ by chance": sampled(lambda *_: BALANCED, noise=0.08, ranks=4),
    "two ranks that fill two cores": busy([Cores(wait=0.03), Cores(wait=0.04)]),
    "own cores": busy([Cores(cpus="0"), Cores(cpus="1")]),
    "many idle threads": busy([Cores(main=0.3, wait=0.01)], others=0.1),
    "cores that the hypervisor takes": busy([Cores(wait=0.0)], steal=0.4),
    "limited now and then": busy([Cores(cpus="0-31", wait=0.02)], cores=32, limit=(4.0, 0.1)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_a_problem_where_nothing_is_wrong(root: Path, name: str) -> None:
    HEALTHY[name](root)
    verdict = judged(root)
    assert [f for f in verdict.findings if f.severity != "info"] == []
    assert as_document(verdict)["problem_count"] == 0
    said = ("nothing stands out: ", "not certain: ", "the optimizer takes 79 % of the step")
    assert verdict.headline.startswith(said)
    assert verdict.ledger is not None
    assert sum(v or 0 for v in verdict.split.values()) == pytest.approx(verdict.step_ns)


@pytest.mark.parametrize(("steps", "begin"), [(12, "too little was recorded"), (300, "")])
def test_large_loss_in_a_few_steps_is_neither_a_problem_nor_nothing(
    root: Path, steps: int, begin: str
) -> None:
    """Batches that take most of each step: twelve steps of it last for half a second."""
    stacks: Stacks = {"dataloader": (SCRIPT, job(39, "main"), LOAD)}
    write_sampled(root, lambda *_: (30.0, 5.0, 5.0, 1.0), stacks, "h", steps=steps)
    verdict = judged(root)
    assert verdict.headline.startswith(begin)
    assert "nothing stands out" not in verdict.headline
    assert "data.py:12 load_image" in verdict.headline or "(data.py:12)" in verdict.headline
    assert (verdict.findings[0].severity == "info") == bool(begin)


def test_a_large_loss_that_is_not_certain_is_not_nothing(root: Path) -> None:
    """Each step waits for batches, for so different times that it may be next to nothing."""
    stacks: Stacks = {"dataloader": (SCRIPT, job(39, "main"), LOAD)}
    write_sampled(root, lambda *_: (10.0, 5.0, 5.0, 1.0), stacks, "h")
    ledger = ledger_of(judged(root))
    (place,) = (at for at, each in enumerate(ledger.accounts) if each.line == 12)
    unsure = replace(ledger.accounts[place], gain_low_ns=0.0)
    accounts = (*ledger.accounts[:place], unsure, *ledger.accounts[place + 1 :])
    text = nothing_text(replace(ledger, accounts=accounts, opportunities=(place,)))
    assert re.match(r"not certain: Python in input \(data.py:12 load_image\) takes 4\d %", text)
    assert "(0.0 % to" in text


@pytest.mark.parametrize(
    ("made_by", "said"),
    [
        ((LOAD, OPEN), "decode and tokenize"),
        (((f"{SITE}/torch/utils/data/dataset.py", 205, "TensorDataset.__getitem__"),), "in memory"),
        (((*job(9, "collate"), "torch.tensor([x[0] for x in b])"),), "torch.stack"),
        (((*job(9, "collate"), "torch.tensor(length)"),), "decode and tokenize"),
    ],
)
def test_what_to_do_less_of_fits_the_dataset(root: Path, made_by: Stack, said: str) -> None:
    stacks: Stacks = {"dataloader": (SCRIPT, MAIN, FETCH, *made_by)}
    write_sampled(root, lambda *_: (30.0, *BALANCED[1:]), stacks, steps=120)
    assert said in judged(root).findings[0].remedy


@pytest.mark.parametrize(("units", "said"), [(34, True), (5, False)])
def test_a_slow_exchange_of_many_small_units_says_so(root: Path, units: int, said: bool) -> None:
    STORIES["a slow link in backward"].write(root)
    for rank in (0, 1):
        told(root, rank, model={
            "tensor_count": 60, "parameter_count": 400_000, "trainable_count": 400_000,
            "dtypes": {"float32": 400_000}, "ddp": None, "fsdp_unit_count": units,
        })  # fmt: skip
    first = judged(root).findings[0]
    assert first.title.startswith("exchanging parameters and gradients takes longer")
    assert ("about 102 collectives a step, for 34 units of 46.0 KiB" in first.title) == said
    assert ("of blocks and not of layers" in first.remedy) == said
    assert "no_sync" not in first.remedy


@pytest.mark.parametrize(("size", "said"), [(1048.0, True), (float(25 << 20), False)])
def test_a_slow_exchange_in_many_small_buckets_says_so(root: Path, size: float, said: bool) -> None:
    STORIES["a slow link in backward"].write(root)
    for rank in (0, 1):
        told(root, rank, model={
            "tensor_count": 60, "parameter_count": 400_000, "trainable_count": 400_000,
            "dtypes": {"float32": 400_000}, "ddp": {"bucket_bytes": size},
        })  # fmt: skip
    first = judged(root).findings[0]
    assert first.rule == "link_bound"
    assert ("about 60 all-reduces a step, for buckets of 1.02 KiB" in first.title) == said
    assert ("bucket_cap_mb" in first.remedy) == said
    assert "measure the link" not in first.remedy  # ranks of one node without GPUs have none


@pytest.mark.parametrize(
    ("numbers", "is_wrapped", "second", "gain_ms"),
    [(400_000, False, 61, 9.4), (2_000_000, False, 61, 3.0), (2_000_000, True, 61, 12.0),
     (2_000_000, False, 71, 3.0)],
)  # fmt: skip
def test_gradients_that_are_exchanged_by_hand_need_what_their_bytes_take(
    root: Path, numbers: int, is_wrapped: bool, second: int, gain_ms: float
) -> None:
    """12 ms of a step: their bytes at 1 GB/s, and 1 ms, are needed; not where DDP sends them."""
    run = write_run(root)
    shares, others = ((SCRIPT, MAIN, job(line, f"share_{line}"), (*BARRIER[:2], "all_reduce"))
                      for line in (61, second))  # fmt: skip
    spans = ((schema.FORWARD, 0, 5, (SCRIPT, MAIN, MODULE, FORWARD)),
             (schema.BACKWARD, 5, 15, (SCRIPT, MAIN, ENGINE)),
             (schema.OPTIMIZER, 27, 29, (SCRIPT, MAIN, STEP)))  # fmt: skip
    for rank in (0, 1):
        rows, samples = [], []
        for step in range(120):
            at = START_NS + step * 30 * NS_PER_MS
            rows += [(kind, 0, at + begin * NS_PER_MS, at + end * NS_PER_MS)
                     for kind, begin, end, _ in spans]  # fmt: skip
            stacks = {begin: stack for _, begin, _, stack in spans} | {15: shares, 21: others}
            samples += [(at + (begin + 3) * NS_PER_MS, stack) for begin, stack in stacks.items()]
        write_rank(run, spans_from(rows), rank=rank, world_size=2)
        write_stacks(RunPaths(root).rank(rank).stacks, sorted(samples))
        ddp = {"ddp": {"bucket_bytes": 25 << 20}} if is_wrapped else {}
        told(root, rank, model={"parameter_count": numbers, "trainable_count": numbers, **ddp,
                                "dtypes": {"float32": numbers}})  # fmt: skip
    (found,) = (each for each in judged(root).findings if each.rule == "blocking_collectives")
    assert saved_ns(found) == pytest.approx(gain_ms * NS_PER_MS, rel=0.1)


# -- what else a verdict says ---------------------------------------------------------------------


def test_what_takes_somewhat_longer_on_a_straggler_is_in_its_account(root: Path) -> None:
    """Half of forward is a line of Python on both ranks; rank 1 needs 24 ms where the other 20."""
    stacks: Stacks = {"forward": every(2, (SCRIPT, job(41, "main"), MODULE, LOG), "forward")}

    def times(rank: int, _: int) -> tuple[float, float, float, float]:
        return (0.2, 20.0 + 4.0 * rank, 14.0 - 4.0 * rank, 2.0)

    write_sampled(root, times, stacks, lock="h", ranks=2, noise=0.0)
    first, late = judged(root).findings[:2]
    assert first.code_lines[0].function == "log"
    assert saved_ns(first) / NS_PER_MS == pytest.approx(12, abs=1)
    assert late.title.startswith("rank 1 is a straggler: 2.0")


def test_a_loop_over_small_operators_is_told_with_them_and_their_backward(root: Path) -> None:
    """All of forward is such a loop: half of it is Python, and all of backward is its own."""
    write_story(root, lambda *_: BALANCED)
    stacks = USUAL | {"forward": (SCRIPT, MAIN, MODULE, FORWARD)}
    taken = sample(RunFrames(root), lambda phase, _: stacks.get(phase, (SCRIPT, MAIN)), rank=0)
    held = itertools.cycle("hh0")
    locks = (next(held) if FORWARD in stack else "0" for _, stack in taken)
    write_stacks(RunPaths(root).rank(0).stacks, taken, lock="".join(locks))
    verdict = judged(root)
    first, backward_ns = verdict.findings[0], verdict.split["backward"] or 0.0
    said = re.search(r"take another ([\d.]+) ms, and their backward about ([\d.]+) ms", first.title)
    assert said is not None, [f.title for f in verdict.findings]
    assert float(said[1]) == pytest.approx((verdict.split["forward"] or 0) / 2e6, rel=0.1)
    assert float(said[2]) == pytest.approx(backward_ns / 1e6, rel=0.15)
    assert "for all elements at once" in first.remedy


@pytest.mark.parametrize(("products", "said"), [(8, False), (4, True)])
def test_large_operators_of_a_loop_are_no_small_ones(root: Path, products: int, said: bool) -> None:
    """Of ten samples of a loop so many are in products of matrices, which hold no lock."""
    write_story(root, lambda *_: BALANCED, steps=500)
    loop = (SCRIPT, MAIN, MODULE, FORWARD)
    product = (*loop, (*job(12, "Net.forward"), "x @ x.T", 0, 11, INDEPENDENT))
    small = (*loop, (*job(13, "Net.forward"), "x * 2", 0, 11, INDEPENDENT))
    forward = itertools.cycle([product] * products + [small] * (10 - products))
    taken = sample(RunFrames(root), lambda phase, _: next(forward) if phase == "forward"
                   else USUAL.get(phase, (SCRIPT, MAIN)), rank=0)  # fmt: skip
    held = itertools.cycle("h0")
    locks = (next(held) if small[-1] in stack else "0" for _, stack in taken)
    write_stacks(RunPaths(root).rank(0).stacks, taken, lock="".join(locks))
    verdict = judged(root)
    found = [each for each in verdict.findings if "many small operators" in each.title]
    assert bool(found) == said
    if said:
        ahead, back = (verdict.split[name] or 0.0 for name in ("forward", "backward"))
        part = 2 * 0.6 / (2 * 0.6 + 0.4)  # backward of a loop takes twice as long for its forward
        assert saved_ns(found[0]) == pytest.approx(0.6 * ahead + part * back, rel=0.05)


@pytest.mark.parametrize(("calls", "said"), [((MODULE, LINEAR), False), ((), True)])
def test_a_layers_call_holds_the_lock_longer_than_an_operators(
    root: Path, calls: Stack, said: bool
) -> None:
    """For a thirtieth of its time: 30 us of an operator, ten times as much of a layer."""
    write_story(root, lambda *_: BALANCED, steps=500)
    loop = (SCRIPT, MAIN, MODULE, FORWARD, (*job(12, "Net.forward"), "f(h)", 0, 11, RECURRENCE))
    small = (*loop[:-1], (*job(13, "Net.forward"), "h * 2", 0, 11, RECURRENCE))
    forward = itertools.cycle([(*loop, *calls)] * 8 + [small] * 2)
    taken = sample(RunFrames(root), lambda phase, _: next(forward) if phase == "forward"
                   else USUAL.get(phase, (SCRIPT, MAIN)), rank=0)  # fmt: skip
    held, rarely = itertools.cycle("h0"), itertools.cycle("h" + 29 * "0")
    locks = (next(held if small[-1] in stack else rarely) for _, stack in taken)
    write_stacks(RunPaths(root).rank(0).stacks, taken, lock="".join(locks))
    assert ("small operators of a loop" in judged(root).headline) == said


def test_what_runs_for_a_settings_sake_alone_is_its_cost_and_no_other_finding(root: Path) -> None:
    """A fourth of forward writes stacks down for anomaly detection; its checks take as much."""
    writes = (f"{PYTHON}/traceback.py", 430, "StackSummary.extract")
    own = (SCRIPT, MAIN, MODULE, FORWARD, MODULE, LINEAR, writes)
    write_sampled(root, lambda *_: BALANCED, {"forward": every(4, own, "forward")}, lock="h")
    told(root, seen={"anomaly_count": 100})
    verdict = judged(root)
    found = {each.rule: each for each in verdict.findings if each.gain is not None}
    half = (verdict.split["forward"] or 0.0) / 2
    assert saved_ns(found["anomaly_detection"]) == pytest.approx(half, rel=0.1)
    assert "forward_bound" not in found


def test_tracemalloc_makes_python_slow_and_not_the_line_that_it_is_in(root: Path) -> None:
    stacks: Stacks = {"dataloader": (SCRIPT, MAIN, FETCH, LOAD)}
    write_sampled(root, lambda *_: (20.0, *BALANCED[1:]), stacks, lock="h")
    told(root, flags={"tracemalloc": True})
    verdict = judged(root)
    first, second = verdict.findings[:2]
    assert (first.rule, second.rule) == ("tracemalloc", "dataloader_bound")
    assert saved_ns(first) == pytest.approx(0.9 * 20e6, rel=0.1)
    assert saved_ns(second) == pytest.approx(0.1 * 20e6, rel=0.1)


@pytest.mark.parametrize(("lock", "said"), [("h0", True), ("h" + 99 * "0", False)])
def test_a_function_of_autograds_that_calls_small_operators_is_an_opportunity(
    root: Path, lock: str, said: bool
) -> None:
    """A window tells lines of forward alone; what only calls backward() is not meant."""
    apply = (f"{SITE}/torch/autograd/function.py", 310, "BackwardCFunction.apply")
    loop = (*job(12, "Clip.backward"), "g[k]", 0, 11, INDEPENDENT)
    own = (SCRIPT, job(43, "main"), ENGINE, apply, loop)
    stacks: Stacks = {"backward": every(3, own, "backward")}
    write_sampled(root, lambda *_: BALANCED, stacks, lock)
    verdict = judged(root)
    named = "many small operators in a loop: Clip.backward (train.py:12"
    assert verdict.headline.startswith(named) == said
    assert verdict.headline.startswith("nothing stands out: ") != said
    if said:
        found, backward_ns = find(verdict, "many_small_operators"), verdict.split["backward"] or 0.0
        assert saved_ns(found) == pytest.approx(backward_ns / 3, rel=0.1)
        assert "without the loop" in found.remedy


def test_what_the_model_does_in_a_part_of_the_steps_alone_is_said(root: Path) -> None:
    """Its operators are no opportunity; that the other steps are without them is a fact."""
    hard = (SCRIPT, MAIN, MODULE, FORWARD, job(9, "Net.hard"))
    write_sampled(
        root, lambda _, step: (0.2, 30.0 if step < 100 else 5.0, 10.0, 2.0),
        {"forward": lambda step: hard if step < 100 and step % 5 else USUAL["forward"]}, steps=300,
    )  # fmt: skip
    verdict = judged(root)
    assert verdict.headline.startswith("nothing stands out")
    (said,) = [note for note in verdict.notes if "the other steps are without it" in note]
    assert said.startswith("train.py:9 Net.hard, torch operators in forward: ")
    assert ", paid until step 9" in said


@pytest.mark.parametrize(("own_ms", "pause_ms"), [(9, 6), (4, 11)])
def test_collections_are_of_the_line_that_makes_the_objects_where_its_work_is_longer(
    root: Path, own_ms: int, pause_ms: int
) -> None:
    """After each step a line makes objects, until the collector stops it: 15 ms in all."""
    own_ns, pause_ns = own_ms * NS_PER_MS, pause_ms * NS_PER_MS
    write_spans(root, lambda _, now: [(now + own_ns, pause_ns)])
    own = USUAL | dict.fromkeys(("other", "gc"), (SCRIPT, MAIN, LOG))
    write_samples(root, lambda phase, _: own[phase], lock="h")
    verdict = judged(root)
    ledger = ledger_of(verdict)
    assert ledger.sum_error_ns == pytest.approx(0, abs=1)
    found = {each.rule: each for each in verdict.findings}
    rows = ledger.largest()
    ms = {each.rule: rows[n].gain_ns / NS_PER_MS for n, each in enumerate(verdict.findings)}
    if own_ms > pause_ms:
        title = found["outside_the_model"].title
        assert re.search(r"with the garbage collections that it causes \(5\.9\d ms\)", title)
        assert ms == pytest.approx({"outside_the_model": 15}, abs=1)
        assert "longest pause" in {row.name for row in found["outside_the_model"].evidence}
    else:
        assert "mostly in log (train.py:70" in found["garbage_collection"].title
        assert "gc.freeze()" in found["garbage_collection"].remedy
        assert ms == pytest.approx({"outside_the_model": 4, "garbage_collection": 11}, abs=1)


@pytest.mark.parametrize(
    ("ranks", "code", "said", "unsaid"),
    [
        (1, "time.sleep(0.05)", "a sleep of 50.0 ms ends 25.0 ms too late on average: take it from "
         "another thread by queue.Queue", "torch.distributed"),
        (1, "time.sleep(PAUSE)", "a sleep ends half its length too late on average", "torch.dist"),
        (2, "time.sleep(0.05)", "take it from another rank by torch.distributed.broadcast, or "
         "store.wait()", "queue.Queue"),
    ],
)  # fmt: skip
def test_a_poll_is_told_what_wakes_it_in_time(
    root: Path, ranks: int, code: str, said: str, unsaid: str
) -> None:
    """A rank waits in sleeps; of several, the others do not exist for queues of threads."""
    asks = (SCRIPT, (*job(17, "wait_for_plan"), code, 0, 16, RECURRENCE | 1 << OPERATIONS_BIT))
    write_sampled(root, lambda *_: BALANCED, {"other": asks}, ranks=ranks, after_ms=20.0)
    found = find(judged(root), "polling")
    assert said in found.remedy
    assert unsaid not in found.remedy


def test_code_that_runs_in_several_positions_is_not_said_to_be_in_one(root: Path) -> None:
    write_sampled(root, lambda *_: BALANCED, {"other": (SCRIPT, MAIN, LOG)}, "h", gap_ms=3.0)
    found = judged(root).findings[0]
    assert found.title.startswith("before forward and elsewhere: log (train.py")
    assert found.remedy.startswith("do it in the dataset")


@pytest.mark.parametrize(
    ("loader_ms", "line", "title", "remedy"),
    [
        (0.0, LOAD, "between steps: load_image", "where it makes a batch, do it in the dataset"),
        (0.0, LOG, "between steps: log", "do it less often where nothing learns from it"),
        (0.2, LOAD, "after the optimizer: load_image", "in a worker or another process"),
        (0.0, (*job(11, "step"), "X[k]"), "between steps: step", "where it makes a batch, do it"),
        (0.0, (*job(12, "Buffer.sample"), "np.random.choice(n, k, p=p)"),
         "between steps: Buffer.sample", "drawing by weights goes over all of them in each call"),
        (0.0, (*job(8, "Confusion.update"), "self.m[t,p]", 0, 7, INDEPENDENT),
         "between steps: Confusion.update", "with whole tensors: (a == b).sum(), a mask, "
         "torch.where, torch.bincount, scatter_add_"),
    ],
)  # fmt: skip
def test_without_a_loader_what_precedes_forward_may_be_of_the_last_step(
    root: Path, loader_ms: float, line: Stack, title: str, remedy: str
) -> None:
    stacks: Stacks = {"other": (SCRIPT, MAIN, line)}
    write_sampled(root, lambda *_: (loader_ms, *BALANCED[1:]), stacks, "h", after_ms=3.0)
    (found,) = judged(root).findings
    assert found.title.startswith(title)
    assert remedy in found.remedy
    assert [line.sample_count for line in found.code_lines] == [None]  # the ledger has its share


@pytest.mark.parametrize(
    ("code", "waits", "does", "remedy"),
    [
        ("self.db.commit()", "f0", "waiting for a file", "commit once per step, or every N rows"),
        ("self.db.commit()", "0", "native code", "commit once per step, or every N rows"),
        ("cur.executemany(SQL, rows)", "s", "waiting for a network peer", "commit once per step"),
        ("self.out.write(row)", "f", "waiting for a file", "write less often and more at once"),
        ("self.peer.send(row)", "s0", "waiting for a network peer", "ask less often, or from"),
        ("self.tokenizer.encode(row)", "0", "native code", "in a worker or another process"),
        ("json.loads(row)", "0", "native code", "in a worker or another process"),
        ("np.linalg.norm(row)", "0", "native code", "with whole tensors: (a == b).sum()"),
        ("row.eq(best).sum()", "0", "native code", "with whole tensors: (a == b).sum()"),
        ("zipfile.ZipFile(row)", "0", "native code", "keep it open"),
        ("row * weight", "0", "arithmetic on tensors", "with whole tensors: (a == b).sum()"),
    ],
)  # fmt: skip
def test_only_a_loop_that_computes_is_told_to_do_all_at_once(
    root: Path, code: str, waits: str, does: str, remedy: str
) -> None:
    """A loop whose rounds do not need one another, whatever the code in it does."""
    write_story(root, lambda *_: (0.0, *BALANCED[1:]), after_ms=9.0)
    line = (SCRIPT, (*MAIN, "", 0, 39), (*job(16, "Table.add"), code, 0, 15, INDEPENDENT))
    stacks = USUAL | {"other": line}
    taken = sample(RunFrames(root), lambda phase, _: stacks.get(phase, (SCRIPT, MAIN)), rank=0)
    states = itertools.cycle(waits)
    seen = "".join(next(states) if stack is line else "0" for _, stack in taken)
    write_stacks(RunPaths(root).rank(0).stacks, taken, lock="0" * len(taken), kernel_waits=seen)
    found = judged(root).findings[0]
    assert f"Table.add (train.py:16 {code}), {does}" in found.title
    assert remedy in found.remedy
    assert ("whole tensors" in found.remedy) == ("whole tensors" in remedy)


@pytest.mark.parametrize(
    ("code", "inside", "lock", "title", "remedy"),
    [
        ("sum(p.grad.pow(2).sum() for p in ps)", (), "0", "torch operators", "all gradients at"),
        ("net.zero_grad()", ((f"{SITE}/torch/nn/modules/module.py", 2900, "Module.zero_grad"),),
         "h", "Python in torch.nn.modules.module.Module.zero_grad", "once for each optimizer step"),
    ],
)  # fmt: skip
def test_code_on_gradients_is_torchs_and_makes_no_batch(
    root: Path, code: str, inside: Stack, lock: str, title: str, remedy: str
) -> None:
    line = (*job(14, "private"), code)
    stacks: Stacks = {"other": (SCRIPT, MAIN, line, *inside)}
    write_sampled(root, lambda *_: BALANCED, stacks, lock, gap_ms=3.0)
    found = judged(root).findings[0]
    assert f"({line[0].rpartition('/')[2]}:14 {code}), {title}" in found.title
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("part", "exchange", "title", "remedy"),
    [
        ("forward", (SENDS_BUFFERS,), "DistributedDataParallel sends the buffers",
         "broadcast_buffers"),
        ("forward", (*TRAINER_LOOP, SENDS_BUFFERS), "DistributedDataParallel sends the buffers",
         "broadcast_buffers"),
        ("other", (*TRAINER_LOOP, BARRIER), "collectives of Lightning's own", "larger batches"),
        ("other", (BARRIER,), "collectives between the phases", "a barrier hands nothing over"),
        ("other", (SHARDED,), "ZeroRedundancyOptimizer sends the parameters",
         "the optimizer itself"),
    ],
)  # fmt: skip
def test_tensors_that_torch_exchanges_by_itself_are_said(
    root: Path, part: str, exchange: Stack, title: str, remedy: str
) -> None:
    """Also below a trainer, whose own functions are the first that the job's line calls."""
    stacks: Stacks = {part: (SCRIPT, MAIN, *exchange)}
    write_sampled(root, lambda *_: BALANCED, stacks, gap_ms=3.0 if part == "other" else 0.0)
    found = judged(root).findings[0]
    assert found.title.startswith(title)
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("begins", "title"),
    [("all_reduce", "collectives between the phases"), ("isend", "waiting for other ranks")],
)
def test_a_handle_is_waited_for_as_what_it_is_of(root: Path, begins: str, title: str) -> None:
    """`work.wait()` is C++, and runs no Python."""
    begun = (SCRIPT, MAIN, job(61, "share"), (BARRIER[0], 2900, begins))
    waited = (SCRIPT, MAIN, (*job(62, "share"), "work.wait(timeout)"))
    stacks: Stacks = {"other": lambda i: begun if i % 7 == 0 else waited}
    write_sampled(root, lambda *_: BALANCED, stacks, gap_ms=3.0)
    (found,) = judged(root).findings
    assert title in found.title


@pytest.mark.parametrize("lock", ["h", "0"])
@pytest.mark.parametrize(
    "inside",
    [
        (f"{PYTHON}/multiprocessing/queues.py", 103, "Queue.get"),
        (f"{PYTHON}/multiprocessing/connection.py", 250, "_ConnectionBase.recv"),
    ],
)
def test_what_comes_from_another_process_is_not_to_be_moved_to_one(
    root: Path, inside: tuple[str, int, str], lock: str
) -> None:
    """It is pickled there and unpickled here, or that process is slow."""
    write_sampled(root, lambda *_: BALANCED, {"other": (SCRIPT, MAIN, inside)}, lock, after_ms=9.0)
    found = judged(root).findings[0]
    assert f"in multiprocessing.{inside[0].rpartition('/')[2][:-3]}" in found.title
    assert "torch.multiprocessing.Queue, which shares their memory" in found.remedy
    assert "where training waits for the producer" in found.remedy


def test_workers_are_not_blamed_for_cores_that_others_fill(root: Path) -> None:
    write_cores(root, [Cores(main=1.5, workers=0.19, wait=0.35)], others=0.3)
    assert judged(root).findings[0].title.startswith("too few cores: rank 0 may use 2")


def test_two_lines_of_a_function_are_both_said(root: Path) -> None:
    """The second one waits for a lock."""
    waits = (SCRIPT, MAIN, job(72, "log"), (f"{PYTHON}/threading.py", 300, "Condition.wait"))
    stacks: Stacks = {"other": lambda i: waits if i % 5 < 2 else (SCRIPT, MAIN, LOG)}
    write_sampled(root, lambda *_: BALANCED, stacks, after_ms=3.0)
    (found,) = judged(root).findings
    said = r"log \(train.py:70\), native code \((39|4.) % of it: line 72, waiting for a lock or"
    assert re.search(said, found.title)
    assert found.remedy.startswith("do it less often")
    assert "a queue" in found.remedy


def test_where_no_code_was_sampled_nothing_is_said_of_it(root: Path) -> None:
    write_story(root, lambda *_: BALANCED)
    note(root, 0, type="stacks_failed", reason="its compiled part is missing")
    verdict = judged(root)
    assert ("code", "its compiled part is missing") in verdict.not_measured
    assert "passes in the model, whose code was not sampled" in verdict.headline


def test_a_gain_above_the_limit_is_a_problem_and_one_below_a_fact(root: Path) -> None:
    found = {}
    for ms in (0.5, 1.5, 30.0):
        verdict = judged(write_sampled(root.parent / str(ms), lambda *_: (ms, *BALANCED[1:])))  # noqa: B023
        finding = next(f for f in verdict.findings if f.rule == "dataloader_bound")
        found[ms] = finding.severity, finding.title.startswith("dataloader-bound: ")
    assert found == {0.5: ("info", False), 1.5: ("warning", False), 30.0: ("critical", True)}


def test_what_is_seen_in_less_than_a_second_is_a_note_and_says_so(root: Path) -> None:
    verdict = verdict_of(root, lambda *_: (30.0, *BALANCED[1:]), steps=15)
    assert {f.severity for f in verdict.findings} == {"info"}
    assert any(note.startswith("less than 1 s of training was") for note in verdict.notes)


def test_few_steps_are_judged_with_less_confidence(root: Path) -> None:
    few, many = (
        verdict_of(root.parent / str(n), lambda *_: (300.0, *BALANCED[1:]), steps=n).findings[0]
        for n in (5, 80)
    )
    assert few.confidence < many.confidence


def test_steal_is_noted(root: Path) -> None:
    write_cores(root, [Cores(wait=0.0)], steal=0.4)
    (said,) = [note for note in judged(root).notes if "hypervisor" in note]
    assert " 29 % " in said


def test_a_job_beside_it_is_none_of_this_one(root: Path) -> None:
    """Two scripts that one shell script runs at once: both are rank 0, and know of no other."""
    write_sampled(root, lambda *_: BALANCED, {"other": (SCRIPT, MAIN, LOG)}, "h", gap_ms=8.0)
    write_beside(root, 30.0, steps=150)
    times = [START_NS + 20_000_000 * at for at in range(1, 200)]
    write_stacks(RunPaths(root).rank(0).stacks, [(time, (MAIN, LOAD)) for time in times])
    first = judged(root).findings[0]
    assert (first.rule, first.code_lines[0].function) == ("outside_the_model", "log")


@pytest.mark.parametrize(("gap_ms", "said"), [(-800, "at the same time"), (500, "started 2 times")])
def test_processes_side_by_side_are_told_from_restarts(root: Path, gap_ms: int, said: str) -> None:
    run, rows = write_run(root), plain_steps(60)
    later = rows[-1][3] - START_NS + gap_ms * NS_PER_MS
    write_rank(run, spans_from(rows))
    again = [(kind, tag, begin + later, end + later) for kind, tag, begin, end in rows]
    write_rank(run, spans_from(again), attempt=1)
    verdict = judged(root)
    assert any(said in note for note in verdict.notes), verdict.notes
    assert verdict.step_count == 60


def test_same_run_gives_the_same_document_and_it_is_plain_json(root: Path) -> None:
    times: PhaseTimes = lambda rank, step: (3.0, 9.0 + rank, 10.0 if step < 60 else 14.0, 2.0)  # noqa: E731
    first = json.dumps(as_document(verdict_of(root, times, ranks=3, cores=1.0)), allow_nan=False)
    assert first == json.dumps(as_document(judged(root)))
    content = json.loads(first)
    assert content["findings"][0]["slug"] == "dataloader_bound"
    assert content["cost"]["hook_ns_per_step"] == pytest.approx(4_000)
    assert content["cost"]["agent_cpu_ratio"] == pytest.approx(0.005)
    total = sum(row["ns_per_step"] for row in content["ledger"]) + content["step"]["residual_ns"]
    assert total == pytest.approx(content["step"]["mean_ns"], rel=1e-9)
    gains = [content["ledger"][row]["gain_ns"] for row in content["opportunities"]]
    assert gains == sorted(gains, reverse=True)


def test_every_rule_is_a_finding_checked_or_abstained(root: Path) -> None:
    verdict = verdict_of(root, lambda *_: BALANCED)
    names = [rule.__name__ for rule in RULES]
    told = [f.rule for f in verdict.findings if f.rule in names]
    assert sorted([*told, *verdict.checked, *dict(verdict.abstained)]) == sorted(names)


def test_a_run_without_training_says_why(tmp_path: Path) -> None:
    write_run(tmp_path / "none")
    nobody = judged(tmp_path / "none")
    assert nobody.headline.startswith("no training steps: no process of the job has reported in")
    assert nobody.step_ns is None
    assert [rule for rule, _ in nobody.abstained] == [rule.__name__ for rule in RULES]
    write_rank(write_run(tmp_path / "evaluated"), spans_of("D E END"))
    assert "only evaluated" in judged(tmp_path / "evaluated").headline
    write_rank(write_run(tmp_path / "repeated"), spans_of("D E " * 30 + "END"))
    repeated = judged(tmp_path / "repeated")
    assert repeated.step_count == 30
    assert repeated.notes[0] == "steps begin with the loader's batches: no optimizer seen"
    assert not {"backward", "optimizer"} & {what for what, _ in repeated.not_measured}


def test_pauses_and_saves_are_counted_and_what_is_missing_is_said(root: Path) -> None:
    write_rank(write_run(root), spans_of("F(GC) B O SAVE F B O E"))
    verdict = judged(root)
    assert {name: event.count for name, event in verdict.events.items()} == {"gc": 1, "save": 1}
    assert verdict.evaluation_ns == 100
    assert ("dataloader", "no torch DataLoader ran in a training step") in verdict.not_measured
    assert verdict.split["dataloader"] is None
    run = RunPaths(root)
    card = verdict_card(verdict, run_header(run, manifest_or_none(run)), everything=True)
    assert view_text(card).count("no torch DataLoader") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "train.py:88 load_image: 61 % of the step (55 to 67 %), in PIL.Image.open"),
        ({"low": None, "callees": (), "callers": ("train.py:9 evaluate", "train.py:2 main")},
         "train.py:88 load_image: 61 % of the step, called by train.py:9 evaluate < "
         "train.py:2 main"),
        ({"share": 0.84, "low": 0.59, "high": 0.842, "callees": ()},
         "train.py:88 load_image: 84 % of the step (at least 59 %)"),
    ],
)  # fmt: skip
def test_a_line_is_described_in_one_sentence(more: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {
              "file": "/home/me/train.py", "line": 88, "function": "load_image", "share": 0.61,
              "low": 0.55, "high": 0.67, "of": "the step", "sample_count": 90,
              "callees": ("PIL.Image.open",)}  # fmt: skip
    assert CodeLine(**(fields | more)).describe() == said
    steering = fields | {"file": "/tmp/\x1b[2Jx\n.py", "function": "f\u202e", "callees": ("\x1b]",)}
    assert CodeLine(**steering).describe().isprintable()


def test_a_backward_that_the_job_wrote_is_named_as_part_of_the_model(root: Path) -> None:
    apply = (f"{SITE}/torch/autograd/function.py", 300, "BackwardCFunction.apply")
    own = (SCRIPT, MAIN, ENGINE, apply, job(15, "FakeQuant.backward", "quant.py"))
    write_sampled(root, lambda *_: BALANCED, {"backward": own}, steps=120)
    assert judged(root).headline == (
        "56 % of the step is a backward of your own (quant.py:15 FakeQuant.backward)"
    )


def test_a_large_wait_that_nobody_is_known_to_cause_is_no_problem_and_not_nothing(
    root: Path,
) -> None:
    apply = (f"{SITE}/torch/autograd/function.py", 300, "BackwardCFunction.apply")
    own = (SCRIPT, MAIN, ENGINE, apply, job(15, "FakeQuant.backward", "quant.py"))
    write_cores(root, [Cores(main=0.5, wait=0.4)], others=0.1, stacks={"backward": own})
    verdict = judged(root)
    assert {each.severity for each in verdict.findings} == {"info"}
    assert verdict.headline == verdict.findings[0].title
    assert verdict.headline.startswith("the training thread was ready to run but had no CPU core")
    assert "is a backward of your own (quant.py:15" in " ".join(verdict.notes)


@pytest.mark.parametrize(("threads", "severity"), [(1, "info"), (8, "critical")])
def test_threads_of_ranks_beyond_their_cores_are_a_problem_that_a_setting_removes(
    root: Path, threads: int, severity: str
) -> None:
    write_cores(root, [Cores(main=0.6, wait=0.5)] * 2)
    for rank in range(2):
        told(root, rank)
        report(root, rank, operator_threads=threads)
    found = find(judged(root), "shared_cores")
    assert found.severity == severity
    assert ("OMP_NUM_THREADS=1, or" in found.remedy) == (threads > 1)
    assert ("with 16 threads" in found.title) == (threads > 1)


@pytest.mark.parametrize(("wait", "first"), [(0.242, "forward_bound"), (0.6, "busy_neighbours")])
def test_neighbours_come_first_only_where_they_surely_cost_more(
    root: Path, wait: float, first: str
) -> None:
    hook: Stacks = {"forward": every(3, (SCRIPT, MAIN, MODULE, job(4, "hook")), "forward")}
    times: PhaseTimes = lambda *_: (0.2, 30.0, 20.0, 2.0)  # noqa: E731
    write_cores(root, [Cores(main=0.5, wait=wait)], others=1.5, times=times, stacks=hook, lock="h")
    found = judged(root).findings
    assert found[0].rule == first
    assert {each.rule for each in found[:2]} == {"forward_bound", "busy_neighbours"}
    lost = {each.rule: each.lost_ratio or 0.0 for each in found}
    assert lost["busy_neighbours"] > lost["forward_bound"]


def test_others_beside_the_only_core_that_a_rank_may_use_are_not_blamed(root: Path) -> None:
    write_cores(root, [Cores(cpus="0", main=0.65, wait=0.35, workers=0.34)], others=1.0)
    said = "too few cores for its loader workers: rank 0 may use 1 of 2"
    assert judged(root).headline.startswith(said)


@pytest.mark.parametrize(("ranks", "said"), [(1, False), (2, True)])
def test_where_no_core_is_free_work_in_other_processes_gains_little(
    root: Path, ranks: int, said: bool
) -> None:
    stacks: Stacks = {"dataloader": (SCRIPT, MAIN, LOG)}
    times: PhaseTimes = lambda *_: (30.0, *BALANCED[1:])  # noqa: E731
    write_cores(root, [Cores()] * ranks, times=times, stacks=stacks, lock="h")
    first = judged(root).findings[0]
    assert "in worker processes" in first.remedy
    assert ("done elsewhere on this node, it gains little" in first.remedy) == said


@pytest.mark.parametrize(
    ("times", "said"),
    [(1.0, "(1.50 cores: pytest 0.45)"), (4.0, "(1.50 cores: pytest)")],  # seen ahead of training
)
def test_neighbours_have_their_names(root: Path, times: float, said: str) -> None:
    write_cores(root, [Cores(main=0.5, wait=0.5)], others=1.5)
    for name, seconds, cores in (("pytest", 10, 1.2), ("pytest", 30, 0.8), ("bash", 40, 0.01)):
        seen = [{"pid": 7, "name": name, "cores": times * cores}]
        line = {"type": "other_processes", "elapsed_ns": seconds * NS_PER_S, "processes": seen}
        append_line(RunPaths(root).node("node0").events, line)
    assert said in judged(root).headline


@pytest.mark.parametrize(
    ("name", "workers", "said"),
    [
        ("ship_logs", 0, "a process that the job has started uses 0.80 of 2 cores (ship_logs)"),
        ("ship_logs", 1, "too few cores"),  # of an older torch: that may be the worker
        ("pt_data_worker", 1, "too few cores for its loader workers"),
    ],
)
def test_a_process_of_the_jobs_own_that_takes_the_cores_has_its_name(
    root: Path, name: str, workers: int, said: str
) -> None:
    write_cores(root, [Cores(main=0.94, workers=0.8, wait=0.4)])
    if not workers:  # it is no worker
        path = RunPaths(root).rank(0).events
        lines = [line for line in path.read_text().splitlines() if "dataloader" not in line]
        path.write_text("".join(f"{line}\n" for line in lines))
    seen = [{"pid": 7, "name": name, "cores": 0.8}]
    line = {"type": "other_processes", "elapsed_ns": NS_PER_S, "processes": [], "started": seen}
    append_line(RunPaths(root).node("node0").events, line)
    found = judged(root).findings[0]
    assert found.title.startswith(said)
    assert ("nice 19" in found.remedy) == (not workers)


LINALG = (f"{SITE}/torch/functional.py", 100, "norm")
LINEAR = (f"{SITE}/torch/nn/modules/linear.py", 100, "Linear.forward")


@pytest.mark.parametrize(("inside", "said"), [((LINALG,), True), ((MODULE, LINEAR), False)])
def test_one_line_of_the_model_that_takes_most_of_the_step_is_the_headline(
    root: Path, inside: Stack, said: bool
) -> None:
    """It may be needed; a line that calls a layer is what every model has."""
    own = (job(6, "Net.forward", "net.py"), job(6, "Net.forward.<locals>.<genexpr>", "net.py"))
    line = (SCRIPT, MAIN, MODULE, *own, *inside)
    write_sampled(root, lambda *_: (0.2, 30.0, 10.0, 2.0), {"forward": line}, steps=120)
    headline = judged(root).headline
    assert headline.endswith("of the step is one line of forward (net.py:6 Net.forward)") == said
    assert headline.startswith("nothing stands out") != said


@pytest.mark.parametrize(("workers", "sure"), [(0.0, 0.1), (0.3, 0.05)])
def test_what_the_loaders_workers_may_take_of_the_cores_is_not_surely_a_neighbours(
    root: Path, workers: float, sure: float
) -> None:
    """Others use 0.3 of two cores."""
    write_cores(root, [Cores(main=0.8, wait=0.1, workers=workers)], others=0.3)
    note(root, 0, type="dataloader", workers=1)
    (found,) = [each for each in judged(root).findings if each.title.startswith("other processes")]
    assert found.gain is not None
    assert 1 - found.gain.left_ns / found.gain.step_ns == pytest.approx(0.1, abs=0.02)
    assert 1 - found.gain.high_ns / found.gain.step_ns == pytest.approx(sure, abs=0.02)


@pytest.mark.parametrize(("wait", "said"), [(0.02, "warning"), (0.3, "info")])
def test_ranks_that_wait_for_cores_are_late_in_turns_too(
    root: Path, wait: float, said: str
) -> None:
    """How long which step waited is an estimate, and may be all that the ranks differ by."""
    write_turns(root, lambda large: 3000 if large else 1000)
    counters(root, lambda t, _: {"run_queue_wait_ns": wait * (t + 2) * NS_PER_S,
                                 "cpu_main_ns": 0.6 * (t + 2) * NS_PER_S}, ranks=2)  # fmt: skip
    (uneven,) = [each for each in judged(root).findings if each.rule == "data_imbalance"]
    assert uneven.severity == said
    assert ("unless that is how they wait for cores" in uneven.title) == (said == "info")


@pytest.mark.parametrize("called", ["all_reduce", "barrier"])
def test_the_line_at_which_ranks_in_turns_wait_is_named(root: Path, called: str) -> None:
    write_turns(root, lambda large: 3000 if large else 1000)
    meets = (SCRIPT, job(35, "main"), (BARRIER[0], 3231, called))
    for rank in range(2):
        write_samples(root, lambda phase, step: meets if phase == "backward" and step % 4 == 0
                      else USUAL.get(phase, (SCRIPT, MAIN)), rank=rank)  # fmt: skip
    (uneven,) = [each for each in judged(root).findings if each.rule == "data_imbalance"]
    assert uneven.code_lines[0].location == "train.py:35 main"
    assert "let them meet there less often" in uneven.remedy
    assert uneven.remedy.startswith("a barrier hands nothing over") == (called == "barrier")


@pytest.mark.parametrize(("inner", "said"), [("softmax", True), ("_in_projection_packed", False)])
def test_attention_that_makes_its_weights_is_told(root: Path, inner: str, said: bool) -> None:
    """Without them the layer calls one operator for all, and no softmax."""
    functions = f"{SITE}/torch/nn/functional.py"
    attends = (SCRIPT, MAIN, MODULE, FORWARD, MODULE,
               (functions, 6400, "multi_head_attention_forward"))  # fmt: skip
    stacks: list[Stack] = [attends, attends, (*attends, (functions, 2100, inner)),
                           USUAL["forward"]]  # fmt: skip
    write_sampled(root, lambda *_: (0.2, 30.0, 30.0, 2.0),
                  {"forward": lambda i: stacks[i % 4]}, steps=200)  # fmt: skip
    headline = judged(root).headline
    assert ("need_weights=False saves" in headline) == said
    if said:
        ratio = float(re.findall(r"(\d+) % of the step is attention", headline)[0])
        assert ratio == pytest.approx(100 * 22.5 / 62.2, abs=3)


def test_attention_of_a_library_is_told(root: Path) -> None:
    eager = (f"{SITE}/transformers/models/llama/modeling_llama.py", 170, "eager_attention_forward")
    attends = (SCRIPT, MAIN, MODULE, FORWARD, MODULE, eager)
    write_sampled(root, lambda *_: (0.2, 30.0, 30.0, 2.0),
                  {"forward": every(2, attends, "forward")}, steps=200)  # fmt: skip
    headline = judged(root).headline
    assert 'attn_implementation="eager"' in headline
    ratio = float(re.findall(r"(\d+) % of the step is attention", headline)[0])
    assert ratio == pytest.approx(100 * 15 / 62.2, abs=3)


def test_a_frozen_model_before_forward_has_a_line_of_own_work(root: Path) -> None:
    """It runs for 5 ms before forward, and as long before backward."""
    encodes = (SCRIPT, MAIN, NO_GRAD, job(40, "encode"), MODULE, job(16, "Encoder.forward"))
    stacks: Stacks = {"other": (*encodes, MODULE, LINEAR)}
    write_sampled(root, lambda *_: (0.2, 30.0, 30.0, 2.0), stacks, steps=200, gap_ms=5.0)
    verdict = judged(root)
    (encoder,) = (each for each in verdict.own_work if each.function == "Encoder.forward")
    assert encoder.backward_ns == 0.0
    assert encoder.ratio == pytest.approx(10 / 82.2, abs=0.01)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("last", ["a @ v", "mask(a)"])
def test_attention_by_hand_is_told_with_its_part_of_backward(
    root: Path, last: str, drops: bool
) -> None:
    """Half of forward is such lines of one function; another product of it is none of it."""

    def line(number: int, code: str) -> Stack:
        return (SCRIPT, MAIN, MODULE, (*job(number, "Attention.forward", "net.py"), code))

    stacks: list[Stack] = [
        line(5, "q @ k.transpose(-2, -1)"), USUAL["forward"], line(6, "F.softmax(a, dim=-1)"),
        USUAL["forward"], line(7, "F.dropout(a)") if drops else line(5, "k.transpose(-2, -1)"),
        USUAL["forward"], line(8, last), line(3, "h @ w2"),
    ]  # fmt: skip
    write_sampled(root, lambda *_: (0.2, 30.0, 30.0, 2.0),
                  {"forward": lambda i: stacks[i % 8]}, steps=200)  # fmt: skip
    headline = judged(root).headline
    assert ("scaled_dot_product_attention" in headline) == (last == "a @ v")
    if last == "a @ v":
        ratio = float(re.findall(r"(\d+) % of the step looks like attention", headline)[0])
        assert "net.py:6 Attention.forward" in headline
        assert ratio == pytest.approx(100 * 30 / 62.2, abs=3)
        assert ("with dropout, as here" in headline) == drops


@pytest.mark.parametrize("way", [
    (SCRIPT, MAIN), (SCRIPT, MAIN, STEP, NO_GRAD, job(5, "closure")),
    (SCRIPT, MAIN, STEP_WRAPPER, NO_GRAD, (f"{SITE}/timm/optim/lion.py", 90, "Lion.step"),
     job(5, "closure")),
])  # fmt: skip
def test_own_work_is_said_by_function_with_its_part_of_backward(root: Path, way: Stack) -> None:
    """Backward is shared by the forward that autograd records: not a frozen part, not zeroing.

    An optimizer runs its closure with gradients.
    """
    model = (*way, MODULE)
    zero = (f"{SITE}/torch/optim/optimizer.py", 9, "Optimizer.zero_grad")
    expert, head, frozen, zeroing = (
        (*model, job(6, "Expert.forward", "net.py"), LINEAR),
        (*model, job(9, "Head.forward", "net.py"), LINEAR),
        (*way, NO_GRAD, job(4, "features", "old.py"), MODULE, LINEAR),
        (SCRIPT, job(30, "main"), zero),
    )
    stacks: list[Stack] = [expert, expert, expert, head, frozen, zeroing]
    times = (0.2, 30.0, 40.0, 2.0)
    write_sampled(root, lambda *_: times, {"forward": lambda i: stacks[i % 6]}, steps=240)
    verdict = judged(root)
    found = {each.function: each for each in verdict.own_work}
    assert {name: round(each.backward_ns / NS_PER_MS) for name, each in found.items()} == {
        "Expert.forward": 30, "Head.forward": 10, "features": 0, "main": 0,
    }  # fmt: skip
    assert found["Expert.forward"].ns_per_step == pytest.approx(15e6, rel=0.05)
    assert verdict.own_work[0].is_estimate
    card = view_text(verdict_card(verdict, run_header(RunPaths(root), None)))
    assert "own work  about 6" in card
    assert "% of the step, its part of backward included: net.py:6 Expert.forward" in card
    document = as_document(verdict)["own_work"][0]
    assert (document["file"], document["line"]) == (expert[-2][0], 6)
    assert document["ratio"] == pytest.approx(45 / 72.3, abs=0.02)


@pytest.mark.parametrize(("of_body", "named"), [(5, "self.body(h)"), (2, "")])
def test_of_several_calls_of_one_line_the_own_work_names_one_that_is_most(
    root: Path, of_body: int, named: str
) -> None:
    calls = ["self.body(h)"] * of_body + ["self.stem(x)"] * 2 + ["self.up(h)"]
    stacks: list[Stack] = [(SCRIPT, MAIN, MODULE, (*job(6, "Net.forward", "net.py"), call), LINEAR)
                           for call in calls]  # fmt: skip
    write_sampled(root, lambda *_: (0.2, 30.0, 40.0, 2.0),
                  {"forward": lambda i: stacks[i % len(stacks)]}, steps=240)  # fmt: skip
    (own,) = (each for each in judged(root).own_work if each.function == "Net.forward")
    assert (own.line, own.line_count, own.expression) == (6, 1, named)


def test_lines_of_a_helper_of_the_model_count_together(root: Path) -> None:
    """Each of three is less than what `Net.forward` does itself."""
    model = (SCRIPT, MAIN, MODULE)
    stacks: list[Stack] = [(*model, job(6, "Net.forward", "net.py"), LINALG)] * 2
    stacks += [(*model, job(8, "Net.forward", "net.py"), job(n, "normalise", "net.py"), LINALG)
               for n in (21, 22, 23)]  # fmt: skip
    write_sampled(root, lambda *_: (0.2, 30.0, 10.0, 2.0),
                  {"forward": lambda i: stacks[i % 5]}, steps=120)  # fmt: skip
    verdict = judged(root)
    assert "of the step is 3 lines of one function of forward (net.py:2" in verdict.headline
    assert "normalise" in verdict.headline
    (own,) = (each for each in verdict.own_work if each.function == "normalise")
    assert own.describe().endswith(" normalise and 2 more lines of it")


def test_fused_saves_of_adams_update_alone(root: Path) -> None:
    sparse = (SCRIPT, MAIN, (f"{SITE}/torch/optim/sparse_adam.py", 90, "SparseAdam.step"))
    gains = []
    for of_adam in (4, 1):  # of four
        path = root / str(of_adam)

        def update(step: int, of_adam: int = of_adam) -> Stack:
            return USUAL["optimizer"] if step % 4 < of_adam else sparse

        write_sampled(path, lambda *_: (0.2, 5.0, 10.0, 30.0), {"optimizer": update})
        told(path)
        gains.append(saved_ns(find(judged(path), "unfused_adam")))
    assert gains[1] == pytest.approx(gains[0] / 4, rel=0.2)
    assert re.search(r" % of the step \(7\d % of that is SparseAdam.step\), more than",
                     judged(path).headline)  # fmt: skip


@pytest.mark.parametrize(("wait", "first"), [(0.1, "unfused_adam"), (0.8, "busy_neighbours")])
def test_a_long_update_comes_before_neighbours_that_surely_cost_less(
    root: Path, wait: float, first: str
) -> None:
    """It is torch's default, and so no problem: the neighbours are the only one."""
    times: PhaseTimes = lambda *_: (0.2, 5.0, 10.0, 30.0)  # noqa: E731
    write_cores(root, [Cores(main=0.5, wait=wait)], others=1.5, times=times)
    told(root)
    verdict = judged(root)
    severity = {each.rule: each.severity for each in verdict.findings}
    assert (severity["unfused_adam"], severity["busy_neighbours"] != "info") == ("info", True)
    assert verdict.findings[0].rule == first
    assert verdict.headline == verdict.findings[0].title


@pytest.mark.parametrize(
    ("kept", "backward_ms", "said"), [(70, 60.0, True), (0, 60.0, False), (70, 10.0, False)]
)
def test_backward_that_may_go_through_old_graphs_is_told(
    root: Path, kept: int, backward_ms: float, said: bool
) -> None:
    write_sampled(root, lambda *_: (0.2, 5.0, backward_ms, 2.0), steps=120)
    told(root, seen={"kept_graph_count": kept})
    verdict = judged(root)
    assert verdict.headline.startswith("backward takes 11.6 times as long as forward") == said
    assert verdict.headline.startswith("nothing stands out") != said
    found = [each for each in verdict.findings if each.rule == "kept_graph"]
    assert len(found) == said
    for each in found:
        assert (each.title, each.severity) == (verdict.headline, "critical")
        assert each.remedy.startswith("detach() what a step takes over")
        assert each.code_lines[0].location == "train.py:43 main"
        assert each.gain is not None
        assert [each.gain.low_ns, each.gain.left_ns, each.gain.high_ns] == pytest.approx(
            [13.3e6, 18.5e6, 23.7e6], rel=0.02
        )


SLEEPING = (*job(14, "refresh", "cache.py"), "time.sleep(0.018)")


@pytest.mark.parametrize("wait", [(f"{PYTHON}/queue.py", 180, "Queue.get"), SLEEPING])
def test_who_holds_the_lock_and_is_seen_where_it_waits_has_no_line(
    root: Path, wait: tuple[Any, ...]
) -> None:
    """It is looked at once it lets go of the lock: that line took no time."""
    write_lock(root, wait)
    first = judged(root).findings[0]
    assert first.title.startswith("another Python thread, in refresh, holds the interpreter lock")
    assert first.code_lines == ()
    _, lines, notes = sampled_lines(Analyzer(root), None, "other_threads")
    assert lines.is_empty()
    assert "200 of 200 looks found them where they wait" in notes[-1]


@pytest.mark.parametrize(
    ("code", "spins"),
    [
        ("time.time()", True), ("self.stopped.is_set()", True), ("monotonic_ns()", True),
        ("while not self.done: idle = time.time() - self.last", True),
        ("tokenize(self.rows[i])", False), ("while i < n: i += f(i)", False),
        ("self.time(row)", False), ("", False),
    ],
)  # fmt: skip
def test_a_thread_that_only_looks_at_a_clock_or_a_flag_is_told_to_wait(
    root: Path, code: str, spins: bool
) -> None:
    write_lock(root, (*job(14, "Watchdog.run", "cache.py"), code, 0, 13, RECURRENCE))
    first = judged(root).findings[0]
    assert first.title.startswith(f"another Python thread{' spins, and' * spins} holds the inter")
    assert ("threading.Event.wait(seconds)" in first.remedy) == spins
    assert ("to another process" in first.remedy) != spins


def test_who_holds_the_lock_has_the_line_at_which_it_does_not_wait(root: Path) -> None:
    write_lock(root, SLEEPING)
    path = RunPaths(root).rank(0).stacks
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    asleep, caller = next((o[2], o[2] - 1) for line in lines for o in line.get("others", ()))
    looks = [look for line in lines for look in line.get("others", ())]
    for look in looks[::4]:
        assert look[2] == asleep
        look[2] = caller
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = judged(root).findings[0]
    assert [line.location for line in first.code_lines] == ["cache.py:12 refresh"]
    _, found, _ = sampled_lines(Analyzer(root), None, "other_threads")
    assert found["line"].to_list() == [12]


def test_a_lock_that_no_thread_of_the_jobs_was_seen_with_is_no_finding(root: Path) -> None:
    """The sampler's own start is not called another thread of the job's."""
    write_lock(root)
    path = RunPaths(root).rank(0).stacks
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "others": []}) + "\n" for line in lines))
    assert "interpreter_lock" not in [finding.rule for finding in judged(root).findings]


@pytest.mark.parametrize("name", ["waiting for workers", "a neighbour of the loader's worker"])
def test_workers_lines_are_named_not_the_wait_for_them(root: Path, name: str) -> None:
    STORIES[name].write(root)
    stacks: list[Stack] = [(FETCH, LOAD)] * 40 + [(MAIN,)] * 20
    samples = [(START_NS + 20_000_000 * (i + 10), stack) for i, stack in enumerate(stacks)]
    write_stacks(RunPaths(root).rank(0).worker_stacks(0), samples, worker=0, pid=9)
    line = judged(root).findings[0].code_lines[0]
    assert (line.function, line.of, line.share) == ("load_image", "the workers' loading", 1.0)


@pytest.mark.parametrize(("busy_cores", "left"), [(1.6, 0.8), (0.7, 17.2 / 37.2)])
def test_waiting_for_others_work_gains_no_more_than_the_cores_allow(
    root: Path, busy_cores: float, left: float
) -> None:
    """Actors that fill 1.6 of two cores: overlapped, all of it takes 0.8 of a step."""
    acquire = (SCRIPT, job(31, "main"), (f"{PYTHON}/threading.py", 468, "Semaphore.acquire"))
    write_sampled(root, lambda *_: (0.2, 5.0, 10.0, 2.0), {"other": acquire},
                  after_ms=20.0, steps=400)  # fmt: skip
    counters(root, lambda t, _: {"cpu_main_ns": 0.45 * (t + 2) * NS_PER_S,
                                 "cpu_ns": busy_cores * (t + 2) * NS_PER_S})  # fmt: skip
    placed(root)
    first = judged(root).findings[0]
    assert "waiting for a lock or another thread" in first.title
    assert first.gain is not None
    assert first.gain.left_ns / first.gain.step_ns == pytest.approx(left, abs=0.03)


@pytest.mark.parametrize(("inside", "phase"), [
    ("no_grad", "other"), ("graph", "other"), ("graph", "forward")
])  # fmt: skip
def test_a_metric_is_no_work_of_the_models_and_may_be_the_loss_where_it_has_a_graph(
    root: Path, inside: str, phase: str
) -> None:
    """After the optimizer it is none."""
    metric = (f"{SITE}/torchmetrics/metric.py", 300, "Metric.forward")
    no_grad = (f"{SITE}/torch/utils/_contextlib.py", 9, "context.<locals>.decorate_context")
    way = (SCRIPT, job(34, "main"), *[no_grad] * (inside == "no_grad"), MODULE, metric, MODULE)
    stacks: Stacks = {phase: (*way, LINEAR)}
    write_sampled(root, lambda *_: (0.2, 9.0, 10.0, 2.0), stacks, after_ms=9.0)
    found = next(f for f in judged(root).findings if "every N steps, or in evaluation" in f.remedy)
    assert "in torchmetrics.metric.Metric.forward" in found.title
    assert found.gain is not None
    assert found.gain.step_ns - found.gain.left_ns == pytest.approx(9e6, rel=0.15)
    assert (found.severity == "info") == (phase == "forward")


@pytest.mark.parametrize(("rule", "file", "function", "remedy"), [
    ("distribution_checks", "distributions/distribution.py", "Distribution.__init__",
     "set_default_validate_args(False)"),
    ("embedding_norms", "nn/functional.py", "_no_grad_embedding_renorm_", "leave max_norm out"),
])  # fmt: skip
@pytest.mark.parametrize(("part", "said"), [(0.5, 0.5), (0.01, None)])
def test_what_torch_does_that_an_argument_leaves_out_is_a_setting_with_its_price(
    root: Path, part: float, said: float | None, rule: str, file: str, function: str, remedy: str
) -> None:
    stack = (SCRIPT, MAIN, MODULE, FORWARD, (f"{SITE}/torch/{file}", 60, function))
    write_sampled(root, lambda *_: (0.2, 20.0, 10.0, 2.0),
                  {"forward": every(round(1 / part), stack, "forward")}, lock="h")  # fmt: skip
    told(root)
    found = [f for f in judged(root).findings if f.rule == rule]
    assert len(found) == (said is not None)
    if said is not None:
        assert found[0].gain is not None
        gain = found[0].gain.step_ns - found[0].gain.left_ns
        assert gain == pytest.approx(said * 20e6, rel=0.1)
        assert remedy in found[0].remedy


@pytest.mark.parametrize(("waiting", "input_ms", "worker", "title", "sure"), [
    ((REBUILD, ANSWER), 60.0, (FETCH, LOAD), "training waits for batches", True),
    ((REBUILD, ANSWER), 60.0, (), "the training thread receives the batches", True),
    ((REBUILD, ANSWER), 8.0, (), "the training thread receives the batches", False),
    ((POLL,), 60.0, (), "the training thread receives the batches", True),
    ((POLL,), 60.0, (FETCH, LOAD), "training waits for batches", True),
])  # fmt: skip
def test_batches_of_many_tensors_are_received_not_waited_for(
    root: Path, waiting: Stack, input_ms: float, worker: Stack, title: str, sure: bool
) -> None:
    """The worker's threads hand over each tensor; a few must be received in any case.

    While it makes batches, they have no interpreter lock to answer with: that is waited for.
    """
    stacks: Stacks = {"dataloader": (SCRIPT, MAIN, GET_DATA, *waiting)}
    write_sampled(root, lambda *_: (input_ms, *BALANCED[1:]), stacks, steps=120)
    samples = [(START_NS + 20_000_000 * (i + 10), worker or (MAIN,)) for i in range(60)]
    write_stacks(RunPaths(root).rank(0).worker_stacks(0), samples, worker=0, pid=9,
                 waits=[not worker] * 60, other=(FEED,))  # fmt: skip
    found = find(judged(root), "dataloader_bound")
    assert title in found.title
    assert (found.severity != "info") == sure
    assert ("collate_fn" in found.remedy) == ("receives" in title)


@pytest.mark.parametrize("lost", [0, 1])
def test_rank_that_was_killed_before_its_samples_were_written_is_as_the_others(
    root: Path, lost: int
) -> None:
    """Both sleep in the loop: that is neither one rank's doing, nor the other one's lateness."""
    asleep: Stacks = {"other": (SCRIPT, job(45, "main"), job(61, "wait_for_quota"))}
    write_sampled(root, lambda rank, _: (0.2, 5.0, 10.0 + rank, 2.0), asleep, ranks=2, gap_ms=20,
                  collectives_ms=(9.0, 9.5))  # fmt: skip
    whole = judged(root)
    RunPaths(root).rank(lost).stacks.unlink()
    verdict = judged(root)
    first = verdict.findings[0]
    assert "wait_for_quota" in first.title
    assert "alone" not in first.title
    gains = [ledger_of(each).accounts[0].gain_ns for each in (whole, verdict)]
    assert gains[1] == pytest.approx(gains[0], rel=0.1)


@pytest.mark.parametrize(
    ("late_s", "process_s", "looked_s", "said"),
    [
        (4, 0, None, "see what its code does before that call"),
        (4, 3, None, "the process had begun 3.00 s after theirs"),
        (4, 0, 2, "meanwhile at data.py:12 in load"),
        (4, 0, 60, "see what its code does before that call"),  # it had come by then
        (0.1, 0, None, None),
    ],
)
def test_rank_that_comes_late_to_the_others_is_noted_with_where_it_was(
    tmp_path: Path, late_s: float, process_s: int, looked_s: int | None, said: str | None
) -> None:
    write_story(tmp_path / "run", lambda rank, step: BALANCED, ranks=3)
    run, mono_ns = RunPaths(tmp_path / "run"), CLOCK.mono_ns
    clock = {"wall_ns": CLOCK.wall_ns + 9 * NS_PER_S, "mono_ns": mono_ns + 9 * NS_PER_S}
    for rank in range(3):
        begin_ns = mono_ns + int((late_s if rank == 1 else 0) * NS_PER_S)
        end_ns = mono_ns + int((late_s + 0.01) * NS_PER_S)
        note(run.root, rank, type="process_group", start_ns=begin_ns, end_ns=end_ns)
        report(run.root, rank, start_ticks=100 * process_s * (rank == 1), clock=clock)
    if looked_s is not None:
        folder = run.snapshots / "20260101-000000"
        folder.mkdir(parents=True)
        wall_ns = mono_ns + looked_s * NS_PER_S + CLOCK.wall_ns - CLOCK.mono_ns
        ranks = [{"rank": 1, "stack": [["/me/data.py", 12, "load"]]}]
        (folder / "snapshot.json").write_text(json.dumps({"wall_ns": wall_ns, "ranks": ranks}))
    late = [line for line in judged(run.root).notes if "init_process_group" in line]
    if said is None:
        assert not late
    else:
        who = "rank 1 came 4.00 s late to init_process_group: ranks 0 and 2 waited for it"
        assert (late[0].startswith(who), said in late[0]) == (True, True)
