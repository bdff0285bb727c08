"""Reads an export of Nsight Systems (SQLite, Parquet folder) into the tables of a trace."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format.find import is_parquet_export
from haiprof.trace_format.kineto.columns import Names
from haiprof.trace_format.kineto.events import (
    ANNOTATIONS,
    GPU,
    GPU_COUNTERS,
    OPS,
    OS_CALLS,
    RUNTIME,
    TABLES,
)
from haiprof.trace_format.kineto.load import LoadReport

Sink = Callable[[str, pl.DataFrame], None]
_Row = dict[str, Any]
_MAGIC = b"SQLite format 3\0"
_ROWS = 1 << 15
_PUSH_POP, _START_END = 59, 60  # kinds of NVTX ranges that have an end
_VERSION = re.compile(r"_v\d+$")  # of a call, behind its name: `cudaLaunchKernel_v7000`
_OPERATOR = re.compile(r"(.+?)((?:, (?:seq|op_id|sizes|input_op_ids) = .*)|$)", re.DOTALL)
"""A range of emit_nvtx: `aten::mm, seq = 5, op_id = 9, sizes = [[2, 3]]`."""
_DETAIL = re.compile(r", (seq|op_id|sizes) = (.*?)(?=, (?:seq|op_id|sizes|input_op_ids) = |$)")
_STEP = re.compile(r"(?i)^(?:train(?:ing)?[ _])?(?:step|iter(?:ation)?)[ _:#-]*(\d+)$")
_UNREADABLE = (
    sqlite3.Error, OSError, KeyError, TypeError, ValueError, OverflowError, AttributeError,
    pl.exceptions.PolarsError, pl.exceptions.PanicException,
)  # fmt: skip
"""What tables raise that lack a column, hold a text for a number, or are damaged."""
_TID_BITS = 1 << 24
_ACTIVITY = "CUPTI_ACTIVITY_KIND_"
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_PARQUET = ".parquet"
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device"}


def is_nsight_export(path: Path) -> bool:
    """Whether it is an SQLite database, or a folder of Parquet files, as nsys exports them."""
    if is_parquet_export(path):
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def export_files(folder: Path) -> list[Path]:
    """The files of an export in Parquet."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(_PARQUET))


class _Database:
    """The tables of an SQLite export."""

    def __init__(self, path: Path) -> None:
        self._file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        self.close = self._file.close
        kinds = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        self.tables = {name for (name,) in self._file.execute(kinds)}

    def rows(self, table: str) -> Iterator[_Row]:
        cursor = self._file.execute(f'SELECT * FROM "{table}"')
        columns = [each[0] for each in cursor.description]
        for row in cursor:
            yield dict(zip(columns, row, strict=True))

    def count(self, table: str) -> int:
        return int(self._file.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])


class _ParquetFolder:
    """The tables of an export in Parquet, a file each."""

    def __init__(self, path: Path) -> None:
        self._files = {file.name.removesuffix(_PARQUET): file for file in export_files(path)}
        self.tables = set(self._files)

    def close(self) -> None:
        pass

    def rows(self, table: str) -> Iterator[_Row]:
        file = self._files[table]
        known = pl.read_parquet_schema(file)
        plain = [name for name, kind in known.items() if kind.is_numeric() or kind == pl.String]
        count = self.count(table)
        for first in range(0, count, _ROWS):
            part = pl.scan_parquet(file).select(plain).slice(first, _ROWS).collect()
            yield from part.iter_rows(named=True)

    def count(self, table: str) -> int:
        return int(pl.scan_parquet(self._files[table]).select(pl.len()).collect().item())


def read_nsight(path: Path, sink: Sink) -> tuple[dict[str, Any], list[str], LoadReport]:
    """Reads a file once, as `load.read_trace` does: kernels, copies, calls and NVTX ranges.

    Ranges of emit_nvtx are operators, those that number steps are profiler steps, and the others
    annotations; calls of the operating system and the GPU's metrics have tables of their own.
    Correlations count by process, and are made unique. What else the export holds (samples,
    scheduling, cuDNN's calls) is counted and not read.

    Source: NVIDIA, Nsight Systems User Guide, "SQLite schema reference" (2026.1, schema 3.25).
    """
    try:
        with closing(_Reader(path)) as reader:
            kept = reader.read(sink)
            metadata, not_used = reader.metadata(), reader.not_used()
    except _UNREADABLE as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise TraceFormatError(f"{path}: not an export of Nsight Systems: {why[:200]}") from None
    files = export_files(path) if path.is_dir() else [path]
    report = LoadReport(
        path=str(path), text_bytes=sum(file.stat().st_size for file in files),
        event_count=reader.count,
        kept={table: kept.get(table, 0) for table in TABLES}, redundant={}, not_used=not_used,
        bad_time_count=reader.bad_time, lost_count=0, repaired_count=0, truncated_bytes=None,
        odd_arguments_count=0, examples=(), file_notes=(),
    )  # fmt: skip
    return metadata, reader.names.texts(), report


