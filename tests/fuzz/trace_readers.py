"""What reads traces and answers about them: files that anybody may have packed."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError, UsageError
from haiprof.compat.torch_profiler.normalize import Exact, normalise_trace
from haiprof.diagnosis.function_reports import function_reports
from haiprof.run_analysis.nccl_witness import nccl_folder_report, ranks_behind
from haiprof.trace_analysis import report_cache
from haiprof.trace_analysis.chakra import chakra_graph, write_chakra
from haiprof.trace_analysis.function_patterns import patterns_of_files, reduce_patterns
from haiprof.trace_analysis.memory_timeline import memory_by_category
from haiprof.trace_analysis.report_cache import read_summary, write_summary
from haiprof.trace_analysis.sql import SqlTable, ask, sql_tables
from haiprof.trace_analysis.what_if.operations import OperationWhatIf, operation_table
from haiprof.trace_format.execution import load_execution_trace
from haiprof.trace_format.flight_recorder import read_flight, read_torch_dump
from haiprof.trace_format.kineto import load as native
from haiprof.trace_format.kineto.columns import Names
from haiprof.trace_format.kineto.decode import add_marks, with_number
from haiprof.trace_format.kineto.events import TABLE_OF_CATEGORY, TABLES, TEXTS
from haiprof.trace_format.kineto.load import NativeColumns
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.memory_snapshot import memory_history, read_memory_snapshot, sum_by_line
from haiprof.trace_format.merge import RankEvents, RankPlan
from haiprof.trace_format.merge_inputs import TraceInput, trace_input
from haiprof.trace_format.nsight import read_nsight
from tests import fake_nccl_files as nccl
from tests.fuzz.scratch import folder, put
from tests.simulated.allocator import MIB, Allocator
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, step
from tests.unit.analysis.whatif.test_operations import two_ranks
from tests.unit.traces.test_execution import DUMPS
from tests.unit.traces.test_native import event_of
from tests.unit.traces.test_nsight import TABLES as NSIGHT_TABLES
from tests.unit.traces.test_nsight import as_parquet, as_sqlite
from tests.unit.traces.texts import LAYOUTS, Read, op
from tests.unit.traces.texts import kernel as kernel_event

_PIECE_BYTES = 2048
"""Small pieces: the last one is never the compiled scanner's."""
_SECRET = "what no query may show"

TRACE_TOKENS = (
    b'"traceEvents": [', b'"ph": "X"', b'"ph": "M"', b'"args": {', b'"ts": 1712195495519689.047',
    b'"dur": 0.001', b'"cat": "kernel"', b'"cat": "ac2g"', b'"correlation": 3', b'"id": "0x1"',
    b'"name": "[memory]"', b'"baseTimeNanoseconds": 1', b'"distributedInfo": {"rank": 0}', b"},{",
    b"}, {", b"},\n  {", b"]}",
)  # fmt: skip


@contextmanager
def _small_pieces() -> Iterator[None]:
    with mock.patch("haiprof.trace_format.kineto.text.PIECE_BYTES", _PIECE_BYTES):
        yield


@cache
def trace_seeds() -> list[bytes]:
    events = [event_of(category, place) for place, category in enumerate(TABLE_OF_CATEGORY)]
    texts = [layout(events) for layout in LAYOUTS]
    few = [
        op(),
        kernel_event(),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}},
    ]
    texts.append(json.dumps({"traceEvents": few * 5, "baseTimeNanoseconds": 5, "haiprof": {}}))
    held = {"Bytes": 8, "Addr": 1, "Device Type": 0}
    freed = {"ph": "i", "name": "[memory]", "ts": 1, "pid": 0, "tid": 0, "args": held}
    texts.append(json.dumps([*few, freed]))
    return [text.encode() for text in texts]


def read_piece(data: bytes) -> object:
    """The compiled scanner alone: nothing behind the piece's end is read."""
    columns = NativeColumns(Names(folder()), np.arange(64, dtype=np.uint32))
    columns.scan(data, 0)
    found = columns.scan(data + b" ", 1 << 40)
    counts = [columns.row_count(number) for number in range(len(TABLES))]
    for number, count in enumerate(counts):
        assert not count or columns.take(number).height == count
    return found and found[1], [count > 0 for count in counts]


