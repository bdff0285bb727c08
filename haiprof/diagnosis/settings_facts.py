"""Settings that make training slower: what is on, what that costs, and what to do about it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from math import ceil
from typing import Literal

import numpy as np

from haiprof.base.code_places import place_text
from haiprof.base.intervals import Intervals, covered_lengths, total
from haiprof.base.ledger import PROBLEM_RATIO
from haiprof.base.units import NS_PER_MS, ranks_text, ratio_text, visible
from haiprof.diagnosis.machine_causes import SETS_THREADS, used_by_others
from haiprof.diagnosis.opportunities import calling_place
from haiprof.diagnosis.rule_inputs import Rule, RuleInputs, typical_rank, usual_split
from haiprof.diagnosis.thresholds import MIN_STEPS, OPERATOR_CALL_NS, TF32_CAPABILITY
from haiprof.diagnosis.verdict import CodeLine, Finding, Severity, evidence_rows, make_finding
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples
from haiprof.run_analysis.run_files import number
from haiprof.run_analysis.settings import (
    DiscardedGradients,
    OptimizerSettings,
    RankSettings,
    UnusedGradients,
    differences,
)

SWITCHED_ON_RATIO = 0.10
"""Of the looks, one a second, that found a switch on: below, it was only tried. Own choice."""
LEFT_ON_RATIO = 0.50
"""A profiler with a schedule is on for less of the time than one left on. Own choice."""
DTYPE_RATIO = 0.50
"""Most of what is trained: a few parameters of a type (a running sum) cost nothing. Own choice."""
LOOP_MIN_TENSORS = 20  # Fewer tensors make no long loop. Own choice.
THREADS_PER_CORE = 2.0  # Threads of an operator for each core; less is not measured. Own choice.
FEW_THREADS = 2.0
"""Cores of a rank for each thread of its operators, from which on it is said. Own choice."""
NO_SYNC_MISSED_RATIO = 0.01
"""So unlikely must it be that looks missed a no_sync that is there: a conventional level."""
MIN_COUNT = 20  # With fewer samples nothing is said of a share of them. Own choice.

MODEL = ("forward", "backward")
STEP = (*MODEL, "optimizer")
MEASURED = "benchmarks/results/settings_price.md"
UNKNOWN = "its cost here: not measured on this kind of device"
_FLOAT64_RATIO = 0.5
"""float64 moves twice the bytes; a vector instruction of a CPU computes half as many numbers, a GPU
at most half as many, and most do 1/32 or 1/64 (Intel SDM, packed double precision; CUDA C++
Programming Guide, throughput of native arithmetic instructions). Measured: 2.0 times as long for
large products, 3.3 for convolutions (settings_price.md)."""
_WRITES_STACKS = (("/traceback.py", ""), ("/linecache.py", ""))
"""Autograd's anomaly detection writes down the stack of each operator that it is to name in its
errors."""
_CHECKS_ARGUMENTS = tuple(
    ("/torch/distributions/distribution.py", f"Distribution.{name}")
    for name in ("__init__", "_validate_sample")
)
_CHECKS_RATIO = 1.0
"""What looking through each gradient for NaN takes beside that: 0.7 to 2.0 times as much, measured
on an MLP, a transformer, convolutions and LSTM cells, in turns with and without (torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Time with a setting over time without it, of some phases, on CPUs."""

    least: float
    """Of the jobs that it was measured on the one that it slowed least: judged is by this."""
    most: float
    phases: tuple[str, ...] = MODEL

    def lost_ratio(self, inputs: RuleInputs, *, on: float = 1.0) -> float:
        """Of the mean step, what the setting costs at least; `on`: share of the time it is on."""
        return on * touched_ratio(inputs, self.phases) * max(1 - 1 / self.least, 0.0)


PRICES: Mapping[str, Price] = {
    "anomaly": Price(least=1.17, most=6.54), "profiler": Price(least=1.01, most=1.48),
    "float64": Price(least=1.16, most=3.31, phases=STEP),
    "deterministic": Price(least=1.00, most=1.03),
    "mkldnn_convolutions": Price(least=1.25, most=4.75), "float16": Price(least=2.90, most=32.3),
    "find_unused_parameters": Price(least=1.02, most=1.18),
}  # fmt: skip
"""Least and most of the medians in `benchmarks/results/settings_price.md`, over its jobs."""


def touched_ratio(inputs: RuleInputs, phases: Collection[str]) -> float:
    """Share of some phases in the mean step of the typical rank."""
    split = usual_split(inputs.by_rank[typical_rank(inputs)])
    whole = sum(ns or 0.0 for ns in split.values())
    return min(sum((split[phase] or 0.0) / whole for phase in phases), 1.0) if whole else 0.0


def _setting(
    *, device: Literal["cpu", "cuda"] | None = None, ranks: int = 1, severity: Severity = "info"
) -> Callable[[Rule], Rule]:
    """A rule that abstains where a run has no settings, other devices, too few ranks or steps."""

    def judge(find: Rule, inputs: RuleInputs) -> Finding | str | None:
        if not inputs.settings:
            return "no settings were recorded"
        if device is not None and inputs.uses_gpu != (device == "cuda"):
            return "no GPU" if device == "cuda" else "the ranks use a GPU"
        if len(inputs.world) < ranks:
            return "one rank"
        if inputs.steps.height < MIN_STEPS:
            return f"fewer than {MIN_STEPS} steps"
        found = find(inputs)
        if not isinstance(found, Finding):
            return found
        unknown = () if found.lost_ratio is not None else (UNKNOWN,)
        return replace(found, severity=severity, missing=found.missing or unknown)

    return lambda find: wraps(find)(lambda inputs: judge(find, inputs))


def _add_price(inputs: RuleInputs, found: Finding, price: Price, *, on: float = 1.0) -> Finding:
    """A setting that is on for a share of the time, with its price: on GPUs none was measured."""
    if inputs.uses_gpu:
        return replace(found, phases=price.phases)
    named = " and ".join(price.phases) if len(price.phases) < 3 else "all phases of the model"
    rows = evidence_rows(
        (f"measured cost, least ({MEASURED})", price.least, ""),
        ("measured cost, most", price.most, ""),
        (f"{named}, share of the step", touched_ratio(inputs, price.phases), "ratio"),
    )
    lost_ratio = price.lost_ratio(inputs, on=on)
    evidence = (*found.evidence, *rows)
    return replace(found, phases=price.phases, lost_ratio=lost_ratio, evidence=evidence)


def _ranks_with(inputs: RuleInputs, name: str, least: float) -> tuple[list[int], float]:
    """Ranks that had a switch on for at least so much of the looks at it, and the most of any."""
    on = {rank: each.on_ratio(name) for rank, each in inputs.settings.items()}
    return [rank for rank, ratio in on.items() if ratio >= least], max(on.values())


def _sampled_ratio(inputs: RuleInputs, code: Collection[tuple[str, str]]) -> float | None:
    """Of a typical rank's training thread, how long it ran these functions; None: not sampled."""
    samples = inputs.load_samples(typical_rank(inputs))
    phases = [CODE_PHASES.index(phase) for phase in (*STEP, "dataloader", "other")]
    chosen = np.isin(samples.phase, phases) & (samples.worker < 0)
    weight = samples.weight_ns[chosen]
    if int(chosen.sum()) < MIN_COUNT or not weight.sum():
        return None
    return float(weight[samples.tree.runs(code)[samples.stack[chosen]]].sum() / weight.sum())


@_setting()
def anomaly_detection(inputs: RuleInputs) -> Finding | None:
    """Autograd's anomaly detection is on while the job trains."""
    # Each operator then has its Python stack written down as text, and each gradient is looked
    # through for NaN (torch/csrc/autograd/anomaly_mode.h). What the writing takes is seen in
    # sampled stacks; without them a CPU job is judged by the least price measured.
    ranks, ratio = _ranks_with(inputs, "anomaly", SWITCHED_ON_RATIO)
    if not ranks:
        return None
    seen, title = _sampled_ratio(inputs, _WRITES_STACKS), "anomaly detection is on"
    known = [] if inputs.uses_gpu else [PRICES["anomaly"].lost_ratio(inputs, on=ratio)]
    known += [] if seen is None else [min((1 + _CHECKS_RATIO) * seen, 1.0)]
    if seen:
        title += f": writing stacks down takes {ratio_text(seen)} of the step, and looking for NaN "
        title += "in each gradient about as much"
    return make_finding(
        title,
        "remove torch.autograd.set_detect_anomaly(True) or detect_anomaly(), in Lightning "
        "Trainer(detect_anomaly=True): it is for finding a NaN, not for training",
        ("share of checks that found it on", ratio, "ratio"),
        ("writing stacks, of the step (samples)", seen, "ratio"),
        ("forward and backward, share of the step", touched_ratio(inputs, MODEL), "ratio"),
        confidence=0.9,
        setting=r"(set_)?detect_anomaly\((?!False|mode=False)|\w+\(.*\bdetect_anomaly=True",
        lost_ratio=max(known, default=None),
        phases=MODEL,
        seen_in=_WRITES_STACKS,
        rank=ranks[0] if len(ranks) == 1 < len(inputs.world) else None,
    )


@_setting()
def profiler_left_on(inputs: RuleInputs) -> Finding | None:
    """A profiler of the job's own records all the time."""
    # It was on at half of the looks, which one with a schedule is not; haiprof's do not count.
    ranks, ratio = _ranks_with(inputs, "profiler", LEFT_ON_RATIO)
    if not ranks:
        return None
    some = len(ranks) < len(inputs.world)
    return _add_price(inputs, make_finding(
        f"the job's own profiler is on {ratio_text(ratio)} of the time"
        + (f", on {ranks_text(ranks)}" if some else ""),
        "give it a schedule (torch.profiler.schedule(wait=.., warmup=.., active=..)) or remove it; "
        "haiprof run --trace records a few steps and leaves the others alone",
        ("share of checks that found it on", ratio, "ratio"),
        confidence=0.8,
        setting=r"profile\(|\w+\(.*\bprofiler=",
        rank=ranks[0] if some and len(ranks) == 1 else None,
    ), PRICES["profiler"], on=ratio)  # fmt: skip


TRACEMALLOC = (0.74, 0.9, 0.97)
"""Of Python that makes objects, what tracemalloc takes: least, usual, most. Measured on seven loops
(f-strings, JSON, dictionaries, objects, numbers) with a stack of 20 frames: 3.8 to 19 times as
long with one frame noted, 7 to 27 with five, 16 to 75 with 16 (Python 3.11)."""


@_setting()
def tracemalloc(inputs: RuleInputs) -> Finding | None:
    """Python notes where each object was made, for as long as the job trains."""
    if not any(each.flags.get("tracemalloc") is True for each in inputs.settings.values()):
        return None
    least, usual, most = TRACEMALLOC
    return make_finding(
        "tracemalloc is on: Python notes where each object was made, and code that makes objects "
        f"is {1 / (1 - least):.0f} to {1 / (1 - most):.0f} times slower",
        "leave out tracemalloc.start(), PYTHONTRACEMALLOC and -X tracemalloc, then measure again; "
        "two snapshots some hundred steps apart need it on for no longer than that",
        (f"of Python outside of torch, what it takes ({MEASURED})", usual, "ratio"),
        confidence=0.8,
        python_ratio=usual,
        python_spread=(least / usual, most / usual),
        setting=r"start\((?:nframe=)?\d*\)",
    )


def _judge_sampled(
    inputs: RuleInputs, code: tuple[tuple[str, str], ...], title: str, remedy: str
) -> Finding | None:
    """What some functions of torch do, which an argument leaves out."""
    ratio = _sampled_ratio(inputs, code)
    if ratio is None or ratio < PROBLEM_RATIO / 5:
        return None
    row = ("its share of the step (samples)", ratio, "ratio")
    return make_finding(title, remedy, row, seen_in=code)


@_setting()
def distribution_checks(inputs: RuleInputs) -> Finding | None:
    """torch.distributions looks through the arguments and samples of each distribution."""
    return _judge_sampled(
        inputs, _CHECKS_ARGUMENTS,
        "torch.distributions checks the arguments of each distribution that is made, and what its "
        "log_prob is asked for",
        "torch.distributions.Distribution.set_default_validate_args(False), or validate_args=False "
        "where it is made, once the code is right; of a diagonal covariance, Independent(Normal) "
        "in place of MultivariateNormal",
    )  # fmt: skip


@_setting()
def embedding_norms(inputs: RuleInputs) -> Finding | None:
    """nn.Embedding(max_norm=...) goes over the rows that are looked up before each lookup."""
    return _judge_sampled(
        inputs, (("/torch/nn/functional.py", "_no_grad_embedding_renorm_"),),
        "nn.Embedding(max_norm=...) measures each row before it is looked up, and scales it down "
        "in place",
        "leave max_norm out and scale what was looked up (F.normalize), or the whole table every N "
        "steps: table.weight.data.copy_(torch.renorm(table.weight.data, 2, 0, max_norm))",
    )  # fmt: skip


_CALLED_AT = {
    "sys.setprofile": "call and return of the training thread",
    "sys.settrace": "call, return and line of the training thread",
    "signal.setitimer": "signal of its timer, in the training thread",
}


@_setting()
def call_hook(inputs: RuleInputs) -> Finding | None:
    """Python calls a function wherever the job is: sys.setprofile, sys.settrace, setitimer."""
    # What is sampled in that function is its price. That each call takes longer until it is in
    # there is not: it stands at the lines that call.
    on = [
        ((hook.count or 0) / max(each.looks.hook_look_count or 0, 1), rank, hook)
        for rank, each in inputs.settings.items()
        for hook in each.looks.hooks
    ]
    ratio, rank, hook = max(on, key=lambda one: (one[0], -one[1]), default=(0.0, 0, None))
    if hook is None or ratio < SWITCHED_ON_RATIO:
        return None
    sets, name = str(hook.sets), visible(hook.function or "?")
    seen_in: tuple[tuple[str, str], ...] = ()
    ranks = {each[1] for each in on if each[0] >= SWITCHED_ON_RATIO}
    if hook.file is not None:
        name = place_text(hook.file, hook.line, hook.function or "")
        seen_in = ((hook.file, hook.function or ""),)
    return make_finding(
        f"{sets} is on: {name} is called at each {_CALLED_AT.get(sets, 'call')}"
        + ", which costs at least what is sampled in it" * bool(seen_in),
        f"remove what sets it ({sets}, cProfile, coverage, a debugger), or set it for a few steps: "
        "haiprof itself needs none",
        ("share of checks that found it on", ratio, "ratio"),
        confidence=0.9, setting=rf"{sets.partition('.')[2]}\((?!None)", seen_in=seen_in,
        missing=("how much longer each call takes beside that function",) if seen_in
        else ("what it costs: it is written in C, and slows each call",),
        rank=rank if len(ranks) == 1 < len(inputs.world) else None,
    )  # fmt: skip


@_setting()
def costly_switches(inputs: RuleInputs) -> Finding | None:
    """Switches for finding errors are on, or a fast path between GPUs is switched off."""
    ranks = inputs.settings.values()
    on = {name: does for name, does, concerns, is_on in _SWITCHES
          if concerns(inputs) and any(map(is_on, ranks))}  # fmt: skip
    if not on:
        return None
    prices = {n: PRICES[n].lost_ratio(inputs) for n in on if n in PRICES and not inputs.uses_gpu}
    unknown = [name for name in on if name not in prices]
    return make_finding(
        "; ".join(f"{name}: {does}" for name, does in on.items()), f"leave out {', '.join(on)}",
        *[(f"{name}: of the step at least", prices.get(name), "ratio") for name in on],
        confidence=0.8, lost_ratio=max(prices.values(), default=None), phases=MODEL,
        missing=(f"{UNKNOWN} ({', '.join(unknown)})",) if unknown else (),
    )  # fmt: skip


def _has_variable(name: str, *values: str) -> Callable[[RankSettings], bool]:
    """Whether a variable has one of these values; without any, whether it is switched on."""

    def is_on(settings: RankSettings) -> bool:
        value = settings.variables.get(name, "").strip().lower()
        return value in values if values else value not in ("", "0", "off", "false", "no")

    return is_on


def _nccl_hosts(inputs: RuleInputs) -> int | None:
    """How many hosts a job has whose ranks talk by NCCL; None for other jobs."""
    backends = [str(each.flags.get("backend")) for each in inputs.settings.values()]
    uses_nccl = inputs.uses_gpu and len(inputs.world) > 1 and any("nccl" in b for b in backends)
    return len({each.host for each in inputs.settings.values()}) if uses_nccl else None


def _shares_node(inputs: RuleInputs) -> bool:
    return (_nccl_hosts(inputs) or len(inputs.settings)) < len(inputs.settings)


_SWITCHES: tuple[
    tuple[str, str, Callable[[RuleInputs], bool], Callable[[RankSettings], bool]], ...
] = (
    ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "each collective is checked against those of all ranks "
     "first", lambda inputs: len(inputs.world) > 1,
     lambda settings: settings.flags.get("distributed_debug") == "DETAIL"),
    ("CUDA_LAUNCH_BLOCKING", "the host waits for each kernel", lambda inputs: inputs.uses_gpu,
     _has_variable("CUDA_LAUNCH_BLOCKING")),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "each tensor is a cudaMalloc and a cudaFree, which wait for "
     "the GPU", lambda inputs: inputs.uses_gpu,
     lambda settings: "PYTORCH_NO_CUDA_MEMORY_CACHING" in settings.variables),
    ("NCCL_P2P_DISABLE", "GPUs of a node exchange data through the host's memory", _shares_node,
     _has_variable("NCCL_P2P_DISABLE")),
    ("NCCL_SHM_DISABLE", "ranks of a node use the network where they have no direct path",
     _shares_node, _has_variable("NCCL_SHM_DISABLE")),
    ("NCCL_IB_DISABLE", "nodes exchange data by TCP, not by RDMA",
     lambda inputs: (_nccl_hosts(inputs) or 1) > 1,
     _has_variable("NCCL_IB_DISABLE")),
    ("NCCL_DEBUG=TRACE", "NCCL writes a line for each call",
     lambda inputs: _nccl_hosts(inputs) is not None,
     _has_variable("NCCL_DEBUG", "trace")),
    ("ATEN_CPU_CAPABILITY=default", "operators leave out the processor's vector instructions (1.0 "
     "to 1.2 times as long, measured)", lambda inputs: not inputs.uses_gpu,
     _has_variable("ATEN_CPU_CAPABILITY", "default")),
    ("ONEDNN_MAX_CPU_ISA", "convolutions and LSTMs leave out the processor's newer instructions "
     "(2.4 to 2.7 times as long, measured)", lambda inputs: not inputs.uses_gpu,
     lambda settings: any(_has_variable(f"{name}_MAX_CPU_ISA", "sse41", "avx")(settings)
                          for name in ("ONEDNN", "DNNL"))),
    ("MALLOC_PERTURB_", "the C library fills all memory that is taken and given back",
     lambda inputs: True, _has_variable("MALLOC_PERTURB_")),
    ("PYTHONMALLOC=debug", "Python fills and checks each allocation",
     lambda inputs: True,
     _has_variable("PYTHONMALLOC", "debug", "malloc_debug", "pymalloc_debug")),
)  # fmt: skip
"""Name, what it makes slower, whether it has an effect on such a job, and whether it is on.

By what each does: PyTorch's and NCCL's lists of environment variables, Python's -X options."""


