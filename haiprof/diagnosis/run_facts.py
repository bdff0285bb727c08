"""Facts beside the ledger: the rules in order, and those on a run's start, hangs and placement."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis import memory_facts, settings_facts, window_facts
from haiprof.diagnosis.machine_causes import numa_placement
from haiprof.diagnosis.rule_inputs import RuleInputs, median, usual_share
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    DATALOADER_WARNING_RATIO,
    GPU_IDLE_RATIO,
)
from haiprof.diagnosis.verdict import Abstention, Finding, Judgement, evidence_rows
from haiprof.run_analysis.reactions import Reaction

CPU_FULL_CORES = 0.9
"""One Python thread at its limit, as its launches are serial."""
FIRST_BATCH_RATIO = 0.10
"""Of the recorded training time: TraceML's 10 % for waiting for input."""


def standstill(inputs: RuleInputs) -> Judgement:
    """The job hung, and a snapshot names the rank that blocked it.

    Where the job was saving, or collectives went on, it did not stand still.
    """
    hangs = [r for r in inputs.reactions if r.trigger == "hang" and r.suspects]
    if not hangs:
        return None
    hang = hangs[-1]
    suspect = hang.suspects[0]
    ends = inputs.steps["start_ns"] + inputs.steps["step_ns"]
    resumed_ns = ends.filter(ends > hang.wall_ns).min()
    rows: list[tuple[str, float | None, str]] = [
        ("no step for, when noticed", hang.silent_ns, "ns")
    ]
    if hang.step is not None:
        rows.append(("last step", float(hang.step), "count"))
    if isinstance(resumed_ns, int):
        rows.append(("until the next step ended", float(resumed_ns - hang.since_wall_ns), "ns"))
    return Finding(
        rule="standstill",
        severity="warning" if resumed_ns is not None or not suspect.certain else "critical",
        title=f"the job hung: {_held_up_by(hang)}",
        evidence=evidence_rows(*rows),
        remedy=_to_resume(suspect.reason, suspect.doing, hang.path),
        confidence=0.9 if suspect.certain else 0.5,
        missing=() if suspect.certain else ("whether the other ranks waited for this one",),
        rank=None if hang.contradiction else suspect.rank,
    )


def _held_up_by(hang: Reaction) -> str:
    if hang.contradiction is not None:
        return "ranks issued collectives that contradict each other"
    first, others = hang.suspects[0], len(hang.suspects) - 1
    verb = "held the job up" if first.certain else "did something different from the other ranks"
    more = f", and {others} more" if others else ""
    return f"rank {first.rank} {verb}{more}" + (f": {first.doing}" if first.doing else "")


def _to_resume(reason: str, doing: str, path: str | None) -> str:
    see = f" (all ranks' stacks: {path})" if path else ""
    if "stopped by a signal" in reason:
        return f"find out who stopped the process: kill -CONT lets it go on{see}"
    if reason.endswith("differs)"):
        return f"let all ranks issue the same collectives in the same order: {reason}{see}"
    where = f"see why it stays at {doing}" if doing else "see what it does instead"
    return f"{where}: {reason}{see}"


def first_batch(inputs: RuleInputs) -> Judgement:
    """Training starts late: the first batch takes long.

    The first wait for the loader is a tenth of the time in training steps. Beside others that take
    the cores it lasts as much longer as all else: what would be less than a tenth without that wait
    is theirs.
    """
    waits = inputs.first_steps.select("rank", ns="dataloader_host_ns").drop_nulls()
    if waits.is_empty():
        return Abstention(rule="first_batch", why="no torch DataLoader ran in a training step")
    if inputs.steps.height < CRITICAL_MIN_STEPS:
        return Abstention(rule="first_batch", why=f"fewer than {CRITICAL_MIN_STEPS} steps")
    rank, first = waits.sort(-pl.col("ns"), "rank").row(0)
    share = first / max(inputs.training_ns, 1.0)
    if share < FIRST_BATCH_RATIO:
        return None
    alone = share * (1.0 - inputs.core_waits.get(rank, 0.0))
    return Finding(
        rule="first_batch",
        cause="cores_full" if alone < FIRST_BATCH_RATIO else None,
        title=f"the first batch took {duration_text(first)}, {ratio_text(share)} of the time "
        "recorded",
        evidence=evidence_rows(
            (f"first batch, rank {rank}", float(first), "ns"),
            ("typical wait for a batch", median(inputs.steps["dataloader_host_ns"]), "ns"),
            ("training steps, all", inputs.training_ns, "ns"),
        ),
        remedy="look at what happens once: files that are opened or listed in the dataset's "
        "__init__ or in the first __getitem__ of each worker, a shuffle buffer that fills, "
        "spawned workers that import the whole script; cache the list of files",
        confidence=0.8,
        lost_ratio=share,
        severity="info",
        missing=("whether the run goes on: of a long one it is a small part",),
    )


def gpu_waits_for_host(inputs: RuleInputs) -> Judgement:
    """The GPU is idle because one Python thread cannot launch work fast enough."""
    if not inputs.gpu_use:
        return Abstention(rule="gpu_waits_for_host", why="no GPU utilization of a rank")
    both = sorted(set(inputs.gpu_use) & set(inputs.main_cores))
    if not both:
        return Abstention(rule="gpu_waits_for_host", why="no CPU use of a rank with a GPU")
    rank = min(both, key=lambda r: inputs.gpu_use[r])
    gpu, cores = inputs.gpu_use[rank], inputs.main_cores[rank]
    loader = usual_share(inputs, "dataloader") or 0.0
    if gpu >= GPU_IDLE_RATIO or cores < CPU_FULL_CORES or loader >= DATALOADER_WARNING_RATIO:
        return None
    return Finding(
        rule="gpu_waits_for_host",
        title=f"the GPU waits for the host: used {ratio_text(gpu)}, while the process fills "
        f"{cores:.1f} cores",
        evidence=evidence_rows(
            ("GPU utilization", gpu, "ratio"),
            ("CPU cores used by the process", cores, "cores"),
            ("waiting for batches, share of the step", loader, "ratio"),
        ),
        remedy="launch fewer and larger kernels: torch.compile (mode='reduce-overhead'), fused "
        "optimizers, larger batches; remove .item() and print of tensors from the loop",
        confidence=0.7,
        missing=("which Python code runs meanwhile",),
        rank=rank,
    )


RULES: tuple[Callable[[RuleInputs], Judgement], ...] = (
    standstill, first_batch, gpu_waits_for_host,
    memory_facts.memory_creep, memory_facts.memory_pressure, memory_facts.gpu_memory_limit,
    memory_facts.allocator_retries, numa_placement,
    settings_facts.anomaly_detection, settings_facts.profiler_left_on,
    settings_facts.costly_switches, settings_facts.double_precision,
    settings_facts.deterministic_mode, settings_facts.mkldnn_off, settings_facts.optimizer_loop,
    settings_facts.ddp_arguments, settings_facts.fsdp_units, settings_facts.fast_paths_off,
    settings_facts.half_precision, settings_facts.threads_over_cores,
    settings_facts.threads_under_cores, settings_facts.settings_differ,
    window_facts.slow_kernels, window_facts.slow_link,
)  # fmt: skip
"""In the order in which they are asked; the name of each is its slug in documents."""
