"""How the job's modules, optimizers and loaders were made, and how large its inputs are."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from haiprof.in_job.recorder import Recorder

PART_LIMIT = 1500
"""Parameters and modules that are looked at: reading more would hold the interpreter for ms."""
_LAYER_KINDS = 8
_PLAIN = ("Tensor", "Parameter", "Buffer", "DTensor")
"""Classes of torch's own, whose sizes are known without running code of the job's."""
_LOADER_LIMIT = 64  # that are described; a job that makes one per step is not followed further
_SWITCHES = ("foreach", "fused", "capturable", "differentiable")
_OFTEN_NS, _SELDOM_NS = 1_000_000_000, 10_000_000_000
_OFTEN_COUNT = 120
"""So many looks at inputs a second apart; then one in ten seconds."""
_now = time.perf_counter_ns


def model_settings(module: Any) -> dict[str, Any]:
    """One entry of `models`; see `run_format.setting_lines.MODEL_FIELDS`."""
    modules, parameters = _modules_and_parameters(module)
    known = _Tensors(parameters)
    is_whole = max(len(parameters), len(modules)) < PART_LIMIT
    kinds = Counter(map(type, modules))
    leaves = Counter(type(part) for part in modules if not vars(part).get("_modules"))
    parallel = _parallel_kind()
    wrapped = [part for part in modules if type(part) is parallel] if parallel in kinds else []
    return {
        "name": type(module).__name__,
        "tensor_count": len(parameters),
        "parameter_count": known.number_count if is_whole else None,
        "trainable_count": known.trainable_count if is_whole else None,
        "dtypes": known.numbers_by_dtype(),
        "devices": sorted(known.by_device()),
        "layers": {kind.__name__: count for kind, count in leaves.most_common(_LAYER_KINDS)},
        "complete": is_whole,
        "ddp": _parallel_settings(wrapped[0]) if wrapped else None,
        "fsdp_unit_count": sum(n for kind, n in kinds.items() if _is_fsdp(kind.__name__)),
    }


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """One entry of `optimizers`; see `run_format.setting_lines.OPTIMIZER_FIELDS`."""
    groups = list(optimizer.param_groups)
    tensors = [p for group in groups for p in group["params"]]
    known = _Tensors(tensors[:PART_LIMIT])
    first = groups[0] if groups else {}
    return {
        "name": type(optimizer).__name__,
        "group_count": len(groups),
        "tensor_count": len(tensors),
        **{name: _switch(first.get(name)) for name in _SWITCHES},
        "dtypes": known.tensors_by_dtype(),
        "devices": known.by_device(),
    }


def input_line(module: Any, values: Iterable[Any]) -> dict[str, Any]:
    """The line `root_input`: which dtypes a module was called with first, of floating tensors.

    A batch in float64 makes float64 of whatever it meets, also where parameters are float32.
    """
    dtypes = (each.dtype for each in _plain_tensors(values))
    found = {_dtype_name(dtype) for dtype in dtypes if dtype.is_floating_point}
    return {"type": "root_input", "name": type(module).__name__, "dtypes": sorted(found)}


def wrap_iter(original: Callable[..., Any], recorder: Recorder) -> Any:
    """`DataLoader.__iter__` that leaves a line per loader; the job's call is made exactly once."""
    told: set[int] = set()

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807
        if len(told) < _LOADER_LIMIT and not recorder.closed:
            try:
                if id(self) not in told:
                    told.add(id(self))
                    recorder.lines.append(describe_loader(self))
            except Exception as error:
                recorder.fault("dataloader", error)
        return original(self)

    return __iter__


def describe_loader(loader: Any) -> dict[str, Any]:
    """The line `dataloader`: as given; None what is no number."""
    return {
        "type": "dataloader",
        "time_ns": _now(),
        "workers": _integer(getattr(loader, "num_workers", None)),
        "batch_size": _integer(getattr(loader, "batch_size", None)),
        "persistent": getattr(loader, "persistent_workers", None) is True,
        "prefetch": _integer(getattr(loader, "prefetch_factor", None)),
        "dataset": type(getattr(loader, "dataset", None)).__name__,
    }