def _computing_ratio(inputs: RuleInputs) -> float:
    """Of forward on a CPU, what is not the mere calling of operators."""
    forward = usual_split(inputs.by_rank[typical_rank(inputs)])["forward"]
    tensors = [m.tensor_count or 0 for each in inputs.settings.values() for m in each.models]
    called_ns = max(tensors, default=0) * OPERATOR_CALL_NS
    return max(1 - called_ns / forward, 0.0) if forward else 0.0


@_setting(device="cpu")
def padding(inputs: RuleInputs) -> Finding | None:
    """Sequences are padded beyond the longest one of their batch."""
    # By looks at `attention_mask`, one a second; or at integers, which only a table of embeddings
    # takes for tokens.
    # What operators compute is at least linear in the columns of a batch (attention grows faster):
    # without those that are padding in each of its sequences, forward and backward are shorter by
    # their share, but for the calling of operators.
    looks = [each.looks for each in inputs.settings.values()]
    names = ("mask_column", "empty_column", "mask_token", "empty_token")
    columns, empty, tokens, zeros = (
        sum(getattr(look, f"{name}_count") or 0 for look in looks) for name in names
    )
    share = empty / max(columns, 1)
    work_ratio = share * _computing_ratio(inputs)
    if work_ratio * touched_ratio(inputs, MODEL) < PROBLEM_RATIO:
        return None
    is_guessed = any(look.guessed_mask_count for look in looks)
    if is_guessed and not any(has_layers(e, ("Embedding",)) for e in inputs.settings.values()):
        return None
    rest = 1 - (tokens - zeros) / max(tokens * (1 - share), 1)
    compiles = bool(number(inputs.ranks["compile_ns"].max()))
    few = ", with torch.compile to one of a few lengths (pad_to_multiple_of)" * compiles
    return make_finding(
        f"{ratio_text(share)} of the columns of {'the tokens' if is_guessed else 'attention_mask'} "
        "are padding in every sequence of their batch",
        "pad to the longest sequence of the batch (DataCollatorWithPadding(tokenizer, "
        f"padding='longest')){few}, or crop the batch to it; batches of sequences of like length "
        "(group_by_length of transformers) spare more",
        ("padding, of all elements", zeros / max(tokens, 1), "ratio"),
        ("padding that stays, of what is left", max(rest, 0.0), "ratio"), confidence=0.9,
        setting=r"[\w.]+\(.*\bpadding=.max_length", phases=MODEL, work_ratio=work_ratio,
    )  # fmt: skip


