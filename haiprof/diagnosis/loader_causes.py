"""Why training waits for batches: epochs, single slow samples, storage, workers, cores."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from haiprof.base.intervals import Floats
from haiprof.base.ledger import EACH_STEP, PROBLEM_RATIO, Account
from haiprof.base.medians import lower_median
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.machine_causes import nfs_wait, used_by_others
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.verdict import Evidence, Finding, evidence_rows, make_finding
from haiprof.run_analysis.code_samples import FETCH_FILE, CodeSamples
from haiprof.run_analysis.lines import innermost_stack
from haiprof.run_analysis.run_files import number
from haiprof.run_format.stack_lines import WAIT_UNKNOWN, WAITS

CORES_FULL_RATIO = 0.90
"""From here on a set of cores is full by the ranks' own work: at most a tenth is left to others, so
waiting beyond that is the ranks' own doing. Own choice."""
EPOCH_MAIN_RATIO = 0.50
BURST_MAIN_RATIO = 0.80
BURST_RARE_RATIO = 0.50
"""Waiting beyond the median is concentrated where 80 % of it (TraceML's coverage) lies in fewer
than half as many steps as bursts of W workers would give, which is one in W. Own choice."""
BURST_UNUSUAL_RATIO = 0.50  # Most of the waiting is more than the median step's. Own choice.
LOADER_IDLE_RATIO = 0.50
"""Whoever makes the batches waits himself where he uses the CPU for less than half of the time in
which training waits for them. Own choice."""
_WAIT_TEXTS = {
    "sleep": "sleeps (time.sleep, or a pause between attempts)", "file": "waits for files",
    "socket": "waits for a network peer", "lock": "waits for a lock",
    "pipe": "waits for another process", "fault": "waits for memory that is read from files",
}  # fmt: skip
_SOME_WAIT = "waits: for files, the network or a lock"
_NO_PAUSES = "take the pauses out (time.sleep, attempts that wait)"
_READ_MORE = (
    "read less often and more at once: larger files (tar, parquet, memory maps), a local copy of "
    "the data set, no request per sample"
)
_HOLD_LESS = (
    "hold the lock for no more than what it guards, or give each worker a file or connection of "
    "its own, which needs none; behind one lock more workers gain nothing"
)
_IN_WORKERS = "load batches in worker processes, which read ahead (num_workers=1 and up)"
_PART_OF_RUN = re.compile(r"(?:more )?(until|since) step ")
_OF_PART = {
    "until": "these steps pay it as a first epoch does that fills a cache (the dataset's own, or "
    "the system's of files): fill it in a warm-up ahead of training, and keep what was made in a "
    "file for the next run",
    "since": "look for what changed at that step: other samples, a cache that was full or emptied, "
    "others that use the same storage",
}
_TIMES_OTHERS = 2.0
"""Who makes so many times as much as each of the others was dealt more. Own choice."""
_MORE_WORKERS = ("storage", "no_workers", "few_workers")
"""Causes whose remedy is, or may be, more workers."""
_SHARES = (
    "; of several workers each yields all that an IterableDataset has, unless its __iter__ takes a "
    "share by torch.utils.data.get_worker_info()"
)
_LESS = "decode and tokenize once, ahead of training; cheaper augmentation"
_LESS_IN_MEMORY = "take a whole batch at once from what is in memory (Dataset.__getitems__)"
_OF_LISTS = re.compile(r"\btorch\.(?:(?:as_)?tensor|\w*Tensor)\(\s*\[")
_OF_TABLES = re.compile(r"\.i?loc\[|/pandas/core/(?:indexing|series)\.py")
OPENS = re.compile(
    r"\b(?:Zip|Tar|Parquet)File(?:\(|\.__init__|\._RealGetContents)|\b(?:tarfile|lmdb)\.open\(|"
    r"\bh5py\.File\(|\bh5py\b.*\b(?:File\.__init__|make_fid)|\bsqlite3\.connect\("
)
"""Of an expression, or functions that it calls: opens an archive or a database of many samples."""
_LESS_OPENING = (
    "open the archive or database once in each worker, where __getitem__ first runs there, and "
    "keep it: opening reads its whole table of contents"
)
_LESS_OF_LISTS = (
    "keep numbers in arrays or tensors and join these (torch.stack; np.stack, then "
    "torch.from_numpy): torch.tensor takes those of a list one by one"
)
_LESS_OF_TABLES = (
    "turn the table into arrays or tensors once, ahead of training (to_numpy, one for each type): "
    "pandas makes an object for each row that it gives"
)
_TRIED = (
    "the time above is with batches always ready; haiprof try-loader measures what workers gain"
)
MAKES_LOADER = r"DataLoader\("
_MIN_SAMPLES = 20  # Fewer samples of the workers do not tell what they take. Own choice.
FREE_CORES = 0.5
"""Cores are full where less than half of what one more worker needs is free: with half a core it
still adds half a worker's batches. Own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loading:
    """What is known of the loading of one rank."""

    workers: int | None
    wait_share: float
    main_cores: float | None
    worker_cores: float | None
    core_wait: float  # Share of time in which the main thread waited for a core; 0 where not known
    free_cores: float | None  # Of those that the rank may use; None where that is not known
    strangers_cores: float  # Used by processes that are not the job's; 0 where not known
    less: str  # How to do less per sample

    @property
    def is_computing(self) -> bool | None:
        """Whether whoever makes the batches uses the CPU, or would; None: not known."""
        # Of the time in which they could run, workers are taken to wait for a core as much as the
        # main thread does.
        if self.workers == 0 and self.main_cores is not None:
            computed = self.main_cores + self.core_wait - (1 - self.wait_share)
            return computed >= LOADER_IDLE_RATIO * self.wait_share
        if self.workers and self.worker_cores is not None:
            could_run = (self.main_cores or 0.0) + self.core_wait
            got = 1 - self.core_wait / could_run if could_run else 1.0
            wanted = self.worker_cores / max(got, 0.1)
            return wanted >= LOADER_IDLE_RATIO * self.wait_share * self.workers
        return None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Workers, and the cores that are used."""
        return evidence_rows(
            ("workers", None if self.workers is None else float(self.workers), "count"),
            ("cores used by the training process", self.main_cores, "cores"),
            ("cores used by its workers", self.worker_cores, "cores"),
            ("cores left free", self.free_cores, "cores"),
        )


