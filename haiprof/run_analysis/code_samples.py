"""The sampled stacks of a run: each sample in its phase and step, all stacks in one tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from haiprof.base.code_places import is_library
from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Floats, Ints
from haiprof.run_analysis.nesting import Bools, Spans
from haiprof.run_analysis.run_files import Frame, SampledProcess, read_stack_file
from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_analysis.steps import EVAL_LOADER_PHASE, EVAL_PHASE, PHASES, Segmentation
from haiprof.run_format import schema

TRAINING_PHASES = (*PHASES, "other", "checkpoint", "evaluation", "between_steps")
"""Where a sample of the training thread falls: `other` is in a step, outside the four phases."""
WORKER_PHASES = ("worker", "worker_waiting")
"""What a DataLoader worker does: it loads, or it waits for requests and hands batches over."""
CODE_PHASES = (*TRAINING_PHASES, *WORKER_PHASES, "other_threads")
"""And what other Python threads of the training process did while they used a core."""
OTHER, CHECKPOINT, EVALUATION, BETWEEN = range(len(PHASES), len(TRAINING_PHASES))
WORKER, WORKER_WAITING, OTHER_THREADS = range(len(TRAINING_PHASES), len(CODE_PHASES))
SLOW_RATIO = 1.5
"""A slow step takes so many times the rank's median step."""
_AROUND_NS = 5_000_000_000
_COLUMNS = (
    "rank", "worker", "time_ns", "late_ns", "lock_wait", "cpu_ns", "queue_ns", "wait", "step",
    "slow", "phase", "stack", "weight_ns",
)  # fmt: skip
_FETCH_FILE = "/torch/utils/data/_utils/fetch.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTree:
    """Stacks of all processes: a stack is its caller's and one frame."""

    frames: Sequence[Frame]
    library: Bools
    """Per frame: whether it is of a library."""
    parent: Ints
    """Per stack; stack 0 has no frames and is its own parent. Callers come before the called."""
    place: Ints
    """Per stack: its frame; -1 for stack 0."""

    def line_places(self) -> Ints:
        """Per stack: the first frame of its line, whatever the expression; -1 for stack 0."""
        first: dict[tuple[str, int, str], int] = {}
        lines = [first.setdefault(frame[:3], at) for at, frame in enumerate(self.frames)]
        return np.array([*lines, -1])[self.place]

    def within(self, file: str | tuple[str, ...]) -> Bools:
        """Per stack: whether a frame of a file whose path ends so is in it."""
        return self.holds(np.array([*(frame.file.endswith(file) for frame in self.frames), False]))

    def holds(self, frames: Bools) -> Bools:
        """Per stack: whether one of these frames is in it; the last stands for no frame."""
        found: Bools = frames[self.place]
        outwards = self.parent
        while outwards.any():
            found = found | frames[self.place[outwards]]
            outwards = self.parent[outwards]
        return found

    def calls_libraries(self, frames: Bools) -> Bools:
        """Per stack: whether it is in one of these frames, or in what libraries do below it."""
        found, library = frames[self.place], np.append(self.library, False)
        inside, outwards = library[self.place], self.parent
        while (inside & (outwards > 0)).any():
            found = found | (inside & frames[self.place[outwards]])
            inside = inside & library[self.place[outwards]]
            outwards = self.parent[outwards]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSamples:
    """One row per sample."""

    tree: CodeTree
    rank: Ints
    worker: Ints
    """Number of the DataLoader worker; -1 for the training thread."""
    time_ns: Ints
    """Unix time."""
    late_ns: Ints
    """How long it came after its time."""
    lock_wait: Ints
    """How the training thread stood to the interpreter lock, as LOCK_HELD and the others say."""
    cpu_ns: Ints
    """CPU time of the thread since the sample before; -1 where it is not known."""
    queue_ns: Ints
    """How long it waited for a core since that was last known; -1 where nobody asked."""
    wait: Ints
    """What it waited for: an index into WAITS of stack_lines.py; -1 where it is not known."""
    step: Ints
    """-1 outside steps, and for workers."""
    slow: Bools
    """Whether that step is a slow one of its rank."""
    phase: Ints
    """Index into CODE_PHASES."""
    stack: Ints
    weight_ns: Floats
    """The time that a sample stands for: that of its rank, phase and kind of step, shared evenly.

    Spans tell how long a phase took; samples only tell what it was. So a phase in which the
    interpreter lock was seldom free, and samples are few, keeps its whole time.
    """
    notes: tuple[str, ...]
    """What was damaged or left out."""

    def take(self, rows: Bools) -> CodeSamples:
        """The chosen samples, with the same tree."""
        chosen = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return CodeSamples(tree=self.tree, notes=self.notes, **chosen)


