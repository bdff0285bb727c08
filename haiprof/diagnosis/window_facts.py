"""Facts of a traced window: slow kernels and links, waits, copies, launches, tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.medians import lower_median
from haiprof.base.units import duration_text, rate_text, ratio_text
from haiprof.diagnosis.gpu_functions import (
    ABNORMAL,
    RANKS,
    SLOW,
    communication_report,
    gpu_compute_report,
    memory_report,
)
from haiprof.diagnosis.rule_inputs import RuleInputs, usual_share
from haiprof.diagnosis.thresholds import (
    ABNORMAL_RATIO,
    DATALOADER_WARNING_RATIO,
    FAR_MIN_RANKS,
    GPU_IDLE_RATIO,
    MIN_STEPS,
    TF32_CAPABILITY,
)
from haiprof.diagnosis.verdict import Abstention, Evidence, Finding, Judgement, evidence_rows
from haiprof.trace_analysis.kernel_names import (
    COMMUNICATION,
    GPU_COMPUTE,
    MEMORY,
    short_kernel_name,
)
from haiprof.trace_format.launch_checks import FREE

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

CORE_WAIT_WARNING_RATIO = 0.15
"""Share of time in which the main thread waited for a core. Above the tenth that others may
have caused. Own choice."""
EXPOSED_WARNING_RATIO = 0.10
"""Communication that nothing hides, of the window: TraceML's 10 % and 20 % for what a step should
not hold (diagnostics/DIAGNOSIS.md)."""
WAITING_RATIO = 0.50
"""Most of the time in collectives is waiting: then a late rank is the cause. Own choice."""
SYNC_IDLE_RATIO = 0.10
"""GPU idle around synchronising calls: TraceML's warning again."""
SHORT_LAUNCH_RATIO = 0.50
"""Half of the kernels are HTA's short kernels (get_cuda_kernel_launch_stats). Own choice."""
TENSOR_CORE_CAPABILITY = (7, 0)
TENSOR_CORE_OFF_RATIO = 0.20
"""Of computing time. An A100 does 19.5 TFLOPS in FP32 and 156 in TF32 (its datasheet): a fifth
would shrink to a fortieth. Own choice."""
SMALL_KERNEL_NS = 10_000
"""About twice what launching takes (3 to 7 us in the traces at hand). Own choice."""
SMALL_OCCUPANCY_RATIO = 0.25
"""NVIDIA's CUDA C++ Best Practices Guide, occupancy: low occupancy interferes with hiding memory
latency, and more than needed does not help; it names no number. Own choice."""
DISPATCH_RATIO = 0.50
"""Most of a window is spent in and between operators too short to compute much. Own choice."""
MAIN_CORE_FULL = 0.90
OTHER_THREADS_RATIO = 0.10
"""One thread does the work where it fills a core and the others use a tenth of theirs. Own
choice."""

_PLACE_COUNT = 3
_NO_LINE = "the lines of code: record with --trace-stacks"
_NO_GRIDS = "whether it got larger inputs: kernels' grids are not in the traces"


def _of_gpus(
    judge: Callable[[Patterns], Finding | str | None],
) -> Callable[[RuleInputs], Judgement]:
    """Makes a rule of a function on traces of GPUs, which may also say why it cannot judge."""

    @wraps(judge)
    def rule(inputs: RuleInputs) -> Judgement:
        patterns = inputs.traces.of_gpus()
        found = patterns if isinstance(patterns, str) else judge(patterns)
        return Abstention(rule=judge.__name__, why=found) if isinstance(found, str) else found

    return rule


def _typical(values: pl.Series) -> float | None:
    """The lower middle rank's value (TraceML's typical rank); None: not known of all ranks."""
    return None if values.is_empty() or values.null_count() else float(lower_median(values))