@_setting()
def double_precision(inputs: RuleInputs) -> Finding | None:
    """The model is trained in float64."""
    # Half of the parameters of what is trained are. A note where only batches are: whatever they
    # meet is computed in float64 until it is cast, and how much that is was not measured.
    share = max(_dtype_ratio(each, "float64") for each in inputs.settings.values())
    batches = sum("float64" in each.input_dtypes for each in inputs.settings.values())
    if share < DTYPE_RATIO and not batches:
        return None
    if share < DTYPE_RATIO:
        return make_finding(
            "float64: the model is called with batches that have twice the bytes of float32",
            "make batches float32 where they are made (arrays of numpy are float64): "
            ".float(), np.float32; copies and transfers take half the time then",
            ("ranks with such batches", float(batches), "count"),
            confidence=0.6,
            cause="batches",
            missing=("how much is computed in float64 before it is cast",),
        )
    touched, on_gpu = touched_ratio(inputs, STEP), inputs.uses_gpu
    busy = max(inputs.gpu_use.values(), default=None) if on_gpu else _computing_ratio(inputs)
    lost = None if busy is None else touched * busy * _FLOAT64_RATIO
    if lost is not None and not on_gpu:
        lost = max(lost, PRICES["float64"].lost_ratio(inputs))
    return make_finding(
        f"float64: {ratio_text(share)} of the parameters have twice the bytes of float32",
        "train in float32: model.float(), and no torch.set_default_dtype(torch.float64); arrays of "
        "numpy are float64, so that batches made from them need .float(); what needs the digits "
        "(Cholesky factors, Gaussian processes) alone in float64",
        ("float64, of what is trained", share, "ratio"),
        ("the GPU computes" if on_gpu else "computing, of forward", busy, "ratio"),
        ("forward, backward and optimizer, share of the step", touched, "ratio"), confidence=0.8,
        setting=SETS_FLOAT64, phases=() if on_gpu else STEP, lost_ratio=lost,
        missing=("how busy the GPU is",) if busy is None else (),
    )  # fmt: skip


