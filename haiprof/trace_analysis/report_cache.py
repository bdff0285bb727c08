"""Answers about a trace in the user's cache: a second report opens no trace.

An answer is pure: it depends on the file's content, the question's options and the code alone. Its
name is a hash of all of these, with the file's path and rank, which answers repeat. Each is a file
of its own that appears whole, by a rename, and holds a checksum; a damaged one is worked
out again. No code is stored: frames are Arrow IPC, the rest is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.version import PACKAGE, __version__
from haiprof.trace_analysis.files import TraceFile
from haiprof.trace_format.file_ranks import rank_in_run
from haiprof.trace_format.kineto.cache import content_key
from haiprof.trace_format.kineto.user_cache import new_entry, read_entry

Answer = pl.DataFrame | TraceFile | MissingDataError
"""What is cached: a result, or the error that says what was not recorded."""

_ENDING = ".answers"
_SIZE_LIMIT_BYTES = 16 << 20
"""Larger answers are not cached."""
UNFIT = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError,
         pl.exceptions.PolarsError, pl.exceptions.PanicException)  # fmt: skip
"""What reading damaged answers raises; polars panics on some Arrow data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """Where the answers about a trace are cached."""

    path: Path
    content: str
    """The trace's `content_key`."""
    name: str
    """The entry's name in the user's cache folder."""


def cache_entry(path: Path, question: str, options: Mapping[str, Any]) -> CacheEntry | None:
    """Where the answers to a question are cached; None for a file that cannot be read."""
    try:
        content = content_key(path)
        parts = [code_version(), content, str(path), rank_in_run(path), question, dict(options)]
    except TraceFormatError:
        return None
    name = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    return CacheEntry(path=path, content=content, name=name + _ENDING)


@cache
def code_version() -> str:
    """Identifies the code that answers: a hash of its text and of the versions of its libraries."""
    found = hashlib.blake2b(digest_size=12)
    found.update(f"{__version__} {pl.__version__} {np.__version__}".encode())
    for part in ("trace_analysis", "trace_format"):
        for source in sorted((PACKAGE / part).rglob("*.py")):
            found.update(source.read_bytes())
    return found.hexdigest()


def read_answers(entry: CacheEntry) -> dict[str, Answer] | None:
    """The cached answers by name; None where there are none, or damaged ones."""
    with contextlib.suppress(*UNFIT), read_entry(entry.name) as file:
        return unpack_answers(file.read(), entry.path)
    return None


def store_answers(entry: CacheEntry, answers: Mapping[str, Answer]) -> None:
    """Writes answers to the cache, if that is possible and the trace has not changed."""
    data = pack_answers(answers)
    if len(data) > _SIZE_LIMIT_BYTES or content_key(entry.path) != entry.content:
        return
    with contextlib.suppress(OSError), new_entry(entry.name) as file:
        file.write(data)


def pack_answers(answers: Mapping[str, Answer], *, plain: bool = False) -> bytes:
    """A checksum, a line of JSON with the sizes, and the answers one after the other."""
    data = {name: _encode(answer, plain=plain) for name, answer in answers.items()}
    index = [[name, kind, len(part)] for name, (kind, part) in data.items()]
    body = json.dumps(index).encode() + b"\n" + b"".join(part for _, part in data.values())
    return b"%08x" % zlib.crc32(body) + body


def _encode(answer: Answer, *, plain: bool) -> tuple[str, bytes]:
    if isinstance(answer, pl.DataFrame):
        buffer = io.BytesIO()
        answer.write_ipc_stream(buffer, compression="uncompressed" if plain else "lz4")
        return "frame", buffer.getvalue()
    if isinstance(answer, MissingDataError):
        return "missing", json.dumps([str(answer), answer.hint]).encode()
    return "file", json.dumps({**asdict(answer), "path": ""}).encode()


def unpack_answers(data: bytes, path: Path) -> dict[str, Answer]:
    """Reads what `pack_answers` wrote about the trace at `path`."""
    body = data[8:]
    if int(data[:8], 16) != zlib.crc32(body):
        raise ValueError(f"{path}: damaged answers")
    at = body.index(b"\n") + 1
    found: dict[str, Answer] = {}
    for name, kind, length in json.loads(body[:at]):
        found[name] = _decode(kind, body[at : at + length], path)
        at += length
    return found


def _decode(kind: str, data: bytes, path: Path) -> Answer:
    if kind == "frame":
        return pl.read_ipc_stream(io.BytesIO(data))
    if kind == "missing":
        text, hint = msgspec.json.decode(data, type=tuple[str, str])
        return MissingDataError(text, hint=hint)
    return replace(_TRACE_FILES.decode(data), path=path)


_TRACE_FILES = msgspec.json.Decoder(TraceFile, dec_hook=lambda kind, value: kind(value))
"""Checks the type of every field: whoever wrote the file may mean harm."""
