"""Checkpoints that the job writes and reads: when, and from which file a start went on."""

from __future__ import annotations

import functools
import os
import time
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from haiprof.in_job.patches import State

SAVES = (
    ("torch.serialization", ("save",)),
    ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save")),
    ("safetensors.torch", ("save_file",)),
)
LOADS = (
    ("torch.serialization", ("load",)),
    ("torch.distributed.checkpoint.state_dict_loader", ("load",)),
    ("safetensors.torch", ("load_file",)),
)
"""Functions by module; those of torch.distributed.checkpoint take a folder by name."""
_LOAD_LIMIT = 64
_PLACES = {"save": 1, "save_file": 1, "load": 0, "load_file": 0}
"""Where the file is among the arguments."""
_NAMES = ("f", "filename", "checkpoint_id")
_FOLDER_INDEX = ".metadata"
_now = time.perf_counter_ns


class CheckpointLog:
    """Writes down the training thread's saves, and what it loads before it first trained.

    A load tells when its file was written, whatever the file is called by now: by that a reader
    knows which save it holds.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._is_inside = False
        self._load_count = 0

    def wrap(self, original: Callable[..., Any], *, loads: bool) -> Callable[..., Any]:
        """The same function, which leaves a line for each call that did not fail."""

        @functools.wraps(original)
        def note(*args: Any, **kwargs: Any) -> Any:
            if not self._counts(loads=loads):
                return original(*args, **kwargs)
            self._is_inside = True  # what it calls itself is no other
            start_ns = _now()
            try:
                result = original(*args, **kwargs)
            finally:
                self._is_inside = False
            try:
                self._load_count += loads
                line = {"type": "checkpoint", "action": "load" if loads else "save",
                        "start_ns": start_ns, "end_ns": _now()}  # fmt: skip
                self._state.recorder.lines.append(line | _file_facts(original, args, kwargs))
            except Exception as error:
                self._state.recorder.fault("checkpoint", error)
            return result

        return note

    def _counts(self, *, loads: bool) -> bool:
        """`loading`: a dataset that reads its samples so."""
        state = self._state
        if state.loading or self._is_inside or get_ident() != state.owner:
            return False
        return not loads or not (state.stepped or self._load_count >= _LOAD_LIMIT)


def _file_facts(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The file's name, and Unix time of when it was written; None where they are not known."""
    place = _PLACES.get(original.__name__)
    is_of_folders = "checkpoint" in original.__module__
    target = next((kwargs[name] for name in _NAMES if name in kwargs), None)
    if target is None and place is not None and not is_of_folders and len(args) > place:
        target = args[place]
    if not isinstance(target, (str, os.PathLike)):
        target = getattr(target, "name", None)  # an open file, which may have none
    if not isinstance(target, (str, os.PathLike)):
        return {"file": None, "written_ns": None}
    path = os.path.abspath(os.fspath(target))
    written_ns = None
    for place_of in (os.path.join(path, _FOLDER_INDEX), path):
        try:
            written_ns = os.stat(place_of).st_mtime_ns
            break
        except OSError:  # no folder, or not this machine's file system
            continue
    return {"file": path, "written_ns": written_ns}
