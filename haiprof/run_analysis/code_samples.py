"""The sampled stacks of a run: read into one tree, each sample in its phase and step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from haiprof.base.code_places import is_library
from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Bools, Floats, Ints, total, union
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis import step_positions
from haiprof.run_analysis.folded_steps import phase_sums
from haiprof.run_analysis.nesting import take_rows
from haiprof.run_analysis.run_files import entries, integer, mapping, note_damage, text
from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_analysis.steps import EVAL_LOADER_PHASE, EVAL_PHASE, PHASES, SPAN_PHASES
from haiprof.run_format import schema, stack_lines
from haiprof.run_format.folded import read_of_one_folding
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.reader import read_lines

TRAINING_PHASES = (*PHASES, "other", "checkpoint", "evaluation", "between_steps")
"""Where a sample of the training thread falls: `other` is in a step, outside the four phases."""
WORKER_PHASES = ("worker", "worker_waiting")
"""What a DataLoader worker does: it loads, or it waits for requests and hands batches over."""
CODE_PHASES = (*TRAINING_PHASES, *WORKER_PHASES, "other_threads")
"""And what other Python threads of the training process did while they used a core."""
DATALOADER = PHASES.index("dataloader")
OTHER, CHECKPOINT, EVALUATION, BETWEEN = range(len(PHASES), len(TRAINING_PHASES))
WORKER, WORKER_WAITING, OTHER_THREADS = range(len(TRAINING_PHASES), len(CODE_PHASES))
SLOW_RATIO = 1.5  # a slow step takes so many times the rank's median step
_OF_SPAN = np.full(len(SPAN_PHASES) + 1, BETWEEN)
_OF_SPAN[: len(PHASES)] = range(len(PHASES))
_OF_SPAN[[EVAL_PHASE, EVAL_LOADER_PHASE]] = EVALUATION
"""By index into SPAN_PHASES, outside of all steps; the last for no span."""
_AROUND_NS = 5_000_000_000
_NS_PER_US = 1000
_TIME_LIMIT_NS = 1 << 62
_STACK_LIMIT = 1 << 16  # stacks of one process that are read; a rank writes an eighth of that
_PER_SAMPLE = ("time_ns", "stack", "lock_wait", "cpu_ns", "queue_ns", "wait", "weight_ns")
_OF_FOLDED = ("position", "around", "hidden")
_COLUMNS: Mapping[str, Any] = {
    **dict.fromkeys(("time_ns", "cpu_ns", "queue_ns"), np.int64), "weight_ns": np.float64,
    **dict.fromkeys(("rank", "worker", "stack", "step"), np.int32),
    **dict.fromkeys(("lock_wait", "wait", "phase", *_OF_FOLDED), np.int8),
}  # fmt: skip
"""Small numbers are stored small: samples are many."""
_CHECKPOINT_POSITION = POSITIONS.index("checkpoint")
FETCH_FILE = "/torch/utils/data/_utils/fetch.py"  # what takes the samples of a batch from a dataset


class Frame(NamedTuple):
    """One line of code that was running."""

    file: str
    line: int
    function: str
    expression: str = ""
    """What of that line was running, in the user's own code; empty where it is not known."""
    statement: int = 0  # which one of its line, where several are on it
    loop: int = 0  # the line of the loop around it in its function; 0: none is known
    loop_kind: int = 0  # whether that is INDEPENDENT, a RECURRENCE or over LAYERS, and NO_GRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTree:
    """Stacks of all processes: a stack is its caller's and one frame."""

    frames: Sequence[Frame]
    library: Bools  # per frame: whether it is of a library
    parent: Ints
    """Per stack; stack 0 has no frames and is its own parent. Callers come before the called."""
    place: Ints  # per stack: its frame; -1 for stack 0

    def line_places(self) -> Ints:
        """Per stack: the first frame of its line, whatever the expression; -1 for stack 0."""
        first: dict[tuple[str, int, str], int] = {}
        lines = [first.setdefault(frame[:3], at) for at, frame in enumerate(self.frames)]
        return np.array([*lines, -1])[self.place]

    def frame_places(self, stack: int) -> list[int]:
        """Frames of a stack, the outermost first."""
        return [int(self.place[at]) for at in self.outwards(stack)][::-1]

    def outwards(self, stack: int) -> Iterator[int]:
        """A stack and its callers, the nearest first."""
        while stack:
            yield stack
            stack = int(self.parent[stack])

    def within(self, file: str | tuple[str, ...]) -> Bools:
        """Per stack: whether a frame of a file whose path ends so is in it."""
        return self.holds(np.array([*(frame.file.endswith(file) for frame in self.frames), False]))

    def runs(self, codes: Collection[tuple[str, str]]) -> Bools:
        """Per stack: whether a function of a file is in it, or, where that is empty, any of it."""
        return self.holds(np.array([*(
            any(frame.file.endswith(file) and name in ("", frame.function) for file, name in codes)
            for frame in self.frames
        ), False]))  # fmt: skip

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


