"""The time table of a run: rank x step x position x activity x code -> ns, made in one place.

Spans say exactly how long a rank was in each position of a step; samples say what it did there.
A sample stands for its share of its position's time, so that the rows of a rank add up to the time
from its first judged step's begin to its last one's end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.ledger import POSITIONS, TORCH_CALL
from haiprof.run_analysis.code_samples import (
    OTHER_THREADS,
    TRAINING_PHASES,
    WORKER,
    WORKER_WAITING,
    CodeSamples,
    CodeTree,
    Frame,
    spacing_ns,
)
from haiprof.run_analysis.lines import functions_of
from haiprof.run_analysis.nesting import take_rows
from haiprof.run_analysis.step_frame import BusyTimes
from haiprof.run_analysis.step_positions import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INPUT,
    LOSS,
    OPTIMIZER,
    StepPositions,
    is_inside,
    place_in,
)
from haiprof.run_format.stack_lines import LOCK_HELD, LOCK_WAITED_FOR, WAITS

ACTIVITIES = (
    "operators", "python", "native", "wait: loader", "wait: peer", "wait: link", "wait: device",
    "wait: interpreter lock", "wait: lock", "wait: file", "wait: socket", "wait: pipe",
    "wait: sleep", "wait: process", "wait: other", "no core", "page faults",
    "garbage collection", "unknown",
)  # fmt: skip
"""What a training thread did: each row of the table has one."""
(
    OPERATORS, PYTHON, NATIVE, LOADER_WAIT, PEER_WAIT, LINK_WAIT, DEVICE_WAIT, GIL_WAIT, LOCK_WAIT,
    FILE_WAIT, SOCKET_WAIT, PIPE_WAIT, SLEEP, PROCESS_WAIT, OTHER_WAIT, NO_CORE, FAULTS, COLLECTION,
    UNKNOWN,
) = range(len(ACTIVITIES))  # fmt: skip
_COLUMNS: Mapping[str, Any] = {
    **dict.fromkeys(("rank", "stack", "step", "sample"), np.int32),
    **dict.fromkeys(("cell", "position", "activity", "work", "kind"), np.int8),
    **dict.fromkeys(("ns", "count"), np.float64), **dict.fromkeys(("hidden", "needed"), np.bool_),
}  # fmt: skip
"""Small numbers are stored small: rows are many."""
_Rows = dict[str, np.ndarray]
ON_CORE = (OPERATORS, PYTHON, NATIVE)
_WOKEN = (SLEEP, FILE_WAIT, SOCKET_WAIT, PIPE_WAIT, LOCK_WAIT, OTHER_WAIT)
MODEL_POSITIONS = (FORWARD, LOSS, BACKWARD, OPTIMIZER)  # where operators are the model's own
NO_LINE = (NO_CORE, COLLECTION, GIL_WAIT, LINK_WAIT, PEER_WAIT, LOADER_WAIT)
"""What no line of the training thread is the cause of."""
JOB = "job"  # the package of the user's own code
_PACKAGE = re.compile(
    r".*[/\\](?:site|dist)-packages[/\\]([^/\\]+?)(?:\.py)?(?:[/\\]|\Z)", re.DOTALL
)
_TORCH = re.compile(r"[/\\]torch(?:inductor[^/\\]*)?[/\\]|\A<eval_with_key>")
"""Also what torch.compile and torch.fx write: files of Inductor's cache, code without a file."""
_WAITS = (
    ("threading.py", LOCK_WAIT), ("queue.py", LOCK_WAIT), ("synchronize.py", LOCK_WAIT),
    ("multiprocessing/connection.py", PIPE_WAIT), ("selectors.py", SOCKET_WAIT),
    ("socket.py", SOCKET_WAIT), ("ssl.py", SOCKET_WAIT), ("http/client.py", SOCKET_WAIT),
    ("subprocess.py", PROCESS_WAIT), ("popen_fork.py", PROCESS_WAIT),
    ("torch/cuda/streams.py", DEVICE_WAIT),
)  # fmt: skip
"""Modules of Python and torch whose functions wait while they hold no lock."""
_SEEN_IN_CODE = (LOCK_WAIT, PIPE_WAIT, SOCKET_WAIT, PROCESS_WAIT, FILE_WAIT, SLEEP)
"""Of these waits: those that the state of the thread refutes, where it was on a core or ready."""
_WAITING_RATIO = 1 / 3
"""But where so many samples of a stack wait: with cores that others use, half of those in a wait of
3 ms for a peer were ready to run. A commit of sqlite is ten waits for the disk and what the kernel
does between them: half of its samples were off their core, of 0.9 ms where the CPU worked 0.3."""
_OF_CALLS = (FILE_WAIT, SOCKET_WAIT, PIPE_WAIT)
"""Waits that are what a call of native code is for, where so many of its samples are one."""
_WAIT_OF_NAME = {
    "file": FILE_WAIT, "socket": SOCKET_WAIT, "pipe": PIPE_WAIT, "lock": LOCK_WAIT,
    "sleep": SLEEP, "fault": FAULTS, "poll": OTHER_WAIT, "other": OTHER_WAIT,
}  # fmt: skip
_LIBRARY_CALL = re.compile(
    r"\s*(?:await\s+)?(?:np|numpy|scipy|sklearn|cv2|pd|pandas|PIL|Image|json|pickle|re|os|shutil"
    r"|subprocess|socket|sqlite3|hashlib|zlib|gzip|bz2|lzma|zipfile|tarfile|csv|math|time"
    r"|requests|urllib)\."
)
_WAITING_CALLS = (
    (re.compile(r"\s*os\.(?:fsync|fdatasync|sync)\("), FILE_WAIT),
    (re.compile(r"\s*time\.sleep\("), SLEEP),
    (re.compile(r".*\.(?:recv|recv_into|recvfrom|accept|sendall|sendto)\("), SOCKET_WAIT),
)
_DEVICE_READ = re.compile(r"\.(item|cpu|tolist|numpy|nonzero|synchronize)\(")
"""Calls that wait until the device has done what is queued, where there is one (PyTorch, CUDA
semantics, asynchronous execution)."""
MODULE_FILE = "/torch/nn/modules/module.py"
COLLECTIVES_FILE = "/torch/distributed/distributed_c10d.py"
BUFFERS = "DistributedDataParallel._sync_buffers"
_EXCHANGES = (BUFFERS, "ZeroRedundancyOptimizer._sync_params")
"""Functions of torch that exchange tensors outside of distributed_c10d.py, or wait there."""
_WAITS_FOR_HANDLE = re.compile(r"\.wait\([^()]*\)\s*\Z")
_POINT_TO_POINT = {
    "send", "isend", "send_object_list", "recv", "irecv", "recv_object_list", "batch_isend_irecv",
}  # fmt: skip
_OF_RANKS = re.compile(r"/torch/distributed/(?!checkpoint/)")
PIPELINE_FILE = "/torch/distributed/pipelining/schedules.py"
WORKER_LOADER = "_MultiProcessingDataLoaderIter."
"""Begins the names of what takes batches from workers."""
WORKER_START = f"{WORKER_LOADER}__init__"
HANDED_OVER = "/torch/multiprocessing/reductions.py"
"""What hands tensors to another process, and takes them over there."""
_HANDS_OVER = ("/multiprocessing/queues.py", "/multiprocessing/resource_sharer.py")
"""What threads of a worker run that hand batches over."""
_STEP_WRAPPER = "profile_hook_step.<locals>.wrapper"
DISPATCH_RATIO = 1 / 3
"""Of an operator that takes a microsecond, what Python needs to call it: it holds the interpreter
lock so long. Measured on `torch.add` of ten numbers, CPython 3.11."""
_MOST = 0.95  # no more of a position's work is called waiting for a core
_UNLIKE = 0.2
"""What the shares of positions without a core differ by, before anything is known of them: where
samples do not tell positions apart, as with several steps between two of them, their shares are
alike. Own choice."""
_SPIKE = 2.0
"""A period in which a position takes so many times its median is sampled for itself: what is paid
at every Nth step is not spread over all of them."""
USUAL, LONG, BESIDE_SAVE = range(3)
"""Periods of a position are sampled apart: those in which it took much longer than usual, and those
of steps that began while a save was written beside the training thread."""
_PARTS = 3 * len(POSITIONS)
_SPIKE_MIN_RATIO = 0.01  # where such periods hold at least this share of all time


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """Rows of the sampled ranks; each is some time of one rank."""

    tree: CodeTree
    rank: Ints
    cell: Ints  # index into POSITIONS: the position that its span says, whose time it shares
    position: Ints
    """The same where the code below an optimizer's closure is told from the optimizer's."""
    activity: Ints  # index into ACTIVITIES
    work: Ints  # the same where a thread that waited for a core counts as doing what it had begun
    stack: Ints  # of the tree; 0 where no code is known
    step: Ints  # number of the step in whose period the time was seen; -1: spread over all
    kind: Ints  # of the position in that step's period: USUAL, LONG or BESIDE_SAVE
    hidden: Bools  # whether the device still had work then: nothing that the host did held it up
    ns: Floats  # of all judged steps together
    count: Floats  # samples that it rests on
    sample: Ints  # which sample it is, or a part of: a row of the `CodeSamples`; -1: none
    needed: Bools
    """Whether it is the model's own work, which no change around it removes; unknown at first."""
    packages: Sequence[str]  # per frame of the tree: whose code it is

    def take(self, rows: Bools | Ints) -> TimeTable:
        """The chosen rows."""
        return take_rows(self, rows)

    def split(
        self, rows: Ints, share: float | Floats, *, needed: bool | None = None
    ) -> tuple[TimeTable, Ints]:
        """The table with a share of some rows moved to new ones at its end, and the new rows.

        These are `needed` or not, as given; None: as the rows that they are of.
        """
        share = np.clip(share, 0.0, 1.0)  # of what many shares have left, rounding takes more
        part = self.take(rows)
        columns = {
            name: np.concatenate([getattr(self, name), getattr(part, name)]) for name in _COLUMNS
        }
        for name in ("ns", "count"):
            columns[name][rows] *= 1 - share
            columns[name][len(self.ns) :] *= share
        if needed is not None:
            columns["needed"][len(self.ns) :] = needed
        found = TimeTable(tree=self.tree, packages=self.packages, **columns)
        return found, np.arange(len(self.ns), len(found.ns))


