"""Switches for finding errors are on, or a fast path between GPUs is switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.setting_prices import MODEL, PRICES, UNKNOWN, lost_ratio
from haiprof.diagnosis.thresholds import MIN_STEPS
from haiprof.run_analysis.settings import RankSettings

RULE = "costly_switches"
_OFF = ("", "0", "off", "false", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    name: str
    does: str
    """What it makes slower."""
    is_on: Callable[[RankSettings], bool]
    concerns: Callable[[RuleInputs], bool]
    """Whether it has an effect on such a job at all."""
    price: str | None = None
    """Of `PRICES`; None where none was measured."""


def costly_switches(inputs: RuleInputs) -> Judgement:
    """Fires where one is on that has an effect on this job; one finding names them all."""
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    on = [
        switch
        for switch in _SWITCHES
        if switch.concerns(inputs) and any(switch.is_on(each) for each in inputs.settings.values())
    ]
    if not on:
        return None
    prices = {s.name: lost_ratio(inputs, PRICES[s.price]) for s in on if s.price}
    prices = {} if inputs.uses_gpu else prices
    unknown = [switch.name for switch in on if switch.name not in prices]
    return Finding(
        rule=RULE,
        title="; ".join(f"{switch.name}: {switch.does}" for switch in on),
        evidence=tuple(
            Evidence(name=f"{s.name}: of the step at least", value=prices.get(s.name), unit="ratio")
            for s in on
        ),
        remedy=f"leave out {', '.join(switch.name for switch in on)}",
        confidence=0.8,
        severity="info",
        lost_ratio=max(prices.values(), default=None),
        phases=MODEL,
        missing=(f"{UNKNOWN} ({', '.join(unknown)})",) if unknown else (),
    )


def _variable(name: str, *values: str) -> Callable[[RankSettings], bool]:
    """Whether a variable has one of these values; without any, whether it is switched on."""

    def is_on(settings: RankSettings) -> bool:
        value = settings.variables.get(name, "").strip().lower()
        return value in values if values else value not in _OFF

    return is_on


def _always(inputs: RuleInputs) -> bool:
    return True


def _on_gpu(inputs: RuleInputs) -> bool:
    return inputs.uses_gpu


def _in_nccl(inputs: RuleInputs) -> bool:
    backends = [str(each.flags.get("backend")) for each in inputs.settings.values()]
    return inputs.uses_gpu and len(inputs.world) > 1 and any("nccl" in name for name in backends)


def _in_nccl_on_one_node(inputs: RuleInputs) -> bool:
    hosts = [each.host for each in inputs.settings.values()]
    return _in_nccl(inputs) and len(set(hosts)) < len(hosts)


def _in_nccl_on_nodes(inputs: RuleInputs) -> bool:
    return _in_nccl(inputs) and len({each.host for each in inputs.settings.values()}) > 1


def _has_ranks(inputs: RuleInputs) -> bool:
    return len(inputs.world) > 1


_SWITCHES = (
    _Switch(
        name="TORCH_DISTRIBUTED_DEBUG=DETAIL",
        does="each collective is checked against those of all ranks first",
        is_on=lambda settings: settings.flags.get("distributed_debug") == "DETAIL",
        concerns=_has_ranks,
    ),
    _Switch(
        name="tracemalloc",
        does="Python notes where each object was made",
        is_on=lambda settings: settings.flags.get("tracemalloc") is True,
        concerns=_always,
        price="tracemalloc",
    ),
    _Switch(
        name="CUDA_LAUNCH_BLOCKING",
        does="the host waits for each kernel",
        is_on=_variable("CUDA_LAUNCH_BLOCKING"),
        concerns=_on_gpu,
    ),
    _Switch(
        name="PYTORCH_NO_CUDA_MEMORY_CACHING",
        does="each tensor is a cudaMalloc and a cudaFree, which wait for the GPU",
        is_on=lambda settings: "PYTORCH_NO_CUDA_MEMORY_CACHING" in settings.variables,
        concerns=_on_gpu,
    ),
    _Switch(
        name="NCCL_P2P_DISABLE",
        does="GPUs of a node exchange data through the host's memory",
        is_on=_variable("NCCL_P2P_DISABLE"),
        concerns=_in_nccl_on_one_node,
    ),
    _Switch(
        name="NCCL_SHM_DISABLE",
        does="ranks of a node use the network where they have no direct path",
        is_on=_variable("NCCL_SHM_DISABLE"),
        concerns=_in_nccl_on_one_node,
    ),
    _Switch(
        name="NCCL_IB_DISABLE",
        does="nodes exchange data by TCP, not by RDMA",
        is_on=_variable("NCCL_IB_DISABLE"),
        concerns=_in_nccl_on_nodes,
    ),
    _Switch(
        name="NCCL_DEBUG=TRACE",
        does="NCCL writes a line for each call",
        is_on=_variable("NCCL_DEBUG", "trace"),
        concerns=_in_nccl,
    ),
    _Switch(
        name="PYTHONMALLOC=debug",
        does="each of Python's allocations is filled and checked",
        is_on=_variable("PYTHONMALLOC", "debug", "malloc_debug", "pymalloc_debug"),
        concerns=_always,
    ),
)
"""By what each does: PyTorch's and NCCL's lists of environment variables, Python's -X options."""
