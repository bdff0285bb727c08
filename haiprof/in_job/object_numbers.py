"""Small numbers for modules and optimizers, so that a span can name them without a string."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from haiprof.run_format.schema import TAG_MASK

MANY = TAG_MASK  # the tag of all that came after the numbers ran out


class Registry:
    """Numbers objects from 1, and keeps for each what a wrapper needs at once."""

    def __init__(
        self,
        describe: Callable[[Any], dict[str, Any] | None],
        encode: Callable[[int], Any],
        lines: list[dict[str, Any]],
    ) -> None:
        self.entries: dict[int, Any] = {}
        """By the object's id; empty (false) for what is of no interest."""
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

    def clear(self) -> None:
        """Forgets everything: a forked child names its own."""
        self.entries.clear()
        self._references.clear()
        self._next = 1

    def _forget(self, key: int) -> None:
        self.entries.pop(key, None)
        self._references.pop(key, None)


class RootDescriber:
    """Describes a module that was called outermost; modules that share weights share a family."""

    def __init__(self) -> None:
        self._families: dict[int, int] = {}

    def __call__(self, module: Any) -> dict[str, Any] | None:
        """The line of a module with parameters; None for one without."""
        try:
            parameters = list(_own_or_plain(module, "parameters"))
            module_count = sum(1 for _ in _own_or_plain(module, "modules"))
        except Exception:  # a module of its own kind: it is a root, and nothing is known of it
            parameters, module_count = [module], None
        if not parameters:
            return None
        family = self._families.setdefault(id(parameters[0]), len(self._families))
        return {
            "type": "root",
            "name": type(module).__name__,
            "module_count": module_count,
            "parameter_count": _parameter_count(parameters),
            "family": family,
            "autocast": _autocast_dtype(),
            "python_profiler": sys.getprofile() is not None,
        }


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """The line of an optimizer."""
    return {"type": "optimizer", "name": type(optimizer).__name__}


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