def package_of(file: str, *, library: bool) -> str:
    """Whose code a file is: `job`, `torch`, `numpy`, `python` for the standard library."""
    if not library:
        return JOB
    match = _PACKAGE.match(file)
    if match:
        return match[1]
    return "torch" if _TORCH.search(file) else "python"


def spikes(position_ns: Ints | Floats) -> Bools:
    """[position, step]: periods in which a position takes much longer than it usually does."""
    total = max(float(position_ns.sum()), 1.0)
    usual = np.median(position_ns, axis=1, keepdims=True)
    found: Bools = position_ns > _SPIKE * usual + _SPIKE_MIN_RATIO * total / position_ns.shape[1]
    held = np.where(found, position_ns, 0).sum(axis=1, keepdims=True)
    kept: Bools = found & (held >= _SPIKE_MIN_RATIO * total)
    return kept


def period_kinds(position_ns: Ints | Floats, beside: Bools | None) -> Ints:
    """[position, step]: kinds of periods; `beside`: steps that began while a save was written."""
    found = np.where(spikes(position_ns), LONG, USUAL)
    return found if beside is None else np.where(beside, BESIDE_SAVE, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """What is needed of one sampled rank."""

    rank: int
    step: Ints  # numbers of the judged steps; a block of folded ones has that of its first one
    count: Ints  # how many steps each stands for
    plain_ns: Ints  # [position, judged step]: without collections; sums of a block
    collected_ns: Ints  # the same of the garbage collector's pauses
    positions: StepPositions
    wall_offset_ns: int
    no_core_ratio: float | None
    """Of its time, how long its thread waited for a core, by counters; None: not known."""
    tail_ratio: float | None
    """Of its backward, what follows the last collective that it began there; None: not known."""
    peer_ratios: Mapping[int, float]
    """By position: of its time, how long it waited there for later ranks in collectives."""
    free_ratio: float | None
    """Of its time, how long its cores had nothing to do; None: they are as many as their ranks."""
    busy: BusyTimes | None  # when its device had work queued; None: no device, or not known
    beside: Bools | None = None
    """[judged step]: whether it began while a save was written beside it; None: none did."""


def time_table(
    samples: CodeSamples, ranks: Sequence[RankSamples], *, uses_gpu: bool = False
) -> TimeTable:
    """The rows of some ranks and their samples; `uses_gpu`: operators are queued for a device."""
    tree = samples.tree
    packages = [
        package_of(frame.file, library=library)
        for frame, library in zip(tree.frames, tree.library.tolist(), strict=True)
    ]
    activity = _activities(samples, packages, uses_gpu=uses_gpu)
    main = samples.worker < 0
    main &= samples.phase < len(TRAINING_PHASES)
    parts = [
        _rank_rows(samples, activity, packages, (samples.rank == each.rank) & main, each)
        for each in ranks
    ]
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in _COLUMNS}
    return TimeTable(tree=tree, packages=packages, **columns)


