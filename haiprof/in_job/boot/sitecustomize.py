"""Injected through PYTHONPATH: waits for the job's own `import torch`, then loads haiprof's hook.

An entry behind this folder's own names the run directory and its owner (`run_format.boot`), so that
PYTHONPATH alone carries everything through launchers that drop other variables. All code comes from
the installed haiprof, none from the log directory, which others may share. It costs well under a
millisecond in processes that never import torch, and the sitecustomize that it shadows still runs.
"""

import sys

Any = object  # typing costs milliseconds to import; this file runs in every Python process
_HERE = __file__.rpartition("/")[0]
_PACKAGE = _HERE.removesuffix("/in_job/boot")
_OWNER, _, _RUN = next((e for e in sys.path if e.startswith(_HERE + "/@")), "")[
    len(_HERE) + 2 :
].partition("/")


class _TorchWatch:
    """A finder for torch: the real spec, with a step added after its import.

    And for haiprof, where the job's Python has none: what its haiprof.step() needs. It stays on
    sys.meta_path for good: taking it out would make an import that is under way in another thread
    skip a finder.
    """

    done = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "haiprof" and (name != "torch" or self.done):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                if name == "torch":
                    _activate_after(spec.loader, self)
                return spec
        return _own_spec() if name == "haiprof" else None


def _own_spec() -> Any:
    """This package by its location: the job's interpreter need not have it installed."""
    from importlib import util

    return util.spec_from_file_location(
        "haiprof", _PACKAGE + "/__init__.py", submodule_search_locations=[_PACKAGE]
    )


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


class _EmptyFinder:
    """Finds no module: what stands in for a finder of our folder, once this file is loaded.

    Python would ask the folder's file system at each import of the job, and may wait for it.
    """

    @staticmethod
    def find_spec(name: str, target: Any = None) -> Any:
        return None


def _load_hook() -> None:
    """Loads haiprof, the job's own where it has imported one."""
    before = set(sys.modules)
    try:
        config = _read_config()
        if "haiprof" not in sys.modules:
            from importlib import util

            spec = _own_spec()
            if spec is None or spec.loader is None:
                raise ImportError(f"no haiprof package at {_PACKAGE}")
            sys.modules["haiprof"] = package = util.module_from_spec(spec)
            spec.loader.exec_module(package)
        from haiprof.in_job.activation import activate

        activate(config)
    except Exception as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "haiprof":
                del sys.modules[name]
        _note_failure(error)


def _read_config() -> Any:
    """What the launcher wrote for the hook; of nobody but the owner of the run."""
    import json
    import os

    path = f"/{_RUN}/boot/config.json"
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, encoding="utf-8") as file:
        state = os.fstat(number)
        if state.st_uid not in (int(_OWNER), os.geteuid()) or state.st_mode & 0o022:
            raise PermissionError(f"{path} is not the run's owner's alone")
        return {**json.load(file), "run_dir": f"/{_RUN}"}


def _note_failure(error: Exception) -> None:
    """One line beside the config; neither output nor a signal reaches the job."""
    import os
    import signal

    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    text = f"pid {os.getpid()}: {type(error).__name__}: {error}\n"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
    try:
        number = os.open(f"/{_RUN}/boot/failures.log", flags, 0o600)
        with os.fdopen(number, "ab", buffering=0) as file:
            file.write(text.encode(errors="replace"))
    except OSError:
        return  # the run directory is gone or full: nobody is left to tell
    finally:
        signal.sigtimedwait({signal.SIGXFSZ}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


if _RUN and not any(type(finder).__name__ == "_TorchWatch" for finder in sys.meta_path):
    sys.meta_path.insert(0, _TorchWatch())
    if "torch" in sys.modules:  # a .pth file has imported it already
        _load_hook()
for _entry in sys.path:
    if _entry.rstrip("/") == _HERE:
        sys.path_importer_cache[_entry] = _EmptyFinder()  # type: ignore[assignment]
_run_shadowed()