SETS_FLOAT64 = (
    r"double\(\)|set_default_(dtype|tensor_type)\(|(to|type)\((.*\W)?torch\.(float64|double)\b"
    r"|\w+\(.*\bdtype=torch\.(float64|double)\b"
)


def _dtype_ratio(settings: RankSettings, dtype: str) -> float:
    """Of the parameters of all models that have any to train."""
    trained = [model.dtypes for model in settings.models if model.trainable_ratio]
    whole = sum(sum(dtypes.values()) for dtypes in trained)
    return sum(dtypes.get(dtype, 0) for dtypes in trained) / whole if whole else 0.0


@_setting(device="cpu", severity="warning")
def half_precision(inputs: RuleInputs) -> Finding | str | None:
    """Operators in a 16-bit format that the CPU has no arithmetic for: each number is converted."""
    known = [each for each in inputs.settings.values() if each.flags.get("cpu_half") is not None]
    if not known:
        return "the CPU's flags were not recorded"
    lacking = [
        (dtype, "autocast" if each.autocast == dtype else "parameters")
        for dtype in ("float16", "bfloat16")
        for each in known
        if (each.autocast == dtype or _dtype_ratio(each, dtype) >= DTYPE_RATIO)
        and dtype not in str(each.flags["cpu_half"]).split()
    ]
    if not lacking:
        return None
    dtype, how = lacking[0]
    found = make_finding(
        f"{dtype} ({how}) on a CPU that has no arithmetic for it",
        "compute in float32, or in bfloat16 where /proc/cpuinfo has avx512_bf16, amx_bf16 or bf16",
        confidence=0.9,
    )
    return _add_price(inputs, found, PRICES[dtype]) if dtype in PRICES else found