def _rank_rows(
    samples: CodeSamples, activity: Ints, packages: Sequence[str], own: Bools, rank: RankSamples
) -> _Rows:
    """The rows of one rank: one per sample, one per cell without samples, one per collections."""
    cut = rank.positions
    at = np.flatnonzero(own)
    place = cut.at(samples.time_ns[at] - rank.wall_offset_ns)
    folded = samples.position[at] >= 0
    column = _columns(rank, np.where(folded, samples.step[at], np.append(cut.period, -1)[place]))
    cell = np.where(folded, samples.position[at], np.append(cut.position, 0)[place])
    keep = (folded | (place >= 0)) & (column >= 0)
    keep &= folded | ~np.append(cut.collecting, True)[place]
    at, place, column, cell = at[keep], place[keep], column[keep], cell[keep]
    kinds = period_kinds(rank.plain_ns / rank.count, rank.beside)
    kind = kinds[cell, column]
    whole = np.append(kinds, np.full((len(POSITIONS), 1), USUAL), axis=1)
    part = _part(cut.position, whole[cut.position, _columns(rank, cut.period)])
    spacing = spacing_ns(samples.time_ns[own], samples.time_ns[at])
    weight = np.zeros(len(at))
    unseen: list[tuple[int, int, int, int]] = []
    for number in range(len(POSITIONS)):
        for of_kind in (USUAL, LONG, BESIDE_SAVE):
            total = int(rank.plain_ns[number][kinds[number] == of_kind].sum())
            chosen = (cell == number) & (kind == of_kind)
            if chosen.any():
                weight[chosen] = total * spacing[chosen] / spacing[chosen].sum()
            elif total:
                unseen.append((number, UNKNOWN, of_kind, total))
        if collected := int(rank.collected_ns[number].sum()):
            unseen.append((number, COLLECTION, USUAL, collected))
    around = np.where(folded[keep], samples.around[at], np.append(cut.around_closure, False)[place])
    rows = {
        "sample": at, "cell": cell, "position": _after_closures(samples, at, cell, around),
        "activity": _guess_activity(samples, at, cell, activity[at], packages),
        "stack": samples.stack[at], "step": rank.step[column], "kind": kind,
        "hidden": samples.hidden[at]
        | is_hidden(samples.time_ns[at] - rank.wall_offset_ns, rank.busy),
        "ns": weight, "count": np.ones(len(at)), "needed": np.zeros(len(at)),
        "rank": np.full(len(at), rank.rank),
    }  # fmt: skip
    rows = {name: column.astype(_COLUMNS[name]) for name, column in rows.items()}
    rows = _split(rows, _dispatch_share(samples, rows, packages), OPERATORS)
    rows = _split_waits(rows, rank)
    rows["work"] = rows["activity"].copy()
    rows = _split(rows, _no_core_share(samples, rows, rank, part), NO_CORE)
    rows = _split(rows, _contended_share(rows), NO_CORE, "work")
    whole = np.array(unseen, dtype=np.int64).reshape(-1, 4).T
    others = dict.fromkeys(rows, np.zeros(len(unseen))) | {
        **dict.fromkeys(("cell", "position"), whole[0]), "kind": whole[2], "ns": whole[3],
        **dict.fromkeys(("activity", "work"), whole[1]), "rank": np.full(len(unseen), rank.rank),
        **dict.fromkeys(("step", "sample"), np.full(len(unseen), -1)),
    }  # fmt: skip
    return {
        name: np.concatenate([column, others[name].astype(column.dtype)])
        for name, column in rows.items()
    }


