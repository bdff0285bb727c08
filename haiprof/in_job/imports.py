"""Acts when the job imports a module; never imports one first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch:
    """A finder for a few module names: the real spec, with a step added after the import."""

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._steps: dict[str, Callable[[Any], None]] = {}

    def after(self, name: str, then: Callable[[Any], None]) -> None:
        """Calls `then(module)` once the job has imported `name`, at once if it already has."""
        # It stays on sys.meta_path for good, and answers None when there is nothing left to wait
        # for: taking it out would make an import under way in another thread skip a finder.
        module = sys.modules.get(name)
        if module is not None:
            then(module)
            return
        self._steps[name] = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Waits for nothing more."""
        self._steps.clear()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, for our names alone."""
        if name not in self._steps:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(name, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            original(module)
            then = self._steps.pop(name, None)
            try:
                loader.__dict__.pop("exec_module", None)
                if then is not None:
                    then(module)
            except Exception as error:
                self._failed(name, error)

        try:
            loader.exec_module = exec_module
        except AttributeError as error:  # a loader with slots
            self._failed(name, error)
