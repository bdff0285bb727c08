"""The page of a run as it was last read, and whether the run has changed since."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from haiprof.base.units import NS_PER_S, duration_text
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.show.page.content import PageContent, page_content
from haiprof.show.run_header import RUNNING, last_write_ns, manifest_or_none, run_header
from haiprof.show.text import moment_text

_OLD_S = 2.0
_PAUSE_S, _COST_RATIO = 5.0, 0.05
"""A page is renewed at most so often, and for at most this share of a core, beside a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One reading of the run."""

    content: PageContent
    analyzer: RunFrames
    time_ns: int
    """Unix time at which it began."""
    cost_s: float
    """CPU time that it took."""


class CachedPage:
    """Reads the run at the first request, and again when it has grown."""

    def __init__(self, run: RunPaths, *, read_traces: bool, baseline: str | None = None) -> None:
        self._run, self._read_traces, self._baseline = run, read_traces, baseline
        self._lock = threading.Lock()
        self._held: _Read | None = None

    def newest(self) -> PageContent:
        """The run as it is now, or as it was at most two seconds ago."""
        with self._lock:
            if self._held is None or self._is_old(self._held):
                now, analyzer = time.time_ns(), RunFrames(self._run.root)
                began = time.process_time()
                content = page_content(
                    analyzer, read_traces=self._read_traces, baseline=self._baseline
                )
                cost_s = time.process_time() - began
                self._held = _Read(content=content, analyzer=analyzer, time_ns=now, cost_s=cost_s)
            return self._held.content

    def current(self) -> PageContent:
        """What the page was made of, so that its figures agree with its text."""
        read = self._held
        return self.newest() if read is None else read.content

    def analyzer(self) -> RunFrames:
        """The frames behind `shown`."""
        self.current()
        assert self._held is not None
        return self._held.analyzer

    def status(self) -> dict[str, Any]:
        """Whether the job runs, has written since the page was made, and a new one is due; cheap.

        A page is due at once when the job has ended.
        """
        header = run_header(self._run, manifest_or_none(self._run))
        read = self._held
        changed = read is not None and self._has_news(read)
        running = header.state == RUNNING
        since = f" for {duration_text(header.duration_ns)}" if running else ""
        return {
            "state": header.state,
            "changed": changed,
            "due": changed and read is not None and (not running or _is_due(read)),
            "text": f"job {header.outcome}{since}",
            "read": moment_text(read.time_ns)[-8:] if read is not None else None,
        }

    def _is_old(self, read: _Read) -> bool:
        return time.time_ns() - read.time_ns > _OLD_S * NS_PER_S and self._has_news(read)

    def _has_news(self, read: _Read) -> bool:
        written_ns = last_write_ns(self._run)
        if written_ns is not None and written_ns > read.time_ns:
            return True
        state = run_header(self._run, manifest_or_none(self._run)).state
        return state != read.content.header.state


def _is_due(read: _Read) -> bool:
    """Whether a new page would leave the job's processor alone for long enough."""
    pause_s = max(_PAUSE_S, read.cost_s / _COST_RATIO)
    return time.time_ns() - read.time_ns > pause_s * NS_PER_S