def _at_places(patterns: Patterns, table: str, by: str, where: pl.Expr | None = None) -> str:
    """Where in the code most of `by` is in a frame of `Signs`, over all ranks.

    ` (aten::item in Block at train.py(45): step; ...)`; nothing where no place is known.
    """
    found = pl.concat(getattr(signs, table) for signs in patterns.signs.values())
    rows = found if where is None else found.filter(where)
    place = ("operator", "module", "line")
    summed = rows.group_by(place).agg(pl.col(by).sum()).filter(pl.col(by) > 0)
    texts = []
    for operator, module, line in (
        summed.sort(-pl.col(by), *place, nulls_last=True).select(place).rows()
    ):
        what = " in ".join(part for part in (operator, module) if part)
        texts.append(" at ".join(part for part in (what, line) if part))
    known = [text for text in texts if text][:_PLACE_COUNT]
    return f" ({'; '.join(known)})" if known else ""


def _missing_lines(patterns: Patterns) -> tuple[str, ...]:
    """What would name the line."""
    return () if patterns.totals["has_python"].all() else (_NO_LINE,)


def _lacks_ranks(patterns: Patterns) -> str:
    """Why no rank can be called slow; empty where there are enough to compare with."""
    count = int(patterns.totals["has_gpu"].sum())
    return f"GPU traces of {count} ranks; it takes {FAR_MIN_RANKS}" * (count < FAR_MIN_RANKS)


@_of_gpus
def slow_kernels(patterns: Patterns) -> Finding | str | None:
    """One rank's GPU takes longer for the same kernels."""
    if why := _lacks_ranks(patterns):
        return why
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
        rule="slow_kernels",
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


