"""Facts beside the ledger: the rules in order; those on memory, start, hangs and slow GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats, total
from haiprof.base.ledger import PROBLEM_RATIO
from haiprof.base.statistics import growth_p_value
from haiprof.base.units import (
    NS_PER_S,
    bytes_text,
    duration_text,
    number_text,
    rate_text,
    ratio_text,
)
from haiprof.diagnosis import gpu_functions, settings_facts
from haiprof.diagnosis.explanations import RECOMPILES_REMEDY
from haiprof.diagnosis.gpu_functions import ABNORMAL, RANKS, SLOW
from haiprof.diagnosis.machine_causes import numa_placement, page_faults
from haiprof.diagnosis.rule_inputs import Rule, RuleInputs
from haiprof.diagnosis.thresholds import CRITICAL_MIN_STEPS, FAR_MIN_RANKS
from haiprof.diagnosis.verdict import Finding, make_finding
from haiprof.run_analysis.gpu_memory import LEAK_REMEDY, GpuMemorySeries, growth_per_step
from haiprof.run_analysis.process_ends import caught_failures
from haiprof.run_analysis.ranks import compile_intervals
from haiprof.run_analysis.reactions import Reaction
from haiprof.run_analysis.run_files import integer, number

if TYPE_CHECKING:
    from haiprof.trace_analysis.function_patterns import Patterns


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
    report = gpu_functions.gpu_compute_report(patterns)
    slow = report.tables[RANKS].filter(pl.col("is_slow")).sort("pace_ratio", descending=True)
    if slow.is_empty():
        return None
    rank, pace, window = slow.select("rank", "pace_ratio", "window_ns").row(0)
    own = report.tables[ABNORMAL].filter(pl.col("rank") == rank)
    excess = int(own["excess_ns"].sum())
    # Grids tell larger inputs from a slow GPU: ranks with those are not called slow.
    has_grids = patterns.functions["median_block_count"].count() > 0
    return make_finding(
        f"rank {rank} computes slowly: its kernels take {pace:.2f} times the others' time",
        f"look at the GPU of rank {rank}: clock, power cap, temperature, throttling "
        "(`haiprof verdict rank RUN RANK`), other processes on it; else use another GPU",
        ("time of its kernels by the others' time", pace, ""),
        ("kernels that are slow there", own.height, "count"), ("what that costs", excess, "ns"),
        ("the same, share of the window", excess / window, "ratio"), confidence=0.8,
        missing=()
        if has_grids
        else ("whether it got larger inputs: kernels' grids are not in the traces",),
        rank=rank, scope="window",
    )  # fmt: skip


@_over_ranks
def slow_link(patterns: Patterns) -> Finding | None:
    """One rank's transfers are slower than the others': its link, or its bus to the host."""
    rates = ("bandwidth_bytes_per_s", "others_bandwidth_bytes_per_s")
    talk = gpu_functions.communication_report(patterns).tables[ABNORMAL]
    copies = gpu_functions.memory_report(patterns).tables[ABNORMAL].filter(pl.col("why") == SLOW)
    copies = copies.drop_nulls(rates)
    if talk.is_empty() and copies.is_empty():
        return None
    found, what = (talk, "type") if len(talk) else (copies, "name")
    rank, name, own, usual, share = found.select("rank", what, *rates, "bottleneck_ratio").row(0)
    return make_finding(
        f"rank {rank} transfers slowly: {name} at {rate_text(own)}, elsewhere {rate_text(usual)}",
        "check the rank's links: nvidia-smi nvlink -s, PCIe width, the port's error "
        "counters (`haiprof verdict overview` shows them), and who else uses them"
        if len(talk)
        else "check the rank's PCIe generation and width (nvidia-smi -q -d PERFORMANCE), and that "
        "its process runs on the NUMA node of its GPU",
        (f"bandwidth of rank {rank}", own, "bytes/s"), ("the ranks' median", usual, "bytes/s"),
        ("its transfers, share of the window", share, "ratio"), confidence=0.7,
        missing=("which link: NVLink, PCIe or network",) if len(talk) else (), rank=rank,
        scope="window",
    )  # fmt: skip


def loss_not_finite(inputs: RuleInputs) -> Finding | str | None:
    """The loss that the job printed became NaN or infinite: what it trains from then on is lost."""
    if not inputs.output.file_count:
        return "the job prints into no file"
    found = next((line for line in inputs.output.lines if line.kind == "loss"), None)
    if found is None:
        return None
    at = "" if found.step is None else f" at step {found.step}"
    later = inputs.steps.filter(pl.col("start_ns") > found.wall_ns)
    return make_finding(
        f"the loss that {found.who} printed was no finite number{at}: {found.text}",
        "start again from a checkpoint before that step: a lower learning rate, clipped "
        "gradients, bfloat16 in place of float16; torch.autograd.set_detect_anomaly(True) names "
        "the operator, and is slow",
        ("steps since it was read", float(later.height), "count"),
        confidence=0.9 if found.rank is not None else 0.8,
        missing=("which rank printed it",) if found.rank is None else (),
        rank=found.rank,
    )


FIRST_BATCH_RATIO = 0.10  # Of the recorded training time: TraceML's 10 % for waiting for input


def standstill(inputs: RuleInputs) -> Finding | str | None:
    """The job hung, and a snapshot names the rank that blocked it."""
    # Where the job was saving, or collectives went on, it did not stand still.
    hangs = [r for r in inputs.reactions if r.trigger == "hang" and r.suspects]
    if not hangs:
        return None
    hang = hangs[-1]
    suspect, step = hang.suspects[0], hang.step
    ends = inputs.steps["start_ns"] + inputs.steps["step_ns"]
    resumed_ns = integer(ends.filter(ends > hang.wall_ns).min())
    until = None if resumed_ns is None else float(resumed_ns - hang.since_wall_ns)
    return make_finding(
        f"the job hung: {_held_up_by(hang)}",
        _to_resume(suspect.reason, suspect.doing, hang.path),
        ("without a step, when noticed", hang.silent_ns, "ns"),
        *([] if step is None else [("last step", float(step), "count")]),
        *([] if until is None else [("until the next step ended", until, "ns")]),
        severity="warning" if resumed_ns is not None or not suspect.certain else "critical",
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
    """Training starts late: the first batch takes long."""
    # The first wait for the loader is a tenth of the time in training steps. Beside others that
    # take the cores it lasts as much longer as all else: what would be less than a tenth without
    # that wait is theirs.
    waits = inputs.first_steps.select("rank", ns="dataloader_host_ns").drop_nulls()
    if waits.is_empty():
        return "no torch DataLoader ran in a training step"
    if inputs.steps.height < CRITICAL_MIN_STEPS:
        return f"fewer than {CRITICAL_MIN_STEPS} steps"
    rank, first = waits.sort(-pl.col("ns"), "rank").row(0)
    trained_ns = max(inputs.trained_ns.values(), default=0.0)
    share = first / max(trained_ns, 1.0)
    if share < FIRST_BATCH_RATIO:
        return None
    alone = share * (1.0 - inputs.core_waits.get(rank, 0.0))
    return make_finding(
        f"the first batch took {duration_text(first)}, {ratio_text(share)} of the time recorded",
        "look at what happens once: files that are opened or listed in the dataset's "
        "__init__ or in the first __getitem__ of each worker, a shuffle buffer that fills, "
        "spawned workers that import the whole script; cache the list of files",
        (f"first batch, rank {rank}", float(first), "ns"),
        ("typical wait for a batch", number(inputs.steps["dataloader_host_ns"].median()), "ns"),
        ("training steps, all", trained_ns, "ns"),
        cause="cores_full" if alone < FIRST_BATCH_RATIO else None, confidence=0.8, lost_ratio=share,
        severity="info", missing=("whether the run goes on: of a long one it is a small part",),
    )  # fmt: skip


def compilation(inputs: RuleInputs) -> Finding | None:
    """torch.compile takes a considerable part of the run's time."""
    # Most of it lies in steps that are not judged, the first ones: the ledger of steps lacks it.
    found = {r: compile_intervals(files) for r, files in inputs.analyzer.judged_files().items()}
    rank = max(found, key=lambda each: total(found[each]), default=None)
    if rank is None or not len(found[rank].starts):
        return None
    wall_time = inputs.analyzer.goodput()
    own_ns = wall_time.accounts.get("compile", 0)
    if not own_ns or own_ns < PROBLEM_RATIO * wall_time.wall_ns:
        return None
    starts, ends = found[rank].starts, found[rank].ends
    first = inputs.first_steps.filter(pl.col("rank") == rank)
    began_ns = first.select(pl.col("start_ns") + pl.col("step_ns")).max().item()
    later = starts >= (ends.max() if began_ns is None else began_ns)
    # An evaluation compiles a graph of its own.
    evaluated_ns = inputs.ranks.filter(pl.col("rank") == rank)["eval_compile_ns"].sum()
    later_ns = int((ends - starts)[later].sum()) - evaluated_ns
    again = f", {later.sum()} of them after the first step" if later.any() else ""
    is_again = later_ns >= PROBLEM_RATIO * wall_time.wall_ns
    return make_finding(
        f"torch.compile took {duration_text(own_ns)}, "
        f"{ratio_text(own_ns / wall_time.wall_ns)} of the run: compilations: {len(starts)}{again}",
        RECOMPILES_REMEDY
        if is_again
        else "keep Inductor's cache (TORCHINDUCTOR_CACHE_DIR) "
        "from run to run, or compile the block that the model repeats in place of the whole model",
        ("the run", float(wall_time.wall_ns), "ns"),
        (f"compilations after the first step, rank {rank}", float(later_ns), "ns"),
        severity="warning" if is_again else "info",
        missing=("whether the run goes on: of a long one it is a small part",),
        rank=rank if len(inputs.world) > 1 else None,
    )


