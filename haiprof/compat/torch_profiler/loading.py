"""Parses traces for torch-tb-profiler: patched processes, a few at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")
_RUNNING: set[BaseProcess] = set()
_LOCK = threading.Lock()
_ROOM: list[ThreadPoolExecutor] = []


class Parsing:
    """Replaces the plugin's `Process`, which would start one per trace, all at once."""

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        """Parses when there is room."""
        _ROOM[0].submit(self._run)

    def _run(self) -> None:
        process = _SPAWN.Process(target=parse, args=(self._target, self._args), daemon=True)
        with _LOCK:
            process.start()
            _RUNNING.add(process)
        process.join()
        _RUNNING.discard(process)
        if process.exitcode:  # it sent nothing, and the plugin would wait forever
            self._target.__self__.queue.put((None, None))  # type: ignore[attr-defined]


def parse(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Parses one trace, in a process of its own."""
    from haiprof.compat.torch_profiler.patches import patch_parsing

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    patch_parsing()
    target(*args)


def patch_loading() -> None:
    """Makes the plugin parse in this way."""
    from torch_tb_profiler.profiler import loader

    _ROOM[:] = [ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) // 2))]
    loader.Process = Parsing


def stop_loading() -> None:
    """Ends running parsers."""
    for room in _ROOM:
        room.shutdown(wait=False, cancel_futures=True)
    with _LOCK:
        for process in list(_RUNNING):
            process.terminate()