@_of_gpus
def slow_link(patterns: Patterns) -> Finding | str | None:
    """One rank's transfers are slower than the others': its link, or its bus to the host."""
    if why := _lacks_ranks(patterns):
        return why
    rates = ("bandwidth_bytes_per_s", "others_bandwidth_bytes_per_s")
    talk = communication_report(patterns).tables[ABNORMAL]
    copies = memory_report(patterns).tables[ABNORMAL].filter(pl.col("why") == SLOW)
    copies = copies.drop_nulls(rates)
    if talk.is_empty() and copies.is_empty():
        return None
    found, what = (talk, "type") if len(talk) else (copies, "name")
    rank, name, own, usual, share = found.select("rank", what, *rates, "bottleneck_ratio").row(0)
    return Finding(
        rule="slow_link",
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


@_of_gpus
def exposed_communication(patterns: Patterns) -> Finding | str | None:
    """Communication that computation does not hide, with waiting and transfer apart."""
    talk = patterns.functions.filter(pl.col("kind") == COMMUNICATION)
    if talk.is_empty():
        return "no communication kernel in the traces"
    share = _typical(patterns.totals["communication_ratio"])
    if share is None:
        return "some ranks' traces have no GPU event"
    if share < EXPOSED_WARNING_RATIO:
        return None
    timed = talk.filter(pl.col("transfer_ns").is_not_null())
    wait, transfer = (int(timed[name].sum()) for name in ("wait_ns", "transfer_ns"))
    waiting = wait / (wait + transfer) if wait + transfer else None
    late = waiting is not None and waiting >= WAITING_RATIO
    hidden = _typical(patterns.totals["overlap_ratio"])
    return Finding(
        rule="exposed_communication",
        title=f"communication takes {ratio_text(share)} of the time, not overlapped"
        + (f", {ratio_text(waiting)} of that waiting for late ranks" if late else ""),
        evidence=evidence_rows(
            ("exposed communication", share, "ratio"),
            ("share of communication that computing hides", hidden, "ratio"),
            ("share of collectives spent waiting", waiting, "ratio"),
            ("transfers, all ranks", float(transfer) or None, "ns"),
        ),
        remedy="the transfers are not the problem: one rank arrives late. `haiprof trace functions "
        "RUN --only communication` names it; balance its data, or look at its host and GPU"
        if late
        else "overlap it with computation: DDP with larger or earlier buckets (bucket_cap_mb, "
        "gradient_as_bucket_view), FSDP with prefetching, gradient accumulation under no_sync(), "
        "bf16 gradients",
        confidence=0.8 if waiting is not None else 0.6,
        lost_ratio=share,
        missing=()
        if waiting is not None
        else ("waiting and transfer separately: needs traces of all ranks",),
        scope="window",
    )


@_of_gpus
def synchronising_calls(patterns: Patterns) -> Finding | None:
    """The host waits for the GPU in the middle of a step, and the GPU then waits for the host."""
    is_free = pl.col("call").str.contains(FREE)
    windows = dict(patterns.totals.select("rank", "window_ns").rows())
    idle = pl.col("idle_ns")
    rows = [
        signs.waits.select(
            pl.lit(rank).alias("rank"), pl.col("count", "time_ns", "idle_ns").sum(),
            free_ns=idle.filter(is_free).sum(), idle_ratio=idle.sum() / windows[rank],
        )
        for rank, signs in patterns.signs.items()
        if len(signs.waits)
    ]  # fmt: skip
    if not rows:
        return None
    row = pl.concat(rows).sort(-pl.col("idle_ratio"), "rank").row(0, named=True)
    share = row["idle_ratio"]
    if share < SYNC_IDLE_RATIO:
        return None
    frees = 2 * row["free_ns"] > row["idle_ns"]
    where = _at_places(patterns, "waits", "idle_ns", is_free if frees else ~is_free)
    remedy = (
        "the caching allocator gives memory back and takes it again: no torch.cuda.empty_cache() "
        "in the loop, a smaller batch, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        if frees
        else "keep values on the GPU: no .item(), .cpu(), print, nonzero() or boolean masks of GPU "
        "tensors in the loop; log every few steps"
    )
    return Finding(
        rule="synchronising_calls",
        title=f"GPU memory is freed during training, the GPU idle {ratio_text(share)} of the time"
        if frees
        else f"the host waits for the GPU in each step, which is then idle {ratio_text(share)}",
        evidence=evidence_rows(
            ("GPU idle around these calls", share, "ratio"),
            ("calls", row["count"], "count"),
            ("time in them", row["time_ns"], "ns"),
            ("GPU idle around them", row["idle_ns"], "ns"),
        ),
        remedy=remedy + where,
        confidence=0.75,
        lost_ratio=share,
        missing=_missing_lines(patterns),
        rank=row["rank"],
        scope="window",
    )


@_of_gpus
def pageable_copies(patterns: Patterns) -> Finding | None:
    """Copies to the GPU from memory that is not pinned."""
    copies = patterns.functions.filter(
        pl.col("kind") == MEMORY, pl.col("name").str.contains("Pageable -> Device", literal=True)
    )
    worst = copies.sort(-pl.col("bottleneck_ratio"), "rank").head(1).to_dicts()
    if not worst or worst[0]["bottleneck_ratio"] <= ABNORMAL_RATIO:
        return None
    row, share = worst[0], worst[0]["bottleneck_ratio"]
    return Finding(
        rule="pageable_copies",
        title=f"copies from pageable memory take {ratio_text(share)} of the time, not overlapped",
        evidence=evidence_rows(
            ("exposed copies", share, "ratio"),
            ("copies", row["count"], "count"),
            ("time in them", row["total_ns"], "ns"),
            ("bandwidth", row["bandwidth_bytes_per_s"], "bytes/s"),
        ),
        remedy="pin the memory: DataLoader(pin_memory=True) or tensor.pin_memory(), and copy with "
        f".to(device, non_blocking=True){_at_places(patterns, 'pageable', 'time_ns')}",
        confidence=0.85,
        missing=_missing_lines(patterns),
        scope="window",
    )


@_of_gpus
def launch_bound(patterns: Patterns) -> Finding | str | None:
    """Kernels so short that launching them takes longer: the GPU waits for launches."""
    known = {rank: signs for rank, signs in patterns.signs.items() if signs.launch_count}
    if not known:
        return "no launch of a kernel in the traces"
    rank = max(known, key=lambda r: (known[r].gpu_idle_ratio or 0.0, -r))
    signs = known[rank]
    idle, count = signs.gpu_idle_ratio or 0.0, signs.launch_count or 1
    short = (signs.short_count or 0) / count
    if idle < GPU_IDLE_RATIO or short < SHORT_LAUNCH_RATIO:
        return None
    kernel, call = duration_text(signs.kernel_median_ns), duration_text(signs.launch_median_ns)
    return Finding(
        rule="launch_bound",
        title=f"launch-bound: {ratio_text(short)} of the kernels are shorter than their launch, "
        f"the GPU is idle {ratio_text(idle)} of the time",
        evidence=evidence_rows(
            ("GPU idle", idle, "ratio"),
            ("kernels shorter than their launch", short, "ratio"),
            ("launches", count, "count"),
            ("median kernel", signs.kernel_median_ns, "ns"),
            ("median launch", signs.launch_median_ns, "ns"),
        ),
        remedy=f"a launch takes {call}, a kernel {kernel}: launch fewer and larger ones with "
        "torch.compile(mode='reduce-overhead'), CUDA graphs, fused or foreach optimizers, larger "
        f"batches{_at_places(patterns, 'short', 'count')}",
        confidence=0.75,
        missing=_missing_lines(patterns),
        rank=rank,
        scope="window",
    )


@_of_gpus
def tensor_cores_unused(patterns: Patterns) -> Finding | str | None:
    """Matrix products on the ordinary cores of a GPU that has tensor cores."""
    able = [s.compute_capability for s in patterns.signs.values() if s.compute_capability]
    if not able:
        return "the traces do not say which NVIDIA GPU it is"
    if max(able) < TENSOR_CORE_CAPABILITY:
        return None
    computing = int(patterns.functions.filter(pl.col("kind") == GPU_COMPUTE)["total_ns"].sum())
    matrix = pl.concat(signs.matrix for signs in patterns.signs.values())
    off = matrix.filter(~pl.col("tensor_cores"))
    share = int(off["time_ns"].sum()) / computing if computing else 0.0
    if share < TENSOR_CORE_OFF_RATIO:
        return None
    longest = off.group_by("kernel").agg(pl.col("time_ns").sum()).sort(-pl.col("time_ns"), "kernel")
    on = int(matrix.filter("tensor_cores")["time_ns"].sum()) / computing
    name = short_kernel_name(longest["kernel"][0])
    remedy = (
        "torch.set_float32_matmul_precision('high') (TF32), or torch.autocast with bfloat16"
        if max(able) >= TF32_CAPABILITY
        else "torch.autocast with float16 and a GradScaler; sizes that are multiples of 8"
    )
    return Finding(
        rule="tensor_cores_unused",
        title=f"{ratio_text(share)} of the computing time are matrix products without tensor cores",
        evidence=evidence_rows(
            ("without tensor cores, of computing time", share, "ratio"),
            ("on tensor cores, of computing time", on, "ratio"),
            (f"longest such kernel: {name}", longest["time_ns"][0], "ns"),
        ),
        remedy=remedy + _at_places(patterns, "matrix", "time_ns", ~pl.col("tensor_cores")),
        confidence=0.7,
        missing=_missing_lines(patterns),
        scope="window",
    )


@_of_gpus
def small_batches(patterns: Patterns) -> Finding | str | None:
    """Kernels that are too small to fill the GPU."""
    medians = [s.kernel_median_ns for s in patterns.signs.values() if s.kernel_median_ns]
    fill = _typical(patterns.totals["occupancy_ratio"])
    if not medians or fill is None:
        return "kernels' occupancy is not in the traces"
    median = lower_median(medians)
    if median >= SMALL_KERNEL_NS or fill >= SMALL_OCCUPANCY_RATIO:
        return None
    efficiency = _typical(patterns.totals["sm_efficiency_ratio"])
    return Finding(
        rule="small_batches",
        severity="info",
        title=f"small kernels: half of them are below {duration_text(median)}, and they fill "
        f"{ratio_text(fill)} of the GPU",
        evidence=evidence_rows(
            ("median kernel", median, "ns"),
            ("estimated occupancy, over kernel time", fill, "ratio"),
            ("estimated SM efficiency, over the window", efficiency, "ratio"),
        ),
        remedy="raise the batch size or the sequence length per step as far as memory allows; "
        "else fuse with torch.compile",
        confidence=0.6,
        missing=("the batch size, which a trace does not name",),
        scope="window",
    )


def host_bound(inputs: RuleInputs) -> Judgement:
    """A job on CPUs that waits for Python and the dispatcher: one thread does all the work.

    Operators on fewer than 32,768 elements stay on one thread (at::internal::GRAIN_SIZE), so it is
    Python and the dispatcher that take the time, and not computing. Matrix products start threads
    whatever their size, and these spin for some ms before they sleep (libgomp's GOMP_SPINCOUNT):
    without a trace cores that are used prove nothing.
    """
    if inputs.uses_gpu:
        why = "the ranks use a GPU: gpu_waits_for_host judges that"
        return Abstention(rule="host_bound", why=why)
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule="host_bound", why=f"fewer than {MIN_STEPS} steps")
    traced = _host_bound_by_trace(inputs)
    return traced if traced is not None else _host_bound_by_cores(inputs)