@cache
def piece_seeds() -> list[bytes]:
    events = [event_of(category, place) for place, category in enumerate(TABLE_OF_CATEGORY)]
    return [", ".join(map(json.dumps, events)).encode(), *(json.dumps(e).encode() for e in events)]


def read_trace_both_ways(data: bytes) -> object:
    """The compiled scanner and Python make the same of a trace, down to the words of an error."""
    path = put("trace.json", data)
    with _small_pieces():
        found = _outcome(path)
        with mock.patch.object(native, "_compiled", None):
            expected = _outcome(path)
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        raise TraceFormatError(str(found))
    assert found.report == expected.report
    assert (found.metadata, found._texts) == (expected.metadata, expected._texts)
    assert found._parts.keys() == expected._parts.keys()
    for table in found._parts:
        assert found.table(table).equals(expected.table(table)), table
    report = found.report
    return (
        sorted(k for k, v in report.kept.items() if v),
        bool(report.lost_count),
        len(report.notes),
    )


def _outcome(path: Any) -> Read | str:
    try:
        return Read(path)
    except TraceFormatError as error:
        return str(error)


def read_gzip(data: bytes) -> object:
    """Damaged, cut and joined gzip data: whatever can be read of it, or one error."""
    text = TraceText(put("trace.json.gz", b"\x1f\x8b" + data[2:]))
    count = sum(len(piece) for piece in text.pieces())
    return count > 0, [note[:15] for note in text.notes]


@cache
def gzip_seeds() -> list[bytes]:
    packed = [gzip.compress(seed, 1, mtime=0) for seed in trace_seeds()]
    half = len(trace_seeds()[0]) // 2
    first, second = trace_seeds()[0][:half], trace_seeds()[0][half:]
    joined = gzip.compress(first, mtime=0) + gzip.compress(second, mtime=0)
    return [*packed, joined, packed[0] + b"\0" * 64, gzip.compress(trace_seeds()[3], 0, mtime=0)]


def merge_trace(data: bytes) -> object:
    """What goes into a merged trace is JSON, whatever the rank's file is."""
    path = put("rank3.json", data)
    with _small_pieces():
        source = TraceInput(path=path, rank=3, metadata={}, first_ns=None)
        plan = RankPlan(source=source, rank=3, shift_ns=1_000_001, between=None, clock={})
        events = RankEvents(plan)
        merged = b",".join(events.pieces())
        json.loads(b"[" + merged + b"]", parse_int=str)
        said = trace_input(path)
        assert said.base_ns < 1 << 62
        between = RankEvents(replace(plan, shift_ns=-5, between=(0, 1 << 60)))
        json.loads(b"[" + b",".join(between.pieces()) + b"]", parse_int=str)
    return events.passed_count > 0, len(events.notes), said.rank is None, said.has_wall_clock


def mark_events(data: bytes) -> object:
    """A trace written anew with an argument more, and another thread, is JSON."""
    path = put("trace.json", data)
    with _small_pieces():
        marked = b",".join(add_marks(TraceText(path), np.arange(0, 1000, 3), "critical"))
    events = json.loads(b"[" + marked + b"]", parse_int=str)
    for text in TEXTS.decode(b"[" + marked + b"]")[:20]:
        assert b"12345" in with_number(bytes(text), "tid", 12345)
    return len(events) > 0


def read_execution_trace(data: bytes) -> object:
    """An execution trace, and what Chakra's file would hold of it."""
    path = put("rank0.et.json", data)
    found = load_execution_trace(path)
    graph = chakra_graph(found.nodes, 0, {"schema": found.schema, "pid": found.pid, **found.header})
    write_chakra(folder() / "rank0.et", graph)
    return [note[-20:] for note in found.report.notes + graph.notes], sorted(graph.type_counts)


