"""Injected through PYTHONPATH: waits for the job's own `import torch`, then loads haiprof's hook.

A copy of this file stands in a run directory's boot/ beside config.json, so that PYTHONPATH alone
carries everything through launchers that drop other variables. It costs well under a millisecond
in processes that never import torch, and the sitecustomize that it shadows still runs.
"""

import sys

Any = object  # typing costs milliseconds to import; this file runs in every Python process
_HERE = __file__.rpartition("/")[0]


class _TorchWatch:
    """A finder that answers for torch alone: the real spec, with a step added after its import.

    It stays on sys.meta_path for good: taking it out would make an import that is under way in
    another thread skip a finder.
    """

    done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self.done:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                _activate_after(spec.loader, self)
                return spec
        return None


def _activate_after(loader: Any, watch: Any) -> None:
    """Lets the hook start once torch's own import has ended well."""
    original = getattr(loader, "exec_module", None)
    if original is None:
        return

    def exec_module(module: Any) -> None:
        original(module)
        if not watch.done:
            watch.done = True
            loader.__dict__.pop("exec_module", None)
            _load_hook()

    try:
        loader.exec_module = exec_module
    except AttributeError as error:  # a loader with slots: torch is imported, and not recorded
        _note_failure(error)


def _load_hook() -> None:
    """Loads haiprof by its location: the job's interpreter need not have it installed."""
    before = set(sys.modules)
    try:
        import json

        with open(_HERE + "/config.json", encoding="utf-8") as file:
            config = json.load(file)
        if "haiprof" not in sys.modules:
            from importlib import util

            folder = config["package"]
            spec = util.spec_from_file_location(
                "haiprof", folder + "/__init__.py", submodule_search_locations=[folder]
            )
            if spec is None or spec.loader is None:
                raise ImportError(f"no haiprof package at {folder}")
            sys.modules["haiprof"] = package = util.module_from_spec(spec)
            spec.loader.exec_module(package)
        from haiprof.hook import activate

        activate(config)
    except Exception as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "haiprof":
                del sys.modules[name]
        _note_failure(error)


def _note_failure(error: Exception) -> None:
    """One line beside the config; nothing reaches the job's own output."""
    import os

    try:
        with open(_HERE + "/failures.log", "a", encoding="utf-8") as file:
            file.write(f"pid {os.getpid()}: {type(error).__name__}: {error}\n")
    except OSError:
        return  # the run directory is gone or full: nobody is left to tell


def _run_shadowed() -> None:
    """Runs the sitecustomize that ours stands in front of, as if ours were not there."""
    from importlib.machinery import PathFinder

    path = [entry for entry in sys.path if entry.rstrip("/") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    from importlib import util

    module = util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if not any(type(finder).__name__ == "_TorchWatch" for finder in sys.meta_path):
    sys.meta_path.insert(0, _TorchWatch())
    if "torch" in sys.modules:  # a .pth file has imported it already
        _load_hook()
_run_shadowed()