@_setting()
def deterministic_mode(inputs: RuleInputs) -> Finding | None:
    """Only deterministic algorithms are allowed, which is slower."""
    # On CPUs it costs next to nothing where no index operation is used: it is said there where the
    # least price measured is one. cuDNN's own switch concerns GPUs alone.
    titles = {"deterministic": "torch.use_deterministic_algorithms"}
    if inputs.uses_gpu:
        titles["cudnn_deterministic"] = "torch.backends.cudnn.deterministic"
    on = {name for each in inputs.settings.values() for name in titles if each.flags.get(name)}
    price = PRICES["deterministic"]
    if not on or not (inputs.uses_gpu or price.lost_ratio(inputs)):
        return None
    switches = " and ".join(titles[name] for name in sorted(on))
    return _add_price(inputs, make_finding(
        f"deterministic algorithms only: {switches}",
        "leave it off where runs need not repeat to the bit; with it, "
        "torch.utils.deterministic.fill_uninitialized_memory = False saves filling new tensors",
        confidence=0.6,
        setting=r"use_deterministic_algorithms\((?!False)|([\w.]+\.)?cudnn\.deterministic = True",
    ), price)  # fmt: skip


_SMALL_CONVOLUTIONS_NS = 5 * NS_PER_MS
"""Forward and backward of less were quicker without oneDNN, measured on two models."""


@_setting(device="cpu", severity="warning")
def mkldnn_off(inputs: RuleInputs) -> Finding | None:
    """Convolutions on CPUs run without oneDNN."""
    # Matrix products in float32 are MKL's or OpenBLAS' either way.
    off = [each for each in inputs.settings.values() if each.flags.get("mkldnn") is False]
    split = usual_split(inputs.by_rank[typical_rank(inputs)])
    small = sum(split[phase] or 0.0 for phase in MODEL) < _SMALL_CONVOLUTIONS_NS
    if small or not any(has_layers(each, ("Conv",)) for each in off):
        return None
    price = PRICES["mkldnn_convolutions"]
    return _add_price(inputs, make_finding(
        f"oneDNN is switched off: models of convolutions take {price.least:.1f}x to "
        f"{price.most:.1f}x as long, at least {ratio_text(price.lost_ratio(inputs))} of the step",
        "remove torch.backends.mkldnn.enabled = False (or mkldnn.flags(enabled=False))",
        confidence=0.7,
        setting=r"([\w.]+\.)?mkldnn\.enabled = False|flags\(.*\benabled=False",
    ), price)  # fmt: skip


def _count_tensors(
    found: Sequence[UnusedGradients] | Sequence[DiscardedGradients],
) -> tuple[float, float]:
    """Parameters, and numbers in them."""
    return (float(sum(each.tensor_count or 0 for each in found)),
            float(sum(each.number_count or 0 for each in found)))  # fmt: skip


_LIKE_FORWARD = 0.7  # Backward of a model takes at least so much of what its share of forward says


@_setting()
def unused_gradients(inputs: RuleInputs) -> Finding | None:
    """Gradients are computed that no optimizer uses."""
    # How long a model's backward takes is known by its share of forward, where the model was called
    # by itself, none of it is trained, and no gradient goes on through it to something that is.
    rank, unused = max(
        ((rank, [x for x in each.unused_gradients if x.tensor_count])
         for rank, each in inputs.settings.items()),
        key=lambda own: (sum(x.number_count or 0 for x in own[1]), -own[0]),
    )  # fmt: skip
    if not unused:
        return None
    tensors, numbers = _count_tensors(unused)
    alone = [x.root or 0 for x in unused if x.stepped_count == x.passed_count == 0 and x.complete]
    root, calls = inputs.analyzer.phase_spans(rank, "forward")
    own = Intervals(*(edges[np.isin(root, alone)] for edges in calls))
    share = total(own) / max(total(calls), 1)
    lost = None if inputs.uses_gpu else share * touched_ratio(inputs, ("backward",)) or None
    passes = any(x.passed_count for x in unused)
    trained = max((model.trainable_count or 0 for model in inputs.settings[rank].models), default=0)
    exchanged = trained if len(inputs.world) > 1 else 0  # numbers of gradients, theirs included
    names = ", ".join(dict.fromkeys(visible(x.name or "a module") for x in unused))
    return make_finding(
        f"gradients that no optimizer uses: {tensors:.0f} parameter{'s' * (tensors > 1)} of "
        f"{names} in no param group, which nothing changes",
        "requires_grad_(False) for these parameters"
        + ("; a gradient goes on through their layers to others that train: no torch.no_grad() "
           "around those" if passes
           else ", and torch.no_grad() around the call of a model that is only asked, with nothing "
           "trained before it (a teacher, a frozen backbone): no backward goes through it then"),
        ("parameters", tensors, "count"), ("numbers in them", numbers, "count"),
        *([("their modules, of forward", share, "ratio")] if share else []), confidence=0.9,
        phases=("backward",), lost_ratio=lost, unsure_ratio=1 - _LIKE_FORWARD,
        exchange_ratio=min(numbers / exchanged, 1.0) if exchanged else 0.0,
        code_lines=_called_in(inputs.load_samples(rank), own, lost) if lost else (),
        missing=("which part of backward is theirs",) if lost is None and not inputs.uses_gpu
        else (),
    )  # fmt: skip