def _columns(rank: RankSamples, step: Ints) -> Ints:
    """The judged step, or block, that each number lies in; -1: in none."""
    return place_in(rank.step, rank.step + rank.count, step)


def is_hidden(time_ns: Ints, busy: BusyTimes | None) -> Bools:
    """Whether a rank's device had work queued at some times."""
    if busy is None or not len(busy[0]):
        return np.zeros(len(time_ns), dtype=np.bool_)
    return is_inside(busy[0], np.maximum.accumulate(busy[1]), time_ns)


def _guess_activity(
    samples: CodeSamples, at: Ints, cell: Ints, activity: Ints, packages: Sequence[str]
) -> Ints:
    """Activities of the job's own lines, which call operators as they call any other library."""
    # Where nobody looked at the lock it is Python outside of the model, operators in it. What makes
    # batches and holds no lock is some native code, but for a line that has the name of torch.
    pairs = zip(samples.tree.frames, packages, strict=True)
    kinds = [2 if TORCH_CALL.search(f.expression) else 1 for f, name in pairs if name == JOB]
    of_job = np.array([*(name == JOB for name in packages), False])
    kind = np.zeros(len(of_job), dtype=np.int64)
    kind[of_job] = kinds
    kind = np.where(activity == OPERATORS, kind[samples.tree.place[samples.stack[at]]], 0)
    inside = np.isin(cell, MODEL_POSITIONS)
    python = (kind > 0) & (samples.lock_wait[at] < 0) & ~inside & inside.any()
    return np.select([python, (kind == 1) & (cell == INPUT)], [PYTHON, NATIVE], activity)


def _split(rows: _Rows, share: Floats, activity: int, column: str = "activity") -> _Rows:
    """The same time in which a share of each row has another activity."""
    extra = share > 0
    moved = rows["ns"] * share
    found = {name: np.concatenate([values, values[extra]]) for name, values in rows.items()}
    found["ns"] = np.concatenate([rows["ns"] - moved, moved[extra]])
    found["count"] = np.concatenate([rows["count"] * (1 - share), (rows["count"] * share)[extra]])
    found[column][len(share) :] = activity
    return found


def _dispatch_share(samples: CodeSamples, rows: _Rows, packages: Sequence[str]) -> Floats:
    """Per row: what of Python in the job's own lines is the calling of operators."""
    # Whoever calls an operator holds the interpreter lock until it runs: as often as in torch's own
    # frames, or for DISPATCH_RATIO of the time, where that is more. Where Python beside that takes
    # a share h of a function, the lock is held in h + (1 - h) of it.
    share = np.zeros(len(rows["ns"]))
    place = samples.tree.place[rows["stack"]]
    of_torch = np.array([*(name == "torch" for name in packages), False])[place]
    of_job = np.array([*(name == JOB for name in packages), False])[place]
    held = rows["activity"] == PYTHON
    works = held | (rows["activity"] == OPERATORS)
    torch_works = works & of_torch
    usual = float(held[torch_works].mean()) if torch_works.any() else 0.0
    usual = min(max(usual, DISPATCH_RATIO), 0.9)
    asked = np.flatnonzero(works & of_job)
    function = functions_of(samples.tree)[1][place[asked]]
    key = function * len(POSITIONS) + rows["position"][asked]
    _, group = np.unique(key, return_inverse=True)
    count, holding = np.bincount(group), np.bincount(group, held[asked])
    python = np.maximum(holding - usual * count, 0.0) / (1.0 - usual)
    with np.errstate(invalid="ignore", divide="ignore"):
        dispatch = np.where(holding > 0, 1.0 - python / holding, 0.0)
    share[asked] = np.where(held[asked], np.clip(dispatch, 0.0, 1.0)[group], 0.0)
    return share


