"""The agent of a node without a job: counters for months, jobs that come and go, GPUs held."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from haiprof.agent.node_history import NodeHistory
from haiprof.agent.samplers.loop import SamplingLoop
from haiprof.base.errors import UsageError
from haiprof.base.messages import print_message
from haiprof.base.options import Options
from haiprof.base.safe_files import (
    file_size,
    make_folder,
    make_named_folder,
    open_to_append,
    rename,
)
from haiprof.base.units import bytes_text
from haiprof.live.node_jobs import SCAN_S, JobWatch, gpu_holders, open_nvml
from haiprof.run_format.layout import NodePaths, RunPaths
from haiprof.run_format.node_history import TIERS
from haiprof.run_format.writer import note_line

RECORDERS = ("host", "gpu", "infiniband", "numa", "filesystem")
"""What is sampled: all that needs no rank."""
_DAY_S, _COST_S = 86_400.0, 600.0
_LINES_BYTES = 4 << 20
"""Of what was seen, and of events: the same once more is kept of what was before."""
_SETTLED_S = 3.0
"""After so long every source was sampled."""
_SAID = {
    "disk_full": "{reason}: counters are dropped until there is room",
    "disk_again": "there is room again: counters are kept",
    "clock_set": "the clock was set, or the machine slept: {by_ns:+} ns",
}


def run_node_agent(
    folder: Path, *, limit_bytes: int, options: Options, stop: threading.Event
) -> None:
    """Records this node into its own folder below `folder`, until it is told to stop."""
    make_named_folder(folder, mode=0o700)
    node = RunPaths(folder.absolute()).node(socket.gethostname())
    make_folder(node.root, below=node.run_root)
    with _only_agent(node):
        _Agent(node, limit_bytes, options).run(stop)


@contextmanager
def _only_agent(node: NodePaths) -> Iterator[None]:
    """Holds a lock that the kernel releases when this process ends."""
    fd = open_to_append(node.lock, below=node.run_root)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{node.root}: a node agent already records this node",
                hint="haiprof node --show shows what it has",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


class _Agent:
    """Counters in a thread; jobs, holders of GPUs and its own cost in the main thread."""

    def __init__(self, node: NodePaths, limit_bytes: int, options: Options) -> None:
        self._node, self._limit_bytes, self._options = node, limit_bytes, options
        self._loop: SamplingLoop | None = None
        self._cost_s = 0.0

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        node, nvml = self._node, open_nvml()
        watch = JobWatch(holders=dict if nvml is None else lambda: gpu_holders(nvml))
        self._say_what_is_kept()
        self._note({"type": "agent_start", "pid": os.getpid(), "uid": os.getuid()})
        scrape = None
        if self._options.prometheus_port:
            from haiprof.agent.prometheus_endpoint import Scrape

            run = RunPaths(node.run_root)
            scrape = Scrape(
                run, node.root.name, self._options, lambda: self._loop.streams if self._loop else ()
            )
            scrape.start()
        try:
            while not stop.is_set():
                self._record(watch, stop)
        finally:
            if scrape is not None:
                scrape.stop()
            if nvml is not None:
                nvml.close()
            self._note_cost()
            self._note({"type": "agent_end"})

    def _record(self, watch: JobWatch, stop: threading.Event) -> None:
        """One day: then sources are found anew, and what is known of those that went is dropped."""
        node, over = self._node, threading.Event()
        _put_away(node, node.events)
        limit_bytes = max(0, self._limit_bytes - 4 * _LINES_BYTES)
        history = NodeHistory(node, limit_bytes, note=self._note)
        run = RunPaths(node.run_root)
        loop = SamplingLoop(run, node.root.name, self._options, open_writer=history.open_source)
        self._loop = loop
        thread = threading.Thread(target=loop.run, args=(over,), name="haiprof-sampler")
        thread.start()
        begun_s = time.monotonic()
        try:
            stop.wait(_SETTLED_S)
            self._say_sizes(history)
            while (
                time.monotonic() - begun_s < _DAY_S and (file_size(node.events) or 0) < _LINES_BYTES
            ):
                for line in watch.scan():
                    self._note(line)
                if time.monotonic() - self._cost_s > _COST_S:
                    self._note_cost()
                if loop.failure or stop.wait(SCAN_S):
                    break
        finally:
            over.set()
            thread.join()
        if loop.failure:
            print_message(f"{loop.failure}: trying again in a minute")
            stop.wait(60.0)

    def _note(self, line: Mapping[str, object]) -> None:
        """Writes a line of what was seen; on a full disk it is lost."""
        said = _SAID.get(str(line["type"]))
        if said is not None:
            print_message(said.format_map(line))
        _put_away(self._node, self._node.seen, at_bytes=_LINES_BYTES)
        note_line(self._node.seen, {"wall_ns": time.time_ns(), **line})

    def _note_cost(self) -> None:
        self._cost_s = time.monotonic()
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cpu_ns = time.process_time_ns()
        self._note({"type": "agent_cost", "cpu_ns": cpu_ns, "peak_rss_bytes": peak_bytes})

    def _say_what_is_kept(self) -> None:
        kept = ", ".join(f"{tier.name} for {tier.kept_text}" for tier in TIERS)
        limit = bytes_text(self._limit_bytes)
        print_message(f"recording this node into {self._node.root}: {kept}; at most {limit}")
        if os.geteuid():
            print_message(
                "not root: other users' jobs without haiprof are seen only where they hold a GPU; "
                "haiprof doctor lists the counters that need more"
            )

    def _say_sizes(self, history: NodeHistory) -> None:
        """How much it will be, by the rows that this node has."""
        tiers = [
            sum(files[place].most_bytes for files in history.files.values())
            for place in range(len(TIERS))
        ]
        whole = sum(tiers)
        sizes = ", ".join(
            f"{tier.name} {bytes_text(size)}" for tier, size in zip(TIERS, tiers, strict=True)
        )
        cut = f"; the oldest goes at {bytes_text(self._limit_bytes)}"
        print_message(
            f"when full {bytes_text(whole)} ({sizes})" + (cut if whole > self._limit_bytes else "")
        )
        self._note({"type": "sizes", "whole_bytes": whole, "limit_bytes": self._limit_bytes})


def _put_away(node: NodePaths, path: Path, *, at_bytes: int = 0) -> None:
    """Moves a file of lines to the place of the one before, where it has so many bytes."""
    if (file_size(path) or 0) > at_bytes:
        with suppress(OSError):
            rename(path, node.earlier(path), below=node.run_root)
