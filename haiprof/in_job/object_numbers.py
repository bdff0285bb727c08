"""Small numbers for modules and optimizers, so that a span can name them without a string."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from haiprof.run_format.schema import TAG_MASK

MANY = TAG_MASK  # the tag of all that came after the numbers ran out


class Registry:
    """Numbers objects from 1, and keeps for each what a wrapper needs at once.

    Args:
        describe: Gives the line for events.jsonl of an object, or None where it is of no interest.
        encode: Gives what `entries` keeps for a number.
        lines: Where the lines go; the drain thread writes them.
    """

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
        """Those of interest that still live."""
        found = [(key, reference()) for key, reference in list(self._references.items())]
        return [each for key, each in found if each is not None and self.entries.get(key)]

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
        }


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """The line of an optimizer."""
    return {"type": "optimizer", "name": type(optimizer).__name__}


def _own_or_plain(module: Any, name: str) -> Any:
    """What Module's own method gives, whatever a subclass has made of that name."""
    torch = sys.modules.get("torch")
    method = getattr(torch.nn.Module, name) if torch is not None else getattr(type(module), name)
    return method(module)


def _parameter_count(parameters: list[Any]) -> int | None:
    """Number of weights; None where some are not initialised yet (lazy modules)."""
    try:
        return sum(int(p.numel()) for p in parameters)
    except (AttributeError, ValueError, RuntimeError):
        return None
