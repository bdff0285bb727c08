"""Files of NCCL's Inspector and of its profiler plugin: collectives and waiting of one process.

Sources: NVIDIA/nccl, plugins/profiler/inspector (inspector_json.cc, inspector_prom.cc, README.md;
JSON v4.0 to v4.4) and plugins/profiler/example (print_event.cc); in ext-profiler until 2.29.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import polars as pl

from haiprof.base.errors import TraceFormatError, convert_os_errors
from haiprof.base.units import bytes_text
from haiprof.trace_format.execution import JsonError

LIMIT_BYTES = 8 << 20  # of one file its end is read: some 20,000 records
_VERSIONS = ("v4.0", "v4.1", "v4.2", "v4.3", "v4.4")
_NAME_LIMIT = 64
_GB = 1e9

PROCESS = {
    "source": pl.String,  # inspector, prometheus or profiler
    "communicator": pl.String,  # NCCL's hash of it, as 0x...; its name where only that is written
    "member": pl.Int64,  # rank in the communicator
    "size": pl.Int64,  # its ranks
    "host": pl.String,
    "pid": pl.Int64,
    "gpu_uuid": pl.String,
}
COLLECTIVE_SCHEMA = {
    **PROCESS,
    "kind": pl.String,
    "message": pl.String,  # size of a message, in Prometheus's form a range of sizes
    "record_count": pl.Int64,
    "sequence": pl.Int64,  # number of the last one; NCCL counts each kind from 0
    "exec_ns": pl.Float64,  # time of its kernel: the median, in Prometheus's form the mean
    "bus_bytes_per_s": pl.Float64,  # likewise, as NCCL computes it
    "last_ns": pl.Int64,  # Unix time at which the last one was written
}
"""A row per process, communicator, kind and message; null is what was not written."""
WAITS = ("gpu_ns", "peer_ns", "send_ns", "receive_ns", "flush_ns")
"""What steps of the network proxy wait for: the own GPU, room at the peer, a send to end, data to
come (from the network, or from a peer that is late), and that the GPU can see the data."""
WAIT_SCHEMA = {**PROCESS, "step_count": pl.Int64, **dict.fromkeys(WAITS, pl.Float64)}
"""Sums over steps, which overlap: their shares tell, their sum is no elapsed time."""

_Process = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclFile:
    """What one file holds."""

    collectives: pl.DataFrame
    waits: pl.DataFrame
    is_cut: bool  # whether its begin was left out
    notes: tuple[str, ...]  # what was damaged


def read_nccl_file(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> NcclFile:
    """Reads the end of one file; damaged lines are left out and counted."""
    with (
        convert_os_errors(TraceFormatError, f"{path}: cannot be read"),
        os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file,
    ):
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise TraceFormatError(f"{path}: not a regular file")
        skipped = max(status.st_size - limit_bytes, 0)
        file.seek(skipped)
        content = file.read(limit_bytes)
    content = content.partition(b"\n")[2] if skipped else content  # whole lines
    is_cut, lines = skipped > 0, [line for line in map(bytes.strip, content.splitlines()) if line]
    if not lines:
        raise TraceFormatError(f"{path}: nothing is in it yet")
    rows = _Rows()
    if lines[0].startswith((b"nccl_", b"# ")):
        _read_prometheus(lines, rows, path, status.st_mtime_ns)
    elif lines[0].startswith(b"[") or b'"cat"' in lines[0]:
        _read_profiler(lines, rows)
    else:
        _read_inspector(lines, rows, path, is_cut=is_cut)
    if rows.damaged == len(lines):
        raise TraceFormatError(f"{path}: no file of NCCL's Inspector or profiler plugin")
    notes = []
    if lines[0].startswith(b"[") and not lines[-1].endswith(b"]"):
        notes.append(f"{path}: its end is missing")
    if rows.damaged:
        notes.append(f"{path}: {rows.damaged} damaged lines left out")
    single = pl.DataFrame(rows.records, schema=COLLECTIVE_SCHEMA, orient="row")
    together = single.group_by([*PROCESS, "kind", "message"], maintain_order=True).agg(
        pl.when(pl.col("record_count").count() > 0).then(pl.col("record_count").sum()),
        pl.col("sequence").max(),
        pl.col("exec_ns", "bus_bytes_per_s").median(),
        pl.col("last_ns").max(),
    )
    waits = [(*process, int(sums[0]), *sums[1:]) for process, sums in rows.waits.items()]
    return NcclFile(
        collectives=together, waits=pl.DataFrame(waits, schema=WAIT_SCHEMA, orient="row"),
        is_cut=is_cut, notes=tuple(notes),
    )  # fmt: skip


class _Rows:
    """What was read so far."""

    def __init__(self) -> None:
        self.records: list[tuple[object, ...]] = []
        self.waits: dict[_Process, list[float]] = {}
        self.damaged = 0

    def add_wait(self, process: _Process, name: str, ns: float, *, is_first: bool = False) -> None:
        """Adds what a step waited; its first wait counts the step."""
        sums = self.waits.setdefault(process, [0.0] * (1 + len(WAITS)))
        sums[0] += is_first
        sums[1 + WAITS.index(name)] += ns


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Header(msgspec.Struct):
    id: str
    rank: _Count
    n_ranks: _Count


class _Metadata(msgspec.Struct):
    inspector_output_format_version: str
    dump_timestamp_us: Annotated[int, msgspec.Meta(ge=0, le=1 << 52)]
    hostname: str
    pid: _Count


def _after(prefix: str) -> Callable[[str], str]:
    """Names of fields in the file: `coll` for the kind, `coll_sn`, ..."""
    return lambda name: prefix if name == "kind" else f"{prefix}_{name}"


class _Collective(msgspec.Struct, rename=_after("coll")):
    kind: str
    sn: _Count
    msg_size_bytes: _Count
    exec_time_us: _Amount
    busbw_gbs: _Amount
    timing_source: str = "kernel_gpu"


class _P2p(msgspec.Struct, rename=_after("p2p")):
    kind: str
    msg_size_bytes: _Count
    exec_time_us: _Amount
    busbw_gbs: _Amount
    timing_source: str = "kernel_gpu"


class _Step(msgspec.Struct):
    gpu_produce_us: _Amount | None = None
    gpu_consume_us: _Amount | None = None
    peer_credit_us: _Amount | None = None
    wire_us: _Amount | None = None
    flush_us: _Amount | None = None


class _Proxy(_Step):
    record_type: str = ""
    direction: str = ""
    steps: list[_Step] = []


class _Stats(msgspec.Struct):
    coll_records: _Count = 0
    p2p_records: _Count = 0
    proxy_records: _Count = 0


class _Record(msgspec.Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _P2p | None = None
    proxy_trace: _Proxy | None = None
    dump_stats: _Stats | None = None


_PAYLOADS = ("coll_perf", "p2p_perf", "proxy_trace")


def _read_inspector(lines: Sequence[bytes], rows: _Rows, path: Path, *, is_cut: bool) -> None:
    """From v4.3 on a `dump_stats` line says whose so many lines after it are.

    A line that no such line counts is of nobody, and is left out as a damaged one.
    """
    decoder = msgspec.json.Decoder(_Record)
    context: tuple[_Process, int] | None = None
    left: dict[str, int] = {}
    for line in lines:
        try:
            record = decoder.decode(line)
        except JsonError:
            rows.damaged, context = rows.damaged + 1, None
            continue
        own = _context(record, path)
        if own is not None and (stats := record.dump_stats) is not None:
            context, is_cut = own, False
            left = {"coll_perf": stats.coll_records, "p2p_perf": stats.p2p_records,
                    "proxy_trace": stats.proxy_records}  # fmt: skip
            continue
        kind = next((name for name in _PAYLOADS if getattr(record, name) is not None), "")
        if own is None and context is not None and left.get(kind, 0) > 0:
            own, left[kind] = context, left[kind] - 1
        if own is None and kind and is_cut:
            continue  # its line of context lies before what was read
        is_cut = False
        if own is None or not kind:
            rows.damaged, context = rows.damaged + 1, None
        elif (proxy := record.proxy_trace) is not None:
            wire = "receive_ns" if proxy.direction == "recv" else "send_ns"
            for step in (proxy,) if proxy.record_type == "proxy_step" else proxy.steps:
                rows.add_wait(own[0], wire, (step.wire_us or 0.0) * 1e3, is_first=True)
                gpu_us = (step.gpu_produce_us or 0.0) + (step.gpu_consume_us or 0.0)
                rows.add_wait(own[0], "gpu_ns", gpu_us * 1e3)
                rows.add_wait(own[0], "peer_ns", (step.peer_credit_us or 0.0) * 1e3)
                rows.add_wait(own[0], "flush_ns", (step.flush_us or 0.0) * 1e3)
        elif (found := record.coll_perf or record.p2p_perf) is not None:
            # It ended; without a time of its kernel (`collective_cpu`) its rate is not known.
            is_timed = found.timing_source.startswith("kernel") and found.exec_time_us > 0
            rows.records.append((
                *own[0], found.kind[:_NAME_LIMIT], bytes_text(found.msg_size_bytes), 1,
                record.coll_perf.sn if record.coll_perf else None,
                found.exec_time_us * 1e3 if is_timed else None,
                found.busbw_gbs * _GB if is_timed and found.busbw_gbs > 0 else None, own[1],
            ))  # fmt: skip


def _context(record: _Record, path: Path) -> tuple[_Process, int] | None:
    """The process that a line names, and when it wrote the line."""
    header, metadata = record.header, record.metadata
    if header is None or metadata is None:
        return None
    version = metadata.inspector_output_format_version
    if version not in _VERSIONS:
        raise TraceFormatError(
            f"{path}: version {version[:20]!r} of NCCL's Inspector is not known "
            f"({_VERSIONS[0]} to {_VERSIONS[-1]} are)"
        )
    process = ("inspector", header.id[:_NAME_LIMIT], header.rank, header.n_ranks,
               metadata.hostname[:_NAME_LIMIT], metadata.pid, None)  # fmt: skip
    return process, metadata.dump_timestamp_us * 1000


_METRIC = re.compile(
    r"nccl_(?:p2p_|collective_)?(bus_bandwidth_gbs|exec_time_microseconds|count)"
    r"\{(.{1,4000})\} (\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?)"
)
_OTHER_METRIC = re.compile(r"#.*|nccl_[a-z0-9_]{1,100}(?:\{.*\})? [\d.eE+-]{1,30}")
_LABEL = re.compile(r'([a-z0-9_]{1,40})="([^"]{0,300})"(?:,|$)')
_UUID = re.compile(r"nccl_inspector_metrics_(?:job.*_)?([0-9a-fA-F-]{8,40})\.prom")


def _read_prometheus(lines: Sequence[bytes], rows: _Rows, path: Path, changed_ns: int) -> None:
    """What a GPU did since the file was written before; labels differ between NCCL's releases."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        text = line.decode("utf-8", "replace")
        if metric := _METRIC.fullmatch(text):
            found.setdefault(metric[2], {})[metric[1]] = float(metric[3])
        else:
            rows.damaged += _OTHER_METRIC.fullmatch(text) is None
    uuid = _UUID.fullmatch(path.name)
    for text, values in found.items():
        labels = dict(_LABEL.findall(text))
        size, message = _whole(labels.get("nranks")), labels.get("message_size")
        kind = labels.get("collective") or labels.get("p2p_operation")
        if _LABEL.sub("", text) or None in (size, message, kind) or max(values.values()) > 1e15:
            rows.damaged += len(values)  # a name with a quote in it: NCCL does not escape it
            continue
        exec_us, gbs = values.get("exec_time_microseconds"), values.get("bus_bandwidth_gbs")
        rows.records.append((
            "prometheus", labels.get("comm_id") or labels.get("comm_name") or "unknown",
            _whole(labels.get("rank")), size, labels.get("hostname") or labels.get("node"), None,
            uuid[1].lower() if uuid else None, kind, message,
            int(values["count"]) if "count" in values else None, _whole(labels.get("coll_sn")),
            exec_us * 1e3 if exec_us else None, gbs * _GB if gbs else None, changed_ns,
        ))  # fmt: skip