def _part(position: Ints, kind: Ints) -> Ints:
    """A position in one kind of its periods."""
    return position + len(POSITIONS) * kind


def _no_core_share(
    samples: CodeSamples, rows: _Rows, rank: RankSamples, interval_part: Ints
) -> Floats:
    """Per row: for how much of it the thread was ready to run but had no CPU core."""
    # A period in which a position took longer than usual is a part of its own: that may be what it
    # waited for a core.
    on_core = np.isin(rows["activity"], ON_CORE)
    part = _part(rows["cell"], rows["kind"])
    whole = np.bincount(part, rows["ns"], _PARTS)
    able = np.bincount(part[on_core], rows["ns"][on_core], _PARTS)
    lost_ns = (rank.no_core_ratio or 0.0) * whole.sum()
    sampled = np.unique(rows["sample"])  # a sample may have several rows by now
    known = sampled[samples.queue_ns[sampled] >= 0]
    if len(known) > 1:  # each tells of the time since the one before
        lost_ns = whole.sum() * _queued_ratio(samples, sampled, known)
    woken = np.isin(rows["activity"], _WOKEN)
    late = _late_ratio(samples, known, np.isin(known, rows["sample"][woken]))
    lost_ns = max(lost_ns - late * float(rows["ns"][woken].sum()), 0.0)
    lost = able * _off_core(samples, rank, able / np.maximum(whole, 1.0), interval_part)
    lost *= lost_ns / max(float(lost.sum()), 1.0)
    most = np.minimum(lost, _MOST * able)
    return np.where(on_core, (most / np.maximum(able, 1.0))[part], np.where(woken, late, 0.0))


def _queued_ratio(samples: CodeSamples, sampled: Ints, known: Ints) -> float:
    """Of a thread's time, how long it was ready to run but had no core."""
    # Nobody asks while it is on a core all the time (`look` in sample_clock.c). So the time before
    # the first answer (`known`) and after the last one holds less of it than the time between: as
    # much less as it was less off its core.
    time_ns, cpu_ns = samples.time_ns[sampled], samples.cpu_ns[sampled]
    passed = np.where(np.diff(sampled, prepend=-2) == 1, np.diff(time_ns, prepend=time_ns[0]), 0)
    off = np.where(cpu_ns >= 0, np.maximum(passed - cpu_ns, 0), 0)
    between = (sampled > known[0]) & (sampled <= known[-1])
    rest = float(off[~between].sum()) / max(float(off[between].sum()), 1.0)
    queued = float(samples.queue_ns[known[1:]].sum()) * (1.0 + rest)
    return min(queued / max(float(np.ptp(time_ns)), 1.0), _MOST)


def _late_ratio(samples: CodeSamples, known: Ints, waits: Bools) -> float:
    """How much of a wait that is many short ones a thread was runnable again and had no core."""
    # Between two samples of the same wait (`waits`), of those that tell how long it queued
    # (`known`). A long wait has a single such delay, at its end, which ends with it.
    inside = waits[1:] & waits[:-1] & (samples.stack[known[1:]] == samples.stack[known[:-1]])
    passed = float(np.diff(samples.time_ns[known])[inside].sum())
    return min(float(samples.queue_ns[known[1:]][inside].sum()) / max(passed, 1.0), _MOST)


def _contended_share(rows: _Rows) -> Floats:
    """Per row: what of waiting for a core has its cause in others, whatever this code is."""
    # Code that is removed takes the waiting with it that its time on a core brings on average. What
    # its position waits beyond that comes from who has the core then, and is met by other code.
    lost = rows["activity"] == NO_CORE
    on_core = np.isin(rows["activity"], ON_CORE)
    part = _part(rows["cell"], rows["kind"])
    waited, worked = (np.bincount(part[own], rows["ns"][own], _PARTS) for own in (lost, on_core))
    usual = waited.sum() / max(float(worked.sum()), 1.0)
    brought = np.minimum(usual * worked / np.maximum(waited, 1.0), 1.0)
    return np.where(lost, 1.0 - brought[part], 0.0)


