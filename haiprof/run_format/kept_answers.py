"""Answers kept in a run that has ended, used again while neither its files nor haiprof change."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from haiprof.base import safe_files
from haiprof.base.options import ENV_PEAK
from haiprof.base.version import PACKAGE, __version__
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import parse_object

_LIMIT_BYTES = 4 << 20
_FILE_LIMIT = 48  # answers of one run; a run that is asked in more ways begins anew
_DEPTH = 4
_ENTRY_LIMIT = 100_000
_DERIVED = "report"  # the folder of what is made from the rest: verdicts, pages, these answers


def fingerprint(run: RunPaths, *, of: Sequence[str] | None = None) -> str | None:
    """What answers of a run depend on: its files, its path, a peak that is set, haiprof's own code.

    Files count by inode, size and times; the time of the last change of an inode cannot be set, so
    that answers within a run that was copied or unpacked from elsewhere are never believed.

    None where a file cannot be looked at, or there are very many.
    """
    entries: list[object] = [
        __version__, _code_stamp(), os.path.abspath(run.root), os.environ.get(ENV_PEAK),
    ]  # fmt: skip
    try:
        _add_entries(entries, os.fspath(run.root), _DEPTH, of)
    except OSError:
        return None
    if len(entries) >= _ENTRY_LIMIT:
        return None
    text = repr(entries).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def read_answer(run: RunPaths, name: str, *, valid_for: str) -> dict[str, Any] | None:
    """A kept answer; None where there is none, or it is not believed, or the run has changed.

    Believed is what only this user can have written: the run, the file and the folders between them
    are this user's own, and nobody else may write to the file or those folders.
    """
    try:
        with open(
            safe_files.open_to_read(run.answer(name), below=run.root, own=True), "rb"
        ) as file:
            text = file.read(_LIMIT_BYTES + 1)
    except OSError:
        return None
    content = parse_object(text) if len(text) <= _LIMIT_BYTES else None
    if content is None or content.get("fingerprint") != valid_for:
        return None
    answer = content.get("answer")
    return answer if isinstance(answer, dict) else None


def keep_answer(run: RunPaths, name: str, content: Mapping[str, Any], *, valid_for: str) -> None:
    """Keeps an answer where `read_answer` would believe it; where it cannot, does nothing."""
    text = json.dumps({"fingerprint": valid_for, "answer": content}).encode()
    if len(text) > _LIMIT_BYTES:
        return
    with contextlib.suppress(OSError):
        safe_files.make_folder(run.answers, below=run.root, own=True)
        names = safe_files.list_folder(run.answers, below=run.root)
        for old in names if len(names) >= _FILE_LIMIT else ():
            safe_files.remove_file(run.answers / old, below=run.root)
        with safe_files.whole_file(run.answer(name), below=run.root, own=True) as file:
            file.write(text)


def _add_entries(
    found: list[object], folder: str, depth: int, only: Sequence[str] | None = None
) -> None:
    """Adds what is known of each file below a folder, in order of names; follows no link."""
    with os.scandir(folder) as listed:
        entries = sorted(listed, key=lambda entry: entry.name)
    for entry in entries:
        name = entry.name
        if name == _DERIVED or (only is not None and name not in only):
            continue
        if not entry.is_dir(follow_symlinks=False):
            s = entry.stat(follow_symlinks=False)
            found.append((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
        elif depth:
            found.append(name)
            _add_entries(found, entry.path, depth - 1)


@functools.cache
def _code_stamp() -> str:
    """Changes with haiprof's own code, also where that is edited under one version."""
    newest = 0
    count = 0
    for folder, _, names in os.walk(PACKAGE):
        for name in names:
            if name.endswith((".py", ".so", ".json")):
                count += 1
                newest = max(newest, Path(folder, name).stat().st_mtime_ns)
    return f"{count} {newest}"
