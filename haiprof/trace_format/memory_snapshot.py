"""Snapshots of the CUDA caching allocator as frames, and pickles read without running anything."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import polars as pl

from haiprof.base.code_places import Frame, frame_text, own_frame
from haiprof.base.collector import pause_collector
from haiprof.base.errors import TraceFormatError
from haiprof.run_format.unpack import read_text

_VERSION = 1  # version of plain_pickle.c; one that was built from an older text is not used

_compiled: ModuleType | None
try:
    from haiprof.trace_format import _plain_pickle

    _compiled = _plain_pickle if getattr(_plain_pickle, "VERSION", 0) == _VERSION else None
except ImportError:  # haiprof was installed without a compiler
    _compiled = None

_ALLOWED = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "NONE", "NEWTRUE", "NEWFALSE",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
)  # fmt: skip
"""What pickle writes for such values, protocol 2 and later. Whatever names, calls or builds an
object is not among them, nor what allocates more than the file holds."""


class _Reader(pickle._Unpickler):
    """Python's own reader, which keeps its memo in a dictionary: a huge place in it costs nothing.

    The compiled one allocates an array up to that place, and trusts what it is told to call.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        ord(getattr(pickle, name)): pickle._Unpickler.dispatch[ord(getattr(pickle, name))]
        for name in _ALLOWED
    }


def _with_checked_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    def check_keys(reader: Any) -> None:  # noqa: ANN401 - Python's own reader, which has no types
        if any(isinstance(key, tuple) for key in reader.stack[keys]):
            raise TypeError("a tuple is the key of a dictionary")
        load(reader)

    return check_keys


# Tuples in tuples overflow the stack where they are hashed, and no dump has them as keys.
for _opcode, _keys in (
    (ord(pickle.SETITEM), slice(-2, -1)),
    (ord(pickle.SETITEMS), slice(0, None, 2)),
):
    _Reader.dispatch[_opcode] = _with_checked_keys(_Reader.dispatch[_opcode], _keys)


def read_plain_pickle(content: bytes) -> Any:  # noqa: ANN401 - whatever the file holds
    """The value that a pickle holds. The same list may stand in it many times, and in itself.

    What plain_pickle.c has followed to its end Python's compiled reader may read.
    """
    try:
        if _compiled is not None and _compiled.is_plain(content):
            with pause_collector():
                return pickle.loads(content)
        return _Reader(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  damaged pickles raise errors of any type
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyError) and isinstance(error.args[0], int):
            why = f"opcode {error.args[0]:#04x} is not one of plain values"
        raise TraceFormatError(f"no pickle of plain values ({why})") from None


SIZE_LIMIT_BYTES = 1 << 29
_ITEM_LIMIT = 3_000_000
"""Segments, blocks, entries and frames together: a list may stand in a pickle many times."""
_FRAMES = 64
_TEXT_CHARS = 400
_INTEGER_LIMIT, _SIZE_LIMIT = 1 << 62, 1 << 48
PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
"""How a pickle of each protocol begins."""

