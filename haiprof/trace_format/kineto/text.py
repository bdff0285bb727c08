"""The text of a trace file in pieces of whole events, and the repair of damaged text."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import msgspec

from haiprof.base.errors import TraceFormatError
from haiprof.run_format.unpack import RATIO_FROM_BYTES, check_expansion

try:  # it unpacks in half of zlib's time: pip install "haiprof[fast]"
    from zlib_ng import zlib_ng as inflate
except ImportError:
    import zlib as inflate

# A string, and its closing quote as group 1: empty where the text ends before it. The pattern
# matches wherever it is tried, so that no text can make it backtrack.
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*("?)'
_TOKEN = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_NOT_NUMBER = rb"[-+]?(?:Infinity|inf|NaN|nan)(?:\(ind\))?(?![0-9A-Za-z_])"
_MENDED = re.compile(_STRING + rb"|(?<![0-9A-Za-z_])" + _NOT_NUMBER + rb"|[\x00-\x1f]", re.DOTALL)
_IN_STRING = re.compile(
    rb'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"  # what JSON allows
    rb"|\\u[dD][0-9a-fA-F]{3}|\\|[\x00-\x1f]"  # half a surrogate pair, a lone \, a control byte
)
_SUSPECT = re.compile(rb"[\\\x00-\x1f]")
_KEYS = rb'"(?:ph|name|cat|pid|tid|ts|dur|id|s|bp|args)"'
BOUNDARY = re.compile(rb"\}\s*,\s*\{\s*" + _KEYS)
_TAIL_BYTES = 1 << 13  # of a text are searched for its last boundary, before all of it is
_CLOSER = {ord("{"): ord("}"), ord("["): ord("]")}
_END_OF_ARRAY = ord("]")


class Found(Enum):
    """What `element` found."""

    WHOLE = auto()  # an element of the array, from `start` to `end`
    ARRAY_END = auto()  # the array's bracket, from `start` to `end`
    UNFINISHED = auto()
    """The text ends within the element that begins at `start`, or between elements."""
    IN_STRING = auto()  # the same, and within a string
    BROKEN = auto()  # from `start` the brackets do not fit together


@dataclass(frozen=True, slots=True)
class Element:
    """A part of the text of an array."""

    found: Found
    start: int
    end: int


def element(text: bytes, at: int, limit: int | None = None) -> Element:
    """The next element of an array, by its brackets and quotes alone."""
    limit = len(text) if limit is None else limit
    at = _after_separator(text, at)
    open_brackets: list[int] = []
    for token in _TOKEN.finditer(text, at, limit):
        if token[1] is not None:
            if not token[1]:
                return Element(Found.IN_STRING, at, limit)
            continue
        kind = text[token.start()]
        if kind in _CLOSER:
            open_brackets.append(_CLOSER[kind])
        elif not open_brackets:
            if kind == _END_OF_ARRAY and token.start() == at:
                return Element(Found.ARRAY_END, at, token.end())
            return Element(Found.BROKEN, at, token.end())
        elif open_brackets.pop() != kind:
            return Element(Found.BROKEN, at, token.end())
        if not open_brackets:
            return Element(Found.WHOLE, at, token.end())
    return Element(Found.UNFINISHED, at, limit)


def depth(text: bytes, start: int, end: int) -> int | None:
    """How many brackets a part of a text leaves open; None where it ends within a string."""
    found = 0
    for token in _TOKEN.finditer(text, start, end):
        if token[1] is None:
            found += 1 if text[token.start()] in _CLOSER else -1
        elif not token[1]:
            return None
    return found


def _after_separator(text: bytes, at: int = 0) -> int:
    between = _SEPARATOR.match(text, at)
    return between.end() if between else at


def scrub(text: bytes) -> bytes:
    """Removes from a text what JSON does not allow but real traces contain.

    NaN and infinities become null; invalid UTF-8 and unpaired surrogates become U+FFFD; control
    characters become spaces; backslashes that begin no escape are escaped.
    """
    if not is_utf8(text):
        text = text.decode("utf-8", "replace").encode()
    return _MENDED.sub(_mend_token, text)


def is_utf8(text: bytes) -> bool:
    """Whether a text is valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _mend_token(token: re.Match[bytes]) -> bytes:
    found = token[0]
    if token[1] is not None:
        return _IN_STRING.sub(_mend_string, found) if _SUSPECT.search(found) else found
    return found if found in b"\t\n\r" else b" " if len(found) == 1 else b"null"


def _mend_string(token: re.Match[bytes]) -> bytes:
    found = token[0]
    if not found.startswith(b"\\"):
        return b" "
    if found == b"\\":
        return b"\\\\"
    is_half_pair = len(found) == 6 and found[:3].lower() == b"\\ud" and found[3:4].lower() > b"7"
    return b"\\ufffd" if is_half_pair else found


