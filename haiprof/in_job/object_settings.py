"""How the job's modules and optimizers were made, read from what they hold, beside training."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from haiprof.in_job.object_numbers import own_or_plain

PART_LIMIT = 2000
"""Parameters and modules that are looked at: reading more would hold the interpreter for ms."""
_LAYER_KINDS = 8
_PLAIN = ("Tensor", "Parameter", "Buffer", "DTensor")
"""Classes of torch's own, whose sizes are known without running code of the job's."""
_SWITCHES = ("foreach", "fused", "capturable", "differentiable")


def model_settings(module: Any) -> dict[str, Any]:
    """One entry of `models`; see `run_format.setting_lines.MODEL_FIELDS`.

    Raises:
        RuntimeError: The job adds modules at this moment.
    """
    parameters = list(itertools.islice(own_or_plain(module, "parameters"), PART_LIMIT))
    modules = list(itertools.islice(own_or_plain(module, "modules"), PART_LIMIT))
    dtypes: Counter[str] = Counter()
    trainable, is_known = 0, True
    for parameter in parameters:
        if not is_plain(parameter):
            is_known = False
            continue
        count = int(parameter.numel())
        dtypes[dtype_name(parameter)] += count
        trainable += count if parameter.requires_grad else 0
    leaves = Counter(type(part).__name__ for part in modules if not part._modules)
    return {
        "name": type(module).__name__,
        "tensor_count": len(parameters),
        "parameter_count": sum(dtypes.values()) if is_known else None,
        "trainable_count": trainable if is_known else None,
        "dtypes": dict(dtypes),
        "devices": sorted({p.device.type for p in parameters if is_plain(p)}),
        "layers": dict(leaves.most_common(_LAYER_KINDS)),
        "complete": max(len(parameters), len(modules)) < PART_LIMIT,
        "ddp": next((found for part in modules if (found := _ddp(part))), None),
        "fsdp_unit_count": sum(is_fsdp(type(part).__name__) for part in modules),
    }


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """One entry of `optimizers`; see `run_format.setting_lines.OPTIMIZER_FIELDS`."""
    groups = list(optimizer.param_groups)
    tensors = [p for group in groups for p in group["params"]]
    first = groups[0] if groups else {}
    return {
        "name": type(optimizer).__name__,
        "group_count": len(groups),
        "tensor_count": len(tensors),
        **{name: _switch(first.get(name)) for name in _SWITCHES},
        "dtypes": _count(dtype_name(p) for p in tensors[:PART_LIMIT] if is_plain(p)),
        "devices": _count(p.device.type for p in tensors[:PART_LIMIT] if is_plain(p)),
    }


def is_plain(tensor: Any) -> bool:
    """Whether it is a tensor whose properties run no code of the job's."""
    kind = type(tensor)
    return kind.__name__ in _PLAIN and kind.__module__.partition(".")[0] == "torch"


def dtype_name(tensor: Any) -> str:
    """`float32` of torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


def is_fsdp(name: str) -> bool:
    """Whether a class is one whose parameters FSDP gathers: FSDP2 renames it, FSDP1 wraps it."""
    return name.startswith(("FSDP", "FullyShardedDataParallel"))


def _ddp(module: Any) -> dict[str, Any] | None:
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(parallel, "DistributedDataParallel", None)
    if kind is None or not isinstance(module, kind):
        return None
    return {
        "find_unused_parameters": _switch(getattr(module, "find_unused_parameters", None)),
        "static_graph": _switch(getattr(module, "static_graph", None)),
        "bucket_bytes": _integer(getattr(module, "bucket_bytes_cap", None)),
        "broadcast_buffers": _switch(getattr(module, "broadcast_buffers", None)),
        "gradient_as_bucket_view": _switch(getattr(module, "gradient_as_bucket_view", None)),
    }


def _switch(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names))
