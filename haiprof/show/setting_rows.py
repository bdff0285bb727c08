"""A rank's settings in a few lines of words: models, optimizers, precision, cores, switches."""

from __future__ import annotations

from collections.abc import Iterator

from haiprof.base.units import bytes_text, duration_text, ratio_text
from haiprof.run_analysis.settings import ModelSettings, OptimizerSettings, RankSettings
from haiprof.show.text import count_text

_SWITCHES = {
    "anomaly": "anomaly detection",
    "deterministic": "deterministic algorithms",
    "cudnn_benchmark": "cudnn.benchmark",
    "cudnn_deterministic": "cudnn.deterministic",
    "tracemalloc": "tracemalloc",
    "developer_mode": "python -X dev",
}


def setting_rows(settings: RankSettings) -> list[tuple[str, str]]:
    """What it is, and how it is set; what torch or Python leave alone by itself is left out."""
    rows = [("model", _model_text(model)) for model in settings.models]
    rows += [("optimizer", _optimizer_text(optimizer)) for optimizer in settings.optimizers]
    rows.append(("precision", _precision_text(settings)))
    rows.append(("cores", ", ".join(_core_parts(settings))))
    switches = ", ".join(_switch_parts(settings))
    if switches:
        rows.append(("switched on", switches))
    off = [n for n in ("mkldnn", "cudnn_enabled") if settings.flags.get(n) is False]
    rows += [("switched off", name.removesuffix("_enabled")) for name in off]
    rows.append(("collector", ", ".join(_collector_parts(settings))))
    rows += [("not read", problem) for problem in settings.problems]
    return [(name, text) for name, text in rows if text]


def _model_text(model: ModelSettings) -> str:
    parts = [count_text(model.parameter_count, "parameter")] if model.parameter_count else []
    parts.append(f"in {count_text(model.tensor_count or 0, 'tensor')}")
    if model.trainable_ratio is not None and model.trainable_ratio < 1:
        parts.append(f"{ratio_text(model.trainable_ratio)} trained")
    parts += [
        " and ".join(sorted(model.dtypes)),
        f"on {' and '.join(model.devices) or 'no device'}",
    ]
    if model.fsdp_unit_count:
        parts.append(count_text(model.fsdp_unit_count, "FSDP unit"))
    if model.ddp is not None:
        given = (f"{name}={value}" for name, value in model.ddp.items() if value is not None)
        parts.append(f"DDP({', '.join(given)})")
    return f"{model.name}: {', '.join(part for part in parts if part)}"


def _optimizer_text(optimizer: OptimizerSettings) -> str:
    given = {"foreach": optimizer.foreach, "fused": optimizer.fused}
    told = [f"{name}={value}" for name, value in given.items() if value is not None]
    how = ", ".join(told) or "foreach and fused left to torch"
    return f"{optimizer.name}: {count_text(optimizer.tensor_count or 0, 'tensor')}, {how}"


def _precision_text(settings: RankSettings) -> str:
    flags = settings.flags
    parts = [f"default {flags.get('default_dtype')}"] if flags.get("default_dtype") else []
    if flags.get("matmul_precision"):
        parts.append(f"float32 matmul {flags['matmul_precision']}")
    parts.append(f"autocast {settings.autocast or 'not seen at the call of a model'}")
    return ", ".join(parts)


def _core_parts(settings: RankSettings) -> Iterator[str]:
    if settings.operator_threads is not None:
        yield f"{count_text(settings.operator_threads, 'thread')} per operator"
    if settings.cores is not None:
        yield f"{count_text(settings.cores, 'core')} allowed"
    if settings.cpu_limit_cores is not None:
        yield f"control group limits it to {settings.cpu_limit_cores:g} cores"
    if settings.memory_limit_bytes is not None:
        yield f"and to {bytes_text(settings.memory_limit_bytes)} of memory"


def _switch_parts(settings: RankSettings) -> Iterator[str]:
    for name, title in _SWITCHES.items():
        if settings.flags.get(name) is True:
            yield title
    ratio = settings.on_ratio("profiler")
    if ratio:
        yield f"a profiler of the job's own ({ratio_text(ratio)} of the time)"
    level = settings.flags.get("distributed_debug")
    if level not in (None, "OFF"):
        yield f"TORCH_DISTRIBUTED_DEBUG={level}"


def _collector_parts(settings: RankSettings) -> Iterator[str]:
    if settings.gc_enabled is not None:
        thresholds = ", ".join(map(str, settings.gc_thresholds))
        yield f"thresholds {thresholds}" if settings.gc_enabled else "disabled"
    looks = settings.looks
    if looks.collect_count:
        times = count_text(looks.collect_count, "call")
        yield f"{times} of gc.collect() for {duration_text(looks.collect_ns)}"
