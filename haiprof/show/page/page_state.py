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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One reading of the run."""

    content: PageContent
    analyzer: RunFrames
    time_ns: int
    """Unix time at which it began."""


class CachedPage:
    """Reads the run at the first request, and again when it has grown.

    Args:
        run: The run.
        read_traces: Whether its traces are read.
        baseline: The run it is compared with: a directory, or `last-good`.
    """

    def __init__(self, run: RunPaths, *, read_traces: bool, baseline: str | None = None) -> None:
        self._run, self._read_traces, self._baseline = run, read_traces, baseline
        self._lock = threading.Lock()
        self._held: _Read | None = None

    def newest(self) -> PageContent:
        """The run as it is now, or as it was at most two seconds ago.

        Raises:
            HaiprofError: The run cannot be read.
        """
        with self._lock:
            if self._held is None or self._is_old(self._held):
                now, analyzer = time.time_ns(), RunFrames(self._run.root)
                content = page_content(
                    analyzer, read_traces=self._read_traces, baseline=self._baseline
                )
                self._held = _Read(content=content, analyzer=analyzer, time_ns=now)
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
        """Whether the job runs, and whether it has written since the page was made; cheap."""
        header = run_header(self._run, manifest_or_none(self._run))
        read = self._held
        changed = read is not None and self._grown_since(read)
        words = [header.outcome]
        if header.state == RUNNING:
            words[0] += f" for {duration_text(header.duration_ns)}"
        if read is not None:
            words.append(f"page of {moment_text(read.time_ns)[-8:]}")
        if changed:
            words.append("newer data is there")
        return {"state": header.state, "changed": changed, "text": " · ".join(words)}

    def _is_old(self, read: _Read) -> bool:
        return time.time_ns() - read.time_ns > _OLD_S * NS_PER_S and self._grown_since(read)

    def _grown_since(self, read: _Read) -> bool:
        written_ns = last_write_ns(self._run)
        return written_ns is not None and written_ns > read.time_ns
