"""What each DataLoader was made with: one line in events.jsonl when it is first iterated."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from haiprof.in_job.recorder import Recorder

_LIMIT = 64  # loaders that are described; a job that makes one per step is not followed further
_now = time.perf_counter_ns


def wrap_iter(original: Callable[..., Any], recorder: Recorder) -> Any:
    """`DataLoader.__iter__` that leaves a line per loader; the job's call is made exactly once."""
    told: set[int] = set()

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807
        if len(told) < _LIMIT and not recorder.closed:
            try:
                if id(self) not in told:
                    told.add(id(self))
                    recorder.lines.append(describe_loader(self))
            except Exception as error:
                recorder.fault("dataloader", error)
        return original(self)

    return __iter__


def describe_loader(loader: Any) -> dict[str, Any]:
    """`workers`, `batch_size`, `persistent`, `prefetch`: as given; null what is no number."""
    return {
        "type": "dataloader",
        "time_ns": _now(),
        "workers": _count(getattr(loader, "num_workers", None)),
        "batch_size": _count(getattr(loader, "batch_size", None)),
        "persistent": getattr(loader, "persistent_workers", None) is True,
        "prefetch": _count(getattr(loader, "prefetch_factor", None)),
        "dataset": type(getattr(loader, "dataset", None)).__name__,
    }


def _count(value: object) -> int | None:
    return value if type(value) is int else None
