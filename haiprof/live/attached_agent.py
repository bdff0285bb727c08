"""The node agent of `haiprof attach`, beside a job that runs already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from haiprof.agent.node_agent import Agent
from haiprof.agent.trace_finisher import Finisher
from haiprof.base.options import Options
from haiprof.launch.run_copies import RunCopies
from haiprof.launch.run_directories import create_run
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest

TICK_S = 0.1
_STOP_WAIT_S = 10.0


class AttachedAgent:
    """Samples this node and relays requests, in threads of this process."""

    def __init__(
        self,
        run: RunPaths,
        manifest: Manifest,
        options: Options,
        *,
        copies: Callable[[RunPaths], RunCopies] | None = None,
    ) -> None:
        self.run = run
        self.manifest = manifest
        self.failure: str | None = None
        """Why it stopped early."""
        self._agent = Agent(run, options)
        self._finisher = Finisher(run, self._agent.host)
        self._copies = copies(run) if copies is not None else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts sampling, and listening to the ranks."""
        self._agent.start()
        self._thread = threading.Thread(target=self._serve, name="haiprof-agent", daemon=True)
        self._thread.start()

    def stop(self, *, quiet: bool = False) -> None:
        """Ends both, finishes traces and writes the outcome."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_S)
        self._agent.close()
        self._finisher.finish(lambda: self._stop.wait(TICK_S) and False, quiet=quiet)
        keys = ("rank", "attempt", "host", "pid")
        ranks = [
            {key: report.get(key) for key in keys} for report in self._agent.reports() if report
        ]
        write_manifest(self.run, replace(self.manifest, end_wall_ns=time.time_ns(), ranks=ranks))

    def _serve(self) -> None:
        """Body of the thread."""
        try:
            while not self._stop.wait(TICK_S):
                self._agent.serve()
                if self._copies is not None:
                    self._copies.tick()
                if self.run.trace_parts.is_dir():
                    self._finisher.tick()
        except OSError as error:  # the run directory is gone, or the disk is full
            self.failure = str(error)


def create_attached(
    options: Options, *, name: str, command: list[str], cwd: str, environment: Mapping[str, Any]
) -> tuple[RunPaths, Manifest]:
    """Makes the run directory of an attached recording: `attach-<name>-<time>-<id>`."""
    options = replace(options, name="", run_id="")
    run, manifest, _ = create_run(options, command=command, name=f"attach-{name}", environ={})
    manifest = replace(manifest, cwd=cwd, environment={**environment, "attached": True})
    write_manifest(run, manifest)
    return run, manifest