TREND_P_VALUE = 0.01  # Mann-Kendall, one-sided: a conventional level
TREND_MIN_POINTS = 8  # Kendall's normal approximation is good from 8 points on (Kendall 1975)
CREEP_RATIO = 0.10
"""Growth of memory, of what it was at first: less could be a cache that fills. Own choice."""
CREEP_MIN_STEPS = 50
"""Before so many steps what a job keeps by design may still fill: an optimizer's history (100
updates of L-BFGS), caches of samples. Own choice."""
CREEP_LAST_RATIO = 0.20
"""The last third must hold this share of the growth, where steady growth gives a third: what fills
and stays is no leak. Own choice."""
PRESSURE_RATIO = 0.10
"""Time in which some task waited for memory (Linux Documentation/accounting/psi.rst). oomd's
documented default for killing is 60 % (systemd oomd.conf, DefaultMemoryPressureLimit); a tenth of
the time is TraceML's share for a warning."""
AVAILABLE_RATIO = 0.10
"""Free memory below which earlyoom begins to act by default (its README, -m 10)."""
GPU_MEMORY_FULL_RATIO = 0.95
"""Peak of what is allocated, of what the process may take: the rest is what fragments and what
libraries take beside the allocator. Own choice."""
ALLOCATOR_RETRY_MIN_COUNT = 2
"""One retry may be the first large batch; more are a state. Own choice."""