WEIGHTS_OF_BACKWARD = (0.36, 0.43, 0.51)
"""Of a layer's backward, what gradients of its weights take: least, usual, most of six models of
convolutions, linear layers and attention (settings_price.md); those of an LSTM take nothing."""


_RECURRENT = {"LSTM", "GRU", "RNN"}


@_setting()
def discarded_gradients(inputs: RuleInputs) -> Finding | None:
    """Gradients are computed that are cleared before their optimizer's step."""
    # A generator's loss goes back through a discriminator, whose weights get gradients that its
    # own step does not want. What these take is known by the discriminator's share of the forward
    # of that pass, where it has no other parameters.
    rank, thrown = max(
        ((rank, [x for x in each.discarded_gradients if x.tensor_count])
         for rank, each in inputs.settings.items()),
        key=lambda own: (sum(x.number_count or 0 for x in own[1]), -own[0]),
    )  # fmt: skip
    if not thrown:
        return None
    (root, calls), (_, passes), (tag, steps) = (
        inputs.analyzer.phase_spans(rank, name) for name in ("forward", "backward", "optimizer")
    )
    call_ns, pass_ns = (each.ends - each.starts for each in (calls, passes))
    next_tag = np.append(tag, -1)
    of_call, of_pass = (
        next_tag[np.searchsorted(steps.starts, each.starts)] for each in (calls, passes)
    )
    models = inputs.settings[rank].models
    recurrent = {each.name for each in models if _RECURRENT & each.layers.keys()}
    share, asked = 0.0, np.zeros(len(root), dtype=np.bool_)
    for each in thrown:
        if each.other_count or each.name in recurrent or inputs.uses_gpu:
            continue
        own = np.isin(of_pass, each.by)
        theirs = np.isin(of_call, each.by) & (root == each.root)
        # What the pass goes through besides may have been called before: once for each pass.
        others = (call_ns[root == other] for other in np.unique(root[root != each.root]))
        beside = sum(min(float(ns.mean()) * own.sum(), float(ns.sum())) for ns in others)
        forward_ns = float(call_ns[theirs].sum())
        ratio = forward_ns / max(forward_ns + beside, 1.0)
        share += ratio * float(pass_ns[own].sum()) / max(float(pass_ns.sum()), 1.0)
        asked |= theirs
    least, usual, _ = WEIGHTS_OF_BACKWARD
    tensors, numbers = _count_tensors(thrown)
    exchanged = sum(each.trainable_count or 0 for each in models) if len(inputs.settings) > 1 else 0
    names = ", ".join(dict.fromkeys(visible(x.name or "a module") for x in thrown))
    return make_finding(
        f"gradients of {names} are made in another optimizer's backward pass and cleared before "
        "its own step",
        "requires_grad_(False) for its parameters while that pass is made, and True after it; or "
        "loss.backward(inputs=list(generator.parameters())), with the parameters that it is for",
        ("parameters", tensors, "count"), ("numbers in them", numbers, "count"),
        *([("their modules' part of backward", share, "ratio"),
           (f"of a layer's backward, its weights' ({MEASURED})", usual, "ratio")] if share else []),
        confidence=0.8, phases=("backward",), unsure_ratio=1 - least / usual,
        work_ratio=usual * share,
        code_lines=_called_in(
            inputs.load_samples(rank), Intervals(*(edges[asked] for edges in calls)),
            usual * share * touched_ratio(inputs, ("backward",)),
        ) if share else (),
        exchange_ratio=numbers / (exchanged + numbers) if exchanged else 0.0,
        missing=("which part of backward is theirs",) if not share and not inputs.uses_gpu else (),
    )  # fmt: skip


def _called_in(samples: CodeSamples, calls: Intervals, share: float) -> tuple[CodeLine, ...]:
    """The job's line that most of some calls is in, with those that lead there."""
    time_ns = samples.time_ns
    inside = (samples.worker < 0) & (covered_lengths(calls, time_ns, time_ns + 1) > 0)
    at = calling_place(samples.tree, samples.stack[inside], samples.weight_ns[inside])
    if at is None:
        return ()
    return (CodeLine(
        file=at.file, line=at.line, function=at.function, share=share, low=None, high=None,
        of="the step", sample_count=None, callees=(),
        callers=tuple(place_text(*each) for each in at.callers),
    ),)  # fmt: skip


def _optimizers(inputs: RuleInputs) -> Iterator[OptimizerSettings]:
    return chain.from_iterable(each.optimizers for each in inputs.settings.values())


UNFUSED_ADAM = "unfused_adam"
FUSED_GAINS = (0.44, 0.75, 0.9)
"""What fused=True saves of an Adam's update on CPUs: least, usual, most (settings_price.md)."""


@_setting(device="cpu")
def unfused_adam(inputs: RuleInputs) -> Finding | None:
    """Adam or AdamW on CPUs goes over its numbers several times, where fused=True does so once."""
    # It is torch's default, and so a fact however long it takes; the ledger's own work of the
    # optimizer gives its gain. Source: torch.optim, "Algorithms"; on CPUs since PyTorch 2.4.
    loops = [each.name for each in _optimizers(inputs) if each.name in ("Adam", "AdamW")
             and not each.fused and not each.mixed and each.devices == ("cpu",)]  # fmt: skip
    least, usual, most = FUSED_GAINS
    if not loops or touched_ratio(inputs, ("optimizer",)) * least < PROBLEM_RATIO:
        return None
    name = min(loops)
    return make_finding(
        f"{name} without fused=True, which saves {ratio_text(least)} to {ratio_text(most)} of its "
        "update",
        f"{name}(..., fused=True), on CPUs since PyTorch 2.4; results differ by rounding",
        (f"usual part of the update that it saves ({MEASURED})", usual, "ratio"),
        confidence=0.7,
        setting=rf"{name}\(",
    )