@cache
def execution_seeds() -> list[bytes]:
    attrs = [
        {"name": name, "type": "uint64", "value": at}
        for at, name in enumerate(("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid"))
    ]
    values = {"values": [[1, 0, 0, 4, 4, "cpu"]], "shapes": [[2, 2]], "types": ["Tensor(float)"],
              "strides": [[2, 1]]}  # fmt: skip
    collective = [
        {"name": name, "value": value}
        for name, value in (
            ("collective_name", "allreduce"),
            ("pg_name", "0"),
            ("in_msg_nelems", 4),
        )
    ]
    nodes = [
        {"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1,
         "inputs": values, "outputs": values, "attrs": attrs},
        {"id": 2, "name": "aten::add", "ctrl_deps": 1, "inputs": values, "outputs": values,
         "attrs": attrs, "ts": 5, "inclusive_dur": 3, "exclusive_dur": 2},
        {"id": 3, "name": "record_param_comms", "ctrl_deps": 2, "inputs": values,
         "outputs": values, "attrs": attrs + collective,
         "haiprof": {"ts_ns": 5, "dur_ns": 3, "self_ns": 1, "linked_by": "rf_id"}},
    ]  # fmt: skip
    old = [{"id": n, "name": "aten::mm", "parent": n - 1, "rf_id": n, "fw_parent": 0, "seq_id": 1,
            "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": "", "inputs": [[1, 2, 0, 4, 4, "cpu"]],
            "input_shapes": [[2]], "input_types": ["Tensor(float)"], "outputs": [],
            "output_shapes": [], "output_types": []} for n in (1, 2, 3)]  # fmt: skip
    return [
        json.dumps({"schema": schema, "pid": 7, "time": "now", "start_ts": 1, "nodes": each,
                    "finish_ts": 9, "rank": 0}).encode()
        for schema, each in (("1.1.1-chakra.0.0.4", nodes), ("1.0.1", old))
    ]  # fmt: skip


def read_flight_dump(data: bytes) -> object:
    """A dump of the Flight Recorder; its text is packed here, so that mutations reach it."""
    packed = data if data[:2] == b"\x1f\x8b" else gzip.compress(data, 1)
    found = read_flight(put("flight.json.gz", packed))
    return len(found.groups), found.entries.height


@cache
def flight_seeds() -> list[bytes]:
    entry = {"collective_seq_id": 3, "p2p_seq_id": 1, "is_p2p": False, "record_id": 9,
             "profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"],
             "input_sizes": [[4, 1024], [7]], "input_dtypes": ["Float"],
             "time_created_ns": 1_700_000_000_000_000_000, "state": "completed",
             "time_discovered_started_ns": 5, "time_discovered_completed_ns": None}  # fmt: skip
    rings = [{"entries": [entry, {**entry, "is_p2p": True}]}, {"entries": []}]
    dump = {"wall_ns": 1_700_000_000_000_000_000, "groups": {"0": [0, 1]}, "traces": rings}
    text = json.dumps(dump).encode()
    return [text, gzip.compress(text, mtime=0)]


def read_torch_flight(data: bytes) -> object:
    """A dump that PyTorch's own watchdog wrote: a pickle of plain values, or JSON."""
    found = read_torch_dump(put("torch_flight", data))
    return len(found.groups), found.entries.height > 0, any(found.lines)


@cache
def torch_flight_seeds() -> list[bytes]:
    """What torch wrote, in both forms."""
    return [path.read_bytes() for path in sorted(DUMPS.glob("gloo_0.*"))]


def read_nccl_folder(data: bytes) -> object:
    """A file of NCCL's beside a whole one, and all that is said of both."""
    put("nccl/whole.log", nccl.inspector_of(0, 3).encode())
    path = put("nccl/nccl_inspector_metrics_00000001-aaaa.prom", data)
    found = nccl_folder_report([path.parent])
    json.dumps([found.as_json(), [each.why for each in ranks_behind(found)]], allow_nan=False)
    assert not any("\x1b" in line for line in found.lines())
    return found.collectives.height, found.waits.height, len(found.notes)


@cache
def nccl_seeds() -> list[bytes]:
    """Each form in each version."""
    steps = [nccl.proxy("send", [nccl.SEND_STEP]), {"p2p_perf": nccl.p2p(1)}]
    return [text.encode() for text in (
        nccl.inspector_of(1, 4), nccl.inspector(1, steps, version="v4.4"), nccl.profiler(0, 1),
        nccl.prometheus(200.0), nccl.prometheus_2_29(1, 40, 200.0),
    )]  # fmt: skip