def _off_core(samples: CodeSamples, rank: RankSamples, able: Floats, interval_part: Ints) -> Floats:
    """[part]: of the time in which a thread could use a core, what it had none for, relatively."""
    # Linear regression of the time without CPU use between two samples on the time in each
    # position, waits left out (`able`: the share of a part without them). It is drawn to the same
    # share everywhere as far as the noise asks for it (ridge regression as Bayes' rule has it:
    # Hsiang 1975). Only its proportions count.
    own = (samples.rank == rank.rank) & (samples.worker < 0)
    at = np.flatnonzero(own & (samples.phase < len(TRAINING_PHASES)))
    at = at[np.argsort(samples.time_ns[at], kind="stable")]
    time_ns, cpu_ns = samples.time_ns[at] - rank.wall_offset_ns, samples.cpu_ns[at][1:]
    inside = rank.positions.between(time_ns, interval_part, _PARTS)
    passed = np.diff(time_ns)
    known = (cpu_ns >= 0) & (passed > 0) & (inside.sum(axis=0) == passed)
    used = np.flatnonzero(inside.any(axis=1))  # few of all parts
    gaps = (inside[np.ix_(used, known)] * able[used, None]).T
    whole = gaps.sum(axis=1)
    off = whole - np.minimum(cpu_ns, passed)[known]
    usual = max(float(off.sum()) / max(float(whole.sum()), 1.0), 0.0)
    unlike = off - usual * whole
    if not len(off) or not usual:
        return np.ones(len(able))
    ridge = max(float((unlike**2).mean()), 1.0) / _UNLIKE**2 * np.eye(len(used))
    found = np.full(len(able), usual)
    found[used] += np.linalg.solve(gaps.T @ gaps + ridge, gaps.T @ unlike)
    clipped: Floats = np.clip(found, 0.0, 1.0)
    return clipped


def workers_without_core(samples: CodeSamples, rank: int) -> float:
    """Of the time in which a rank's workers make batches and hand them over: without a core."""
    own = (samples.rank == rank) & (samples.worker >= 0)
    waiting = own & (samples.phase == WORKER_WAITING)
    queue = float(samples.queue_ns[own & (samples.queue_ns > 0)].sum())
    handing = float(samples.cpu_ns[waiting & (samples.cpu_ns > 0)].sum()) + float(
        samples.queue_ns[waiting & (samples.queue_ns > 0)].sum()
    )
    whole = float(samples.weight_ns[own & (samples.phase == WORKER)].sum()) + handing
    return min(queue / whole, _MOST) if whole else 0.0


def workers_hand_over(samples: CodeSamples, rank: int) -> bool:
    """Whether a rank's workers use more CPU to hand batches over than they take to make them."""
    return _handing_ns(samples, samples.rank == rank) > _making_ns(samples, samples.rank == rank)


def _workers_make(samples: CodeSamples) -> bool:
    """Whether workers make batches for most of the time: no other way to pass them is faster."""
    own = samples.worker >= 0
    idle_ns = float(samples.weight_ns[own & (samples.phase == WORKER_WAITING)].sum())
    return _making_ns(samples, own) > max(idle_ns, _handing_ns(samples, own))


def _making_ns(samples: CodeSamples, own: Bools) -> float:
    own = own & (samples.worker >= 0) & (samples.phase == WORKER)
    return float(samples.weight_ns[own].sum())


def _handing_ns(samples: CodeSamples, own: Bools) -> float:
    hands = (samples.phase == OTHER_THREADS) & samples.tree.within(_HANDS_OVER)[samples.stack]
    return float(samples.weight_ns[own & (samples.worker >= 0) & hands].sum())


def _share_of(rows: _Rows, inside: Bools, ns: float) -> Floats:
    """Per row: the share of those inside that is so much time of all of them."""
    whole = max(float(rows["ns"][inside].sum()), 1.0)
    return np.where(inside, min(max(ns, 0.0) / whole, 1.0), 0.0)


def _split_waits(rows: _Rows, rank: RankSamples) -> _Rows:
    """With what of backward and of exchanges is waiting for the link, for ranks, and for cores."""
    # After the last collective that backward began it waits for the link. A thread that holds the
    # interpreter lock does not.
    backward = rows["position"] == BACKWARD
    able = np.isin(rows["activity"], (OPERATORS, NATIVE, LOCK_WAIT, SOCKET_WAIT, OTHER_WAIT))
    tail_ns = (rank.tail_ratio or 0.0) * float(rows["ns"][backward].sum())
    rows = _split(rows, _share_of(rows, backward & able, tail_ns), LINK_WAIT)
    # What of the time in collectives passes until the last rank is there.
    # What is longer than it was seen to be in collectives there was in those of other positions.
    whole = float(rows["ns"].sum())
    left = whole * sum(rank.peer_ratios.values())
    for position, ratio in [*rank.peer_ratios.items(), (None, 1.0)]:
        inside = (rows["activity"] == LINK_WAIT) & ((rows["cell"] == position) | (position is None))
        share = _share_of(rows, inside, min(left, ratio * whole))
        left -= float((share * rows["ns"]).sum())
        rows = _split(rows, share, PEER_WAIT)
    if rank.free_ratio is None:
        return rows
    # And what of an exchange, until other ranks leave a core to those who exchange.
    inside = rows["activity"] == LINK_WAIT
    crowded_ns = float(rows["ns"][inside].sum()) - rank.free_ratio * whole
    return _split(rows, _share_of(rows, inside, crowded_ns), NO_CORE)