def _whole(text: str | None) -> int | None:
    """A count in a label; None for anything else."""
    known = text is not None and text.isascii() and text.isdecimal() and len(text) < 18
    return int(text) if known and text is not None else None


class _Args(msgspec.Struct, rename="pascal"):
    comm_hash: Annotated[int, msgspec.Meta(ge=0)] = 0
    rank: _Count | None = None
    seq_num: _Count | None = None


class _Event(msgspec.Struct):
    name: str
    cat: str
    ph: str
    ts: _Amount
    id: int = 0
    pid: _Count = 0
    args: _Args = msgspec.field(default_factory=_Args)


_CATEGORY = re.compile(rb'"cat": ?"([A-Z0-9_]{1,20})"')
_READ = (b"COLL", b"P2P", b"NET")
"""Others are not read: those of calls are no JSON before NCCL 2.30 (`"Stream": 0x5f`)."""
_PHASES = {
    "SendGpuWait": "gpu_ns", "RecvGpuWait": "gpu_ns", "SendPeerWait": "peer_ns",
    "SendWait": "send_ns", "RecvWait": "receive_ns", "RecvFlushWait": "flush_ns",
}  # fmt: skip


def _read_profiler(lines: Sequence[bytes], rows: _Rows) -> None:
    """Events of the network stand between begin and end of their collective.

    Of a wait that had not ended when the file was written the missing time is 0.
    """
    begun = dict[tuple[str, int], float]()
    process: _Process | None = None  # None: a step of another process (PXN), or before the cut
    for event in _events(lines, rows):
        if event.cat != "NET":
            args = event.args
            process = None
            if event.ph == "b" and args.rank is not None:
                communicator = f"0x{args.comm_hash:x}"[:_NAME_LIMIT]
                process = ("profiler", communicator, args.rank, None, None, event.pid, None)
                number = args.seq_num if event.cat == "COLL" else None
                rows.records.append((
                    *process, event.name[:_NAME_LIMIT], None, 1, number, None, None, None
                ))  # fmt: skip
        elif event.ph == "b":
            begun[event.name, event.id] = event.ts
        else:
            start, name = begun.pop((event.name, event.id), 0.0), _PHASES.get(event.name)
            if name is not None and process is not None and 0 < start <= event.ts:
                is_first = event.name in ("SendGpuWait", "RecvWait")
                rows.add_wait(process, name, (event.ts - start) * 1e3, is_first=is_first)


def _events(lines: Sequence[bytes], rows: _Rows) -> Iterator[_Event]:
    decoder = msgspec.json.Decoder(_Event)
    for line in lines:
        text = line.rstrip(b",")
        if text in (b"[", b"]", b"{}", b"{}]"):
            continue
        category = _CATEGORY.search(text)
        if category is not None and category[1] not in _READ:
            continue
        try:
            yield decoder.decode(text)
        except JsonError:
            rows.damaged += 1
