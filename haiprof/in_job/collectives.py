"""PyTorch's Flight Recorder, read beside the training: which collectives this rank has begun."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from haiprof.base.options import ENV_FLIGHT_DUMPS, ENV_FLIGHT_SIZES
from haiprof.base.safe_files import write_file
from haiprof.in_job.identity import has_process_group
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.schema import HEARTBEAT, NULL_I64, SCHEMA_VERSION, ClockAnchor
from haiprof.run_format.writer import RecordWriter

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Of every backend (torch 2.9), and of NCCL alone before; each returns JSON, never pickle."""

_STATUS_FIELDS = (
    "last_enqueued_collective",
    "last_started_collective",
    "last_completed_collective",
)
_GZIP_LEVEL = 1  # zlib lets go of the interpreter lock
_now = time.perf_counter_ns

Dump = Callable[..., bytes]


def drop_old_flight_names() -> None:
    """Takes the names from before torch 2.9 out of the environment, where torch has new ones."""
    # The launcher sets both, as it cannot know the job's torch, which would print a warning for
    # each old one. Where the user has set one, the launcher set none, and all stay.
    if not hasattr(sys.modules.get("torch._C._distributed_c10d"), _DUMPS[0]):
        return
    for new, old in (ENV_FLIGHT_SIZES, ENV_FLIGHT_DUMPS):
        if old in os.environ and os.environ[old] == os.environ.get(new):
            del os.environ[old]


class FlightRecorder:
    """What the Flight Recorder of this process knows, without stacks."""

    def __init__(self, paths: RankPaths, clock: ClockAnchor) -> None:
        self._paths = paths
        self._clock = clock
        self._dumps: tuple[Dump, ...] = ()
        self._beating = threading.Lock()
        self.writer: RecordWriter | None = None  # the heartbeat's; None before the first collective
        self._last: dict[int, tuple[int, int, int]] = {}
        self._groups: dict[str, list[int]] = {}

    def beat(self) -> None:
        """Appends the status of the groups in which something has happened since the last time."""
        # Two threads do: the one that writes records, and the one that answers requests.
        with self._beating:
            if self._dumps or self._found():
                self._beat()

    def _beat(self) -> None:
        # A status costs some microseconds and is read once a second; the list of the last
        # collectives holds the interpreter lock for 15 us per entry (2,000 by default), and so it
        # is read when asked for and once at the end. Nothing here issues a collective.
        now = _now()
        changed = []
        for group, status in self.status().items():
            if self._last.get(group) != status:
                if group not in self._last:  # ranks are known only until the group is destroyed
                    self._groups.update(group_ranks())
                self._last[group] = status
                changed.append(HEARTBEAT.struct.pack(now, group, *status))
        if changed:
            if self.writer is None:
                self.writer = RecordWriter(
                    self._paths.heartbeat, HEARTBEAT, clock=self._clock, extra={}
                )
            self.writer.append(b"".join(changed))

    def status(self) -> dict[int, tuple[int, int, int]]:
        """By group: last enqueued, started and completed; NULL_I64 where that is not known."""
        found: dict[int, tuple[int, int, int]] = {}
        for dump in self._dumps:
            groups = json.loads(dump(includeCollectives=False)).get("pg_status", {})
            for group, said in groups.items():
                values = tuple(_count(said.get(field)) for field in _STATUS_FIELDS)
                if values[0] != NULL_I64:
                    found[int(group)] = values  # type: ignore[assignment]
        return found

    def dump(self) -> Path | None:
        """Writes the last collectives into a file of their own; None where there are none."""
        if not self._dumps and not self._found():
            return None
        traces = [dump(includeCollectives=True, onlyActive=False) for dump in self._dumps]
        wall_ns = time.time_ns()
        path = self._paths.collectives(wall_ns)
        head = {"version": SCHEMA_VERSION, "wall_ns": wall_ns, "mono_ns": _now(),
                "groups": {**self._groups, **group_ranks()}}  # fmt: skip
        whole = json.dumps(head)[:-1].encode() + b', "traces": [' + b",".join(traces) + b"]}"
        write_file(path, gzip.compress(whole, _GZIP_LEVEL), below=self._paths.run_root)
        return path

    def close(self) -> None:
        """Closes the heartbeat's file."""
        if self.writer is not None:
            self.writer.close()

    def _found(self) -> bool:
        """Whether the job has started torch.distributed, and this torch has a Flight Recorder."""
        if not has_process_group():
            return False
        c10d = sys.modules.get("torch._C._distributed_c10d")
        found = (getattr(c10d, name, None) for name in _DUMPS)
        self._dumps = tuple(dump for dump in found if dump is not None)
        return bool(self._dumps)


def _world() -> Any:
    """What torch.distributed knows of its groups; None where it is not loaded."""
    return getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)


def group_ranks() -> dict[str, list[int]]:
    """Global ranks of each process group of this process, by the group's name."""
    world = _world()
    ranks = getattr(world, "pg_group_ranks", {})
    return {
        str(name): sorted(int(rank) for rank in ranks.get(group, {}))
        for group, name in list(getattr(world, "pg_names", {}).items())
    }


def groups_line() -> dict[str, Any] | None:
    """Groups that are a part of the world, with the job's names of them; None without any."""
    world, own = _world(), group_ranks()
    whole = getattr(world, "default_pg", None)
    count = len(getattr(world, "pg_group_ranks", {}).get(whole, {}))
    parts = [
        {"name": str(name), "ranks": own[str(name)],
         "description": str(getattr(group, "group_desc", ""))}  # torch 2.3 and newer
        for group, name in list(getattr(world, "pg_names", {}).items())
        if 1 < len(own.get(str(name), ())) < count
    ]  # fmt: skip
    return {"type": "process_groups", "groups": parts} if parts else None


def collective_timeout_ns() -> int | None:
    """How long a collective of the default group may take; None where there is no group."""
    # After that gloo raises in every rank that waits, and NCCL's watchdog ends it.
    group = getattr(_world(), "default_pg", None)
    if group is None:
        return None
    import torch

    try:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]
        timeout = group._get_backend(device).options._timeout
        return int(timeout.total_seconds() * 1e9)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # another backend, or another torch: it is not known


def _count(value: object) -> int:
    """A sequence number as the Flight Recorder writes it; -1 is not known."""
    number = int(value) if isinstance(value, (int, str)) else -1
    return NULL_I64 if number < 0 else number