def _after_closures(samples: CodeSamples, at: Ints, position: Ints, around: Bools) -> Ints:
    """Positions, where an optimizer's own code is told from that of its closure."""
    # The closure is what an optimizer's `step` calls, outside of torch, on the way to a forward or
    # backward. Its code between the spans has their positions; after the last one it is `gradients`
    # (clipping). What is not below it is the optimizer's, wherever it runs.
    if not around.any():
        return position
    called = _called_by_step(samples.tree)
    of_sample = called[samples.stack[at]]
    closures = np.unique(of_sample[np.isin(position, (FORWARD, BACKWARD)) & (of_sample >= 0)])
    inside = np.isin(of_sample, closures)
    found = np.where(around & ~inside, OPTIMIZER, position)
    return np.where(around & inside & (position == OPTIMIZER), GRADIENTS, found)


def _called_by_step(tree: CodeTree) -> Ints:
    """Per stack: the function that the innermost optimizer's `step` in it calls; -1: none."""
    # Torch wraps each step in a function of its own; torch's own functions below it do not count.
    _, function = functions_of(tree)
    found = np.full(len(tree.place), -1)
    below = np.zeros(len(tree.place), dtype=np.bool_)  # a step, and nothing outside of torch in it
    is_step = np.zeros(len(tree.place), dtype=np.bool_)
    for stack in range(1, len(tree.place)):  # callers come first
        parent = int(tree.parent[stack])
        frame, caller = (tree.frames[tree.place[at]] for at in (stack, parent))
        is_step[stack] = parent > 0 and caller.function.endswith(_STEP_WRAPPER)
        is_part = frame.function.startswith(f"{caller.function}.<locals>.<")  # a comprehension
        of_torch = _TORCH.search(frame.file) is not None or is_part
        if is_step[stack] or (below[parent] and of_torch):
            below[stack] = True
        elif below[parent]:
            found[stack] = function[tree.place[stack]]
        else:
            found[stack] = found[parent]
    return found


def _activities(samples: CodeSamples, packages: Sequence[str], *, uses_gpu: bool) -> Ints:
    """Per sample: what the training thread did, by its stack and how it stood to the lock."""
    tree = samples.tree
    place = tree.place
    # Whose code is a module's forward: without the interpreter lock it runs torch's operators.
    modules = np.array([*(MODULE_FILE in frame.file for frame in tree.frames), False])
    called = place[modules[place][tree.parent]]
    models = {packages[at] for at in called.tolist()} - {JOB, "torch", "python"}
    by_frame = np.array([
        *(OPERATORS if name in models else _frame_activity(frame, name, uses_gpu=uses_gpu)
          for frame, name in zip(tree.frames, packages, strict=True)), UNKNOWN,
    ])  # fmt: skip
    # Who selects waits for what its caller reads, where that is of the standard library.
    selects = np.array([*(f.file.endswith("/selectors.py") for f in tree.frames), False])[place]
    of_caller = by_frame[place][tree.parent]
    by_stack = np.where(selects & np.isin(of_caller, _SEEN_IN_CODE), of_caller, by_frame[place])
    found = by_stack[samples.stack]
    # By code of a sample's `wait`: its activity; -1 where it waited for nothing, or is unknown.
    waits = np.array([*(_WAIT_OF_NAME.get(name, -1) for name in WAITS), -1])[samples.wait]
    ready = samples.wait == WAITS.index("none")
    # Who is ready to run waits for nothing, but where many others of its stack do: it was woken
    # there and has no core yet. Who was off its core had waited, though nobody saw for what.
    off_core = (waits >= 0) | ((samples.wait < 0) & (samples.cpu_ns >= 0))
    count, off = (np.bincount(samples.stack, weights=own) for own in (None, off_core))
    waiting = off >= _WAITING_RATIO * count
    found = np.where(ready & ~waiting[samples.stack] & np.isin(found, _SEEN_IN_CODE), NATIVE, found)
    held = samples.lock_wait == LOCK_HELD
    found = np.where(held & (found != UNKNOWN), PYTHON, found)
    of_torch = np.array([*(p == "torch" for p in packages), False])[place][samples.stack]
    waits = np.where(of_torch & np.isin(waits, (LOCK_WAIT, OTHER_WAIT)), -1, waits)  # its threads
    found = np.where((waits >= 0) & np.isin(found, (*ON_CORE, OTHER_WAIT, LOCK_WAIT)), waits, found)
    kinds = [np.bincount(samples.stack, waits == kind) for kind in range(len(ACTIVITIES))]
    most = np.argmax(kinds, axis=0)
    of_calls = (waiting & np.isin(most, _OF_CALLS))[samples.stack]
    found = np.where(of_calls & np.isin(found, (OPERATORS, NATIVE)), most[samples.stack], found)
    names = [frame.function for frame in tree.frames]
    workers = np.array([*(WORKER_LOADER in n and WORKER_START not in n for n in names), False])
    # What the job's sampler does below it is the job's; tensors that are handed over were made.
    handed = tree.within(HANDED_OVER)[samples.stack]
    if handed.any() and _workers_make(samples):  # it waits for their threads, which have no lock
        handed &= ~np.isin(found, _SEEN_IN_CODE)
    in_loader = tree.calls_libraries(workers)[samples.stack] & ~handed
    takes_over = ready & np.isin(found, ON_CORE)
    found = np.where(in_loader & ~takes_over, LOADER_WAIT, found)
    found = np.where(samples.lock_wait == LOCK_WAITED_FOR, GIL_WAIT, found)
    # Code of torch.distributed that is at a lock waits for what it has begun with other ranks.
    of_ranks = [_OF_RANKS.search(frame.file) is not None for frame in tree.frames]
    at_lock = np.bincount(samples.stack, samples.wait == WAITS.index("lock"))
    exchanges = (at_lock >= _WAITING_RATIO * count) & (at_lock > 0)
    exchanges &= np.array([*of_ranks, False])[place][: len(exchanges)]
    exchanges |= tree.holds(exchange_frames(tree))[: len(exchanges)]
    found = np.where(exchanges[samples.stack], LINK_WAIT, found)
    return np.where(samples.stack == 0, UNKNOWN, found)