def load_code_samples(ranks: Iterable[RankSegments]) -> CodeSamples:
    """Reads the samples of ranks and of their workers."""
    grower = _TreeGrower()
    rows: list[tuple[np.ndarray, ...]] = []
    notes: list[str] = []
    for rank in ranks:
        for process in _processes(rank, notes):
            numbers = grower.add(process)
            stack = numbers[process.stack]
            placed = (
                _locate_in_training(rank.found, rank.events, process.time_ns)
                if process.worker is None
                else _place_worker(grower, stack)
            )
            rows.append(_columns(rank, process, stack, placed))
            rows.append(_other_columns(rank, process, numbers[process.other_stack]))
            if process.unknown_count:
                notes.append(
                    f"rank {rank.files.rank}: the stacks of {process.unknown_count} samples are "
                    "not known"
                )
    columns = [np.concatenate(parts) for parts in zip(*rows, strict=True)] or [_NONE] * len(
        _COLUMNS
    )
    chosen = dict(zip(_COLUMNS, columns, strict=True))
    chosen["slow"] = chosen["slow"].astype(np.bool_)
    return CodeSamples(tree=grower.tree(), notes=tuple(notes), **chosen)


def _processes(rank: RankSegments, notes: list[str]) -> Iterable[SampledProcess]:
    """The training process and the workers of one rank; what is damaged is noted."""
    for path in (rank.files.paths.stacks, *rank.files.paths.worker_stack_files()):
        try:
            processes, damaged = read_stack_file(path)
        except RunFormatError as error:
            notes.append(str(error))
            continue
        notes += damaged
        yield from processes


def _columns(
    rank: RankSegments, process: SampledProcess, stack: Ints, placed: tuple[Ints, Ints]
) -> tuple[np.ndarray, ...]:
    phase, step = placed
    count = len(stack)
    slow_steps = slow_of(rank.found)
    slow = (step >= 0) & np.append(slow_steps, False)[step]
    weight = spacing_ns(process.time_ns, process.time_ns)
    if process.worker is None:
        weight = _training_weights(rank, phase, slow, weight)
    return (
        np.full(count, rank.files.rank),
        np.full(count, -1 if process.worker is None else process.worker),
        process.time_ns + rank.wall_offset_ns,
        process.late_ns,
        process.lock_wait,
        process.cpu_ns,
        process.queue_ns,
        process.wait,
        step,
        slow,
        phase,
        stack,
        weight,
    )


def _other_columns(
    rank: RankSegments, process: SampledProcess, stack: Ints
) -> tuple[np.ndarray, ...]:
    """Other threads: a look stands for the CPU time used since the one before."""
    count = len(stack)
    return (
        np.full(count, rank.files.rank),
        np.full(count, -1 if process.worker is None else process.worker),
        process.other_time_ns + rank.wall_offset_ns,
        np.zeros(count, dtype=np.int64),
        *(np.full(count, -1) for _ in ("lock_wait", "cpu_ns", "queue_ns", "wait", "step")),
        np.zeros(count, dtype=np.bool_),
        np.full(count, OTHER_THREADS),
        stack,
        process.other_cores * process.other_since_ns,
    )


def slow_of(found: Segmentation) -> Bools:
    """Per step: whether it is slow."""
    step_ns = found.steps.step_ns
    slow: Bools = step_ns > SLOW_RATIO * np.median(step_ns) if len(step_ns) else step_ns > 0
    return slow


def _locate_in_training(found: Segmentation, events: Spans, time_ns: Ints) -> tuple[Ints, Ints]:
    """Phase and step of each moment of the training thread."""
    steps = found.steps
    step = _inside(steps.start_ns, steps.end_ns, time_ns)
    phase = np.where(step >= 0, OTHER, BETWEEN)
    row = _innermost(found, time_ns)
    known = np.append(found.phase.astype(np.int64), -1)[row]
    phase = np.where((known >= 0) & (known < len(PHASES)), known, phase)
    evaluated = _inside(found.evaluation_start_ns, found.evaluation_end_ns, time_ns) >= 0
    evaluated |= (known == EVAL_PHASE) | (known == EVAL_LOADER_PHASE)
    saves = events.take(events.kind == schema.SAVE)
    order = np.argsort(saves.start_ns, kind="stable")
    saved = _inside(saves.start_ns[order], saves.end_ns[order], time_ns) >= 0
    phase = np.where(evaluated, EVALUATION, np.where(saved, CHECKPOINT, phase))
    return phase, np.where(evaluated, -1, step)


def _inside(start: Ints, end: Ints, time_ns: Ints) -> Ints:
    """Which of some intervals, sorted and apart, holds each moment; -1 where none does."""
    place = np.searchsorted(start, time_ns, side="right") - 1
    return np.where((place >= 0) & (time_ns < np.append(end, 0)[place]), place, -1)


