"""Raw traces and sidecars as ranks put them down."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from haiprof.base.options import Options, safe_name
from haiprof.launch.run_directories import create_run
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.raw_traces import Part, parse_stem

HOST = socket.gethostname()
GONE_PID = 4_194_304 + 17  # above the largest that Linux gives
_EVENT = '{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": %d.25, "dur": 1.5, "tid": 1},\n'


def new_run(folder: Path) -> RunPaths:
    """A run of a traced job."""
    options = Options(log_dir=folder, trace=True)
    return create_run(options, command=["t.py"], name="t", environ={})[0]


def raw_text(count: int = 200) -> str:
    """A trace as Kineto writes it, with so many events."""
    events = "".join(_EVENT % number for number in range(count))
    return '{"schemaVersion": 1, "traceEvents": [\n' + events.rstrip(",\n") + "\n]}\n"


def part_of(
    run: RunPaths, rank: int = 0, *, host: str = HOST, pid: int = GONE_PID, start: int = 1000
) -> Part:
    """The paths of one window."""
    stem = parse_stem(f"rank{rank}_{safe_name(host)}_{pid}.{start}")
    assert stem is not None
    return Part(run, stem)


def put_down(part: Part, text: str | None = None, *, et: str | None = None, **facts: Any) -> Part:
    """Writes what a rank writes: the trace, the execution trace, and then the sidecar."""
    text = raw_text() if text is None else text
    part.raw.write_text(text)
    if et is not None:
        part.et_raw.write_text(et)
    stem = part.stem
    sidecar = {
        "version": 1, "stem": stem.text, "rank": stem.rank, "attempt": 0, "restart": 0,
        "local_rank": stem.rank, "world_size": 2, "host": stem.host, "pid": stem.pid,
        "gpu_uuid": None, "window": 0, "reason": "option", "request": None, "steps": [20, 25],
        "start_mono_ns": 10, "end_mono_ns": 20, "start_wall_ns": stem.start_wall_ns,
        "options": {"stacks": False}, "event_count": 200, "cut": None, "setup_ns": 1,
        "start_ns": 2, "stop_ns": 3, "export_ns": 4, "raw_bytes": len(text.encode()),
        "et_bytes": None if et is None else len(et.encode()),
    }  # fmt: skip
    part.sidecar.write_text(json.dumps({**sidecar, **facts}))
    return part


def node_lines(run: RunPaths, kind: str) -> list[dict[str, Any]]:
    """Lines of one type in this node's events."""
    path = run.node(HOST).events
    text = path.read_text() if path.exists() else ""
    return [line for line in map(json.loads, text.splitlines()) if line["type"] == kind]
