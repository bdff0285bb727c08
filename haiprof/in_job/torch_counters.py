"""What torch itself counts, read on the drain thread: compilations, retries of the allocator."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

_COMPILATIONS = ("_compile.compile_inner", "_compile.<locals>.compile_inner")
"""Dynamo's own name for one compilation of a frame, in this torch and in 2.2 to 2.5."""
_now = time.perf_counter_ns


class TorchCounters:
    """Lines for events.jsonl when something changed. Nothing is imported for it."""

    def __init__(self) -> None:
        self._compiled = 0
        self._last: Any = None

    def compile_line(self) -> dict[str, Any] | None:
        """What was compiled so far, where there was something since the last line.

        Source: `torch._dynamo.utils.compilation_time_metrics`, seconds by name, and
        `get_compilation_metrics`, which also knows backward graphs and when each began.

        `count` and `spent_ns` of all compilations of frames so far, and `spans`: (Unix time in
        us, length in us) of each compilation since the last line, of backward graphs too.
        """
        utils = sys.modules.get("torch._dynamo.utils")
        metrics = getattr(utils, "compilation_time_metrics", None)
        if not isinstance(metrics, Mapping):
            return None
        times = next((metrics[name] for name in _COMPILATIONS if name in metrics), ())
        count, spans = len(times), self._new_spans(utils)
        if count <= self._compiled and not spans:
            return None
        self._compiled = count
        spent = sum(list(times)[:count])
        return {
            "type": "compile",
            "time_ns": _now(),
            "count": count,
            "spent_ns": int(spent * 1e9),
            "spans": spans,
        }

    def _new_spans(self, utils: Any) -> list[tuple[int, int]]:
        """Of compilations since the last call; torch keeps the last 64."""
        known = getattr(utils, "get_compilation_metrics", lambda: ())()
        found = []
        for metrics in reversed(known):
            if metrics is self._last:
                break
            found.append(_span(metrics))
        self._last = known[-1] if known else None
        return [span for span in reversed(found) if span is not None]

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


def _span(metrics: Any) -> tuple[int, int] | None:
    """Begin and length in us; None where this torch does not tell (backward graphs of 2.5)."""
    begin, length = (getattr(metrics, name, None) for name in ("start_time_us", "duration_us"))
    if begin is None or length is None:  # torch 2.5
        begin = getattr(metrics, "start_time", None)
        length = getattr(metrics, "entire_frame_compile_time_s", None)
        if begin is None or length is None:
            return None
        begin, length = begin * 1e6, length * 1e6
    return int(begin), int(length)