class StackTree:
    """A tree that grows while stacks are read."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._library: list[bool] = []
        self._stacks: dict[tuple[int, int], int] = {}
        self._parent, self._place = [0], [-1]

    def frame(self, frame: Frame, libraries: Sequence[str]) -> int:
        """Its number; `libraries` are the folders of installed code of its process."""
        number = self._frames.setdefault(frame, len(self._frames))
        if number == len(self._library):
            self._library.append(is_library(frame.file, frame.function, libraries=libraries))
        return number

    def stack(self, parent: int, frame: int) -> int:
        """The number of a frame below a stack."""
        number = self._stacks.setdefault((parent, frame), len(self._parent))
        if number == len(self._parent):
            self._parent.append(parent)
            self._place.append(frame)
        return number

    def whole(self) -> CodeTree:
        """All of it."""
        return CodeTree(
            frames=list(self._frames), library=np.array(self._library, dtype=np.bool_),
            parent=np.array(self._parent), place=np.array(self._place),
        )  # fmt: skip


@dataclass(slots=True)
class SampledProcess:
    """What was sampled of one process, with stacks as the tree numbers them."""

    pid: int
    worker: int | None  # number of the DataLoader worker; None for the training process
    libraries: tuple[str, ...]  # folders of installed code
    _frames: dict[int, int] = field(default_factory=dict)
    _stacks: dict[int, int] = field(default_factory=lambda: {0: 0})
    """By the file's number: that of the tree."""
    _parts: list[tuple[Ints, ...]] = field(default_factory=list)
    """Columns of _PER_SAMPLE, of each line; only folded ones know the time that they stand for."""
    _others: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, line: Mapping[str, Any], tree: StackTree) -> None:
        """Takes in one line of samples; what does not fit in it is passed over."""
        for number, frame in _number_entries(line, "frames", "first_frame"):
            if len(frame) >= 3:
                file, at, name = text(frame[0]), integer(frame[1]), text(frame[2])
                expression = "".join(text(part) or "" for part in frame[4:5])
                if file is not None and at is not None and name is not None:
                    numbers = [integer(part) or 0 for part in frame[5:8]]
                    known = Frame(file, at, name, expression, *numbers)
                    self._frames[number] = tree.frame(known, self.libraries)
        for number, entry in _number_entries(line, "stacks", "first_stack"):
            parent, place = (*(integer(value) for value in entry[:2]), None, None)[:2]
            if parent in self._stacks and place in self._frames and (parent or 0) < number:
                above, frame_number = self._stacks[parent or 0], self._frames[place or 0]
                self._stacks[number] = tree.stack(above, frame_number)
        begin = integer(line.get("time_ns"))
        offset, stack = (_integers(line.get(name)) for name in ("offset_us", "stack"))
        count = len(stack)
        if begin is None or not 0 <= begin < _TIME_LIMIT_NS or len(offset) != count:
            return
        self._parts.append((
            begin + offset * _NS_PER_US, stack,
            _letters(line.get("lock_wait"), stack_lines.LOCK_STATES, count),
            _times_ns(line.get("run_us"), count), _times_ns(line.get("queue_us"), count),
            _letters(line.get("wait"), stack_lines.WAIT_LETTERS, count),
            _times_ns(line.get("weight_us"), count),
        ))  # fmt: skip
        for entry in entries(line.get("others")):
            values = _integers(entry).tolist()
            if len(values) == 5:
                at_ns, since_ns = begin + values[0] * _NS_PER_US, values[4] * _NS_PER_US
                self._others.append((at_ns, values[2], values[3], since_ns))

    def samples(self, *, as_stored: bool = False) -> tuple[dict[str, np.ndarray], int]:
        """Columns of _PER_SAMPLE, and of how many samples the stack is not known.

        `time_ns` is on the clock of the spans; `stack` is 0 where no Python code ran, too. With
        `as_stored` stacks have the numbers of the process. A sample stands for the time to the ones
        beside it where none is stored.
        """
        none = (np.zeros(0, dtype=np.int64),) * len(_PER_SAMPLE)
        joined = map(np.concatenate, zip(none, *self._parts, strict=True))
        columns: dict[str, np.ndarray] = dict(zip(_PER_SAMPLE, joined, strict=True))
        time_ns, stored = columns["time_ns"], columns["weight_ns"]
        spacing = spacing_ns(time_ns, time_ns) if (stored < 0).any() else stored
        columns["weight_ns"] = np.where(stored < 0, spacing, stored).astype(np.float64)
        if as_stored:
            return columns, 0
        stack = columns["stack"]
        columns["stack"] = self.number(stack)
        return columns, int(((columns["stack"] == 0) & (stack != 0)).sum())

    def others(self) -> tuple[Ints, Ints, Floats]:
        """Looks at other Python threads that were busy: time, stack, CPU time since the one before.

        On the clock of the spans, in ns.
        """
        time_ns, stack, thousandths, since_ns = (
            np.array(self._others, dtype=np.int64).reshape(-1, 4).T
        )
        return time_ns, self.number(stack), thousandths / 1000 * since_ns

    def number(self, stack: Ints) -> Ints:
        """Stacks as the tree numbers them; 0 for those that are not known."""
        table = np.zeros(max(self._stacks) + 1, dtype=np.int64)
        table[list(self._stacks)] = list(self._stacks.values())
        known = (stack >= 0) & (stack < len(table))
        return np.where(known, table[np.where(known, stack, 0)], 0)