SEGMENT_SCHEMA = {
    "device": pl.Int64, "address": pl.Int64, "size_bytes": pl.Int64, "allocated_bytes": pl.Int64,
    "stream": pl.Int64, "kind": pl.String, "private": pl.Boolean,
}  # fmt: skip
BLOCK_SCHEMA = {
    "device": pl.Int64, "address": pl.Int64, "size_bytes": pl.Int64, "requested_bytes": pl.Int64,
    "state": pl.String, "stack": pl.Int64,
}  # fmt: skip
EVENT_SCHEMA = {
    "device": pl.Int64, "action": pl.String, "address": pl.Int64, "size_bytes": pl.Int64,
    "time_ns": pl.Int64, "device_free_bytes": pl.Int64, "stack": pl.Int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """The allocator of one process at one time."""

    segments: pl.DataFrame
    """What it took from the device: SEGMENT_SCHEMA; `kind` is `small` or `large`, `private` one of
    a pool of its own, as CUDA graphs have them."""
    blocks: pl.DataFrame
    """What the segments are divided into: BLOCK_SCHEMA; `state` as torch names it; `stack` is a
    place in `stacks`, null where no history was recorded when the block was allocated."""
    events: pl.DataFrame
    """Its history, oldest first: EVENT_SCHEMA; `time_ns` is Unix time, null before torch 2.3."""
    stacks: tuple[tuple[Frame, ...], ...]  # Python frames, innermost last, at most 64 of each


def is_pickle(path: Path) -> bool:
    """Whether a file is one, by its first bytes; False for what is no plain file."""
    if not path.is_file():  # a pipe would block
        return False
    try:
        with open(path, "rb") as file:
            return file.read(2) in PICKLES
    except OSError:
        return False


def read_memory_snapshot(path: Path) -> MemorySnapshot:
    """Reads a snapshot.

    Source: torch/cuda/memory.py, `_snapshot`, which describes the form.
    """
    try:
        found = read_plain_pickle(read_text(path, limit_bytes=SIZE_LIMIT_BYTES))
    except (OSError, TraceFormatError) as error:
        text = str(error).removeprefix(f"{path}: ")
        raise TraceFormatError(f"{path}: no snapshot of PyTorch's memory: {text}") from None
    if isinstance(found, list):  # torch.cuda.memory_snapshot(): the segments alone
        found = {"segments": found}
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise TraceFormatError(f"{path}: no snapshot of PyTorch's memory: it has no segments")
    return _Parser(path).parse(found)


class _Parser:
    """One file's content, which may hold anything."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = _ITEM_LIMIT
        self._stacks: list[tuple[Frame, ...]] = []
        self._places: dict[int, int] = {}  # by the list's id: torch shares stacks
        self._held: list[object] = []

    def parse(self, found: Mapping[str, object]) -> MemorySnapshot:
        segments: list[tuple[object, ...]] = []
        blocks: list[tuple[object, ...]] = []
        for segment in self._items(found.get("segments")):
            device, at = _integer(segment.get("device")) or 0, _integer(segment.get("address"))
            pool = segment.get("segment_pool_id")
            segments.append(
                (device, at, self._size(segment, "total_size"),
                 self._size(segment, "allocated_size"), _integer(segment.get("stream")),
                 _text(segment.get("segment_type")),
                 isinstance(pool, tuple | list) and any(part != 0 for part in pool[:2]))
            )  # fmt: skip
            for block in self._items(segment.get("blocks")):
                size, own = self._size(block, "size"), _integer(block.get("address"))
                blocks.append((device, own if own is not None else at, size,
                               _integer(block.get("requested_size")), _text(block.get("state")),
                               self._stack(block)))  # fmt: skip
                at = None if at is None else at + size
        events = list(self._events(found.get("device_traces")))
        return MemorySnapshot(
            segments=pl.DataFrame(segments, schema=SEGMENT_SCHEMA, orient="row"),
            blocks=pl.DataFrame(blocks, schema=BLOCK_SCHEMA, orient="row"),
            events=pl.DataFrame(events, schema=EVENT_SCHEMA, orient="row"),
            stacks=tuple(self._stacks),
        )

    def _events(self, traces: object) -> Iterator[tuple[object, ...]]:
        for device, trace in enumerate(traces if isinstance(traces, list) else ()):
            for entry in self._items(trace):
                time_us = _integer(entry.get("time_us"))
                yield (device, _text(entry.get("action")), _integer(entry.get("addr")),
                       self._size(entry, "size"),
                       None if time_us is None else _integer(time_us * 1000),
                       _integer(entry.get("device_free")), self._stack(entry))  # fmt: skip

    def _items(self, content: object) -> Iterator[Mapping[str, object]]:
        for item in content if isinstance(content, list) else ():
            self._take(1)
            if not isinstance(item, dict):
                kind = type(item).__name__  # never its repr: it may be one of endless nesting
                raise TraceFormatError(f"{self._path}: no snapshot of PyTorch's memory: a {kind}")
            yield item

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TraceFormatError(f"{self._path}: more than {_ITEM_LIMIT:,} segments and blocks")

    def _size(self, item: Mapping[str, object], name: str) -> int:
        size = _integer(item.get(name, 0))
        if size is None or not 0 <= size < _SIZE_LIMIT:
            raise TraceFormatError(f"{self._path}: {name} of a block is no number of bytes")
        return size

    def _stack(self, item: Mapping[str, object]) -> int | None:
        frames = item.get("frames")
        if not isinstance(frames, list) or not frames:
            return None
        if id(frames) not in self._places:
            self._held.append(frames)  # an id is one as long as its object lives
            self._take(len(frames[:_FRAMES]))
            # Torch writes the innermost first.
            kept = [frame for each in frames[:_FRAMES] if (frame := _frame(each)) is not None]
            self._places[id(frames)] = len(self._stacks)
            self._stacks.append(tuple(reversed(kept)))
        return self._places[id(frames)]


def sum_by_line(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Memory in use by the line of the job's own code that allocated it, most first."""
    used = snapshot.blocks.filter(pl.col("state").str.starts_with("active"))
    found = used.join(_lines(snapshot), on="stack", how="left").group_by("device", "line", "file")
    sums = found.agg(block_count=pl.len().cast(pl.Int64), size_bytes=pl.col("size_bytes").sum())
    return sums.sort("device", -pl.col("size_bytes"), "line", nulls_last=True)


_TAKEN, _RETURNED = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_FREED = ("free", "free_completed")
"""When a block can be used again: `free_requested` alone may wait for another stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHistory:
    """What the allocator held while its history was recorded, in bytes as they were asked for."""

    levels: pl.DataFrame
    """One row per event, oldest first: `device`, `order` (0 is the first event of the device),
    `ts_ns` (Unix time; `order` where torch recorded none), `allocated_bytes` and `reserved_bytes`
    after it."""
    by_line: pl.DataFrame
    """Per device and line, most at the peak first: `device`, `line` (null where no frame of the
    job's own code was recorded; `is_older` where that is as the block is older than the history),
    and what its blocks held: `start_bytes`, `peak_bytes`, `end_bytes`, `peak_block_count`, and
    `growth_bytes` from start to end."""


def memory_history(snapshot: MemorySnapshot) -> MemoryHistory:
    """Follows the history to the snapshot, whose blocks are what is left at its end.

    A history is a ring: what it has lost is known by what was freed later, or is still there.

    Source: c10/cuda/CUDACachingAllocator.cpp, `record_trace`; torch/cuda/_memory_viz.py draws it.
    """
    action, size = pl.col("action"), pl.col("size_bytes")
    events = snapshot.events.with_columns(order=pl.int_range(pl.len()).over("device"))
    place = ["device", "address"]
    own = events.filter(action.is_in(["alloc", *_FREED]))
    lives = own.select(
        *place, "size_bytes",
        born=pl.when(action == "alloc").then("order").otherwise(-1),
        gone=pl.when(action == "alloc").then(pl.col("order").shift(-1).over(place))
        .otherwise("order"),
        stack=pl.when(action == "alloc").then("stack"),
        is_life=(action == "alloc") | pl.col("order").shift(1).over(place).is_null(),
    ).filter("is_life").drop("is_life")  # fmt: skip
    older = snapshot.blocks.filter(pl.col("state").str.starts_with("active")).join(
        own, on=place, how="anti"
    ).select(*place, size_bytes=pl.coalesce("requested_bytes", "size_bytes"),
             born=pl.lit(-1, pl.Int64), gone=pl.lit(None, pl.Int64), stack="stack")  # fmt: skip
    lives = pl.concat([lives.with_columns(pl.col("born", "gone").cast(pl.Int64)), older])
    changes = pl.concat([
        lives.select("device", order="born", change="size_bytes"),
        lives.drop_nulls("gone").select("device", order="gone", change=-size),
    ]).group_by("device", "order").agg(pl.col("change").sum())  # fmt: skip
    start = lives.filter(pl.col("born") < 0).group_by("device").agg(start_bytes=size.sum())
    end = snapshot.segments.group_by("device").agg(end_bytes=size.sum())
    reserved = pl.when(action.is_in(_TAKEN)).then(size).when(action.is_in(_RETURNED)).then(-size)
    joined = events.with_columns(taken=reserved.otherwise(0))
    for other, on in ((changes, ["device", "order"]), (start, ["device"]), (end, ["device"])):
        joined = joined.join(other, on=on, how="left", maintain_order="left")
    change, taken = pl.col("change").fill_null(0), pl.col("taken")
    levels = joined.select(
        "device", "order", ts_ns=pl.coalesce("time_ns", "order"),
        allocated_bytes=pl.col("start_bytes").fill_null(0) + change.cum_sum().over("device"),
        reserved_bytes=pl.col("end_bytes").fill_null(0) + taken
        - taken.cum_sum(reverse=True).over("device"),
    )  # fmt: skip
    peaks = levels.group_by("device").agg(
        peak=pl.col("order").get(pl.col("allocated_bytes").arg_max())
    )
    named = lives.join(_lines(snapshot), on="stack", how="left").join(peaks, on="device")
    gone = pl.col("gone").is_null()
    at_peak = (pl.col("born") <= pl.col("peak")) & (gone | (pl.col("gone") > pl.col("peak")))
    older_than = (pl.col("born") < 0) & pl.col("line").is_null()
    by_line = named.group_by("device", "line", is_older=older_than).agg(
        start_bytes=size.filter(pl.col("born") < 0).sum(), peak_bytes=size.filter(at_peak).sum(),
        end_bytes=size.filter(gone).sum(), peak_block_count=at_peak.sum().cast(pl.Int64),
    ).with_columns(growth_bytes=pl.col("end_bytes") - pl.col("start_bytes"))  # fmt: skip
    ordered = by_line.sort("device", -pl.col("peak_bytes"), "line", nulls_last=True)
    return MemoryHistory(levels=levels, by_line=ordered)


def _lines(snapshot: MemorySnapshot) -> pl.DataFrame:
    """By place in `stacks`: the `line` of the job's own code, and its `file`."""
    own = map(own_frame, snapshot.stacks)
    rows = [(place, *((None, None) if frame is None else (frame_text(frame), frame[0])))
            for place, frame in enumerate(own)]  # fmt: skip
    schema = {"stack": pl.Int64, "line": pl.String, "file": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _frame(content: object) -> Frame | None:
    if not isinstance(content, dict):
        return None
    file, line = _text(content.get("filename")), _integer(content.get("line"))
    name = _text(content.get("name"))
    return None if file is None or line is None or name is None else (file, line, name)


def _integer(value: object) -> int | None:
    return value if type(value) is int and abs(value) < _INTEGER_LIMIT else None


def _text(value: object) -> str | None:
    return value[:_TEXT_CHARS] if isinstance(value, str) else None