PIECE_BYTES = 1 << 18  # what its events become fits the second-level cache of a core
EVENT_LIMIT_BYTES = 64 << 20  # far more than any event or metadata of a real trace
_GZIP_READ_BYTES = 1 << 16

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENTS_KEY_BYTES = 64  # it may span two blocks, with some white space
_ARRAY, _NEITHER = re.compile(rb"\s*\[(?=\s*(?:[{\]]|\Z))"), re.compile(rb"\s*[^\s{]")
_SEPARATOR = re.compile(rb"[\s,]*")
_HINTS = (
    (rb'"nodes"\s*:', "it is an execution trace (ExecutionTraceObserver), not a profiler's"),
    (rb'"segments"\s*:|"device_traces"\s*:', "it is a memory snapshot, not a profiler's trace"),
    (rb"\A\x80[\x02-\x05]", "it is a pickle: haiprof trace memory reads memory snapshots, "
                           "haiprof trace flight-recorder dumps of the Flight Recorder"),
    (rb'"pg_config"\s*:|"pg_status"\s*:', "it is a dump of the Flight Recorder: haiprof trace "
                                          "flight-recorder reads it"),
    (rb'"rocprofiler-sdk-tool"', "it is a result of rocprofv3, which haiprof does not read"),
    (rb"\A\x0a[^\s{\[]", "it is a protobuf, which haiprof does not read: Perfetto's own "
                         "(.pftrace), or an XPlane of JAX or TensorFlow (xplane.pb)"),
    (rb"", "expected a trace of torch.profiler (JSON, plain or gzip), or Nsight's .sqlite"),
)  # fmt: skip
_REPORT_HINT = "nsys export --type sqlite makes of it what haiprof reads"
"""Of Nsight's own file, .nsys-rep."""


