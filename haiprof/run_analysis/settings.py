"""Settings of each rank: what it was run with, what was switched on, and where ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, number, text
from haiprof.run_format.setting_lines import FLAGS, SEEN, SETTINGS

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


_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2, "complex64": 8}
"""Of one number; others have 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An optimizer that has stepped; see `run_format.setting_lines.OPTIMIZER_FIELDS`."""

    name: str | None
    tensor_count: int | None
    foreach: bool | None
    fused: bool | None
    capturable: bool | None
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """What looks at switches, one a second, have seen; None where none were taken."""

    look_count: int | None
    anomaly_count: int | None
    profiler_count: int | None
    no_sync_count: int | None
    collect_count: int | None
    collect_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Of the last process of a rank."""

    rank: int
    host: str | None
    flags: Mapping[str, Scalar]
    """By the names of `run_format.setting_lines.FLAGS`; None where this torch does not tell."""
    variables: Mapping[str, str]
    """Environment variables that change speed, credentials masked."""
    operator_threads: int | None
    cores: int | None
    """CPUs that the main thread may run on."""
    cpu_limit_cores: float | None
    memory_limit_bytes: int | None
    gc_enabled: bool | None
    gc_thresholds: tuple[int, ...]
    autocast: str | None
    """What autocast made of operators when a model was called first; None: it was off there."""
    input_dtypes: tuple[str, ...]
    """Of the floating tensors that models were called with first."""
    models: tuple[ModelSettings, ...]
    optimizers: tuple[OptimizerSettings, ...]
    """Those that were alive when settings were read."""
    stepped_optimizer_count: int
    looks: Looks
    problems: tuple[str, ...]
    """What could not be read, and why."""

    @property
    def usable_cores(self) -> float | None:
        """What threads of this rank can have of the machine at most."""
        known = [float(v) for v in (self.cores, self.cpu_limit_cores) if v]
        return min(known, default=None)

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
    usual: Scalar
    """What most ranks have."""
    others: Mapping[int, Scalar]
    """What the other ranks have."""


def read_settings(files: RunFiles) -> dict[int, RankSettings]:
    """By rank, of its last attempt; ranks without the line are left out."""
    last = {rank.rank: rank for rank in sorted(files.ranks, key=lambda r: (r.rank, r.attempt))}
    found = {number: _rank_settings(rank) for number, rank in last.items()}
    return {number: settings for number, settings in found.items() if settings is not None}


def differences(settings: Mapping[int, RankSettings]) -> list[Difference]:
    """Settings that a few ranks have otherwise than most; models may differ (pipelines).

    A rank whose value could not be read (None) is left out: its process group had ended, or an
    optimizer that had stepped was gone or made later.
    """
    found = []
    for name, value in _COMPARED.items():
        values = {rank: value(each) for rank, each in settings.items()}
        if name in _MAY_BE_UNKNOWN:
            values = {rank: each for rank, each in values.items() if each is not None}
        counts = {v: list(values.values()).count(v) for v in values.values()}
        usual = max(counts, key=lambda v: (counts[v], str(v)), default=None)
        others = {rank: v for rank, v in values.items() if v != usual}
        if others and len(others) < len(values) / 2 + (len(values) == 2):
            found.append(Difference(name=name, usual=usual, others=others))
    return found