def read_stack_file(
    path: Path, tree: StackTree, before: Sequence[Mapping[str, Any]] = (), first: int = 0
) -> tuple[list[SampledProcess], tuple[str, ...]]:
    """The processes of one file, in order; and what was damaged. `tree` takes their stacks.

    Lines `before` stand for what was folded; the file goes on at `first`.
    """
    lines, notes = read_lines(path, first=first)
    return sampled_processes((*before, *lines), tree), notes


def sampled_processes(lines: Iterable[Mapping[str, Any]], tree: StackTree) -> list[SampledProcess]:
    """The processes of these lines, in order."""
    found: dict[int, SampledProcess] = {}
    for line in lines:
        pid = integer(line.get("pid"))
        if pid is None:
            continue
        kind, header = line.get("type"), (stack_lines.HEADER, stack_lines.STACKS_VERSION)
        if (kind, line.get("version")) == header:
            named = map(text, entries(line.get("libraries")))
            worker = integer(line.get("worker"))
            found[pid] = SampledProcess(pid, worker, tuple(name for name in named if name))
        elif kind == stack_lines.SAMPLES and pid in found:
            found[pid].add(line, tree)
    return list(found.values())


FoldedWorkers = Mapping[int, tuple[int, Sequence[Mapping[str, Any]]]]
"""By worker: where its file goes on, and what stands for its beginning; see FOLDED_WORKERS."""