class TraceText:
    """The events' text of one file, in order, and the metadata around it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.size_bytes = 0  # of the text, decompressed
        self.truncated_bytes: int | None = None
        """After the last whole event, where the file ends without closing its events."""
        self.notes: list[str] = []  # problems of the file other than those of events, for people
        self.is_last = False  # whether the piece at hand is the last one
        self._unread = b""
        self._trailer: list[bytes] | None = None
        self._trailer_bytes = 0

    def pieces(self) -> Iterator[bytes]:
        """Events separated by commas, without the brackets of their array.

        A piece begins at an event and ends behind one. Where text inside an event looks like the
        end of an event, the caller finds out when decoding, and calls `unread` or `events_ended`.
        """
        blocks = self._blocks()
        waiting, wanted = [self._begin(blocks)], PIECE_BYTES
        for block in blocks:
            if self._trailer is not None:
                self._keep_trailer(block)
                continue
            waiting.append(block)
            if sum(map(len, waiting)) < wanted:
                continue
            buffer = b"".join(waiting)
            cut = _last_boundary(buffer)
            if cut:
                yield buffer[_after_separator(buffer) : cut]
            waiting = self._rest(buffer[cut:])
            rest_bytes = sum(map(len, waiting))
            self._limit(rest_bytes)
            wanted = max(PIECE_BYTES, 2 * rest_bytes)
        if self._trailer is None:
            self.is_last = True
            buffer = b"".join(waiting)
            yield buffer[_after_separator(buffer) :]
        rest = b"".join(self._trailer or []).strip()  # the metadata behind the events
        if self._trailer_bytes > EVENT_LIMIT_BYTES:
            self.notes.append(
                f"{self._trailer_bytes >> 20} MiB of metadata behind the events were left out"
            )
        elif rest:
            self._add_metadata(rest, "behind")

    def unread(self, rest: bytes) -> None:
        """Puts the incomplete end of the current piece back, to be read with what follows it."""
        self._unread = rest

    def events_ended(self, rest: bytes) -> None:
        """States that the array of events closes within the current piece."""
        self._trailer = [rest]

    def _rest(self, buffer: bytes) -> list[bytes]:
        """The beginning of the next piece; where the events have ended, it is metadata."""
        if self._trailer is not None:
            self._keep_trailer(buffer)
            return []
        rest, self._unread = self._unread, b""
        return [rest, buffer] if rest else [buffer]

    def _limit(self, waiting_bytes: int) -> None:
        if waiting_bytes > EVENT_LIMIT_BYTES:
            raise TraceFormatError(
                f"{self.path}: {EVENT_LIMIT_BYTES >> 20} MiB without an end of an event: "
                "not a trace, or damaged"
            )

    def _begin(self, blocks: Iterator[bytes]) -> bytes:
        """Reads up to the first event; the text before it is metadata."""
        head, searched, open_brackets, scanned = b"", 0, 0, 0
        for block in _join_blocks(blocks, doubling=True):
            head = head + block if head else block.removeprefix(_BYTE_ORDER_MARK)
            self._limit(len(head))
            array = _ARRAY.match(head)
            if array:
                return head[array.end() :]
            if _NEITHER.match(head):
                break
            for key in _EVENTS_KEY.finditer(head, searched):
                opened = depth(head, scanned, key.start())
                if opened is None:
                    continue  # within a string
                open_brackets, scanned = open_brackets + opened, key.start()
                if open_brackets == 1:
                    self._add_metadata(head[: key.start()].strip().removeprefix(b"{"), "before")
                    return head[key.end() :]
            searched = max(0, len(head) - _EVENTS_KEY_BYTES)
        begin = head[:24].decode(errors="replace")
        shown = f"{self.size_bytes} bytes, begins {begin!r}" if head else "it is empty"
        why = "".join(f"; {note}" for note in self.notes)
        hint = next(hint for key, hint in _HINTS if re.search(key, head[: 1 << 20]))
        hint = _REPORT_HINT if self.path.name.endswith((".nsys-rep", ".qdrep")) else hint
        raise TraceFormatError(f"{self.path}: no traceEvents in it: {shown}{why}", hint=hint)

    def _keep_trailer(self, block: bytes) -> None:
        self._trailer_bytes += len(block)
        if self._trailer is not None and self._trailer_bytes <= EVENT_LIMIT_BYTES:
            self._trailer.append(block)

    def _add_metadata(self, text: bytes, where: str) -> None:
        """Keys and values as they stand before or behind the events, with stray commas."""
        bare = text.strip().strip(b",")
        for inside in (bare.removesuffix(b"}"), bare):
            found = _object(b"{" + inside.strip().strip(b",") + b"}")
            if found is not None:
                break
        else:
            self.notes.append(f"the metadata {where} the events cannot be read")
            return
        if "traceEvents" in found:
            self.notes.append("a second traceEvents was left out")
        self.metadata |= {key: value for key, value in found.items() if key != "traceEvents"}

    def _blocks(self) -> Iterator[bytes]:
        """The file's text, decompressed."""
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                kind = "a folder" if self.path.is_dir() else "no regular file"
                raise TraceFormatError(f"{self.path}: it is {kind}")
            with open(self.path, "rb", buffering=0) as file:
                packed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                size = _GZIP_READ_BYTES if packed else PIECE_BYTES
                raw = iter(lambda: file.read(size), b"")
                yield from _join_blocks(self._count_bytes(self._gunzip(raw) if packed else raw))
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            reason = error.strerror if isinstance(error, OSError) else error
            raise TraceFormatError(f"{self.path}: {reason or error}") from None

    def _count_bytes(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.size_bytes += len(block)
            yield block

    def _gunzip(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        """Unpacks gzip up to where the data is damaged or ends."""
        unpacker, read_bytes = inflate.decompressobj(wbits=31), 0
        for block in raw:
            read_bytes += len(block)
            while block:
                if unpacker.eof:
                    block = block.lstrip(b"\x00")  # zeros that pad a tape block
                    if not block:
                        break
                    unpacker = inflate.decompressobj(wbits=31)
                before = unpacker.copy()
                try:
                    text = unpacker.decompress(block, PIECE_BYTES)
                except inflate.error as error:
                    yield _readable(before, block)
                    self.notes.append(f"damaged gzip data ({error}): its readable part was kept")
                    return
                if text:
                    yield text
                if self.size_bytes > RATIO_FROM_BYTES:
                    check_expansion(self.path, packed_bytes=read_bytes, text_bytes=self.size_bytes)
                block = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        if not unpacker.eof:
            self.notes.append("the gzip data ends early: its readable part was kept")


def _join_blocks(blocks: Iterator[bytes], *, doubling: bool = False) -> Iterator[bytes]:
    """Joins small blocks, so that the work per block stays small in total."""
    waiting, waiting_bytes, given_bytes = list[bytes](), 0, PIECE_BYTES
    for block in blocks:
        waiting.append(block)
        waiting_bytes += len(block)
        if waiting_bytes >= (given_bytes if doubling else PIECE_BYTES):
            yield b"".join(waiting)
            given_bytes += waiting_bytes
            waiting, waiting_bytes = [], 0
    if waiting:
        yield b"".join(waiting)


def _readable(unpacker: Any, block: bytes) -> bytes:  # noqa: ANN401 - zlib does not name its type
    """The text before the damage in a block."""
    text = []
    with contextlib.suppress(inflate.error):
        for at in range(len(block)):
            text.append(unpacker.decompress(block[at : at + 1]))  # noqa: PERF401 - those so far
    return b"".join(text)


def _last_boundary(buffer: bytes) -> int:
    """The end of the last event that another one follows, else of the last one; 0 without any."""
    for size in (_TAIL_BYTES, len(buffer)):
        boundaries = list(BOUNDARY.finditer(buffer, max(len(buffer) - size, 0)))
        if boundaries:
            return boundaries[-1].start() + 1
    end = 0
    while True:
        found = element(buffer, end)
        if found.found in (Found.WHOLE, Found.ARRAY_END):
            end = found.end
        if found.found is not Found.WHOLE:
            return end


def _object(text: bytes) -> dict[str, Any] | None:
    for candidate in (text, scrub(text)):
        try:
            value = msgspec.json.decode(candidate)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
        return value if isinstance(value, dict) else None
    return None
