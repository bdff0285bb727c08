"""Why training waits for batches: epochs, single slow samples, storage, workers, cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.intervals import Floats
from haiprof.base.medians import lower_median
from haiprof.diagnosis.core_contention import hosts_of, used_by_others
from haiprof.diagnosis.finding import Evidence
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    BURST_MAIN_RATIO,
    BURST_RARE_RATIO,
    BURST_UNUSUAL_RATIO,
    CORES_FULL_RATIO,
    EPOCH_MAIN_RATIO,
    FREE_CORES,
    LOADER_IDLE_RATIO,
)

COMPUTED_BATCHES = ("dataloader_bound/few_workers", "dataloader_bound/cores_full")
"""What missing cores would bring about. A loader that waits for storage needs none, and one on the
training thread gets slower by as much as training itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCause:
    """One reason, in words."""

    slug: str
    title: str
    remedy: str
    evidence: tuple[Evidence, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loading:
    """What is known of the loading of one rank."""

    workers: int | None
    wait_share: float
    main_cores: float | None
    worker_cores: float | None
    core_wait: float
    """Share of time in which the main thread could run and got no core; 0 where not known."""
    free_cores: float | None
    """Of those that the rank may use; None where that is not known."""

    @property
    def is_computing(self) -> bool | None:
        """Whether whoever makes the batches uses the CPU for it; None where that is not known.

        Or would use it, if he got it: of the time in which they could run, workers are taken to
        wait for a core as much as the main thread does.
        """
        if self.workers == 0 and self.main_cores is not None:
            computed = self.main_cores + self.core_wait - (1 - self.wait_share)
            return computed >= LOADER_IDLE_RATIO * self.wait_share
        if self.workers and self.worker_cores is not None:
            could_run = (self.main_cores or 0.0) + self.core_wait
            got = 1 - self.core_wait / could_run if could_run else 1.0
            wanted = self.worker_cores / max(got, 0.1)
            return wanted >= LOADER_IDLE_RATIO * self.wait_share * self.workers
        return None


def loader_cause(inputs: RuleInputs, share: float) -> LoaderCause | None:
    """The reason that the numbers show; None where nothing tells one."""
    loading = _of_typical_rank(inputs, share)
    return (
        _epochs(inputs, loading)
        or _rare_samples(inputs, loading)
        or _storage(inputs, loading)
        or _workers(loading, on_gpu=inputs.uses_gpu)
    )


def _of_typical_rank(inputs: RuleInputs, share: float) -> _Loading:
    """The rank that waits as long as the typical one: the lower middle."""
    means = {rank: _mean_wait(inputs, rank) for rank in inputs.world}
    ranks = sorted(means, key=lambda rank: (means[rank], rank))
    rank = ranks[(len(ranks) - 1) // 2]
    loader = inputs.last_attempts.loaders.get(rank)
    main, busy = inputs.main_cores.get(rank), inputs.busy_cores.get(rank)
    placed = inputs.placements.get(rank)
    allowed = len(placed.allowed_cpus or ()) if placed is not None else 0
    beside = (r for r in inputs.busy_cores if r != rank and _share(inputs, r, rank))
    hosts = hosts_of(inputs)
    strangers = used_by_others(inputs, hosts[rank], hosts) if rank in hosts else None
    others = sum(inputs.busy_cores[r] for r in beside) + (strangers or 0.0)
    return _Loading(
        workers=None if loader is None else loader.workers,
        wait_share=share,
        main_cores=main,
        core_wait=inputs.core_waits.get(rank, 0.0),
        worker_cores=None if main is None or busy is None else max(busy - main, 0.0),
        free_cores=max(allowed - busy - others, 0.0) if allowed and busy is not None else None,
    )


def _share(inputs: RuleInputs, one: int, other: int) -> bool:
    """Whether two ranks may run on the same cores."""
    first, second = inputs.placements.get(one), inputs.placements.get(other)
    if first is None or second is None or first.host != second.host:
        return False
    return bool((first.allowed_cpus or frozenset()) & (second.allowed_cpus or frozenset()))


def _mean_wait(inputs: RuleInputs, rank: int) -> float:
    value = inputs.of_rank(rank)["dataloader_host_ns"].mean()
    return float(value) if isinstance(value, (int, float)) else 0.0


def _epochs(inputs: RuleInputs, loading: _Loading) -> LoaderCause | None:
    """Most of the waiting is at the edges of epochs."""
    names = ("epoch_count", "epoch_ns", "wait_ns")
    count, edge, wait = (int(inputs.loading[name].sum()) for name in names)
    if not count or edge < EPOCH_MAIN_RATIO * wait:
        return None
    workers = bool(loading.workers)
    return LoaderCause(
        slug="epoch_restart",
        title="most of it where an epoch begins",
        remedy=(
            "keep the workers alive between epochs: DataLoader(..., persistent_workers=True); or "
            "make epochs longer (a sampler that repeats)"
            if workers
            else "look at what DataLoader.__iter__ does: the sampler's shuffle, files that the "
            "dataset opens again; make epochs longer (a sampler that repeats)"
        ),
        evidence=(
            Evidence(name="starts of epochs", value=float(count), unit="count"),
            Evidence(name="time at one: first batch too", value=edge / count, unit="ns"),
            Evidence(name="share of all waiting that is there", value=edge / wait, unit="ratio"),
        ),
    )  # fmt: skip


def _rare_samples(inputs: RuleInputs, loading: _Loading) -> LoaderCause | None:
    """Few steps hold most of the waiting: fewer than bursts of so many workers would give.

    What each step waits as usual, the median, is left out: slow samples are slow beside others.
    """
    if loading.workers is None:
        return None
    rare = [_rare_share(inputs.of_rank(r)["dataloader_host_ns"].to_numpy()) for r in inputs.world]
    typical = lower_median(rare)
    if typical >= BURST_RARE_RATIO / max(loading.workers, 1):
        return None
    return LoaderCause(
        slug="slow_samples",
        title="most of it for a few slow samples",
        remedy="find the samples that are slow (large or remote files, retries, outliers in "
        "length): time dataset[i] for each i; prepare them ahead, or read further ahead "
        "(prefetch_factor)",
        evidence=(
            Evidence(name="steps with 80 % of the unusual waiting", value=typical, unit="ratio"),
            Evidence(name="workers", value=float(loading.workers), unit="count"),
        ),
    )


def _rare_share(waits: Floats) -> float:
    """Share of the steps with 80 % of the waiting beyond the median; 1 where that is little."""
    excess = np.maximum(waits - np.median(waits), 0.0) if len(waits) else np.zeros(0)
    if excess.sum() <= BURST_UNUSUAL_RATIO * waits.sum():
        return 1.0
    ordered = np.sort(excess)[::-1]
    reached = np.cumsum(ordered) >= BURST_MAIN_RATIO * ordered.sum()
    return float((int(reached.argmax()) + 1) / len(ordered))


def _storage(inputs: RuleInputs, loading: _Loading) -> LoaderCause | None:
    """Whoever makes the batches waits himself: for storage, a network, or a lock."""
    if loading.is_computing is not False:
        return None
    many = "more workers wait in parallel (num_workers), and " if loading.workers != 0 else (
        "let workers wait in parallel, ahead of training (num_workers=4 and up), and "
    )  # fmt: skip
    return LoaderCause(
        slug="storage",
        title="and the loader itself waits: storage, network, or a lock",
        remedy=f"{many}read less often and more at once: larger files (tar, parquet, memory maps), "
        "a local copy of the data set, no request per sample",
        evidence=(*_cpu(loading), *_traffic(inputs)),
    )


def _workers(loading: _Loading, *, on_gpu: bool) -> LoaderCause | None:
    """The samples cost CPU time: more workers, where there are cores for them."""
    if loading.workers is None:
        return None
    evidence = _cpu(loading)
    missing = () if loading.is_computing is not None else ("CPU use of the loader",)
    if loading.free_cores is not None and loading.free_cores < FREE_CORES * _cores_per_worker(
        loading
    ):
        return LoaderCause(
            slug="cores_full",
            title="and the cores are full",
            remedy="more workers would not help: do less per sample (decode and tokenize once, "
            f"ahead of training; cheaper augmentation{'; transforms on the GPU' * on_gpu}), or "
            "take more cores",
            evidence=evidence,
            missing=missing,
        )
    none = loading.workers == 0
    return LoaderCause(
        slug="no_workers" if none else "few_workers",
        title="made on the training thread" if none
        else f"{loading.workers} {'worker is' if loading.workers == 1 else 'workers are'} too few",
        remedy="make batches beside training: DataLoader(..., num_workers=4, "
        "persistent_workers=True); or do less per sample"
        if none
        else f"give the DataLoader more workers (num_workers={2 * loading.workers}), or do less "
        "per sample: decode and tokenize once, ahead of training",
        evidence=evidence,
        missing=missing if loading.free_cores is not None else (*missing, "cores that are free"),
    )  # fmt: skip


def _cores_per_worker(loading: _Loading) -> float:
    """Cores that one more worker needs: all of one, unless training leaves its own while it waits.

    Without workers the main thread's own core is free in the time in which it made batches.
    """
    if loading.workers == 0:
        return min(1.0, loading.wait_share) * CORES_FULL_RATIO
    return CORES_FULL_RATIO


def _cpu(loading: _Loading) -> tuple[Evidence, ...]:
    return (
        Evidence(
            name="workers", value=None if loading.workers is None else float(loading.workers),
            unit="count",
        ),
        Evidence(name="cores used by the training process", value=loading.main_cores, unit="cores"),
        Evidence(name="cores used by its workers", value=loading.worker_cores, unit="cores"),
        Evidence(name="cores left free", value=loading.free_cores, unit="cores"),
    )  # fmt: skip


def _traffic(inputs: RuleInputs) -> tuple[Evidence, ...]:
    """What was read in the meantime."""
    called, stored = (
        inputs.counted.of(name) for name in ("read_bytes_per_s", "storage_read_bytes_per_s")
    )
    return tuple(
        Evidence(name=name, value=sum(values.values()), unit="bytes/s")
        for name, values in (
            ("read by calls, all ranks", called), ("read from storage, all ranks", stored)
        )
        if values
    )  # fmt: skip
