"""Small traces as text, in the layouts that profilers write, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.trace_format.kineto.columns import finish_table, merge_parts
from haiprof.trace_format.kineto.load import LoadReport, read_trace

Event = dict[str, Any]


def op(name: str = "aten::add", ts: Any = 100, dur: Any = 5, **more: Any) -> Event:
    """An operator on the CPU; `more` goes into its arguments."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur,
            "args": {"External id": 1, **more}}  # fmt: skip


def kernel(name: str = "gemm", ts: Any = 110, dur: Any = 5, **more: Any) -> Event:
    """A kernel."""
    args = {"device": 0, "stream": 7, "correlation": 3, **more}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def compact(events: list[Event], **metadata: Any) -> str:
    """On one line."""
    return json.dumps({**metadata, "traceEvents": events})


def pretty(events: list[Event], **metadata: Any) -> str:
    """As json.dump(indent=4) writes."""
    return json.dumps({**metadata, "traceEvents": events}, indent=4)


def tight(events: list[Event], **metadata: Any) -> str:
    """Without any white space."""
    return json.dumps({**metadata, "traceEvents": events}, separators=(",", ":"))


LAYOUTS = (compact, pretty, tight)


class Read:
    """What `read_trace` made of a file."""

    def __init__(self, path: Path) -> None:
        self._parts: dict[str, list[pl.DataFrame]] = {}
        found = read_trace(path, lambda table, part: self._parts.setdefault(table, []).append(part))
        self.metadata: dict[str, Any] = found[0]
        self._texts: list[str] = found[1]
        self.report: LoadReport = found[2]

    def table(self, name: str) -> pl.DataFrame:
        """In the file's order."""
        parts = self._parts.get(name, [])
        return finish_table(
            name, merge_parts(parts) if parts else pl.DataFrame(), pl.Enum(self._texts)
        )

    def column(self, table: str, name: str) -> list[Any]:
        """Values of a column."""
        return self.table(table)[name].to_list()

    def texts(self, table: str, name: str = "name") -> list[str | None]:
        """Values of a text column."""
        return self.table(table)[name].cast(pl.String).to_list()


def read(path: Path, text: str | bytes) -> Read:
    """Writes a text and reads it as a trace."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return Read(path)
