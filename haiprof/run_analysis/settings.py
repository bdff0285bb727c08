"""Settings of each rank: what it was run with, where it ran, and where ranks differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from haiprof.base.control_group_limits import parse_cpu_list
from haiprof.run_analysis.run_files import (
    RankFiles,
    RunFiles,
    counts,
    entries,
    integer,
    mapping,
    number,
    objects,
    read_record,
    switch,
    text,
)
from haiprof.run_format.entities import process_key
from haiprof.run_format.setting_lines import DISCARDED, FLAGS, SEEN, SETTINGS, UNUSED

Scalar = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A module that was called outermost; see `run_format.setting_lines.MODEL_FIELDS`."""

    name: str | None
    tensor_count: int | None
    parameter_count: int | None
    trainable_count: int | None
    dtypes: Mapping[str, int]
    devices: tuple[str, ...]
    layers: Mapping[str, int]
    ddp: Mapping[str, Scalar] | None
    fsdp_unit_count: int | None

    @property
    def trainable_ratio(self) -> float | None:
        """Share of its parameters that require gradients; None where not known."""
        if not self.parameter_count or self.trainable_count is None:
            return None
        return self.trainable_count / self.parameter_count

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient for each parameter that requires one; 0 where not known."""
        whole = sum(_BYTES.get(name, 4) * count for name, count in self.dtypes.items())
        return round(whole * (self.trainable_ratio or 0.0))


_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2, "complex64": 8}  # of one number; others have 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An optimizer that has stepped; see `run_format.setting_lines.OPTIMIZER_FIELDS`."""

    name: str | None
    tensor_count: int | None
    foreach: bool | None
    fused: bool | None
    capturable: bool | None
    devices: tuple[str, ...]
    mixed: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """What looks at switches, one a second, have seen; None where none were taken."""

    look_count: int | None
    anomaly_count: int | None
    profiler_count: int | None
    no_sync_count: int | None
    kept_graph_count: int | None
    mask_column_count: int | None
    empty_column_count: int | None
    mask_token_count: int | None
    empty_token_count: int | None
    guessed_mask_count: int | None
    collect_count: int | None
    collect_ns: int | None
    collect_file: str | None
    collect_line: int | None
    collect_function: str | None
    hook_look_count: int | None
    hooks: tuple[CallHook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHook:
    """What Python calls at each call; see `run_format.setting_lines.HOOK_FIELDS`."""

    sets: str | None
    function: str | None
    file: str | None
    line: int | None
    count: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedGradients:
    """Of a module that was called outermost; see `run_format.setting_lines.UNUSED_FIELDS`."""

    root: int | None
    name: str | None  # its class
    tensor_count: int | None
    number_count: int | None
    stepped_count: int | None
    passed_count: int | None
    complete: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardedGradients:
    """Of a module that was called outermost; see `run_format.setting_lines.DISCARDED_FIELDS`."""

    root: int | None
    name: str | None  # its class
    tensor_count: int | None
    number_count: int | None
    other_count: int | None
    by: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Of the last process of a rank."""

    rank: int
    host: str | None
    flags: Mapping[str, Scalar]
    """By the names of `run_format.setting_lines.FLAGS`; None where this torch does not tell."""
    variables: Mapping[str, str]  # environment variables that change speed, credentials masked
    operator_threads: int | None
    cores: int | None  # CPUs that the main thread may run on
    cpu_limit_cores: float | None
    memory_limit_bytes: int | None
    gc_enabled: bool | None
    gc_thresholds: tuple[int, ...]
    autocast: str | None  # what it made of operators when a model was called first; None: off then
    input_dtypes: tuple[str, ...]  # of the floating tensors that models were called with first
    models: tuple[ModelSettings, ...]
    optimizers: tuple[OptimizerSettings, ...]  # those that were alive when settings were read
    stepped_optimizer_count: int
    looks: Looks
    unused_gradients: tuple[UnusedGradients, ...]  # as they were looked at last
    discarded_gradients: tuple[DiscardedGradients, ...]
    problems: tuple[str, ...]  # what could not be read, and why

    @property
    def usable_cores(self) -> float | None:
        """What threads of this rank can have of the machine at most."""
        return min((float(v) for v in (self.cores, self.cpu_limit_cores) if v), default=None)

    @property
    def gradient_bytes(self) -> int:
        """Of the largest model: one that wraps another has the same parameters."""
        return max((model.gradient_bytes for model in self.models), default=0)

    def on_ratio(self, name: str) -> float:
        """Share of the looks at which `anomaly` or `profiler` was on; by the flag without looks."""
        count = getattr(self.looks, f"{name}_count")
        if not self.looks.look_count or count is None:
            return 1.0 if self.flags.get(name) is True else 0.0
        return min(float(count) / self.looks.look_count, 1.0)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that is not the same on all ranks."""

    name: str
    usual: Scalar  # what most ranks have
    others: Mapping[int, Scalar]  # what the other ranks have


def read_settings(files: RunFiles) -> dict[int, RankSettings]:
    """By rank, of its last attempt; ranks without the line are left out."""
    return {
        number: _rank_settings(rank, line)
        for number, rank in files.last_attempts().items()
        if (line := rank.last(SETTINGS))
    }


def differences(settings: Mapping[int, RankSettings]) -> list[Difference]:
    """Settings that a few ranks have otherwise than most; models may differ (pipelines).

    A rank whose value could not be read (None) is left out: its process group had ended, or an
    optimizer that had stepped was gone or made later.
    """
    found, of_ranks = [], {rank: _common_settings(each) for rank, each in settings.items()}
    for name in next(iter(of_ranks.values()), ()):
        values = {rank: each[name] for rank, each in of_ranks.items()}
        if name not in _MODES:
            values = {rank: each for rank, each in values.items() if each is not None}
        counts = {v: list(values.values()).count(v) for v in values.values()}
        usual = max(counts, key=lambda v: (counts[v], str(v)), default=None)
        others = {rank: v for rank, v in values.items() if v != usual}
        if others and len(others) < len(values) / 2 + (len(values) == 2):
            found.append(Difference(name=name, usual=usual, others=others))
    return found


def _rank_settings(rank: RankFiles, line: Mapping[str, Any]) -> RankSettings:
    collector, flags = mapping(line.get("gc")), mapping(line.get("flags"))
    variables = mapping(rank.last("environment").get("variables")).items()
    known = ((text(name), text(value)) for name, value in variables)
    autocast = (text(root.get("autocast")) for root in rank.of_type("root"))
    thresholds = (integer(value) for value in entries(collector.get("thresholds")))
    names = rank.names("root")
    inputs = (name for x in rank.of_type("root_input") for name in entries(x.get("dtypes")))
    return read_record(
        RankSettings, line, rank=rank.rank, host=text(rank.report.get("host")),
        flags={name: _scalar(flags.get(name)) for name in FLAGS},
        variables={n: v for n, v in known if n is not None and v is not None},
        operator_threads=integer(rank.report.get("operator_threads")),
        gc_enabled=switch(collector.get("enabled")),
        gc_thresholds=tuple(value for value in thresholds if value is not None),
        autocast=next(filter(None, autocast), None),
        input_dtypes=tuple(sorted({name for each in inputs if (name := text(each))})),
        models=tuple(
            read_record(ModelSettings, model, ddp=_scalars(model.get("ddp")))
            for model in objects(line.get("models"))
        ),
        optimizers=tuple(
            read_record(OptimizerSettings, each, devices=tuple(counts(each.get("devices"))))
            for each in objects(line.get("optimizers"))
        ),
        stepped_optimizer_count=len(rank.of_type("optimizer")),
        looks=read_record(
            Looks, rank.last(SEEN),
            hooks=tuple(read_record(CallHook, x) for x in objects(rank.last(SEEN).get("hooks"))),
        ),
        unused_gradients=tuple(
            read_record(UnusedGradients, x, name=names.get(integer(x.get("root")) or 0))
            for x in objects(rank.last(UNUSED).get("roots"))
        ),
        discarded_gradients=tuple(
            read_record(DiscardedGradients, x, name=names.get(integer(x.get("root")) or 0))
            for x in objects(rank.last(DISCARDED).get("roots"))
        ),
    )  # fmt: skip


def _scalars(value: object) -> dict[str, Scalar] | None:
    return {str(k): _scalar(v) for k, v in value.items()} if isinstance(value, dict) else None


_SWITCHES = (
    "anomaly", "deterministic", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic",
    "mkldnn", "matmul_precision", "tf32_matmul", "default_dtype", "distributed_debug",
)  # fmt: skip
_MODES = {
    "threads per operator": "operator_threads", "CPUs that it may use": "cores",
    "CPU limit of its control group": "cpu_limit_cores",
    "memory limit of its control group": "memory_limit_bytes", "autocast": "autocast",
}  # fmt: skip
"""Fields in which None means that there is no limit or mode; of others that it was not read."""


def _common_settings(settings: RankSettings) -> dict[str, Scalar]:
    """What ranks should have in common, by the name that is shown."""
    used = [f"{o.name} foreach={o.foreach} fused={o.fused}" for o in settings.optimizers]
    return {
        **{FLAGS[name].partition(":")[0]: settings.flags.get(name) for name in _SWITCHES},
        **{name: getattr(settings, field) for name, field in _MODES.items()},
        "optimizers": ", ".join(used) or "none"
        if len(used) >= settings.stepped_optimizer_count
        else None,
    }


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, bool) else text(value) or number(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One rank as it was placed last."""

    rank: int
    host: str
    allowed_cpus: frozenset[int] | None  # cores that it may run on; None where not known
    cpu_nodes: tuple[int, ...]  # NUMA nodes of those; empty where not known
    memory_pages: Mapping[int, int]  # sampled pages by NUMA node; empty where not known
    thread_count: int | None
    gpu_node: int | None  # NUMA node of its GPU; None without a GPU, or where firmware does not say
    adapters: tuple[tuple[str, int], ...]  # adapters for RDMA with their NUMA node, where known

    @property
    def nodes(self) -> frozenset[int]:
        """Every NUMA node that is spoken of."""
        gpu = () if self.gpu_node is None else (self.gpu_node,)
        adapters = (node for _, node in self.adapters)
        return frozenset((*self.cpu_nodes, *self.memory_pages, *gpu, *adapters))

    def pages_off(self, nodes: Iterable[int]) -> float | None:
        """Share of the sampled pages that lie on other nodes; None without any."""
        total = sum(self.memory_pages.values())
        here = sum(self.memory_pages.get(node, 0) for node in set(nodes))
        return 1 - here / total if total else None


def placements(run: RunFiles) -> dict[int, Placement]:
    """The last placement of each rank's last attempt, where one was recorded."""
    lines = {
        (node.host, *key): line
        for node in run.nodes
        for line in node.of_type("placement")
        if (key := process_key(line))
    }
    found = {}
    for rank_number, rank in run.last_attempts().items():
        # As the rank names it; of a run with one node that one, whatever it is called.
        hosts = [node.host for node in run.nodes]
        host = hosts[0] if len(hosts) == 1 else text(rank.report.get("host")) or ""
        if (line := lines.get((host, *process_key(rank.report)))) is not None:
            adapters = objects(line.get("nics"))
            named = ((text(each.get("name")), _node(each.get("node"))) for each in adapters)
            nodes = (_node(value) for value in entries(line.get("cpu_nodes")))
            held = mapping(line.get("memory_nodes"))
            pages = ((int(name), integer(held[name])) for name in held if name.isdecimal())
            found[rank_number] = Placement(
                rank=rank_number, host=host, allowed_cpus=cpu_list(line.get("allowed_cpus")),
                cpu_nodes=tuple(sorted({node for node in nodes if node is not None})),
                memory_pages={node: count for node, count in pages if count and count > 0},
                thread_count=integer(line.get("thread_count")),
                gpu_node=_node(line.get("gpu_node")),
                adapters=tuple((name, node) for name, node in named if name and node is not None),
            )  # fmt: skip
    return found


def cpu_list(value: object) -> frozenset[int] | None:
    """Numbers of a kernel CPU list such as `0-15,32`; None for anything else.

    Source: Linux Documentation/admin-guide/cputopology.rst.
    """
    with contextlib.suppress(ValueError):
        return frozenset(parse_cpu_list(text(value) or "")) or None
    return None


def _node(value: object) -> int | None:
    """A NUMA node; -1 is firmware that does not say."""
    node = integer(value)
    return node if node is not None and node >= 0 else None


def sharing_groups(placed: Iterable[Placement]) -> list[tuple[Placement, ...]]:
    """Ranks of one host whose cores overlap, also by way of a third, together; in order of rank."""
    # A rank alone on its cores is a group of one; those whose cores are not known are left out.
    groups: list[tuple[str, set[int], list[Placement]]] = []
    for each in sorted(placed, key=lambda placement: placement.rank):
        if not each.allowed_cpus:
            continue
        cpus, members = set(each.allowed_cpus), [each]
        apart = []
        for host, held, others in groups:
            if host == each.host and held & cpus:
                cpus, members = cpus | held, others + members
            else:
                apart.append((host, held, others))
        groups = [*apart, (each.host, cpus, members)]
    ordered = [tuple(sorted(members, key=lambda p: p.rank)) for _, _, members in groups]
    return sorted(ordered, key=lambda members: members[0].rank)
