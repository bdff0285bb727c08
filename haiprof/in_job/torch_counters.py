"""What torch itself counts, read on the drain thread: compilations, retries of the allocator."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

_COMPILATIONS = ("_compile.compile_inner", "_compile.<locals>.compile_inner")
"""Dynamo's own name for one compilation of a frame, in this torch and in 2.2 to 2.5."""
_now = time.perf_counter_ns


class SideFacts:
    """Lines for events.jsonl when something changed. Nothing is imported for it."""

    def __init__(self) -> None:
        self._compiled = 0

    def compile_line(self) -> dict[str, Any] | None:
        """`count` and `time_ns` of all compilations so far, where there was one since the last.

        Source: `torch._dynamo.utils.compilation_time_metrics`, seconds by name.
        """
        utils = sys.modules.get("torch._dynamo.utils")
        metrics = getattr(utils, "compilation_time_metrics", None)
        if not isinstance(metrics, Mapping):
            return None
        times = next((metrics[name] for name in _COMPILATIONS if name in metrics), ())
        count = len(times)
        if count <= self._compiled:
            return None
        self._compiled = count
        spent = sum(list(times)[:count])
        return {
            "type": "compile", "time_ns": _now(), "count": count, "spent_ns": int(spent * 1e9)
        }  # fmt: skip

    def allocator_line(self) -> dict[str, Any] | None:
        """Retries and failures of the CUDA allocator so far, where the job has started CUDA.

        Source: `torch.cuda.memory_stats`, `num_alloc_retries` (cached memory given back to the
        driver to find room) and `num_ooms`.
        """
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return None
        stats = cuda.memory_stats()
        found = (int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0)))
        return {
            "type": "allocator", "time_ns": _now(), "retry_count": found[0], "oom_count": found[1]
        }  # fmt: skip