_SOON_NS, _FAR = 24 * 3600 * NS_PER_S, 60
"""A limit that is so near is said in the title, and no farther than so many times what was seen."""
_ENDS_NS = 3600 * NS_PER_S
_WARM_NS = 15 * NS_PER_S  # Of steps: in less a job may still load what it keeps. Own choice.
_CARRIED_ON = 10
"""With a limit so near the job is about to end: no loss of time is graver, where the growth was
seen for a tenth of that time at least."""
_HOST, _GPU = "memory_rss_bytes", "memory_used_bytes"
KEPT_REMEDY = (
    "look for what is kept from each step: losses added up without .item() or .detach() (they "
    "hold the whole graph), lists of outputs or metrics, a dataset that caches samples in each "
    "worker (copy on write); where the job keeps nothing, the C library keeps what was freed: "
    "MALLOC_ARENA_MAX=1 shows it"
)
_GROWN = {_HOST: ("host memory", KEPT_REMEDY), _GPU: ("GPU memory", LEAK_REMEDY)}
_NO_LINE = "which line keeps it: two snapshots of tracemalloc, some hundred steps apart, would say"
_SHORT = "whether it goes on: the run was short"
_SIZE_LOOKS = 6  # Other sizes of inputs in a row: what a trend can be told of
_NO_ALLOCATOR = "no counts of a GPU's allocator"