def read_nsight_database(data: bytes) -> object:
    """An export of Nsight Systems in SQLite, as a trace."""
    return _of_nsight(put("export.sqlite", data))


def read_nsight_folder(data: bytes) -> object:
    """An export in Parquet of which a file is another: which one, and its bytes."""
    name, _, content = data.partition(b"\n")
    path = folder() / "export_pqtdir"
    if not path.exists():
        as_parquet(path)
    tables = sorted(NSIGHT_TABLES)
    file = path / f"{tables[(name or b'0')[0] % len(tables)]}.parquet"
    sound = file.read_bytes()
    try:
        file.write_bytes(content)
        return _of_nsight(path)
    finally:
        file.write_bytes(sound)


def _of_nsight(path: Path) -> object:
    parts: list[pl.DataFrame] = []
    metadata, notes, report = read_nsight(path, lambda _, part: parts.append(part))
    kept = sorted(name for name, count in report.kept.items() if count)
    return kept, len(metadata), bool(report.bad_time_count), len(parts) > 0, len(notes) > 0


@cache
def nsight_seeds() -> list[bytes]:
    """Each table with a row or more."""
    return [as_sqlite(folder() / "seed-export.sqlite").read_bytes()]


@cache
def nsight_folder_seeds() -> list[bytes]:
    """Each file of the folder."""
    path = as_parquet(folder() / "seed_pqtdir")
    return [bytes([at]) + b"\n" + (path / f"{name}.parquet").read_bytes()
            for at, name in enumerate(sorted(NSIGHT_TABLES))]  # fmt: skip


def read_memory_file(data: bytes) -> object:
    """What `export_memory_timeline` writes."""
    frame = memory_by_category(put("memory.raw.json", data))
    return frame.height > 1


@cache
def memory_seeds() -> list[bytes]:
    rows = [[-1, 1, 1024, 0], [10, 2, 512, 4], [10, 3, -512, 5], [20, 4, 256, 7]]
    text = json.dumps(rows).encode()
    levels = json.dumps([[1, 2], [[0, 8, 0, 0, 0, 0, 0, 0, 4], [0, *[2] * 8]]]).encode()
    return [text, gzip.compress(text, mtime=0), levels]


def read_snapshot(data: bytes) -> object:
    """What `torch.cuda.memory._dump_snapshot` writes."""
    found = read_memory_snapshot(put("snapshot.pickle", data))
    history = memory_history(found)
    assert history.levels.height == found.events.height
    return sum_by_line(found).height > 1, found.events.height > 1, history.by_line.height > 1


@cache
def snapshot_seeds() -> list[bytes]:
    allocator = Allocator(32 * MIB)
    allocator.malloc(4 * MIB)
    allocator.record_history()
    kept = [allocator.malloc(size) for size in (2 * MIB, 600, 14 * MIB)]
    assert kept[0] is not None
    allocator.free(kept[0])
    allocator.malloc(30 * MIB)
    content = allocator.snapshot()
    return [pickle.dumps(content, protocol=protocol) for protocol in (2, 4)]


def read_answers(data: bytes) -> object:
    """A summary whose checksum is right: so is that of a file that somebody means harm with."""
    head, _, body = data.partition(b"\n")
    body = b"%08x" % zlib.crc32(body[8:]) + body[8:]
    found = read_summary(put("rank0.summary", head + b"\n" + body), ["steps"])
    return sorted(type(each).__name__ for each in found.answers.values()), found.steps


@cache
def answer_seeds() -> list[bytes]:
    frame = pl.DataFrame({"rank": [0, 1], "name": ["a", None], "busy_ratio": [0.5, 1.0]})
    missing = MissingDataError("no steps", hint="record some")
    sets: tuple[dict[str, report_cache.Answer], ...] = (
        {"steps": frame}, {"steps": missing}, {"steps": frame, "more": missing},
    )  # fmt: skip
    told = folder() / "summaries"
    found = [write_summary(told / "rank0.json", told, (1, 2), each).read_bytes() for each in sets]
    assert report_cache.unpack_answers(found[0].partition(b"\n")[2], folder())
    return found