def waiting_stacks(tree: CodeTree) -> Bools:
    """Per stack: whether its innermost frame is a call that waits, and holds no interpreter lock.

    A thread that lets go of that lock there is seen there, whatever it did before.
    """
    waits = [
        _frame_activity(frame, package_of(frame.file, library=library), uses_gpu=False)
        in _SEEN_IN_CODE
        for frame, library in zip(tree.frames, tree.library.tolist(), strict=True)
    ]
    found: Bools = np.append(np.array(waits, dtype=np.bool_), False)[tree.place]
    return found


def exchange_frames(tree: CodeTree) -> Bools:
    """Per frame, and none: whether it exchanges tensors with other ranks, or waits for that."""
    calls = [f.file.endswith(COLLECTIVES_FILE) or f.function in _EXCHANGES for f in tree.frames]
    found: Bools = np.array([*calls, False])
    return found | _waits_for_handle(tree) if found.any() else found


def point_to_point(tree: CodeTree) -> Bools:
    """Per frame, and none: whether it sends to one other rank, or receives from it."""
    names = [frame.file.endswith(COLLECTIVES_FILE) and frame.function for frame in tree.frames]
    found: Bools = np.array([*(name in _POINT_TO_POINT for name in names), False])
    # Who began it in a function waits for it there.
    callers = tree.place[tree.parent[found[tree.place]]].tolist()
    begins = {(tree.frames[at].file, tree.frames[at].function) for at in callers if at >= 0}
    same = [(frame.file, frame.function) in begins for frame in tree.frames]
    found |= _waits_for_handle(tree) & np.array([*same, False])
    stages = [frame.file.endswith(PIPELINE_FILE) for frame in tree.frames]
    return found | (np.array([*stages, False]) & ~_calls_python(tree))


def _waits_for_handle(tree: CodeTree) -> Bools:
    """Per frame, and none: whether a line of the job's waits in C++, as `work.wait()` does."""
    waits = [
        not library and _WAITS_FOR_HANDLE.search(frame.expression) is not None
        for frame, library in zip(tree.frames, tree.library.tolist(), strict=True)
    ]
    return np.array([*waits, False]) & ~_calls_python(tree)


def _calls_python(tree: CodeTree) -> Bools:
    """Per frame, and none: whether another one was seen inside it; waits in Python have one."""
    calls = np.zeros(len(tree.frames) + 1, dtype=np.bool_)
    calls[tree.place[tree.parent]] = True
    return calls


def waits_for_peers(tree: CodeTree) -> Bools:
    """Per stack: whether it is in torch.distributed, or waits for a handle of it."""
    of_torch = np.array([*("/torch/distributed/" in frame.file for frame in tree.frames), False])
    return tree.holds(of_torch | _waits_for_handle(tree))


def _frame_activity(frame: Frame, package: str, *, uses_gpu: bool) -> int:
    """What a thread does whose innermost frame this is, while it holds no lock."""
    if uses_gpu and package == JOB and _DEVICE_READ.search(frame.expression):
        return DEVICE_WAIT
    if package == JOB:
        for call, wait in _WAITING_CALLS:
            if call.match(frame.expression):
                return wait
        return NATIVE if _LIBRARY_CALL.match(frame.expression) else OPERATORS
    if package in ("torch", "python"):
        for end, wait in _WAITS:
            if frame.file.endswith(end):
                return wait
    return OPERATORS if package == "torch" else NATIVE