class _Reader:
    """An open database."""

    def __init__(self, path: Path) -> None:
        self.path, self.names = path, Names(path)
        self.count = self.bad_time = 0
        self._file = (_ParquetFolder if path.is_dir() else _Database)(path)
        self._processes: dict[int, int] = {}
        self._texts: dict[int, str] = {}
        self._metrics: dict[tuple[int, int], str] = {}
        self._times: list[int] = []
        self.close = self._file.close

    def read(self, sink: Sink) -> dict[str, int]:
        """Passes on all tables, and returns how many rows each has."""
        if self._file.tables.isdisjoint((f"{_ACTIVITY}KERNEL", f"{_ACTIVITY}RUNTIME")):
            raise TraceFormatError(
                f"{self.path}: an export without CUDA activity",
                hint="nsys profile --trace=cuda,nvtx, then nsys export --type sqlite",
            )
        self._texts = {row["id"]: row["value"] for row in self._rows("StringIds")}
        self._metrics = {(row["typeId"], row["metricId"]): row["metricName"]
                         for row in self._rows("TARGET_INFO_GPU_METRICS")}  # fmt: skip
        kept: Counter[str] = Counter()
        for source, make in (
            (f"{_ACTIVITY}KERNEL", self._kernel), (f"{_ACTIVITY}MEMCPY", self._copy),
            (f"{_ACTIVITY}MEMSET", self._set), (f"{_ACTIVITY}RUNTIME", self._call),
            ("NVTX_EVENTS", self._range), ("OSRT_API", self._os_call),
            ("GPU_METRICS", self._metric),
        ):  # fmt: skip
            rows = filter(None, map(make, self._rows(source)))
            while part := list(islice(rows, _ROWS)):
                for table in sorted({row["table"] for row in part}, reverse=True):
                    own = [row for row in part if row["table"] == table]
                    kept[table] += self._pass_on(table, own, sink)
        return kept

    def metadata(self) -> _Row:
        """GPUs by name, and what times are counted from, as Kineto's metadata."""
        found: _Row = {"nsys": True}
        if "TARGET_INFO_GPU" in self._file.tables:
            known = self._rows("TARGET_INFO_GPU")
            found["deviceProperties"] = [
                {"id": row.get("cuDevice") if row.get("cuDevice") is not None else row.get("id", 0),
                 "name": row.get("name"), "numSms": row.get("smCount"),
                 "totalGlobalMem": row.get("totalMemory")}
                for row in known
            ]  # fmt: skip
        start = next(self._rows("TARGET_INFO_SESSION_START_TIME"), {})
        if isinstance(start.get("utcEpochNs"), int):
            clock = start.get("systemClockNs") or 0
            is_absolute = bool(self._times) and min(self._times) >= clock
            found["baseTimeNanoseconds"] = start["utcEpochNs"] - (clock if is_absolute else 0)
        return found

    def not_used(self) -> dict[str, int]:
        """How many rows of other tables of events there are."""
        others = (f"{_ACTIVITY}SYNCHRONIZATION", f"{_ACTIVITY}OVERHEAD",
                  "SCHED_EVENTS", "COMPOSITE_EVENTS", "PROFILER_OVERHEAD",
                  "CUDNN_EVENTS", "CUBLAS_EVENTS", "CUDA_GRAPH_NODE_EVENTS")  # fmt: skip
        counts = {name: self._file.count(name) for name in others if name in self._file.tables}
        found = {name: count for name, count in counts.items() if count}
        self.count += sum(found.values())
        return found

    def _rows(self, table: str) -> Iterator[_Row]:
        """Rows of a table by column; none where it is missing."""
        return self._file.rows(table) if table in self._file.tables else iter(())

    def _process(self, row: _Row) -> tuple[int, int]:
        """Its number in the file, and its id."""
        pid = int(row.get("globalPid") or row.get("globalTid") or 0) // _TID_BITS % _TID_BITS
        return self._processes.setdefault(pid, len(self._processes)), pid

    def _correlation(self, row: _Row) -> int | None:
        number = row.get("correlationId")
        return None if number is None else number + (self._process(row)[0] << 40)

    def _on_device(self, row: _Row, name: str, category: str) -> _Row:
        device, stream = row.get("deviceId"), row.get("streamId")
        return {
            **_times(row, GPU), "name": name, "category": category, "pid": device, "tid": stream,
            "device": device, "stream": stream, "correlation": self._correlation(row),
            "graph_node": row.get("graphNodeId") or None, "bytes": row.get("bytes"),
        }  # fmt: skip

    def _kernel(self, row: _Row) -> _Row:
        name = self._texts.get(row.get("demangledName")) or self._texts.get(row["shortName"])  # type: ignore[arg-type]
        plain = str(name or "").replace("<unnamed>::", "(anonymous namespace)::")
        return {
            **self._on_device(row, plain, "kernel"),
            **{side: f"[{row[f'{side}X']}, {row[f'{side}Y']}, {row[f'{side}Z']}]"
               for side in ("grid", "block") if row.get(f"{side}X") is not None},
        }  # fmt: skip

    def _copy(self, row: _Row) -> _Row:
        way = _COPIES.get(row.get("copyKind"), "")  # type: ignore[arg-type]
        ends = [_MEMORIES.get(row.get(f"{side}Kind"), "Unknown") for side in ("src", "dst")]  # type: ignore[arg-type]
        name = f"Memcpy {way} ({ends[0]} -> {ends[1]})".replace("  ", " ")
        length = row["end"] - row["start"]
        rate = row["bytes"] * 1e9 / length if length > 0 else None
        return {**self._on_device(row, name, "gpu_memcpy"), "bandwidth_bytes_per_s": rate}

    def _set(self, row: _Row) -> _Row:
        where = _MEMORIES.get(row.get("memKind"), "Unknown")  # type: ignore[arg-type]
        return self._on_device(row, f"Memset ({where})", "gpu_memset")

    def _call(self, row: _Row) -> _Row:
        name = _VERSION.sub("", self._texts.get(row["nameId"], ""))
        category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
        own = {"name": name, "category": category, "correlation": self._correlation(row)}
        return {**_times(row, RUNTIME), **self._thread(row), **own}

    def _os_call(self, row: _Row) -> _Row:
        own = {"name": self._texts.get(row["nameId"], ""), "category": "os_runtime"}
        return {**_times(row, OS_CALLS), **self._thread(row), **own}

    def _metric(self, row: _Row) -> _Row:
        return {
            "table": GPU_COUNTERS, "ts_ns": row["timestamp"], "dur_ns": 0,
            "name": self._metrics.get((row["typeId"], row["metricId"])), "category": "gpu_counter",
            "device": row["typeId"] & 0xFF, "value": row["value"],
        }  # fmt: skip

    def _range(self, row: _Row) -> _Row | None:
        """An NVTX range as an operator, a profiler step or an annotation."""
        text = row.get("text") or self._texts.get(row.get("textId"))  # type: ignore[arg-type]
        has_end = row.get("eventType", _PUSH_POP) in (_PUSH_POP, _START_END)
        if not text or not has_end or row.get("end") is None:
            return None
        found, step = _OPERATOR.fullmatch(str(text)), _STEP.match(str(text))
        details = dict(_DETAIL.findall(found[2])) if found else {}
        if found is None or not (details or "::" in str(text)):
            name = f"ProfilerStep#{step[1]}" if step else str(text)
            own = {"name": name, "category": "user_annotation"}
            return {**_times(row, ANNOTATIONS), **self._thread(row), **own}
        number = details.get("seq", "")
        return {
            **_times(row, OPS), **self._thread(row), "name": found[1], "category": "cpu_op",
            "input_dims": details.get("sizes"),
            "sequence_number": int(number) if number.isdigit() else None,
        }  # fmt: skip

    def _thread(self, row: _Row) -> _Row:
        tid = row.get("globalTid")
        return {"pid": self._process(row)[1], "tid": None if tid is None else tid % _TID_BITS}

    def _pass_on(self, table: str, rows: list[_Row], sink: Sink) -> int:
        good = [row for row in rows if row["dur_ns"] >= 0]
        self.bad_time += len(rows) - len(good)
        self.count += len(rows)
        if not good:
            return 0
        if table in (GPU, RUNTIME):  # calls of the system may be from before the session
            self._times.append(min(row["ts_ns"] for row in good))
        first = self.count - len(rows)
        columns = {"event": pl.Series("event", range(first, first + len(good)), dtype=pl.Int64)}
        kinds = {"i64": pl.Int64, "f64": pl.Float64, "str": pl.UInt32}
        for column in TABLES[table]:
            if column.name == "event":
                continue
            values = [row.get(column.name) for row in good]
            if column.type == "str":
                values = [None if each is None else self.names[each] for each in values]
            if any(value is not None for value in values):
                columns[column.name] = pl.Series(column.name, values, dtype=kinds[column.type])
        sink(table, pl.DataFrame(columns))
        return len(good)


def _times(row: _Row, table: str) -> _Row:
    return {"table": table, "ts_ns": row["start"], "dur_ns": row["end"] - row["start"]}