def _innermost(found: Segmentation, time_ns: Ints) -> Ints:
    """Row of the innermost span around each moment; -1 where there is none."""
    spans, parent = found.nested.spans, np.append(found.nested.parent, -1)
    end = np.append(spans.end_ns, np.iinfo(np.int64).max)
    row = np.searchsorted(spans.start_ns, time_ns, side="right") - 1
    over = end[row] <= time_ns
    while over.any():
        row = np.where(over, parent[row], row)
        over = end[row] <= time_ns
    return row


def _place_worker(grower: _TreeGrower, stack: Ints) -> tuple[Ints, Ints]:
    """Loading is what happens below the loader's own fetch."""
    loads = grower.below(_FETCH_FILE)
    return np.where(loads[stack], WORKER, WORKER_WAITING), np.full(len(stack), -1)


def _training_weights(rank: RankSegments, phase: Ints, slow: Bools, spacing: Floats) -> Floats:
    """Nanoseconds per sample: the time of each phase in slow and in usual steps, shared among them.

    A run is sampled less often later: a sample counts as much as the time to the ones beside it.
    """
    weight = np.zeros(len(phase))
    for number, by_slow in enumerate(phase_times(rank)):
        for is_slow, total_ns in enumerate(by_slow):
            rows = (phase == number) & (slow == bool(is_slow))
            if rows.any():
                weight[rows] = total_ns * spacing[rows] / spacing[rows].sum()
    return weight


def spacing_ns(sampled_ns: Ints, at_ns: Ints) -> Floats:
    """The usual time between two samples around each moment."""
    if len(sampled_ns) < 2:
        return np.ones(len(at_ns))
    low = np.clip(at_ns - _AROUND_NS, sampled_ns[0], sampled_ns[-1])
    high = np.clip(at_ns + _AROUND_NS, sampled_ns[0], sampled_ns[-1])
    first, last = (np.searchsorted(sampled_ns, edge) for edge in (low, high))
    spacing: Floats = np.maximum(high - low, 1) / np.maximum(last - first, 1)
    return spacing


def phase_times(rank: RankSegments) -> Floats:
    """[phase of TRAINING_PHASES, slow step or not]: how long the rank was in it, in ns."""
    steps, slow = rank.found.steps, slow_of(rank.found)
    times = np.zeros((len(TRAINING_PHASES), 2))
    saves = rank.events.take(rank.events.kind == schema.SAVE)
    place = _inside(steps.start_ns, steps.end_ns, saves.start_ns)
    for is_slow in (0, 1):
        chosen = slow == bool(is_slow)
        times[: len(PHASES), is_slow] = steps.host_ns[:, chosen].sum(axis=1)
        inside = (place >= 0) & np.append(chosen, False)[place]
        saved = (saves.end_ns - saves.start_ns)[inside].sum()
        times[CHECKPOINT, is_slow] = saved
        times[OTHER, is_slow] = max(int(steps.other_ns[chosen].sum()) - saved, 0)
    found = rank.found
    times[EVALUATION, 0] = (found.evaluation_end_ns - found.evaluation_start_ns).sum()
    return times


class _TreeGrower:
    """Puts the stacks of many processes into one tree."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._library: list[bool] = []
        self._stacks: dict[tuple[int, int], int] = {}
        self._parent, self._place = [0], [-1]

    def add(self, process: SampledProcess) -> Ints:
        """The number in this tree of each stack of a process."""
        numbers = np.zeros(len(process.parents) + 1, dtype=np.int64)
        frames = [self._frame(frame, process.libraries) for frame in process.frames]
        for own, (parent, place) in enumerate(
            zip(process.parents, process.places, strict=True), start=1
        ):
            key = (int(numbers[parent]), frames[place])
            number = self._stacks.setdefault(key, len(self._parent))
            if number == len(self._parent):
                self._parent.append(key[0])
                self._place.append(key[1])
            numbers[own] = number
        return numbers

    def below(self, file_end: str) -> Bools:
        """Per stack: whether one of its frames is in such a file."""
        frames = [frame.file.endswith(file_end) for frame in self._frames]
        found = [False]
        for parent, place in zip(self._parent[1:], self._place[1:], strict=True):
            found.append(found[parent] or frames[place])
        return np.array(found)

    def tree(self) -> CodeTree:
        """All of it."""
        return CodeTree(
            frames=list(self._frames),
            library=np.array(self._library, dtype=np.bool_),
            parent=np.array(self._parent),
            place=np.array(self._place),
        )

    def _frame(self, frame: Frame, libraries: tuple[str, ...]) -> int:
        number = self._frames.setdefault(frame, len(self._frames))
        if number == len(self._library):
            library = is_library(frame.file, frame.function, libraries=libraries)
            self._library.append(library)
        return number


_NONE = np.zeros(0, dtype=np.int64)
