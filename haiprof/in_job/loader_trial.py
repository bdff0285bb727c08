"""Another DataLoader for one trial of `haiprof try-loader`: kept batches, or so many workers."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

from haiprof.base.options import ENV_TRY_LOADER, KEPT_BATCHES

_KEPT = 8  # batches that are handed out again and again: more than a cache holds of large ones

_OF_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")


def change_loaders(run: Path) -> None:
    """What the variable of a trial asks for; of a run that is not in the trial's folder nothing."""
    folder, _, mode = os.environ.get(ENV_TRY_LOADER, "").rpartition(":")
    if not folder or run.parent != Path(folder):
        return
    _write_no_checkpoints()
    if mode == KEPT_BATCHES:  # without workers, which epochs may start anew
        _keep_batches()
        _give_workers(0)
    elif mode.isdecimal():
        _give_workers(int(mode))


def _give_workers(count: int) -> None:
    from torch.utils.data import DataLoader

    original = DataLoader.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        given = signature.bind(self, *args, **options)
        given.arguments["num_workers"] = count
        if count:
            given.arguments.setdefault("persistent_workers", True)
        else:  # which are errors without workers
            for name in _OF_WORKERS:
                given.arguments.pop(name, None)
        original(*given.args, **given.kwargs)

    DataLoader.__init__ = __init__  # type: ignore[method-assign]


def _keep_batches() -> None:
    """Of each dataset the first batches; an epoch is as long as it was."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__
    kept: dict[int, tuple[Any, list[Any]]] = {}

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807
        _, batches = kept.setdefault(id(self._dataset), (self._dataset, []))
        given = self.__dict__.setdefault("_haiprof_given", 0)
        if len(batches) < _KEPT:
            batches.append(original(self))
            self._haiprof_given = given + 1
            return batches[-1]
        if given >= _length(self):
            raise StopIteration
        self._haiprof_given = given + 1
        return batches[given % _KEPT]

    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]


def _length(iterator: Any) -> float:
    try:
        return len(iterator._index_sampler)
    except TypeError:  # an iterable dataset does not know
        return float("inf")


def _write_no_checkpoints() -> None:
    """A trial must not write over the job's checkpoints: torch.save writes to nowhere."""
    import torch

    original = torch.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
        with open(os.devnull, "wb") as nowhere:
            original(obj, nowhere, *args, **options)

    torch.save = save
