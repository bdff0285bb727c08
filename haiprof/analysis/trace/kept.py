"""Answers about a trace that are kept beside its columns, so that a second report opens no trace.

An answer is pure: it depends on the file's content, the question's options and the code alone. Its
name is a hash of all of these, with the file's path and rank, which answers repeat. Each is a file
of its own that appears whole, by a rename, and holds a checksum; one that does not fit is worked
out anew. No code is stored: frames are Arrow IPC, the rest is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import haiprof
from haiprof.analysis.trace.files import TraceFile
from haiprof.errors import MissingDataError, TraceFormatError
from haiprof.traces.cache import cache_folders, content_key
from haiprof.traces.load import LoadReport
from haiprof.traces.ranks import rank_in_run

Answer = pl.DataFrame | TraceFile | MissingDataError
"""What is kept: of what was not recorded the error that says so."""

_FOLDER, _ENDING, _BUILDING = "answers", ".answers", ".building-"
_FILE_LIMIT = 16
"""Of answers about one trace; those written first are dropped."""
_SIZE_LIMIT_BYTES = 16 << 20
"""Larger answers are no summaries, and are not kept."""
UNFIT = (OSError, ValueError, KeyError, TypeError, IndexError, pl.exceptions.PolarsError)
"""What reading of damaged answers raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where answers about a trace are kept."""

    path: Path
    content: str
    """The trace's `content_key`."""
    name: str

    @property
    def folders(self) -> list[Path]:
        """Within the folders where the trace's columns may be."""
        return [folder / _FOLDER for folder in cache_folders(self.path, self.content)]


def place_of(path: Path, question: str, options: Mapping[str, Any]) -> Place | None:
    """Where the answers to a question are kept; null of a file that cannot be read.

    Args:
        path: The trace.
        question: What was asked.
        options: Of the question; plain values.
    """
    try:
        content = content_key(path)
        said = [code_version(), content, str(path), rank_in_run(path), question, dict(options)]
    except TraceFormatError:
        return None
    name = hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()
    return Place(path=path, content=content, name=name + _ENDING)


@cache
def code_version() -> str:
    """What tells the code that answers from any other: its text, and the libraries it stands on."""
    found = hashlib.blake2b(digest_size=12)
    found.update(f"{haiprof.__version__} {pl.__version__} {np.__version__}".encode())
    package = Path(haiprof.__file__).parent
    for part in ("analysis/trace", "traces"):
        for source in sorted((package / part).rglob("*.py")):
            found.update(source.read_bytes())
    return found.hexdigest()


def recalled(place: Place) -> dict[str, Answer] | None:
    """The answers that are kept there, by name; null where there are none, or damaged ones."""
    for folder in place.folders:
        with contextlib.suppress(*UNFIT):
            found = unpacked((folder / place.name).read_bytes(), place.path)
            with contextlib.suppress(OSError):
                os.utime(folder.parent)  # in use
            return found
    return None


def keep(place: Place, answers: Mapping[str, Answer]) -> None:
    """Keeps answers where the trace's columns are, if they can be written and nothing has changed.

    Args:
        place: From before the answers were worked out.
        answers: By name.
    """
    data = packed(answers)
    if len(data) > _SIZE_LIMIT_BYTES or content_key(place.path) != place.content:
        return
    for folder in place.folders:
        if not folder.parent.is_dir():
            continue
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            _write(folder, place.name, data)
            return


def _write(folder: Path, name: str, data: bytes) -> None:
    _tidy(folder)
    handle, building = tempfile.mkstemp(prefix=_BUILDING, dir=folder)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.chmod(building, folder.stat().st_mode & 0o666)
        os.replace(building, folder / name)
    except OSError:
        os.unlink(building)
        raise


def _tidy(folder: Path) -> None:
    """Makes room for one more, remains of the dead included."""
    ages = []
    for other in folder.iterdir():
        with contextlib.suppress(OSError):  # somebody else was faster
            ages.append((other.stat().st_mtime_ns, other))
    for _, other in sorted(ages)[: max(0, len(ages) - _FILE_LIMIT + 1)]:
        other.unlink(missing_ok=True)


def packed(answers: Mapping[str, Answer]) -> bytes:
    """A checksum, a line that says what follows, and the answers one behind the other."""
    parts = {name: _part(answer) for name, answer in answers.items()}
    told = [[name, kind, len(data)] for name, (kind, data) in parts.items()]
    body = json.dumps(told).encode() + b"\n" + b"".join(data for _, data in parts.values())
    return b"%08x" % zlib.crc32(body) + body


def _part(answer: Answer) -> tuple[str, bytes]:
    if isinstance(answer, pl.DataFrame):
        buffer = io.BytesIO()
        answer.write_ipc_stream(buffer, compression="lz4")
        return "frame", buffer.getvalue()
    if isinstance(answer, MissingDataError):
        return "missing", json.dumps([str(answer), answer.hint]).encode()
    return "file", json.dumps({**asdict(answer), "path": ""}).encode()


def unpacked(data: bytes, path: Path) -> dict[str, Answer]:
    """What `packed` made; `path` is the trace's. One of `UNFIT` where it is damaged."""
    body = data[8:]
    if int(data[:8], 16) != zlib.crc32(body):
        raise ValueError(f"{path}: damaged answers")
    at = body.index(b"\n") + 1
    found: dict[str, Answer] = {}
    for name, kind, length in json.loads(body[:at]):
        found[name] = _answer(kind, body[at : at + length], path)
        at += length
    return found


def _answer(kind: str, data: bytes, path: Path) -> Answer:
    if kind == "frame":
        return pl.read_ipc_stream(io.BytesIO(data))
    told = json.loads(data)
    if kind == "missing":
        return MissingDataError(told[0], hint=told[1])
    report = told["report"]
    lists = {name: tuple(report[name]) for name in ("examples", "file_notes")}
    return TraceFile(**{**told, "path": path, "report": LoadReport(**{**report, **lists})})
