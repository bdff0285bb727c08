"""Answers about a trace in the user's cache, and as a small file that needs no trace."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from haiprof.base.errors import HaiprofError, MissingDataError, TraceFormatError, UsageError
from haiprof.base.safe_files import make_named_folder, write_file
from haiprof.base.version import PACKAGE, __version__
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.files import TraceFile
from haiprof.trace_format.find import SUMMARY_SUFFIX, rank_in_run
from haiprof.trace_format.kineto.cache import content_key, new_entry, read_entry

Answer = pl.DataFrame | TraceFile | MissingDataError
"""What is cached: a result, or the error that says what was not recorded."""

_ENDING = ".answers"
_SIZE_LIMIT_BYTES = 16 << 20  # larger answers are not cached
UNFIT = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError,
         pl.exceptions.PolarsError, pl.exceptions.PanicException)  # fmt: skip
"""What reading damaged answers raises; polars panics on some Arrow data."""


@cache
def code_version() -> str:
    """Identifies the code that answers: a hash of its text and of the versions of its libraries."""
    found = hashlib.blake2b(digest_size=12)
    found.update(f"{__version__} {pl.__version__} {np.__version__}".encode())
    for part in ("trace_analysis", "trace_format"):
        for source in sorted((PACKAGE / part).rglob("*.*")):
            if source.suffix in (".py", ".json"):
                found.update(source.read_bytes())
    return found.hexdigest()


def cached_answers(
    paths: Sequence[Path], question: str, options: Mapping[str, Any], names: Collection[str],
    compute: Callable[[Sequence[Path]], Sequence[Mapping[str, Answer]]],
) -> list[Mapping[str, Answer]]:  # fmt: skip
    """The answers about each file by name, computed where not all of them are cached."""
    found: dict[Path, Mapping[str, Answer]] = {}
    entries: dict[Path, tuple[str, str]] = {}  # names in the cache, and what the traces hold
    for path in paths:
        with contextlib.suppress(TraceFormatError):  # it cannot be read: the question says why
            content = content_key(path)
            parts = [code_version(), content, str(path), rank_in_run(path), question, dict(options)]
            key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
            entries[path] = key + _ENDING, content
            with contextlib.suppress(*UNFIT), read_entry(key + _ENDING) as file:
                known = unpack_answers(file.read(), path)
                found[path] = {name: known[name] for name in names}
    left = [path for path in paths if path not in found]
    for path, answers in zip(left, compute(left) if left else (), strict=True):
        found[path] = answers
        name, content = entries.get(path, ("", ""))
        data = pack_answers(answers)
        if name and len(data) <= _SIZE_LIMIT_BYTES and content_key(path) == content:
            with contextlib.suppress(OSError), new_entry(name) as file:
                file.write(data)
    return [found[path] for path in paths]


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
        part, at = body[at : at + length], at + length
        if kind == "frame":
            found[name] = pl.read_ipc_stream(io.BytesIO(part))
        elif kind == "missing":
            text, hint = msgspec.json.decode(part, type=tuple[str, str])
            found[name] = MissingDataError(text, hint=hint)
        else:
            found[name] = replace(_TRACE_FILES.decode(part), path=path)
    return found


_TRACE_FILES = msgspec.json.Decoder(TraceFile, dec_hook=lambda kind, value: kind(value))
"""Checks the type of every field: whoever wrote the file may mean harm."""


VERSION = 1
"""1: a line of JSON (`haiprof_summary`, `steps`), then the answers as `report_cache` packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The content of a file that `--reduce` made of a trace."""

    path: Path
    head: Mapping[str, Any]  # the line of JSON that it begins with
    steps: Steps  # first profiler step and the one after the last; None: all that was recorded
    answers: Mapping[str, Answer]  # by the name of the question


def write_summary(trace: Path, folder: Path, steps: Steps, answers: Mapping[str, Answer]) -> Path:
    """Writes a trace's answers under its name, replacing an existing file."""
    head = json.dumps({"haiprof_summary": VERSION, "steps": steps}).encode() + b"\n"
    return write_reduced(folder / f"{trace.name}{SUMMARY_SUFFIX}", head + pack_answers(answers))


def write_reduced(target: Path, data: bytes) -> Path:
    """Writes what a trace was reduced to into a folder that `--reduce` names."""
    folder = target.parent
    try:
        make_named_folder(folder)
        write_file(target, data, below=folder)
    except OSError as error:
        raise UsageError(f"--reduce {folder}: {error.strerror}") from None
    return target


def read_summary(path: Path, questions: Collection[str]) -> Reduced:
    """The answers in a file."""
    try:
        found = unpack_reduced(path.read_bytes(), path, "haiprof_summary", VERSION)
        lacking = sorted(set(questions) - set(found.answers))
        if lacking:
            raise ValueError(f"no answer to {lacking[0]}")
    except UNFIT as error:
        raise TraceFormatError(
            f"{path}: no summary that this haiprof can read: {error}",
            hint="haiprof trace report TRACES --reduce DIR writes it again",
        ) from None
    return found


def unpack_reduced(data: bytes, path: Path, kind: str, version: int) -> Reduced:
    """Reads what a trace was reduced to."""
    at = data.index(b"\n") + 1
    head = json.loads(data[:at])
    if head[kind] != version:
        raise ValueError(f"version {head[kind]}")
    steps = None if head["steps"] is None else (int(head["steps"][0]), int(head["steps"][1]))
    return Reduced(path=path, head=head, steps=steps, answers=unpack_answers(data[at:], path))


def common_steps(
    summaries: Sequence[Reduced], asked: Steps, *, command: str = "trace report"
) -> Steps:
    """The steps that all summaries share."""
    first = summaries[0]
    other = next((each for each in summaries if each.steps != first.steps), None)
    if other is not None:
        raise HaiprofError(
            f"{first.path} is of {_range(first.steps)}, {other.path} of {_range(other.steps)}"
        )
    if asked not in (None, first.steps):
        raise MissingDataError(
            f"{first.path}: a summary of {_range(first.steps)}",
            hint=f"haiprof {command} TRACES --reduce DIR --steps A:B makes one of others",
        )
    return first.steps


def _range(steps: Steps) -> str:
    return "all steps" if steps is None else f"steps {steps[0]} to before {steps[1]}"