def read_folded_workers(path: Path) -> FoldedWorkers:
    """Reads workers-folded.jsonl: nothing where there is none; an error where it is damaged."""
    lines, notes = read_lines(path)
    if not lines and not notes:
        return {}
    known = mapping(lines[0].get("first_bytes")) if lines else {}
    places = {integer(int(n)): integer(at) for n, at in known.items() if n.isdecimal()}
    found = {
        n: (at, list[Mapping[str, Any]]())
        for n, at in places.items()
        if n is not None and at is not None
    }
    if notes or not lines or lines[0].get("type") != stack_lines.FOLDED_WORKERS or not found:
        raise RunFormatError(f"{path}: damaged: old samples of workers are not known")
    worker_of: dict[object, int | None] = {}
    for line in lines[1:]:
        if line.get("type") == stack_lines.HEADER:
            worker_of[line.get("pid")] = integer(line.get("worker"))
        worker = worker_of.get(line.get("pid"))
        if worker in found:
            found[worker][1].append(line)
    return found


def _read_workers(paths: RankPaths, tree: StackTree) -> tuple[list[SampledProcess], list[str]]:
    """The workers of a rank, and what was damaged."""
    found, notes = list[SampledProcess](), list[str]()
    older: FoldedWorkers = {}
    with note_damage(notes):
        older = read_folded_workers(paths.old_worker_stacks)
    for number, path in paths.worker_stack_files().items():
        first, before = older.get(number, (0, ()))
        with note_damage(notes):
            processes, damaged = read_stack_file(path, tree, before, first)
            found += processes
            notes += damaged
    return found, notes


def _letters(value: object, known: str, count: int) -> Ints:
    """One number per sample of a line: the place of its letter; -1 for the last, and for others."""
    letters = text(value) or ""
    if len(letters) != count:
        return np.full(count, -1, dtype=np.int64)
    return np.array([known.find(letter, 0, -1) for letter in letters], dtype=np.int64)


def _times_ns(value: object, count: int) -> Ints:
    """One per sample of a line; -1 where it is not known."""
    times = _integers(value)
    if len(times) != count:
        return np.full(count, -1)
    return np.where(times < 0, -1, times * _NS_PER_US)


def _number_entries(
    line: Mapping[str, Any], name: str, first: str
) -> Iterator[tuple[int, list[Any]]]:
    """The entries of a list that counts on from a number."""
    number = integer(line.get(first))
    if number is None or not 0 <= number <= _STACK_LIMIT:
        return
    own = entries(line.get(name))
    for place, entry in enumerate(own[: _STACK_LIMIT - number], start=number):
        if isinstance(entry, list):
            yield place, entry


