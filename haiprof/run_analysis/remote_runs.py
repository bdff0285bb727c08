"""Runs at addresses such as s3://bucket/runs: put there, and fetched from there, by fsspec.

A run is put under its own name, its files under theirs. Several nodes may put one run: the
manifest, the verdict and what else is of the whole job are the first node's, all other files are of
the node that wrote them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, MissingExtraError, RunNotFoundError, UsageError
from haiprof.base.log_addresses import check_packages, run_address
from haiprof.base.options import safe_name
from haiprof.base.safe_files import MadeFolder, is_unfinished, make_folder, open_to_read, whole_file
from haiprof.base.units import bytes_text
from haiprof.run_format.kept_answers import keep_answer, read_answer
from haiprof.run_format.layout import MANIFEST_NAME, RunPaths
from haiprof.run_format.raw_traces import parse_stem
from haiprof.run_format.reader import read_json
from haiprof.run_format.secrets import mask_text

_CHUNK_BYTES = 1 << 20
_MANIFEST_LIMIT_BYTES = 16 << 20
_ERROR_CHARS = 400
_STORES_WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci")
"""Making a folder there would make a bucket of a mistyped name."""
_NOT_PUT = "answers"
_SAME_RUN = ("host", "launcher_pid", "start_wall_ns")

State = tuple[int, int]  # size and time of the last change in ns, of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """What was put."""

    target: str  # the run's address
    file_count: int  # files that were sent; those that were there already are left out
    size_bytes: int  # their bytes


def put_run(run: RunPaths, address: str, *, host: str, only_node: bool = False) -> PutResult:
    """Puts the files of a run at an address, except those that are there and have not changed."""
    target = run_address(address, run.root.name)
    with _naming(target):
        fs, root = _open(target)
        there = _list_sizes(fs, root)
        if not only_node and MANIFEST_NAME in there:
            only_node = not _is_same_run(_read_manifest(fs, root), run, target)
        paths = _files_of_node(run, host) if only_node else _files(run)
        key = hashlib.blake2b(target.encode(), digest_size=16).hexdigest()
        record = f"put-{safe_name(host)}"
        done = _states(read_answer(run, record, valid_for=key))
        done = {path: state for path, state in done.items() if there.get(path) == state[0]}
        sizes = []
        try:
            for path in paths:
                if sent := _put_changed(fs, run, path, root=root, before=done.get(path)):
                    done[path] = sent
                    sizes.append(sent[0])
        finally:
            keep_answer(run, record, {"files": done}, valid_for=key)
    return PutResult(target=target, file_count=len(sizes), size_bytes=sum(sizes))


def fetch_run(address: str, folder: Path) -> Path:
    """Fetches a run; of the address of a log directory, its newest one."""
    with _naming(address):
        fs, root = _open(address)
        root = _newest_run(fs, root, address)
        sizes = _list_sizes(fs, root)
        target = folder.absolute() / safe_name(root)
        if os.path.lexists(target):
            raise UsageError(f"{target}: exists already", hint="remove it, or -o another folder")
        total, free = sum(sizes.values()), shutil.disk_usage(folder).free
        if total > free:
            left = f"{bytes_text(total)}, and {folder} has {bytes_text(free)} left"
            raise HaiprofError(f"{mask_text(address)}: {left}")
        made = MadeFolder.temporary(f".{target.name}.", target.parent)
        try:
            for path in sizes:
                file = made.path / path
                make_folder(file.parent, below=made.path)
                with fs.open(f"{root}/{path}") as there, whole_file(file, below=made.path) as here:
                    shutil.copyfileobj(there, here, _CHUNK_BYTES)
            made.move(target)
        except BaseException:
            made.remove()
            raise
    return target


@contextlib.contextmanager
def _naming(address: str) -> Iterator[None]:
    """Errors of a file system name the address; credentials in them are masked."""
    try:
        yield
    except HaiprofError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"{mask_text(address)}: {error}") from error
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:_ERROR_CHARS]
        raise HaiprofError(f"{mask_text(address)}: {mask_text(words)}") from error


def _open(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    check_packages(address)
    import fsspec

    fs, path = fsspec.core.url_to_fs(address)
    return fs, path.rstrip("/")


def _list_sizes(fs: Any, root: str) -> dict[str, int]:  # noqa: ANN401
    """Sizes of the files below a folder, by path from there; empty where it does not exist."""
    fs.invalidate_cache()
    try:
        found = fs.find(root, detail=True)
    except FileNotFoundError:
        return {}
    files = {name[len(root) + 1 :]: entry["size"] for name, entry in found.items()
             if entry.get("type", "file") == "file"}  # fmt: skip
    return {path: size for path, size in files.items()
            if "\0" not in path and not {"", ".", ".."} & set(path.split("/"))}  # fmt: skip


def _read_manifest(fs: Any, root: str) -> Mapping[str, Any]:  # noqa: ANN401
    content = json.loads(fs.cat_file(f"{root}/{MANIFEST_NAME}", end=_MANIFEST_LIMIT_BYTES))
    return content if isinstance(content, dict) else {}


def _is_same_run(there: Mapping[str, Any], run: RunPaths, target: str) -> bool:
    """Whether this run's manifest is the one there; else another node of the job put its own."""
    here = read_json(run.manifest)
    if all(there.get(name) == here.get(name) for name in _SAME_RUN):
        return True
    end, start = there.get("end_wall_ns"), here.get("start_wall_ns")
    if isinstance(end, int) and isinstance(start, int) and end < start:
        raise UsageError(
            f"{mask_text(target)}: an earlier run of that name is there", hint="another address"
        )
    return False


