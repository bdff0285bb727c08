"""Details of the ranks that block a job: native stacks, and counters of their GPUs."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import is_mine
from haiprof.live.stacks import py_spy_frames
from haiprof.live.standstill import STOPPED, RankState, Suspect
from haiprof.run_analysis.counters import counter_frame
from haiprof.run_analysis.records import integer
from haiprof.run_analysis.run_files import RunFiles

LOOKED_AT = 2
"""Maximum number of suspects: each is paused for its native stack."""
RECENT_NS = 60 * NS_PER_S
_SPY_TIMEOUT_S = 10.0
_FRAME_LIMIT = 100
_GPU_METRICS = (
    "utilization_ratio", "memory_used_bytes", "power_watts", "temperature_celsius",
    "sm_clock_hz", "sm_active_ratio",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectDetails:
    """Details of one suspect."""

    rank: int
    native: tuple[str, ...] | None
    """Main thread, outermost first, with the frames of C and C++; None where `note` says why."""
    note: str | None
    gpu: Mapping[str, float]
    """Latest counters of its GPU; empty where none were recorded."""
    xids: tuple[int, ...]
    """Codes of its GPU's XID errors since the run began."""


def inspect_suspects(
    suspects: Sequence[Suspect],
    states: Sequence[RankState],
    run: RunFiles,
    *,
    wall_ns: int,
    spy: str | None,
) -> list[SuspectDetails]:
    """Reads native stacks and GPU counters of the first suspects."""
    by_rank = {state.rank: state for state in states}
    named = [by_rank[s.rank] for s in suspects[:LOOKED_AT] if s.rank in by_rank]
    return [_inspect(state, run, wall_ns, spy) for state in named]


def _inspect(state: RankState, run: RunFiles, wall_ns: int, spy: str | None) -> SuspectDetails:
    native = _native_stack(spy, state)
    gpu, counters = _gpu(state, run, wall_ns)
    return SuspectDetails(
        rank=state.rank,
        native=None if isinstance(native, str) else native,
        note=native if isinstance(native, str) else None,
        gpu=counters,
        xids=_xids(run, state.host, gpu),
    )


def _native_stack(spy: str | None, state: RankState) -> tuple[str, ...] | str:
    """The stack, or why there is none."""
    if spy is None:
        return "only with --hang, and where py-spy is installed"
    if state.pid is None or state.host != socket.gethostname() or not is_mine(state.pid):
        return "it does not run on this node"
    if state.process_state in STOPPED:
        return "its process is stopped"
    try:
        done = subprocess.run(
            [spy, "dump", "--native", "--json", "--pid", str(state.pid)],
            capture_output=True, text=True, timeout=_SPY_TIMEOUT_S, check=False,
        )  # fmt: skip
        threads = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError) as error:
        return f"py-spy: {error}"
    if not isinstance(threads, list):
        return f"py-spy: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}"
    return _main_frames(threads) or "py-spy: an answer without a main thread"


def _main_frames(threads: Sequence[object]) -> tuple[str, ...]:
    for thread in threads:
        if isinstance(thread, dict) and thread.get("thread_name") == "MainThread":
            frames = py_spy_frames(thread)[:_FRAME_LIMIT]
            return tuple(_frame_text(frame) for frame in frames[::-1])
    return ()


def _frame_text(frame: Mapping[str, object]) -> str:
    """`name (file:line)`; native frames may have no line."""
    place = str(frame.get("short_filename") or frame.get("filename") or "?").rpartition("/")[2]
    line = frame.get("line")
    return f"{frame.get('name')} ({place}:{line})" if line else f"{frame.get('name')} ({place})"


def _gpu(state: RankState, run: RunFiles, wall_ns: int) -> tuple[int | None, dict[str, float]]:
    """NVML index of the GPU that this rank alone uses, and its latest counters."""
    if state.host is None:
        return None, {}
    wanted = [("gpu", metric) for metric in _GPU_METRICS]
    frame, _ = counter_frame(
        run, between=(wall_ns - RECENT_NS, wall_ns), hosts=[state.host], metrics=wanted
    )
    own = frame.filter((pl.col("rank") == state.rank) & pl.col("value").is_not_null())
    last = own.sort("time_ns").group_by("metric", maintain_order=True).last()
    index = integer(own["gpu"][-1]) if own.height else None
    return index, {str(m): float(v) for m, v in last.select("metric", "value").rows()}


def _xids(run: RunFiles, host: str | None, gpu: int | None) -> tuple[int, ...]:
    lines = [line for node in run.nodes if node.host == host for line in node.of_type("xid")]
    codes = [integer(line.get("xid")) for line in lines if line.get("gpu") == gpu]
    return tuple(code for code in codes if code is not None) if gpu is not None else ()