def _rank_settings(rank: RankFiles) -> RankSettings | None:
    lines = rank.of_type(SETTINGS)
    if not lines:
        return None
    line, seen = lines[-1], (rank.of_type(SEEN) or [{}])[-1]
    environment = (rank.of_type("environment") or [{}])[-1]
    collector = _mapping(line.get("gc"))
    flags = _mapping(line.get("flags"))
    autocast = (text(root.get("autocast")) for root in rank.of_type("root"))
    thresholds = (integer(value) for value in _list(collector.get("thresholds")))
    return RankSettings(
        rank=rank.rank,
        host=text(rank.report.get("host")),
        flags={name: _scalar(flags.get(name)) for name in FLAGS},
        variables=_texts(environment.get("variables")),
        operator_threads=integer(rank.report.get("operator_threads")),
        cores=integer(line.get("cores")),
        cpu_limit_cores=number(line.get("cpu_limit_cores")),
        memory_limit_bytes=integer(line.get("memory_limit_bytes")),
        gc_enabled=_switch(collector.get("enabled")),
        gc_thresholds=tuple(value for value in thresholds if value is not None),
        autocast=next(filter(None, autocast), None),
        input_dtypes=tuple(sorted(_input_dtypes(rank))),
        models=tuple(_model(each) for each in _objects(line.get("models"))),
        optimizers=tuple(_optimizer(each) for each in _objects(line.get("optimizers"))),
        stepped_optimizer_count=len(rank.of_type("optimizer")),
        looks=Looks(**{name: integer(seen.get(name)) for name in Looks.__dataclass_fields__}),
        problems=tuple(filter(None, map(text, _list(line.get("problems"))))),
    )


def _input_dtypes(rank: RankFiles) -> set[str]:
    lines = rank.of_type("root_input")
    return {name for x in lines for each in _list(x.get("dtypes")) if (name := text(each))}


def _model(entry: Mapping[str, Any]) -> ModelSettings:
    ddp = entry.get("ddp")
    return ModelSettings(
        name=text(entry.get("name")),
        tensor_count=integer(entry.get("tensor_count")),
        parameter_count=integer(entry.get("parameter_count")),
        trainable_count=integer(entry.get("trainable_count")),
        dtypes=_counts(entry.get("dtypes")),
        devices=tuple(filter(None, map(text, _list(entry.get("devices"))))),
        layers=_counts(entry.get("layers")),
        ddp={str(k): _scalar(v) for k, v in ddp.items()} if isinstance(ddp, dict) else None,
        fsdp_unit_count=integer(entry.get("fsdp_unit_count")),
    )


def _optimizer(entry: Mapping[str, Any]) -> OptimizerSettings:
    return OptimizerSettings(
        name=text(entry.get("name")),
        tensor_count=integer(entry.get("tensor_count")),
        foreach=_switch(entry.get("foreach")),
        fused=_switch(entry.get("fused")),
        capturable=_switch(entry.get("capturable")),
        devices=tuple(_counts(entry.get("devices"))),
    )


def _optimizers_text(settings: RankSettings) -> str | None:
    if len(settings.optimizers) < settings.stepped_optimizer_count:
        return None
    return ", ".join(f"{o.name} foreach={o.foreach} fused={o.fused}" for o in settings.optimizers)


def _flag(name: str) -> Callable[[RankSettings], Scalar]:
    return lambda settings: settings.flags.get(name)


_SWITCHES: Mapping[str, Callable[[RankSettings], Scalar]] = {
    FLAGS[name].partition(":")[0]: _flag(name)
    for name in (
        "anomaly", "deterministic", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic",
        "mkldnn", "matmul_precision", "tf32_matmul", "default_dtype", "distributed_debug",
    )
}  # fmt: skip
_COMPARED: Mapping[str, Callable[[RankSettings], Scalar]] = {
    **_SWITCHES,
    "threads per operator": lambda settings: settings.operator_threads,
    "CPUs that it may use": lambda settings: settings.cores,
    "CPU limit of its control group": lambda settings: settings.cpu_limit_cores,
    "memory limit of its control group": lambda settings: settings.memory_limit_bytes,
    "autocast": lambda settings: settings.autocast,
    "optimizers": _optimizers_text,
}
"""What ranks should have in common, by the name that is shown."""
_MAY_BE_UNKNOWN = {*_SWITCHES, "optimizers"}
"""Of these None means that it could not be read; of the others that there is no limit or mode."""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in _list(value) if isinstance(entry, dict)]


def _switch(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, bool) else text(value) or number(value)


def _texts(value: object) -> dict[str, str]:
    pairs = ((text(name), text(each)) for name, each in _mapping(value).items())
    return {name: each for name, each in pairs if name is not None and each is not None}


def _counts(value: object) -> dict[str, int]:
    pairs = ((text(name), integer(count)) for name, count in _mapping(value).items())
    return {name: count for name, count in pairs if name is not None and count is not None}