class InputSizes:
    """Lines `input_size`: one where a root module's inputs have another size than before.

    Steps that take longer because a curriculum gives them more are no drift, and only this tells.
    The drain thread says when a look is due; the look is the training thread's, where it calls the
    module, and no value is read.
    """

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines
        self.restart()

    def restart(self) -> None:
        """In a forked child, which has modules of its own."""
        self.is_due = False
        self._last: dict[int, int] = {}
        self._looked_ns = self._look_count = 0
        self._is_over = False

    def becomes_due(self) -> bool:
        """Whether the next call is to be looked at; asked about once a second."""
        pause_ns = _OFTEN_NS if self._look_count < _OFTEN_COUNT else _SELDOM_NS
        if _now() - self._looked_ns >= pause_ns - _OFTEN_NS // 2:  # who asks is not exactly on time
            self.is_due = not self._is_over
        return self.is_due

    def look(self, step: int, tag: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A root module is called for training; after an error there are no more looks."""
        self.is_due = False
        self._looked_ns, self._look_count = _now(), self._look_count + 1
        try:
            count = sum(t.numel() for t in _plain_tensors((*args, *kwargs.values())))
        except Exception as error:
            self._is_over = True
            reason = f"{type(error).__name__}: {error}"
            self._lines.append(
                {"type": "settings_failed", "time_ns": self._looked_ns, "reason": reason}
            )
            return
        if self._last.get(tag) != count:
            self._last[tag] = count
            self._lines.append(
                {
                    "type": "input_size",
                    "time_ns": self._looked_ns,
                    "step": step,
                    "root": tag,
                    "number_count": count,
                }
            )


def _plain_tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Tensors among a call's arguments, also of one list, tuple or dictionary.

    This is read on the training thread: where the job follows calls of torch (a TorchFunctionMode),
    which reading a dtype or a size is, nothing is read.
    """
    modes = getattr(sys.modules.get("torch._C"), "_len_torch_function_stack", None)
    for value in values if modes is not None and not modes() else ():
        inner = value.values() if type(value) is dict else value
        for each in inner if type(value) in (dict, list, tuple) else (value,):
            if _is_plain(type(each)):
                yield each


def _modules_and_parameters(module: Any) -> tuple[list[Any], list[Any]]:
    """Modules and parameters, each once; a third of the time that `Module.parameters` takes."""
    modules: dict[int, Any] = {}
    parameters: dict[int, Any] = {}
    left = [module]
    while left and max(len(modules), len(parameters)) < PART_LIMIT:
        part = left.pop()
        if part is None or id(part) in modules:
            continue
        modules[id(part)] = part
        own = vars(part)
        parameters.update((id(p), p) for p in own.get("_parameters", {}).values() if p is not None)
        left.extend(own.get("_modules", {}).values())
    return list(modules.values()), list(parameters.values())[:PART_LIMIT]


class _Tensors:
    """Counts of tensors and of the numbers in them, by dtype and device.

    Only of tensors whose properties run no code of the job's: torch's own classes.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._alike: dict[tuple[Any, Any, bool], list[int]] = {}
        is_whole = True
        plain: dict[type, bool] = {}
        for tensor in tensors:
            kind = type(tensor)
            if kind not in plain:
                plain[kind] = _is_plain(kind)
            if not plain[kind]:
                is_whole = False
                continue
            key = (tensor.dtype, tensor.device, tensor.requires_grad)
            counts = self._alike.get(key)
            if counts is None:
                counts = self._alike[key] = [0, 0]
            counts[0] += 1
            counts[1] += tensor.numel()
        numbers = sum(count for _, count in self._alike.values())
        trainable = sum(count for (_, _, trains), (_, count) in self._alike.items() if trains)
        self.number_count = numbers if is_whole else None
        """Null where some tensors are of another kind."""
        self.trainable_count = trainable if is_whole else None

    def numbers_by_dtype(self) -> dict[str, int]:
        """Numbers by `float32`, `bfloat16`, ..."""
        return self._sums(lambda key: _dtype_name(key[0]), 1)

    def tensors_by_dtype(self) -> dict[str, int]:
        """The same of tensors."""
        return self._sums(lambda key: _dtype_name(key[0]), 0)

    def by_device(self) -> dict[str, int]:
        """Tensors by kind of device."""
        return self._sums(lambda key: str(key[1].type), 0)

    def _sums(self, name: Callable[[tuple[Any, Any, bool]], str], place: int) -> dict[str, int]:
        found: Counter[str] = Counter()
        for key, counts in self._alike.items():
            found[name(key)] += counts[place]
        return dict(found)


def _is_plain(kind: type) -> bool:
    return kind.__name__ in _PLAIN and kind.__module__.partition(".")[0] == "torch"


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_fsdp(name: str) -> bool:
    """Whether a class is one whose parameters FSDP gathers: FSDP2 renames it, FSDP1 wraps it."""
    return name.startswith(("FSDP", "FullyShardedDataParallel"))


def _parallel_kind() -> type | None:
    """DistributedDataParallel, where the job has loaded it."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    return getattr(module, "DistributedDataParallel", None)


def _parallel_settings(module: Any) -> dict[str, Any]:
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