def memory_creep(inputs: RuleInputs) -> Finding | str | None:
    """Memory grows for as long as the job trains."""
    # It grows by a tenth, beyond chance, and still does at the end. No line of code is named:
    # stacks are sampled by time, and keeping something takes none; only tracemalloc would say who
    # allocated what stays, and it makes Python code slower by a multiple.
    if max(steps.height for steps in inputs.by_rank.values()) < CREEP_MIN_STEPS:
        return f"fewer than {CREEP_MIN_STEPS} steps"
    # What the allocator of a GPU counts is judged by `gpu_memory_limit`.
    counted, points = inputs.gpu_memory, inputs.counted.points
    runs = points.select(pl.struct("rank", "metric").rle().alias("run")).unnest("run")
    begins = (runs["len"].cum_sum() - runs["len"]).to_list()  # they stand one behind another
    long = [
        (of["rank"], of["metric"], *_by_step(inputs, of["rank"], points.slice(begin, length)))
        for begin, length, of in zip(begins, runs["len"], runs["value"], strict=True)
        if length >= TREND_MIN_POINTS and not (of["metric"] == _GPU and of["rank"] in counted)
    ]
    if not long:
        return f"fewer than {TREND_MIN_POINTS} samples of memory"
    grown = [each for each in long if _grows(each[3])]
    shares = [float(v[-1] - v[0]) / max(float(v[0]), 1.0) for *_, v in grown]
    if not grown:
        return None
    most = max(range(len(grown)), key=lambda place: (shares[place], -grown[place][0]))
    (rank, metric, steps, values), share = grown[most], shares[most]
    per_step = float(np.polyfit(steps, values, 1)[0])
    seen_ns, left_ns, ahead = float(inputs.by_rank[rank]["step_ns"].sum()), math.inf, ""
    ends = [death.cause for death in inputs.analyzer.deaths() if death.final]
    if metric == _HOST and "out_of_memory" not in ends:
        step_ns = seen_ns / max(inputs.by_rank[rank].height, 1)
        left_ns, ahead = _limit_ahead(inputs, rank, step_ns)
    is_sure = seen_ns >= _WARM_NS  # what a job loads at first grows, too
    is_soon = is_sure and left_ns < min(_SOON_NS, _FAR * seen_ns)
    is_near = is_sure and left_ns < min(_ENDS_NS, _CARRIED_ON * seen_ns)
    (what, remedy), keeps, setting = _GROWN[metric], "", ""
    profiler = settings_facts.profiler_left_on(inputs)
    is_on = isinstance(profiler, Finding) and profiler.rank in (None, rank)
    if isinstance(profiler, Finding) and is_on and metric == _HOST:
        keeps = ": the job's own profiler keeps what it records until it stops"
        remedy, setting = profiler.remedy, profiler.setting
    larger = _inputs_growth(inputs, rank)
    is_explained = larger is not None and larger - 1 >= share / 2
    if larger is not None and is_explained:
        keeps += f": its inputs are {number_text(larger)} times as large at the end"
        is_sure = is_soon = is_near = False
    return make_finding(
        f"{what} grows by {bytes_text(round(per_step))} per step on rank {rank}, "
        f"{ratio_text(share)} so far{keeps}" + (f"; {ahead}" if is_soon else ""),
        remedy, ("at the beginning", float(values[0]), "bytes"),
        ("at the end", float(values[-1]), "bytes"), ("growth per step", per_step, "bytes"),
        *([("until its limit, at this rate", left_ns, "ns")] if ahead else []),
        ("chance of such a trend at random (Mann-Kendall), below", TREND_P_VALUE, ""),
        ("memory counters that grow so, of all ranks", float(len(grown)), "count"),
        severity="critical" if is_near else "warning" if is_sure else "info", confidence=0.8,
        rank=rank, setting=setting,
        missing=(_NO_LINE,) if is_sure or is_explained else (_NO_LINE, _SHORT),
    )  # fmt: skip


def _by_step(inputs: RuleInputs, rank: int, rows: pl.DataFrame) -> tuple[Floats, Floats]:
    """Samples as at equal distances of steps, and these: what each step keeps grows with them."""
    # Over time, a leak looks like something that fills where steps become slower meanwhile.
    values: Floats = rows["value"].to_numpy()
    steps = np.searchsorted(inputs.by_rank[rank]["start_ns"].to_numpy(), rows["time_ns"].to_numpy())
    even: Floats = np.linspace(steps[0], steps[-1], len(steps))
    return even, np.interp(even, steps, values)


def _inputs_growth(inputs: RuleInputs, rank: int) -> float | None:
    """How many times as large a rank's inputs are in the last third of the looks."""
    sizes = inputs.input_sizes.filter(pl.col("rank") == rank)
    counts = sizes["number_count"].to_numpy()
    if len(counts) < _SIZE_LOOKS or growth_p_value(counts) >= TREND_P_VALUE:
        return None
    third = len(counts) // 3
    return float(np.median(counts[-third:]) / np.median(counts[:third]))


