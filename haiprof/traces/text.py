"""The text of a trace file in pieces of whole events: plain or gzip, whole or cut off."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from haiprof.errors import TraceFormatError

PIECE_BYTES = 1 << 20
EVENT_LIMIT_BYTES = 64 << 20  # no event and no metadata of a real trace comes near it
_GZIP_RATIO_LIMIT = 200  # real traces shrink to a tenth or a thirtieth
_GZIP_RATIO_FROM_BYTES = 256 << 20
_READ_BYTES = 1 << 20

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_KEYS = rb'"(?:ph|name|cat|pid|tid|ts|dur|id|s|bp|args)"'
BOUNDARY = re.compile(rb"\}(\s*,\s*)\{\s*" + _KEYS)
_END = re.compile(rb"\}\s*\]")


class TraceText:
    """The events' text of one file, in order, and the metadata around it.

    Args:
        path: A Kineto or Chrome trace: an object with `traceEvents`, or a bare array of events.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.size_bytes = 0
        """Of the text, decompressed."""
        self.truncated_bytes = 0
        """After the last whole event, where the file ends without closing its events."""
        self.is_truncated = False
        self._separator = b""
        self._trailer: bytes | None = None

    def pieces(self) -> Iterator[bytes]:
        """Events separated by commas, without the brackets of their array.

        Raises:
            TraceFormatError: It is not a trace, cannot be read, or has no events array.
        """
        blocks = self._blocks()
        buffer = self._begin(blocks)
        for block in blocks:
            if self._trailer is not None:
                self._trailer = _within_limit(self.path, self._trailer + block)
                continue
            buffer += block
            if len(buffer) >= PIECE_BYTES:
                cut = self._last_boundary(buffer)
                if cut:
                    yield buffer[:cut]
                    buffer = buffer[cut:].lstrip(b" \t\r\n").removeprefix(b",")
                else:
                    _within_limit(self.path, buffer)
        if self._trailer is None:
            yield from self._end(buffer)
        else:
            self._add_metadata(self._trailer)

    def events_ended(self, rest: bytes) -> None:
        """Told by whoever decodes a piece that the array has closed within it.

        Args:
            rest: What follows its bracket in that piece.
        """
        self._trailer = rest

    def _begin(self, blocks: Iterator[bytes]) -> bytes:
        """Reads up to the first event; what stands before it is metadata."""
        head = b""
        for block in blocks:
            head = _within_limit(self.path, head + block)
            if head.lstrip()[:1] == b"[":
                return head.lstrip()[1:]
            for start in _START.finditer(head):
                before = head[: start.start()] + b'"traceEvents":[]}'
                metadata = _object(before)
                if metadata is not None:
                    self._take(metadata)
                    return head[start.end() :]
        shown = f"{self.size_bytes} bytes, begins {head[:24]!r}" if head else "it is empty"
        raise TraceFormatError(
            f"{self.path}: no traceEvents in it: {shown}",
            hint="expected a trace of torch.profiler (JSON, plain or gzip)",
        )

    def _last_boundary(self, buffer: bytes) -> int:
        """Behind the last event that another one follows; 0 where there is none."""
        if not self._separator:
            first = BOUNDARY.search(buffer)
            self._separator = b"}" + first[1] + b"{" if first else b""
        at = buffer.rfind(self._separator) if self._separator else -1
        if at >= 0:
            return at + 1
        last = None
        for last in BOUNDARY.finditer(buffer):  # noqa: B007 - the last one is wanted
            pass
        return last.start() + 1 if last else 0

    def _end(self, buffer: bytes) -> Iterator[bytes]:
        """The last events, and the metadata behind them."""
        if buffer.lstrip()[:1] == b"]":
            self._add_metadata(buffer.lstrip()[1:])
            return
        for end in _END.finditer(buffer):  # the first that fits: metadata has lists of objects too
            rest = buffer[end.end() :]
            if not rest.strip() or _object(_as_object(rest)) is not None:
                self._add_metadata(rest)
                yield buffer[: end.start() + 1]
                return
        self.is_truncated = True
        cut = self._last_boundary(buffer)
        self.truncated_bytes = len(buffer) - cut
        if cut:
            yield buffer[:cut]

    def _add_metadata(self, rest: bytes) -> None:
        self._take(_object(_as_object(rest)) or {})

    def _take(self, metadata: dict[str, Any]) -> None:
        self.metadata |= {k: v for k, v in metadata.items() if k != "traceEvents"}

    def _blocks(self) -> Iterator[bytes]:
        """The file's text, decompressed."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                first = file.read(_READ_BYTES)
                packed = first[:2] == b"\x1f\x8b"
                raw = _chain(first, iter(lambda: file.read(_READ_BYTES), b""))
                for block in self._gunzipped(raw) if packed else raw:
                    self.size_bytes += len(block)
                    yield block
        except OSError as error:
            raise TraceFormatError(f"{self.path}: {error.strerror or error}") from None

    def _gunzipped(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        unpacker, read_bytes = zlib.decompressobj(wbits=31), 0
        for block in raw:
            read_bytes += len(block)
            while block:
                try:
                    text = unpacker.decompress(block, PIECE_BYTES)
                except zlib.error as error:
                    raise TraceFormatError(f"{self.path}: damaged gzip data: {error}") from None
                yield text
                self._check_ratio(read_bytes)
                block = unpacker.unconsumed_tail
                if unpacker.eof:
                    block, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)

    def _check_ratio(self, read_bytes: int) -> None:
        grown = self.size_bytes > _GZIP_RATIO_FROM_BYTES
        if grown and self.size_bytes > _GZIP_RATIO_LIMIT * read_bytes:
            raise TraceFormatError(
                f"{self.path}: {read_bytes} bytes of gzip hold more than {self.size_bytes} bytes",
                hint="no trace compresses like that; unpack it yourself if you trust it",
            )


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _within_limit(path: Path, text: bytes) -> bytes:
    if len(text) > EVENT_LIMIT_BYTES:
        raise TraceFormatError(
            f"{path}: {EVENT_LIMIT_BYTES >> 20} MiB without an end of an event: not a trace, "
            "or damaged"
        )
    return text


def _as_object(rest: bytes) -> bytes:
    """What follows the events, as an object of its own."""
    return b"{" + rest.strip().removeprefix(b",").removesuffix(b"}") + b"}"


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
