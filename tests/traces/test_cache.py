"""A cache is found again, shared, rebuilt when it does not fit, and never wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from haiprof.errors import TraceFormatError
from haiprof.traces import cache
from haiprof.traces.cache import TraceColumns, content_key, open_columns
from haiprof.traces.load import read_trace
from haiprof.traces.tables import TABLES
from haiprof.traces.trace import Trace
from tests.traces.texts import compact, kernel, op, pretty


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace in a folder that can be written."""
    path = tmp_path / "traces" / "rank0.json"
    path.parent.mkdir()
    path.write_text(pretty([op("a"), kernel("k", bytes=9), op("b", ts=150)], schemaVersion=1))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which files have been read."""
    found: list[Path] = []

    def counted(path: Path, sink: object) -> object:
        found.append(path)
        return read_trace(path, sink)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "read_trace", counted)
    return found


def folder_of(path: Path) -> Path:
    return cache.cache_folders(path, content_key(path))[0]


def names(columns: TraceColumns) -> list[str]:
    return columns.table("ops")["name"].cast(pl.String).to_list()


def test_second_opening_reads_the_cache(trace: Path, reads: list[Path]) -> None:
    first, second = open_columns(trace), open_columns(trace)
    assert reads == [trace]
    assert names(first) == names(second) == ["a", "b"]
    assert first.report == second.report
    assert second.metadata == {"schemaVersion": 1}
    assert second.report.path == str(trace)


def test_tables_have_all_columns_and_types_even_when_empty(trace: Path) -> None:
    types = {"i64": pl.Int64, "f64": pl.Float64, "str": pl.Enum}
    for columns in (open_columns(trace), open_columns(trace)):
        for table, expected in TABLES.items():
            schema = columns.table(table).schema
            assert list(schema) == [column.name for column in expected]
            for column in expected:
                assert schema[column.name] == types[column.type]


def test_parts_together_are_the_table(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PART_ROWS", 100)
    monkeypatch.setattr("haiprof.traces.load.BATCH_ROWS", 10)
    monkeypatch.setattr("haiprof.traces.load.NATIVE_ROWS", 10)
    monkeypatch.setattr("haiprof.traces.text.PIECE_BYTES", 5000)
    args = [{"Fwd thread id": 1}] + [{}] * 5000  # a column that only the first part has
    trace.write_text(compact([op(f"op{n % 3}", ts=n, **more) for n, more in enumerate(args)]))
    columns = open_columns(trace)
    parts = list(columns.parts("ops"))
    assert len(parts) > 10
    table = columns.table("ops")
    assert pl.concat(parts).equals(table)
    assert table["ts_ns"].to_list() == [n * 1000 for n in range(5001)]
    assert table["forward_tid"].to_list() == [1] + [None] * 5000
    assert table["name"].cast(pl.String).to_list() == [f"op{n % 3}" for n in range(5001)]


def test_changed_file_is_read_anew_and_its_old_cache_dropped(
    trace: Path, reads: list[Path]
) -> None:
    open_columns(trace)
    stamp, text = trace.stat().st_mtime_ns, trace.read_text()
    trace.write_text(text.replace('"a"', '"c"'))
    os.utime(trace, ns=(stamp, stamp))  # of the same size, and as if never touched
    assert names(open_columns(trace)) == ["c", "b"]
    assert len(reads) == 2
    assert len(list(folder_of(trace).parent.iterdir())) == 1


@pytest.mark.parametrize(
    "damage", ["meta", "meta json", "cut part", "bits", "no part", "texts", "no folder"]
)
def test_damaged_cache_is_built_anew(trace: Path, damage: str) -> None:
    opened = open_columns(trace)
    folder = folder_of(trace)
    part, meta = folder / "ops.00000.arrow", folder / "trace.json"
    data = part.read_bytes()
    if damage == "meta":
        meta.write_text(meta.read_text()[:50])
    elif damage == "meta json":
        meta.write_text(json.dumps({"metadata": {}, "parts": {}}))
    elif damage == "cut part":
        part.write_bytes(data[:-9])
    elif damage == "bits":
        part.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    elif damage == "no part":
        part.unlink()
    elif damage == "texts":
        (folder / "texts.00000.arrow").write_bytes(b"")
    else:
        shutil.rmtree(folder)
    assert names(opened) == ["a", "b"]  # opened before, read after
    assert names(open_columns(trace)) == ["a", "b"]
    assert names(open_columns(trace)) == ["a", "b"]
    assert folder.is_dir()
    assert len(list(folder.parent.iterdir())) == 1


def test_cache_of_another_version_is_left_alone_and_not_used(
    trace: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_columns(trace)
    monkeypatch.setattr(cache, "TRACE_VERSION", 99)
    open_columns(trace)
    assert len(reads) == 2


def test_file_that_changes_after_opening_is_an_error_not_a_mixture(trace: Path) -> None:
    opened = open_columns(trace)
    trace.write_text(pretty([op("new")]))
    shutil.rmtree(folder_of(trace).parent, ignore_errors=True)
    with pytest.raises(TraceFormatError, match="changed since it was opened"):
        opened.table("ops")


def test_file_that_changes_while_it_is_read_is_an_error(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(path: Path, sink: object) -> object:
        found = read_trace(path, sink)  # type: ignore[arg-type]
        path.write_text(path.read_text() + " ")
        return found

    monkeypatch.setattr(cache, "read_trace", touched)
    with pytest.raises(TraceFormatError, match="changed while it was read"):
        open_columns(trace)
    assert list(folder_of(trace).parent.iterdir()) == []


def test_read_only_folder_is_left_alone(trace: Path, reads: list[Path]) -> None:
    trace.parent.chmod(0o500)
    try:
        assert names(open_columns(trace)) == ["a", "b"]
        assert names(open_columns(trace)) == ["a", "b"]
        assert list(trace.parent.iterdir()) == [trace]
        assert len(reads) == 1
    finally:
        trace.parent.chmod(0o700)


@pytest.mark.parametrize("home", ["no home", "home cannot be written", "full"])
def test_without_a_place_for_a_cache_columns_stay_in_memory(
    trace: Path, home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace.parent.chmod(0o500)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where a folder would have to be")
    if home == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    elif home == "home cannot be written":
        monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    else:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(cache._FolderParts, "keep", full)
    try:
        columns = open_columns(trace)
        assert names(columns) == ["a", "b"]
        assert columns.table("gpu")["bytes"].to_list() == [9]
        assert columns.table("python").is_empty()
        assert columns.metadata == {"schemaVersion": 1}
        assert columns.report.path == str(trace)
    finally:
        trace.parent.chmod(0o700)


def test_unfinished_and_unused_caches_are_dropped_in_time(trace: Path) -> None:
    trace.parent.chmod(0o500)
    home = cache.cache_folders(trace, "x")[1].parent
    old, fresh, dead = home / "1-old", home / "1-fresh", home / ".building-dead"
    for folder in (old, fresh, dead):
        (folder / "inside").mkdir(parents=True)
    then = time.time() - 40 * 24 * 3600
    for folder in (old, dead):
        os.utime(folder, (then, then))
    try:
        open_columns(trace)
    finally:
        trace.parent.chmod(0o700)
    assert {entry.name for entry in home.iterdir()} == {"1-fresh", content_key(trace)}


@pytest.mark.parametrize(
    "name", ["a b.json", "[1-3]*?.json", "new\nline.json", "-x.json", "~.json", "\u00fc\u202e.json",
             "a" * 200 + ".json", "q\"'$(x).json", "%s{}.json", os.fsdecode(b"\xff\xfe.json")]
)  # fmt: skip
def test_file_names_with_odd_characters_are_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(compact([op("a"), kernel("k")]))
    for _ in range(2):
        assert names(open_columns(path)) == ["a"]
    assert open_columns(path).report.path == str(path)


_READER = """
import sys
from pathlib import Path
from haiprof.traces.trace import Trace
for _ in range(5):
    trace = Trace(Path(sys.argv[1]))
    assert trace.ops.height == 4000 and trace.gpu.height == 4000, trace.report
    assert trace.ops["dur_ns"].sum() == 4000 * 5000
