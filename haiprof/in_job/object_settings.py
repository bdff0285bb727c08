"""The job's modules, optimizers and loaders: their numbers, and how they and inputs are made."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

from haiprof.in_job.frames import OWN_FOLDER
from haiprof.in_job.recorder import Recorder
from haiprof.run_format.schema import TAG_BITS, TAG_MASK
from haiprof.run_format.setting_lines import DISCARDED, UNUSED

MANY = TAG_MASK  # the tag of all objects that came after the numbers ran out
PART_LIMIT = 1500  # parameters and modules that are looked at: more would hold Python for ms
_LAYER_KINDS = 8
_FSDP = ("FSDP", "FullyShardedDataParallel")
_PLAIN = ("Tensor", "Parameter", "Buffer", "DTensor")
"""Classes of torch's own, whose sizes are known without running code of the job's."""
_LOADER_LIMIT = 64  # that are described; a job that makes one per step is not followed further
_SWITCHES = ("foreach", "fused", "capturable", "differentiable")
_OFTEN_NS, _SELDOM_NS = 1_000_000_000, 10_000_000_000
_OFTEN_COUNT = 120  # so many looks at inputs a second apart; then one in ten seconds
_TOKENS, _RUN = ("int64", "int32"), 3
"""So many columns in a row hold the same number in each row, for it to be padding: a feature that a
batch has in common is one."""
_MASK_LIMIT = 1 << 15  # of a larger mask, columns at equal distances are read: some 50 us
_now = time.perf_counter_ns


_Alike = dict[tuple[Any, Any, bool], tuple[int, int]]
"""How many tensors, and numbers in them, have a dtype, a device, and train or not."""


def model_settings(module: Any) -> dict[str, Any]:
    """One entry of `models`; see `run_format.setting_lines.MODEL_FIELDS`."""
    modules, parameters = _modules_and_parameters(module)
    alike, is_plain = _count_alike(parameters)
    is_whole = max(len(parameters), len(modules)) < PART_LIMIT
    kinds = Counter(map(type, modules))
    leaves = Counter(type(part) for part in modules if not vars(part).get("_modules"))
    loaded = sys.modules.get("torch.nn.parallel.distributed")
    parallel = getattr(loaded, "DistributedDataParallel", None)
    wrapped = [part for part in modules if type(part) is parallel] if parallel in kinds else []
    counted = list(alike.items()) if is_whole and is_plain else None
    return {
        "name": type(module).__name__,
        "tensor_count": len(parameters),
        "parameter_count": None if counted is None else sum(n for _, (_, n) in counted),
        "trainable_count": None if counted is None else sum(n for k, (_, n) in counted if k[2]),
        "dtypes": _sums(alike, 0, of_numbers=True),
        "devices": sorted(_sums(alike, 1)),
        "layers": {kind.__name__: count for kind, count in leaves.most_common(_LAYER_KINDS)},
        "complete": is_whole,
        "ddp": _parallel_settings(wrapped[0]) if wrapped else None,
        # FSDP gathers the parameters of these classes: FSDP2 renames a class, FSDP1 wraps it.
        "fsdp_unit_count": sum(n for kind, n in kinds.items() if kind.__name__.startswith(_FSDP)),
    }


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """One entry of `optimizers`; see `run_format.setting_lines.OPTIMIZER_FIELDS`."""
    groups = list(optimizer.param_groups)
    tensors = [p for group in groups for p in group["params"]]
    alike, _ = _count_alike(tensors[:PART_LIMIT])
    first = groups[0] if groups else {}
    return {
        "name": type(optimizer).__name__, "group_count": len(groups), "tensor_count": len(tensors),
        **{name: _switch(first.get(name)) for name in _SWITCHES}, "dtypes": _sums(alike, 0),
        "devices": _sums(alike, 1),
        "mixed": len({type(each).__name__ == "DTensor" for each in tensors[:PART_LIMIT]}) > 1,
    }  # fmt: skip


def input_line(module: Any, values: Iterable[Any]) -> dict[str, Any]:
    """The line `root_input`: which dtypes a module was called with first, of floating tensors."""
    # A batch in float64 makes float64 of whatever it meets, also where parameters are float32.
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


_ITERABLE = 1  # `_DatasetKind.Iterable` of torch/utils/data/dataloader.py


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
        "iterable": getattr(loader, "_dataset_kind", None) == _ITERABLE,
    }


class InputSizes:
    """Lines `input_size`: one where a root module's inputs have another size than before."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines
        self.restart()

    def restart(self) -> None:
        """In a forked child, which has modules of its own."""
        self.is_due = False
        self._last: dict[int, int] = {}
        self._looked_ns = self._look_count = 0
        self._is_over = False
        names = ("mask_column", "empty_column", "mask_token", "empty_token", "guessed_mask")
        self.masks = dict.fromkeys(names, 0)
        """By field of the line `settings_seen`, without `_count`."""

    def becomes_due(self) -> bool:
        """Whether the next call is to be looked at; asked about once a second."""
        pause_ns = _OFTEN_NS if self._look_count < _OFTEN_COUNT else _SELDOM_NS
        if _now() - self._looked_ns >= pause_ns - _OFTEN_NS // 2:  # who asks is not exactly on time
            self.is_due = not self._is_over
        return self.is_due

    def look(self, step: int, tag: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A root module is called for training; after an error there are no more looks."""
        # Steps that take longer because a curriculum gives them more are no drift, and only this
        # tells. The drain thread says when a look is due; the look is the training thread's, where
        # it calls the module, and no value is read but of an `attention_mask` on the CPU, or of the
        # tokens where there is none: how much of it is padding.
        self.is_due = False
        self._looked_ns, self._look_count = _now(), self._look_count + 1
        try:
            tensors = list(_plain_tensors((*args, *kwargs.values())))
            count = sum(tensor.numel() for tensor in tensors)
            self._read_mask((kwargs, *(each for each in args if type(each) is dict)), tensors)
        except Exception as error:
            self._is_over = True
            line = {"type": "settings_failed", "time_ns": self._looked_ns}
            self._lines.append({**line, "reason": f"{type(error).__name__}: {error}"})
            return
        if self._last.get(tag) != count:
            self._last[tag] = count
            self._lines.append({
                "type": "input_size", "time_ns": self._looked_ns, "step": step, "root": tag,
                "number_count": count,
            })  # fmt: skip

    def _read_mask(self, batches: Iterable[Mapping[str, Any]], tensors: Iterable[Any]) -> None:
        """Adds up the columns and the elements of an `attention_mask` that hold zeros alone."""
        # Nothing that follows the job's operators sees this one: no mode, and no profiler.
        modes = getattr(sys.modules.get("torch._C"), "_len_torch_dispatch_stack", None)
        profiler = sys.modules.get("torch.autograd.profiler")
        if modes is None or modes() or getattr(profiler, "_is_profiler_enabled", True):
            return
        given = [each["attention_mask"] for each in batches if "attention_mask" in each]
        for mask in _plain_tensors(given or tensors):
            is_counted = not (mask.is_floating_point() or mask.is_complex())
            is_counted &= bool(given) or _dtype_name(mask.dtype) in _TOKENS
            if mask.dim() == 2 and mask.numel() and is_counted and mask.device.type == "cpu":
                read, columns = mask[:, :: mask.numel() // _MASK_LIMIT + 1], list[list[int]]()
                if given:
                    columns.append(read.count_nonzero(0).tolist())
                else:  # tokens of padding are all alike, and end or begin the sequences
                    ends = ({*mask[:, at].tolist()} for at in (0, -1))
                    same = [end.pop() for end in ends if len(end) == 1]
                    counts = [(read != one).count_nonzero(0).tolist() for one in same]
                    columns += (c for c in counts if not (any(c[-_RUN:]) and any(c[:_RUN])))
                used = max(columns, key=lambda each: each.count(0), default=[1] * read.shape[1])
                found = (len(used), used.count(0), read.numel(),
                         read.numel() - sum(used) if columns else 0, not given)  # fmt: skip
                for name, count in zip(self.masks, found, strict=True):
                    self.masks[name] += count
                if not given:
                    return


_Numbered = Callable[[], list[tuple[int, Any]]]  # living objects, with their tags


class UnusedGradients:
    """Lines `unused_gradients`, and `discarded_gradients`.

    The first: parameters that no optimizer has and nothing changes.

    On a GPU, whose memory is not read: whoever uses a gradient clears it before the next one, be
    that a fused optimizer, one that keeps its own copies, or the job by hand. One that is still the
    same tensor seconds later, and was written to no more often than those that an optimizer uses,
    was only added to. The second: gradients that passes for another optimizer make, and which their
    own never uses.
    """

    def __init__(
        self, roots: _Numbered, optimizers: _Numbered, lines: list[dict[str, Any]]
    ) -> None:
        self._roots = roots
        self._optimizers = optimizers
        self._lines = lines
        self.restart()

    def restart(self) -> None:
        """In a forked child, which has modules of its own."""
        self._pauses = list(_GRADIENT_PAUSES_NS)
        self._looked_ns = self._step = 0
        self._seen: _Gradients = {}
        self._unused: set[int] = set()
        self._passed: set[int] | None = None
        self._walks = _WALKS
        self._ends: list[_StepEnd] | None = []  # None: they were followed

    @property
    def wants_graph(self) -> bool:
        """Whether what the next backward pass goes through is to be looked at."""
        return bool(self._unused) and self._passed is None and self._walks > 0

    def walk(self, outputs: Iterable[Any]) -> None:
        """On the training thread: a backward pass is about to begin at these."""
        self._walks -= 1
        try:
            self._passed = _passed_through(outputs, self._unused)
        except Exception:  # another torch: it is not known then
            self._walks = 0

    def is_due(self, step: int) -> bool:
        """Whether the end of the next optimizer step is to be looked at; asked once a second."""
        is_later = step > max(self._step, _GRADIENT_STEPS)
        return bool(self._pauses) and is_later and _now() - self._looked_ns >= self._pauses[0]

    def look(self, step: int, optimizer: Any) -> bool:
        """An optimizer's step is over; says whether the end of the next one is to be looked at."""
        # Here, on the training thread: backward writes gradients without the interpreter lock.
        modes = sys.modules.get("torch._C")
        if getattr(modes, "_len_torch_function_stack", int)():
            return False  # the job follows calls of torch, which reading a gradient is
        try:
            if self.is_due(step):
                self._look(step)
            return self._follow(step, optimizer)
        except Exception as error:
            self._pauses.clear()
            line = {"type": "settings_failed", "time_ns": _now()}
            self._lines.append({**line, "reason": f"{type(error).__name__}: {error}"})
            return False

    def _look(self, step: int) -> None:
        began_ns, before = _now(), self._seen
        self._pauses.pop(0)
        every = [(tag, *_modules_and_parameters(module)) for tag, module in self._roots()]
        used = set(self._find_owners())
        self._seen = _read_gradients((p for _, _, own in every for p in own), used)
        piled = _made_in_vain(self._seen, before, used, max(step - self._step, 1))
        if before:
            self._lines.append({
                "type": UNUSED, "time_ns": began_ns, "step": step, "cost_ns": _now() - began_ns,
                "roots": [_unused_in(root, piled, used, self._passed) for root in every],
            })  # fmt: skip
        self._unused = self._seen.keys() - used
        if not self._unused and self._ends is None:
            self._pauses.clear()
        self._looked_ns, self._step = _now(), step

    def _find_owners(self) -> dict[int, tuple[int, Any]]:
        """Parameters that optimizers have, with the optimizer's tag, by their ids."""
        return {id(p): (tag, p) for tag, optimizer in self._optimizers()
                for group in optimizer.param_groups for p in group["params"]}  # fmt: skip

    def _follow(self, step: int, optimizer: Any) -> bool:
        """Reads the ends of some steps in a row, where several optimizers take turns."""
        owners = self._find_owners() if self._ends is not None else {}
        if self._ends is None or len({tag for tag, _ in owners.values()}) < 2:
            return False
        began_ns = _now()
        if len(owners) <= PART_LIMIT:
            tag = next((tag for tag, each in self._optimizers() if each is optimizer), 0)
            gradients = {key: _gradient_of(p) for key, (_, p) in owners.items()}
            self._ends.append((tag, gradients))
            if len(self._ends) < _ENDS:
                return True
        ends, self._ends = self._ends, None
        discarded = _find_discarded(ends, {key: tag for key, (tag, _) in owners.items()})
        if discarded:
            entries = []
            for tag, root in self._roots():
                own = [p for p in _modules_and_parameters(root)[1] if id(p) in owners]
                part = [p for p in own if id(p) in discarded]
                by = {discarded[id(p)] for p in part}
                entries.append({
                    "root": tag, "tensor_count": len(part), "other_count": len(own) - len(part),
                    "number_count": sum(p.numel() for p in part), "by": sorted(by),
                })  # fmt: skip
            self._lines.append({
                "type": DISCARDED, "time_ns": began_ns, "step": step, "cost_ns": _now() - began_ns,
                "roots": entries,
            })  # fmt: skip
        return False


_ENDS = 8  # of steps that are followed: five of a critic, one of a generator, and two more
_Gradient = tuple[int, int, bool] | None
"""Address and version of a parameter's gradient, 0 and -1 for none, and whether the parameter
trains. None: nothing is known of what is made of it, as the next one is not added in place."""
_StepEnd = tuple[int, dict[int, _Gradient]]  # The optimizer's tag; by a parameter's id


def _gradient_of(parameter: Any) -> _Gradient:
    if not _is_plain(type(parameter)) or not parameter.is_leaf:
        return None
    gradient = parameter.grad
    if gradient is None:
        return 0, -1, parameter.requires_grad
    adds_in_place = not gradient.requires_grad and str(gradient.layout) == "torch.strided"
    known = gradient._cdata, gradient._version, parameter.requires_grad
    return known if adds_in_place else None


def _find_discarded(ends: list[_StepEnd], owners: dict[int, int]) -> dict[int, int]:
    """Parameters whose gradient another optimizer's pass made in vain, with that one's tag."""
    # What else writes to gradients, as clipping does, writes to those of who steps, too, for which
    # backward is one more. In the first step of others since its own: in a later one, a gradient
    # may be of a pass of its own, whose step was skipped.
    found = dict[int, int]()
    usual = [0]
    for (_, before), (tag, after) in pairwise(ends):
        writes = (_count_writes(before.get(key), now) for key, now in after.items()
                  if owners.get(key) == tag)  # fmt: skip
        usual.append(max(writes, default=0))
    for key, owner in owners.items():
        left: tuple[int, int, int] | None = None  # made, and not used so far
        since: set[int] | None = None  # who has stepped since its own step
        for at in range(1, len(ends)):
            (_, before), (tag, after) = ends[at - 1], ends[at]
            now = after.get(key)
            if tag == owner:
                if left is not None and now and (now[0] != left[0] or now[1] < left[1]):
                    found[key] = left[2]
                left, since = None, set()
            elif since is not None and tag not in since:
                since.add(tag)
                if now and now[2] and _count_writes(before.get(key), now) >= usual[at] > 0:
                    left = now[0], now[1], tag
    return found


def _count_writes(before: _Gradient, after: _Gradient) -> int:
    """How often a gradient was written to; to a new one once more than its version says."""
    if not before or not after or not after[0]:
        return 0
    return after[1] - before[1] if before[0] == after[0] else after[1] + 1


_GRADIENT_PAUSES_NS = (0, _OFTEN_NS, _SELDOM_NS, 10 * _SELDOM_NS)
"""Before each look: an optimizer may step for the first time late."""
_GRADIENT_STEPS = 10
_LOOKED_AT_BYTES = 256  # Of each parameter, at equal distances
_WALKS = 4  # backward passes that are looked at for one that makes such gradients
_Held = tuple[int, bytes] | None
_Gradients = dict[int, tuple[int, int, _Held, _Held]]
"""By the id of a parameter that trains: the address and the version of its gradient, and what it
and its gradient hold; None of those on a GPU, which would have to be waited for."""


def _read_gradients(parameters: Iterable[Any], used: set[int]) -> _Gradients:
    found: _Gradients = {}
    for parameter in parameters:
        if _is_plain(type(parameter)) and parameter.requires_grad and parameter.is_leaf:
            gradient = parameter.grad
            if gradient is not None:
                held = [None if id(parameter) in used else _held_by(each)
                        for each in (parameter, gradient)]  # fmt: skip
                found[id(parameter)] = (gradient._cdata, gradient._version, held[0], held[1])
    return found


def _held_by(tensor: Any) -> _Held:
    # Read without torch, whose operators the job's own profiler or mode would see. FSDP frees the
    # memory of what it has gathered, and leaves the tensor with its shape.
    kind = type(tensor)
    if not _is_plain(kind) or kind.__name__ == "DTensor" or tensor.device.type != "cpu":
        return None
    if str(tensor.layout) != "torch.strided":
        return None
    size, place = (count * tensor.element_size()
                   for count in (tensor.numel(), tensor.storage_offset()))  # fmt: skip
    has_memory = size > 0 and tensor.untyped_storage().nbytes() >= place + size
    if not has_memory or not tensor.is_contiguous() or not tensor.data_ptr():
        return None
    held = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return tensor._version, held[:: size // _LOOKED_AT_BYTES | 1]


def _made_in_vain(now: _Gradients, before: _Gradients, used: set[int], steps: int) -> set[int]:
    """Parameters that nothing has changed, with gradients that were made since and nothing used."""
    # A gradient that is cleared by zeros is written to once more per step than one that is not;
    # what else writes to gradients (clipping, several passes) writes to those of optimizers, too.
    both = now.keys() & before.keys()
    same = {key for key in both - used if now[key][2] == before[key][2]}
    made = {key for key in same if now[key][2] and now[key][3] != before[key][3]}
    kept = {key for key in both if before[key][0] == now[key][0]}
    writes = {key: (now[key][1] - before[key][1]) / steps for key in kept}
    own = [writes[key] - 1 if key in kept else now[key][1] + 1 for key in now.keys() & used]
    usual = sorted(own)[len(own) // 2] if own else 0
    return {key for key in kept & same if 0 < writes[key] <= usual} | made


def _passed_through(outputs: Iterable[Any], unused: set[int]) -> set[int] | None:
    """Of some parameters those through whose layers a gradient goes on to others that train.

    None where a graph makes no gradient of theirs, or is too large to be looked at.
    """
    trains: dict[Any, bool] = {}  # whether the gradient of another leaf is behind a node
    only: dict[Any, int | None] = {}  # the leaf that alone is behind it, by a way without branches
    passed = set[int]()
    left = [each.grad_fn for each in _plain_tensors(outputs) if each.grad_fn is not None]
    while left:
        node = left[-1]
        inner = [each for each, _ in node.next_functions if each is not None]
        more = [each for each in inner if each not in trains]
        if len(trains) > PART_LIMIT:
            return None
        if more and node not in trains:
            left += more
            continue
        left.pop()
        name = type(node).__name__
        if name == "AccumulateGrad":
            only[node] = id(node.variable)
            trains[node] = only[node] not in unused
        else:
            ends = len(inner) != 1 or name.startswith("Embedding")  # an index has no gradient
            only[node] = None if ends else only[inner[0]]
            trains[node] = any(trains[each] for each in inner)
        if trains[node]:
            passed |= {key for each in inner if not trains[each] and (key := only[each])}
    return passed if unused & set(only.values()) else None


def _unused_in(
    root: tuple[int, list[Any], list[Any]], piled: set[int], used: set[int], passed: set[int] | None
) -> dict[str, Any]:
    """One entry of `roots`; see `run_format.setting_lines.UNUSED_FIELDS`."""
    tag, modules, parameters = root
    unused = [p for p in parameters if id(p) in piled]
    return {
        "root": tag, "tensor_count": len(unused), "number_count": sum(p.numel() for p in unused),
        "stepped_count": sum(id(p) in used for p in parameters),
        "passed_count": None if passed is None else sum(id(p) in passed for p in unused),
        "complete": max(len(parameters), len(modules)) < PART_LIMIT,
    }  # fmt: skip


_TIMERS = (
    (signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    (signal.ITIMER_PROF, signal.SIGPROF),
)  # fmt: skip


class CallHooks:
    """What Python calls in the training thread wherever that is, where the job asked for it."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """In a forked child."""
        self.look_count = 0
        self._seen: dict[tuple[str, str, str | None, int | None], int] = {}

    def look(self) -> None:
        """On the training thread: each thread has its own."""
        self.look_count += 1
        if getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False):
            return  # its own, or haiprof's for a window
        timed = (
            ("signal.setitimer", signal.getsignal(of)) for timer, of in _TIMERS
            if signal.getitimer(timer)[1]
        )  # fmt: skip
        of_calls = ("sys.setprofile", sys.getprofile()), ("sys.settrace", sys.gettrace())
        for sets, hook in (*of_calls, *timed):
            found = (sets, *_describe_hook(hook)) if callable(hook) else None
            if found is not None and not (found[2] or "").startswith(OWN_FOLDER):
                self._seen[found] = self._seen.get(found, 0) + 1

    def entries(self) -> list[dict[str, Any]]:
        """See `run_format.setting_lines.HOOK_FIELDS`."""
        fields = ("sets", "function", "file", "line")
        return [{**dict(zip(fields, at, strict=True)), "count": count}
                for at, count in self._seen.copy().items()]  # fmt: skip


def _describe_hook(hook: Any) -> tuple[str, str | None, int | None]:
    """Function, file and line; of one in C a name alone. No code of the job's runs."""
    kind = type(hook)
    function = hook.__func__ if kind is MethodType else hook
    if type(function) is not FunctionType:
        found = (vars(each).get("__call__") for each in kind.__mro__)
        function = next((each for each in found if each is not None), None)
    if type(function) is not FunctionType:
        return f"{kind.__module__}.{kind.__qualname__}", None, None
    code = function.__code__
    return getattr(code, "co_qualname", code.co_name), code.co_filename, code.co_firstlineno


def _plain_tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Tensors among a call's arguments, also of one list, tuple or dictionary."""
    # This is read on the training thread: where the job follows calls of torch (a
    # TorchFunctionMode), which reading a dtype or a size is, nothing is read.
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


def _count_alike(tensors: Iterable[Any]) -> tuple[_Alike, bool]:
    """Counts tensors and the numbers in them, and whether they are all counted."""
    # Only those whose properties run no code of the job's are: of torch's own classes.
    alike: _Alike = {}
    plain: dict[type, bool] = {}
    for tensor in tensors:
        kind = type(tensor)
        if kind not in plain:
            plain[kind] = _is_plain(kind)
        if plain[kind]:
            key = (tensor.dtype, tensor.device, tensor.requires_grad)
            tensor_count, number_count = alike.get(key, (0, 0))
            alike[key] = (tensor_count + 1, number_count + tensor.numel())
    return alike, all(plain.values())


def _sums(alike: _Alike, part: int, *, of_numbers: bool = False) -> dict[str, int]:
    """Tensors, or the numbers in them, by dtype (part 0 of the key) or by kind of device (1)."""
    found: Counter[str] = Counter()
    for key, counts in alike.items():
        name = str(key[1].type) if part else _dtype_name(key[0])
        found[name] += counts[of_numbers]
    return dict(found)


def _is_plain(kind: type) -> bool:
    return kind.__name__ in _PLAIN and kind.__module__.partition(".")[0] == "torch"


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _parallel_settings(module: Any) -> dict[str, Any]:
    switches = ("find_unused_parameters", "static_graph", "broadcast_buffers",
                "gradient_as_bucket_view")  # fmt: skip
    found: dict[str, Any] = {name: _switch(getattr(module, name, None)) for name in switches}
    return {**found, "bucket_bytes": _integer(getattr(module, "bucket_bytes_cap", None))}


def _switch(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


class Registry:
    """Numbers objects from 1, by which spans name them; keeps what a wrapper needs at once."""

    def __init__(
        self,
        describe: Callable[[Any], dict[str, Any] | None],
        encode: Callable[[int], Any],
        lines: list[dict[str, Any]],
    ) -> None:
        self.entries: dict[int, Any] = {}  # by the object's id; empty for what is of no interest
        self._describe = describe
        self._encode = encode
        self._lines = lines
        self._next = 1
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, target: Any) -> Any:
        """Numbers an object seen for the first time; its number goes when the object does."""
        key = id(target)
        line = self._describe(target)
        entry: Any = ()
        if line is not None:
            tag = min(self._next, MANY)
            entry = self._encode(tag)
            if tag < MANY:
                self._next += 1
                self._lines.append({**line, "tag": tag})
        self._references[key] = weakref.ref(target, lambda _: self._forget(key))
        self.entries[key] = entry
        return entry

    def living(self) -> list[Any]:
        """The objects of interest that still exist, in the order in which they came."""
        pairs = list(self._references.items())
        found = (reference() for key, reference in pairs if self.entries.get(key))
        return [target for target in found if target is not None]

    def list_numbered(self) -> list[tuple[int, Any]]:
        """The same, each with its number."""
        found = []
        for target in self.living():
            code = self.entries.get(id(target))
            while isinstance(code, tuple):
                code = code[0]
            found.append((0 if code is None else code >> TAG_BITS, target))
        return found

    def clear(self) -> None:
        """Forgets everything: a forked child names its own."""
        self.entries.clear()
        self._references.clear()
        self._next = 1

    def _forget(self, key: int) -> None:
        self.entries.pop(key, None)
        self._references.pop(key, None)


def describe_root(module: Any, families: dict[int, int]) -> dict[str, Any] | None:
    """The line of a module that was called outermost; None for one without parameters."""
    # Modules that share weights share a family: its number by the id of the first parameter.
    try:
        parameters = list(_own_or_plain(module, "parameters"))
        module_count = sum(1 for _ in _own_or_plain(module, "modules"))
    except Exception:  # a module of its own kind: it is a root, and nothing is known of it
        parameters, module_count = [module], None
    if not parameters:
        return None
    return {
        "type": "root", "name": type(module).__name__, "module_count": module_count,
        "parameter_count": _parameter_count(parameters),
        "family": families.setdefault(id(parameters[0]), len(families)),
        "autocast": _autocast_dtype(), "python_profiler": sys.getprofile() is not None,
    }  # fmt: skip


def _autocast_dtype() -> str | None:
    """What autocast makes of this thread's operators, by the first device; None where it is off."""
    torch = sys.modules.get("torch")
    is_enabled = getattr(torch, "is_autocast_enabled", None)
    if torch is None or is_enabled is None:
        return None
    try:
        names = [name for name in ("cuda", "cpu") if is_enabled(name)]
        return str(torch.get_autocast_dtype(names[0])).removeprefix("torch.") if names else None
    except (RuntimeError, TypeError, AttributeError):  # torch before 2.4 takes no device
        return None


def _own_or_plain(module: Any, name: str) -> Any:
    """What a method of Module itself gives, whatever a subclass has made of that name."""
    torch = sys.modules.get("torch")
    method = getattr(torch.nn.Module, name) if torch is not None else getattr(type(module), name)
    return method(module)


def _parameter_count(parameters: list[Any]) -> int | None:
    """Number of weights; None where some are not initialised yet (lazy modules)."""
    try:
        return sum(int(p.numel()) for p in parameters)
    except (AttributeError, ValueError, RuntimeError):
        return None