def loader_cause(
    inputs: RuleInputs, loading_samples: CodeSamples, account: Account
) -> Finding | None:
    """Why training waits for input, as the numbers of a run show; None where nothing tells it.

    `loading_samples` are those of whoever makes the batches, the account is what is asked about.
    """
    # The rank that waits as long as the typical one: the lower middle.
    waits = {rank: number(own["dataloader_host_ns"].mean()) or 0.0
             for rank, own in inputs.by_rank.items()}  # fmt: skip
    rank = sorted(waits, key=lambda rank: (waits[rank], rank))[(len(waits) - 1) // 2]
    step_ns = number(inputs.by_rank[rank]["step_ns"].mean()) or math.inf
    used, placed, free = inputs.busy_cores, inputs.placements.get(rank), None
    strangers = used_by_others(inputs, inputs.hosts.get(rank)) or 0.0
    if placed is not None and placed.allowed_cpus and rank in used:
        beside = (other for other, place in inputs.placements.items()
                  if other != rank and place.host == placed.host
                  and placed.allowed_cpus & (place.allowed_cpus or frozenset()))  # fmt: skip
        others = sum(used.get(other, 0.0) for other in beside) + strangers
        free = max(len(placed.allowed_cpus) - used[rank] - others, 0.0)
    loading = _Loading(
        workers=inputs.loader_workers.get(rank), wait_share=min(waits[rank] / step_ns, 1.0),
        main_cores=inputs.main_cores.get(rank), core_wait=inputs.core_waits.get(rank, 0.0),
        worker_cores=inputs.worker_cores(rank), free_cores=free, strangers_cores=strangers,
        less=less_per_sample(loading_samples),
    )  # fmt: skip
    # A small part of the waiting that each step pays is not what takes long in some of them.
    of_some_steps = account.when != EACH_STEP or account.ns_per_step >= waits[rank] / 2
    found = (
        (of_some_steps and _epochs(inputs, loading, loading_samples))
        or _part_of_run(account.when)
        or (of_some_steps and _rare_samples(inputs, loading))
        or _uneven_workers(loading_samples)
        or _storage(inputs, loading, loading_samples)
        or _workers(loading, on_gpu=inputs.uses_gpu)
    )
    if found is None or found.rule not in _MORE_WORKERS or rank not in inputs.iterable:
        return found
    return replace(found, remedy=found.remedy + _SHARES)


def less_per_sample(samples: CodeSamples) -> str:
    """How to do less per sample: where no code of the job's makes one, whole batches at once."""
    tree = samples.tree
    of_fetch = tree.within(FETCH_FILE)
    inner = innermost_stack(tree)[samples.stack[of_fetch[samples.stack]]]
    own = inner[of_fetch[inner]]
    if not len(own):
        return _LESS_IN_MEMORY if len(inner) else _LESS
    most = int(np.bincount(own).argmax())
    called = tree.place[np.unique(samples.stack[innermost_stack(tree)[samples.stack] == most])]
    inside = (tree.frames[at] for at in called)
    text = " ".join([tree.frames[tree.place[most]].expression,
                     *(f"{each.file} {each.function}" for each in inside)])  # fmt: skip
    ways = (_OF_LISTS, _LESS_OF_LISTS), (OPENS, _LESS_OPENING), (_OF_TABLES, _LESS_OF_TABLES)
    return next((less for kind, less in ways if kind.search(text)), _LESS)


def _epoch_starts(inputs: RuleInputs) -> tuple[int, int, int] | None:
    """Starts of epochs, their time, and all waiting, in ns; None: most of it is elsewhere."""
    names = ("epoch_count", "epoch_ns", "wait_ns")
    count, edge, wait = (int(inputs.loading[name].sum()) for name in names)
    return (count, edge, wait) if count > 0 and edge >= EPOCH_MAIN_RATIO * wait else None


def restarts_workers(inputs: RuleInputs) -> bool:
    """Whether epochs begin with new loader workers, and most of the waiting is there."""
    has_workers = any(inputs.loader_workers.get(rank) for rank in inputs.world)
    return has_workers and _epoch_starts(inputs) is not None


def _epochs(inputs: RuleInputs, loading: _Loading, samples: CodeSamples) -> Finding | None:
    """Most of the waiting is at the edges of epochs."""
    starts = _epoch_starts(inputs)
    if starts is None:
        return None
    (count, edge, wait), without = starts, ""
    if loading.workers and len(samples.rank) >= _MIN_SAMPLES and (samples.worker >= 0).all():
        ranks = len(np.unique(samples.rank)) / inputs.loading.height
        made_ns = float(samples.weight_ns.sum()) / (ranks * count)
        if made_ns < edge / count:
            without = (
                f"; or num_workers=0: making an epoch's batches takes {duration_text(made_ns)}"
            )
            without += f", beginning an epoch with new workers {duration_text(edge / count)}"
    return make_finding(
        "most of it where an epoch begins",
        "keep the workers alive between epochs: DataLoader(..., persistent_workers=True)"
        f"{without}; or make epochs longer (a sampler that repeats)"
        if loading.workers
        else "look at what DataLoader.__iter__ does: the sampler's shuffle, files that the dataset "
        "opens again; make epochs longer (a sampler that repeats)",
        ("starts of epochs", float(count), "count"),
        ("time at one, with the first batch", edge / count, "ns"),
        ("share of all waiting that falls there", edge / wait, "ratio"),
        rule="epoch_restart",
        setting=MAKES_LOADER if loading.workers else "",
    )


def _part_of_run(when: str) -> Finding | None:
    """All steps up to one wait, or all from one on."""
    found = _PART_OF_RUN.match(when)
    if found is None:
        return None
    return Finding(rule="part_of_run", title=f"paid {when}", remedy=_OF_PART[found[1]])


def _rare_samples(inputs: RuleInputs, loading: _Loading) -> Finding | None:
    """Few steps hold most of the waiting: fewer than bursts of so many workers would give."""
    # What each step waits as usual, the median, is left out: slow samples are slow beside others.
    if loading.workers is None:
        return None
    steps = [inputs.by_rank[rank] for rank in inputs.world]
    waits = (own["dataloader_host_ns"].to_numpy() for own in steps)
    rare, unusual, excess = zip(*(_rare_share(each) for each in waits), strict=True)
    typical = lower_median(rare)
    if typical >= BURST_RARE_RATIO / max(loading.workers, 1):
        return None
    # A slow sample holds up for longer than a step: less is the jitter of a loader that is
    # about as fast as training.
    if lower_median(excess) < lower_median(number(own["step_ns"].median()) or 0.0 for own in steps):
        return None
    edge, wait = (int(inputs.loading[name].sum()) for name in ("epoch_ns", "wait_ns"))
    if edge >= EPOCH_MAIN_RATIO * lower_median(unusual) * wait:
        return None  # most of it is where epochs begin
    if lower_median(unusual) * loading.wait_share <= loading.core_wait:
        return None  # as much as it waited for a core, which makes any sample slow
    return make_finding(
        "most of it for a few slow samples",
        "find the samples that are slow (large or remote files, retries, outliers in "
        "length): time dataset[i] for each i; prepare them ahead, or "
        + ("read further ahead (prefetch_factor)" if loading.workers else _IN_WORKERS),
        ("steps with 80 % of the unusual waiting", typical, "ratio"),
        ("workers", float(loading.workers), "count"),
        rule="slow_samples",
    )


def _rare_share(waits: Floats) -> tuple[float, float, float]:
    """Share of the steps with 80 % of the waiting beyond the median, and that of all waiting.

    Then what one of these steps waits beyond it. The first is 1 where the second is little.
    """
    excess = np.maximum(waits - np.median(waits), 0.0)
    unusual = float(excess.sum()) / max(float(waits.sum()), 1.0)
    if unusual <= BURST_UNUSUAL_RATIO:
        return 1.0, unusual, 0.0
    ordered = np.sort(excess)[::-1]
    reached = np.cumsum(ordered) >= BURST_MAIN_RATIO * ordered.sum()
    count = int(reached.argmax()) + 1
    return count / len(ordered), unusual, float(ordered[:count].mean())


def _made_by_worker(samples: CodeSamples) -> Floats:
    """[rank, worker]: time in which workers of a loader make batches, or wait while they do."""
    own = samples.worker >= 0
    ranks, rank = np.unique(samples.rank[own], return_inverse=True)
    made = np.zeros((len(ranks), int(samples.worker.max(initial=0)) + 1))
    np.add.at(made, (rank, samples.worker[own]), samples.weight_ns[own])
    return made


def _is_uneven(made: Floats) -> bool:
    most, count = made.max(axis=1, initial=0.0), (made > 0).sum(axis=1)
    beside = (made.sum(axis=1) - most) / np.maximum(count - 1, 1)
    return bool(len(most) and ((count > 1) & (most >= _TIMES_OTHERS * beside)).all())


def even_ratio(samples: CodeSamples) -> float:
    """Of the busiest worker's time, what each needs that makes as much and waits for no lock.

    0 where neither holds them up: what else makes batches cheaper has no such bound.
    """
    made, free = _made_by_worker(samples), samples.wait != WAITS.index("lock")
    works = _made_by_worker(replace(samples, weight_ns=np.where(free, samples.weight_ns, 0)))
    is_locked = 0 < works.sum() <= LOADER_IDLE_RATIO * made.sum()
    if not is_locked and not _is_uneven(made):
        return 0.0
    count = (made > 0).sum(axis=1)
    return float((works.sum(axis=1) / count).sum() / made.max(axis=1).sum())


def _uneven_workers(samples: CodeSamples) -> Finding | None:
    """One worker makes most of the batches: the others have been dealt less, and are idle."""
    made = _made_by_worker(samples)
    if not _is_uneven(made):
        return None
    share, count = float(made.max(axis=1).sum() / made.sum()), int((made > 0).sum(axis=1).max())
    return make_finding(
        f"and one of {count} workers makes {ratio_text(share)} of what they make",
        "deal equal shares: files or shards of like size to each worker (get_worker_info() in the "
        "IterableDataset's __iter__), several small ones for each; more workers leave the longest "
        "share as long as it is",
        ("of what workers make, by the busiest", share, "ratio"),
        rule="uneven_workers",
    )


def _wait_text(samples: CodeSamples) -> str:
    """What whoever makes the batches waits for: what most of the waiting that was seen is for."""
    weight = np.bincount(samples.wait - WAIT_UNKNOWN, samples.weight_ns, len(WAITS) + 1)
    seen = dict(zip(WAITS[1:], weight[1 - WAIT_UNKNOWN :], strict=True))
    kind, most = max(seen.items(), key=lambda each: each[1])
    told = _WAIT_TEXTS.get(kind) if 2 * most > sum(seen.values()) else None
    return told or _SOME_WAIT


def _storage(inputs: RuleInputs, loading: _Loading, samples: CodeSamples) -> Finding | None:
    """Whoever makes the batches waits himself."""
    if loading.is_computing is not False:
        return None
    wait = _wait_text(samples)
    remedy = "let workers wait in parallel, ahead of training (num_workers=4 and up), and "
    if loading.workers:
        remedy = "more workers wait in parallel (num_workers), and "
    remedy += _NO_PAUSES if wait == _WAIT_TEXTS["sleep"] else _READ_MORE
    remedy = _HOLD_LESS if wait == _WAIT_TEXTS["lock"] and loading.workers else remedy
    read = {
        "read by calls, all ranks": inputs.counted.of("read_bytes_per_s"),
        "read from storage, all ranks": inputs.counted.of("storage_read_bytes_per_s"),
    }
    rows = [(name, sum(ranks.values()), "bytes/s") for name, ranks in read.items() if ranks]
    is_file = wait in (_WAIT_TEXTS["file"], _SOME_WAIT)
    nfs = nfs_wait(inputs, (), loading.wait_share) if is_file else None
    return Finding(
        rule="storage",
        title=f"and the loader itself {f'waits: {nfs.title}' if nfs else wait}",
        remedy=f"{remedy}; {nfs.remedy}" if nfs else remedy,
        evidence=(*loading.evidence, *(nfs.evidence if nfs else ()), *evidence_rows(*rows)),
    )


def _workers(loading: _Loading, *, on_gpu: bool) -> Finding | None:
    """The samples cost CPU time: more workers, where there are cores for them."""
    workers = loading.workers
    if workers is None:
        return None
    missing = () if loading.is_computing is not None else ("CPU use of the loader",)
    # One more worker needs a core. Without workers the main thread's own core is free in the time
    # in which it made batches.
    needed = FREE_CORES * CORES_FULL_RATIO * (loading.wait_share if workers == 0 else 1.0)
    free = needed if loading.free_cores is None else loading.free_cores
    # Twice as many, four at first, no more than there are cores for.
    wanted = 2 * workers or 4
    room = wanted if loading.free_cores is None else workers + max(int(loading.free_cores), 1)
    strangers, more = loading.strangers_cores, min(wanted, room)
    less = loading.less + "; transforms on the GPU" * on_gpu
    ways = (  # the first that is true
        (free < needed <= free + strangers and strangers >= 0.05,
         "cores_full", "and the cores are full",
         f"do less per sample ({less}); more workers would share the cores with training and with "
         f"other processes ({strangers:.1f} cores): haiprof try-loader measures what they gain"),
        (free < needed, "cores_full", "and the cores are full",
         f"more workers would not help: do less per sample ({less}), or take more cores"),
        (workers == 0 and loading.wait_share < PROBLEM_RATIO,
         "no_workers", "made on the training thread",
         "do less per sample, or take a whole batch at once (Dataset.__getitems__); workers would "
         "take time to hand a batch over, too: what they gain is measured by haiprof try-loader"),
        (workers == 0, "no_workers", "made on the training thread",
         f"load batches in worker processes: DataLoader(..., num_workers={more}, "
         f"persistent_workers=True); {_TRIED}; or do less per sample: {loading.less}"),
        (True, "few_workers", f"{workers} {'worker is' if workers == 1 else 'workers are'} too few",
         f"give the DataLoader more workers (num_workers={more}; {_TRIED}), or do less per sample: "
         f"{loading.less}"),
    )  # fmt: skip
    slug, title, remedy = next(way for is_so, *way in ways if is_so)
    return Finding(
        rule=slug, title=title, remedy=remedy, evidence=loading.evidence,
        missing=missing if loading.free_cores is not None else (*missing, "cores that are free"),
    )  # fmt: skip