def read_functions(data: bytes) -> object:
    """A rank's functions with a right checksum; packed here, so that mutations reach it."""
    head, _, body = data.partition(b"\n")
    body = b"%08x" % zlib.crc32(body[8:]) + body[8:]
    path = put("rank0.functions", gzip.compress(head + b"\n" + body, 1))
    found = patterns_of_files([path], None)
    reports = function_reports(found).reports
    return [bool(report.meaning) for report in reports], found.functions.height > 0


@cache
def function_seeds() -> list[bytes]:
    traces = folder() / "reduced"
    traces.mkdir()
    said = {"Collective name": "allreduce", "Group size": 2, "Process Group Name": "0", "Seq": 1}
    rank_file(traces, 0, [step(3, 0, 100), launch(7, 5), kernel("gemm", 10, 10, correlation=7),
                          kernel("ncclDevKernel_AllReduce", 30, 9, **said)])  # fmt: skip
    (path,) = reduce_patterns(traces, traces / "out")
    text = gzip.decompress(path.read_bytes())
    lacking = b'"left_out": ["1 functions"]'
    return [text, text.replace(b'"left_out": []', lacking)]


def replay_operations(data: bytes) -> object:
    """A published job's table of operations, and its replay."""
    found = OperationWhatIf(operation_table(put("job.parquet", data)))
    return found.error_ratio >= 0, found.slowdown_ratio > 1, found.by_worker().height


@cache
def operation_seeds() -> list[bytes]:
    path, found = folder() / "seed.parquet", []
    for packing in ("uncompressed", "lz4", "snappy"):
        two_ranks(1.0, 3.0).write_parquet(path, compression=packing)
        found.append(path.read_bytes())
    return found


def view_in_plugin(data: bytes) -> object:
    """A trace in the form that torch-tb-profiler reads."""
    try:
        trace = json.loads(data.decode("utf-8", "replace"), parse_float=Exact, strict=False)
    except (ValueError, RecursionError) as error:
        raise TraceFormatError("no JSON") from error
    if not isinstance(trace, dict):
        raise TraceFormatError("no trace")
    found = normalise_trace(trace)
    return len(found.trace["traceEvents"]), len(found.collectives)


@cache
def _tables() -> dict[str, SqlTable]:
    traces = folder() / "asked"
    traces.mkdir()
    rank_file(traces, 0, [step(3, 0, 100), launch(7, 5), kernel("gemm", 10, 10, correlation=7),
                          event("aten::mm", "cpu_op", 1, 2)])  # fmt: skip
    (folder() / "secret.csv").write_text(f"secret\n{_SECRET}\n")
    return sql_tables(traces)


def ask_sql(data: bytes) -> object:
    """A question in SQL: nothing that stands in a file is in its answer."""
    tables = _tables()
    text = data.decode("utf-8", "replace").replace("SECRET.csv", str(folder() / "secret.csv"))
    try:
        answer = ask(tables, text)
    except UsageError as error:
        if _SECRET in str(error):
            raise AssertionError("an error shows what a file holds") from error
        raise
    assert _SECRET not in str(answer.to_dicts() if answer.height < 1000 else "")
    return sorted(map(str, answer.dtypes)), answer.height > 0


@cache
def sql_seeds() -> list[bytes]:
    return [
        b"select name, dur_ns from ops where dur_ns > 1 order by dur_ns desc limit 5",
        b"with a as (select rank, count(*) as n from gpu group by rank) select * from a join gpu",
        b"select g.name, r.name from gpu g join runtime r on g.correlation = r.correlation",
        b"select 1/2, 'a' || 'b', cast(ts_ns as text) from ops",
        b"select sum(dur_ns) over (partition by name) from ops",
        b"show tables",
        b"select * from read_csv('SECRET.csv')",
        b"-- from\nselect * from 'SECRET.csv'",
    ]


SQL_TOKENS: Sequence[bytes] = (
    b"select ", b" from ", b" where ", b" group by ", b" union all ", b"read_csv('SECRET.csv')",
    b"'SECRET.csv'", b'"SECRET.csv"', b"`SECRET.csv`", b"scan_parquet", b"explain ", b"-- ", b"/*",
    b"*/", b"(", b")", b"ops", b"gpu", b"insert into ", b"drop table ", b"create table x as ", b";",
)  # fmt: skip
