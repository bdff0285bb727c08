"""Acts when the job imports a module; never imports one first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _ImportWatch:
    """A finder for one module name: the real spec, with a step added after the module's import."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, for our name alone."""
        if name != self.name:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _ImportWatch):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                loader.__dict__.pop("exec_module", None)
                self.then(module)

        loader.exec_module = exec_module


def after_import(name: str, then: Callable[[Any], None]) -> Callable[[], None]:
    """Calls `then(module)` once the job has imported `name`, at once if it already has.

    Returns:
        A function that stops waiting.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return _nothing_to_stop
    watch = _ImportWatch(name, then)
    sys.meta_path.insert(0, watch)

    def stop() -> None:
        if watch in sys.meta_path:
            sys.meta_path.remove(watch)

    return stop


def _nothing_to_stop() -> None:
    """The module was there already."""