def _grows(values: Floats) -> bool:
    third = max(len(values) // 3, 1)
    first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
    if last - first < CREEP_RATIO * first or growth_p_value(values) >= TREND_P_VALUE:
        return False
    return bool(values[-1] - values[-third - 1] >= CREEP_LAST_RATIO * (values[-1] - values[0]))


def _limit_ahead(inputs: RuleInputs, rank: int, step_ns: float) -> tuple[float, str]:
    """When the host memory of a rank's node is used up, if its ranks grow on as they did.

    `at this rate the 47.0 GiB of its node are used up in 15 min, after about 120 more steps`; empty
    where it does not grow, or no limit is known: of the tightest control group, else of the node.
    """
    hosts = inputs.hosts
    means = inputs.counted.nodes.get(hosts.get(rank, ""), {})
    limits = [m["memory_limit_bytes"] for m in means.values() if m.get("memory_limit_bytes")]
    whose = "control group" if limits else "node"
    limits = limits or [means.get(None, {}).get("memory_total_bytes")]
    limit = min((each for each in limits if each), default=None)
    if limit is None:
        return math.inf, ""
    there = [other for other, host in hosts.items() if host == hosts.get(rank)]
    points = inputs.counted.points
    own = points.filter((pl.col("metric") == _HOST) & pl.col("rank").is_in(there)).sort("time_ns")
    first, last = pl.all().first().name.prefix("first_"), pl.all().last()
    ends = own.group_by("rank").agg(first, last)
    apart_ns = (ends["time_ns"] - ends["first_time_ns"]).clip(lower_bound=1)
    rate = float(((ends["value"] - ends["first_value"]) / apart_ns).sum())
    if rate <= 0:
        return math.inf, ""
    left_ns = max(limit - float(ends["value"].sum()), 0.0) / rate
    steps = int(float(f"{left_ns / max(step_ns, 1.0):.2g}"))
    return left_ns, (
        f"at this rate the {bytes_text(round(limit))} of its {whose} are used up in "
        f"{duration_text(left_ns)}, after about {steps:,} more steps"
    )


def memory_pressure(inputs: RuleInputs) -> Finding | str | None:
    """The node has too little memory: tasks wait for it a tenth of the time, or it swaps."""
    nodes = {host: means.get(None, {}) for host, means in inputs.counted.nodes.items()}
    signs = ("pressure_memory_some_ratio", "swap_in_bytes_per_s")
    judged = [h for h, n in nodes.items() if any(n.get(sign) is not None for sign in signs)]
    if not judged:
        return "neither memory pressure nor swapping was recorded"
    host = max(judged, key=lambda h: (nodes[h].get(signs[0]) or 0.0, h))
    names = (*signs, "memory_available_bytes", "memory_total_bytes")
    pressure, swapped, available, whole = map(nodes[host].get, names)
    free = available / whole if available is not None and whole else None
    swaps = bool(swapped) and free is not None and free < AVAILABLE_RATIO
    if (pressure or 0.0) < PRESSURE_RATIO and not swaps:
        return None
    faults = inputs.counted.of("major_page_fault_count_per_s")
    what = f"tasks wait for memory {ratio_text(pressure)} of the time" if not swaps else "it swaps"
    return make_finding(
        f"memory is short on {host}: {what}",
        "fewer or leaner DataLoader workers (each holds its own copies), a smaller cache or "
        "shuffle buffer, memory maps in place of loading files whole, or a node with more memory",
        ("some task waits for memory", pressure, "ratio"), ("memory available", free, "ratio"),
        ("read back from swap", swapped, "bytes/s"),
        (
            "page faults from storage, all ranks",
            sum(faults.values()) if faults else None,
            "count/s",
        ),
        severity="critical" if swaps else "warning", confidence=0.85, lost_ratio=pressure,
    )  # fmt: skip


def gpu_memory_limit(inputs: RuleInputs) -> Finding | str | None:
    """The GPU's memory ran out and the job went on, grows from step to step, or is nearly full."""
    failures = caught_failures(inputs.analyzer.files)
    if caught := {rank: each for rank, each in failures.items() if rank in inputs.world}:
        rank = max(caught, key=lambda r: (caught[r].count, -r))
        failed = caught[rank]
        sizes = {
            "asked for": failed.requested_bytes, "allocated": failed.allocated_bytes,
            "reserved by the allocator": failed.reserved_bytes, "limit": failed.limit_bytes,
        }  # fmt: skip
        return make_finding(
            f"rank {rank} ran {failed.text}; it went on",
            failed.remedy,
            ("allocations that failed", float(failed.count), "count"),
            *((name, float(size), "bytes") for name, size in sizes.items() if size is not None),
            confidence=0.9,
            rank=rank,
        )
    counted = {rank: each for rank, each in inputs.gpu_memory.items() if each.limit_bytes > 0}
    if not counted:
        return _NO_ALLOCATOR
    grown = {rank: growth for rank, s in counted.items() if (growth := growth_per_step(s))}
    if grown:
        rank = max(grown, key=lambda r: (grown[r] / counted[r].limit_bytes, -r))
        return _growing(rank, counted[rank], grown[rank], len(grown))
    full = {r: float(each.peak_bytes.max()) / each.limit_bytes for r, each in counted.items()}
    rank = max(full, key=lambda r: (full[r], -r))
    if full[rank] < GPU_MEMORY_FULL_RATIO:
        return None
    series = counted[rank]
    return make_finding(
        f"GPU memory is nearly full on rank {rank}: {ratio_text(full[rank])} of it was allocated "
        "at the peak",
        "a longer sequence or a larger batch will not fit; where batches differ in size, bound the "
        "largest, or checkpoint activations",
        ("peak", float(series.peak_bytes.max()), "bytes"),
        ("limit", float(series.limit_bytes), "bytes"),
        ("reserved by the allocator", float(series.reserved_bytes[-1]), "bytes"),
        severity="info",
        confidence=0.9,
        rank=rank,
    )


def _growing(rank: int, series: GpuMemorySeries, growth: float, count: int) -> Finding:
    peak = float(series.peak_bytes[-1])
    steps_left = max(series.limit_bytes - peak, 0.0) / growth
    steps = max(int(series.step[-1] - series.step[0]), 1)
    left_ns = steps_left * float(series.time_ns[-1] - series.time_ns[0]) / steps
    return make_finding(
        f"GPU memory grows by {bytes_text(growth)} per step on rank {rank}: its limit is "
        f"{duration_text(left_ns)} away",
        LEAK_REMEDY, ("growth per step", growth, "bytes"),
        ("allocated where the last step began", float(series.allocated_bytes[-1]), "bytes"),
        ("peak so far", peak, "bytes"), ("limit", float(series.limit_bytes), "bytes"),
        ("steps until then, at this rate", steps_left, "count"),
        ("time until then, at this rate", left_ns, "ns"),
        ("ranks whose memory grows", float(count), "count"), confidence=0.85, rank=rank,
    )  # fmt: skip


def allocator_retries(inputs: RuleInputs) -> Finding | str | None:
    """The GPU's memory is so full that the allocator gives its cache back to find room."""
    counted = inputs.allocator
    if not counted:
        return _NO_ALLOCATOR
    rank = max(counted, key=lambda r: (counted[r][0], -r))
    retries, failures, elapsed_ns = counted[rank]
    if retries < ALLOCATOR_RETRY_MIN_COUNT:
        return None
    per_minute = retries / max(elapsed_ns / NS_PER_S / 60, 1e-9)
    return make_finding(
        f"GPU memory is full on rank {rank}: the allocator emptied its cache {retries} times",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation; else a smaller "
        "batch, activation checkpointing, or bf16; each retry waits for the GPU and frees memory",
        ("allocations tried again", float(retries), "count"),
        ("the same per minute", per_minute, "count"),
        ("allocations that failed for good", float(failures), "count"),
        confidence=0.85,
        rank=rank,
    )


RULES: tuple[Rule, ...] = (
    standstill, first_batch, compilation, memory_creep, memory_pressure,
    gpu_memory_limit, allocator_retries, page_faults, numa_placement,
    settings_facts.anomaly_detection, settings_facts.distribution_checks,
    settings_facts.embedding_norms, settings_facts.tracemalloc, settings_facts.profiler_left_on,
    settings_facts.call_hook, settings_facts.costly_switches, settings_facts.double_precision,
    settings_facts.deterministic_mode, settings_facts.mkldnn_off,
    settings_facts.unused_gradients, settings_facts.discarded_gradients,
    settings_facts.unfused_adam, settings_facts.optimizer_loop, settings_facts.padding,
    settings_facts.ddp_arguments, settings_facts.fsdp_units, settings_facts.fast_paths_off,
    settings_facts.half_precision, settings_facts.threads_over_cores,
    settings_facts.threads_under_cores, settings_facts.settings_differ, loss_not_finite,
    slow_kernels, slow_link,
)  # fmt: skip
"""In the order in which they are asked; the name of each is its slug in documents."""