def _host_bound_by_trace(inputs: RuleInputs) -> Finding | None:
    """By the operators of a window; None where they do not say so, or there is none."""
    patterns = inputs.traces.patterns
    if patterns is None or patterns.totals["has_gpu"].any():
        return None
    rank, signs = max(
        patterns.signs.items(), key=lambda item: (item[1].operators.dispatch_ratio, -item[0])
    )
    found = signs.operators
    if found.dispatch_ratio < DISPATCH_RATIO:
        return None
    return _host_bound(
        inputs,
        rank,
        f"host-bound: {ratio_text(found.dispatch_ratio)} of the time goes into launching "
        f"operators of {duration_text(found.median_ns)}, not into computing",
        evidence_rows(
            ("in short operators and between them", found.dispatch_ratio, "ratio"),
            ("operators in the window", float(found.count), "count"),
            ("median operator", found.median_ns, "ns"),
        ),
        confidence=0.8,
    )


def _host_bound_by_cores(inputs: RuleInputs) -> Judgement:
    """By the cores that the process of a rank uses."""
    threads = {
        rank: min(count, len(placed.allowed_cpus or ()))
        for rank, count in inputs.last_attempts.operator_threads.items()
        if (placed := inputs.placements.get(rank)) is not None
    }
    cores = {r: inputs.main_cores[r] for r in inputs.world if threads.get(r, 1) > 1
             and r in inputs.main_cores}  # fmt: skip
    if not cores:
        why = "operators have one thread each, or no CPU use is known"
        return Abstention(rule="host_bound", why=why)
    rank = max(cores, key=lambda r: (cores[r], -r))
    used, wait = cores[rank], inputs.core_waits.get(rank)
    loader = usual_share(inputs, "dataloader") or 0.0
    most = 1 + OTHER_THREADS_RATIO * (threads[rank] - 1)
    if used > most and inputs.traces.patterns is None:
        why = "all cores are used, but threads that wait for the next operator spin and look busy: "
        return Abstention(rule="host_bound", why=f"{why}a trace (--trace) tells")
    waits = (wait or 0.0) >= CORE_WAIT_WARNING_RATIO or loader >= DATALOADER_WARNING_RATIO
    if waits or not MAIN_CORE_FULL <= used <= most:
        return None
    return _host_bound(
        inputs,
        rank,
        f"host-bound: one thread does all the work, {used:.2f} of {threads[rank]} cores are used",
        evidence_rows(
            ("cores used by the training process", used, "cores"),
            ("threads per operator", float(threads[rank]), "count"),
            ("waiting for cores", wait, "ratio"),
        ),
        confidence=0.6,
    )


def _host_bound(
    inputs: RuleInputs, rank: int, title: str, evidence: tuple[Evidence, ...], *, confidence: float
) -> Finding:
    return Finding(
        rule="host_bound",
        severity="info",
        title=title,
        evidence=evidence,
        remedy="the operators are too small to be shared among threads: larger batches, fewer and "
        "larger operators (torch.compile, batched in place of loops), or run several jobs with "
        "OMP_NUM_THREADS=1 each",
        confidence=confidence,
        missing=("which Python code it is: a trace with --trace-stacks would say",),
        rank=rank if len(inputs.world) > 1 else None,
    )
