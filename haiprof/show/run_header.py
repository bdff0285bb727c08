"""The header of every view: the run's name, command, times, state and outcome."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from haiprof.base.errors import RunFormatError
from haiprof.base.log_addresses import shown_path
from haiprof.base.units import duration_text
from haiprof.base.users import other_uid
from haiprof.live.find import is_running, write_times_ns
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest

if TYPE_CHECKING:  # lists of runs need neither
    from haiprof.diagnosis.verdict import Verdict
    from haiprof.run_analysis.run_frames import RunFrames

RUNNING, ENDED, KILLED, DAMAGED = "running", "ended", "killed", "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The run as a whole."""

    name: str
    path: str
    command: tuple[str, ...]
    host: str  # Host of the launcher
    start_wall_ns: int | None  # Unix time of the start; None where run.json is damaged
    duration_ns: int | None
    """From start to end, or until now while it runs; None where the end is not known."""
    state: str
    """`running`, `ended`, `killed` when no end was written, `damaged` when run.json cannot tell."""
    exit_status: int | None
    signal: str | None

    @property
    def outcome(self) -> str:
        """State and exit for people: `running`, `ended, exit 0`, `ended by SIGKILL`."""
        if self.state != ENDED or (self.exit_status is None and self.signal is None):
            return self.state
        return f"ended by {self.signal}" if self.signal else f"ended, exit {self.exit_status}"

    @property
    def is_running(self) -> bool:
        """Whether its job still runs."""
        return self.state == RUNNING

    @property
    def is_clean(self) -> bool:
        """Whether it ended well."""
        return self.state == ENDED and self.exit_status == 0 and self.signal is None


def run_header(run: RunPaths, manifest: Manifest | None) -> RunHeader:
    """The header of a run, also of one that still runs or whose run.json is damaged."""
    if manifest is None:
        manifest = Manifest(haiprof_version="", name=run.root.name, command=[])
        state = DAMAGED
    elif manifest.end_wall_ns is not None:
        state = ENDED
    else:
        state = RUNNING if is_running(run, manifest) else KILLED
    start_ns = manifest.start_wall_ns or None
    end_ns = manifest.end_wall_ns
    if end_ns is None:
        end_ns = time.time_ns() if state == RUNNING else last_write_ns(run)
    return RunHeader(
        name=manifest.name, path=shown_path(run.root), command=tuple(map(str, manifest.command)),
        host=manifest.host, start_wall_ns=start_ns,
        duration_ns=max(0, end_ns - start_ns) if start_ns and end_ns else None, state=state,
        exit_status=manifest.exit_status, signal=manifest.signal,
    )  # fmt: skip


def manifest_or_none(run: RunPaths) -> Manifest | None:
    """Its run.json; None where it is damaged, which the Analyzer's notes tell."""
    try:
        return read_manifest(run)
    except RunFormatError:
        return None


def last_write_ns(run: RunPaths) -> int | None:
    """Unix time of the newest change to a file of a rank or node; None where there is no file."""
    folders = [paths.root for _, _, paths in run.rank_folders()]
    folders += [paths.root for _, paths in run.node_folders()]
    return max(write_times_ns(folders), default=None)


_STALL_STEPS, _STALL_NS = 5, 10e9
"""A warning is shown after this multiple of the usual step without a step, and ten seconds."""


def is_stall(idle_ns: float, step_ns: float) -> bool:
    """Whether so long without a step is several times the usual one, and ten seconds."""
    return idle_ns > max(_STALL_STEPS * step_ns, _STALL_NS)


def lead_with_a_stall(found: Verdict, header: RunHeader, analyzer: RunFrames) -> Verdict:
    """Of an own job in which no step ends now that comes first, where no snapshot says more."""
    from haiprof.diagnosis.engine import STANDSTILL
    from haiprof.diagnosis.verdict import Finding

    is_seen = bool(found.findings) and found.findings[0].rule == STANDSTILL
    is_whole = analyzer.between is None and other_uid(analyzer.run.manifest) is None
    if not (header.is_running and header.host and is_whole) or is_seen:
        return found
    steps = analyzer.steps()
    ends, usual = steps["start_ns"] + steps["step_ns"], steps["step_ns"].median()
    last, longest = ends.max(), ends.unique().sort().diff().max()
    if not isinstance(last, int) or not isinstance(usual, float):
        return found
    silent_ns, longest_ns = time.time_ns() - last, longest if isinstance(longest, int) else 0
    if not is_stall(silent_ns, max(usual, longest_ns / 3)):
        return found
    stall = Finding(
        title=f"no step has ended for {duration_text(silent_ns)}; the longest time between two "
        f"before was {duration_text(longest_ns)}",
        remedy="where the job neither evaluates nor saves now, `haiprof snapshot "
        f"{shlex.quote(found.run)} --hang` says who holds it up",
        rule=STANDSTILL, confidence=0.5,
    )  # fmt: skip
    return replace(found, headline=stall.title, findings=(stall, *found.findings))
