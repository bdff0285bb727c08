"""Follows all running jobs: their progress, and the verdict so far."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from haiprof.base.subcommand import Subcommand
from haiprof.live.find import RunningJob, running_jobs
from haiprof.live.follow import JobNow, LiveJob

FIND_EVERY_S = 3.0
VERDICT_EVERY_S = 10.0
VERDICT_OF_S = 120.0
_SHARE_OF_TIME = 0.1


class VerdictSoFar:
    """The verdict of a job's last two minutes, computed by a niced child at intervals.

    At most a tenth of the time is spent on it.
    """

    def __init__(self, run: Path, subcommand: Subcommand) -> None:
        self.headline: str | None = None
        self._subcommand = subcommand
        self._run = run
        self._child: subprocess.Popen[str] | None = None
        self._began_s = 0.0
        self._due_s = 0.0

    def tick(self) -> None:
        """Collects the result of a child, and starts the next one when it is due."""
        now = time.monotonic()
        if self._child is not None and self._child.poll() is not None:
            text, _ = self._child.communicate()
            self._child = None
            self._due_s = now + max(VERDICT_EVERY_S, (now - self._began_s) / _SHARE_OF_TIME)
            self.headline = _headline(text) or self.headline
        if self._child is None and now >= self._due_s:
            self._began_s = now
            self._child = self._start()

    def stop(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _start(self) -> subprocess.Popen[str]:
        words = ["verdict", str(self._run), "--json", "--last", str(VERDICT_OF_S)]
        return subprocess.Popen(
            self._subcommand(*words),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True, preexec_fn=lambda: os.nice(10) and None,
        )  # fmt: skip


def _headline(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    headline = found.get("headline") if isinstance(found, dict) else None
    return headline if isinstance(headline, str) else None


class Watch:
    """Follows one job, or all that run."""

    def __init__(
        self,
        log_dirs: Sequence[Path],
        job: RunningJob | None,
        *,
        clock: Callable[[], int] = time.time_ns,
        subcommand: Subcommand | None = None,
    ) -> None:
        self._log_dirs = log_dirs
        self._clock = clock
        self._subcommand = subcommand
        self._only = job
        self._live: dict[Path, LiveJob] = {}
        self._verdicts: dict[Path, VerdictSoFar] = {}
        self._found_s = -FIND_EVERY_S

    def look(self) -> list[JobNow]:
        """All jobs as they are now, the oldest first."""
        self._find()
        seen = []
        for root, live in self._live.items():
            now = live.look()
            if self._subcommand is not None:
                verdict = self._verdicts.setdefault(root, VerdictSoFar(root, self._subcommand))
                if now.step is not None and now.running:
                    verdict.tick()
                now = replace(now, verdict=verdict.headline)
            seen.append(now)
        return seen

    def stop(self) -> None:
        """Ends background work."""
        for verdict in self._verdicts.values():
            verdict.stop()

    def _find(self) -> None:
        if self._only is not None:
            self._live.setdefault(self._only.run.root, LiveJob(self._only, clock=self._clock))
            return
        if time.monotonic() < self._found_s + FIND_EVERY_S:
            return
        self._found_s = time.monotonic()
        jobs = {job.run.root: job for job in running_jobs(self._log_dirs)}
        for root in set(self._live) - set(jobs):
            del self._live[root]
            if root in self._verdicts:
                self._verdicts.pop(root).stop()
        for root, job in jobs.items():
            self._live.setdefault(root, LiveJob(job, clock=self._clock))