@_setting(device="cuda")
def optimizer_loop(inputs: RuleInputs) -> Finding | None:
    """The optimizer updates parameters one by one on a GPU, where one call could update all."""
    # Left alone, torch takes foreach there by itself; on CPUs the loop is what it takes, and no
    # finding. Source: torch.optim, "Algorithms" (fused, then foreach, then for-loop by speed).
    loops = [(each.tensor_count or 0, each.name) for each in _optimizers(inputs)
             if each.foreach is False and not each.fused and "cuda" in each.devices]  # fmt: skip
    count, name = max(loops, key=lambda loop: loop[0], default=(0, None))
    share = touched_ratio(inputs, ("optimizer",))
    if count < LOOP_MIN_TENSORS or share < PROBLEM_RATIO:
        return None
    return make_finding(
        f"{name} updates {count} tensors one by one (foreach=False), "
        f"{ratio_text(share)} of the step",
        "leave foreach out, or pass fused=True",
        ("tensors", float(count), "count"),
        ("optimizer, share of the step", share, "ratio"),
        confidence=0.7,
    )


@_setting()
def ddp_arguments(inputs: RuleInputs) -> Finding | str | None:
    """DistributedDataParallel reduces gradients more often, or looks for more, than it must."""
    # One look a second falls into no_sync with a known chance, where it is used: it is missing
    # where none of so many looks found it. Source: Li et al., PyTorch Distributed (VLDB 2020),
    # section 3.2.
    # One wrapped model and one optimizer: several have backward passes of their own.
    wrapped = [
        (rank, each)
        for rank, each in inputs.settings.items()
        if sum(m.ddp is not None for m in each.models) == 1 == len(each.optimizers)
    ]
    if not wrapped or len(inputs.world) < 2:
        return "no DistributedDataParallel of several ranks"
    count = number(inputs.steps["micro_step_count"].median()) or 1.0
    if count >= 2 and all(_never_skips_sync(inputs, *each, count) for each in wrapped):
        return make_finding(
            f"gradients of {count:.0f} backward passes are accumulated, and reduced after each one",
            "all but the last backward of a step under `with model.no_sync():`, its forward too",
            ("backward passes of a step", count, "count"), confidence=0.8, setting=r"backward\(",
            cause="no_sync", exchange_ratio=(count - 1) / count, phases=("backward",),
            missing=("how long its exchanges take",),
        )  # fmt: skip
    ddp = [model.ddp for _, each in wrapped for model in each.models if model.ddp]
    unused = any(each.get("find_unused_parameters") is True for each in ddp)
    if unused and not any(each.get("static_graph") is True for each in ddp):
        price = PRICES["find_unused_parameters"]
        lost = "" if inputs.uses_gpu else ratio_text(price.lost_ratio(inputs))
        return _add_price(inputs, make_finding(
            "find_unused_parameters=True: the graph is walked after each forward"
            + (f", at least {lost} of the step" if lost else ""),
            "leave it out where every parameter gets a gradient in every step; where the "
            "unused ones are always the same, static_graph=True does without",
            confidence=0.5,
            setting=r"\w+\(.*find_unused_parameters=True",
            cause="find_unused_parameters",
        ), price)  # fmt: skip
    return None


def _never_skips_sync(inputs: RuleInputs, rank: int, settings: RankSettings, count: float) -> bool:
    # DistributedDataParallel prepares the exchange in forward: under no_sync, that must be, too.
    looks = settings.looks
    if looks.no_sync_count:
        passes = inputs.analyzer.exchanges(rank)
        return passes is not None and (1 - passes[1]) * count < 1 / 2
    if not looks.look_count or looks.no_sync_count is None:
        return False
    inside = touched_ratio(inputs, MODEL) * (count - 1) / count
    return (1 - inside) ** looks.look_count <= NO_SYNC_MISSED_RATIO


@_setting(ranks=2)
def fsdp_units(inputs: RuleInputs) -> Finding | None:
    """FSDP shards the model as one unit, so that all parameters are gathered at once."""
    # Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3.2 and 3.3: parameters of a unit are
    # gathered before it computes, the next unit's meanwhile.
    for model in (model for settings in inputs.settings.values() for model in settings.models):
        count = model.tensor_count or 0
        if model.fsdp_unit_count == 1 and count >= LOOP_MIN_TENSORS:
            return make_finding(
                f"FSDP wraps the whole of {model.name} as one unit: all parameters are "
                "gathered before forward, and nothing computes meanwhile",
                "a unit for each block: fully_shard(block) for every layer before the model "
                "itself, or FullyShardedDataParallel(auto_wrap_policy=...); it also takes less "
                "memory",
                ("units", 1.0, "count"),
                ("parameters, each a tensor", float(count), "count"),
                confidence=0.6,
            )
    return None


@_setting(device="cuda")
def fast_paths_off(inputs: RuleInputs) -> Finding | None:
    """Faster arithmetic that the GPU has is not switched on: TF32, cuDNN's search for algorithms.

    Both change results in the last digits, or from run to run, so that they are the user's choice;
    what they would save here is not measured. Source: NVIDIA's data sheet of the A100, 19.5 TFLOPS
    in float32 and 156 in TF32; PyTorch's Performance Tuning Guide, cuDNN auto-tuner.
    """
    ranks = inputs.settings.values()
    found = [(what, remedy) for what, remedy, is_off in _PATHS if all(map(is_off, ranks))]
    if not found:
        return None
    titles, remedies = ("; ".join(texts) for texts in zip(*found, strict=True))
    return make_finding(titles, remedies, confidence=0.5)


def _without_tf32(settings: RankSettings) -> bool:
    """Products of float32 matrices on a GPU that has TF32, by a model that has such matrices."""
    flags = settings.flags
    able = re.fullmatch(r"(\d+)\.(\d+)", str(flags.get("compute_capability")))
    if able is None or tuple(map(int, able.groups())) < TF32_CAPABILITY or settings.autocast:
        return False
    full = flags.get("matmul_precision") in ("highest", None) and flags.get("tf32_matmul") != "tf32"
    numbers = sum((Counter(model.dtypes) for model in settings.models), Counter[str]())
    single = max(numbers, key=lambda dtype: numbers[dtype], default=None) == "float32"
    matrices = ("Linear", "NonDynamicallyQuantizableLinear", "Conv", "LSTM", "GRU", "RNN")
    return full and single and has_layers(settings, matrices)