"""


def test_processes_build_and_read_the_same_cache_at_once(trace: Path) -> None:
    trace.write_text(compact([each for n in range(4000) for each in (op(ts=n), kernel(ts=n))]))
    command = [sys.executable, "-c", _READER, str(trace)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    breaker = folder_of(trace)
    while any(worker.poll() is None for worker in workers):  # somebody cleans up meanwhile
        shutil.rmtree(breaker, ignore_errors=True)
        time.sleep(0.05)
    for worker in workers:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors.decode()
    assert names(open_columns(trace))
    assert not list(breaker.parent.glob(".building-*"))


def test_tables_are_sorted_by_start_with_the_longer_first(trace: Path) -> None:
    events = [op("b", ts=5, dur=1), op("outer", ts=1, dur=9), op("inner", ts=1, dur=2),
              op("first", ts=0), op("same", ts=1, dur=2), op("longest", ts=1, dur=20)]  # fmt: skip
    trace.write_text(compact(events))
    found = Trace(trace).ops
    assert found["name"].cast(pl.String).to_list() == [
        "first", "longest", "outer", "inner", "same", "b",
    ]  # fmt: skip
    assert found["event"].to_list() == [3, 5, 1, 2, 4, 0]
    assert found["forward_tid"].null_count() == 6
