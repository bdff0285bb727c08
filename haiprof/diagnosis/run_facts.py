"""Facts beside the ledger: the rules in order, those on start and hangs, and on slow GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.units import duration_text, rate_text, ratio_text
from haiprof.diagnosis import memory_facts, settings_facts
from haiprof.diagnosis.gpu_functions import (
    ABNORMAL,
    RANKS,
    SLOW,
    communication_report,
    gpu_compute_report,
    memory_report,
)
from haiprof.diagnosis.machine_causes import numa_placement
from haiprof.diagnosis.rule_inputs import Rule, RuleInputs, median
from haiprof.diagnosis.thresholds import CRITICAL_MIN_STEPS, FAR_MIN_RANKS
from haiprof.diagnosis.verdict import Finding, evidence_rows
from haiprof.run_analysis.reactions import Reaction

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns


_NO_GRIDS = "whether it got larger inputs: kernels' grids are not in the traces"


def _over_ranks(judge: Callable[[Patterns], Finding | None]) -> Rule:
    """A rule of a function on traces of GPUs, of as many ranks as it takes to call one slow."""

    @wraps(judge)
    def find(inputs: RuleInputs) -> Finding | str | None:
        patterns = inputs.traces.of_gpus()
        if isinstance(patterns, str):
            return patterns
        count = int(patterns.totals["has_gpu"].sum())
        few = f"GPU traces of {count} ranks; it takes {FAR_MIN_RANKS}"
        return few if count < FAR_MIN_RANKS else judge(patterns)

    return find


@_over_ranks
def slow_kernels(patterns: Patterns) -> Finding | None:
    """One rank's GPU takes longer for the same kernels."""
    report = gpu_compute_report(patterns)
    slow = report.tables[RANKS].filter(pl.col("is_slow")).sort("pace_ratio", descending=True)
    if slow.is_empty():
        return None
    rank, pace, window = slow.select("rank", "pace_ratio", "window_ns").row(0)
    own = report.tables[ABNORMAL].filter(pl.col("rank") == rank)
    excess = int(own["excess_ns"].sum())
    # Grids tell larger inputs from a slow GPU: ranks with those are not called slow.
    has_grids = patterns.functions["median_block_count"].count() > 0
    return Finding(
        title=f"rank {rank} computes slowly: its kernels take {pace:.2f} times the others' time",
        evidence=evidence_rows(
            ("time of its kernels by the others' time", pace, ""),
            ("kernels that are slow there", own.height, "count"),
            ("what that costs", excess, "ns"),
            ("the same, share of the window", excess / window, "ratio"),
        ),
        remedy=f"look at the GPU of rank {rank}: clock, power cap, temperature, throttling "
        "(`haiprof verdict rank RUN RANK`), other processes on it; else use another GPU",
        confidence=0.8,
        missing=() if has_grids else (_NO_GRIDS,),
        rank=rank,
        scope="window",
    )


@_over_ranks
def slow_link(patterns: Patterns) -> Finding | None:
    """One rank's transfers are slower than the others': its link, or its bus to the host."""
    rates = ("bandwidth_bytes_per_s", "others_bandwidth_bytes_per_s")
    talk = communication_report(patterns).tables[ABNORMAL]
    copies = memory_report(patterns).tables[ABNORMAL].filter(pl.col("why") == SLOW)
    copies = copies.drop_nulls(rates)
    if talk.is_empty() and copies.is_empty():
        return None
    found, what = (talk, "type") if len(talk) else (copies, "name")
    rank, name, own, usual, share = found.select("rank", what, *rates, "bottleneck_ratio").row(0)
    return Finding(
        title=f"rank {rank} transfers slowly: {name} at {rate_text(own)}, elsewhere "
        f"{rate_text(usual)}",
        evidence=evidence_rows(
            (f"bandwidth of rank {rank}", own, "bytes/s"),
            ("the ranks' median", usual, "bytes/s"),
            ("its transfers, share of the window", share, "ratio"),
        ),
        remedy="check the rank's links: nvidia-smi nvlink -s, PCIe width, the port's error "
        "counters (`haiprof verdict overview` shows them), and who else uses them"
        if len(talk)
        else "check the rank's PCIe generation and width (nvidia-smi -q -d PERFORMANCE), and that "
        "its process runs on the NUMA node of its GPU",
        confidence=0.7,
        missing=("which link: NVLink, PCIe or network",) if len(talk) else (),
        rank=rank,
        scope="window",
    )


def loss_not_finite(inputs: RuleInputs) -> Finding | str | None:
    """The loss that the job printed became NaN or infinite: what it trains from then on is lost."""
    if not inputs.output.file_count:
        return "the job prints into no file"
    found = next((line for line in inputs.output.lines if line.kind == "loss"), None)
    if found is None:
        return None
    at = "" if found.step is None else f" at step {found.step}"
    later = inputs.steps.filter(pl.col("start_ns") > found.wall_ns)
    return Finding(
        title=f"the loss that {found.who} printed was no finite number{at}: {found.text}",
        evidence=evidence_rows(("steps since it was read", float(later.height), "count")),
        remedy="start again from a checkpoint before that step: a lower learning rate, clipped "
        "gradients, bfloat16 in place of float16; torch.autograd.set_detect_anomaly(True) names "
        "the operator, and is slow",
        confidence=0.9 if found.rank is not None else 0.8,
        missing=("which rank printed it",) if found.rank is None else (),
        rank=found.rank,
    )


FIRST_BATCH_RATIO = 0.10
"""Of the recorded training time: TraceML's 10 % for waiting for input."""


def standstill(inputs: RuleInputs) -> Finding | str | None:
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


def first_batch(inputs: RuleInputs) -> Finding | str | None:
    """Training starts late: the first batch takes long.

    The first wait for the loader is a tenth of the time in training steps. Beside others that take
    the cores it lasts as much longer as all else: what would be less than a tenth without that wait
    is theirs.
    """
    waits = inputs.first_steps.select("rank", ns="dataloader_host_ns").drop_nulls()
    if waits.is_empty():
        return "no torch DataLoader ran in a training step"
    if inputs.steps.height < CRITICAL_MIN_STEPS:
        return f"fewer than {CRITICAL_MIN_STEPS} steps"
    rank, first = waits.sort(-pl.col("ns"), "rank").row(0)
    share = first / max(inputs.training_ns, 1.0)
    if share < FIRST_BATCH_RATIO:
        return None
    alone = share * (1.0 - inputs.core_waits.get(rank, 0.0))
    return Finding(
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


RULES: tuple[Rule, ...] = (
    standstill, first_batch, memory_facts.memory_creep, memory_facts.memory_pressure,
    memory_facts.gpu_memory_limit, memory_facts.allocator_retries, numa_placement,
    settings_facts.anomaly_detection, settings_facts.profiler_left_on,
    settings_facts.costly_switches, settings_facts.double_precision,
    settings_facts.deterministic_mode, settings_facts.mkldnn_off, settings_facts.optimizer_loop,
    settings_facts.ddp_arguments, settings_facts.fsdp_units, settings_facts.fast_paths_off,
    settings_facts.half_precision, settings_facts.threads_over_cores,
    settings_facts.threads_under_cores, settings_facts.settings_differ, loss_not_finite,
    slow_kernels, slow_link,
)  # fmt: skip
"""In the order in which they are asked; the name of each is its slug in documents."""
