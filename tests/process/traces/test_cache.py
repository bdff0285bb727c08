"""A cache is found again, shared, rebuilt when it does not fit, and never wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import polars as pl
import pytest

from haiprof.base.errors import TraceFormatError, UsageError
from haiprof.trace_format.kineto import cache
from haiprof.trace_format.kineto import cache as user_cache
from haiprof.trace_format.kineto.cache import TraceColumns, content_key, open_columns
from haiprof.trace_format.kineto.events import TABLES
from haiprof.trace_format.kineto.load import read_trace
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.traces.texts import compact, kernel, op, pretty


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


def entry_of(path: Path) -> Path:
    return user_cache.trace_folder() / f"{content_key(path)}.columns"


def entries() -> list[str]:
    return sorted(entry.name for entry in user_cache.trace_folder().iterdir())


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
    monkeypatch.setattr("haiprof.trace_format.kineto.load.NATIVE_ROWS", 10)
    monkeypatch.setattr("haiprof.trace_format.kineto.text.PIECE_BYTES", 5000)
    args = [{"Fwd thread id": 1}] + [{}] * 5000  # a column that only the first part has
    trace.write_text(compact([op(f"op{n % 3}", ts=n, **more) for n, more in enumerate(args)]))
    columns = open_columns(trace)
    table = columns.table("ops")
    assert len(columns._parts["ops"]) > 10
    assert table["ts_ns"].to_list() == [n * 1000 for n in range(5001)]
    assert table["forward_tid"].to_list() == [1] + [None] * 5000
    assert table["name"].cast(pl.String).to_list() == [f"op{n % 3}" for n in range(5001)]


def test_changed_file_is_read_anew(trace: Path, reads: list[Path]) -> None:
    open_columns(trace)
    stamp, text = trace.stat().st_mtime_ns, trace.read_text()
    trace.write_text(text.replace('"a"', '"c"'))
    os.utime(trace, ns=(stamp, stamp))  # of the same size, and as if never touched
    assert names(open_columns(trace)) == ["c", "b"]
    assert len(reads) == 2


def damaged(data: bytes, damage: str) -> bytes:
    """A cache in which something has gone wrong."""
    length = int.from_bytes(data[-12:-4], "little")
    index = len(data) - 12 - length
    if damage == "bits":
        return data[:200] + bytes([data[200] ^ 1]) + data[201:]
    if damage == "other content":
        text = json.dumps({"metadata": {}, "parts": {}}).encode()
        return text + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
    if damage == "endless":
        return data[:-12] + (1 << 62).to_bytes(8, "little") + data[-4:]
    cut = {"cut": len(data) - 9, "no index": index, "empty": 0, "cut index": index + 50}
    return data[: cut[damage]]


@pytest.mark.parametrize(
    "damage",
    ["cut", "no index", "cut index", "empty", "bits", "other content", "endless", "no entry",
     "no folder"],
)  # fmt: skip
def test_damaged_cache_is_built_anew(trace: Path, damage: str) -> None:
    opened = open_columns(trace)
    entry = entry_of(trace)
    if damage == "no folder":
        shutil.rmtree(entry.parent)
    elif damage == "no entry":
        entry.unlink()
    else:
        entry.write_bytes(damaged(entry.read_bytes(), damage))
    assert names(opened) == ["a", "b"]  # opened before, read after
    assert names(open_columns(trace)) == ["a", "b"]
    assert names(open_columns(trace)) == ["a", "b"]
    assert entries() == [entry.name]


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
    shutil.rmtree(user_cache.trace_folder())
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
    assert entries() == []


@pytest.mark.parametrize("home", ["no home", "home cannot be written", "full", "not wanted"])
def test_without_a_place_for_a_cache_columns_stay_in_memory(
    trace: Path, home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where a folder would have to be")
    if home == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    elif home == "home cannot be written":
        monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    elif home == "not wanted":
        monkeypatch.setenv("HAIPROF_CACHE_LIMIT", "0")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/full")
    columns = open_columns(trace)
    assert names(columns) == ["a", "b"]
    assert columns.table("gpu")["bytes"].to_list() == [9]
    assert columns.table("python").is_empty()
    assert columns.metadata == {"schemaVersion": 1}
    assert columns.report.path == str(trace)
    assert home == "no home" or not user_cache.trace_folder().exists()


def test_what_was_used_longest_ago_makes_room(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [trace]
    for number in range(3):
        traces.append(tmp_path / f"{number}.json")
        traces[-1].write_text(pretty([op(f"n{number}")]))
    for age, path in enumerate(traces[:3]):
        open_columns(path)
        os.utime(entry_of(path), (1000 + age, 1000 + age))
    open_columns(traces[0])  # so that it is not the oldest any more
    sizes = [entry_of(path).stat().st_size for path in traces[:3]]
    monkeypatch.setenv("HAIPROF_CACHE_LIMIT", str((sum(sizes) + 100) / 1e6))
    open_columns(traces[3])
    kept = [entry_of(path).exists() for path in traces]
    assert kept == [True, False, True, True]
    monkeypatch.setenv("HAIPROF_CACHE_LIMIT", "0.000001")  # the newest one stays all the same
    entry_of(traces[3]).unlink()
    open_columns(traces[3])
    assert entries() == [entry_of(traces[3]).name]


def test_what_the_dead_left_goes_in_time_and_what_is_not_ours_stays(trace: Path) -> None:
    folder = user_cache.trace_folder()
    (folder / "1-old-folder").mkdir(parents=True)
    for parent in (folder, folder.parent):
        parent.chmod(0o700)
    dead, fresh = (folder / f".x.columns.{digit * 16}" for digit in "ab")
    for path in (dead, fresh, folder / "notes.txt"):
        path.write_text("")
    then = time.time() - 40 * 24 * 3600
    for path in (dead, folder / "1-old-folder", folder / "notes.txt"):
        os.utime(path, (then, then))
    open_columns(trace)
    assert set(entries()) == {fresh.name, "1-old-folder", "notes.txt", entry_of(trace).name}


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_an_error(
    trace: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAIPROF_CACHE_LIMIT", text)
    with pytest.raises(UsageError, match="HAIPROF_CACHE_LIMIT"):
        open_columns(trace)


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
from haiprof.trace_format.kineto.rank_trace import Trace
for _ in range(5):
    trace = Trace(Path(sys.argv[1]))
    assert trace.ops.height == 4000 and trace.gpu.height == 4000, trace.report
    assert trace.ops["dur_ns"].sum() == 4000 * 5000
"""


def test_processes_build_and_read_the_same_cache_at_once(trace: Path) -> None:
    trace.write_text(compact([each for n in range(4000) for each in (op(ts=n), kernel(ts=n))]))
    command = [sys.executable, "-c", _READER, str(trace)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    breaker = user_cache.trace_folder()
    while any(worker.poll() is None for worker in workers):  # somebody cleans up meanwhile
        shutil.rmtree(breaker, ignore_errors=True)
        time.sleep(0.05)
    for worker in workers:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors.decode()
    assert names(open_columns(trace))
    assert entries() == [entry_of(trace).name]


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