def _without_search(settings: RankSettings) -> bool:
    names = ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "deterministic")
    enabled, searches, *chosen = map(settings.flags.get, names)
    is_off = enabled is True and searches is False and True not in chosen
    return is_off and has_layers(settings, ("Conv",))


def has_layers(settings: RankSettings, names: tuple[str, ...]) -> bool:
    """Whether a model of a rank has layers whose class begins with one of some names."""
    return any(layer.startswith(names) for model in settings.models for layer in model.layers)


_PATHS = (
    ("float32 matrix products do not use the tensor cores",
     "torch.set_float32_matmul_precision('high') (TF32: 10 bits of mantissa), or torch.autocast "
     "with bfloat16", _without_tf32),
    ("cuDNN uses the first algorithm for each convolution",
     "torch.backends.cudnn.benchmark = True, where shapes of batches seldom change",
     _without_search),
)  # fmt: skip
"""What is off, what switches it on, and whether it is off on a rank."""


@_setting(device="cpu")
def threads_over_cores(inputs: RuleInputs) -> Finding | None:
    """Operators are computed by more threads than the rank has cores."""
    # Twice as many as cores or CPU quota: the threads of an operator wait for the last one of them
    # (OpenMP's barrier), which then stands in line for a core.
    over = {
        rank: (each.operator_threads or 0) / ceil(each.usable_cores)
        for rank, each in inputs.settings.items()
        if each.usable_cores
        and (each.operator_threads or 0) >= THREADS_PER_CORE * ceil(each.usable_cores)
    }
    if not over:
        return None
    rank = max(over, key=lambda r: (over[r], -r))
    settings = inputs.settings[rank]
    cores, sharing = settings.usable_cores or 1.0, _sharing_counts(inputs).get(rank, 1)
    limited = (settings.cpu_limit_cores or cores + 1) <= cores
    where = "the CPU limit of its control group" if limited else "its CPU affinity"
    return make_finding(
        f"{settings.operator_threads} threads per operator on {cores:g} cores",
        f"OMP_NUM_THREADS={max(int(cores) // sharing, 1)} or torch.set_num_threads"
        + (f", as {sharing} ranks share the cores" if sharing > 1 else "")
        + (": torch counts the machine's cores, and knows no limit" if limited else ""),
        ("threads per operator", float(settings.operator_threads or 0), "count"),
        (f"cores, by {where}", cores, "cores"),
        confidence=0.7,
        setting=SETS_THREADS,
        missing=(
            "what it costs: it depends on what else wants the cores, and on how threads wait",
        ),
        rank=rank if len(over) == 1 < len(inputs.settings) else None,
    )


@_setting(device="cpu")
def threads_under_cores(inputs: RuleInputs) -> Finding | None:
    """Operators are computed by fewer threads than the rank has cores for."""
    # torchrun sets OMP_NUM_THREADS=1 where a node has several ranks and it is not set.
    sharing = _sharing_counts(inputs)
    own = {
        rank: (each.operator_threads or 0, int((each.usable_cores or 0) // sharing.get(rank, 1)))
        for rank, each in inputs.settings.items()
        if each.operator_threads
    }
    rank = max(own, key=lambda r: (own[r][1] / own[r][0], -r), default=None)
    if rank is None or own[rank][1] < FEW_THREADS * own[rank][0]:
        return None
    threads, cores = own[rank]
    host = inputs.hosts.get(rank)
    others = used_by_others(inputs, host) or 0.0
    node_cores = inputs.node_cpus[host].core_count if others and host else cores
    taken = (inputs.worker_cores(rank) or 0.0) + others * cores / (node_cores or cores)
    if cores - taken < threads + 0.5:  # its loader's workers use them, or other processes
        return None
    by_torchrun = ", as torchrun sets it" * (threads == 1 and len(inputs.world) > 1)
    set_threads, variable = f"torch.set_num_threads({cores})", f"OMP_NUM_THREADS={cores}, or "
    asked = {
        str(threads): f"{variable}{set_threads}: OMP_NUM_THREADS is {threads} there{by_torchrun}",
        str(cores): f"{set_threads}: the job itself sets fewer than OMP_NUM_THREADS",
    }
    otherwise = "the job sets fewer (torch.set_num_threads), or another variable does"
    return make_finding(
        f"operators use {threads} of {cores} cores",
        asked.get(
            inputs.settings[rank].variables.get("OMP_NUM_THREADS", ""),
            f"{variable}{set_threads}: {otherwise}",
        ),
        ("threads per operator", float(threads), "count"),
        ("cores of the rank", float(cores), "cores"),
        confidence=0.7,
        setting=SETS_THREADS,
        missing=("what it gains: small operators gain nothing",),
    )


def _sharing_counts(inputs: RuleInputs) -> dict[int, int]:
    """By rank: how many ranks, it included, share its cores; of ranks whose placement is known."""
    return {placement.rank: len(group) for group in inputs.core_groups for placement in group}


def settings_differ(inputs: RuleInputs) -> Finding | str | None:
    """A rank was run with other settings than the others."""
    # What it costs is said by the rule on that setting, or by the one on the slow rank.
    if len(inputs.settings) < 2:
        return "settings of fewer than two ranks were recorded"
    found = differences(inputs.settings)
    if not found:
        return None
    ranks = sorted({rank for difference in found for rank in difference.others})
    values = [" or ".join(sorted(set(map(str, each.others.values())))) for each in found]
    texts = (f"{each.name} {other} in place of {each.usual}"
             for each, other in zip(found, values, strict=True))  # fmt: skip
    return make_finding(
        f"{ranks_text(ranks)} with other settings: {'; '.join(texts)}",
        "use the same settings on all ranks; what is set under `if rank == 0` may make the others "
        "wait",
        ("settings that differ", float(len(found)), "count"),
        confidence=0.9,
        severity="info",
        rank=ranks[0] if len(ranks) == 1 else None,
    )