def _files(run: RunPaths) -> list[str]:
    """Paths of a run's files, the manifest first; none that is temporary or not a regular file."""
    found = []
    for folder, folders, names in os.walk(run.root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != _NOT_PUT)
        inner = os.path.relpath(folder, run.root)
        for name in sorted(names):
            path = os.path.normpath(os.path.join(inner, name))
            file = run.root / path
            if not is_unfinished(name) and file.is_file() and not file.is_symlink():
                found.append(path)
    return sorted(found, key=lambda path: path != MANIFEST_NAME)


def _files_of_node(run: RunPaths, host: str) -> list[str]:
    """Those that processes of one node wrote: in its own folder, in its ranks', under its name."""
    ranks = {}
    for rank, _, paths in run.rank_folders():
        with contextlib.suppress(HaiprofError):
            if read_json(paths.report).get("host") == host:
                ranks[paths.root.name] = f"rank_{rank}"
    found = []
    for path in _files(run):
        folder, *inner = path.split("/")
        name, stem = inner[-1] if inner else "", parse_stem(inner[-1]) if inner else None
        owns = {
            "nodes": len(inner) > 1 and inner[0] == host,
            "ranks": len(inner) > 1 and inner[0] in ranks,
            "traces": stem is not None and stem.is_of(host), "flight": name in ranks.values(),
            "uncaught": name.startswith(f"{host}-"), "memory": name.startswith(f"{host}-"),
        }  # fmt: skip
        found += [path] if owns.get(folder) else []
    return found


def _states(kept: Mapping[str, Any] | None) -> dict[str, State]:
    """Size and time of each file that was put; without those whose record is damaged."""
    files = (kept or {}).get("files")
    items = files.items() if isinstance(files, dict) else ()
    return {path: (state[0], state[1]) for path, state in items
            if isinstance(state, list) and [*map(type, state)] == [int, int]}  # fmt: skip


def _put_changed(
    fs: Any, run: RunPaths, path: str, *, root: str, before: State | None  # noqa: ANN401
) -> State | None:  # fmt: skip
    """Puts one file; returns what was sent of it, None where it already exists, or gone here."""
    try:
        descriptor = open_to_read(run.root / path, below=run.root)
    except OSError:
        return None  # removed meanwhile, or no file any more
    with os.fdopen(descriptor, "rb"):
        found = os.fstat(descriptor)
        state = (found.st_size, found.st_mtime_ns)
        if before == state:
            return None
        target = f"{root}/{path}"
        names = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        if not set(names) & set(_STORES_WITHOUT_FOLDERS):
            fs.mkdirs(target.rpartition("/")[0], exist_ok=True)
        fs.put_file(f"/proc/self/fd/{descriptor}", target)  # by its path it could be a link by now
        return state


def _newest_run(fs: Any, root: str, address: str) -> str:  # noqa: ANN401
    """The path of the run at an address, or of the newest one below it."""
    fs.invalidate_cache()
    if fs.exists(f"{root}/{MANIFEST_NAME}"):
        return root
    folders = list[str]()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        folders = [name.rstrip("/") for name in fs.ls(root, detail=False)]
    starts: list[tuple[int, str]] = []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            start = _read_manifest(fs, folder).get("start_wall_ns")
            starts.append((start if isinstance(start, int) else 0, folder))
    if not starts:
        raise RunNotFoundError(f"{mask_text(address)}: no haiprof run there")
    return max(starts)[1]