def _integers(values: object) -> Ints:
    if not isinstance(values, list) or not all(type(v) is int and abs(v) < 1 << 50 for v in values):
        return np.zeros(0, dtype=np.int64)
    return np.array(values, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSamples:
    """One row per sample."""

    tree: CodeTree
    rank: Ints
    worker: Ints  # number of the DataLoader worker; -1 for the training thread
    time_ns: Ints  # Unix time
    lock_wait: Ints
    """How the training thread stood to the interpreter lock, as LOCK_HELD and the others say."""
    cpu_ns: Ints  # CPU time of the thread since the sample before; -1 where it is not known
    queue_ns: Ints  # how long it waited for a core since that was last known; -1 where nobody asked
    wait: Ints
    """What it waited for: an index into WAITS of stack_lines.py; -1 where it is not known."""
    step: Ints  # -1 outside steps, and for workers
    phase: Ints  # index into CODE_PHASES
    position: Ints  # index into POSITIONS, of folded samples: spans tell it of the others; -1 there
    around: Bools  # whether a folded one was in an optimizer, outside of its closure's spans
    hidden: Bools  # whether a folded one was taken while its device had work queued
    stack: Ints
    weight_ns: Floats
    """The time that a sample stands for: that of its rank, phase and kind of step, shared evenly.

    Spans tell how long a phase took; samples only tell what it was. So a phase in which the
    interpreter lock was seldom free, and samples are few, keeps its whole time.
    """
    notes: tuple[str, ...]  # what was damaged or left out

    def take(self, rows: Bools) -> CodeSamples:
        """The chosen samples, with the same tree."""
        return take_rows(self, rows)


def load_code_samples(ranks: Iterable[RankSegments]) -> CodeSamples:
    """Reads the samples of ranks and of their workers."""
    tree, notes, unknown_notes = StackTree(), list[str](), list[str]()
    rows = [{name: np.zeros(0, dtype=kind) for name, kind in _COLUMNS.items()}]
    for rank in ranks:  # one by one: what is read of a file takes much more than its columns
        folded, paths, processes = rank.folded, rank.files.paths, list[SampledProcess]()
        with note_damage(notes):
            processes, damaged = read_stack_file(
                paths.stacks, tree, folded.file.stack_lines, folded.fact("first_stack_byte")
            )
            notes += damaged
        workers, damage = read_of_one_folding(
            paths.old_worker_stacks, partial(_read_workers, paths, tree)
        )
        notes += damage
        for process in (*processes, *workers):
            columns, unknown_count = process.samples()
            if unknown_count:
                unknown_notes.append(
                    f"rank {rank.files.rank}: the stacks of {unknown_count} samples are not known"
                )
            parts: list[dict[str, Any]] = [columns]
            if process.worker is None:
                phase, step = locate(rank, columns["time_ns"])
                weight_ns = _share_times(rank, phase, step, columns["weight_ns"])
                step = np.where(step < 0, -1, step + rank.first_step)
                columns |= {"phase": phase, "step": step, "weight_ns": weight_ns}
                parts = [_folded_samples(rank, process), *parts] if rank.first_step else parts
            time_ns, stack, cpu_ns = process.others()
            others = {"time_ns": time_ns, "stack": stack, "weight_ns": cpu_ns}
            worker = {} if process.worker is None else {"worker": process.worker, "phase": WORKER}
            for part in (*parts, others | {"phase": OTHER_THREADS}):
                own: dict[str, Any] = worker | {"rank": rank.files.rank} | part
                own |= {"time_ns": part["time_ns"] + rank.wall_offset_ns}
                rows.append({name: np.broadcast_to(own.get(name, -1), len(own["stack"])).astype(of)
                             for name, of in _COLUMNS.items()})  # fmt: skip
    joined = {name: np.concatenate([part.pop(name) for part in rows]) for name in _COLUMNS}
    joined |= {name: joined[name] > 0 for name in _OF_FOLDED[1:]}
    # Of workers, loading is what happens below the loader's own fetch.
    loads, code = np.flatnonzero(joined["phase"] == WORKER), tree.whole()
    waits = ~code.within(FETCH_FILE)[joined["stack"][loads]]
    joined["phase"][loads[waits]] = WORKER_WAITING
    return CodeSamples(tree=code, notes=(*notes, *unknown_notes), **joined)


def _folded_samples(rank: RankSegments, process: SampledProcess) -> dict[str, np.ndarray]:
    """Samples of a rank that were folded, with their places in steps as they were known then."""
    # Each stands for its share of the time of its phase in all folded steps, and in those that are
    # whole but for their samples.
    folded, found = rank.folded, rank.folded.samples()
    spacing = spacing_ns(found["time_ns"], found["time_ns"])
    times = np.zeros(len(TRAINING_PHASES))
    times[: len(PHASES)] = phase_sums(folded).sum(axis=1)
    whole = int(folded.blocks["step_ns"].sum())
    saved = folded.plain_ns[_CHECKPOINT_POSITION] + folded.collected_ns[_CHECKPOINT_POSITION]
    times[CHECKPOINT] = saved.sum()
    times[OTHER] = max(whole - times[: len(PHASES)].sum() - times[CHECKPOINT], 0)
    times[EVALUATION] = total(folded.evaluations)
    later = found["step"] >= folded.step_count  # of steps that are whole: the same per sample
    phase = found["phase"]
    sampled = np.bincount(phase[~later], spacing[~later], len(TRAINING_PHASES))
    weight = np.where(later, spacing, times[phase] * spacing / np.maximum(sampled, 1.0)[phase])
    weight[found["step"] < 0] = spacing[found["step"] < 0]
    return found | {"stack": process.number(found["stack"]), "weight_ns": weight}


def locate(rank: RankSegments, time_ns: Ints) -> tuple[Ints, Ints]:
    """Phase and step of each moment of the training thread; -1 outside of steps."""
    found, saves = rank.found, rank.events.take(rank.events.kind == schema.SAVE)
    step = step_positions.place_in(found.steps.start_ns, found.steps.end_ns, time_ns)
    phase = _OF_SPAN[step_positions.innermost_phase(found, time_ns)]
    evaluated = step_positions.is_inside(*found.evaluations, time_ns)
    evaluated |= phase == EVALUATION
    phase = np.where((phase == BETWEEN) & (step >= 0), OTHER, phase)
    phase = np.where(step_positions.is_inside(*union(*saves.times), time_ns), CHECKPOINT, phase)
    return np.where(evaluated, EVALUATION, phase), np.where(evaluated, -1, step)


def _share_times(rank: RankSegments, phase: Ints, step: Ints, spacing: Floats) -> Floats:
    """Nanoseconds per sample: each phase's time in slow and in usual steps, shared among them."""
    # A run is sampled less often later: a sample counts as much as the time to the ones beside it.
    found, steps = rank.found, rank.found.steps
    usual_ns = np.median(steps.step_ns) if len(steps.step_ns) else 0.0
    slow = np.append(steps.step_ns > SLOW_RATIO * usual_ns, False)  # the last one: in no step
    saves = rank.events.take(rank.events.kind == schema.SAVE)
    of_save = step_positions.place_in(steps.start_ns, steps.end_ns, saves.start_ns)
    saved_ns = saves.end_ns - saves.start_ns
    shared = np.zeros(len(phase))
    for is_slow in (False, True):
        chosen, rows = slow[:-1] == is_slow, slow[step] == is_slow
        times = np.zeros(len(TRAINING_PHASES))
        times[: len(PHASES)] = steps.host_ns[:, chosen].sum(axis=1)
        times[CHECKPOINT] = saved_ns[(of_save >= 0) & (slow[of_save] == is_slow)].sum()
        times[OTHER] = max(steps.other_ns[chosen].sum() - times[CHECKPOINT], 0)
        if not is_slow:
            times[EVALUATION] = total(found.evaluations)
        sampled = np.bincount(phase[rows], spacing[rows], len(TRAINING_PHASES))
        shared[rows] = times[phase[rows]] * spacing[rows] / sampled[phase[rows]]
    return shared


def spacing_ns(sampled_ns: Ints, at_ns: Ints) -> Floats:
    """The usual time between two samples around each moment."""
    if len(sampled_ns) < 2:
        return np.ones(len(at_ns))
    low = np.clip(at_ns - _AROUND_NS, sampled_ns[0], sampled_ns[-1])
    high = np.clip(at_ns + _AROUND_NS, sampled_ns[0], sampled_ns[-1])
    first, last = (np.searchsorted(sampled_ns, edge) for edge in (low, high))
    spacing: Floats = np.maximum(high - low, 1) / np.maximum(last - first, 1)
    return spacing
